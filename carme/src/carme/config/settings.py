"""The settings' types, and how the file is read."""

import os
import re
import tomllib
from ipaddress import ip_interface
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from carme.config.fields import AbsolutePath, BasePath, Listen, ServerAddress, TimeZone, Url, Word
from carme.config.places import table_of
from carme.errors import ConfigError
from carme.wording import nearest, problem

DEFAULT_PATH = Path("/etc/carme/carme.toml")

_SECRET_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SiteSettings(_Table):
    """`[site]`: how the site calls itself, where users find it, and by which clock they live."""

    name: Word = "Carme"
    url: Url
    time_zone: TimeZone = "UTC"


class SlurmSettings(_Table):
    """`[slurm]`: the cluster; `poll_seconds` is the time between two polls of the queue.

    `adapter`: how Slurm is read, by its `commands`, by `pyslurm` or by slurmrestd (`rest`); `auto` takes
    pyslurm where it matches, else the commands. `rest_address` is slurmrestd's socket or URL, and
    `rest_token_file` holds a token of Slurm's user for it.
    """

    cluster: Word
    default_partition: Word | None = None
    default_account: Word | None = None
    poll_seconds: float = Field(default=1.25, ge=0.1, le=60)
    adapter: Literal["auto", "commands", "pyslurm", "rest"] = "auto"
    rest_address: ServerAddress | None = None
    rest_token_file: AbsolutePath | None = None

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.adapter == "rest" and self.rest_address is None:
            raise ValueError(
                "has adapter = 'rest' but no rest_address, such as '/run/slurmrestd/slurmrestd.socket'"
            )
        if self.rest_address and not self.rest_address.startswith("/") and self.rest_token_file is None:
            raise ValueError("needs rest_token_file: only a socket says who asks")
        return self


class BrokerSettings(_Table):
    """`[broker]`: its socket, who may act for users, and where it keeps what it knows about sessions.

    `observers` are accounts that may ask for figures of all users, and for nothing else.
    """

    socket: AbsolutePath = Path("/run/carme/broker.sock")
    services: list[Word] = ["carme-hub", "carme-portal"]
    observers: list[Word] = ["carme-exporter"]
    minimum_uid: int = Field(default=1000, ge=1)
    audit_log: AbsolutePath = Path("/var/log/carme/audit.jsonl")
    state_directory: AbsolutePath = Path("/var/lib/carme/broker")


class ImageSettings(_Table):
    """`[images]`: where job containers lie, and what the job may use that builds a user's own one.

    Attributes:
        build_minutes: How long a build may take.
        build_cpus: Its processors.
        build_memory_mb: Its memory, in MiB.
    """

    directory: AbsolutePath = Path("/srv/carme/images")
    default: Word = "torch"
    build_minutes: int = Field(default=120, ge=1)
    build_cpus: int = Field(default=2, ge=1)
    build_memory_mb: int = Field(default=4096, ge=1024)


class HardwareSettings(_Table):
    """`[[sessions.hardware]]`: hardware that the start form offers as a card."""

    title: str = ""
    gpus_per_node: int = Field(default=0, ge=0)
    nodes: int = Field(default=1, ge=1)
    gpu_type: str = ""
    partition: str = ""


class SessionSettings(_Table):
    """`[sessions]`: limits of interactive sessions, and host paths bound into every job container.

    A session whose kernels, GPUs and ranks were all idle for `idle_minutes` (0: no limit) is stopped, having
    been warned `idle_warning_minutes` before, or as soon as it is idle where that is longer than the limit.
    `extend`: owners may prolong it, up to `maximum_minutes` since its start. `hardware`: the cards of the
    start form; without any it offers a processor, one GPU and a whole node.
    """

    default_minutes: int = Field(default=60, ge=1)
    maximum_minutes: int = Field(default=1440, ge=1)
    idle_minutes: int = Field(default=0, ge=0)
    idle_warning_minutes: int = Field(default=15, ge=1)
    extend: bool = True
    bind: list[AbsolutePath] = []
    hardware: list[HardwareSettings] = []

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.default_minutes > self.maximum_minutes:
            raise ValueError(
                f"has default_minutes = {self.default_minutes}, more than "
                f"maximum_minutes = {self.maximum_minutes}"
            )
        return self


class ScalingSettings(_Table):
    """`[scaling]`: what is required of jobs that have a prediction of how they scale.

    `efficiency_percent`: below this predicted efficiency a job needs a reason; 0: none does.
    """

    efficiency_percent: int = Field(default=0, ge=0, le=100)


