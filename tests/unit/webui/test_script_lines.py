"""What the job form shows of the `#SBATCH` lines of a script."""

import json

from bs4 import BeautifulSoup

from .conftest import Browser, FakeBroker
from .test_jobs import FIELDS


def test_a_wrong_line_of_the_script_is_named_once(browser: Browser, broker: FakeBroker) -> None:
    script = "#SBATCH --nodes=many\n"
    page = browser.send("/jobs/submit/", "/jobs/submit/", **(FIELDS | {"script": script})).content.decode()
    assert page.count("Line 1 of the script") == 1
    (part,) = BeautifulSoup(page, "html.parser").select("#from-script")
    assert part["hx-trigger"] == "change from:#id_script", "the page does not ask for it once more"


def test_what_sbatch_lines_ask_for_is_read_while_they_are_written(browser: Browser) -> None:
    script = "#!/bin/sh\r\n#SBATCH --gpus=2 --time=30 -o log -D sub\r\n#SBATCH --mem=4G -p gpu\r\ntrue\r\n"
    answer = browser.send("/jobs/submit/", "/jobs/submit/directives/", script=script)
    page = BeautifulSoup(answer.content, "html.parser")
    values = json.loads(page.select("#script-values")[0].text)
    assert values == {"partition": "gpu", "minutes": 30, "memory_mb_per_node": 4096, "gpus_per_node": 2}
    assert "Memory per node (MiB) 4096" in page.text and "Ignored: -o, --chdir." in page.text
    wrong = browser.send(
        "/jobs/submit/", "/jobs/submit/directives/", script="#SBATCH --nodes=x\n"
    ).content.decode()
    assert "Line 1 of the script" in wrong and 'type="application/json">""<' in wrong
    nothing = browser.send("/jobs/submit/", "/jobs/submit/directives/", script="date\n").content.decode()
    assert "Read" not in nothing and ">{}<" in nothing
