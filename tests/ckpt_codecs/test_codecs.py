"""Every codec gives back every bit."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt_codecs
from ckpt_codecs import (
    Codec,
    CodecError,
    Integers,
    Planes,
    SecondMoment,
    candidate_codecs,
    from_config,
    parse,
)
from ckpt_codecs.lossless.rounded import Rounded
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import Array
from codec_arrays import CHUNKED, F32
from effort import examples
from held import FLOATS, STORABLE, array, arrays, bits


def comes_back(codec: Codec, values: Array, base: Array | None) -> None:
    data = codec.encode(values, base)
    assert len(data) <= values.nbytes + 1
    assert bits(codec.decode(data, values.shape, values.dtype, base)) == bits(values)


@settings(max_examples=examples(150), deadline=None)
@given(arrays(), arrays(FLOATS), st.sampled_from(CHUNKED))
def test_codecs_return_any_array_with_any_base(values: Array, base: Array, codec: Codec) -> None:
    comes_back(codec, values, base)


@given(
    st.integers(1, 40000),
    st.lists(st.floats(0.001, 1), min_size=1, max_size=40),
    st.integers(0, 255),
    st.integers(0, 1000),
)
def test_integers_returns_streams_of_any_alphabet(size: int, weights: list[float], least: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    values = (random.choice(len(weights), size, p=np.array(weights) / sum(weights)) + least).astype(np.uint8)
    comes_back(Integers(), values, None)


@pytest.mark.parametrize("shape", [(1 << 18,), (1000, 300), (3, 100_001)])
def test_codecs_return_whole_chunks(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(0, 0.02, shape).astype(F32)
    for codec in CHUNKED:
        comes_back(codec, values, np.square(values))


def test_codecs_move_a_stored_plane_over_itself() -> None:
    """Where the plane before it shrinks by less than its size."""
    random = np.random.default_rng(0)
    for symbols in (2, 100, 200):
        noise = random.integers(0, 1 << 32, 20_000, dtype=np.uint32)
        values = noise & np.uint32(0xFFFFFF00) | random.integers(0, symbols, noise.size, dtype=np.uint32)
        for codec in (Planes("max"), Planes(), Integers("fast")):
            comes_back(codec, values.view(F32 if codec.name == "planes" else np.uint32), None)


def test_codecs_reach_their_bits_an_element() -> None:
    """Bits an element, against the entropy of exponents and what is noise."""
    random = np.random.default_rng(0)
    weights = random.normal(0, 0.02, (1024, 256)).astype(F32)
    scales = np.exp(random.normal(0, 2, 256)) * np.exp(random.normal(0, 1, (1024, 1)))
    second = (scales * random.chisquare(3, weights.shape)).astype(F32)
    first = (np.sqrt(second) * random.normal(0, 1, weights.shape)).astype(F32)

    def cost(codec: Codec, values: Array, base: Array | None = None) -> float:
        return 8 * len(codec.encode(values, base)) / values.size

    assert cost(Planes(), weights) < 26.7
    assert cost(Planes(), weights.astype(DTYPES["bfloat16"])) < 10.7
    assert cost(Planes(), weights.astype(DTYPES["bfloat16"]).astype(F32)) < 10.7
    assert cost(Planes(), np.abs(weights)) < 25.7
    assert cost(SecondMoment(), second) < cost(Planes(), second) - 1.2
    assert cost(ckpt_codecs.FirstMoment(), first, second) < cost(Planes(), first) - 0.5
    assert cost(Integers(), np.arange(100_000)) < 0.02
    assert cost(Integers(), random.random(100_000) < 0.01) < 0.11
    assert cost(Integers(), random.integers(0, 3, 100_000)) < 1.7
    assert cost(Planes(), np.ones(100_000, F32)) < 0.001


def test_a_few_values_are_rounded_without_a_kernel_to_the_same_bits() -> None:
    """All upper halves of a float32, NaNs too, with lower halves at and around a half of the last place."""
    halves = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    master = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | halves).reshape(-1).view(np.float32)
    dtype = DTYPES["bfloat16"]
    many = Rounded().decode(b"", master.shape, dtype, master)
    few = [Rounded().decode(b"", (512,), dtype, master[i : i + 512]) for i in range(0, master.size, 512)]
    assert bits(np.concatenate(few)) == bits(many)


def test_rounded_returns_the_master_rounded() -> None:
    master = np.concatenate([array(F32, (3000,)), np.random.default_rng(0).normal(0, 1, 3000).astype(F32)])
    with np.errstate(all="ignore"):
        copy = master.astype(DTYPES["bfloat16"])
    assert bits(Rounded().decode(b"", copy.shape, copy.dtype, master)) == bits(copy)
    assert Rounded().encode(copy[3000:], master[3000:]) == b""
    with pytest.raises(ckpt_codecs.NotApplicable):
        Rounded().encode(copy, master)  # there are NaNs
    other = copy[3000:].copy()
    other.view(np.uint16)[77] ^= 1
    with pytest.raises(ckpt_codecs.NotApplicable):
        Rounded().encode(other, master[3000:])


# --- names and configurations


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing",
        "planes:level=max,level=max",
        "zstd:level=0",
        "zstd:level=23",
        "zstd:level=true",
        "zstd:level=x",
    ],
)
def test_parse_refuses_what_is_no_codec(text: str) -> None:
    with pytest.raises(CodecError):
        parse(text)


@pytest.mark.parametrize(
    "config",
    [
        {"name": "planes", "level": []},
        {"name": "planes", "level": None},
        {"name": "zstd", "level": 1e9},
        {"name": "zstd", "level": "3"},
    ],
)
def test_a_configuration_from_a_stranger_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(CodecError):
        from_config(config)


@pytest.mark.parametrize("level", ["fast", "default", "max"])
def test_candidate_codecs_are_there_for_every_state(level: str) -> None:
    for dtype in STORABLE:
        for role in ("parameter", "frozen", "buffer", "extra"):
            for state in ("fp32", "param", "exp_avg", "exp_avg_sq", "momentum_buffer", "step"):
                codecs = candidate_codecs(role, state, dtype, level)
                values = array(dtype, (70, 80))
                assert codecs
                assert len(codecs[0].encode(values, None)) <= values.nbytes + 1
    assert candidate_codecs("parameter", "exp_avg", F32)[0].context == "exp_avg_sq"
    assert candidate_codecs("parameter", "exp_avg_sq", F32)[0] == SecondMoment()
    with pytest.raises(CodecError):
        candidate_codecs("parameter", "fp32", F32, "best")


PLUGIN = """
from dataclasses import dataclass
from ckpt_codecs import Codec, Zstd

