"""What a process takes of the memory."""

import subprocess
import sys

from patience import HANG

from .conftest import clean_environment


def test_a_child_sees_what_it_takes_itself() -> None:
    text = (
        "import os\n"
        "from carme_runtime.out_of_core import pages\n"
        "before = pages.resident()\n"
        "if os.fork():\n"
        "    code = os.waitstatus_to_exitcode(os.wait()[1])\n"
        "    assert pages.resident() < before + (16 << 20)\n"
        "    raise SystemExit(code)\n"
        "memory = b'x' * (64 << 20)\n"
        "os._exit(pages.resident() < before + len(memory) // 2)\n"
    )
    command = [sys.executable, "-c", text]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr


def test_pages_of_libraries_go_and_come_back() -> None:
    text = (
        "import ssl, sqlite3, hashlib\n"  # large libraries
        "from carme_runtime.out_of_core import pages\n"
        "before = pages.of_files()\n"
        "pages.drop_library_pages()\n"
        "print(before, pages.of_files())\n"
        "assert hashlib.sha256(b'').hexdigest().startswith('e3b0')\n"
        "assert ssl.create_default_context()\n"
        "assert sqlite3.connect(':memory:').execute('select 1').fetchone() == (1,)\n"
    )
    command = [sys.executable, "-c", text]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert after < 0.75 * before
