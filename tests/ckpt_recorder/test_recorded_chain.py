"""What the commands do with a chain that has a log of gradients: any step by its name, checked, made shorter."""

import hashlib
import itertools
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt.chains.change import change
from ckpt.job import Job
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import MODEL
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.chain import chain_file, states
from ckpt_formats.universal.chain.states import last_step
from ckpt_formats.universal.gradients.record import HEAD, Kind
from ckpt_formats.universal.gradients.segment import open_segment, rank_file
from ckpt_recorder import Recorder
from ckpt_training import load
from damage import ckpt

STEPS = 12


class Net(torch.nn.Module):
    """Large and small tensors of odd sizes, a buffer, dropout, a tied and a frozen tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = torch.nn.Linear(301, 251), torch.nn.BatchNorm1d(251)
        self.down, self.out = torch.nn.Linear(251, 7), torch.nn.Linear(7, 7, bias=False)
        self.again = self.out
        self.fixed = torch.nn.Parameter(torch.arange(5.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(torch.tanh(self.norm(self.up(x))), 0.1)
        return self.again(self.out(self.down(y))).square().sum() * self.fixed[1]  # type: ignore[no-any-return]


def optimizer_of(net: Net) -> torch.optim.Optimizer:
    plain = [p for p in net.parameters() if p.dim() < 2 and p.requires_grad]
    groups = [{"params": [p for p in net.parameters() if p.dim() > 1]}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def train(net: Net, optimizer: torch.optim.Optimizer) -> float:
    """One step, its input drawn from torch's generator."""
    optimizer.zero_grad()
    loss = net(torch.randn(9, 301))
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] *= 0.97
    optimizer.step()
    return loss.item()


