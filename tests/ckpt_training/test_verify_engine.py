"""Ranks verify together what each has read a part of, and none gets the evidence of all."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from engines.launch import run_script

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "jobs/filling_jobs/verify.py"


def verified(path: Path, out: Path) -> list[dict[str, Any]]:
    """What each of five ranks got."""
    out.mkdir()
    run_script(SCRIPT, [str(path), str(out)], 1)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(5)]


def test_ranks_verify_in_a_tree(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((1000, 90)).astype(np.float32)
    path = tmp_path / "run.pt"
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.from_numpy(values), "b": torch.ones(7)}, path)
    rows = verified(path, tmp_path / "intact")
    assert [row["received"] for row in rows] == [[1, 1, 2, 2, 4, 4], [], [3, 3], [], []]
    assert all((row["seals"], row["unverified"]) == (2, []) for row in rows)
    (place,) = ckpt.open(path)["a"].weight.flat[70_000:70_001].sources()
    content = bytearray(path.read_bytes())
    content[place.offset] ^= 1
    path.write_bytes(content)
    errors = {row["error"] for row in verified(path, tmp_path / "damaged")}
    assert len(errors) == 1
    assert "`a`" in errors.pop()
