"""The small program that reads a part of a job's log, run as the job's owner: never root follows the path.

Arguments: the file, the offset, the number of bytes. Prints the file's size, a line end, the bytes.
"""

import os
import stat
import sys

NO_LOG = 75  # exit code: there is no such file (yet)


def main() -> int:
    """Print the part."""
    path, offset, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    try:
        # O_NONBLOCK: opening a FIFO in the log's place must not wait for its writer.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return NO_LOG
    except OSError as error:
        print(error.strerror, file=sys.stderr)
        return 1
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        print("it is not a plain file", file=sys.stderr)
        return 1
    part = os.pread(file, limit, min(offset, status.st_size))
    sys.stdout.buffer.write(b"%d\n%b" % (status.st_size, part))
    return 0


if __name__ == "__main__":
    sys.exit(main())
