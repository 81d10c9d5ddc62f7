"""Send what a rank has to the hosts that hold it: the sender never makes the run wait.

A holder that was started again is filled from the start, and one that is gone only makes a line in the log of the
trainer. With parity, the rank's own host holds all pieces, and other hosts add them to parities:
`ckpt_formats.stores.parity_requests` has what is held then, and what is always true of it.
"""

import time
from collections.abc import Callable

from ckpt.holding.generation import SentGeneration
from ckpt.holding.generation_watch import GenerationWatch
from ckpt.holding.holder_link import HolderLink, HolderPart
from ckpt.holding.peers import Peers
from ckpt.holding.send_queue import SendQueue
from ckpt.holding.sent_file import SentFile
from ckpt_formats.stores.http_client import Credentials


class Sender:
    """Sends the files of a rank, each holder in a thread of its own.

    Attributes:
        links: The holders, and how far each is: first those that hold all.
        queue: What is sent.
        watch: Sees when the holders have the generation of all ranks; only rank 0 has one.
    """

    def __init__(
        self,
        peers: Peers,
        generation: SentGeneration,
        rank: int,
        files: dict[str, SentFile],
        say: Callable[[str, str], None],
        *,
        has_base: bool = True,
    ) -> None:
        """Start at once. `say`: is called with the address of a holder and its state, when that changes.

        `has_base`: whether `files` has all from which a replay begins.

        Raises `CkptError` if the user's credentials cannot be read.
        """
        credentials = Credentials.of_user()
        self.queue = SendQueue(peers, generation, rank, files, has_base=has_base, is_compacted=self._is_compacted)
        host = peers.host_of(rank, generation.world)
        whole = [HolderPart(peers.addresses[one], True, True) for one in peers.holders_of(host)]
        self.links = tuple(HolderLink(self.queue, part, credentials, None, say) for part in whole)
        for number, one in enumerate(peers.parities_of(host)):
            rows = self.queue.streams.rows_at(one)
            part = HolderPart(peers.addresses[one], False, number < peers.parsed.spares, rows)
            self.links += (HolderLink(self.queue, part, credentials, self.links[0], say),)
        self.watch = GenerationWatch(peers, generation, credentials) if rank == 0 else None
        if self.watch is not None:
            self.watch.start()
        for link in self.links:
            link.thread.start()

    @property
    def is_whole(self) -> bool:
        """Whether the holders that answer have the generation of all ranks; only rank 0's sender knows."""
        return self.watch is not None and self.watch.is_whole

    def close(self, seconds: float) -> None:
        """Send what is missing, and end after so many seconds at the latest. A holder that fails is not waited for."""
        deadline = time.monotonic() + seconds
        self._end(is_abandoned=False)
        for link in self.links:
            while link.thread.is_alive() and not link.has_failed and time.monotonic() < deadline:
                link.thread.join(0.05)

    def abandon(self) -> None:
        """End without sending what is missing: each thread after the piece that it sends."""
        self._end(is_abandoned=True)

    def _end(self, *, is_abandoned: bool) -> None:
        self.queue.close(is_abandoned=is_abandoned)
        if self.watch is not None:
            self.watch.close()

    def _is_compacted(self, name: str, file: SentFile) -> bool:
        """Whether a file cannot be read because the chain was compacted since."""
        return False
