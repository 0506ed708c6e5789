"""The site's datasets and those of one user."""

from functools import cached_property

from django.conf import settings
from pydantic import ValidationError

from carme.datasets import Dataset, Datasets, readers
from carme.errors import CarmeError
from carme.files.client import Files
from carme_webui.accounts.models import User
from carme_webui.cluster import broker

__all__ = ["UserDatasets", "datasets_of"]

#: Seconds for which a home may be silent.
PATIENCE = 5.0


class UserDatasets(Datasets):
    """As the command `carme datasets` sees them: a user's own come before the site's of the same name.

    Homes are read as the user, and only when somebody asks for a name.
    """

    def __init__(self, user: User) -> None:
        super().__init__(settings.SITE.staging.datasets)
        self._user = user

    def names(self) -> list[str]:
        """The names, in order."""
        return sorted({*super().names(), *self.own_datasets})

    def get(self, name: str) -> Dataset:
        """The dataset called `name`. Raises CarmeError, as that of `Datasets` does."""
        found = self.own_datasets.get(name)
        return found if found is not None else super().get(name)

    @property
    def own_datasets(self) -> dict[str, Dataset]:
        """The user's own, by name; none while the home cannot be read."""
        return self._home[0]

    def readers(self, dataset: Dataset) -> str:
        """Who may read the newest version."""
        path = dataset.version().path
        return readers(path) if dataset.site else self._home[1].get(path, "")

    @cached_property
    def _home(self) -> tuple[dict[str, Dataset], dict[str, str]]:
        try:
            reported, readers_by_path = Files(broker(), self._user.username, PATIENCE).datasets()
        except CarmeError:
            return {}, {}
        found = {}
        for name, values in reported.items():
            # What lies in homes may be anything.
            try:
                found[name] = Dataset.model_validate({**values, "name": name, "site": False})
            except (ValidationError, TypeError):
                continue
        return found, readers_by_path


def datasets_of(user: User) -> UserDatasets:
    """What a user sees."""
    return UserDatasets(user)
