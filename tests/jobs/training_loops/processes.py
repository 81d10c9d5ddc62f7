"""Loops that end early, move, start again, or draw random numbers."""

import gc
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt_formats.universal.chain import chain_file, states
from ckpt_recorder import Bases, Recorder
from ckpt_training import load
from training_loops.run import STEPS, Run, adamw, add, batch, loop, loss_of, mlp, norm_net, train


def interrupted(error: type[BaseException]) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = mlp()
        optimizer = adamw(model)
        try:
            with run.record(model, optimizer):
                for step in range(STEPS):
                    train(model, optimizer, step)
                    run.after()
                    if step == 5:
                        loss_of(model, step).backward()
                        raise error
        except error:
            pass

    return body


for error in (ValueError, KeyboardInterrupt, SystemExit):
    add(f"raises-{error.__name__}", interrupted(error))


@loop()
def raises_after_a_clip(run: Run) -> None:
    """The last change before the exception belongs to the last step."""
    model = mlp()
    optimizer = adamw(model)
    try:
        with run.record(model, optimizer):
            for step in range(STEPS):
                train(model, optimizer, step)
                if step == 5:
                    model[0].weight.data.clamp_(-0.1, 0.1)
                run.after()
                if step == 5:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass


def killed(end: Callable[[], Any]) -> Callable[[Run], None]:
    """The process ends without a word; the steps that its writer had must be right."""

    def body(run: Run) -> None:
        def work() -> None:
            model = mlp()
            optimizer = adamw(model)
            run.start(model, optimizer)
            for step in range(STEPS):
                train(model, optimizer, step)
                run.after()
            run.save()
            end()

        run.in_child(work)
        last, stop = -1, time.monotonic() + 5
        while time.monotonic() < stop and last < STEPS:
            time.sleep(0.05)
            last = states.last_step(run.chain, chain_file.read(run.chain)) or 0
        run.resumes = False

    return body


add("ends-by-os-exit", killed(lambda: os._exit(3)))
add("ends-by-sigkill", killed(lambda: os.kill(os.getpid(), signal.SIGKILL)))
add("ends-by-sigterm", killed(lambda: (signal.signal(signal.SIGTERM, signal.SIG_DFL), os.kill(os.getpid(), 15))))


@loop()
def never_closed(run: Run) -> None:
    """No `with` and no `close`: the recorder goes with its references."""
    model = mlp()
    optimizer = adamw(model)
    run.start(model, optimizer)
    for step in range(STEPS):
        train(model, optimizer, step)
        run.after()
    if run.recorder is not None:
        run.recorder.close()


@loop()
def reference_dropped(run: Run) -> None:
    """Nothing but hooks refers to the recorder."""
    model = mlp()
    optimizer = adamw(model)
    Recorder(model, optimizer, run.chain)
    gc.collect()
    run.model, run.optimizers = model, [optimizer]
    counter = type("Counter", (), {"step": 0, "close": lambda self: None})()
    run.recorder = counter
    for step in range(STEPS):
        train(model, optimizer, step)
        counter.step += 1
        run.after()
    last, stop = -1, time.monotonic() + 5
    while time.monotonic() < stop and last < STEPS:
        time.sleep(0.05)
        last = states.last_step(run.chain, chain_file.read(run.chain)) or 0


@loop()
def closed_twice_and_trained_on(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer) as recorder:
        for step in range(STEPS):
            train(model, optimizer, step)
            run.after()
        recorder.close()
    recorder.close()
    train(model, optimizer, 0)


@loop()
def folder_changed(run: Run) -> None:
    """The chain has a relative path, and the process changes its folder."""
    os.chdir(run.chain.parent)
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer, chain=Path("run.chain")):
        if step == 4:
            os.makedirs("other")
            os.chdir("other")
        train(model, optimizer, step)


@loop()
def folder_changed_with_bases(run: Run) -> None:
    os.chdir(run.chain.parent)
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer, chain="run.chain", bases=Bases(every=3)):
        if step == 4:
            os.makedirs("other")
            os.chdir("other")
        train(model, optimizer, step)


@loop()
def folder_deleted(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer):
        for step in range(STEPS):
            train(model, optimizer, step)
            run.after()
            if step == 4:
                shutil.rmtree(run.chain)


