"""The golden checkpoint with coded states, of every codec and level: each version of this program decodes it alike.

`sample_checkpoints/make_compressed.py` wrote it; no test does.
"""

import json
import subprocess
import sys
from typing import Any

import pytest
import xxhash

from ckpt.findings import find_problems
from ckpt.pipeline import Execution
from ckpt_codecs import CODECS
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.dtypes import SAFETENSORS_TAGS
from ckpt_formats.core.encoding import LEVELS
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import FileBlob, read
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chunked import EncodedBlob
from damage import SAMPLES

GOLDEN = SAMPLES / "universal-1-coded"
CONTENT = "blake2b-256:5a9502789140c8b0d5d87aa713579bcc75378867bd1c1a0f70f8e3b1505a5415"


@pytest.fixture(scope="module")
def golden() -> Checkpoint:
    return open_checkpoint(GOLDEN)


@pytest.fixture(scope="module")
def expected() -> Any:
    return json.loads(GOLDEN.with_suffix(".expected.json").read_text())


def test_every_bit_of_every_state_is_what_it_was_before_it_was_coded(golden: Checkpoint, expected: Any) -> None:
    hashes = {
        f"{p.name}/{to_stored(state)}": [t.dtype.name, list(t.shape), xxhash.xxh3_128_hexdigest(read(t).tobytes())]
        for p, state, t in golden.tensors()
    }
    assert hashes == expected


def test_verify_finds_nothing_in_the_compressed_sample(golden: Checkpoint) -> None:
    assert {finding.kind for finding in find_problems(golden, Execution(2))} <= {"copy"}


def test_compressed_sample_has_its_content_id() -> None:
    assert manifest.load(GOLDEN / manifest.NAME).content == CONTENT


def test_sample_has_one_of_everything(golden: Checkpoint) -> None:
    """Every codec, level and element type, one chunk and several."""
    blobs = [tensor.fragments[0].blob for _, _, tensor in golden.tensors()]
    coded = [blob.store for blob in blobs if isinstance(blob, EncodedBlob)]
    assert {store.codec.name for store in coded} == CODECS.keys() - {"rounded"}
    assert any(isinstance(blob, DerivedBlob) for blob in blobs)
    assert any(isinstance(blob, FileBlob) for blob in blobs)
    assert {store.codec.config().get("level") for store in coded} >= set(LEVELS)
    assert {t.dtype.name for _, _, t in golden.tensors()} == set(SAFETENSORS_TAGS)
    several = {store.chunking.count > 1 for store in coded}
    assert several == {len(store.chunking.chunk) == 1 for store in coded} == {False, True}
    assert {store.base is None for store in coded} == {False, True}


@pytest.mark.slow
def test_compressed_sample_is_verified() -> None:
    command = [sys.executable, "-m", "ckpt_cli", "verify", str(GOLDEN), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert {finding["kind"] for finding in json.loads(ran.stdout)["findings"]} <= {"copy"}