class BookingSettings(_Table):
    """`[bookings]`: GPUs that users book for later, in the portal's calendar.

    Attributes:
        enabled: Whether users may book at all.
        longest_minutes: The longest booking.
        notice_minutes: How long before its start a booking must be made.
        horizon_days: How far ahead one may book.
        at_a_time: Bookings of one user that are not over.
        share_percent: Of a partition's GPUs of one type, how many may be booked at any moment.
        gpu_hours: What one user may book in `budget_days`, those to come included; 0: no limit.
        approval_gpu_hours: A booking of more than this needs a manager's approval; 0: none does.
        grace_minutes: A booking in which nothing has run for so long since its start is given back; 0: never.
    """

    enabled: bool = False
    longest_minutes: int = Field(default=1440, ge=1)
    notice_minutes: int = Field(default=5, ge=0)
    horizon_days: int = Field(default=28, ge=1, le=365)
    at_a_time: int = Field(default=3, ge=1)
    share_percent: int = Field(default=50, ge=1, le=100)
    gpu_hours: int = Field(default=0, ge=0)
    budget_days: int = Field(default=28, ge=1, le=365)
    approval_gpu_hours: int = Field(default=0, ge=0)
    grace_minutes: int = Field(default=15, ge=0)


class _BookingOverrides(_Table):
    """What differs from `[bookings]`; what is None does not."""

    longest_minutes: int | None = Field(default=None, ge=1)
    notice_minutes: int | None = Field(default=None, ge=0)
    horizon_days: int | None = Field(default=None, ge=1, le=365)
    at_a_time: int | None = Field(default=None, ge=1)
    share_percent: int | None = Field(default=None, ge=1, le=100)
    gpu_hours: int | None = Field(default=None, ge=0)
    budget_days: int | None = Field(default=None, ge=1, le=365)
    approval_gpu_hours: int | None = Field(default=None, ge=0)
    grace_minutes: int | None = Field(default=None, ge=0)


class PartitionBookingSettings(_BookingOverrides):
    """`[partitions.NAME.bookings]`: what differs from `[bookings]` in one partition."""

    enabled: bool | None = None


class ProjectBookingSettings(_BookingOverrides):
    """`[projects.NAME.bookings]`: what differs from `[bookings]`, and from a partition's, for one project.

    Here `at_a_time`, `share_percent` and `gpu_hours` count what anybody has booked for the project;
    the partition's share holds besides.
    """


class ProjectSettings(_Table):
    """`[projects.NAME]`: what differs for one project; what it may use is set in the portal."""

    bookings: ProjectBookingSettings = ProjectBookingSettings()


class PartitionSettings(_Table):
    """`[partitions.NAME]`: what differs from `[sessions]` and `[bookings]` in one partition."""

    maximum_minutes: int | None = Field(default=None, ge=1)
    idle_minutes: int | None = Field(default=None, ge=0)
    idle_warning_minutes: int | None = Field(default=None, ge=1)
    extend: bool | None = None
    bookings: PartitionBookingSettings = PartitionBookingSettings()


class StagingSettings(_Table):
    """`[staging]`: data that is brought to jobs.

    Attributes:
        cache: Folder on each node's own disk, for copies that are kept and jobs' private folders.
        cache_gb: What all copies on a node may take, in GiB; 0: all but a twentieth of the disk.
        scratch: Shared folder for copies that all nodes use; none: the target `scratch` is refused.
        minutes: The longest time that copying before a job's start may take.
        datasets: Folder of the site's catalogue of datasets, the same on all hosts.
        beeond: Folder of nodes where each job's own BeeGFS is mounted; none: the target `beeond` is refused.
    """

    cache: AbsolutePath = Path("/var/cache/carme/data")
    cache_gb: int = Field(default=0, ge=0)
    scratch: AbsolutePath | None = None
    minutes: int = Field(default=720, ge=1)
    datasets: AbsolutePath = Path("/srv/carme/datasets")
    beeond: AbsolutePath | None = None


class HubSettings(_Table):
    """`[hub]`: JupyterHub and its proxy."""

    listen: Url = "https://127.0.0.1:8081"
    base_path: BasePath = "/jupyter/"
    proxy_url: Url = "http://127.0.0.1:8000"
    proxy_api_url: Url = "https://127.0.0.1:8001"
    database: Word = "sqlite:////var/lib/carme/hub/hub.sqlite"
    state_directory: AbsolutePath = Path("/var/lib/carme/hub")