@loop()
def folder_renamed(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer):
        for step in range(STEPS):
            train(model, optimizer, step)
            run.after()
            if step == 4:
                run.chain.rename(run.chain.with_name("other.chain"))
    run.chain = run.chain.with_name("other.chain")


@loop()
def writer_killed(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer, retry=3) as recorder:
        for step in range(STEPS):
            train(model, optimizer, step)
            run.after()
            if step == 4:
                os.kill(recorder.writer_pid, signal.SIGKILL)
                time.sleep(0.05)


def drawing(noted: bool, draws: Callable[[], Any]) -> Callable[[Run], None]:
    """Random numbers are drawn after the step, and a note says where."""

    def body(run: Run) -> None:
        model = norm_net()
        optimizer = adamw(model)
        run.checks_random = noted
        for step in run.steps(model, optimizer):
            train(model, optimizer, step)
            draws()
            if noted:
                run.note(epoch=step)

    return body


add("draws-after-the-step-noted", drawing(True, lambda: torch.randn(3)))
add("draws-numpy-after-the-step-noted", drawing(True, lambda: np.random.rand(3)))
add("draws-python-after-the-step-noted", drawing(True, lambda: random.random()))
add("draws-nothing", drawing(True, lambda: None))
add("seeds-after-the-step-noted", drawing(True, lambda: torch.manual_seed(7)))


@loop()
def noise_in_the_step(run: Run) -> None:
    """The optimizer itself draws random numbers."""

    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.add_(torch.randn_like(p), alpha=1e-3)
            return super().step(closure)

    model = mlp()
    optimizer = Noisy(model.parameters(), 0.1)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)


@loop()
def notes_of_everything(run: Run) -> None:
    """A scheduler, a scaler, a loader with a state, plain values, tensors."""

    class Loader:
        at = 0

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "order": torch.randperm(5, generator=torch.Generator().manual_seed(self.at))}

    model = mlp()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader = Loader()
    for step in run.steps(model, optimizer):
        loader.at += 1
        train(model, optimizer, step)
        scheduler.step()
        run.note(scheduler=scheduler, loader=loader, best=0.5 * step, names=["a", "b"], when=(1, None, True))


@loop()
def notes_changed_after_they_were_taken(run: Run) -> None:
    """The note's own tensor and list change after `note`."""
    model = mlp()
    optimizer = adamw(model)
    history: list[float] = []
    losses = torch.zeros(STEPS)
    with run.record(model, optimizer):
        for step in range(STEPS):
            train(model, optimizer, step)
            history.append(float(step))
            losses[step] = step
            run.note(history=list(history), losses=losses, alias=history)
            run._notes = deepcopy(run._notes)
            run.after()
            losses[step] = -1.0
            history[-1] = -1.0


@loop()
def several_notes_for_a_step(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer):
        train(model, optimizer, step)
        run.note(a=step)
        torch.randn(3)
        run.note(a=step + 1)


def resumed(change: Callable[[Any], None] = lambda model: None) -> Callable[[Run], None]:
    """Resume from the middle in new objects, and go on in another chain."""

    def body(run: Run) -> None:
        model = norm_net()
        optimizer = adamw(model)
        for step in run.steps(model, optimizer, count=5):
            train(model, optimizer, step)
        model = norm_net()
        optimizer = adamw(model)
        assert load(f"{run.chain}@3", model, optimizer).step == 3
        old = run.truths
        run.truths = {}
        change(model)
        with run.record(model, optimizer, chain=run.chain.with_name("later.chain"), step=3):
            for step in range(3, STEPS):
                train(model, optimizer, step)
                run.after()
            if change.__name__ == "<lambda>":
                _assert_equal(run.truths[5].model, old[5].model)

    return body


def _assert_equal(one: Any, other: Any) -> None:
    for name, value in one.items():
        assert torch.equal(value, other[name]), f"the resumed run has another `{name}` at step 5"


def _clipped(model: Any) -> None:
    model[0].weight.data.clamp_(-0.1, 0.1)


add("resumed-and-recorded-on", resumed())
add("resumed-clipped-and-recorded-on", resumed(_clipped))


