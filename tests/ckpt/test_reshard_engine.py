"""Checkpoints that we cut anew, resumed by real DeepSpeed's ordinary `load_checkpoint` at the new stage and degrees.

The engine starts from other weights, and all that it then holds is compared with what the source's engine held when
it saved. All jobs run in one process (see `engines.launch`).
"""

import json
import re
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckpt.job import save
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from engines import launch
from engines.cuts import VOCABULARY
from engines.kinds import KINDS, Kind

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class Job:
    """A checkpoint of the zoo, and the stage and degrees to resume it at."""

    kind: str
    stage: int
    dp: int
    tp: int | None = None
    _: KW_ONLY
    pp: int | None = None
    firsts: tuple[int, ...] | None = None
    """The first layer of each pipeline stage, as the engine's uniform partition has it."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Fields of the engine's own kind that differ from the source's, beside these."""

    @property
    def source(self) -> Kind:
        return KINDS[self.kind]

    @property
    def changes(self) -> dict[str, Any]:
        cuts = {key: degree for key, degree in (("tp", self.tp), ("pp", self.pp)) if degree is not None}
        return {"stage": self.stage, "dp": self.dp, **cuts, **self.options}

    @property
    def vocab_rows(self) -> int | None:
        """How many rows the engine's tables have at the new degree, which no checkpoint tells."""
        return VOCABULARY + -VOCABULARY % (4 * self.tp) if self.source.model == "megatron" and self.tp else None

    @property
    def same_arithmetic(self) -> bool:
        """Stage 3 computes linear layers by a function of its own, and tensor parallelism sums in parts."""
        return (self.stage == 3) == (self.source.stage == 3) and self.tp in (None, self.source.tp)

    @property
    def same_layout(self) -> bool:
        same_stages = self.pp in (None, self.source.pp)
        return self.same_arithmetic and same_stages and (self.stage, self.dp) == (self.source.stage, self.source.dp)

    @property
    def same_steps(self) -> bool:
        """Stage 0 of fp16 raises the loss scale before it divides by it, other stages after: then they step apart."""
        return self.source.dtype != "fp16" or (self.stage == 0) == (self.source.stage == 0)

    def __str__(self) -> str:
        cuts = "".join(f"_{key}{n}" for key, n in (("tp", self.tp), ("pp", self.pp)) if n is not None)
        return f"{self.kind}-to-z{self.stage}_dp{self.dp}{cuts}"


REDUCE_ALL = {"zero": {"reduce_scatter": False}}
"""Muon at stage 3 wants whole gradients."""

EVERY_STAGE_AND_DEGREE = [
    Job(f"z{source}_bf16_dp2", stage, (stage - source + 1) % 4 + 1) for source in range(4) for stage in range(4)
]
"""Each source goes to every stage and to every degree, and to its own stage at its own degree.

The others go to few ranks: three cut what two held in uneven parts.
"""

