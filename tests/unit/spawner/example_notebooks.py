"""Notebooks as an image has them for its examples."""

import json
from pathlib import Path

__all__ = ["write_example", "write_examples"]

TEXT = "# First <steps>\n\nWhat this\nsession has.\n\nMore."


def write_example(path: Path, source: list[str] | str = TEXT) -> None:
    """Write a notebook that says this of itself, and has one cell to run."""
    cell = {"cell_type": "markdown", "id": "a", "metadata": {}, "source": source}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    code = {"cell_type": "code", "id": "b", "metadata": {}, "source": "print('has run')", "outputs": []}
    cells = [cell, code | {"execution_count": None}]
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(whole))


def write_examples(folder: Path) -> Path:
    """Make an image's folder of examples: one notebook, and a file that is not a notebook."""
    folder.mkdir()
    write_example(folder / "1-first.ipynb")
    (folder / "2-broken.ipynb").write_text("{")
    (folder / "digits.py").write_text("")
    return folder
