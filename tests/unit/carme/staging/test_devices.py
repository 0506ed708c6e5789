"""Devices that report errors, or give back other bytes than they were given.

A device mapper that does so is not in every kernel, so a library before the C library stands in for the
device: at the outermost edge, below both engines.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from carme.staging.tree import PARTIAL, partial_name

from .trees import carme_data, from_and_to, walk

#: One fault on one file: FAULT is read, write, quota or corrupt, FAULT_FILE the end of the file's path.
DEVICE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int strikes(const char *fault, int file)
{
    const char *wanted = getenv("FAULT"), *end = getenv("FAULT_FILE");
    char way[64], path[4096];
    if (!wanted || strcmp(wanted, fault))
        return 0;
    snprintf(way, sizeof way, "/proc/self/fd/%d", file);
    ssize_t length = readlink(way, path, sizeof path);
    size_t size = strlen(end);
    return length >= (ssize_t)size && !memcmp(path + length - size, end, size);
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define READ(name, arguments, ...) ssize_t name arguments \
    { if (strikes("read", file)) { errno = EIO; return -1; } return REAL(name)(file, __VA_ARGS__); }
#define WRITE(name, arguments, ...) ssize_t name arguments \
    { if (strikes("write", file)) { errno = EIO; return -1; } \
      if (strikes("quota", file)) { errno = EDQUOT; return -1; } \
      if (strikes("corrupt", file) && size > 10) ((char *)block)[size - 1] ^= 1; \
      ssize_t done = REAL(name)(file, __VA_ARGS__); \
      if (strikes("corrupt", file) && size > 10) ((char *)block)[size - 1] ^= 1; \
      return done; }
READ(read, (int file, void *block, size_t size), block, size)
READ(pread, (int file, void *block, size_t size, off_t place), block, size, place)
READ(pread64, (int file, void *block, size_t size, off64_t place), block, size, place)
READ(preadv, (int file, const struct iovec *blocks, int count, off_t place), blocks, count, place)
READ(preadv64, (int file, const struct iovec *blocks, int count, off64_t place), blocks, count, place)
READ(preadv2, (int file, const struct iovec *all, int count, off_t place, int how), all, count, place, how)
READ(preadv64v2, (int file, const struct iovec *all, int count, off64_t at, int how), all, count, at, how)
WRITE(write, (int file, const void *block, size_t size), block, size)
WRITE(pwrite, (int file, const void *block, size_t size, off_t place), block, size, place)
WRITE(pwrite64, (int file, const void *block, size_t size, off64_t place), block, size, place)
"""
SIZES = {"small": 5000, "middling": 3 << 20, "large": (70 << 20) + 9}


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory, compiled: None) -> Path:
    folder = tmp_path_factory.mktemp("device")
    (folder / "device.c").write_text(DEVICE)
    compile_c = ["cc", "-O1", "-fPIC", "-shared", "-o", "device.so", "device.c", "-ldl"]
    subprocess.run(compile_c, cwd=folder, check=True)
    return folder / "device.so"


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("read", "the device reported an error"),
        ("write", "the device reported an error"),
        ("corrupt", "what was read back from the destination is not what was written"),
    ],
)
def test_errors_of_a_device_are_reported_and_the_other_files_copied(
    tmp_path: Path, device: Path, engine: str, size: str, fault: str, reason: str
) -> None:
    source, target = from_and_to(tmp_path)
    source.mkdir()
    (source / "bad").write_bytes(os.urandom(SIZES[size]))
    (source / "good").write_bytes(os.urandom(min(SIZES[size], SIZES["middling"])))
    end = "/source/bad" if fault == "read" else f"/target/{partial_name('bad')}"
    faulty = {**os.environ, "LD_PRELOAD": str(device), "FAULT": fault, "FAULT_FILE": end}
    arguments = ["copy", "--json", "--engine", engine, "--workers", "2", str(source), str(target)]

    reported = carme_data(*arguments, env=faulty)
    assert reported.returncode == 1, reported.stdout + reported.stderr
    events = [json.loads(line) for line in reported.stdout.splitlines()]
    problems = [each for each in events if each["event"] == "problem"]
    assert [(each["path"], each["reason"]) for each in problems] == [("bad", reason)]
    assert events[-1]["engine"] == engine
    assert not (target / "bad").exists()
    assert (target / "good").read_bytes() == (source / "good").read_bytes()

    # The device is well again: the same command completes the copy, and leaves nothing else.
    assert carme_data(*arguments).returncode == 0
    assert walk(target) == walk(source)
    assert not any(name.startswith(PARTIAL) for name in os.listdir(target))


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("size", ["small", "large"])
def test_a_quota_that_is_used_up_is_reported_and_the_copy_resumes(
    tmp_path: Path, device: Path, engine: str, size: str
) -> None:
    """A kernel with quotas is not everywhere: the same stand-in gives its answer."""
    source, target = from_and_to(tmp_path)
    source.mkdir()
    (source / "good").write_bytes(b"good")
    arguments = ["copy", "--engine", engine, "--workers", "2", str(source), str(target)]
    assert carme_data(*arguments).returncode == 0
    (source / "bad").write_bytes(os.urandom(SIZES[size]))
    end = f"/target/{partial_name('bad')}"
    faulty = {**os.environ, "LD_PRELOAD": str(device), "FAULT": "quota", "FAULT_FILE": end}
    reported = carme_data(*arguments, env=faulty)
    assert reported.returncode == 1 and "Traceback" not in reported.stderr
    assert "your quota is used up. Fix that, then run the same command again" in reported.stderr
    assert not (target / "bad").exists() and (target / "good").read_bytes() == b"good"
    assert carme_data(*arguments).returncode == 0
    assert walk(target) == walk(source)
