"""The catalogue of datasets: names for folders that jobs read, with versions that never change."""

from carme.datasets.catalogue import Dataset, Datasets, Version, digest_of, readers

__all__ = ["Dataset", "Datasets", "Version", "digest_of", "readers"]