@dataclass(frozen=True)
class Mine(Zstd):
    name = "mine"

@dataclass(frozen=True)
class Fake(Zstd):
    name = "zstd"
"""


@pytest.mark.slow
def test_registry_takes_a_codec_of_another_package(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ckpt.codecs]\nmine = mine:Mine\nwrong = mine:Mine\nzstd = mine:Fake\n")
    code = (
        "import ckpt_codecs as c\n"
        "assert c.parse('mine:level=5').config() == {'name': 'mine', 'level': 5}\n"
        "assert c.find('zstd') is c.Zstd\n"
        "try: c.parse('wrong')\n"
        "except c.CodecError as error: print(error)\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "not a subclass of Codec of that name" in done.stdout


class NoCodec:
    """It has the name, but is none."""

    name = "mine"


@pytest.mark.parametrize("place", ["json:loads", f"{__name__}:NoCodec"])
def test_a_codec_of_another_package_is_a_class_derived_from_codec(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = metadata.EntryPoint("mine", place, "ckpt.codecs")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [offered])
    with pytest.raises(ckpt_codecs.CodecError, match=f"{place} of codec 'mine' is not a subclass of Codec"):
        ckpt_codecs.parse("mine")


# --- processes


REPORT = """
import sys, json, numpy as np, ckpt_codecs
from ckpt_codecs.native.library import load
def loaded():
    return bool(load.cache_info().currsize)
early = [loaded(), "zstandard" in sys.modules]
codec = ckpt_codecs.FirstMoment()
values = np.random.default_rng(0).normal(0, 1, (300, 300)).astype("f4")
data = codec.encode(values, np.square(values))
assert codec.decode(data, values.shape, values.dtype, np.square(values)).tobytes() == values.tobytes()
print(json.dumps([early, loaded(), "zstandard" in sys.modules]))
"""


def run(code: str, **env: str) -> list[object]:
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **env},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results: list[object] = json.loads(done.stdout)
    return results


@pytest.mark.slow
def test_kernels_are_loaded_with_the_first_chunk_and_nothing_is_compiled() -> None:
    assert run(REPORT) == [[False, False], True, False]


PEAK = """
import resource, json, numpy as np, ckpt_codecs as c
random = np.random.default_rng(0)
chunk = random.normal(0, 1, (1024, 256)).astype("f4")
def work(n):
    for _ in range(n):
        for codec in (c.Planes(), c.FirstMoment(), c.SecondMoment(), c.Integers()):
            codec.decode(codec.encode(chunk, chunk), chunk.shape, chunk.dtype, chunk)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
first = work(3)
print(json.dumps([first, work(60)]))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_chunks() -> None:
    first, last = run(PEAK)
    assert isinstance(first, int)
    assert isinstance(last, int)
    assert last - first < 20_000  # kB