class PortalSettings(_Table):
    """`[portal]`: the Django portal.

    `history_days`: how far back the history of jobs is read from Slurm's accounting. `requests_per_minute`:
    what one token, or who shows none that is valid, may ask of the API. `processes`: how many serve its
    pages; 0: one for each core, but at most four.
    """

    listen: Listen = "127.0.0.1:8100"
    database: Word = "sqlite:////var/lib/carme/portal/portal.sqlite3"
    redis: Word = "redis+socket:///run/redis/redis-server.sock"
    state_directory: AbsolutePath = Path("/var/lib/carme/portal")
    history_days: int = Field(default=1095, ge=1, le=36_500)
    requests_per_minute: int = Field(default=600, ge=1)
    processes: int = Field(default=0, ge=0, le=64)


class HeadsSettings(_Table):
    """`[heads]`: the hosts that may be the active head; empty where there is one head.

    Attributes:
        names: The hosts, as the inventory names them.
        address: The address that moves with the active head, like `10.0.0.9/24`; empty: the site moves it.
        interface: The network interface that gets it.
        lease_seconds: How long a head stays the active one without a sign of life.
    """

    names: list[Word] = []
    address: str = ""
    interface: str = ""
    lease_seconds: int = Field(default=20, ge=15, le=600)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.address:
            try:
                ip_interface(self.address)
            except ValueError:
                raise ValueError(f"has the address {self.address!r}; one is like '10.0.0.9/24'") from None
        if bool(self.address) != bool(self.interface):
            raise ValueError("needs both 'address' and 'interface', or neither")
        return self


class PolicySettings(_Table):
    """`[monitoring.policy]`: what follows where alerts about a user's job fire.

    Attributes:
        alerts: Names of the rules that count; none: nobody is warned.
        warnings: How many there are, `every_minutes` apart, before a job is stopped.
        stop: Whether it is, or the rules after whose warnings it is; otherwise the audit log alone says that
            it would be.
        exempt_users, exempt_accounts, exempt_partitions: Whose and which jobs are left alone.
    """

    alerts: list[Word] = ["CarmeGpuNeverUsed", "CarmeGpuIdle"]
    warnings: int = Field(default=3, ge=1, le=100)
    every_minutes: int = Field(default=60, ge=1)
    stop: bool | list[Word] = False
    exempt_users: list[Word] = []
    exempt_accounts: list[Word] = []
    exempt_partitions: list[Word] = []

    @model_validator(mode="after")
    def _check_stop_rules(self) -> Self:
        unknown = sorted(set(self.stops_by) - set(self.alerts))
        if unknown:
            raise ValueError(f"{unknown[0]!r} in stop must be among alerts: nobody would be warned")
        return self

    @property
    def stops_by(self) -> list[str]:
        """The rules after whose warnings a job is stopped."""
        return [] if self.stop is False else self.alerts if self.stop is True else self.stop


class MonitoringSettings(_Table):
    """`[monitoring]`: the site's Prometheus, if it has one, nodes' exporters, and certificates of readers."""

    prometheus: Url | None = None
    exporter_port: int = Field(default=9750, ge=1, le=65535)
    certificates: AbsolutePath = Path("/etc/carme/monitoring/broker")
    portal_certificates: AbsolutePath = Path("/etc/carme/monitoring/portal")
    policy: PolicySettings = PolicySettings()


class OidcSettings(_Table):
    """`[oidc]`: an outside provider (OpenID Connect) at which users sign in; without `issuer` there is none.

    Attributes:
        issuer: Its address, as its tokens name it.
        client_id: What it knows the portal by; the secret is `oidc-provider-secret`.
        claim: What of its token is the name of the Unix account; never an e-mail address, which proves
            nothing.
        scope: What is requested of it.
        name: What the button is called.
    """

    issuer: str = ""
    client_id: str = ""
    claim: Word = "preferred_username"
    scope: str = "openid profile"
    name: str = "single sign-on"

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        here = re.match(r"http://(localhost|127\.0\.0\.1)(:\d+)?(/|\Z)", self.issuer)
        if self.issuer and not (here or re.match(r"https://[^/\s]+", self.issuer)):
            raise ValueError(f"has the issuer {self.issuer!r}; one is like 'https://login.example.org'")
        if self.issuer and not self.client_id:
            raise ValueError("needs 'client_id', which the provider gives")
        if "email" in self.claim:
            raise ValueError("has an e-mail address as its claim; name one that the provider vouches for")
        if "openid" not in self.scope.split():
            raise ValueError("has a scope without 'openid'")
        return self


