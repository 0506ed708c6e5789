"""`python -m carme_runtime.scaling RESULT.json`."""

import sys

from carme_runtime.scaling.command import main

sys.exit(main())
