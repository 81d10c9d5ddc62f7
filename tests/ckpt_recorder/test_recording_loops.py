"""A sample of tests/campaigns/recording_loops.py: training loops as people write them, restored at every step."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import recording_loops
from training_loops.run import LOOPS

EXACT = (
    *("torch-adamw-fused", "torch-adamw-foreach", "torch-adamw-amsgrad-maximize"),
    *("torch-sgd-dampened", "torch-nadam", "torch-muon", "own-soap"),
    *("bfloat16-adamw-fused", "groups-in-another-order", "momentum-begins-later"),
    *("scaler-fused", "scaler-sgd", "closure-adamw"),
    *("step-without-gradients", "every-second-parameter-unused", "inf-gradient"),
    *("betas-changed", "onecycle-adamw-noted", "rate-tensor-0-dim", "subclass-ClippingAdamW"),
    *("post-hook-after-the-recorder", "batch-norm", "ema-in-buffers", "vq-codebook", "extra-state-of-plain-values"),
    *("clip-no-grad", "change-by-numpy", "max-norm-embedding", "state-clear", "teacher-lerp", "pruned-in-mid-run"),
    *("tied-weights", "parameters-without-elements", "notes-of-everything"),
    *(
        "both-halves-share-the-middle",
        "parts-called-without-the-model",
        "steps-without-the-optimizer",
        "tied-in-mid-run",
    ),
    *("note-in-the-middle-of-a-swap", "own-globalstate", "adapted-and-taken-back", "note-named-random-states"),
    *("names-of-all-kinds", "random-numpy-cached-gauss", "resumed-and-recorded-on", "raises-after-a-clip"),
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
    assert outcome.kind == "exact", outcome.detail
