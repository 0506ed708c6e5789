"""What is copied is hashed on the way, and must have that digest when it is read back."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from carme.staging import Options, contents, copy, engine, native
from carme.staging.attributes import AttributeCopier
from carme.staging.digests import ALGORITHMS
from carme.staging.native import Entries, Native

from .trees import from_and_to, many, walk

#: A digest that is another one each time, so that nothing is what it was.
NEVER_THE_SAME = """
struct digest { unsigned long low, high; };
struct digest XXH3_128bits(const void *bytes, unsigned long size)
{
    static unsigned long calls;
    return (struct digest){bytes ? ++calls : 0, size};
}
"""


@pytest.fixture
def unlike(tmp_path: Path, compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest above in place of xxh3."""
    (tmp_path / "unlike.c").write_text(NEVER_THE_SAME)
    subprocess.run(["cc", "-O1", "-fPIC", "-shared", "-o", "unlike.so", "unlike.c"], cwd=tmp_path, check=True)
    function = ctypes.CDLL(str(tmp_path / "unlike.so")).XXH3_128bits
    monkeypatch.setattr(native, "hasher", lambda: ctypes.cast(function, ctypes.c_void_p).value)


@pytest.mark.parametrize("verify", ["read", "none"])
def test_small_files_are_known_by_their_digests(tmp_path: Path, unlike: None, verify: str) -> None:
    source, target = from_and_to(tmp_path)
    many(source, 1, 5)
    target.mkdir()
    loaded = native.library()
    assert loaded
    hashing = Native.make(loaded, Options(verify=verify), AttributeCopier(True), 1)  # type: ignore[arg-type]
    original, copied = os.open(source / "d0", os.O_RDONLY), os.open(target, os.O_RDONLY)
    try:
        left = hashing.copy(
            original,
            copied,
            Entries.files(sorted(os.listdir(original))),
            None,
            True,
            lambda files, size: None,
        )
    finally:
        os.close(original)
        os.close(copied)
    # Nothing stays that was not verified.
    assert (len(left), len(os.listdir(target))) == ((5, 0) if verify == "read" else (0, 5))


def test_large_files_are_known_by_their_digests(tmp_path: Path, unlike: None) -> None:
    source, target = from_and_to(tmp_path)
    source.mkdir()
    (source / "large").write_bytes(os.urandom(1 << 20) * 65)
    (source / "small").write_bytes(b"the rest of Carme copies this, with the real digest")
    result = copy(str(source), str(target))
    assert [(each.path, each.reason) for each in result.problems] == [
        ("large", "what was read back from the destination is not what was written")
    ]
    assert not (target / "large").exists()
    assert copy(str(source), str(target), Options(verify="none")).ok
    assert walk(target) == walk(source)


def test_the_library_is_xxh3() -> None:
    xxhash = pytest.importorskip("xxhash")
    address = native.hasher()
    assert address

    class Digest(ctypes.Structure):
        _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))

    function = ctypes.CFUNCTYPE(Digest, ctypes.c_char_p, ctypes.c_size_t)(address)
    for size in (0, 1, 4096, 1 << 20):
        data = os.urandom(size)
        digest = function(data, size)
        assert f"{digest.high:016x}{digest.low:016x}" == xxhash.xxh3_128(data).hexdigest()


@pytest.mark.parametrize("hash", ["", *ALGORITHMS])
@pytest.mark.parametrize("there", [True, False])
def test_the_digest_is_reported(
    tmp_path: Path, library: Path | None, monkeypatch: pytest.MonkeyPatch, hash: str, there: bool
) -> None:
    """With xxh3 for the compiled part and, by bytes, without it."""
    pytest.importorskip("xxhash")
    if hash == "blake3":
        pytest.importorskip("blake3")
    if not there:
        for module in (native, contents, engine):
            monkeypatch.setattr(module, "hasher", lambda: None)
    source, target = from_and_to(tmp_path)
    many(source, 2, 5)
    (source / "large").write_bytes(os.urandom(1 << 20) * 65)
    result = copy(str(source), str(target), Options(hash=hash))
    assert result.ok and walk(target) == walk(source)
    assert result.hash == (hash or ("bytes" if library and not there else "xxh3"))
    assert copy(str(source), str(tmp_path / "second"), Options(hash=hash, verify="none")).hash == ""