@loop()
def recorded_again_from_scratch(run: Run) -> None:
    """The cell of a notebook runs twice: a second run from step 0 into the same chain."""
    for _ in range(2):
        model = mlp()
        optimizer = adamw(model)
        for step in run.steps(model, optimizer, count=4):
            train(model, optimizer, step)


@loop()
def recorded_again_without_closing(run: Run) -> None:
    """The cell of a notebook runs again, and the first recorder still lives."""
    model = mlp()
    optimizer = adamw(model)
    run.start(model, optimizer)
    for step in range(3):
        train(model, optimizer, step)
        run.after()
    first = run.recorder
    try:
        with run.record(model, optimizer):
            for step in range(3, STEPS):
                train(model, optimizer, step)
                run.after()
    finally:
        first.close()


@loop()
def same_model_trained_on_in_a_second_block(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    for block in range(3):
        with run.record(model, optimizer):
            for step in range(3 * block, 3 * block + 3):
                train(model, optimizer, step)
                run.after()


@loop()
def trained_between_two_blocks(run: Run) -> None:
    """Steps that no recorder saw."""
    model = mlp()
    optimizer = adamw(model)
    for _ in range(2):
        for step in run.steps(model, optimizer, count=4):
            train(model, optimizer, step)
        train(model, optimizer, 77)
        model[0].weight.data.clamp_(-0.2, 0.2)


@loop()
def two_recorders_of_one_run(run: Run) -> None:
    """Each into a chain of its own."""
    model = mlp()
    optimizer = adamw(model)
    other = run.chain.with_name("other.chain")
    with run.record(model, optimizer), run.listening(), Recorder(model, optimizer, other):
        for step in range(STEPS):
            train(model, optimizer, step)
            if run.recorder.step == step + 1:
                run.after()
            else:
                run.expects_warning = True


@loop()
def trained_in_a_thread(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer):

        def work() -> None:
            for step in range(STEPS):
                train(model, optimizer, step)
                run.after()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 9 * 4

    def __getitem__(self, i: int) -> torch.Tensor:
        return batch(i, 1)[0]


def loaded(workers: int, context: str | None) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = mlp()
        optimizer = adamw(model)
        with run.record(model, optimizer):
            options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": context}
            run.checks_random = False  # an epoch draws its order first
            for x in torch.utils.data.DataLoader(Data(), 9, shuffle=True, **options):
                optimizer.zero_grad()
                (model(x) - x[:, :1]).square().mean().backward()
                optimizer.step()
                run.after()

    return body


add("loader-in-this-process", loaded(0, None))
add("loader-forks", loaded(2, "fork"))
add("loader-spawns", loaded(1, "spawn"), slow=True)


@loop()
def forked_in_mid_run(run: Run) -> None:
    """A child trains on and leaves by `os._exit`: its steps are not those of the run."""
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer):
        for step in range(STEPS):
            if step == 4:
                pid = os.fork()
                if pid == 0:
                    try:
                        for i in range(3):
                            train(model, optimizer, 90 + i)
                    finally:
                        os._exit(0)
                os.waitpid(pid, 0)
            train(model, optimizer, step)
            run.after()


@loop()
def forked_child_closes(run: Run) -> None:
    """A child inherits the recorder and leaves its `with` block."""
    model = mlp()
    optimizer = adamw(model)
    with run.record(model, optimizer) as recorder:
        for step in range(STEPS):
            train(model, optimizer, step)
            run.after()
            if step == 4:
                pid = os.fork()
                if pid == 0:
                    try:
                        recorder.close()
                    finally:
                        os._exit(0)
                os.waitpid(pid, 0)


@loop()
def default_type_is_float64(run: Run) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = mlp()
        optimizer = adamw(model)
        for step in run.steps(model, optimizer):
            train(model, optimizer, step)
    finally:
        torch.set_default_dtype(torch.float32)


@loop()
def default_type_is_float64_weights_float32(run: Run) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = mlp().float()
        optimizer = adamw(model)
        for step in run.steps(model, optimizer):
            train(model, optimizer, step)
    finally:
        torch.set_default_dtype(torch.float32)


