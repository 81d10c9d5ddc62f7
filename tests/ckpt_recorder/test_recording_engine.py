"""Runs of real engines, recorded: every step is restored to the bit, and engines go on from it as if nothing was."""

import importlib.util
import json
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckpt.chains.chain import Chain
from ckpt.job import save
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from ckpt_formats.universal.chain import chain_file, states
from ckpt_formats.universal.gradients.record import Kind
from damage import ckpt
from followed import WAYS, Followed, Stopped
from recorded import differences
from recording_jobs import launch
from recording_jobs.kinds import AFTER, END, KINDS, MIDDLE, WARM_UP

HERE = Path(__file__).parents[1]
EXAMPLES = HERE.parent / "examples" / "recording"
RANKS = {"ddp": 2, "fsdp2": 2, "deepspeed_zero": 2}
KILLED, LAST = 6, 12
"""The step of an example from which it is run again, and its last."""
pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

CHAINS = [(name, chain) for name, kind in KINDS.items() for chain in kind.chains]
SAVED = [(*one, at) for one in CHAINS for at in ("middle", "end") if (one[0], at) != ("megatron_fp16", "middle")]
"""Megatron does not count a step that it skips. One follows on the middle, so that state is not restored."""
NOT_ITSELF = ("zero3",)
"""DeepSpeed 0.19.8 goes on from its own checkpoint with other losses than those of the run that was not interrupted."""
CLOSE = 1e-6
"""Over other numbers of ranks, sums are made in another order."""


EVERY, AUTO = "bases=Bases(every=5)", 'bases=Bases(every="auto"), flush="auto", mtbf=0.001'
FIRSTS = {EVERY: [0, 5, 10], AUTO: [0, 8, 9, 10, 11]}
"""The first steps of the segments. With `"auto"` and failures all the time, a base is stored after each step from the
eighth on."""
BASES = [("ddp", EVERY), ("ddp", AUTO), ("fsdp2", AUTO), ("deepspeed_zero", AUTO)]
"""The examples that are recorded with bases, and with which: when is agreed on without the engine."""


@dataclass(frozen=True)
class Resumed:
    """A run that goes on from a restored state."""

    kind: str
    chain: str
    written: tuple[object, ...]
    """How `ckpt restore` is to write it."""
    changes: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join(map(str, (self.kind, self.chain.partition(".")[0], *self.written[1:], *self.changes.values())))


DCP = ("--to", "dcp")
RESUMED = [
    Resumed("plain", "bare.chain", DCP),
    Resumed("scaler_fused", "bare.chain", DCP),
    Resumed("ddp", "based.chain", DCP),
    Resumed("ddp_topk", "bare.chain", DCP),
    Resumed("ddp_int8", "based.chain", DCP),
    Resumed("ddp_topk", "based.chain", DCP, {"shards": 3}),
    Resumed("fsdp2", "bare.chain", DCP),
    Resumed("fsdp2", "based.chain", DCP, {"shards": 3}),
    Resumed("fsdp1_flat_2x2", "bare.chain", DCP),
    Resumed("fsdp1", "based.chain", DCP, {"shards": 3}),
    Resumed("hsdp_2x2", "based.chain", DCP),
    Resumed("fsdp2_tp_2x2", "bare.chain", DCP),
    Resumed("zero1", "based.chain", ("--to", "deepspeed", "--dp", 2)),
    Resumed("zero2", "bare.chain", ("--to", "deepspeed", "--dp", 2, "--zero", 2)),
    Resumed("zero3", "based.chain", ("--to", "deepspeed", "--dp", 2)),
    Resumed("zero3", "bare.chain", ("--to", "deepspeed", "--dp", 2, "--zero", 3)),
    Resumed("zero3", "based.chain", ("--to", "deepspeed", "--dp", 4, "--zero", 3), {"shards": 4}),
]


FOLLOWED = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "hsdp_2x2")
"""The kinds that shadows follow while they train."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all recorded runs. Shadows write what they hold at two steps: KIND/shadow-WAY-STEP."""
    out = tmp_path_factory.mktemp("recorded")
    stop = threading.Event()
    threads = [threading.Thread(target=follow_run, args=(out / kind, stop)) for kind in FOLLOWED]
    for thread in threads:
        thread.start()
    try:
        launch.train(KINDS, out)
        for thread in threads:
            thread.join(60)
    finally:
        stop.set()
    return out


def follow_run(run: Path, stop: threading.Event) -> None:
    """Follow a run that is yet to begin, and write its state at two steps."""
    with suppress(Stopped):
        followed = Followed(run / "bare.chain", stop)
        try:
            for step in (MIDDLE, END):
                for way in WAYS:
                    with followed.at(way, step) as checkpoint:
                        save(checkpoint, run / f"shadow-{way}-{step}", Universal())
        finally:
            followed.close()


