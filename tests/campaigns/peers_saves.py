"""Kill hosts that hold parity of each other's saves, at any moment: rounds of the campaign `peers_parity`.

Ranks send one save after another (`SaveSender`), each when the one before is whole, or instead of it. What the hosts
that are left give must be all files of one save, and none before the last that rank 0 has called whole.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ckpt.holding.generation import SentGeneration
from ckpt.holding.peers import Peers
from ckpt.holding.save_sender import SaveSender
from ckpt_formats.core.errors import CkptError
from ckpt_formats.stores.peers_store import PeersStore, open_peers
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import Member
from ckpt_formats.universal.manifest import pack_file
from ckpt_training.writing.save_orders import name_of_member
from peers_parity import SAMPLES, SECONDS, Hosts, read_all

RANKS = 6
STEPS = (1, 2, 3)
PACK = 2_500_000
"""The most bytes of a pack: some pieces."""


@dataclass(frozen=True)
class Saves:
    """Published saves of random bytes: what holds and sends them does not read them."""

    folder: Path
    member: Member

    @classmethod
    def create(cls, folder: Path, seed: int) -> Saves:
        """Write packs, and what rank 0 sends besides."""
        draw = random.Random(seed)
        for step in STEPS:
            for name in [*map(pack_file, range(RANKS)), "manifest.json", "further.json"]:
                path = folder / "saves" / str(step) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(draw.randbytes(draw.randrange(1000, PACK if "/" in name else 3000)))
        chain = chain_file.load(SAMPLES / "recorded-1" / "run.chain" / chain_file.NAME)
        return cls(folder / "saves", chain.members[0])

    def compare(self, path: Path) -> int:
        """Compare all that the memory of peers has with a save. Returns its step."""
        (member,) = chain_file.load(path / chain_file.NAME).members
        assert isinstance(path.store, PeersStore)
        step = path.store.step
        names = {one.relative_to(self.folder / str(step)) for one in (self.folder / str(step)).rglob("*.*")}
        for name in names:
            content = read_all(path / member.folder / str(name))
            assert content == (self.folder / str(step) / name).read_bytes(), f"{name} of step {step} differs"
        return step


def one_round(saves: Saves, work: Path, seed: int, way: str) -> Mapping[str, int]:
    """One round. Returns what was seen."""
    draw, is_flipped = random.Random(seed), way == "saves, flipped"
    work.mkdir()
    hosts = Hosts.drawn(draw, work, partial(send, saves))
    text, seen = f"seed {seed}: {way}, {hosts}", {way: 1}
    try:
        if is_flipped or draw.random() < 0.5:  # else in the middle of the first one
            first, deadline = draw.choice([STEPS[0], STEPS[2]]), time.monotonic() + SECONDS
            while not (work / f"whole-{first}").exists():
                assert time.monotonic() < deadline, f"{text}: step {first} is not held"
                time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 1.5))
        whole = max((step for step in STEPS if (work / f"whole-{step}").exists()), default=0)
        lost = hosts.lose(draw, hosts.peers.parsed.spares - is_flipped)
        flipped = draw.choice([one for one in range(len(hosts.addresses)) if one not in lost])
        if is_flipped:
            hosts.flip(flipped)
        try:
            path = open_peers(hosts.url(lost))
            step = saves.compare(path)
        except CkptError as error:
            if whole:
                raise AssertionError(f"{text}: without {lost}, step {whole}") from error
            return {**seen, "no save": 1}
        assert step >= whole, f"{text}: step {step}, not {whole}, without {lost}"
        assert isinstance(path.store, PeersStore)
        damaged = {one.holder for one in path.store.damaged}
        assert damaged <= ({hosts.addresses[flipped]} if is_flipped else set()), f"{text}: {damaged}"
        return {**seen, **({"computed": 1} if path.store.nbytes_computed else {}), **({"named": 1} if damaged else {})}
    finally:
        hosts.close()


def send(saves: Saves, work: Path, fields: Mapping[str, Any], host: int, seed: int) -> None:
    """Send the saves of a host's ranks, one after another, as rank 0 lets all."""
    peers, draw = Peers(**fields), random.Random(seed + host)
    ranks = [rank for rank in range(RANKS) if peers.host_of(rank, RANKS) == host]
    senders: list[SaveSender] = []
    for step in STEPS:
        begun = work / f"begun-{step}"
        if 0 in ranks:
            draft = work / "draft"
            draft.write_text(str(time.time_ns()))
            draft.rename(begun)
        while not begun.exists():
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        for sender in senders:
            sender.abandon()
        generation = SentGeneration(
            "run.chain",
            f"save-{step}",
            int(begun.read_text()),
            RANKS,
            lambda rank, step=step: f"{name_of_member(step)}/{pack_file(rank)}",  # type: ignore[misc]
            step,
            is_recorded=False,
        )
        folder = saves.folder / str(step)
        senders = [
            SaveSender(peers, generation, folder, rank, None if rank else saves.member, lambda address, text: None)
            for rank in ranks
        ]
        # Rank 0 gives some saves up before they are whole.
        deadline = time.monotonic() + (draw.uniform(0.0, 0.5) if step == STEPS[1] and draw.random() < 0.5 else SECONDS)
        while 0 in ranks and not senders[0].is_whole and time.monotonic() < deadline:
            time.sleep(0.01)
        if 0 in ranks and senders[0].is_whole:
            (work / f"whole-{step}").touch()
    while True:
        time.sleep(1.0)
