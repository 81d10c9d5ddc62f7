"""Chains of lossy deltas from the command line: what is promised, what stays exact, and what is said of the rest."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from ckpt.chains.append import append
from ckpt.chains.restore import open_step
from ckpt.chains.write import DeltaPolicy
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_codecs.base import Shape
from ckpt_codecs.delta import DeltaCodec, StatePair, States, StateTypes, StepInfo
from ckpt_codecs.lossy import PRESETS, ErrorStats, LcCheckpoint, Subspace
from ckpt_codecs.registry import DELTA_CODECS
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.tensor import Array, read
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.error_figures import figures
from damage import UNSUPPORTED, Ran, ckpt
from held import bits, checkpoint, contents, named, parameter, plain
from lossy_states import BF16, training
from training import save_run

STEPS = 8
WEIGHTS = "model"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The states of a real run: most rows of its embedding have seen no token yet."""
    return save_run(tmp_path_factory.mktemp("run"), STEPS)


def appended(run: Path, states: Iterable[Path], *options: object) -> list[Ran]:
    done = [ckpt("append", run, path, *options) for path in states]
    assert [one.code for one in done] == [0] * len(done), done[-1].err
    return done


def values(source: Checkpoint, state: str) -> dict[str, Array]:
    """A state of all that is trained, wide enough to subtract exactly."""
    trained = (p for p in source.parameters.values() if p.role == "parameter")
    return {p.name: read(p.states[state]).astype(np.float64) for p in trained}


def error(true: Path, kept: Checkpoint, state: str = WEIGHTS) -> Array:
    """What a state lacks, of all parameters together."""
    ours, theirs = values(open_checkpoint(true), state), values(kept, state)
    return np.concatenate([(ours[name] - theirs[name]).reshape(-1) for name in ours])


def at(run: Path, step: int) -> Checkpoint:
    return open_step(run, step, ReadOptions()).checkpoint


def loss(run: Path, state: str = WEIGHTS) -> dict[str, float]:
    """What the chain says of its last member."""
    return dict(chain_file.read(run).members[-1].errors[state])  # type: ignore[arg-type]


def norm(values: Array) -> float:
    return float(np.sqrt((values**2).sum()))


# --- the closed loop


