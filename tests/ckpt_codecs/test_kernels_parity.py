"""The kernel of Reed-Solomon codes against its twin in NumPy, at every level that this CPU runs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle.parity
from ckpt_codecs import CodecError
from ckpt_codecs.native import parity
from kernel_trials import Engine, Trial, Trials

TRIALS = Trials(parity, oracle.parity)
PROTOTYPES, KERNELS = TRIALS.prototypes, TRIALS.kernels


@TRIALS.of("add_products")
def make_blocks(random: np.random.Generator, n: int) -> Trial:
    rows, columns = int(random.integers(1, 10)), int(random.choice([1, 2, 7, 32, 33, 70]))
    matrix = random.integers(0, 256, (rows, columns), np.uint8)
    inputs = random.integers(0, 256, (columns, n), np.uint8)
    before = random.integers(0, 256, (rows, n + int(random.choice([0, 1, 40]))), np.uint8)

    def run(engine: Engine) -> Any:
        results = []
        for gfni in (None, False, True):
            outputs = before.copy()
            engine.add_products(matrix, inputs, outputs[:, :n], gfni)
            results.append(outputs)
        return results

    return run


def test_no_kernel_of_the_header_is_forgotten() -> None:
    assert sorted(TRIALS) == sorted(KERNELS)
    assert list(parity.SIGNATURES) == list(PROTOTYPES)


@pytest.mark.parametrize("name", KERNELS)
@given(st.integers(0, 1 << 32), st.integers(0, 300))
def test_kernel_of_parity_does_what_its_twin_does(name: str, seed: int, n: int) -> None:
    TRIALS.agree(name, seed, n)


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_of_parity_refuses_sizes_that_do_not_fit(name: str) -> None:
    TRIALS.refuse_bad_sizes(name)


def test_products_of_all_pairs_of_bytes_are_those_of_the_twin() -> None:
    constants = np.arange(256, dtype=np.uint8)
    block = np.tile(constants, 3)[None, :-5]
    for constant in constants:
        products, twin = np.zeros_like(block), np.zeros_like(block)
        parity.add_products(np.array([[constant]]), block, products)
        oracle.parity.add_products(np.array([[constant]]), block, twin)
        assert products.tobytes() == twin.tobytes()


def test_blocks_of_other_shapes_are_refused() -> None:
    matrix, inputs = np.zeros((2, 3), np.uint8), np.zeros((3, 8), np.uint8)
    with pytest.raises(CodecError, match="do not fit"):
        parity.add_products(matrix, inputs, np.zeros((2, 7), np.uint8))
    with pytest.raises(CodecError, match="writable uint8"):
        parity.add_products(matrix, inputs, np.zeros((2, 8), np.int8))
