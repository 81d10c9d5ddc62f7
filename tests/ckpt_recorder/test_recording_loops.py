"""A sample of tests/recording_loops.py: training loops as people write them, restored at every step."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import recording_loops
from training_loops.run import LOOPS

EXACT = (
    *("torch-adamw-fused", "torch-adamw-foreach", "torch-adamw-for-loop", "torch-adamw-amsgrad-maximize"),
    *("torch-adam-decoupled", "torch-sgd-dampened", "torch-sgd-nesterov", "torch-adagrad-fused", "torch-adadelta"),
    *("torch-rmsprop-centered", "torch-adamax", "torch-radam", "a-group-for-each-parameter", "momentum-ends"),
    *("scaler-fused", "scaler-unscaled-fused", "scaler-foreach", "scaler-sgd", "closure-adamw"),
    *("closure-in-every-second-step", "step-without-gradients", "two-steps-with-one-gradient", "nan-gradient"),
    *("every-second-parameter-unused", "inf-gradient", "betas-changed", "onecycle-adamw-noted", "rate-int"),
    *("batch-norm", "vq-codebook", "spectral-norm-old", "weight-norm-parametrized", "observers-of-quantization"),
    *("masked-gradients", "tied-weights", "functional-training", "begins-in-the-middle", "module-dict-never-called"),
    *("swapped-with-averages-for-evaluation", "notes-of-everything", "notes-of-two-calls", "names-of-all-kinds"),
    *("random-numpy-cached-gauss", "groups-replaced-by-equal-ones", "resumed-and-recorded-on", "raises-ValueError"),
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Loops may set the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", EXACT)
def test_loop_is_restored_bit_for_bit_at_every_step(name: str, tmp_path: Path) -> None:
    outcome = recording_loops.outcome_of(LOOPS[name], tmp_path, restores=1)
    assert (outcome.kind, outcome.detail) == ("exact", "")
