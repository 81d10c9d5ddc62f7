"""If a load fails on one rank, all ranks raise the same error, and until values are read, no run has changed."""

import json
from pathlib import Path
from typing import Any

import pytest

from engines.launch import run_script
from loading_jobs.failures import WIDE

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "jobs/loading_jobs/failures.py"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks raised."""
    out = tmp_path_factory.mktemp("failures")
    run_script(SCRIPT, [str(out)], 1)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("other_shape", "InvalidArgumentError", "[64, 48] in the checkpoint, [65, 48] in the model"),
        ("no_part", "InvalidArgumentError", "`schedule` is a object, which has no load_state_dict"),
        ("other_source", "CorruptError", "rank 0 has opened another checkpoint"),
    ],
)
def test_all_ranks_raise_what_one_rank_finds_and_stay_as_they_were(
    case: str, kind: str, text: str, reports: list[dict[str, Any]]
) -> None:
    for report in reports:
        assert report[case]["kind"] == kind
        assert "rank 1: " in report[case]["text"]
        assert text in report[case]["text"]
        assert report[case]["unchanged"]


def test_all_ranks_raise_for_a_bit_that_one_rank_reads(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["flipped"]["kind"] == "CorruptError"
        assert WIDE in report["flipped"]["text"]
        assert "flipped/" in report["flipped"]["text"]
        assert "load again" in report["flipped"]["hint"]