def log_of(run: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((run / "log.json").read_text())
    return fields


@pytest.mark.parametrize(("kind", "chain", "at"), SAVED)
def test_a_restored_step_is_what_the_engine_saved(kind: str, chain: str, at: str, runs: Path, tmp_path: Path) -> None:
    run = runs / kind
    done = ckpt("restore", run / chain, tmp_path / "state", "--step", log_of(run)[at])
    assert done.code == 0, done.err
    assert differences(open_checkpoint(tmp_path / "state"), open_checkpoint(run / at)) == {}


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.scaler or kind.dtype == "fp16"])
def test_steps_are_skipped_while_fp16_is_recorded(kind: str, runs: Path) -> None:
    """Else the states above would say nothing of them."""
    assert log_of(runs / kind)["skipped"] > 0


def test_steps_of_deepspeeds_pipeline_have_its_counts_and_schedule(runs: Path) -> None:
    chain = runs / "zero0_pipeline" / "bare.chain"
    for step in range(WARM_UP + 1, END + 1):
        extras = states.open_state(chain, chain_file.read(chain), step).extras
        assert (extras["global_steps"], extras["lr_scheduler"]) == (step, {"last_batch_iteration": step - 1})


def test_a_step_that_deepspeed_skips_is_a_step_without_gradients(runs: Path) -> None:
    """The buffers of its passes come before it, so that a log that ends with this step has them."""
    run = runs / "zero1_fp16" / "bare.chain"
    (logged,) = chain_file.read(run).segments
    of_step = [one for one in states.open_steps(run, logged).logs[0].records if one.step == MIDDLE]
    assert [one.kind for one in of_step[:2]] == [Kind.VALUES, Kind.GRADIENTS]
    assert of_step[1].meta["vectors"] == []


@pytest.mark.parametrize("kind", ["megatron_2x2", "megatron_experts"])
def test_a_step_of_megatron_is_restored_for_other_degrees(kind: str, runs: Path, tmp_path: Path) -> None:
    written = ("--to", "megatron-legacy", "--tp", 1, "--pp", 1, "--ep", 1)
    done = ckpt("restore", runs / kind / "based.chain", tmp_path / "state", "--step", MIDDLE, *written)
    assert done.code == 0, done.err
    assert differences(open_checkpoint(tmp_path / "state"), open_checkpoint(runs / kind / "middle")) == {}


