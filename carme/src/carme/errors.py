"""The errors of the platform: what was wrong, what was expected, what to do."""

from carme.translation import joined, translated

__all__ = [
    "BrokerTimeout",
    "BrokerUnavailable",
    "CarmeError",
    "ConfigError",
    "Denied",
    "InvalidRequest",
    "NotFound",
    "SlurmError",
    "family",
]


class CarmeError(Exception):
    """An error that a user or an administrator reads.

    Args:
        message: One sentence: what was wrong and what was expected. What `carme.translation.message` makes is
            shown in each reader's language.
        remedy: One sentence: what to do about it; likewise.
        code: A short word for programs; the class has a default.
        field: The part of the request that was wrong, where there is one.
        help: The page that says more, where `carme.help` does not know it: another program has found it.
    """

    default_code = "error"

    def __init__(
        self, message: str, remedy: str = "", code: str = "", field: str | None = None, help: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.code = code or self.default_code
        self.field = field
        self._help = help

    def __str__(self) -> str:
        """Message and remedy, in the reader's language where one is followed."""
        return translated(self.text)

    @property
    def text(self) -> str:
        """Message and remedy, which each later reader gets in theirs: what to store."""
        return joined([self.message, self.remedy])

    @property
    def help(self) -> str:
        """Where the users' guides say more: a path in the portal, or an address; empty where they do not."""
        from carme.help import help_path  # for few errors

        return self._help or help_path(self.text)

    def __reduce__(self) -> tuple[type["CarmeError"], tuple[str, str, str, str | None, str]]:
        return type(self), (self.message, self.remedy, self.code, self.field, self._help)


class ConfigError(CarmeError):
    """The site's configuration or a secret is missing or wrong."""

    default_code = "config"


class InvalidRequest(CarmeError):
    """A request asks for something that cannot be; `field` names the part."""

    default_code = "invalid"


class Denied(CarmeError):
    """The caller may not do this."""

    default_code = "denied"


class NotFound(CarmeError):
    """There is no such job, or it is not the caller's."""

    default_code = "not-found"


class BrokerUnavailable(CarmeError):
    """The broker does not answer."""

    default_code = "broker-unavailable"


class BrokerTimeout(BrokerUnavailable):
    """The broker took too long; it may still do what was requested."""

    default_code = "broker-timeout"


class SlurmError(CarmeError):
    """Slurm refused or does not answer."""

    default_code = "slurm"


_FAMILY = {
    kind.default_code: kind
    for kind in (
        *(CarmeError, ConfigError, InvalidRequest, Denied, NotFound),
        *(BrokerUnavailable, BrokerTimeout, SlurmError),
    )
}


def family(name: str) -> type[CarmeError]:
    """The class with this default code; the plain one for a name not known here."""
    return _FAMILY.get(name, CarmeError)
