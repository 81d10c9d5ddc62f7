"""What each system makes of a training: the course of a run without failures, and from where it is restored.

Every system gets the interval that is best for it, from the formulas of `ckpt.planning` or from its own paper, so that
intervals do not decide. Where a paper leaves something open, the choice favours the system of the literature.

    S state   t step   U update   B copy from GPU to host   W durable storage   M mean time between failures
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ckpt.planning.costs import DataRates, LogCosts, RunCosts
from ckpt.planning.peers import GENERATIONS
from ckpt.planning.schedule import plan_schedule
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.parity.scheme import PeerScheme

from .failures import Course, Tier
from .host_losses import loss_share
from .settings import FIGURES, Setting

MAX_INTERVAL = 200_000
"""Steps between bases, at most: the simulation has an array of a period."""


def torch_save(one: Setting, mtbf: float) -> Course:
    """`torch.save`: training stops while the state is copied and written. Interval: Daly's, by the exact formula."""
    stall, load = one.copy + one.write, one.copy + one.write
    return _bases_only(one, one.step.value, mtbf, stall, 0.0, load)


def checkfreq(one: Setting, mtbf: float) -> Course:
    """CheckFreq: the snapshot is copied during the next forward and backward, the update waits for it; written behind.

    Stall max(0, S/B - (t - U)). Its policy: as often as the disk writes, at an overhead of 3.5 % at most.
    """
    step, stall = one.step.value, snapshot_stall(one)
    every = max(math.ceil(one.write / step), math.ceil(stall / (FIGURES.checkfreq_overhead.value * step)), 1)
    every = min(every, MAX_INTERVAL)
    tier = Tier(
        "storage", every, one.restart.value + one.copy + one.write, delay=max(0.0, one.copy - stall) + one.write
    )
    return Course(step, (tier,), ((every, stall),), stored=((every, one.state.value),))


def gemini(one: Setting, mtbf: float) -> Course:
    """Gemini: copies in the memory of the own and of another machine, as often as the network allows; storage behind.

    With one machine there is no other: failures that take the machine go back to storage, which is written without
    a pause, from the host's memory.
    """
    step, machines = one.step.value, one.machines.value
    part = one.state.value / machines
    sending = max(one.copy, part / (one.network_rate.value * FIGURES.gemini_network.value) if machines > 1 else 0.0)
    every = max(1, math.ceil(sending / step))
    lost = FIGURES.gemini_lost.value if machines > 1 else one.machine_share.value
    load = one.copy + (part / one.network_rate.value if machines > 1 else 0.0)
    behind = every * max(1, math.ceil(one.write / (step * every)))
    tiers = (
        Tier("memory", every, one.restart.value + load, delay=sending, survives=1 - lost),
        Tier("storage", behind, one.restart.value + one.copy + one.write, delay=sending + one.write),
    )
    sent = ((every, one.state.value),) if machines > 1 else ()
    return Course(step, tiers, stored=((behind, one.state.value),), sent=sent)