def on_default_device(device: str) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = mlp()
        optimizer = adamw(model)
        with torch.device(device), run.record(model, optimizer):
            for step in range(STEPS):
                optimizer.zero_grad()
                with torch.device("cpu"):
                    loss_of(model, step).backward()
                    optimizer.step()
                run.after()

    return body


add("default-device-meta", on_default_device("meta"))
add("default-device-cpu", on_default_device("cpu"))


@loop()
def deterministic_algorithms(run: Run) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        model = norm_net()
        optimizer = adamw(model)
        for step in run.steps(model, optimizer):
            train(model, optimizer, step)
    finally:
        torch.use_deterministic_algorithms(False)


@loop()
def gradients_are_off_at_the_start(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    with torch.no_grad():
        run.start(model, optimizer)
    for step in range(STEPS):
        train(model, optimizer, step)
        run.after()
    with torch.inference_mode():
        run.recorder.close()


@loop()
def begins_in_the_middle(run: Run) -> None:
    """The optimizer has states when the recorder begins, some parameters have none."""
    model = nn.ModuleList([mlp(), mlp()])
    optimizer = adamw(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model[0], step).backward()
        optimizer.step()
    for step in run.steps(model, optimizer):
        optimizer.zero_grad()
        loss_of(model[step % 2], step).backward()
        optimizer.step()


@loop()
def steps_are_numbered_by_the_loop(run: Run) -> None:
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer, step=1_000_000):
        train(model, optimizer, step)


@loop()
def bases_every_three_steps_with_a_clip(run: Run) -> None:
    model = norm_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer, bases=Bases(every=3)):
        train(model, optimizer, step)
        model[0].weight.data.clamp_(-0.1, 0.1)


@loop()
def bases_at_once_with_a_clip(run: Run) -> None:
    model = norm_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer, bases=Bases(every=3, spread=1)):
        train(model, optimizer, step)
        model[0].weight.data.clamp_(-0.1, 0.1)


@loop()
def rolling_bases_with_a_clip(run: Run) -> None:
    model = norm_net()
    optimizer = adamw(model)
    with run.record(model, optimizer, bases=Bases(every=4, spread=3)):
        for step in range(2 * STEPS):
            train(model, optimizer, step)
            model[0].weight.data.clamp_(-0.1, 0.1)
            run.after()
            time.sleep(0.01)


@loop()
def fingerprints_every_step_with_a_clip(run: Run) -> None:
    model = norm_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer, fingerprint=1):
        train(model, optimizer, step)
        model[0].weight.data.clamp_(-0.1, 0.1)


@loop()
def rounding_codec_with_a_clip(run: Run) -> None:
    model = norm_net()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer, codec="bf16"):
        train(model, optimizer, step)
        model[0].weight.data.clamp_(-0.1, 0.1)


@loop()
def a_hundred_and_fifty_steps(run: Run) -> None:
    """The first change comes between two proofs."""
    model = mlp()
    optimizer = adamw(model)
    for step in run.steps(model, optimizer, count=150):
        train(model, optimizer, step)
        if step == 77:
            model[0].weight.data[3, 3] = 0.5


def distributed(
    world: int, change: Callable[[Any], Any], make: Callable[[], nn.Module] = norm_net
) -> Callable[[Run], None]:
    """DDP on several processes; each rank changes its own weights in the same way."""

    def body(run: Run) -> None:
        rank = next((i for i in range(1, world) if os.fork() == 0), 0)
        store = f"file://{run.chain.parent}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        try:
            model = nn.parallel.DistributedDataParallel(make())
            optimizer = adamw(model)
            run.checks_random = False  # ranks draw other numbers
            for step in run.steps(model, optimizer):
                optimizer.zero_grad()
                loss_of(model, step * world + rank).backward()
                optimizer.step()
                with torch.no_grad():
                    change(model.module)
        finally:
            if rank:
                os._exit(0)
        torch.distributed.destroy_process_group()

    return body


CLIP: Callable[[Any], Any] = lambda model: model[0].weight.clamp_(-0.1, 0.1)  # noqa: E731
add("ddp-of-one-process", distributed(1, lambda model: None))
add("ddp-of-one-process-clipped", distributed(1, CLIP))
add("ddp-of-two-processes", distributed(2, lambda model: None, mlp))
add("ddp-of-two-processes-clipped", distributed(2, CLIP, mlp))
