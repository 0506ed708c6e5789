"""python3 -m carme_demo: what ./demo executes."""

import sys

from .command_line import main

sys.exit(main())
