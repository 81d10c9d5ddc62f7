"""Checkpoints that we cut anew, resumed by real DeepSpeed's ordinary `load_checkpoint` at the new stage and degrees.

The engine starts from other weights, and all that it then holds is compared with what the source's engine held when
it saved. All jobs run in one process (see `engines.launch`).
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckpt_cli.pipeline import Effort, copy
from ckpt_formats.base import Degrees, Goal
from ckpt_formats.registry import open_checkpoint, writable
from engines import launch
from engines.kinds import KINDS, Kind

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class Job:
    """A checkpoint of the zoo, and the stage and degrees to resume it at."""

    kind: str
    stage: int
    dp: int
    tp: int | None = None
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Fields of the engine's own kind that differ from the source's, beside these."""

    @property
    def source(self) -> Kind:
        return KINDS[self.kind]

    @property
    def changes(self) -> dict[str, Any]:
        tp = {} if self.tp is None else {"tp": self.tp}
        return {"stage": self.stage, "dp": self.dp, **tp, **self.options}

    @property
    def same_degrees(self) -> bool:
        return self.dp == self.source.dp and self.tp in (None, self.source.tp)

    @property
    def same_arithmetic(self) -> bool:
        """Stage 3 computes linear layers by a function of its own, tensor parallelism sums in parts."""
        return (self.stage == 3) == (self.source.stage == 3) and self.tp in (None, self.source.tp)

    @property
    def same_steps(self) -> bool:
        """Stage 0's optimizer for half precision steps differently: from scratch, too, its losses leave the others'."""
        return (self.stage == 0) == (self.source.stage == 0) or self.source.dtype == "fp32"

    def __str__(self) -> str:
        tp = "" if self.tp is None else f"_tp{self.tp}"
        return f"{self.kind}-to-z{self.stage}_dp{self.dp}{tp}"


REDUCE_ALL = {"zero": {"reduce_scatter": False}}
"""Muon at stage 3 wants whole gradients."""
INELASTIC: dict[str, Any] = {"zero": {}}
"""DeepSpeed can save elastic checkpoints, and cannot load them."""

STAGES = (0, 1, 2, 3)
EVERY_STAGE_AND_DEGREE = [
    Job(f"z{source}_{dtype}_dp2", stage, (stage - source + 1) % 4 + 1)
    for dtype in ("bf16", "fp16", "fp32")
    for source in STAGES
    for stage in STAGES
]
"""Each source goes to every stage and to every degree, and to its own stage at its own degree."""

