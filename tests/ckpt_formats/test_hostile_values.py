"""Values that files state and no checkpoint has: each ends in an error that says so, never in a fault."""

import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file

import fuzz_readers
from ckpt.pipeline import receipts
from ckpt.pipeline.evidence_text import to_text
from ckpt.pipeline.job_note import JobNote
from ckpt_formats.core.checkpoint import Origin
from ckpt_formats.core.claims import MAX_NAME
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.evidence import Evidence
from ckpt_formats.core.tensor import Tensor, ZeroBlob
from ckpt_formats.state_dicts.parameter_order import (
    NamedTensor,
    NumberedGroup,
    NumberedParameter,
    only_assignment,
)
from damage import BROKEN, ckpt
from forged import forge, put


def _model(folder: Path) -> Path:
    save_file({"a": np.ones(3, np.float32)}, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("shape", [[0, 1 << 62], [1 << 62, 0], [0, 1 << 40, 1 << 40]])
def test_a_shape_that_no_array_can_have_is_damage(shape: list[int], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    for command in (("inspect", path), ("convert", path, tmp_path / "out")):
        ran = ckpt(*command)
        assert ran.code == BROKEN
        assert "none that can be" in ran.err
        assert "model.safetensors" in ran.err


def test_a_name_longer_than_any_of_a_model_is_damage(tmp_path: Path) -> None:
    for length, code in ((MAX_NAME, 0), (MAX_NAME + 1, BROKEN)):
        save_file({"a" * length: np.ones(3, np.float32)}, tmp_path / "model.safetensors")
        ran = ckpt("inspect", tmp_path / "model.safetensors")
        assert ran.code == code
        assert code == 0 or "a tensor's name has 65,537 characters" in ran.err


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("origin", "layout", "dp"), "x", "`dp` is x"),
        (("origin", "layout", "tp"), [1], "`tp` is"),
        (("origin", "layout", "pp"), -1, "`pp` is -1"),
        (("origin", "layout", "dp"), 1 << 40, "must be from 0"),
        (("origin", "layout", "dp"), True, "`dp` is True"),
        (("origin", "layout", "x"), {"$tensor": "a"}, "no layout holds tensors"),
        (("values", 0, "x"), {"$tensor": "a"}, "which does not exist"),
    ],
)
def test_a_manifest_of_other_values_is_damage(keys: tuple[Any, ...], value: Any, words: str, tmp_path: Path) -> None:
    assert ckpt("convert", _model(tmp_path), tmp_path / "u").code == 0

    def change(forged: Any) -> None:
        if keys[0] == "values":
            forged.fields["values"] = [{}, {keys[2]: value}]
        else:
            put(*keys, value=value)(forged)

    forge(tmp_path / "u", change)
    for command in (("inspect", tmp_path / "u"), ("convert", tmp_path / "u", tmp_path / "out", "--to", "torch")):
        ran = ckpt(*command)
        assert ran.code == BROKEN, ran.err
        assert words in ran.err


@pytest.mark.parametrize("value", ["1", 1.0, -1, (1 << 20) + 1, [1], False])
def test_degrees_of_a_layout_are_numbers(value: object) -> None:
    with pytest.raises(CorruptError, match="must be from 0"):
        Origin("deepspeed", layout={"dp": value})
    assert Origin("deepspeed", layout={"dp": 4, "tp": None, "other": value}).layout["dp"] == 4


def test_a_layout_with_an_integer_of_thousands_of_digits_is_shown_in_short(tmp_path: Path) -> None:
    assert ckpt("convert", _model(tmp_path), tmp_path / "u").code == 0
    forge(tmp_path / "u", put("origin", "layout", "x", value={"$int": "0x" + "f" * 5000}))
    for command in (("inspect", tmp_path / "u"), ("diff", tmp_path / "u", tmp_path / "u", "--json")):
        assert ckpt(*command).code == 0
    assert "an integer of 20,000 bits" in ckpt("inspect", tmp_path / "u").out


@pytest.mark.timeout(60)
def test_an_optimizer_with_a_group_for_each_parameter_is_searched_soon() -> None:
    shape = (2,)
    module = [NamedTensor(str(i), Tensor.of(ZeroBlob(shape, np.dtype(np.float32)))) for i in range(300)]
    groups = [NumberedGroup((NumberedParameter(None, {"exp_avg": shape}),)) for _ in module]
    start = time.process_time()
    assert only_assignment(groups, module) is None
    assert time.process_time() - start < 5


GOOD: dict[str, Any] = {
    "file": "packs/00000.safetensors",
    "nbytes": 5,
    "seals": [["a", 0, 5, "xxh3-128", "7", "label", 0]],
    "entry": {},
    "e_tag": "",
    "read": to_text(Evidence()),
}


def _line(fields: object) -> str:
    text = json.dumps(fields)
    return f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}\n"


MALFORMED: dict[str, Any] = {
    **{f"no {key}": {k: v for k, v in GOOD.items() if k != key} for key in GOOD},
    **{f"{key} is {value!r}": GOOD | {key: value} for key in GOOD for value in (None, 7.5, [7])},
    "a file outside": GOOD | {"file": "../../x"},
    "an absolute file": GOOD | {"file": "/etc/passwd"},
    "a file with NUL": GOOD | {"file": "a\0b"},
    "a seal of another kind": GOOD | {"seals": [["a", 0, 5, "md5", "7", "label", 0]]},
    "a seal without numbers": GOOD | {"seals": [["a", "0", 5, "crc32", "7", "label", 0]]},
    "a seal with a long digest": GOOD | {"seals": [["a", 0, 5, "crc32", "7" * 5000, "label", 0]]},
    "evidence that is none": GOOD | {"read": ["AAAA", "", ""]},
    "a list": [],
    "a number": 5,
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_line_of_a_journal_is_no_receipt(kind: str) -> None:
    lines = [_line(GOOD), _line(MALFORMED[kind]), _line(GOOD | {"file": "b"})]
    assert [one.file for one in receipts.from_lines(lines)] == [GOOD["file"], "b"]


def test_a_job_with_nul_in_a_name_is_damage() -> None:
    job = JobNote("0", "ckpt", "a", "b", "torch", ("ckpt",), "/", "2026", ("x",))
    assert JobNote.from_json(job.to_json(), "job.json") == job
    for name, value in (("source", "a\0"), ("target", "\0"), ("files", ["\0"]), ("command", ["a\0"])):
        fields = {**json.loads(job.to_json()), name: value}
        with pytest.raises(CorruptError, match="not the description of a job"):
            JobNote.from_json(json.dumps(fields).encode(), "job.json")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_readers_end_in_a_result_or_an_error_for_changed_files(tmp_path: Path) -> None:
    """300 files, the same each time, of which each takes a reader 0.03 s; `run.py fuzz_readers` goes on for hours."""
    targets = fuzz_readers.make_targets(tmp_path)
    assert fuzz_readers.fuzz(targets, seconds=100, seed=1, guided=False, most=300) == {}