OTHER_TYPES = [
    Job("z0_fp16_dp2", 0, 2),
    Job("z0_fp16_dp2", 1, 3),
    Job("z1_fp16_dp2", 0, 1),
    Job("z2_fp16_dp2", 3, 3),
    Job("z3_fp16_dp2", 2, 3),
    Job("z1_fp16_dp2_skipped_steps", 3, 3),
    Job("z0_fp32_dp2", 3, 3),
    Job("z1_fp32_dp2", 0, 1),
    Job("z2_fp32_dp2", 1, 3),
    Job("z3_fp32_dp2", 2, 1),
]
MODELS_AND_GROUPS = [
    Job("z1_bf16opt_dp2", 1, 2),
    Job("z1_bf16opt_dp2", 3, 3),
    Job("z1_bf16opt_dp3_tied_frozen", 1, 4),
    Job("z0_bf16_dp2_tied_frozen", 3, 3),
    Job("z2_bf16_dp2_tied_frozen", 1, 3),
    Job("z3_bf16_dp4_tied_frozen", 0, 2),
    Job("z1_bf16_dp2_one_group", 3, 3),
    Job("z3_bf16_dp2_three_groups", 2, 3),
    Job("z1_bf16_dp2_round_robin", 2, 3),
    Job("z2_bf16_dp4_round_robin", 3, 3),
    Job("z1_bf16_dp2_aligned", 2, 3),
    Job("z2_bf16_dp3_aligned", 1, 3),
    Job("z3_bf16_dp2_sub_groups", 1, 3),
    Job("z3_bf16_dp4_sub_groups", 3, 1),
]
OPTIMIZERS = [
    Job("z1_bf16_dp2_fused", 0, 3),
    Job("z0_fp16_dp2_fused", 2, 3),
    Job("z2_bf16_dp2_offload", 3, 1),
    Job("z1_bf16_dp2_bf16_states", 3, 3),
    Job("z1_bf16_dp2_amsgrad", 2, 3),
    Job("z1_bf16_dp2_sgd", 3, 3),
    Job("z3_bf16_dp2_lion", 1, 1),
    Job("z3_bf16_dp2_adagrad", 1, 3),
    Job("z1_bf16_dp2_muon", 2, 3),
    Job("z1_bf16_dp3_muon", 3, 2, options=REDUCE_ALL),
    Job("z3_bf16_dp2_muon", 1, 3),
    Job("z1_bf16opt_dp2_muon", 1, 3),
]
CONTAINERS = [
    Job("z1_bf16_dp2_legacy_stream", 3, 3),
    Job("z1_bf16_dp2_rich_client_state", 2, 3),
    Job("z3_bf16_dp2_rich_client_state", 3, 1),
]
PIPELINES = [
    Job("z1_bf16_pp2_dp2", 1, 2, pp=2),
    Job("z1_bf16_pp2_dp2", 1, 1, pp=2),
    Job("z1_bf16_pp2_dp2", 1, 2, pp=1),
    Job("z1_bf16_pp4_dp1", 1, 1, pp=2, firsts=(0, 4)),
    Job("z1_bf16opt_tp2_pp2_dp1", 1, 2, 1, pp=2),
    Job("z0_fp32_pp2_dp1_untied", 0, 2, pp=2),
]
TENSOR_PARALLEL = [
    Job("z1_bf16_megatron_dp2", 3, 3),
    Job("z1_bf16_megatron_dp2", 1, 2, 2),
    Job("z1_bf16_tp2_dp2", 1, 2, 2),
    Job("z1_bf16_tp2_dp2", 3, 1, 2),
    Job("z1_bf16_tp2_dp2", 1, 4, 1),
    Job("z1_bf16_tp2_dp2", 2, 1, 4),
    Job("z1_bf16_tp4_dp1", 1, 1, 2),
    Job("z2_fp16_tp2_dp2", 1, 3, 1),
    Job("z1_fp32_tp2_dp2_untied", 0, 2, 1),
    Job("z2_bf16_autotp2_dp2", 1, 2, 2),
    Job("z1_bf16_autotp2_dp2", 2, 1, 4),
    Job("z1_bf16_autotp2_dp2", 1, 3, 1, options={"autotp": False}),
    Job("z3_bf16_autotp2_dp2", 3, 1, 2),
]
EVERY_JOB = (
    *EVERY_STAGE_AND_DEGREE,
    *OTHER_TYPES,
    *MODELS_AND_GROUPS,
    *OPTIMIZERS,
    *CONTAINERS,
    *PIPELINES,
    *TENSOR_PARALLEL,
)
JOBS = [job for job in EVERY_JOB if job.kind in KINDS]


@dataclass(frozen=True)
class Resumed:
    """What came of all jobs: where their reports are, and what was said by those that have none."""

    reports: Path
    output: str

    def of(self, job: Job) -> dict[str, Any]:
        file = self.reports / f"{job}.json"
        if file.exists():
            report: dict[str, Any] = json.loads(file.read_text())
            return report
        match = re.search(rf"{re.escape(str(file))} FAILED: (.*?)(?=\n/|\Z)", self.output, re.DOTALL)
        raise AssertionError(match[1] if match else self.output)


