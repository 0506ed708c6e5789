"""Django's settings, all taken from the site's `carme.toml` and its secrets."""

import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from carme import config
from carme.errors import ConfigError

SITE = config.load()
"""The site's configuration; the portal's code reads it as `django.conf.settings.SITE`."""


PROCESSES = SITE.portal.processes or min(4, len(os.sched_getaffinity(0)))
"""So many processes serve the portal; unless the site says otherwise, some cores are left to the head's other
services."""
PAGE_THREADS = max(8, 32 // PROCESSES)
"""So many pages are made at once in one process; who comes then waits for a moment."""
SESSIONS_AT_ONCE = 16
"""For so many sessions `carme-portal sync` asks JupyterHub at the same time."""
# What a process does beside that: the portal says who may enter, the sync follows the broker.
_OTHER_CONNECTIONS = 4


def database_of(url: str) -> dict[str, Any]:
    """Django's database entry for `sqlite:////absolute/path` or `postgresql://user@host/name`."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite" and parts.path.startswith("//"):
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": unquote(parts.path[1:]),
            "OPTIONS": {
                # Readers never wait for a writer; a transaction that will write says so at its start, so
                # that two of them queue up instead of one failing half-way.
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
                "transaction_mode": "IMMEDIATE",
                "timeout": 20,
            },
        }
    if parts.scheme == "postgresql" and parts.path.strip("/"):
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": unquote(parts.path.lstrip("/")),
            "USER": unquote(parts.username or ""),
            "PASSWORD": unquote(parts.password or ""),
            "HOST": unquote(parts.hostname or ""),
            "PORT": str(parts.port or ""),
            # PostgreSQL allows 100 connections by default. The pool makes them when
            # they are needed: one for each thread, which may keep it while JupyterHub is queried.
            "OPTIONS": {
                **dict(parse_qsl(parts.query)),
                "pool": {
                    "min_size": 1,
                    "max_size": max(PAGE_THREADS, SESSIONS_AT_ONCE) + _OTHER_CONNECTIONS,
                    "timeout": 10,
                },
            },
        }
    raise ConfigError(
        f"'database' in [portal] must be like 'sqlite:////var/lib/carme/portal/portal.sqlite3' or "
        f"'postgresql://user@host/name', not {url!r}.",
        "Correct it in carme.toml.",
    )


_url = urlsplit(SITE.site.url)
_secure = _url.scheme == "https"
_listen_host, _, _listen_port = SITE.portal.listen.rpartition(":")

BASE_DIR = Path(__file__).parent
SECRET_KEY = SITE.secret("portal-secret-key")
DEBUG = False
# The hub reaches the identity provider past the reverse proxy, on the portal's own address.
ALLOWED_HOSTS = [_url.hostname, _listen_host]
CSRF_TRUSTED_ORIGINS = [SITE.site.url]
ROOT_URLCONF = "carme_webui.urls"
ASGI_APPLICATION = "carme_webui.asgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TEST_RUNNER = "django.test.runner.DiscoverRunner"

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "carme_webui.accounts",
    "carme_webui.jobs",
    "carme_webui.sessions",
    "carme_webui.bookings",
    "carme_webui.profile",
    "carme_webui.api",
    "carme_webui.projects",
    "carme_webui.announcements",
    "carme_webui.images",
    "carme_webui.administration",
    "auditlog",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.idp.oidc",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "carme_webui.security.content_security_policy",
    "carme_webui.api.problems.as_problems",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "carme_webui.notifier.read_versions_once",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "carme_webui.accounts.language.use_chosen_language",
    "auditlog.middleware.AuditlogMiddleware",
    "carme_webui.administration.impersonation.impersonating",
    "carme_webui.accounts.zone.use_reader_zone",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "carme_webui.pages.without_empty_refusals",
    "allauth.account.middleware.AccountMiddleware",
    "carme_webui.accounts.login.LoginRequired",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "carme_webui.pages.site",
            ],
        },
    }
]

# --- state -----------------------------------------------------------------------------------------------

DATABASES = {"default": database_of(SITE.database("portal"))}
CACHES = {
    # In the database, so that rate limits hold for all processes and a stopped Redis locks nobody out.
    "default": {
        "BACKEND": "django.core.cache.backends.db.DatabaseCache",
        "LOCATION": "portal_cache",
        "OPTIONS": {"MAX_ENTRIES": 100_000},
    },
    # What many pages of a process have in common, for some seconds.
    "pages": {
        "BACKEND": "carme_webui.caches.ObjectCache",
        "LOCATION": "pages",
        "OPTIONS": {"MAX_ENTRIES": 2_000},
    },
    # The calendar's tables, each of up to half a megabyte.
    "calendars": {
        "BACKEND": "carme_webui.caches.ObjectCache",
        "LOCATION": "calendars",
        "OPTIONS": {"MAX_ENTRIES": 128},
    },
}
STATIC_URL = "/static/"
STATIC_ROOT = SITE.portal.state_directory / "static"
# The pictures of the documentation are for the help pages.
STATICFILES_DIRS = [BASE_DIR / "static", ("docs", BASE_DIR / "documentation/pictures")]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "whitenoise.storage.CompressedManifestStaticFilesStorage"},
}

# --- security --------------------------------------------------------------------------------------------

SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
# Not for localhost: a browser would then refuse every other plain server on that name as well.
SECURE_HSTS_SECONDS = 31_536_000 if _secure and _url.hostname != "localhost" else 0
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
# "__Host-": the browser takes the cookie from this origin only, over TLS only.
_prefix = "__Host-" if _secure else ""
SESSION_COOKIE_NAME = f"{_prefix}carme-session"
SESSION_COOKIE_SECURE = _secure
SESSION_COOKIE_AGE = 7 * 24 * 3600
CSRF_COOKIE_NAME = f"{_prefix}carme-csrf"
CSRF_COOKIE_SECURE = _secure
CSRF_COOKIE_HTTPONLY = True
CSRF_FAILURE_VIEW = "carme_webui.pages.csrf_failure"
DATA_UPLOAD_MAX_MEMORY_SIZE = 1024 * 1024

# --- accounts --------------------------------------------------------------------------------------------

AUTH_USER_MODEL = "accounts.User"
AUTHENTICATION_BACKENDS = ["allauth.account.auth_backends.AuthenticationBackend"]
if SITE.ldap.url:
    AUTHENTICATION_BACKENDS.append("carme_webui.accounts.directory.LdapBackend")
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.ScryptPasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
]
_rules = "django.contrib.auth.password_validation"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"{_rules}.UserAttributeSimilarityValidator"},
    {"NAME": f"{_rules}.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": f"{_rules}.CommonPasswordValidator"},
]
LOGIN_URL = "account_login"
LOGIN_REDIRECT_URL = "dashboard"
ACCOUNT_ADAPTER = "carme_webui.accounts.login.AccountAdapter"
ACCOUNT_LOGIN_METHODS = {"username"}
ACCOUNT_SIGNUP_FIELDS = ["username*", "password1*"]
ACCOUNT_EMAIL_VERIFICATION = "none"
ACCOUNT_LOGOUT_REDIRECT_URL = "account_login"
ACCOUNT_SESSION_REMEMBER = False
ACCOUNT_RATE_LIMITS = {"login": "30/m/ip", "login_failed": "20/m/ip,5/5m/key"}
MFA_ADAPTER = "carme_webui.accounts.second_factor.SecondFactorAdapter"
MFA_SUPPORTED_TYPES = ["totp", "webauthn", "recovery_codes"]
MFA_PASSKEY_LOGIN_ENABLED = True
MFA_FORMS = {
    name: f"carme_webui.accounts.passkeys.{form}"
    for name, form in [
        ("add_webauthn", "AddPasskey"),
        ("authenticate_webauthn", "AuthenticatePasskey"),
        ("login_webauthn", "LoginPasskey"),
        ("reauthenticate_webauthn", "ReauthenticatePasskey"),
    ]
}
IDP_OIDC_ADAPTER = "carme_webui.accounts.identity.IdentityAdapter"
IDP_OIDC_PRIVATE_KEY = SITE.secret("oidc-signing-key")

# --- mail ------------------------------------------------------------------------------------------------

# Without a server nothing is sent, and pages do not claim that it is.
_mail = SITE.mail
EMAIL_BACKEND = f"django.core.mail.backends.{'smtp' if _mail.server else 'dummy'}.EmailBackend"
EMAIL_HOST, EMAIL_PORT, EMAIL_TIMEOUT = _mail.server, _mail.port, 20
EMAIL_USE_TLS, EMAIL_USE_SSL = _mail.security == "starttls", _mail.security == "tls"
EMAIL_HOST_USER = _mail.user
EMAIL_HOST_PASSWORD = SITE.secret("mail-password") if _mail.server and _mail.user else ""
DEFAULT_FROM_EMAIL = SERVER_EMAIL = _mail.sender or f"carme@{_url.hostname}"

# --- language and time -----------------------------------------------------------------------------------

LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("de", "Deutsch")]
LOCALE_PATHS = [BASE_DIR / "locale"]
USE_I18N = True
USE_TZ = True
TIME_ZONE = "UTC"

# --- background work -------------------------------------------------------------------------------------

CELERY_BROKER_URL = SITE.portal.redis
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
CELERY_BROKER_TRANSPORT_OPTIONS = {"global_keyprefix": "carme:"}
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_POOL = "threads"
CELERY_WORKER_CONCURRENCY = 2
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_TIMEZONE = "UTC"
CELERY_BEAT_SCHEDULE_FILENAME = str(SITE.portal.state_directory / "celerybeat-schedule")
# Each entry expires before its successor is due: a slow worker skips rounds instead of piling them up.
CELERY_BEAT_SCHEDULE = {
    name: {"task": task, "schedule": seconds, "options": {"expires": seconds}}
    for name, task, seconds in [
        ("clear expired logins", "carme_webui.accounts.tasks.clear_expired", 3600.0),
        ("reconcile bookings", "carme_webui.bookings.tasks.reconcile_bookings", 20.0),
        ("read the accounting", "carme_webui.jobs.tasks.mirror_past", 60.0),
        ("settle builds of images", "carme_webui.images.tasks.settle_builds", 20.0),
        ("reconcile projects", "carme_webui.projects.tasks.reconcile_projects", 30.0),
        ("reconcile maintenance", "carme_webui.announcements.tasks.reconcile_maintenance", 30.0),
        ("send mails", "carme_webui.profile.tasks.send_mails", 15.0),
        ("warn of ends", "carme_webui.sessions.tasks.warn", 30.0),
        ("warn of waste", "carme_webui.jobs.tasks.warn", 30.0),
    ]
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(levelname)s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
    # One line per request of a hub's or a page's poll says nothing.
    "loggers": {"httpx": {"level": "WARNING"}, "celery.app.trace": {"level": "WARNING"}},
}