OTHERS = [
    Job("z1_bf16opt_dp2", 1, 2),
    Job("z1_bf16opt_dp2", 1, 3),
    Job("z1_bf16opt_dp2", 2, 1),
    Job("z1_bf16opt_dp2", 3, 4),
    Job("z1_bf16opt_dp4", 1, 1),
    Job("z1_bf16opt_dp3_tied_frozen", 1, 4),
    Job("z0_bf16_dp2_tied_frozen", 3, 3),
    Job("z1_bf16_dp2_tied_frozen", 2, 3),
    Job("z2_bf16_dp2_tied_frozen", 1, 4),
    Job("z3_bf16_dp2_tied_frozen", 1, 1),
    Job("z3_bf16_dp4_tied_frozen", 0, 2),
    Job("z1_bf16_dp2_one_group", 3, 4),
    Job("z1_bf16_dp2_three_groups", 3, 3),
    Job("z3_bf16_dp2_three_groups", 2, 4),
    Job("z1_bf16_dp2_round_robin", 2, 4),
    Job("z2_bf16_dp2_round_robin", 3, 3),
    Job("z2_bf16_dp4_round_robin", 1, 3),
    Job("z1_bf16_dp2_aligned", 2, 3),
    Job("z2_bf16_dp3_aligned", 3, 1),
    Job("z3_bf16_dp2_sub_groups", 3, 3),
    Job("z3_bf16_dp4_sub_groups", 1, 2),
    Job("z1_bf16_dp2_elastic", 1, 4, options=INELASTIC),
    Job("z2_bf16_dp3_elastic", 3, 2, options=INELASTIC),
    Job("z1_bf16_dp2_fused", 0, 3),
    Job("z0_fp16_dp2_fused", 2, 4),
    Job("z2_bf16_dp2_offload", 3, 1),
    Job("z1_bf16_dp2_bf16_states", 3, 3),
    Job("z1_bf16_dp2_amsgrad", 2, 3),
    Job("z1_bf16_dp2_sgd", 3, 3),
    Job("z3_bf16_dp2_sgd", 2, 1),
    Job("z1_bf16_dp2_lion", 3, 4),
    Job("z3_bf16_dp2_lion", 1, 3),
    Job("z1_bf16_dp2_adagrad", 2, 4),
    Job("z3_bf16_dp2_adagrad", 1, 3),
    Job("z1_bf16_dp2_muon", 2, 3),
    Job("z1_bf16_dp3_muon", 3, 2, options=REDUCE_ALL),
    Job("z1_bf16opt_dp2_muon", 1, 4),
    Job("z3_bf16_dp2_muon", 1, 4),
    Job("z1_fp16_dp2_skipped_steps", 3, 4),
    Job("z1_bf16_dp2_legacy_stream", 3, 3),
    Job("z3_bf16_dp2_legacy_stream", 2, 2),
    Job("z1_bf16_dp2_rich_client_state", 2, 4),
    Job("z3_bf16_dp2_rich_client_state", 3, 1),
    Job("z3_bf16_dp4_hpz2", 3, 2),
    Job("z1_bf16_megatron_dp2", 3, 4),
    Job("z1_bf16_megatron_dp2", 1, 2, 2),
    Job("z1_bf16_megatron_dp2", 2, 1, 4),
    Job("z1_bf16_tp2_dp2", 1, 1, 2),
    Job("z1_bf16_tp2_dp2", 3, 2, 2),
    Job("z1_bf16_tp2_dp2", 1, 4, 1),
    Job("z1_bf16_tp2_dp2", 1, 1, 4),
    Job("z1_bf16_tp4_dp1", 2, 2, 2),
    Job("z1_bf16_tp4_dp1", 1, 2, 1),
    Job("z1_bf16opt_tp2_dp1", 1, 2, 2),
    Job("z2_fp16_tp2_dp2", 1, 3, 1),
    Job("z0_fp32_tp2_dp2_untied", 1, 1, 2),
    Job("z1_bf16_autotp2_dp2", 2, 1, 2),
    Job("z2_bf16_autotp2_dp2", 1, 2, 2),
    Job("z3_bf16_autotp2_dp2", 3, 1, 2),
]
JOBS = [*EVERY_STAGE_AND_DEGREE, *OTHERS]


@dataclass(frozen=True)
class Resumed:
    """What came of all jobs: where their reports are, and what was said by those that have none."""

    reports: Path
    said: str

    def of(self, job: Job) -> dict[str, Any]:
        file = self.reports / f"{job}.json"
        if file.exists():
            report: dict[str, Any] = json.loads(file.read_text())
            return report
        found = re.search(rf"{re.escape(str(file))} FAILED: (.*?)(?=\n/|\Z)", self.said, re.DOTALL)
        raise AssertionError(found[1] if found else self.said)


@pytest.fixture(scope="session")
def resumed(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    out = tmp_path_factory.mktemp("resharded")
    listed = []
    for job in JOBS:
        target = out / str(job)
        source, degrees = open_checkpoint(zoo / job.kind / "ckpt"), Degrees(dp=job.dp, tp=job.tp, zero=job.stage)
        copy(source, writable("deepspeed"), Goal(target, degrees), "", Effort())
        listed.append(
            {
                "checkpoint": target,
                "tag": (target / "latest").read_text(),
                "kind": job.kind,
                "truth": zoo / job.kind / "truth.pt",
                "report": out / f"{job}.json",
                "changes": job.changes,
            }
        )
    try:
        launch.resume_all(listed)
    except launch.EngineError as error:
        return Resumed(out, str(error))
    return Resumed(out, "")
