"""The catalogue of datasets: names for folders that jobs read, with versions that never change."""

from carme.datasets.catalogue import OWN, Datasets, copies, digest_of
from carme.datasets.models import Dataset, Version
from carme.datasets.uploads import unpack
from carme.storage.readers import readers

__all__ = ["OWN", "Dataset", "Datasets", "Version", "copies", "digest_of", "readers", "unpack"]
