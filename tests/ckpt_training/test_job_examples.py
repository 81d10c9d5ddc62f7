"""The examples of docs/jobs.md run: saved while they train, and loaded, they print the losses of the whole run."""

import re
from pathlib import Path
from typing import Any

import pytest

import ckpt
from recording_jobs import launch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "jobs"
NAMES = [path.stem for path in sorted(EXAMPLES.glob("*.py"))]
RANKS = {"ddp": 2, "fsdp2": 2, "deepspeed_zero": 2}
LOADED, LAST = 6, 12
"""The step of an example that is loaded, and its last."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chains of all examples, and the logs: `NAME` of a run to its end, `NAME-later` of one that was loaded."""
    out = tmp_path_factory.mktemp("jobs")
    whole = [_job(name, out / name, out / f"{name}.chain") for name in NAMES]
    later = [_job(name, out / f"{name}-later", out / "later.chain", out / f"{name}.chain@{LOADED}") for name in NAMES]
    for number, job in enumerate(later):
        job |= {"arguments": (out / f"later{number}.chain", job["arguments"][1]), "again": True}
    launch.run_examples([*whole, *later], out)
    return out


def _job(name: str, logs: Path, *arguments: Path) -> dict[str, Any]:
    return {"script": EXAMPLES / f"{name}.py", "arguments": arguments, "world": RANKS.get(name, 0), "logs": logs}


def _losses(logs: Path) -> dict[int, str]:
    text = (logs / "rank0.log").read_text()
    return {int(step): loss for step, loss in re.findall(r"^step (\d+): loss (\S+)", text, re.MULTILINE)}


@pytest.mark.engines
@pytest.mark.parametrize("name", NAMES)
def test_an_example_that_loads_a_save_prints_the_losses_of_the_whole_run(name: str, runs: Path) -> None:
    whole, later = _losses(runs / name), _losses(runs / f"{name}-later")
    assert list(whole) == [*range(1, LAST + 1)]
    assert later == {step: loss for step, loss in whole.items() if step > LOADED}
    assert ckpt.Chain(runs / f"{name}.chain").verify().findings == ()


def test_the_page_of_jobs_shows_lines_of_its_examples() -> None:
    """Which other tests run: each line stands in the script, in this order."""
    page = (ROOT / "docs" / "jobs.md").read_text("utf-8")
    blocks = re.findall(r"<!-- example: (\S+) -->\n```python\n(.*?)```", page, re.DOTALL)
    assert {name for name, _ in blocks} == {f"{name}.py" for name in NAMES}
    for name, block in blocks:
        lines = iter(map(str.strip, (EXAMPLES / name).read_text("utf-8").splitlines()))
        for line in filter(None, map(str.strip, block.splitlines())):
            assert line in lines, f"{name}: {line}"
