"""A sample of `tests/campaigns/load_matrix.py`: other engines at other degrees get all bits of what engines saved."""

import json
from pathlib import Path
from typing import Any

import pytest

from engines.launch import run_script

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[1] / "campaigns/load_matrix.py"
SAMPLE = (
    "DCP > fsdp1-flat@2",
    "recorded > fsdp1-flat@2",
    "ZeRO 1 > fsdp1-flat@2",
    "boxes > fsdp2-meta@2",
    "safetensors > fsdp2-meta@2",
    "ZeRO 3 > fsdp2-meta@2",
    "ZeRO 3 > zero2@4",
    "universal, coded > zero2@4",
    "DCP > hsdp@4",
    "DCP > hsdp-shared@4",
    "deltas > hsdp-shared@4",
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each pair of the sample gave."""
    folder = tmp_path_factory.mktemp("matrix")
    run_script(SCRIPT, [str(folder), "--json", str(folder / "pairs.json"), "--only", *SAMPLE], len(SAMPLE))
    rows = json.loads((folder / "pairs.json").read_text())
    return {f"{row['source']} > {row['target']}": row for row in rows}


def test_targets_have_the_bits_and_the_losses_of_their_sources(pairs: dict[str, dict[str, Any]]) -> None:
    assert sorted(pairs) == sorted(SAMPLE)
    assert {name: row for name, row in pairs.items() if row["differing"] or row["error"]} == {}
    with_losses = {name for name, row in pairs.items() if row["losses"] == "equal"}
    assert with_losses == {"DCP > fsdp1-flat@2", "recorded > fsdp1-flat@2", "DCP > hsdp@4", *SAMPLE[-2:]}


def test_replicas_that_share_read_no_byte_twice(pairs: dict[str, dict[str, Any]]) -> None:
    assert pairs["DCP > hsdp-shared@4"]["nbytes"] <= 1.02 * pairs["DCP > hsdp@4"]["nbytes"] / 2
