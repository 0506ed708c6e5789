"""Files in the browser: sent and fetched through the portal, on disk as the user's own."""

import os
from urllib.parse import quote

from bs4 import Tag

from demo_site import DemoSite

UPLOAD = "0123456789abcdef" * 2
PART = 8 << 20


def test_a_file_is_sent_and_fetched_and_nobody_elses_is(demo: DemoSite) -> None:
    data = os.urandom(9_000_000)
    name = f"sent {os.getpid()}.bin"
    with demo.visitor("user1") as owner, demo.visitor("user2") as visitor:
        field = owner.form(owner.fetch(f"{owner.url}files/"), "path").select_one("[name=csrfmiddlewaretoken]")
        assert isinstance(field, Tag)
        for folder in ("/home/user1", "/scratch"):
            path = f"{folder}/{name}"
            for offset in (0, PART):
                answer = owner.http.put(
                    f"{owner.url}files/upload/",
                    params={"path": path, "id": UPLOAD, "offset": offset, "size": len(data), "replace": 1},
                    content=data[offset : offset + PART],
                    headers={"X-CSRFToken": str(field["value"]), "Referer": owner.url},
                )
                assert answer.status_code == 200, answer.text
            assert answer.json() == {"offset": len(data), "done": True, "exists": False}
            reported = demo.run("head", "stat", "--format=%U %a %s", path).stdout
            assert reported == f"user1 600 {len(data)}\n"
            fetched = owner.fetch(f"{owner.url}files/download/?path={quote(path)}")
            assert fetched.status_code == 200 and fetched.content == data
            refused = visitor.fetch(f"{visitor.url}files/download/?path={quote(path)}")
            assert refused.status_code == (403 if folder == "/scratch" else 422)
        link = "/home/user2/of-user1"
        demo.run("head", "ln", "-sfn", "/home/user1", link, user="user2")
        stolen = visitor.fetch(f"{visitor.url}files/?path={link}")
        assert stolen.status_code == 403 and "You may not do that" in stolen.text
    demo.run("head", "rm", "-f", link, f"/home/user1/{name}", f"/scratch/{name}")