@pytest.mark.parametrize(("at", "step"), [("middle", MIDDLE), ("end", END)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FOLLOWED)
def test_shadows_have_what_the_engine_saved(kind: str, way: str, at: str, step: int, runs: Path) -> None:
    """`python tests/campaigns/shadow_engines.py` compares many steps of runs of 2 and 4 ranks."""
    shadow = open_checkpoint(runs / kind / f"shadow-{way}-{step}")
    assert log_of(runs / kind)[at] == shadow.step == step
    assert differences(shadow, open_checkpoint(runs / kind / at)) == {}


@pytest.mark.parametrize(("kind", "limit"), {"ddp_topk": 2 * 0.042, "ddp_int8": 1.0, "ddp": 5.0}.items())
def test_the_log_of_compressed_gradients_is_as_small_as_they_are(kind: str, limit: float, runs: Path) -> None:
    """Bytes for each parameter and step. Two ranks send 1 % each, so that 2 % of the average are not zero."""
    (segment,) = json.loads(ckpt("log", runs / kind / "bare.chain", "--json").out)["segments"]
    assert limit / 2 < segment["nbytes_per_parameter"] <= limit


def test_ranks_with_different_weights_under_one_name_are_refused_by_all(runs: Path) -> None:
    message = json.loads((runs / "refused.json").read_text())["differing"]
    assert message == "ranks 0 and 1 have different values of `words.weight` under the same name"
    assert not (runs / "differing.chain" / chain_file.NAME).exists()


def test_ranks_with_parts_under_the_same_names_are_recorded_with_other_names(runs: Path) -> None:
    broken = json.loads((runs / "refused.json").read_text())["diverging"]
    assert re.fullmatch("ranks 0 and 1 have different values of `.*` under the same name; no step after 0 .*", broken)
    restored = states.open_state(runs / "renamed.chain", chain_file.read(runs / "renamed.chain"), 2)
    for rank in range(2):
        (saved,) = (open_checkpoint(runs / f"part-{rank}.pt").parameters,)
        mine = {
            name.removeprefix(f"part{rank}."): one
            for name, one in restored.parameters.items()
            if name.startswith(f"part{rank}.")
        }
        assert mine.keys() == saved.keys()
        for name, one in saved.items():
            for state in one.states.keys() & mine[name].states.keys():
                assert read(one.states[state]).tobytes() == read(mine[name].states[state]).tobytes(), (name, state)


@pytest.fixture(scope="module")
def resumed(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of all runs that go on, each from the middle step."""
    out = tmp_path_factory.mktemp("resumed")
    jobs = []
    for one in RESUMED:
        run, state = runs / one.kind, out / str(one)
        done = ckpt("restore", run / one.chain, state, "--step", log_of(run)["middle"], *one.written)
        assert done.code == 0, done.err
        report = out / f"{one}.json"
        jobs.append({"checkpoint": state, "kind": one.kind, "changes": one.changes, "report": report})
    jobs += [
        {"checkpoint": runs / kind / "middle", "kind": kind, "changes": {}, "report": out / f"{kind}.json"}
        for kind in NOT_ITSELF
    ]
    launch.resume_all(jobs, out)
    return {name: json.loads((out / f"{name}.json").read_text()) for name in (*map(str, RESUMED), *NOT_ITSELF)}


@pytest.mark.parametrize("one", RESUMED, ids=str)
def test_losses_go_on_as_those_of_the_run_nobody_killed(
    one: Resumed, runs: Path, resumed: dict[str, list[float]]
) -> None:
    expected = log_of(runs / one.kind)["losses"][MIDDLE : MIDDLE + AFTER]
    if one.kind in NOT_ITSELF:
        expected = resumed[one.kind]
    if one.changes:
        assert resumed[str(one)][:1] == pytest.approx(expected[:1], rel=CLOSE)
    else:
        assert resumed[str(one)] == expected


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chains of all examples: `NAME.chain` of one that runs to its end, `NAME-later.chain` of one that goes on.

    `NAME-NUMBER.chain` is of an example of several ranks that is recorded with bases.
    """
    out = tmp_path_factory.mktemp("examples")
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    if importlib.util.find_spec("lightning") is None:
        names.remove("lightning_run")
    jobs = [job(name, out / name, out / f"{name}.chain") for name in names]
    for number, (name, options) in enumerate(BASES):
        script = out / f"{name}-{number}.py"
        text = (EXAMPLES / f"{name}.py").read_text("utf-8").replace("import Recorder", "import Bases, Recorder")
        script.write_text(re.sub(r"(with Recorder\(.*?)\)(?= as|:)", rf"\1, {options})", text))
        jobs.append(job(name, out / script.stem, out / f"{script.stem}.chain") | {"script": script, "again": True})
    jobs += [
        job(name, out / f"{name}-later", out / f"{name}-later.chain", out / f"{name}.chain@{KILLED}") | {"again": True}
        for name in names
    ]
    launch.run_examples(jobs, out)
    return out


def job(name: str, logs: Path, *arguments: Path) -> dict[str, Any]:
    return {"script": EXAMPLES / f"{name}.py", "arguments": arguments, "world": RANKS.get(name, 0), "logs": logs}


@pytest.mark.parametrize("name", [path.stem for path in sorted(EXAMPLES.glob("*.py"))])
def test_an_example_that_goes_on_from_a_restored_step_ends_as_the_whole_one(name: str, examples: Path) -> None:
    if not (examples / f"{name}.chain").exists():
        pytest.skip("lightning is not installed")
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40
    for run in chains_of(name, examples):
        (logged,) = chain_file.read(run).segments
        steps = states.open_steps(run, logged)
        # Each state is held against what the run hashed when it ended.
        assert LAST in [record.step for record in steps.records(0, Kind.FINGERPRINT)]
        assert steps.is_exact
    whole, later = (states.open_state(run, chain_file.read(run), LAST) for run in chains_of(name, examples))
    assert differences(later, whole) == {}


def chains_of(name: str, examples: Path) -> tuple[Path, Path]:
    return examples / f"{name}.chain", examples / f"{name}-later.chain"


@pytest.mark.parametrize("number", range(len(BASES)), ids=lambda number: f"{BASES[number][0]}-{number}")
def test_ranks_that_store_bases_agree_when_and_have_every_step(number: int, examples: Path) -> None:
    name, options = BASES[number]
    chain = examples / f"{name}-{number}.chain"
    assert [one.first for one in chain_file.read(chain).segments] == FIRSTS[options]
    assert Chain(chain).verify(replay=True).findings == ()
    for step in (KILLED, LAST):
        bare, based = (
            states.open_state(run, chain_file.read(run), step) for run in (examples / f"{name}.chain", chain)
        )
        assert differences(based, bare) == {}
