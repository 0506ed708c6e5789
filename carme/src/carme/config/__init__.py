"""The site's configuration, `/etc/carme/carme.toml`, and its secrets."""

from carme.config.settings import (
    DEFAULT_PATH,
    BookingSettings,
    BrokerSettings,
    HubSettings,
    ImageSettings,
    PortalSettings,
    QuotaSettings,
    SecretSettings,
    SessionSettings,
    Settings,
    SiteSettings,
    SlurmSettings,
    load,
)

__all__ = [
    "DEFAULT_PATH",
    "BookingSettings",
    "BrokerSettings",
    "HubSettings",
    "ImageSettings",
    "PortalSettings",
    "QuotaSettings",
    "SecretSettings",
    "SessionSettings",
    "Settings",
    "SiteSettings",
    "SlurmSettings",
    "load",
]