@pytest.mark.parametrize(
    "options",
    [("--preset", "resume"), ("--codec", "lc:bits=3,scope=state,coder=packed")],
    ids=["subspace", "lc"],
)
@pytest.mark.slow
def test_errors_settle_and_do_not_add_up(options: tuple[str, str], saved: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    appended(run, saved, *options)
    errors = [norm(error(path, at(run, step))) for step, path in enumerate(saved, 1)]
    assert errors[0] == 0 < min(errors[1:])
    half = STEPS // 2
    assert max(errors[half:]) <= max(errors[:half])
    assert ckpt("verify", run).code == 0


def test_error_figures_are_the_errors_of_the_stored_values(saved: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    appended(run, saved[:3], "--preset", "balanced")
    for state in (WEIGHTS, "exp_avg", "exp_avg_sq"):
        off, recorded = error(saved[2], at(run, 3), state), loss(run, state)
        assert recorded["max_abs"] == np.abs(off).max()
        assert recorded["differing"] <= recorded["elements"] == off.size
        assert np.count_nonzero(off) <= recorded["differing"]


def test_lossy_delta_loses_little_when_nothing_was_learned(saved: list[Path], tmp_path: Path) -> None:
    """Rows of unseen tokens have second moments of zero, which must not make their steps long."""
    run = tmp_path / "run"
    appended(run, saved[:4], "--preset", "balanced")
    moved = np.abs(error(saved[3], open_checkpoint(saved[2]))).max()
    assert np.abs(error(saved[3], at(run, 4))).max() < 4 * moved


# --- promises


@pytest.mark.parametrize("bound", [1e-3, 1e-6])
@pytest.mark.parametrize("anchor", ["exact", "coded"])
@pytest.mark.slow
def test_no_weight_is_off_by_more_than_was_promised(
    bound: float, anchor: str, saved: list[Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    appended(run, saved[:3], "--max-abs-err", bound, "--base", anchor)
    for step, path in enumerate(saved[:3], 1):
        out = tmp_path / f"out{step}"
        assert ckpt("restore", run, out, "--step", step).code == 0
        largest_error = np.abs(error(path, open_checkpoint(out))).max()
        assert largest_error <= bound
        assert (largest_error == 0) == (step == 1 and anchor == "exact")
    assert loss(run)["promised_max_abs"] == bound


@pytest.mark.slow
def test_a_copy_is_rounded_from_the_master_that_keeps_the_promise(tmp_path: Path) -> None:
    bound, run = 1e-5, tmp_path / "run"
    for step, chunk in enumerate(training((700, 400), 3), 1):
        states = named(chunk)
        held = {**states, "model": states["master"].astype(BF16)}
        state = checkpoint([parameter("w", held)], origin=Origin("held", None, step))
        append(run, state, None, DeltaPolicy(f"subspace:max_abs_err={bound}"), Execution())
        restored = {name: read(tensor) for name, tensor in open_checkpoint(run).parameters["w"].states.items()}
        off = np.abs(restored["master"].astype(np.float64) - states["master"]).max()
        assert off <= bound
        assert (off == 0) == (step == 1)
        assert bits(restored["model"]) == bits(restored["master"].astype(BF16))


@pytest.mark.parametrize("bound", [0.5, 0.01])
@pytest.mark.slow
def test_the_error_is_no_larger_than_the_share_of_the_change_that_was_promised(
    bound: float, saved: list[Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    appended(run, saved[:3], "--rel-error", bound)
    change = norm(error(saved[2], at(run, 2)))
    assert 0 < norm(error(saved[2], at(run, 3))) <= bound * change
    recorded = loss(run)
    assert recorded["rel_change"] <= recorded["promised_rel_change"] == bound
    assert recorded["progress"] > 1 - bound


@dataclass(frozen=True)
class Careless(Subspace):
    """Forgets its promise."""

    name: ClassVar[str] = "test-careless"

    def _keeps_bound(self, true: Array, state: Array) -> bool:
        return False


def test_a_promise_that_is_not_kept_is_found_while_writing(
    saved: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DELTA_CODECS, Careless.name, f"{__name__}:Careless")
    run = tmp_path / "run"
    appended(run, saved[:1])
    monkeypatch.setattr(Careless, "_encode_weights", Subspace(step_size=8.0)._encode_weights)
    done = ckpt("append", run, saved[1], "--codec", f"{Careless.name}:max_abs_err=1e-9")
    assert done.code not in (0, 2)
    assert [member.step for member in chain_file.read(run).members] == [1]


# --- what stays exact


def test_counters_random_states_and_what_is_named_stay_exact(saved: list[Path], tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    appended(run, saved[:3], "--preset", "archive", "--exact", r"^norm\.", "--exact", "head.bias")
    assert ckpt("restore", run, out).code == 0
    true, restored = open_checkpoint(saved[2]), open_checkpoint(out)
    assert plain(restored.extras) == plain(true.extras)
    assert plain([group.options for group in restored.groups]) == plain([group.options for group in true.groups])
    approximate = {(name, state) for name, state in restored.errors}
    assert {name for name, _ in approximate} == {"embed.weight", "head.weight"}
    assert {state for _, state in approximate} == {WEIGHTS, "exp_avg", "exp_avg_sq"}
    for one, state, tensor in true.tensors():
        same = bits(read(tensor)) == bits(read(restored.parameters[one.name].states[state]))
        assert same == ((one.name, state) not in approximate), (one.name, state)


@dataclass(frozen=True)
class Zeroing(DeltaCodec):
    """Gives back everything that it is given as zeros."""

    name: ClassVar[str] = "test-zeroing"
    lossless: ClassVar[bool] = False

    def encode(self, change: StatePair) -> bytes:
        return b""

    def decode(
        self, data: bytes, before: States, shape: Shape, form: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        return {state: np.zeros(shape, dtype) for state, dtype in form.items()}


def test_a_count_that_is_a_float_is_no_matter_of_degree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's count for each element has the shape of the weight."""
    monkeypatch.setitem(DELTA_CODECS, Zeroing.name, f"{__name__}:Zeroing")
    for step in (1, 2):
        states = {state: np.full(64, step, np.float32) for state in ("model", "exp_avg", "exp_avg_sq", "step")}
        state = checkpoint([parameter("scale", states)], origin=Origin("held", None, step))
        append(tmp_path / "run", state, None, DeltaPolicy(Zeroing.name), Execution())
    scale_states = open_checkpoint(tmp_path / "run").parameters["scale"].states
    assert {state: set(read(tensor)) for state, tensor in scale_states.items()} == {
        state: {2 if state == "step" else 0} for state in states
    }


# --- the whole state is surveyed once


@dataclass(frozen=True)
class Surveying(Subspace):
    """Notes what it is shown."""

    name: ClassVar[str] = "test-surveying"
    seen: ClassVar[list[list[tuple[int, StatePair]]]] = []
    fitted: ClassVar[list[float | None]] = []

    def survey(self, samples: Iterable[tuple[int, StatePair]], step: StepInfo) -> Subspace:
        sampled = list(samples)
        self.seen.append(sampled)
        assert not self.fitted
        return super().survey(iter(sampled), step)

    def fit(self, changes, step):  # type: ignore[no-untyped-def]
        self.fitted.append(self.rms)
        return self


def test_a_codec_is_shown_one_chunk_of_each_parameter_before_any_is_coded(
    saved: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DELTA_CODECS, Surveying.name, f"{__name__}:Surveying")
    run = tmp_path / "run"
    appended(run, saved[:1])
    Surveying.seen.clear()
    Surveying.fitted.clear()
    appended(run, saved[1:2], "--codec", Surveying.name, "--exact", "head.bias")
    (shown,) = Surveying.seen
    true = open_checkpoint(saved[1]).parameters
    trained = {p.name: p.weight.size for p in true.values() if p.role == "parameter" and p.name != "head.bias"}
    assert [size for size, _ in shown] == list(trained.values())
    for name, (_, change) in zip(trained, shown, strict=True):
        assert change.after.keys() == {"param", "exp_avg", "exp_avg_sq"} == change.before.keys()
        for states, path in ((change.before, saved[0]), (change.after, saved[1])):
            whole = open_checkpoint(path).parameters[name]
            assert all(read(whole.states[s]).tobytes().find(held.tobytes()) >= 0 for s, held in named(states).items())
    assert len(set(Surveying.fitted)) == 1
    assert Surveying.fitted[0] is not None
    entries = manifest.load(run / chain_file.read(run).members[1].folder / manifest.NAME).entries
    codecs = [entry.delta.codec for entry in entries if entry.delta and entry.delta.codec["name"] == Surveying.name]
    assert {codec["rms"] for codec in codecs} == set(Surveying.fitted)
    assert len(codecs) == len(trained)


def test_changes_larger_than_any_in_the_samples_are_not_lost_for_ever() -> None:
    shape = (64, 8)
    before, small = np.zeros(shape, np.float32), np.full(shape, 2.0**-12, np.float32)
    large = small.copy()
    large[3, 3], large[5, 5] = 2.0**-10, -(2.0**-10)
    small[0, 0] = -small[0, 0]
    codec = LcCheckpoint(scope="state").survey([(small.size, StatePair({"fp32": before}, {"fp32": small}))], StepInfo())
    for _ in range(8):
        change = StatePair({"fp32": before}, {"fp32": large})
        before = codec.decode(codec.encode(change), change.before, shape, {"fp32": before.dtype})["fp32"]
    assert np.abs(before - large).max() < 2.0**-12


def adam(beta2: float) -> Iterator[Checkpoint]:
    """Two states of a run with this option, held in memory."""
    for step, states in enumerate(training((96, 64), 2), 1):
        groups = (Group({"lr": 1e-3, "betas": (0.9, beta2)}, ("w",)),)
        yield checkpoint([parameter("w", named(states))], groups, origin=Origin("held", None, step))


@pytest.mark.parametrize(
    ("codec", "beta2", "warned"), [("excp", 0.999, True), ("excp", 0.95, False), ("lc", 0.999, False)]
)
def test_a_codec_warns_of_what_it_would_do_to_this_run(codec: str, beta2: float, warned: bool, tmp_path: Path) -> None:
    for step, state in enumerate(adam(beta2), 1):
        save(state, tmp_path / f"step{step}", writable("universal"))
    appended(tmp_path / "run", [tmp_path / "step1"])
    (done,) = appended(tmp_path / "run", [tmp_path / "step2"], "--codec", codec)
    assert ("may diverge" in done.err and "beta2 is 0.999" in done.err) == warned


# --- nothing is silent


@pytest.mark.slow
def test_loss_is_never_silent_and_never_without_being_asked_for(saved: list[Path], tmp_path: Path) -> None:
    exact, lossy = tmp_path / "exact", tmp_path / "lossy"
    for run, options in ((exact, ()), (lossy, ("--preset", "balanced"))):
        dry = []
        for path in saved[:2]:
            dry.append(ckpt("append", run, path, *options, "--dry-run").out)
            last = ckpt("append", run, path, *options)
            assert last.code == 0, last.err
            assert ("approximate" in dry[-1]) == ("approximate" in last.out)
        assert "approximate" not in dry[0]
        member = run / chain_file.read(run).members[1].folder
        outputs = {"diff": last.out, "diff --dry-run": dry[1]}
        for name, command in {
            "log": ("log", run),
            "inspect": ("inspect", run),
            "inspect --json": ("inspect", run, "--json"),
            "verify": ("verify", run),
            "verify --json": ("verify", run, "--json"),
            "verify a member": ("verify", member),
            "restore": ("restore", run, tmp_path / f"{run.name}-out"),
            "verify what was restored": ("verify", tmp_path / f"{run.name}-out"),
            "restore --to": ("restore", run, tmp_path / f"{run.name}-dcp", "--to", "dcp"),
        }.items():
            done = ckpt(*command)
            assert done.code == 0, done.err
            outputs[name] = done.out + done.err
        for name, text in outputs.items():
            assert bool(re.search(r"approximate(?!_steps\": \[\])", text)) == (run == lossy), (name, text)
    assert json.loads(ckpt("verify", lossy, "--json").out)["approximate_steps"] == [2]
    assert contents(open_checkpoint(exact)) == contents(open_checkpoint(saved[1]))


@pytest.mark.quick(2)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset: str, saved: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    appended(run, saved[:2], "--preset", preset)
    members = chain_file.read(run).members
    alone = preset == "standalone"
    assert [member.kind for member in members] == ["base", "base" if alone else "delta"]
    assert [member.exact for member in members] == [not alone, False]
    assert members[1].stored_nbytes < members[1].raw_nbytes / 10


# --- how much may be lost is the user's own measure

EVALUATION = """
import sys
import time
from pathlib import Path
import numpy as np
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.core.tensor import read

def logits(path):
    states = open_checkpoint(Path(path)).parameters
    embed, norm, bias, head, last = (
        read(states[name].weight).astype(np.float64)
        for name in ("embed.weight", "norm.weight", "norm.bias", "head.weight", "head.bias")
    )
    held = embed[:512]
    return ((held - held.mean(0)) / np.sqrt(held.var(0) + 1e-5) * norm + bias) @ head.T + last

print("evaluating", sys.argv[1])
print(float(np.square(logits(sys.argv[1]) - logits(sys.argv[2])).mean()))
"""
"""How far what the model of `training` says is from what it says with the true state."""


def evaluate(script: Path, state: Path, true: Path) -> float:
    done = subprocess.run([sys.executable, script, state, true], capture_output=True, check=True)
    return float(done.stdout.split()[-1])


@pytest.mark.slow
def test_the_coarsest_step_is_found_that_the_users_evaluation_accepts(saved: list[Path], tmp_path: Path) -> None:
    script, run, limit = tmp_path / "evaluate it.py", tmp_path / "run", 1e-6
    script.write_text(EVALUATION)
    command = f"{sys.executable} '{script}' {{}} {saved[1]}"
    first, second = (
        ckpt("append", run, path, "--max-loss-increase", limit, "--eval-cmd", command, "--json") for path in saved[:2]
    )
    assert any("nothing to evaluate" in note["text"] for note in json.loads(first.out)["notes"])
    assert second.code == 0, second.err
    evaluation = json.loads(second.out)["evaluation"]
    trials = re.findall(r"trial: step (\S+), loss \S+, (\S+)", second.err)
    tried = {float(step): float(more) for step, more in trials}
    accepted = {step for step, more in tried.items() if more <= limit}
    assert 0 < len(accepted) < len(tried)
    assert evaluation["step"] == pytest.approx(max(accepted), rel=1e-2)
    assert max(accepted) < min(tried.keys() - accepted) < 1.1 * max(accepted)
    out = tmp_path / "out"
    assert ckpt("restore", run, out).code == 0
    assert evaluate(script, out, saved[1]) == evaluation["loss"] <= limit
    assert evaluation["exact"] == 0
    assert sorted(os.listdir(tmp_path)) == ["evaluate it.py", "out", "run"]


COUNTING = "import os, sys; print(len(os.listdir(os.path.dirname(sys.argv[1]))))"
"""A loss for the exact state, and one more for any other, which lies beside its delta."""


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("no-such-command {}", "no-such-command cannot be run"),
        (f"{sys.executable} -c 'raise SystemExit(7)' {{}}", "ended with 7"),
        (f"{sys.executable} -c 'print(1); print(\"good\")' {{}}", "the line 'good', which is not a number"),
        (f"{sys.executable} -c pass {{}}", "the line '', which is not a number"),
        (f"{sys.executable} -c 'print(float(\"nan\"))' {{}}", "the loss of the exact state is nan"),
        (f"{sys.executable} -c '{COUNTING}' {{}}", "even the smallest step size, 0.25"),
    ],
    ids=["absent", "ends with 7", "no number", "prints nothing", "NaN", "never enough"],
)
def test_an_evaluation_that_fails_changes_nothing(command: str, words: str, saved: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    appended(run, saved[:1])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = ckpt("append", run, saved[1], "--max-loss-increase", "0.1", "--eval-cmd", command)
    assert done.code == UNSUPPORTED, done.err
    assert words in done.err
    assert "hint: " in done.err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.slow
def test_trials_leave_nothing_behind_and_disturb_no_others(saved: list[Path], tmp_path: Path) -> None:
    """Interrupted, killed, and two at once for one target."""
    base, delta, started_file = tmp_path / "base", tmp_path / "delta", tmp_path / "asked"
    assert ckpt("compress", saved[0], f"{base}/").code == 0
    script = f"import pathlib, time; pathlib.Path('{started_file}').touch(); time.sleep(600)"
    waiting = f'{sys.executable} -c "{script}" {{}}'
    arguments = ("diff", str(base), str(saved[1]), "-o", str(delta), "--max-loss-increase", "1", "--eval-cmd")
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)):
        running = subprocess.Popen([sys.executable, "-m", "ckpt_cli", *arguments, waiting], start_new_session=True)
        while not started_file.exists():
            time.sleep(0.05)
        assert {".delta.ckpt-trial", "base"} <= set(os.listdir(tmp_path))
        others = ckpt(*arguments, f"{sys.executable} -c 'print(1)' {{}}")
        assert others.code == 11, others.err
        assert running.poll() is None
        running.send_signal(number)
        assert running.wait(60) == code
        os.killpg(running.pid, signal.SIGKILL) if number == signal.SIGKILL else None
        started_file.unlink()
        assert (tmp_path / ".delta.ckpt-trial").exists() == (number == signal.SIGKILL)
    assert ckpt(*arguments, f"{sys.executable} -c 'print(1)' {{}}").code == 0
    assert sorted(os.listdir(tmp_path)) == ["base", "delta"]


# --- usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(
            (("diff", "a", "b", "-o", "d", *report), f"{report[0]} is for the report")
            for report in (
                ("--html", "page.html"),
                ("--only", "w"),
                ("--skip", "w"),
                ("--by", "layer"),
                ("--sort", "max"),
                ("--top", "3"),
                ("--state", "model"),
                ("--tensors-only",),
            )
        ),
        *(
            (("diff", "a", "b", *option), f"{option[0]} is for deltas")
            for option in (
                ("--preset", "resume"),
                ("--codec", "lc"),
                ("--max-abs-err", "1"),
                ("--exact", "w"),
                ("--dry-run",),
                ("--step", "3"),
            )
        ),
        (("diff", "a", "b", "-o", "d", "--base-every", "3"), "--base-every"),
        (("diff", "a", "b", "-o", "d", "--preset", "standalone"), "--preset"),
        (("append", "c", "a", "--preset", "standalone", "--base", "coded"), "--base and --base-every do not apply"),
        (("append", "c", "a", "--preset", "standalone", "--base-every", "3"), "--base and --base-every do not apply"),
        (("append", "c", "a", "--preset", "resume", "--codec", "lc"), "leave out --codec"),
        (("append", "c", "a", "--preset", "none"), "--preset"),
        (("append", "c", "a", "--max-loss-increase", "1"), "need each other"),
        (("append", "c", "a", "--eval-cmd", "e {}"), "need each other"),
        (
            ("append", "c", "a", "--max-loss-increase", "nan", "--eval-cmd", "e {}"),
            "--max-loss-increase is a number",
        ),
        (("append", "c", "a", "--max-loss-increase", "1", "--eval-cmd", "e"), "needs {}"),
        (("append", "c", "a", "--max-loss-increase", "1", "--eval-cmd", "'e {}"), "not a valid command"),
        (
            ("append", "c", "a", "--max-loss-increase", "1", "--eval-cmd", "e {}", "--max-abs-err", "1"),
            "one of them",
        ),
        (("append", "c", "a", "--max-abs-err", "0"), "--max-abs-err"),
        (("append", "c", "a", "--rel-error", "-1"), "--rel-error"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: tuple[str, ...], words: str) -> None:
    done = ckpt(*arguments)
    assert done.code == 2
    assert words in done.err


@pytest.mark.parametrize(
    "options",
    [
        ("--codec", "lc", "--max-abs-err", "1"),
        ("--max-abs-err", "inf"),
        ("--max-abs-err", "1e31"),
        ("--rel-error", "nan"),
        ("--exact", "norm"),
    ],
)
def test_bounds_that_no_codec_can_keep_are_wrong_usage(
    options: tuple[str, ...], saved: list[Path], tmp_path: Path
) -> None:
    done = ckpt("append", tmp_path / "run", saved[0], *options)
    assert done.code == 2
    assert not (tmp_path / "run").exists()


def test_figures_have_those_that_a_codec_promised() -> None:
    measured = ErrorStats(4, 1, 0.5, 0.25, 4.0)
    result = figures(measured, changed=False, promised={"tail": 0.125})
    assert result is not None
    assert (result["tail"], result["differing"], result["max_abs"]) == (0.125, 1, 0.5)
    assert figures(ErrorStats(4), changed=False, promised={"tail": 0.125}) is None
