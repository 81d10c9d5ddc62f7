"""States have other names in the library than in files, where names stay as they are for ever."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.chains.append import append
from ckpt.chains.write import DeltaPolicy
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint, Group, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.state_names import from_stored, to_stored
from held import checkpoint, contents, parameter

STORED = {
    "param": "model",
    "fp32": "master",
    "exp_avg": "exp_avg",
    "model": "optimizer.model",
    "master": "optimizer.master",
    "optimizer.master": "optimizer.optimizer.master",
    "optimizer.exp_avg": "optimizer.exp_avg",
    "master_param": "master_param",
    "": "",
}
NAMES = ("fp32", "exp_avg", "master", "model", "param")
"""Stored names in the order of the states: those of the weights, and an optimizer's own of the library's names."""
WRITTEN = {
    "run/index.safetensors": "2e2131750d117412a88e00bcf86cb276",
    "run/manifest.json": "5771b623254b14481b40bef383fe9eca",
    "run/packs/00000.safetensors": "05ced5d2dd7ad2ac2e4f130bf17f4f05",
    "run.pt": "3eb3044661111303f48eeb0f20381cc1",
    "run.safetensors": "f92436ba55ddde5babd180e4bcc2612d",
}
"""The MD5 of what the code wrote when the library's names were those of files."""
PASSING = ("checksum", "time", "writer", "written_by")
"""Fields of a JSON file that are not compared, and that of a checksum over them."""


def run(step: int) -> Checkpoint:
    """A weight with masters, and an optimizer that has states named like the library's own."""
    master = np.arange(20_000, dtype=np.float32).reshape(100, 200) / 7 + step
    values = {name: master * number for number, name in enumerate(NAMES, 1)}
    values["param"] = master.astype(DTYPES["bfloat16"])
    states = {from_stored(name): values[name] for name in NAMES}
    return checkpoint([parameter("w", states, count=step)], (Group({"lr": 0.5}, ("w",)),))


@pytest.mark.parametrize(("stored", "state"), STORED.items())
def test_stored_names_and_states_translate_into_each_other(stored: str, state: str) -> None:
    assert from_stored(stored) == state
    assert to_stored(state) == stored


def test_files_have_the_bytes_that_they_had_under_the_old_names(tmp_path: Path) -> None:
    targets = [tmp_path / name for name in ("run.pt", "run.safetensors", "run")]
    ckpt.save(run(3), targets[0])
    ckpt.save(run(3), targets[1], ckpt.Safetensors(with_optimizer=True))
    ckpt.save(run(3), targets[2])
    files = (path for path in sorted(tmp_path.rglob("*")) if path.is_file())
    assert {path.relative_to(tmp_path).as_posix(): digest(path) for path in files} == WRITTEN
    for target in targets:
        assert contents(ckpt.open(target)) == contents(run(3)), target


def test_chains_have_the_old_names_in_their_list_and_their_deltas(tmp_path: Path) -> None:
    for step in (1, 2):
        append(tmp_path, run(step), step, DeltaPolicy("subspace:max_abs_err=0.001"), Execution())
    listed = json.loads((tmp_path / "chain.json").read_bytes())
    assert list(listed["members"][1]["errors"]) == ["fp32", "exp_avg"]
    manifest = json.loads((tmp_path / "step-0000000002" / "manifest.json").read_bytes())
    assert manifest["states"] == list(NAMES)
    assert [codec["base"] for codec in manifest["codecs"]] == [None, "fp32"]
    assert [delta["states"] for delta in manifest["deltas"]] == [list(NAMES[:-1])]
    assert [delta["parent_states"] for delta in manifest["deltas"]] == [list(NAMES[:-1])]
    restored = ckpt.open(f"{tmp_path}@2")
    assert restored["w"].states.keys() == set(map(from_stored, NAMES))
    assert restored.errors.keys() == {("w", "master"), ("w", "exp_avg")}


def digest(path: Path) -> str:
    """The MD5 of a file, of JSON without the fields of `PASSING`."""
    content = path.read_bytes()
    if path.suffix == ".json":
        content = json.dumps(json.loads(content, object_hook=_lasting)).encode()
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _lasting(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in PASSING}


def test_the_names_of_files_are_refused_with_those_of_the_library() -> None:
    states = run(1).parameters["w"].states
    with pytest.raises(KeyError, match="`param` of files is named `model`"):
        states["param"]
    with pytest.raises(KeyError, match="`fp32` of files is named `master`"):
        states.get("fp32")
    assert states.get("exp_avg_sq") is None
    with pytest.raises(KeyError, match=r"^'exp_avg_sq'$"):
        states["exp_avg_sq"]
    with pytest.raises(InvalidArgumentError, match="`w`: the state `fp32` of files is named `master`"):
        Parameter("w", "parameter", {"fp32": states["master"]})
    with pytest.raises(ckpt.errors.NoMatchError, match="the state `fp32` of files is named `master`"):
        ckpt.diff(run(1), run(2), states="fp32")
