"""Optimizers' states of 8 and 4 bits, of torchao and bitsandbytes: carried bit for bit, plain where numbers are needed.

`tests/golden_states/make.py` writes the files, and has the libraries compute the values.
"""

import json
import zlib
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from ckpt.chains.append import append
from ckpt.chains.write import DeltaPolicy
from ckpt.compare import diff
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_codecs.errors import CodecError
from ckpt_codecs.quantised.flat_blocks import FlatBlocks
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.quantised.states import quantised_states
from ckpt_formats.core.tensor import ArrayBlob, Tensor, read
from ckpt_formats.registry.opening import open_checkpoint
from damage import UNSUPPORTED, ckpt

GOLDEN = Path(__file__).parents[1] / "golden_states"
VALUES: dict[str, dict[str, str]] = json.loads((GOLDEN / "values.json").read_text())
SCHEMES = {
    "torchao-8-bit": ("torchao 8-bit", 8),
    "torchao-4-bit": ("torchao 4-bit", 4),
    "torchao-fp8": ("torchao FP8", 8),
    "bitsandbytes-adam": ("bitsandbytes 8-bit", 8),
    "bitsandbytes-lion": ("bitsandbytes 8-bit", 8),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("states")
    for kind in VALUES:
        (root / f"{kind}.pt").write_bytes(zlib.decompress((GOLDEN / f"{kind}.z").read_bytes()))
    return root


def bits(source: Checkpoint) -> dict[tuple[str, str], bytes]:
    return {
        (name, state): read(tensor).tobytes()
        for name, one in source.parameters.items()
        for state, tensor in one.states.items()
    }


@pytest.mark.parametrize("kind", VALUES)
def test_quantised_states_are_named_and_have_the_values_of_the_library(kind: str, folder: Path) -> None:
    source = open_checkpoint(folder / f"{kind}.pt")
    states = quantised_states(source)
    assert {f"{one.parameter}/{one.name}" for one in states} == VALUES[kind].keys()
    assert {(one.scheme, one.bits) for one in states} == {SCHEMES[kind]}
    plain = source.cast("fp32")
    assert quantised_states(plain) == ()
    assert {name for one in plain.parameters.values() for name in (*one.states, *one.values)} <= {
        *("model", "step", "exp_avg", "exp_avg_sq", "state1")
    }
    for place, digest in VALUES[kind].items():
        name, _, state = place.partition("/")
        tensor = plain.parameters[name].states[state]
        whole = read(tensor)
        assert whole.shape == source.parameters[name].shape
        assert blake2b(whole.tobytes(), digest_size=16).hexdigest() == digest
        assert tensor[3:50, 5:33].tobytes() == whole[3:50, 5:33].tobytes()
    (note,) = [notice for notice in plain.notices if "dequantised from" in notice]
    assert SCHEMES[kind][0] in note


@pytest.mark.parametrize("kind", VALUES)
def test_quantised_states_are_carried_bit_for_bit(kind: str, folder: Path, tmp_path: Path) -> None:
    source = open_checkpoint(folder / f"{kind}.pt")
    save(source, tmp_path / "universal")
    save(open_checkpoint(tmp_path / "universal"), tmp_path / "back.pt")
    before, after = bits(source), bits(open_checkpoint(tmp_path / "back.pt"))
    codes = {key for key in before if key[1] not in ("model", "step")}
    assert len(codes) > len(VALUES[kind])
    assert {key: after[key] for key in codes} == {key: before[key] for key in codes}
    assert len(quantised_states(open_checkpoint(tmp_path / "back.pt"))) == len(VALUES[kind])


def test_diff_compares_the_values_of_quantised_states(folder: Path, tmp_path: Path) -> None:
    for kind in ("torchao-4-bit", "bitsandbytes-adam"):
        source = open_checkpoint(folder / f"{kind}.pt")
        result = diff(source, source.cast("fp32"), tensors_only=True)
        assert {f"{one.name}/{one.state}" for one in result.pairs if "dequantised" in one.what} == VALUES[kind].keys()
        assert not any(one.sums.changed for one in result.pairs)
        parameter = source.parameters["1.weight"]
        scale = next(name for name in parameter.states if name in ("exp_avg.scale", "absmax1"))
        doubled = Tensor.of(ArrayBlob(read(parameter.states[scale]) * np.float32(2)))
        changed = replace(parameter, states={**parameter.states, scale: doubled})
        other = replace(source, parameters={**source.parameters, "1.weight": changed})
        (one,) = [one for one in diff(source, other, tensors_only=True).pairs if one.sums.changed]
        assert (one.name, one.state, one.sums.is_measured) == ("1.weight", "exp_avg", True)
        assert one.sums.relative == pytest.approx(1, rel=1e-3)


def test_formats_that_cut_states_refuse_quantised_ones(folder: Path, tmp_path: Path) -> None:
    source = open_checkpoint(folder / "torchao-8-bit.pt")
    for target in ("megatron", "megatron-legacy", "deepspeed", "deepspeed-universal"):
        with pytest.raises(UnsupportedError, match="is quantised"):
            save(source, tmp_path / target, target)


def test_lossy_codec_leaves_codes_and_scales_of_states_exact(folder: Path, tmp_path: Path) -> None:
    first = open_checkpoint(folder / "torchao-fp8.pt")
    parameter = first.parameters["0.weight"]
    random = np.random.default_rng(0)
    moved = {
        state: Tensor.of(ArrayBlob((values * random.normal(1, 0.1, values.shape)).astype(values.dtype)))
        for state, tensor in parameter.states.items()
        for values in [read(tensor)]
    }
    second = replace(first, parameters={**first.parameters, "0.weight": replace(parameter, states=moved)})
    append(tmp_path / "chain", first, 1, DeltaPolicy(codec="subspace"), Execution(workers=1))
    append(tmp_path / "chain", second, 2, DeltaPolicy(codec="subspace"), Execution(workers=1))
    back = open_checkpoint(tmp_path / "chain")
    after = bits(back)
    assert {key: after[key] for key in after if "exp_avg" in key[1]} == {
        key: value for key, value in bits(second).items() if "exp_avg" in key[1]
    }
    assert after["0.weight", "model"] != bits(second)["0.weight", "model"]


def test_states_that_are_not_decoded_are_refused_in_words(folder: Path, tmp_path: Path) -> None:
    source = open_checkpoint(folder / "bitsandbytes-adam.pt")
    parameter = source.parameters["1.weight"]
    wrong = {
        "8 bits without blocks": {name: one for name, one in parameter.states.items() if name != "absmax1"},
        "the size of blocks": {**parameter.states, "absmax1": Tensor.of(ArrayBlob(np.ones(5, np.float32)))},
        "does not fit": {**parameter.states, "qmap1": Tensor.of(ArrayBlob(np.ones(16, np.float32)))},
        "codes for": {**parameter.states, "state1": Tensor.of(ArrayBlob(np.ones((2, 66, 64), np.uint8)))},
    }
    for why, states in wrong.items():
        other = replace(source, parameters={**source.parameters, "1.weight": replace(parameter, states=states)})
        with pytest.raises(UnsupportedError, match=f"`1.weight`.*{why}"):
            other.cast("bf16")
        assert other.weights_only().cast("bf16")
    save(other, tmp_path / "wrong.pt")
    ran = ckpt("convert", tmp_path / "wrong.pt", tmp_path / "out.pt", "--dtype", "bf16")
    assert (ran.code, (tmp_path / "out.pt").exists()) == (UNSUPPORTED, False)
    assert "--model-only" in ran.err
    assert "not decoded" in ckpt("inspect", tmp_path / "wrong.pt").out
    shown = ckpt("inspect", folder / "torchao-4-bit.pt").out.replace("\xa0", " ")
    assert "quantised   states exp_avg, exp_avg_sq (torchao 4-bit, 4 bits): 4, 16,640 elements" in shown


def test_flat_blocks_refuse_sizes_and_types_that_no_state_has() -> None:
    for arguments in (((4,), 0), ((4,), 2, "int8"), ((), 2), ((-1,), 2)):
        with pytest.raises(CodecError):
            FlatBlocks(*arguments)
    own = FlatBlocks((3, 5), 4, "uint4")
    table = np.arange(16, dtype=np.float32)
    packed = np.array([0x12, 0x34, 0x56, 0x78, 0x9A, 0xBC, 0xDE, 0xF0], np.uint8)
    scales = np.array([1, 10, 100, 1000], np.float32)
    expected = (np.arange(1, 16, dtype=np.float32) * scales.repeat(4)[:15]).reshape(3, 5)
    assert np.array_equal(own.decode_whole((packed, scales, table)), expected)
