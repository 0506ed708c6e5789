"""The batches, and the table that is made of them."""

import json
from collections.abc import Iterator

import pytest

from demo_site import IMPATIENT, ROOT, DemoSite
from faults.batch import Batch, Result
from faults.plan import FAULTS, PHASES, heal

RESULTS = pytest.StashKey[dict[str, dict[str, Result]]]()


@pytest.fixture(scope="session")
def demo() -> Iterator[DemoSite]:
    """The demo, for once quick to give nodes up."""
    site = DemoSite()
    with site.slurm_settings(IMPATIENT):
        yield site


@pytest.fixture(scope="module")
def fault(request: pytest.FixtureRequest, demo: DemoSite) -> Iterator[Batch]:
    """The batch that has gone through the fault."""
    batch = Batch(demo)
    try:
        heal(demo)
        batch.prepare()
        try:
            batch.run_fault(FAULTS[request.param])
            batch.finish()
        finally:
            request.config.stash.setdefault(RESULTS, {})[request.param] = batch.results
        yield batch
    finally:
        batch.close()
        heal(demo)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    results = config.stash.get(RESULTS, {})
    if not results:
        return
    lines = table(results)
    folder = ROOT / "artifacts"
    folder.mkdir(exist_ok=True)
    (folder / "faults.md").write_text("\n".join(lines) + "\n")
    plain = {name: {phase: vars(result) for phase, result in of.items()} for name, of in results.items()}
    (folder / "faults.json").write_text(json.dumps(plain, indent=2) + "\n")
    terminalreporter.section("seconds from the fault until all views agree again")
    for line in lines:
        terminalreporter.write_line(line)


def table(results: dict[str, dict[str, Result]]) -> list[str]:
    """Fault by phase: seconds and the state that all views show; `!` where something is wrong."""

    def cell(result: Result) -> str:
        message = "-" if result.seconds is None else f"{result.seconds:.1f} {result.state}".strip()
        return f"{message} !" if result.problems else message

    columns = [*PHASES, "after"]
    lines = [
        f"| {'fault':14} | " + " | ".join(f"{column:>14}" for column in columns) + " |",
        "|" + "|".join("-" * 16 for _ in range(len(columns) + 1)) + "|",
    ]
    for name, of in results.items():
        lines.append(f"| {name:14} | " + " | ".join(f"{cell(of[column]):>14}" for column in columns) + " |")
    return lines
