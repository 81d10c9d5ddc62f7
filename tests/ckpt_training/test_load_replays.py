"""Replicas that load a step of a chain replay it once together: each its share, and they send each other the values."""

import json
from collections import Counter
from pathlib import Path

import pytest

from engines.launch import run_script

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "jobs/loading_jobs/replays.py"
SOURCES = ("deltas.chain", "recorded.chain")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the reports. The ranks have compared all values with those of the run."""
    folder = tmp_path_factory.mktemp("replays")
    run_script(SCRIPT, [str(folder)], 2)
    return folder


def decoded(out: Path, engine: str, case: str) -> list[Counter[str]]:
    """How often each rank decoded each chunk of a delta, or of the gradients of a step."""
    reports = [json.loads(path.read_text()) for path in sorted(out.glob(f"{engine}-rank*.json"))]
    return [Counter(report[case]) for report in reports]


@pytest.mark.parametrize("source", SOURCES)
def test_replicas_decode_each_chunk_once(source: str, out: Path) -> None:
    shared, alone = (decoded(out, "ddp", f"{source} {cooperate}") for cooperate in ("auto", "off"))
    assert shared[0] + shared[1] == alone[0] == alone[1]
    assert set(alone[0].values()) == {1}
    assert min(map(len, shared)) > len(alone[0]) // 3


@pytest.mark.parametrize("source", SOURCES)
def test_shards_of_replicas_decode_each_of_their_chunks_once(source: str, out: Path) -> None:
    """A chunk that two shards have is decoded by a replica of each."""
    shared, alone = (decoded(out, "hsdp", f"{source} {cooperate}") for cooperate in ("auto", "off"))
    assert [shared[0] + shared[2], shared[1] + shared[3]] == alone[:2] == alone[2:]