class LdapSettings(_Table):
    """`[ldap]`: the directory whose users may sign in; without `url` there is none.

    Attributes:
        url: `ldaps://HOST[:PORT]`, or `ldap://...`, which is then encrypted by StartTLS.
        base: Where users are looked for, and below.
        filter: What finds one; `{name}` stands for the name that was typed.
        bind_dn: The name to bind with; its password is the secret `ldap-password`. Empty: anonymous.
        certificates: Authorities that the server's certificate is checked by; by default the system's.
        email, full_name: The attributes that hold these.
        admin_group: A group whose members (`member`, `uniqueMember`, `memberUid`) are administrators.
    """

    url: str = ""
    base: str = ""
    filter: str = "(uid={name})"
    bind_dn: str = ""
    certificates: AbsolutePath | None = None
    email: Word = "mail"
    full_name: Word = "cn"
    admin_group: str = ""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.url and not re.match(r"ldaps?://[^/\s]+\Z", self.url):
            raise ValueError(f"has the url {self.url!r}; one is like 'ldaps://ldap.example.org'")
        if self.url and not self.base:
            raise ValueError("needs 'base', like 'ou=people,dc=example,dc=org'")
        if "{name}" not in self.filter:
            raise ValueError("has a filter without '{name}'")
        return self


class QuotaSettings(_Table):
    """`[quotas."/PATH"]`: what a new user may keep on the file system of that folder.

    Attributes:
        limit_gb: Beyond this nothing can be written, in GiB.
        soft_gb: Beyond this nothing can be written once the file system's days of grace are over; 0: no such.
        files: How many files; 0: any number.
    """

    limit_gb: int = Field(ge=1)
    soft_gb: int = Field(default=0, ge=0)
    files: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.soft_gb > self.limit_gb:
            raise ValueError(
                f"has 'soft_gb' = {self.soft_gb}, which is more than 'limit_gb' = {self.limit_gb}"
            )
        return self


class MailSettings(_Table):
    """`[mail]`: how the portal sends mails; without `server` it sends none.

    Attributes:
        server, port: The mail server (SMTP), such as a relay of the site.
        security: `starttls`, `tls`, or `none` for a relay on the same host; certificates are checked.
        user: With what name to sign in; the password is the secret `mail-password`. Empty: without.
        sender: The address that mails come from; by default `carme@` and the site's host.
    """

    server: str = ""
    port: int = Field(default=25, ge=1, le=65_535)
    security: Literal["none", "starttls", "tls"] = "starttls"
    user: str = ""
    sender: str = ""

    @model_validator(mode="after")
    def _safe(self) -> Self:
        if self.user and self.security == "none":
            raise ValueError('would send a password in the clear; set security = "starttls" or "tls"')
        if any(sign in self.sender + self.server for sign in "\r\n"):
            raise ValueError("has a line break in 'sender' or 'server'")
        return self


class SecretSettings(_Table):
    """`[secrets]`: the folder with one file per secret."""

    directory: AbsolutePath = Path("/etc/carme/secrets")


