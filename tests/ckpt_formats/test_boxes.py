"""Checkpoints of boxes: the ranks of a run save what they have, each in a pack of its own."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from boxed import BoxedRun, states_at
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import Array, read
from ckpt_formats.registry.opening import open_checkpoint
from page_codecs import decode, decode_delta
from universal_decoder import UniversalDecoder


@pytest.fixture(scope="module")
def boxed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain: a plain base, three deltas, a coded base, a delta."""
    folder = tmp_path_factory.mktemp("boxed")
    run = BoxedRun(folder / "run", folder)
    run.save(1, plain=True)
    for step in (2, 3, 4):
        run.save(step, delta=True)
    run.save(5, codec="auto")
    run.save(6, delta=True)
    assert run.notes == []
    return run.run


def values_of(checkpoint: Checkpoint) -> dict[tuple[str, str], bytes]:
    return {(p.name, s): read(t).tobytes() + str((t.shape, t.dtype)).encode() for p, s, t in checkpoint.tensors()}


def expected(step: int) -> dict[tuple[str, str], bytes]:
    def items() -> Iterator[tuple[str, str, Array]]:
        for name, states in states_at(step).items():
            yield from ((name, state, values) for state, values in states.items())

    return {(n, s): np.ascontiguousarray(v).tobytes() + str((v.shape, v.dtype)).encode() for n, s, v in items()}


@pytest.mark.parametrize("step", range(1, 7))
def test_boxes_read_as_whole_tensors_bit_for_bit(boxed: Path, step: int) -> None:
    assert values_of(open_checkpoint(Path(f"{boxed}@{step}"))) == expected(step)


@pytest.mark.parametrize("step", range(1, 7))
def test_the_reader_of_the_page_reads_boxes(boxed: Path, step: int) -> None:
    reader = UniversalDecoder(boxed / f"step-{step:010d}", decode, decode_delta)
    for name, states in states_at(step).items():
        for state, values in states.items():
            assert reader.whole_values(name, to_stored(state)) == values.tobytes(), (name, state)
