"""Universal folders between us and real DeepSpeed: its converter's are read, and its `load_universal` takes ours.

The engine that loads starts from other weights, other frozen parameters and zeroed buffers. What it then holds is
compared with what the engine that saved held. Conversions run in one process, loads in another.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from deepspeed_truth import assert_is_the_truth
from engines import launch
from engines.kinds import KINDS, Kind

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

ADAM = ("torch-adamw", "torch-amsgrad", "fused-adamw", "cpu-adamw", "cpu-lion")
"""What has `exp_avg` and `exp_avg_sq`, as the CPU's Lion has, without need."""


def converts(kind: Kind) -> bool:
    """Whether DeepSpeed's own converter gets to its end."""
    return kind.stage > 0 and not kind.zero.get("elastic_checkpoint") and kind.optimizer in ADAM and kind.ep == 1


def round_robin(kind: Kind) -> bool:
    return bool(kind.zero.get("round_robin_gradients"))


CONVERTED = [name for name, kind in KINDS.items() if converts(kind) and not round_robin(kind)]
MIXED_UP = [name for name, kind in KINDS.items() if round_robin(kind)]


def step_of(zoo: Path, kind: str) -> Path:
    return zoo / kind / "ckpt" / (zoo / kind / "ckpt" / "latest").read_text()


def truth_of(zoo: Path, kind: str) -> dict:
    truth: dict = torch.load(zoo / kind / "truth.pt", weights_only=False)
    return truth


# Reading theirs


@pytest.fixture(scope="module")
def failures(zoo: Path, theirs: Path) -> dict[str, str | None]:
    """Of every kind: how DeepSpeed's own converter failed, if it did."""
    steps = {kind: step_of(zoo, kind) for kind in KINDS}
    failed = launch.to_universal({step: theirs / kind / f"{step.name}_universal" for kind, step in steps.items()})
    return {kind: failed[step] for kind, step in steps.items()}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("theirs")


@pytest.fixture(scope="module", params=CONVERTED)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def restored(kind: str, theirs: Path, failures: dict[str, str | None]) -> Checkpoint:
    """What DeepSpeed's converter made of a kind, opened once."""
    return open_checkpoint(theirs / kind)


def test_converter_of_deepspeed_gets_as_far_as_the_page_states(failures: dict[str, str | None]) -> None:
    assert [kind for kind, failure in failures.items() if failure is None] == [
        name for name, kind in KINDS.items() if converts(kind)
    ]


def test_converted_universal_checkpoint_has_the_values_of_the_engine(
    kind: str, restored: Checkpoint, zoo: Path
) -> None:
    truth = truth_of(zoo, kind)
    for states in truth["params"].values():
        lost = states.pop("max_exp_avg_sq", None)
        assert (lost is not None) == any("max_exp_avg_sq" in notice for notice in restored.notices)
    assert_is_the_truth(restored, truth)
    assert find_problems(restored, Execution()) == []


def test_converted_universal_checkpoint_has_the_extras_of_its_source(
    kind: str, restored: Checkpoint, zoo: Path
) -> None:
    source = open_checkpoint(zoo / kind / "ckpt")
    assert restored.groups == source.groups
    assert restored.aliases == source.aliases
    assert list(restored.parameters) == list(source.parameters)
    assert restored.extras.keys() - {"ranks"} == source.extras.keys() - {"ranks"}
    assert restored.origin.layout == {k: v for k, v in source.origin.layout.items() if k not in ("pipeline", "experts")}
    assert {n: dict(p.values) for n, p in restored.parameters.items()} == {
        n: dict(p.values) for n, p in source.parameters.items()
    }


@pytest.mark.parametrize("kind", MIXED_UP)
def test_round_robin_gradients_that_their_converter_mixed_up_are_recognised(
    kind: str, theirs: Path, failures: dict[str, str | None]
) -> None:
    with pytest.raises(CorruptError, match="made by DeepSpeed's converter from a run with round_robin_gradients"):
        open_checkpoint(theirs / kind)


# Loading ours


@dataclass(frozen=True)
class Job:
    """A kind that we convert, and how the engine that loads it differs from the one that saved it."""

    kind: str
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    by_them: bool = False
    """Converted by DeepSpeed instead."""

    def __str__(self) -> str:
        changes = "".join(f"-{key}{value}" for key, value in self.changes.items())
        return f"{self.kind}{changes}{'-theirs' if self.by_them else ''}"


