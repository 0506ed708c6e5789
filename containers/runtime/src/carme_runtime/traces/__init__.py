"""Traces of a run: `carme-run --trace otf2:DIR` and `--trace html:FILE`.

`carme_runtime.profile` says what happens, the core's recorder keeps it (native/src/recorder.hpp), and each
rank leaves a recording. When the run is over `carme-run` makes one archive or page of them.
"""

from carme_runtime.traces.errors import TraceError

__all__ = ["TraceError"]
