"""Logs, results and scripts of jobs, read through the broker."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from carme.broker.files import log_part
from carme.errors import CarmeError, Denied, InvalidRequest, NotFound
from carme.jobs import JobRequest, contents
from carme.jobs.scripts import sent, sent_script


async def test_a_log_is_read_from_any_offset_in_whole_characters(site: Any, order: JobRequest) -> None:
    job_id = await site.client.submit(order)
    assert (await site.client.log(job_id)).model_dump() == {"text": "", "offset": 0, "size": 0}
    log = site.home / ".local/share/carme/jobs" / (await site.client.job(job_id)).key / "output.log"
    log.write_text("grüße\n")
    log.chmod(0o644)
    part = await site.client.log(job_id, limit=3)  # ends within the ü
    assert (part.text, part.offset, part.size) == ("gr", 2, 8)
    assert (await site.client.log(job_id, offset=2)).text == "üße\n"
    assert (await site.client.log(job_id, offset=99)).model_dump() == {"text": "", "offset": 8, "size": 8}


@pytest.mark.parametrize("ending", ["", "\n"])
async def test_the_end_of_a_log_is_read_from_its_end(site: Any, order: JobRequest, ending: str) -> None:
    job_id = await site.client.submit(order)
    log = site.home / ".local/share/carme/jobs" / (await site.client.job(job_id)).key / "output.log"
    lines = [f"line {number} {'x' * (number % 211)}" for number in range(5000)]
    log.write_text("\n".join(lines) + ending)
    log.chmod(0o644)
    size = log.stat().st_size
    for count in (0, 1, 2, 1000, 4999, 5000, 9000):
        part = await site.client.log(job_id, tail=count, limit=1 << 20)
        assert part.text == "\n".join(lines[len(lines) - min(count, 5000) :]) + (ending if count else "")
        assert (part.offset, part.size) == (size, size)
    # Of an endless log without lines (a hole, here) no more is read than its end.
    with log.open("r+b") as stream:
        stream.truncate(1 << 40)
        stream.seek(0, os.SEEK_END)
        stream.write(b"\nlast words\n")
    assert (await site.client.log(job_id, tail=1)).text == "last words\n"
    assert (await site.client.log(job_id, tail=2, limit=1)).offset > 1 << 39


async def test_a_log_that_is_no_file_of_the_user_is_not_read(
    site: Any, order: JobRequest, folder: Path
) -> None:
    job_id = await site.client.submit(order)
    log = site.home / ".local/share/carme/jobs" / (await site.client.job(job_id)).key / "output.log"
    secret = folder / "secret"
    secret.write_text("secret")
    log.symlink_to(secret)
    with pytest.raises(CarmeError, match="cannot be read: Too many levels of symbolic links"):
        await site.client.log(job_id)
    log.unlink()
    os.mkfifo(log)
    os.chmod(log, 0o644)  # noqa: PTH101
    with pytest.raises(CarmeError, match="it is not a plain file"):
        await site.client.log(job_id)
    if os.getuid() == 0:
        log.unlink()
        log.write_text("of root")
        log.chmod(0o600)
        with pytest.raises(CarmeError, match="Permission denied"):
            await site.client.log(job_id)


async def test_a_batch_job_is_submitted_again_with_its_secrets_which_stay_secret(
    site: Any, request_: JobRequest
) -> None:
    command, files = sent("#!/bin/sh -e\necho hello\n", ["a b"])
    secret = request_.model_copy(
        update={"environment": {"KEY": "s3cret"}, "command": command, "files": files}
    )
    job_id = await site.client.submit(secret)
    recipe = await site.client.recipe(job_id)
    assert recipe.variables == ["KEY"] and "s3cret" not in recipe.model_dump_json()
    assert sent_script(recipe.request.command, recipe.request.files) == (
        "#!/bin/sh -e\necho hello\n",
        ["a b"],
    )
    again = await site.client.job(await site.client.resubmit(job_id))
    folder = site.home / ".local/share/carme/jobs" / again.key
    assert again.id != job_id and again.name == request_.name
    assert json.loads((folder / "environment.json").read_text()) == {"KEY": "s3cret"}
    (folder / "request.json").unlink()
    with pytest.raises(NotFound, match="no record of how job"):
        await site.client.resubmit(again.id)
    with pytest.raises(NotFound):
        await site.client.recipe(999)


async def test_a_script_that_is_no_utf_8_reaches_the_job_as_it_is(site: Any, request_: JobRequest) -> None:
    data = b"#!/bin/sh\nprintf 'caf\xe9'\n"
    command, files = sent(contents.from_bytes(data))
    job_id = await site.client.submit(request_.model_copy(update={"command": command, "files": files}))
    again = await site.client.resubmit(job_id)
    for number in (job_id, again):
        folder = site.home / ".local/share/carme/jobs" / (await site.client.job(number)).key
        assert (folder / "files/script").read_bytes() == data
    recipe = await site.client.recipe(again)
    assert contents.to_bytes(recipe.request.files["script"]) == data
    (site.home / "old.sh").write_bytes(data)
    assert contents.to_bytes((await site.client.script("old.sh")).text) == data


async def test_a_stored_request_that_its_owner_changed_is_checked_again(
    site: Any, request_: JobRequest
) -> None:
    job_id = await site.client.submit(request_)
    file = site.home / ".local/share/carme/jobs" / (await site.client.job(job_id)).key / "request.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"nodes": 99}))
    with pytest.raises(InvalidRequest, match="99 were requested"):
        await site.client.resubmit(job_id)
    file.write_text(json.dumps(values | {"kind": "session", "image": "torch"}))
    with pytest.raises(NotFound):
        await site.client.resubmit(job_id)
    file.write_text("{")
    with pytest.raises(InvalidRequest):
        await site.client.resubmit(job_id)


async def test_a_result_is_read_like_a_log(site: Any, request_: JobRequest) -> None:
    job_id = await site.client.submit(request_)
    assert (await site.client.result(job_id)).size == 0
    folder = site.home / ".local/share/carme/jobs" / (await site.client.job(job_id)).key
    (folder / "result").write_text("eHl6")
    assert (await site.client.result(job_id, offset=2)).text == "l6"


async def test_what_a_job_draws_of_its_net_is_read_and_checked(site: Any, request_: JobRequest) -> None:
    job_id = await site.client.submit(request_)
    assert (await site.client.net(job_id)).name == ""
    file = site.home / ".local/share/carme/jobs" / (await site.client.job(job_id)).key / "net.json"
    values = {"name": "render", "state": "running", "at": 1.5e9, "running": 2, "svg": "<svg/>", "more": 1}
    file.write_text(json.dumps(values))
    file.chmod(0o644)
    found = await site.client.net(job_id)
    assert (found.name, found.state, found.running, found.tokens, found.svg) == (
        "render", "running", 2, 0, "<svg/>",
    )  # fmt: skip
    for wrong in ({"state": "on fire"}, {"at": 1e300}, {"running": -1}, {"svg": "x" * 262_145}):
        file.write_text(json.dumps(values | wrong))
        assert (await site.client.net(job_id)).name == ""
    file.write_text("{")
    assert (await site.client.net(job_id)).name == ""
    with pytest.raises(NotFound):
        await site.client.net(job_id + 1)


async def test_a_script_is_read_as_its_user(site: Any, folder: Path) -> None:
    (site.home / "train.sh").write_text("echo hello\n")
    found = await site.client.script("train.sh")
    assert (found.path, found.text) == (str(site.home / "train.sh"), "echo hello\n")
    (site.home / "binary").write_bytes(b"\x7fELF\0\0")
    (site.home / "large").write_text("x" * 300_000)
    (folder / "of-root").write_text("secret")
    (folder / "of-root").chmod(0o600)
    (site.home / "link").symlink_to(folder / "of-root")
    for path in ("nothing.sh", "binary", "large", ".", "a\nb", "link"):
        with pytest.raises(InvalidRequest) as caught:
            await site.client.script(path)
        assert caught.value.field == "script_path" and "secret" not in str(caught.value)
    if os.getuid() == 0:
        with pytest.raises(InvalidRequest, match="Permission denied"):
            await site.client.script(str(folder / "of-root"))
    with pytest.raises(Denied):
        await site.client.script("train.sh", user="bob")


def test_a_script_that_travels_runs_as_its_first_line_says(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    hostile = ["a b", "$(echo no)", "--", "", "*"]
    python = (
        f"#!{sys.executable} -I\nimport sys\nprint(''.join(f'[{{word}}]' for word in sys.argv[1:]), end='')\n"
    )
    for text in ("#!/bin/sh\nprintf '[%s]' \"$@\"\n", "printf '[%s]' \"$@\"\n", python):
        command, files = sent(text, hostile)
        (tmp_path / "files/script").write_text(files["script"])
        done = subprocess.run(
            command, env={"CARME_JOB_FOLDER": str(tmp_path)}, capture_output=True, cwd=tmp_path
        )
        assert done.stdout.decode() == "".join(f"[{word}]" for word in hostile), done.stderr


def test_parts_of_a_log_join_to_the_whole() -> None:
    whole = "a€ß😀\n".encode() * 3 + b"\xff\xc3"
    text, offset = "", 0
    while offset < len(whole):
        part = log_part(whole[offset : offset + 5], offset, len(whole))
        if not part.text:
            break
        text, offset = text + part.text, part.offset
    assert text == "a€ß😀\n" * 3 + "\ufffd"
    assert offset == len(whole) - 1  # half a character waits for its rest
