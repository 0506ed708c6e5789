"""The example notebooks that need the command `carme` or a portal; tests/native runs the others."""

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from carme_webui.bookings.models import Booking
from patience import HANG

from .client_steps import token
from .fake_broker import FakeBroker

__all__ = ["token"]

pytestmark = pytest.mark.django_db(transaction=True)

EXAMPLES = Path(__file__).parents[3] / "containers/images/examples"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a notebook in an empty folder; returns what it prints."""
    programs, home = tmp_path / "bin", tmp_path / "home"
    programs.mkdir()
    home.mkdir()
    script = f"#!{sys.executable}\nfrom carme.cli import main\nraise SystemExit(main())\n"
    (programs / "carme").write_text(script)
    (programs / "carme").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))

    def run(name: str) -> str:
        notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
        NotebookClient(
            notebook, timeout=int(HANG), kernel_name="python3", resources={"metadata": {"path": str(home)}}
        ).execute()
        parts = [part for cell in notebook.cells for part in cell.get("outputs", [])]
        return "".join(part.get("text", "") for part in parts)

    return run


def test_data_is_found_copied_and_verified(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "imagenet").mkdir()
    monkeypatch.setenv("CARME_DATA", str(data))
    monkeypatch.delenv("CARME_RESULTS", raising=False)
    printed = run("05-data-staging")
    assert "imagenet" in printed and "results go to your home" in printed
    assert "20 files" in printed


def test_gpus_are_booked_and_given_back(
    run: Any, live_server: Any, token: str, broker: FakeBroker, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = settings.SITE.bookings.model_copy(update={"enabled": True, "share_percent": 100})
    settings.SITE = settings.SITE.model_copy(update={"bookings": rules})
    monkeypatch.setenv("CARME_URL", live_server.url)
    monkeypatch.setenv("CARME_TOKEN", token)
    printed = run("08-booking")
    booking = Booking.objects.get()
    assert f"{booking.name} approved" in printed and booking.title == "Example"
    assert booking.state == "ended" and "ended" in printed
