"""The small program that reads a part of a job's log, run as the job's owner: never root follows the path.

Arguments: the file, the offset, the number of bytes, and optionally a number of lines: then the part begins
where so many lines are left, and not at the offset. Prints the file's size, the part's offset, a line end,
the bytes.
"""

import os
import stat
import sys

BLOCK = 1 << 16
MOST_BYTES = 64 << 20  # of the end, in which the last lines are looked for
NO_LOG = 75  # exit code: there is no such file (yet)


def main() -> int:
    """Print the part."""
    path, offset, limit, lines = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
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
    offset = beginning(file, status.st_size, int(lines[0])) if lines else min(offset, status.st_size)
    part = os.pread(file, limit, offset)
    sys.stdout.buffer.write(b"%d %d\n%b" % (status.st_size, offset, part))
    return 0


def beginning(file: int, size: int, lines: int) -> int:
    """Where the last lines of a file begin, read from its end."""
    if lines == 0:
        return size
    end = size
    while end > max(0, size - MOST_BYTES):
        start = max(0, end - BLOCK)
        block = os.pread(file, end - start, start)
        if end == size:
            block = block[:-1] + b" " if block.endswith(b"\n") else block  # it ends a line and begins none
        found = block.count(b"\n")
        if found >= lines:
            place = len(block)
            for _ in range(lines):
                place = block.rindex(b"\n", 0, place)
            return start + place + 1
        lines -= found
        end = start
    return end


if __name__ == "__main__":
    sys.exit(main())
