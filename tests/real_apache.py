"""A real Apache with a virtual host as a page shows it."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import real_nginx

from patience import HANG

ROOT = Path(os.environ.get("CARME_APACHE", "/"))
APACHE = shutil.which("apache2", path=str(ROOT / "usr/sbin"))
MODULES = ROOT / "usr/lib/apache2/modules"
#: Libraries of an Apache that is unpacked, not installed.
LIBRARIES = ":".join(sorted({str(path.parent) for path in ROOT.glob("usr/lib/*/libapr*.so*")}))
#: What `a2enmod ssl proxy proxy_http headers` adds to what Debian enables, as far as these need it.
_NAMES = ("mpm_event", "authz_core", "socache_shmcb", "ssl", "proxy", "proxy_http", "headers", "reqtimeout")

#: Mark of tests that need it.
needed = pytest.mark.skipif(not APACHE, reason="Apache is not installed; ./test unit fetches it")


@contextlib.asynccontextmanager
async def running(folder: Path, port: int, virtual_host: str) -> AsyncIterator[None]:
    """Apache, from when it listens until the block ends.

    Args:
        folder: Of its files.
        port: Where it listens on this machine.
        virtual_host: The section of its configuration.
    """
    assert APACHE
    modules = "".join(f"LoadModule {name}_module {MODULES}/mod_{name}.so\n" for name in _NAMES)
    user = "User nobody\nGroup nogroup\n" if os.geteuid() == 0 else ""  # it does not serve as root
    (folder / "apache.conf").write_text(
        f"{modules}{user}ServerRoot {folder}\nDefaultRuntimeDir {folder}\nPidFile {folder}/apache.pid\n"
        f"Mutex file:{folder}\nErrorLog {folder}/apache.log\nServerName localhost\n"
        f"Listen 127.0.0.1:{port}\n{virtual_host}\n"
    )
    process = await asyncio.create_subprocess_exec(
        *[APACHE, "-X", "-f", str(folder / "apache.conf")],
        env=os.environ | {"LD_LIBRARY_PATH": LIBRARIES},
    )
    try:
        async with asyncio.timeout(HANG):
            while not await real_nginx.listens(port):
                assert process.returncode is None, (folder / "apache.log").read_text()
                await asyncio.sleep(0.02)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