def state_of(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of all that a step has: weights, buffers, moments."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    moments = {
        f"{names[p]}/{key}": value.clone() for p, state in optimizer.state.items() for key, value in state.items()
    }
    return {name: tensor.clone() for name, tensor in net.state_dict().items()} | moments


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, torch.Tensor]], list[float]]:
    """A folder with `run.chain`, all states of the run by their steps, and its losses."""
    place = tmp_path_factory.mktemp("recorded")
    torch.manual_seed(3)
    net = Net()
    optimizer = optimizer_of(net)
    states, losses = [state_of(net, optimizer)], [0.0]
    with Recorder(net, optimizer, place / "run.chain", fingerprint=5) as recorder:
        for step in range(STEPS):
            losses.append(train(net, optimizer))
            states.append(state_of(net, optimizer))
            recorder.note(epoch=step // 4, counts=np.arange(step))
    assert recorder.exactness == "exact"
    return place, states, losses


@pytest.fixture
def run(recorded: tuple[Path, list[dict[str, torch.Tensor]], list[float]], tmp_path: Path) -> Path:
    """The chain, to be changed."""
    return shutil.copytree(recorded[0] / "run.chain", tmp_path / "run.chain")


def check_state(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Is every value of a checkpoint that of the run?"""
    checkpoint = open_checkpoint(path)
    for name, tensor in expected.items():
        tensor_name, _, state = name.partition("/")
        parameter = checkpoint.parameters[checkpoint.aliases.get(tensor_name, tensor_name)]
        if state == "step":
            assert parameter.values["step"] == tensor.item(), name
            continue
        values = read(parameter.states[state] if state else parameter.weight)
        assert values.tobytes() == tensor.numpy().tobytes(), name


@pytest.mark.parametrize("step", [0, 1, 5, STEPS])
def test_every_step_comes_back_bit_for_bit(step: int, recorded, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    place, states, _ = recorded
    done = ckpt("restore", place / "run.chain", tmp_path / "out", "--step", step, "--json")
    assert done.code == 0, done.err
    check_state(tmp_path / "out", states[step])
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.origin.step == step
    assert checkpoint.parameters["fixed"].role == "frozen"
    if step:
        assert checkpoint.extras["epoch"] == (step - 1) // 4
        assert checkpoint.extras["counts"].tolist() == list(range(step - 1))
        assert [group.options["lr"] for group in checkpoint.groups] == [pytest.approx(1e-2 * 0.97**step)] * 2


def test_a_path_names_a_step_in_every_command(recorded, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    place, states, _ = recorded
    chain = place / "run.chain"
    assert json.loads(ckpt("inspect", f"{chain}@7", "--json").out)["origin"]["step"] == 7
    assert json.loads(ckpt("inspect", f"{chain}@last~2", "--json").out)["origin"]["step"] == STEPS - 2
    assert ckpt("verify", f"{chain}@last").code == 0
    assert ckpt("diff", f"{chain}@last", chain).code == 0
    assert ckpt("diff", f"{chain}@3", f"{chain}@4").code != 0
    assert ckpt("convert", f"{chain}@6", tmp_path / "six.pt", "--to", "torch").code == 0
    check_state(tmp_path / "six.pt", states[6])
    assert ckpt("restore", f"{chain}@6", tmp_path / "six").code == 0
    check_state(tmp_path / "six", states[6])


def test_a_step_that_is_not_there_is_named_with_those_that_are(recorded, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    chain = recorded[0] / "run.chain"
    for command in (("restore", chain, tmp_path / "out", "--step", 13), ("inspect", f"{chain}@13")):
        done = ckpt(*command)
        assert done.code not in (0, 70)
        assert "no step 13" in done.err
        assert "0 to 12" in done.err
    assert "names another step" in ckpt("restore", f"{chain}@3", tmp_path / "out", "--step", 4).err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("form", "options"), [("dcp", ()), ("deepspeed", ("--dp", 8, "--zero", 1)), ("torch", ())])
def test_a_step_becomes_any_format(form: str, options: tuple[object, ...], recorded, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    place, states, _ = recorded
    done = ckpt("restore", place / "run.chain", tmp_path / "out", "--step", 8, "--to", form, *options)
    assert done.code == 0, done.err
    assert detect(tmp_path / "out").name == form
    expected = {name: tensor for name, tensor in states[8].items() if not name.endswith("/step")}
    check_state(tmp_path / "out", expected)


@pytest.mark.slow
def test_a_run_goes_on_from_a_restored_step_as_if_nobody_had_stopped_it(recorded, run: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    _, states, losses = recorded
    assert ckpt("compact", run, "--upto", 7).code == 0
    net = Net()
    optimizer = optimizer_of(net)
    resumed = load(run, net, optimizer)
    assert (resumed.step, resumed.extras["epoch"]) == (7, 1)
    with Recorder(net, optimizer, run):
        trained = [train(net, optimizer)]
        while last_step(run, chain_file.read(run)) < 8:
            time.sleep(0.05)
        live = open_checkpoint(Path(f"{run}@8"))
        trained += [train(net, optimizer) for _ in range(8, STEPS)]
        assert trained == losses[8:]
        while last_step(run, chain_file.read(run)) < STEPS:
            time.sleep(0.05)
        Job(live, tmp_path / "live").run()  # the log has grown since it was opened
        check_state(tmp_path / "live", states[8])
        for options in (["--upto", 7], ["--gradients", "last:0"]):
            refused = ckpt("compact", run, *options)
            assert (refused.code, "all its further steps would be lost" in refused.err) == (11, True), refused.err
        assert ckpt("compact", run, "--keep", "all", "--gradients", "last:2").code == 0
    now = state_of(net, optimizer)
    assert all(torch.equal(now[name], tensor) for name, tensor in states[STEPS].items())
    # The new segment begins where the old one ends, and leads to the same states.
    assert [(one.first, one.step) for one in chain_file.load(run / chain_file.NAME).segments] == [(0, 7), (7, None)]
    for step in (3, 7, 10, STEPS):
        check_state(Path(f"{run}@{step}"), states[step])
    assert ckpt("verify", run, "--replay").code == 0


def test_what_cannot_follow_is_refused(run: Path) -> None:
    net = Net()
    with pytest.raises(Exception, match="the chain has steps up to 12, and the run is at step 0"):
        Recorder(net, optimizer_of(net), run)


@pytest.mark.slow
def test_restoring_needs_no_torch(recorded, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from ckpt_cli.main import cli\n"
        f"cli(['restore', {str(recorded[0] / 'run.chain')!r}, {str(tmp_path / 'out')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check_state(tmp_path / "out", recorded[1][STEPS])


def test_the_log_is_shown(recorded) -> None:  # type: ignore[no-untyped-def]
    chain = recorded[0] / "run.chain"
    facts = json.loads(ckpt("log", chain, "--json").out)
    (segment,) = facts["segments"]
    assert (facts["last"], segment["first"], segment["last"], segment["ranks"]) == (STEPS, 0, STEPS, 1)
    assert segment["exact"]
    assert segment["has_ended"]
    assert 2 < segment["nbytes_per_parameter"] < 4
    assert "gradients of steps 1 to 12" in ckpt("log", chain).out


@pytest.mark.slow
def test_bases_are_compared_with_the_log(recorded, run: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A stored state that is not the run's is found, by its step and the tensor."""
    states = recorded[1]
    assert ckpt("compact", run, "--keep", "4,9", "--keep", "last:1").code == 0
    assert [member.step for member in chain_file.load(run / chain_file.NAME).members] == [4, 9]
    assert ckpt("verify", run, "--replay").code == 0
    # The same chain with another state at step 9: what a run would have saved whose weights had flipped a bit.
    assert ckpt("restore", run, tmp_path / "nine.pt", "--step", 9, "--to", "torch").code == 0
    content = torch.load(tmp_path / "nine.pt", weights_only=False)
    content["model"]["down.weight"].view(torch.int32)[3, 5] ^= 1 << 20
    torch.save(content, tmp_path / "flipped.pt")
    other = tmp_path / "other.chain"
    assert ckpt("restore", run, tmp_path / "four", "--step", 4).code == 0
    assert ckpt("append", other, tmp_path / "four").code == 0
    assert ckpt("append", other, tmp_path / "flipped.pt", "--step", 9).code == 0
    chain = chain_file.load(run / chain_file.NAME)
    shutil.copytree(run / chain.segments[0].folder, other / chain.segments[0].folder)
    with change(other, Execution()) as changed:
        assert changed.chain is not None
        changed.replace(replace(changed.chain, segments=chain.segments))
    done = ckpt("verify", other, "--replay", "--json")
    assert done.code == 20
    (finding,) = (one for one in json.loads(done.out)["findings"] if one["kind"] == "replay")
    assert "step 9" in finding["what"]
    assert finding["tensors"] == ["down.weight"]
    check_state(Path(f"{other}@8"), states[8])


def test_prover_names_a_step_that_was_computed_wrongly(tmp_path: Path) -> None:
    """Hardware that errs: inside step 19, one weight is off by a bit."""
    torch.manual_seed(3)
    net = Net()
    optimizer = optimizer_of(net)
    calls = itertools.count(1)

    def err(*_: object) -> None:
        if next(calls) == 19:
            with torch.no_grad():
                net.up.weight.view(-1)[70_000].view(torch.int32).bitwise_xor_(1)

    optimizer.register_step_post_hook(err)
    with Recorder(net, optimizer, tmp_path / "run.chain", fingerprint=0) as recorder:
        for _ in range(22):
            train(net, optimizer)
        recorder._run.log.record(lambda recording: recording.record_fingerprint(22))
        assert recorder._run.proof.has_process
        recorder._run.proof.wait_for(22, 60)
        for _ in range(2):
            train(net, optimizer)
    verified = ckpt("verify", tmp_path / "run.chain", "--replay")
    assert verified.code == 20
    assert "step 22: the weight of `up.weight`" in verified.out
    assert "step 22: the weight of `up.weight`" in ckpt("log", tmp_path / "run.chain").out
    assert ckpt("restore", tmp_path / "run.chain", tmp_path / "good", "--step", 16).code == 0
    assert ckpt("restore", tmp_path / "run.chain", tmp_path / "bad", "--step", 22).code == 20
    assert not (tmp_path / "bad").exists()
    chain = chain_file.read(tmp_path / "run.chain")
    last = states.open_state(
        tmp_path / "run.chain", chain, 24
    )  # the recorder has recorded the states themselves since it knew
    assert np.array_equal(read(last.parameters["up.weight"].states[MODEL]), net.up.weight.detach().numpy())


@pytest.mark.parametrize(("codec", "near"), [("bf16", 2e-3), ("int8", 1e-1)])
def test_rounded_gradients_are_called_approximate_everywhere(codec: str, near: float, tmp_path: Path) -> None:
    torch.manual_seed(3)
    net = Net()
    optimizer = optimizer_of(net)
    first = state_of(net, optimizer)
    with Recorder(net, optimizer, tmp_path / "run.chain", codec=codec) as recorder:
        for _ in range(STEPS):
            train(net, optimizer)
    assert recorder.exactness == "approximate"
    last = state_of(net, optimizer)
    assert not json.loads(ckpt("log", tmp_path / "run.chain", "--json").out)["segments"][0]["exact"]
    done = ckpt("restore", tmp_path / "run.chain", tmp_path / "out")
    assert done.code == 0
    assert "approximate" in done.err
    assert "exact: every bit" not in done.out
    restored = open_checkpoint(tmp_path / "out")
    assert restored.errors.keys() >= {("up.weight", state) for state in ("model", "exp_avg", "exp_avg_sq")}
    error = torch.from_numpy(read(restored.parameters["up.weight"].weight)) - last["up.weight"]
    assert 0 < error.norm() < near * (last["up.weight"] - first["up.weight"]).norm()
    assert ckpt("compact", tmp_path / "run.chain", "--gradients", "last:0").code == 0
    assert "approximate" in ckpt("log", tmp_path / "run.chain").out
    assert ckpt("verify", tmp_path / "run.chain").code == 0


def test_damaged_gradients_are_found_and_steps_before_are_offered(recorded, run: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (logged,) = chain_file.load(run / chain_file.NAME).segments
    path = run / logged.folder / rank_file(0)
    segment = open_segment(run / logged.folder)
    record = segment.updates[0][8][0].record  # of step 9
    begin = record.begin + record.meta_nbytes + 16 * record.count
    data = bytearray(path.read_bytes())
    data[begin + record.nbytes // 2] ^= 4
    path.write_bytes(data)
    done = ckpt("restore", run, tmp_path / "out", "--step", 11)
    assert done.code == 20
    assert not (tmp_path / "out").exists()
    assert "step 9" in done.err
    assert "--step 8" in done.err
    verified = ckpt("verify", run)
    assert (verified.code, f"steps 9 to {STEPS} cannot be restored" in verified.out) == (20, True)
    copied = ckpt("copy", run, tmp_path / "copy")
    assert (copied.code, "step 9" in copied.err, (tmp_path / "copy").exists()) == (20, True, False)
    assert ckpt("restore", run, tmp_path / "out", "--step", 8).code == 0
    check_state(tmp_path / "out", recorded[1][8])


def test_a_damaged_record_before_the_end_of_a_log_is_no_end_of_a_killed_run(run: Path, tmp_path: Path) -> None:
    (logged,) = chain_file.load(run / chain_file.NAME).segments
    path = run / logged.folder / rank_file(0)
    record = open_segment(run / logged.folder).updates[0][4][0].record  # of step 5
    whole = path.read_bytes()
    head = record.begin - HEAD.size
    path.write_bytes(whole[: head + 9] + bytes([whole[head + 9] ^ 1]) + whole[head + 10 :])
    for command in ("verify", "inspect", "restore", "copy", "latest"):
        done = ckpt(command, run, *([tmp_path / "out"] if command in ("restore", "copy") else []))
        assert done.code == 20, command
        assert f"steps 5 to {STEPS} cannot be restored" in done.out + done.err, command
    assert not (tmp_path / "out").exists()
    assert "DAMAGED" in ckpt("log", run).out
    assert ckpt("restore", run, tmp_path / "out", "--step", 4).code == 0

    path.write_bytes(whole[: head + 9])  # as a killed run leaves it
    assert ckpt("verify", run).code == 0
    last = ckpt("restore", run, tmp_path / "last")
    assert (last.code, "step 4 is the last one that is complete" in last.err) == (0, True)
    assert open_checkpoint(tmp_path / "last").origin.step == 4
    path.write_bytes(whole[: head + 9] + bytes(len(whole) - head))  # as a machine may leave it that lost its power
    assert ckpt("verify", run).code == 0


def flip(path: Path, byte: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:byte] + bytes([content[byte] ^ 1]) + content[byte + 1 :])


@pytest.mark.slow
def test_damaged_notes_of_the_last_step_are_not_left_out_silently(run: Path, tmp_path: Path) -> None:
    (logged,) = chain_file.load(run / chain_file.NAME).segments
    path = run / logged.folder / rank_file(0)
    whole, segment = path.read_bytes(), open_segment(run / logged.folder)
    notes = [record for record in segment.records(0, Kind.NOTES) if record.step == STEPS][-1]
    for byte in (notes.begin - HEAD.size + 9, notes.begin + 1):
        flip(path, byte)
        for command in ("verify", "restore", "copy", "latest"):
            done = ckpt(command, run, *([tmp_path / "out"] if command in ("restore", "copy") else []))
            assert (done.code, f"step {STEPS} cannot be restored" in done.out + done.err) == (20, True), command
        assert ckpt("restore", run, tmp_path / "out", "--step", STEPS).code == 20
        path.write_bytes(whole)
    # No state needs a fingerprint, but the log is damaged.
    flip(path, next(one.begin for one in segment.records(0, Kind.FINGERPRINT) if one.step == STEPS) + 1)
    assert [ckpt(command, run).code for command in ("verify", "latest")] == [20, 0]
    assert ckpt("copy", run, tmp_path / "out").code == 20
    # The steps after a damaged one are lost, but not if the chain has a later state.
    path.write_bytes(whole)
    flip(path, notes.begin + 1)
    chain = chain_file.load(run / chain_file.NAME)
    path.write_bytes(whole)
    assert ckpt("restore", run, tmp_path / "last").code == 0
    assert ckpt("append", run, tmp_path / "last", "--step", STEPS).code == 0
    flip(path, notes.begin + 1)
    assert states.last_step(run, chain_file.load(run / chain_file.NAME)) == STEPS
    with pytest.raises(CkptError, match=f"step {STEPS} cannot be restored"):
        states.last_step(run, chain)


@pytest.mark.slow
def test_a_recorder_does_not_cut_off_damaged_steps(run: Path) -> None:
    (logged,) = chain_file.load(run / chain_file.NAME).segments
    path = run / logged.folder / rank_file(0)
    flip(path, open_segment(run / logged.folder).updates[0][8][0].record.begin + 1)  # of step 9
    damaged, net = path.read_bytes(), Net()
    optimizer = optimizer_of(net)
    with pytest.raises(CkptError, match=f"has steps up to {STEPS}, and the run is at step 8"):
        Recorder(net, optimizer, run, step=8)
    assert chain_file.load(run / chain_file.NAME).segments == (logged,)
    with Recorder(net, optimizer, run, step=STEPS):
        train(net, optimizer)
    segments = chain_file.load(run / chain_file.NAME).segments
    assert [one.step for one in segments] == [STEPS, None]
    verified = ckpt("verify", run)
    assert (verified.code, f"steps 9 to {STEPS} cannot be restored" in verified.out) == (20, True)
    assert ckpt("compact", run, "--keep", "all").code == 0
    assert path.read_bytes() == damaged  # parity may repair it
    assert ckpt("compact", run, "--upto", 8).code == 0
    with Recorder(net, optimizer, run, step=8):
        train(net, optimizer)
    assert ckpt("verify", run).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "steps", "segments"),
    [
        (("--keep", "3,8"), [3, 8], [(0, None)]),
        (("--upto", "5"), [], [(0, 5)]),
        (("--upto", "5", "--gradients", "last:0"), [5], []),
        (("--keep", "2", "--gradients", "last:0"), [2, STEPS], []),
        ((), [], [(0, None)]),
    ],
)
def test_a_chain_is_made_shorter(
    options: tuple[str, ...],
    steps: list[int],
    segments: list[tuple[int, int | None]],
    recorded: tuple[Path, list[dict[str, torch.Tensor]], list[float]],
    run: Path,
) -> None:
    before, nbytes = digest_of(run), sum(path.stat().st_size for path in run.rglob("*.ckg"))
    planned = ckpt("compact", run, *options, "--dry-run", "--json")
    assert planned.code == 0, planned.err
    assert digest_of(run) == before
    assert ckpt("compact", run, *options).code == 0
    chain = chain_file.load(run / chain_file.NAME)
    assert [member.step for member in chain.members] == steps
    assert [(one.first, one.step) for one in chain.segments] == segments
    if "--upto" in options:
        assert sum(path.stat().st_size for path in run.rglob("*.ckg")) < 0.8 * nbytes
    fates = {row["step"]: row["becomes"] for row in json.loads(planned.out)["steps"]}
    assert sorted(step for step, fate in fates.items() if fate != "removed") == steps
    last = max([*steps, *(STEPS if end is None else end for _, end in segments)])
    for step in {*steps, last}:
        check_state(Path(f"{run}@{step}"), recorded[1][step])
    assert json.loads(ckpt("inspect", run, "--json").out)["origin"]["step"] == last
    assert ckpt("verify", run, "--replay").code == 0


@pytest.mark.slow
def test_states_are_appended_to_a_chain_that_has_only_a_log(recorded, run: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert ckpt("restore", run, tmp_path / "six", "--step", 6).code == 0
    assert ckpt("restore", run, tmp_path / "ten", "--step", 10).code == 0
    assert ckpt("append", run, tmp_path / "six").code == 0
    assert ckpt("append", run, tmp_path / "ten").code == 0
    chain = chain_file.load(run / chain_file.NAME)
    assert [(member.step, member.kind) for member in chain.members] == [(6, "base"), (10, "delta")]
    for step in (5, 6, 9, 10, 11):
        check_state(Path(f"{run}@{step}"), recorded[1][step])
    assert ckpt("verify", run, "--replay").code == 0


def digest_of(folder: Path) -> str:
    """Of all files and their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path.relative_to(folder)).encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()