@pytest.fixture(scope="session")
def resumed(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    out = tmp_path_factory.mktemp("resharded")
    listed = []
    for job in JOBS:
        target, truth = out / str(job), zoo / job.kind / "truth.pt"
        layout = {"dp": job.dp, "tp": job.tp, "pp": job.pp, "zero": job.stage, "stages": job.firsts}
        format = writable("deepspeed", vocab_rows=job.vocab_rows, **layout)
        save(open_checkpoint(zoo / job.kind / "ckpt"), target, format)
        tag, report = (target / "latest").read_text(), out / f"{job}.json"
        named = {"checkpoint": target, "tag": tag, "kind": job.kind, "truth": truth, "report": report}
        listed.append({**named, "changes": job.changes})
    try:
        launch.resume_all(listed)
    except launch.EngineError as error:  # those that it names have no report
        return Resumed(out, str(error))
    return Resumed(out, "")


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_resharded_engine_holds_what_the_source_held(job: Job, resumed: Resumed) -> None:
    report = resumed.of(job)
    assert report["mismatches"].keys() == muon_momenta(report["mismatches"], job)
    assert report["loaded"]
    assert report["steps"]["found"] == report["steps"]["truth"]
    assert counts(report["raw_steps"]["found"]) == counts(report["raw_steps"]["truth"])
    assert f"global_step{report['global_steps']}" == report["job"]["tag"]
    assert report["param_groups"]["found"] == report["param_groups"]["truth"]
    assert report["lr"] == [group["lr"] for group in report["param_groups"]["truth"]]
    assert client_keys(job) <= set(report["client_state"])


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_resharded_engine_computes_what_the_source_computed(job: Job, resumed: Resumed) -> None:
    report = resumed.of(job)
    actual, expected = report["evaluation"], report["expected"]["evaluation"]
    bound = 0.0 if job.same_arithmetic else DRIFT[job.source.dtype]
    assert abs(actual - expected) <= bound


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_training_goes_on_from_a_resharded_checkpoint(job: Job, resumed: Resumed) -> None:
    report = resumed.of(job)
    actual, expected = report["losses_after"], report["expected"]["losses_after"]
    assert len(actual) == len(expected) == 3
    drift = [abs(a - b) for a, b in zip(actual, expected, strict=True)]
    bound = DRIFT[job.source.dtype]
    assert drift[0] <= (SAME_WEIGHTS if job.same_arithmetic else bound)
    assert max(drift if job.same_steps else drift[:1]) <= (0.0 if job.same_layout else bound)


SAME_WEIGHTS = 1e-6
"""How far the loss of the first step is off, before any gradient is summed: two units of the last place."""
DRIFT = {"bf16": 1e-3, "fp16": 1e-3, "fp32": 5e-6}
"""How far three losses drift apart when gradients are summed over other ranks, by type of the weights.

It depends on the processor: of bf16, 4.7e-4 on one and 5.8e-4 on another. A step of the optimizer more or less is 1e-2.
"""


def muon_momenta(mismatches: dict[str, str], job: Job) -> set[str]:
    """Muon's momentum is bf16 until it is loaded: `Optimizer.load_state_dict` of torch makes it fp32, of any file."""
    if job.source.optimizer != "muon":
        return set()
    widened = "torch.bfloat16 became torch.float32, the values are the same"
    return {
        place for place, mismatch in mismatches.items() if place.endswith("/momentum_buffer") and mismatch == widened
    }


def counts(steps: list[list[float]]) -> list[set[float]]:
    """The step counts of each group: one, however many parameters, parts or sub-groups keep it."""
    return [set(group) for group in steps]


def client_keys(job: Job) -> set[str]:
    rich = {"args", "random", "numpy_random", "numpy_scalar", "torch_random", "saved_at", "seen", "average"}
    return {"iteration"} | (rich if job.source.client_state == "rich" else set())
