"""When this process began, for the times of a session's start. Imported before anything else."""

import time

#: Seconds since 1970.
STARTED = time.time()
