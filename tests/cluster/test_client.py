"""The Python client, from a computer that is not the cluster's, on the demo's portal."""

import os
import ssl
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from bs4 import BeautifulSoup

import carme
from carme.client import JobFailed
from demo_site import DemoSite


@pytest.fixture(scope="module")
def client(demo: DemoSite) -> Iterator[carme.Client]:
    """With a token that user1 makes in the portal."""
    label = f"test-{os.urandom(4).hex()}"
    with demo.visitor("user1") as visitor:
        page = visitor.fetch(f"{visitor.url}tokens/")
        wanted: dict[str, Any] = {"label": label, "days": "1", "scopes": ["jobs", "bookings", "images"]}
        made = BeautifulSoup(visitor.send(page, visitor.form(page, "label"), wanted).text, "html.parser")
        secret = made.select_one("p.secret")
        revoke = made.select_one(f'tr:-soup-contains("{label}") form')
        assert secret is not None and revoke is not None
        try:
            trust = ssl.create_default_context(cafile=str(demo.certificate))
            with carme.Client(visitor.url, secret.text, verify=trust) as found:
                yield found
        finally:
            visitor.send(page, revoke, {})


def square(number: int) -> int:
    """What the tasks compute."""
    print(f"task {os.environ['SLURM_ARRAY_TASK_ID']}")
    if number == 3:
        raise LookupError("no three here")
    return number * number


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="functions travel to Python 3.11, the images' own"
)
def test_an_array_computes_in_its_tasks(demo: DemoSite, client: carme.Client) -> None:
    image = client.images()[0].name
    tasks = client.map(square, [1, 2, 3, 4], at_once=2, image=image, minutes=3, memory_mb=500)
    tasks.wait(90)
    assert [tasks[number].result() for number in (0, 1, 3)] == [1, 4, 16]
    assert "".join(tasks[1].logs()).splitlines()[-1] == "task 1"
    with pytest.raises(JobFailed, match="no three here") as caught:
        tasks[2].result()
    assert isinstance(caught.value.__cause__, LookupError)
    (line,) = demo.run("head", "sacct", "-Xn", f"-j{tasks.id}_3", "-oJobID%30,State").stdout.splitlines()
    assert line.split() == [f"{tasks.id}_3", "COMPLETED"]
