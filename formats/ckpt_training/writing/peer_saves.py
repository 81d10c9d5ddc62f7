"""Published saves, in the memory of other hosts, too: each is sent in the background by the process that wrote it."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ckpt.chains.write import member_of
from ckpt.holding.generation import SentGeneration
from ckpt.holding.peers import HELD, Peers
from ckpt.holding.save_sender import SaveSender
from ckpt_formats.core.errors import CkptError
from ckpt_formats.universal.manifest import Manifest, pack_file
from ckpt_training.writing.save_orders import SaveSettings, name_of_member
from ckpt_training.writing.trainer_messages import reason_of

_CLOSE_SECONDS, _ORPHAN_SECONDS = 2.0, 60.0
"""How long the end waits until the holders have the last save, and how long if the trainer has ended."""
_WHOLE_SECONDS = 2.0
"""How long to wait until it is known that the holders have what all ranks have sent."""


class PeerSaves:
    """Sends a rank's part of each save to its holders, one save at a time, so that each becomes whole there."""

    def __init__(self, settings: SaveSettings, send: Callable[[str], None]) -> None:
        """`send`: sends a line to the trainer."""
        self._settings, self._send = settings, send
        self._peers = Peers(**settings.peers or {})
        self._sender: SaveSender | None = None
        self._step, self._start, self._created = 0, 0.0, 0

    def takes(self, step: int) -> int | None:
        """Return when this save was published, in nanoseconds since 1970, if rank 0 lets all ranks send it.

        Else it says what is still on its way. An earlier save has so long as a rank may take for a save, until a newer
        one is sent in its place.
        """
        if not self._is_free(step):
            return None
        self._created = max(time.time_ns(), self._created + 1)  # holders compare them, and a clock may go back
        return self._created

    def _is_free(self, step: int) -> bool:
        if self._sender is None:
            return True
        deadline = time.monotonic() + _WHOLE_SECONDS
        while not self._sender.is_whole and time.monotonic() < deadline:
            if any(link.text != HELD for link in self._sender.links):
                break
            time.sleep(0.05)
        if self._sender.is_whole or time.monotonic() - self._start > self._settings.seconds:
            return True
        for link in self._sender.links:
            if link.text == HELD:
                reason = f"step {step} is not sent, because other hosts do not hold all of step {self._step} yet"
                self._say(str(link.address), reason)
        return False

    def send(self, save: Path, step: int, created: int, manifest: Manifest | None) -> None:
        """Send this rank's part of a published save from now on, in the background.

        `created`: when it was published; `manifest`: of the save, for rank 0.
        """
        if self._sender is not None:
            self._sender.abandon()
            self._sender = None
        self._step, self._start = step, time.monotonic()
        rank = self._settings.rank
        generation = SentGeneration(
            self._peers.run_of(self._settings.path.name),
            f"{self._settings.token}-{step}",
            created,
            self._settings.ranks,
            lambda rank: f"{name_of_member(step)}/{pack_file(rank)}",
            step,
            is_recorded=False,
        )
        own = self._peers.host_of(rank, self._settings.ranks)
        hosts = (*self._peers.holders_of(own), *self._peers.parities_of(own))
        for host in hosts:
            self._say(str(self._peers.addresses[host]), f"gets step {step}")
        try:
            member = None if manifest is None else member_of(save, manifest, step)
            self._sender = SaveSender(self._peers, generation, save, rank, member, partial(self._say_of, step))
        except (CkptError, OSError) as error:  # such as a token file that cannot be read: the save is published
            for host in hosts:
                self._say(str(self._peers.addresses[host]), reason_of(error))

    def close(self, *, is_orphan: bool) -> None:
        """End, once the holders that answer have what was sent, or after some seconds."""
        if self._sender is not None:
            self._sender.close(_ORPHAN_SECONDS if is_orphan else _CLOSE_SECONDS)
            self._sender = None

    def _say_of(self, step: int, address: str, state: str) -> None:
        """Say how far the holder of a save is. Of one that was given up, nothing is said any more."""
        if step == self._step:
            self._say(address, state)

    def _say(self, address: str, state: str) -> None:
        self._send(f"peer {address} {' '.join(state.split())[:500]}")
