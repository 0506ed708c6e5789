"""`python -m carme_runtime.compare`."""

import sys

from carme_runtime.compare.command import main

sys.exit(main())
