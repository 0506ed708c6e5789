"""The example notebooks of the images, each run by nbclient from its first cell to its last, on two ranks."""

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from patience import HANG

EXAMPLES = Path(__file__).parents[2] / "containers/images/examples"
#: What each prints that shows that it did what it is about. A pipeline's loss is on its last rank.
PRINTED = {
    "01-first-steps": "rank 1 of 2",
    "02-pytorch-in-two-lines": "with 2 rank(s)",
    "03-keras-in-two-lines": "with 2 rank(s)",
    "04-large-models": "rank 1] step 3: loss",
    "06-checkpoints": "epoch 2: loss",
    "07-profile": "compute",
}
#: Run in tests/unit/webui/test_example_notebooks.py: they need the command `carme`, and a portal.
ELSEWHERE = {"05-data-staging", "08-booking"}


def read(name: str) -> Any:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def output(notebook: Any) -> str:
    return "".join(
        part.get("text", "") for cell in notebook.cells for part in cell.get("outputs", []) if "text" in part
    )


def test_each_is_run_somewhere_and_has_no_output() -> None:
    names = {file.stem for file in EXAMPLES.glob("*.ipynb")}
    assert names == PRINTED.keys() | ELSEWHERE
    for name in names:
        nbformat.validate(notebook := read(name))
        assert not output(notebook), f"{name} has output"
        assert json.dumps(notebook.metadata.kernelspec.name) == '"python3"'


@pytest.mark.parametrize("name", PRINTED)
def test_it_runs_from_its_first_cell_to_its_last(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    notebook = read(name)
    # Images have loaded the magics already. A host without GPUs would run one rank.
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%load_ext carme_runtime.notebook"))
    for cell in notebook.cells:
        if cell.source.startswith("%%carme_run") and " -n " not in cell.source.partition("\n")[0]:
            cell.source = cell.source.replace("%%carme_run", "%%carme_run -n 2", 1)
        # A small one trains on one rank, too. tests/cluster runs the large one in a job that cannot hold it.
        cell.source = cell.source.replace("range(30)", "range(3)")
        cell.metadata.pop("tags", None)  # an error counts here
    client = NotebookClient(notebook, timeout=int(HANG), resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    printed = output(notebook)
    assert PRINTED[name] in printed, printed
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"