JOBS = [
    Job("z1_bf16_dp2"),
    Job("z1_bf16_dp2", {"stage": 2, "dp": 1}),
    Job("z1_bf16_dp2", {"stage": 3, "dp": 4}),
    Job("z2_fp16_dp2", {"dp": 3}),
    Job("z3_bf16_dp2_three_groups"),
    Job("z3_bf16_dp2_three_groups", {"stage": 1, "dp": 3}),
    Job("z3_bf16_dp4_tied_frozen", {"dp": 2}),
    Job("z3_bf16_dp4_tied_frozen", {"stage": 2, "dp": 3}),
    Job("z1_bf16_dp2_tied_frozen"),
    Job("z1_bf16opt_dp4", {"dp": 3}),
    Job("z1_bf16_dp2_sgd", {"dp": 3}),
    Job("z1_bf16_dp2_amsgrad"),
    Job("z2_bf16_dp2_bf16_states"),
    Job("z1_fp16_dp2_skipped_steps", {"stage": 3}),
    Job("z0_fp32_dp2", {"stage": 3}),
    Job("z1_bf16_megatron_dp2"),
    Job("z1_bf16_tp2_dp2"),
    Job("z1_bf16_tp2_dp2", {"tp": 1, "dp": 3}),
    Job("z1_bf16_tp2_dp2", {"tp": 4, "dp": 1}),
    Job("z1_bf16opt_tp2_pp2_dp1"),
    Job("z1_bf16opt_tp2_pp2_dp1", {"pp": 1, "dp": 2}),
    Job("z3_bf16_autotp2_dp2"),
    Job("z2_bf16_dp2_round_robin", {"zero": {}}),
]
MIXES_UP = Job("z2_bf16_dp2_round_robin")
FIRST_OPTIONS = Job("z3_bf16_dp2_three_groups", by_them=True)


@pytest.fixture(scope="module")
def reports(
    zoo: Path, theirs: Path, failures: dict[str, str | None], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What real DeepSpeed says of every job."""
    out = tmp_path_factory.mktemp("ours")
    jobs = [*JOBS, MIXES_UP, FIRST_OPTIONS]
    for kind in dict.fromkeys(job.kind for job in jobs):
        save(open_checkpoint(zoo / kind / "ckpt"), out / kind, writable("deepspeed-universal"))
    given = [
        {
            "checkpoint": (theirs if job.by_them else out) / job.kind,
            "tag": f"{step_of(zoo, job.kind).name}_universal",
            "kind": job.kind,
            "truth": zoo / job.kind / "truth.pt",
            "report": out / "reports" / f"{number}.json",
            "universal": True,
            "changes": job.changes,
        }
        for number, job in enumerate(jobs)
    ]
    return dict(zip(map(str, jobs), launch.resume_all(given), strict=True))


def unlike(report: dict[str, Any]) -> list[dict[str, tuple[Any, Any]]]:
    """Options of the groups that are not the truth's: (true, found), by group."""
    groups = zip(report["param_groups"]["truth"], report["param_groups"]["found"], strict=True)
    return [{k: (a.get(k), b.get(k)) for k in a | b if a.get(k) != b.get(k)} for a, b in groups]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_deepspeed_loads_every_bit_that_it_loads_at_all(job: Job, reports: dict, zoo: Path) -> None:
    """DeepSpeed restores neither buffers nor frozen parameters from a universal folder; all else is equal."""
    report, truth = reports[str(job)], truth_of(zoo, job.kind)
    never = {f"{part}/{name}" for part in ("buffers", "frozen") for name in truth[part]}
    assert set(report["mismatches"]) == never
    assert report["loaded"]
    assert report["global_steps"] == KINDS[job.kind].steps
    assert report["steps"]["found"] == report["steps"]["truth"]
    assert {s for g in report["raw_steps"]["found"] for s in g} == {s for g in report["raw_steps"]["truth"] for s in g}


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_deepspeed_gives_every_group_its_own_options(job: Job, reports: dict) -> None:
    assert not any(unlike(reports[str(job)]))


@pytest.mark.parametrize("job", [job for job in JOBS if KINDS[job.kind].model == "megatron"], ids=str)
def test_training_goes_on_from_a_written_universal_checkpoint(job: Job, reports: dict) -> None:
    """Of models without buffers, which DeepSpeed would not restore."""
    report = reports[str(job)]
    expected = report["expected"]
    if not job.changes:
        assert report["evaluation"] == expected["evaluation"]
        assert report["losses_after"] == expected["losses_after"]
    else:
        assert report["evaluation"] == pytest.approx(expected["evaluation"], abs=5e-4)
        assert report["losses_after"] == pytest.approx(expected["losses_after"], abs=1e-3)


# What DeepSpeed gets wrong when it loads


def test_deepspeed_mixes_up_values_when_gradients_are_round_robin(reports: dict) -> None:
    """The same folder is loaded right without them: see the jobs."""
    assert sum(place.endswith("/fp32") for place in reports[str(MIXES_UP)]["mismatches"]) > 20


def test_deepspeed_stage_3_gives_all_groups_the_options_of_the_first(reports: dict) -> None:
    """From ours it takes only what all groups have in common."""
    decays = [change.get("weight_decay") for change in unlike(reports[str(FIRST_OPTIONS)])]
    assert decays == [None, (0.0, 0.1), (0.03, 0.1)]