class Settings(_Table):
    """Everything in `carme.toml`."""

    site: SiteSettings
    slurm: SlurmSettings
    broker: BrokerSettings = BrokerSettings()
    images: ImageSettings = ImageSettings()
    sessions: SessionSettings = SessionSettings()
    scaling: ScalingSettings = ScalingSettings()
    bookings: BookingSettings = BookingSettings()
    staging: StagingSettings = StagingSettings()
    partitions: dict[Word, PartitionSettings] = {}
    projects: dict[Word, ProjectSettings] = {}
    quotas: dict[AbsolutePath, QuotaSettings] = {}
    hub: HubSettings = HubSettings()
    portal: PortalSettings = PortalSettings()
    heads: HeadsSettings = HeadsSettings()
    monitoring: MonitoringSettings = MonitoringSettings()
    ldap: LdapSettings = LdapSettings()
    mail: MailSettings = MailSettings()
    oidc: OidcSettings = OidcSettings()
    secrets: SecretSettings = SecretSettings()

    def session_policy(self, partition: str) -> SessionSettings:
        """The rules for sessions in a partition: `[sessions]`, with what `[partitions.NAME]` changes."""
        own = self.partitions.get(partition, PartitionSettings())
        return self.sessions.model_copy(update=own.model_dump(exclude_none=True, exclude={"bookings"}))

    @property
    def longest_session(self) -> int:
        """The longest time of a session in any partition, in minutes."""
        own = (partition.maximum_minutes for partition in self.partitions.values())
        return max(self.sessions.maximum_minutes, *(minutes for minutes in own if minutes), 0)

    def booking_policy(self, partition: str, project: str = "") -> BookingSettings:
        """The rules for bookings in a partition: `[bookings]`, with what its own `bookings` changes.

        Args:
            project: That for which is booked, with what its `bookings` change; its share of the system is
                apart from that of all (`project_bookings`).
        """
        own = self.partitions.get(partition, PartitionSettings()).bookings
        changes = own.model_dump(exclude_none=True)
        if project:
            changes |= self.project_bookings(project).model_dump(exclude_none=True, exclude={"share_percent"})
        return self.bookings.model_copy(update=changes)

    def project_bookings(self, project: str) -> ProjectBookingSettings:
        """What differs for bookings of a project."""
        return self.projects.get(project, ProjectSettings()).bookings

    def database(self, part: Literal["hub", "portal"]) -> str:
        """The address of the database of hub or portal, with its password.

        The password is the secret `hub-database-password` or `portal-database-password`, where there is one
        and the address names a user without a password. `carme.toml`, which everybody may read, holds none.

        Raises:
            ConfigError: This account may not read the secret, or it is empty.
        """
        address = (self.hub if part == "hub" else self.portal).database
        parts, name = urlsplit(address), f"{part}-database-password"
        if not parts.username or parts.password is not None or not self._has_secret(name):
            return address
        user, _, host = parts.netloc.rpartition("@")
        password = quote(self.secret(name), safe="")
        return urlunsplit(parts._replace(netloc=f"{user}:{password}@{host}"))

    def _has_secret(self, name: str) -> bool:
        """Whether it may be there: in a folder that this account may not enter, too; `secret` says why."""
        try:
            (self.secrets.directory / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            pass
        return True

    def secret(self, name: str) -> str:
        """The value of one secret, without the line's end.

        Raises:
            ConfigError: There is no such secret, it is empty, or this account may not read it.
        """
        if not _SECRET_NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is not a valid name of a secret; names are like 'hub-api-token'.")
        path = self.secrets.directory / name
        try:
            value = path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            raise ConfigError(
                f"The secret {name!r} is missing: there is no file {path}.",
                "Run the Ansible playbook again, or write the value into that file.",
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The secret {name!r} in {path} cannot be read: {getattr(error, 'strerror', None) or error}.",
                "Run the service as the account that the file's group names.",
            ) from None
        if not value:
            raise ConfigError(f"The secret {name!r} in {path} is empty.", "Write its value into that file.")
        return value


def load(path: str | os.PathLike[str] | None = None) -> Settings:
    """Read the site's configuration.

    Args:
        path: The file; by default what `CARME_CONFIG` names, else `/etc/carme/carme.toml`.

    Raises:
        ConfigError: The file is missing, is not TOML, or holds a wrong key, type or value. With several
            wrong places each has its sentence in the message.
    """
    file = Path(path or os.environ.get("CARME_CONFIG") or DEFAULT_PATH)
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"There is no configuration file {file}.",
            "Create it, or let CARME_CONFIG name another one.",
            "no-config",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"The configuration file {file} cannot be read: {error.strerror}.", "Make it world-readable."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} is not valid TOML: {error}.", "Correct that line; texts need quotation marks."
        ) from None
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(f"{file}: {_sentence(detail)}" for detail in error.errors()), code="config"
        ) from None


def _sentence(detail: ErrorDetails) -> str:
    """One wrong place of the file."""
    table, model, rest = table_of(Settings, detail["loc"])
    if detail["type"] == "extra_forbidden":
        if not table:
            return f"there is no table [{rest[0]}]. {nearest(rest[0], model.model_fields)}"
        return f"there is no key {rest[0]!r} in [{table}]. {nearest(rest[0], model.model_fields)}"
    if not table:
        return problem(detail, f"the table [{rest[0]}]")
    if not rest:
        return problem(detail, f"the table [{table}]")
    if rest[-1] == "[key]":
        return problem(detail, f"the name of a table in [{table.rpartition('.')[0]}]")
    subject = f"{rest[0]!r} in [{table}]"
    return problem(detail, f"entry {int(rest[1]) + 1} of {subject}" if len(rest) > 1 else subject)
