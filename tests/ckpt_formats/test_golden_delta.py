"""The golden chain of deltas, with every delta codec: each version of this program decodes it to the same values.

`sample_checkpoints/make_deltas.py` wrote it; no test does.
"""

import json
from pathlib import Path

import pytest
import xxhash

from ckpt.findings import find_problems
from ckpt.pipeline import Execution
from ckpt_codecs.registry import DELTA_CODECS
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.chain import chain_file
from damage import SAMPLES, ckpt
from page_codecs import decode, decode_delta
from universal_decoder import ChainReader, UniversalDecoder
from universal_reader import chunk_count

GOLDEN = SAMPLES / "universal-1-delta"
EXPECTED = json.loads(GOLDEN.with_suffix(".expected.json").read_text())
APPROXIMATE = {13, 14, 15}


@pytest.mark.parametrize("step", EXPECTED)
def test_delta_sample_has_every_bit_of_every_state(step: str) -> None:
    checkpoint = open_checkpoint(Path(f"{GOLDEN}@{step}"))
    hashes = {
        f"{p.name}/{to_stored(s)}": xxhash.xxh3_128_hexdigest(read(t).tobytes()) for p, s, t in checkpoint.tensors()
    }
    assert hashes == EXPECTED[step]
    assert bool(checkpoint.errors) == (int(step) in APPROXIMATE)


def test_the_reader_of_the_page_decodes_the_same_values() -> None:
    for step, checkpoint in ChainReader(GOLDEN, decode, decode_delta).checkpoints.items():
        hashes = {
            f"{name}/{state}": xxhash.xxh3_128_hexdigest(checkpoint.values(name, state))
            for name, entry in checkpoint.entries.items()
            for state in entry["states"]
        }
        assert hashes == EXPECTED[str(step)]


@pytest.mark.parametrize("name", ["universal-1-plain", "universal-1-coded", "recorded-1/run.chain/step-0000000003"])
def test_the_reader_of_the_page_reads_the_other_samples(name: str) -> None:
    checkpoint = UniversalDecoder(SAMPLES / name, decode, decode_delta)
    for parameter, state, tensor in open_checkpoint(SAMPLES / name).tensors():
        assert checkpoint.values(parameter.name, to_stored(state)) == read(tensor).tobytes(), (
            f"{parameter.name}/{state}"
        )


def test_sample_has_one_of_everything() -> None:
    """Every delta codec, deltas with and without a parent, several chunks, and error figures."""
    chain = ChainReader(GOLDEN, decode, decode_delta)
    entries = [entry for checkpoint in chain.checkpoints.values() for entry in checkpoint.entries.values()]
    deltas = [entry["delta"] for entry in entries if "delta" in entry]
    assert {delta["codec"]["name"] for delta in deltas} == set(DELTA_CODECS)
    assert any(
        "delta" not in checkpoint.entries["late"] for step, checkpoint in chain.checkpoints.items() if step >= 12
    )
    sizes = {
        chunk_count(entry["states"][delta["states"][0]]["shape"]) > 1
        for entry in entries
        if (delta := entry.get("delta")) is not None
    }
    assert sizes == {False, True}
    assert {member.exact for member in chain_file.read(GOLDEN).members} == {False, True}


def test_verify_finds_nothing_in_the_delta_sample() -> None:
    assert [finding for finding in find_problems(open_checkpoint(GOLDEN), Execution(2)) if finding.kind != "copy"] == []
    done = ckpt("verify", GOLDEN)
    assert done.code == 0, done
