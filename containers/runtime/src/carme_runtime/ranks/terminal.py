"""The first moments of a program for a person.

Run as a program in a session of its own: it takes the terminal at its standard input, where there is one, and
becomes the command that its arguments name.
"""

import fcntl
import os
import sys
import termios


def main(command: list[str]) -> None:
    """Become `command`; exit codes are those of a shell when there is no such program."""
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(sys.argv[1:])
