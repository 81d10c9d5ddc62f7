"""What happens around a recording: working directories, second recorders, forks, removed folders."""

import gc
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec, module_from_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import read
from ckpt_formats.universal.chain import chain_file, states
from ckpt_formats.universal.gradients.held import HeldState
from ckpt_formats.universal.gradients.record import FileHead, Kind
from ckpt_formats.universal.gradients.segment import open_segment
from ckpt_formats.universal.gradients.state import checkpoint_at
from ckpt_recorder import Bases, Recorder, RecorderWarning
from ckpt_recorder.record_file import RecordFile
from ckpt_training import installed_classes, ranks
from ckpt_training.random_states import restore_random_states
from ckpt_training.shares import equal_shares
from ckpt_training.writing.ring import Ring
from damage import ckpt


class Run:
    """A model of two weights, and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.model = nn.Linear(2, 1, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1, fused=True)

    def recorder(self, chain: str | Path, **options: Any) -> Recorder:
        return Recorder(self.model, self.optimizer, chain, random_states=False, **options)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.ones(3, 2)).sum().backward()
            self.optimizer.step()


def last_step(chain: Path) -> int:
    return states.last_step(chain, chain_file.read(chain))


def test_a_relative_chain_stays_where_it_began_after_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = Run()
    with run.recorder("run.chain", bases=Bases(every=2)):
        os.chdir("elsewhere")
        run.step(3)
    assert last_step(tmp_path / "run.chain") == 3
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.slow
def test_a_note_after_the_forward_pass_of_the_next_step_has_the_frozen_weights_that_the_run_has_moved(
    tmp_path: Path,
) -> None:
    """The log then has buffers of the next step before those weights, which belong to the step that is noted."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.average = nn.Linear(2, 3).requires_grad_(False)
    optimizer, chain, truths = torch.optim.AdamW(model[:2].parameters(), 0.1), tmp_path / "run.chain", []
    with Recorder(model, optimizer, chain) as recorder:
        for step in range(4):
            model[:2](torch.randn(8, 2)).sum().backward()
            with torch.no_grad():
                model.average.weight.lerp_(model[0].weight, 0.5)
            recorder.note(noted=step)
            truths.append(model.average.weight.numpy().copy())
            optimizer.step()

    def check(steps: range) -> None:
        for step in steps:
            state = states.open_state(chain, chain_file.read(chain), step)
            assert np.array_equal(read(state.parameters["average.weight"].weight), truths[step]), step
            assert state.extras["noted"] == step

    check(range(4))
    held = HeldState(chain / chain_file.read(chain).segments[0].folder, None)  # a shadow has the same
    assert held.find_start(1)
    held.load(1)
    for step in range(1, 4):
        assert held.tail.poll(1) >= step
        held.advance(step, 1)
        state = held.checkpoint()
        assert np.array_equal(read(state.parameters["average.weight"].weight), truths[step]), step
        assert state.extras["noted"] == step
    assert ckpt("compact", chain, "--upto", 2).code == 0
    check(range(3))


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["group", "option"])
def test_a_segment_that_begins_as_a_base_is_due_has_the_buffers_of_each_step(
    cause: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The base was due after step 3; the forward pass of step 4 changes buffers before the segment begins."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model[:2].parameters(), 0.1)
    truths = [model[1].running_mean.clone().numpy()]
    with Recorder(model, optimizer, tmp_path / "run.chain", random_states=False, bases=Bases(every=3)):
        for step in range(1, 6):
            model(torch.randn(8, 2)).sum().backward()
            if step == 4 and cause == "group":
                optimizer.add_param_group({"params": list(model[2].parameters())})
            elif step == 4:
                optimizer.param_groups[0]["foreach"] = True
            optimizer.step()
            truths.append(model[1].running_mean.clone().numpy())
    chain = chain_file.read(tmp_path / "run.chain")
    for step, truth in enumerate(truths):
        parameters = states.open_state(tmp_path / "run.chain", chain, step).parameters
        assert np.array_equal(read(parameters["1.running_mean"].weight), truth), step
    assert "in doubt" not in caplog.text


@pytest.mark.slow
def test_a_base_has_the_buffers_that_the_loop_sets_after_its_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    truths = []
    with Recorder(model, optimizer, tmp_path / "run.chain", bases=Bases(every=3)):
        for _ in range(5):
            model(torch.randn(8, 2)).sum().backward()
            optimizer.step()
            model[1].running_mean.mul_(0.5)
            truths.append(model[1].running_mean.clone().numpy())
    began = states.open_steps(tmp_path / "run.chain", chain_file.read(tmp_path / "run.chain").segments[1])
    for step in (3, 4, 5):
        parameters = checkpoint_at(began, step, None).parameters
        assert np.array_equal(read(parameters["1.running_mean"].weight), truths[step - 1]), step


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("huggingface_callback", lambda one: one.HuggingFaceCallback("run.chain").on_train_begin),
        ("lightning_callback", lambda one: one.LightningCallback("run.chain").on_train_start),
    ],
    ids=["Hugging Face", "Lightning"],
)
def test_callbacks_record_into_the_chain_of_their_own_working_directory(
    name: str, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, chains = without_trainer(name, monkeypatch), list[Any]()
    monkeypatch.setattr(module, "Recorder", lambda model, optimizer, chain, **options: chains.append(chain))
    monkeypatch.chdir(tmp_path)
    on_start = start(module)
    monkeypatch.chdir("/")
    state = SimpleNamespace(global_step=0, optimizers=[])
    on_start(*([state, None] if name == "lightning_callback" else [None, state, None]))
    assert chains == [tmp_path / "run.chain"]


def without_trainer(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy of a module of callbacks, as if its trainer were not installed: to import one takes seconds."""
    monkeypatch.setattr(installed_classes, "installed_class", lambda *paths: object)
    spec = find_spec(f"ckpt_recorder.{name}")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_cell_that_runs_again_ends_the_recorder_that_was_not_closed(tmp_path: Path) -> None:
    run, chain = Run(), tmp_path / "run.chain"
    first = run.recorder(chain)
    run.step(2)
    with pytest.warns(RecorderWarning, match=r"was not closed and ends now.*`recorder\.close\(\)`"):
        second = run.recorder(chain)
    assert first.broken == f"another recorder records into {chain}"
    assert first.writer_pid is None
    run.step(2)
    first.note(late=1)
    first.close()
    assert (first.step, second.step) == (2, 4)
    restarted = Run()  # also one that has nothing in common but the chain
    with pytest.warns(RecorderWarning, match="was not closed"), restarted.recorder(chain, step=4):
        restarted.step()
    assert last_step(chain) == 5
    assert [one.first for one in chain_file.read(chain).segments] == [0, 2, 4]


def test_a_fork_leaves_the_recording_alone_and_a_collected_recorder_ends_its_writer(tmp_path: Path) -> None:
    run, chain = Run(), tmp_path / "run.chain"
    recorder = run.recorder(chain)
    run.step(2)
    go, begin = os.pipe()
    if (child := os.fork()) == 0:
        status = 1
        try:
            run.step()
            recorder.note(child=True)
            recorder.close()
            status = 0 if recorder.broken is not None and "forked" in recorder.broken else 2
            os.close(begin)
            os.read(go, 1)  # holds what it has of the pipe to the writer
        finally:
            os._exit(status)
    run.step(2)
    pid = recorder.writer_pid
    assert pid is not None
    del recorder, run
    gc.collect()
    deadline = time.monotonic() + 300
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
    os.close(begin)
    assert os.waitpid(child, 0)[1] == 0
    assert last_step(chain) == 4
    assert not states.open_steps(chain, chain_file.read(chain).segments[0]).torn


def test_the_memory_of_a_ring_is_released_with_its_segment(tmp_path: Path) -> None:
    def rings() -> int:
        files = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
        return sum("ckpt-ring" in file for file in files)

    before = rings()
    ring = Ring(1, 1)
    assert rings() > before
    del ring
    assert rings() == before


def _replace(file: Path) -> None:
    file.with_suffix(".new").write_bytes(file.read_bytes())
    file.with_suffix(".new").rename(file)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=name)
        for name, change in {
            "removed": Path.unlink,
            "replaced": _replace,
            "folder removed": lambda file: shutil.rmtree(file.parent),
            "folder renamed": lambda file: file.parent.rename(f"{file.parent}.old"),
        }.items()
    ],
)
def test_a_file_that_others_no_longer_find_is_an_error(change: Any, tmp_path: Path) -> None:
    (tmp_path / "segment").mkdir()
    file = RecordFile(tmp_path / "segment" / "rank-00000.ckg", FileHead(0, 1, 0, bytes(16)))
    file.check_path()
    change(tmp_path / "segment" / "rank-00000.ckg")
    with pytest.raises(OSError, match=r"segment/rank-00000\.ckg was removed, renamed or replaced while it was written"):
        file.check_path()
    os.close(file.descriptor)


def test_a_removed_log_is_noticed_once_and_recorded_anew(tmp_path: Path) -> None:
    run, chain = Run(), tmp_path / "run.chain"

    def steps() -> None:
        for _ in range(7):
            run.step()
            time.sleep(0.01)

    with run.recorder(chain, retry=10) as recorder:
        run.step(2)
        shutil.rmtree(next(chain.glob("gradients-*")))
        with pytest.warns(RecorderWarning, match="was removed, renamed or replaced while it was written") as warned:
            steps()
        assert len(warned) == 1
        assert recorder.broken is not None
        run.step(3)
    assert last_step(chain) == 12
    assert [one.first for one in chain_file.read(chain).segments] == [10]
    states.open_state(chain, chain_file.read(chain), 12)


def test_ranks_that_construct_no_recorder_are_named() -> None:
    store = distributed.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=r"ranks 1, 2 of 3 constructed no Recorder within 0\.01 s"):
        ranks.await_ranks(store, 0, 3, 0.01, print)
    with pytest.raises(UnsupportedError, match=r"ranks 0, 2 of 3"):  # rank 0 waits no more
        ranks.await_ranks(store, 1, 3, 0.01, print)
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            list(pool.map(lambda rank: ranks.await_ranks(store, rank, 3, 30, print), range(3)))


def test_nans_are_compared_as_nans(tmp_path: Path) -> None:
    run, chain = Run(), tmp_path / "run.chain"
    with run.recorder(chain, fingerprint=1):
        run.step()
        for sign in (1, -1):  # a NaN of each sign
            gradient = torch.tensor([[0xFFFFFFFF, 0x7FC00001]], dtype=torch.int64).to(torch.int32).view(torch.float32)
            run.model.weight.grad = gradient * sign
            run.optimizer.step()
    checkpoint = states.open_state(chain, chain_file.read(chain), 3)
    assert np.isnan(read(checkpoint.parameters["weight"].weight)).all()
    folder = chain / chain_file.read(chain).segments[0].folder
    (record, *_) = open_segment(folder).records(0, Kind.FINGERPRINT)
    assert record.meta["nan"] == "one"


def test_weights_in_another_order_of_memory_are_restored_exactly(tmp_path: Path) -> None:
    torch.manual_seed(0)
    conv, linear = nn.Conv2d(3, 5, 3), nn.Linear(20, 3)
    conv.weight = nn.Parameter(conv.weight.detach().to(memory_format=torch.channels_last))
    linear.weight = nn.Parameter(torch.randn(20, 3).t())
    model = nn.Sequential(conv, nn.Flatten(), linear)
    adamw = torch.optim.AdamW(conv.parameters(), 1e-2, fused=True)
    sgd = torch.optim.SGD(linear.parameters(), 1e-2, momentum=0.9, fused=True)
    with Recorder(model, [adamw, sgd], tmp_path / "run.chain", random_states=False) as recorder:
        for _ in range(6):
            model.zero_grad()
            model(torch.randn(2, 3, 4, 4)).square().mean().backward()
            adamw.step()
            sgd.step()
        assert recorder.exactness == "exact"
    restored = states.open_state(tmp_path / "run.chain", chain_file.read(tmp_path / "run.chain"), 12)
    for name, tensor in model.named_parameters():
        values = np.ascontiguousarray(tensor.detach().numpy())
        assert read(restored.parameters[name].weight).tobytes() == values.tobytes(), name


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 1, 8), (5, 5), (1,), (0, 3, 3, 3, 100, 2, 2)], ids=str)
def test_ranks_share_tensors_but_never_split_those_that_are_stepped_as_wholes(sizes: tuple[int, ...]) -> None:
    holders = {(f"w{n}", Box.whole((size,)), 0, size): [4, 7, 9] for n, size in enumerate(sizes)}
    whole = [piece for piece in holders if piece[0] != "w1"]
    ranges_of = equal_shares(
        [(piece, tuple(of)) for piece, of in holders.items()],
        lambda piece: piece[3] - piece[2] if piece in whole else 1,
    )
    for piece, shares in zip(holders, ranges_of, strict=True):
        ranges = [(start, stop) for start, stop in shares.values() if start < stop]
        assert list(shares) == [4, 7, 9]
        assert sum(stop - start for start, stop in ranges) == piece[3]
        assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
        assert piece not in whole or ranges in ([], [(0, piece[3])])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_micro_batches_of_lightning_change_no_step(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from ckpt_recorder import LightningCallback
    from lightning_run import fit

    truths: dict[int, tuple[bytes, bytes]] = {}

    class Truth(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
            means, state = pl_module.layers[1].running_mean, torch.get_rng_state()
            truths.setdefault(trainer.global_step, (means.numpy().tobytes(), state.numpy().tobytes()))

    chain = tmp_path / "run.chain"
    fit([LightningCallback(chain), Truth()], 2, accumulate_grad_batches=2)
    assert [*truths] == [0, 1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        state = states.open_state(chain, chain_file.read(chain), step)
        means = read(state.parameters["layers.1.running_mean"].states["model"]).tobytes()
        restore_random_states(state.extras["random_states"]["rank-00000"])  # type: ignore[index]
        assert (means, torch.get_rng_state().numpy().tobytes()) == truths[step]
