"""What must hold of a run with which real Megatron core went on from files of ours, beside one from its own."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from ckpt.pipeline import check_complete, check_not_suspicious
from ckpt_cli.main import cli
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from megatron_jobs.kinds import KINDS

ROUNDING = {"fp32": 1e-5, "bf16": 2e-2}
"""Of the largest logit. Over other numbers of ranks, sums are made in another order."""
States = Callable[[Checkpoint], Mapping[Any, object]]
"""Every bit that counts, by (name, state)."""


def reshard(source: Path, target: Path, options: str) -> None:
    """By the command."""
    result = CliRunner().invoke(cli, ["reshard", str(source), str(target), *options.split()])
    assert result.exit_code == 0, (target, result.output, result.exception)


def assert_computes_the_same(resumed: Path, kind: str, case: str, changes: Mapping[str, Any]) -> None:
    """The logits: bit for bit if every rank adds up as before."""
    import torch

    old, new = (torch.load(resumed / name / "logits.pt") for name in (kind, case))
    assert old.std() > 0.01
    same = changes.get("tp", KINDS[kind].tp) == KINDS[kind].tp and "ep" not in changes
    assert torch.allclose(old, new, rtol=0, atol=0 if same else ROUNDING[KINDS[kind].dtype] * float(old.abs().max()))


def assert_loaded_is_written(resumed: Path, case: str, format_name: str, states: States) -> None:
    """What Megatron saves of what it has loaded is what we wrote."""
    written = resumed / "written" / case
    assert detect(written).name == format_name
    actual = open_checkpoint(written)
    check_complete(actual)
    check_not_suspicious(actual)
    assert states(actual) == states(open_checkpoint(resumed / case / "loaded"))


def assert_goes_on_the_same(resumed: Path, kind: str, case: str, states: States) -> None:
    """One more step gives the same bits, and has changed the moments."""
    before, old, new = (
        states(open_checkpoint(resumed / at)) for at in (f"{kind}/loaded", f"{kind}/stepped", f"{case}/stepped")
    )
    assert all(old[place] != before[place] for place in old if place[1] == "exp_avg")
    assert new == old
