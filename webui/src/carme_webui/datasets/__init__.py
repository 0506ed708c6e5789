"""The datasets that a user sees: the site's, and their own, which lie in their home."""

from carme_webui.datasets.catalogue import datasets_of

__all__ = ["datasets_of"]
