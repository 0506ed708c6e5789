"""Imports `jsonschema`, with which JupyterHub checks events, without the grammar of a format that none has.

Compiling that grammar took half of the time in which a hub's programs begin. Import this before JupyterHub.
"""

import sys

__all__: list[str] = []

#: `jsonschema` imports it where it is installed, for the formats `iri` and `iri-reference`.
UNNEEDED = "rfc3987_syntax"

if UNNEEDED not in sys.modules:
    sys.modules[UNNEEDED] = None  # pyright: ignore[reportArgumentType]  the import fails
    import jsonschema  # noqa: F401

    del sys.modules[UNNEEDED]