def lowdiff(one: Setting, mtbf: float) -> Course:
    """LowDiff: the compressed gradients of all ranks are stored in batches; bases by rank 0, synchronously.

    Training itself must compress its gradients. Replay is sequential, since merged differentials lose over 90 % of
    Adam's progress (measured: docs/papers.md). The best interval of bases for that, not the one of the paper's formula,
    which counts a batch as one step.
    """
    sparse = one.replicas.value * FIGURES.lowdiff_density.value * FIGURES.lowdiff_nbytes.value
    nbytes = one.parameters.value * min(sparse, 4.0)
    usual = one.step.value * (1 + FIGURES.lowdiff_slowdown.value)
    slow = max(usual, nbytes / (0.9 * one.storage_rate.value))  # a tenth is left to bases
    replay = max(nbytes / one.storage_rate.value, one.update.value)
    load = one.copy + one.write
    run = RunCosts(slow, mtbf, load, min(one.restart.value + load, 0.99 * mtbf))
    rates = DataRates(one.state.value, nbytes, one.storage_rate.value, one.storage_rate.value)
    plan = plan_schedule(run, LogCosts(replay), rates)
    assert plan.logged is not None
    batch = int(FIGURES.lowdiff_batch.value)
    every = batch * max(1, min(plan.logged.base_steps, MAX_INTERVAL) // batch)
    tier = Tier(
        *("log", batch, one.restart.value + load),
        delay=batch * nbytes / one.storage_rate.value,
        replay=replay,
        base_every=every,
    )
    notes = ("training compresses its gradients to 1 %",)
    if slow > usual:
        notes += ("the storage limits the step",)
    return Course(slow, (tier,), ((every, load),), ((every, one.state.value), (1, nbytes)), notes=notes)


def lowdiff_plus(one: Setting, mtbf: float) -> Course:
    """LowDiff+: a replica in the hosts' memory takes every gradient; it is written without a pause.

    One GPU of each copy of the state sends the dense gradient. A failure that takes the machine goes back to storage.
    """
    copying = 4 * one.parameters.value / (one.copy_rate.value * one.shards.value)
    stepping = one.parameters.value / (FIGURES.host_rate.value * _state_machines(one))
    usual = one.step.value * (1 + FIGURES.lowdiff_plus_slowdown.value)
    step = max(usual, copying, stepping)
    behind = max(1, math.ceil(one.write / step))
    tiers = (
        Tier("replica", 1, one.restart.value + one.copy, delay=copying, survives=1 - one.machine_share.value),
        Tier("storage", behind, one.restart.value + one.copy + one.write, delay=one.write),
    )
    notes = ("the replica or its link limits the step",) if step > usual else ()
    return Course(step, tiers, stored=((behind, one.state.value),), notes=notes)


def checkmate(one: Setting, mtbf: float) -> Course:
    """Checkmate: switches multicast gradients to shadow machines, which hold the state of the last step.

    The shadow has as many cores as it needs, and no failure takes it away.
    """
    step = one.step.value * (1 + FIGURES.checkmate_slowdown.value)
    tier = Tier("shadow", 1, one.restart.value + _from_peer(one), delay=step)
    return Course(step, (tier,), sent=((1, 2 * one.parameters.value),), notes=(_cores(one, step),))


def our_log(one: Setting, mtbf: float) -> Course:
    """The log of gradients beside the trainer's own checkpoints, which are its bases: `torch.save` of the whole state.

    The codec and the intervals are those of `ckpt plan`: exact, else int8, else no log at all.
    """
    return _logged(one, mtbf, _DENSE, one.copy + one.write, 0.0)


def our_bases(one: Setting, mtbf: float) -> Course:
    """The log, and bases at once: copied during forward and backward, with a stall of max(0, S/B - (t - U))."""
    return _logged(one, mtbf, _DENSE, *_at_once(one))


def our_topk(one: Setting, mtbf: float) -> Course:
    """The same for training that compresses its gradients to 1 %, as LowDiff's does: the log is exact."""
    sent = FIGURES.our_topk_nbytes.value * one.replicas.value
    sizes = {"training compresses its gradients to 1 %": min(FIGURES.our_nbytes.value, sent)}
    return _logged(one, mtbf, sizes, *_at_once(one))


_DENSE = {"log: exact": FIGURES.our_nbytes.value, "log: int8, approximate": FIGURES.our_int8_nbytes.value}
"""Bytes a parameter and step of codecs that are tried, by what is noted of them."""


def _at_once(one: Setting) -> tuple[float, float]:
    """The stall of a base at once, and the seconds until it can be restored."""
    stall = snapshot_stall(one)
    return stall, max(0.0, one.copy - stall) + one.write


def _logged(one: Setting, mtbf: float, sizes: dict[str, float], stall: float, delay: float) -> Course:
    """The first of these logs that fits and pays; else bases only."""
    load, slow = one.copy + one.write, FIGURES.our_slowdown.value
    run = RunCosts(one.step.value, mtbf, stall, min(one.restart.value + load, 0.99 * mtbf), delay)
    for label, size in sizes.items():
        nbytes = one.parameters.value * size
        rates = DataRates(one.state.value, nbytes, one.storage_rate.value, one.storage_rate.value)
        replay = max(nbytes / one.storage_rate.value, one.parameters.value / _replay_rate(one))
        try:
            plan = plan_schedule(run, LogCosts(replay, slow), rates)
        except UnsupportedError:
            continue
        if plan.logged is None or not plan.log_pays:
            continue
        flush = min(int(FIGURES.our_flush.value), plan.logged.base_steps)
        every = flush * max(1, math.ceil(min(plan.logged.base_steps, MAX_INTERVAL) / flush))
        tier = Tier(
            *("log", flush, one.restart.value + load),
            delay=nbytes / one.storage_rate.value,
            replay=replay,
            base_every=every,
            base_delay=delay,
        )
        stored = ((every, one.state.value), (1, nbytes))
        return Course(one.step.value * (1 + slow), (tier,), ((every, stall),), stored, notes=(label,))
    return _bases_only(one, one.step.value, mtbf, stall, delay, load, ("a log does not pay: bases only",))


def our_shadow(one: Setting, mtbf: float) -> Course:
    """The log goes to a shadow on other machines, over their network; the shadow writes the bases.

    It has as many cores as it needs; no failure of the trainer takes it away. The step in flight is lost.
    """
    nbytes = one.parameters.value * FIGURES.our_nbytes.value
    usual = one.step.value * (1 + FIGURES.our_slowdown.value)
    step = max(usual, nbytes / (one.network_rate.value * one.machines.value))
    every = max(int(FIGURES.shadow_bases.value), math.ceil(one.write / step))
    tier = Tier("shadow", 1, one.restart.value + _from_peer(one), delay=step)
    notes = (_cores(one, step), *(("the network limits the step",) if step > usual else ()))
    return Course(step, (tier,), stored=((every, one.state.value),), sent=((1, nbytes),), notes=notes)


def our_copies(one: Setting, mtbf: float) -> Course:
    """Each state in the memory of two other hosts, as often as network and cores allow; storage is written behind."""
    return _peers(one, mtbf, f"copies:{2 if one.machines.value > 2 else 1}")


def our_parity(one: Setting, mtbf: float) -> Course:
    """The same with two parities of eight hosts' states, or of as many as there are, and fewer bytes in memory."""
    machines = int(one.machines.value)
    return _peers(one, mtbf, f"parity:{min(8, machines - 2)}+2" if machines >= 4 else "copies:1")


def _peers(one: Setting, mtbf: float, wish: str) -> Course:
    """States in the hosts' own memory and in that of peers.

    A copy is as in `_at_once`. A failure that takes no machine restores from the host's own memory; one that takes a
    machine, from peers, who send K pieces to each new host; what they cannot replace comes from storage. With one
    machine there are no peers.
    """
    step, machines, stall = one.step.value, int(one.machines.value), snapshot_stall(one)
    scheme, part = PeerScheme.parse(wish), one.state.value / machines
    has_peers = scheme.hosts <= machines
    cores = FIGURES.our_cores.value / FIGURES.peer_cpu.value
    rate = min(one.network_rate.value * FIGURES.gemini_network.value, cores)
    sending = max(one.copy, scheme.sent * part / rate if has_peers else 0.0)
    load = one.restart.value + one.copy
    run = RunCosts(step, mtbf, stall, min(load, 0.99 * mtbf), sending)
    every = min(plan_schedule(run).bases.base_steps, MAX_INTERVAL)
    fetching = scheme.data * part / min(one.network_rate.value, cores)
    behind = every * max(1, math.ceil(one.write / (step * every)))
    storage = Tier("storage", behind, load + one.write, delay=sending + one.write)
    own = Tier("own memory", every, load, delay=sending, survives=1 - one.machine_share.value)
    stored, stalls = ((behind, one.state.value),), ((every, stall),)
    if not has_peers:
        return Course(step, (own, storage), stalls, stored, notes=("one machine: no peers",))
    window = load + fetching + every * step + sending
    lost = loss_share(one, scheme, mtbf, window)
    peers = Tier("peers", every, load + fetching, delay=sending, survives=1 - lost)
    notes = (
        f"{scheme}: {GENERATIONS * scheme.memory * part / 1e9:.3g} GB of a machine's memory",
        f"{lost:.2%} of failures are more than it replaces",
    )
    sent = ((every, scheme.sent * one.state.value),)
    return Course(step, (own, peers, storage), stalls, stored, sent, notes)


SYSTEMS: dict[str, tuple[str, Callable[[Setting, float], Course]]] = {
    "torch.save": ("torch.save", torch_save),
    "checkfreq": ("CheckFreq-like", checkfreq),
    "gemini": ("Gemini-like", gemini),
    "lowdiff": ("LowDiff", lowdiff),
    "lowdiff+": ("LowDiff+", lowdiff_plus),
    "checkmate": ("Checkmate", checkmate),
    "log": ("ours: torch.save and log", our_log),
    "bases": ("ours: bases at once, log", our_bases),
    "topk": ("ours: the same, top-k", our_topk),
    "shadow": ("ours: shadow", our_shadow),
    "copies": ("ours: peers, copies", our_copies),
    "parity": ("ours: peers, parity", our_parity),
}
"""By name: title, and the course of a setting at a mean time between failures."""


def snapshot_stall(one: Setting) -> float:
    """Seconds that an update waits for the copy of the state: max(0, S/B - Tc), derived from Checkflow."""
    return max(0.0, one.copy - (one.step.value - one.update.value))


def _bases_only(
    one: Setting, step: float, mtbf: float, stall: float, delay: float, load: float, notes: tuple[str, ...] = ()
) -> Course:
    run = RunCosts(one.step.value, mtbf, stall, min(one.restart.value + load, 0.99 * mtbf), delay)
    plan = plan_schedule(run, rates=DataRates(one.state.value, write_rate=one.storage_rate.value))
    every = min(plan.bases.base_steps, MAX_INTERVAL)
    tier = Tier("storage", every, one.restart.value + load, delay)
    return Course(step, (tier,), ((every, stall),), stored=((every, one.state.value),), notes=notes)


def _state_machines(one: Setting) -> float:
    """Machines over which one copy of the state is divided."""
    return max(1.0, one.shards.value * one.machines.value / one.gpus.value)


def _replay_rate(one: Setting) -> float:
    """Parameters a second that the machines of one copy of the state replay."""
    return FIGURES.our_replay_rate.value * FIGURES.our_cores.value * _state_machines(one)


def _from_peer(one: Setting) -> float:
    """Seconds to load the state from other machines: through the network of those that take one copy, then to GPUs."""
    return one.state.value / (one.network_rate.value * _state_machines(one)) + one.copy


def _cores(one: Setting, step: float) -> str:
    cores = math.ceil(one.parameters.value / step / FIGURES.our_replay_rate.value)
    return f"{cores} core{'s' * (cores > 1)} of a shadow"
