"""`python -m carme_runtime.petri`."""

import sys

from carme_runtime.petri.command import main

sys.exit(main())
