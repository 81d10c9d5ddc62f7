"""See when the holders have what all ranks of a run have sent, and free what is older then: rank 0 does so for all."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from ckpt.holding.column_streams import ColumnStreams
from ckpt.holding.generation import SentGeneration
from ckpt.holding.peers import Peers
from ckpt_formats.core.errors import CkptError
from ckpt_formats.stores import parity_requests, piece_requests
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.http_client import Credentials
from ckpt_formats.stores.parity_requests import HeldParity, ParityName
from ckpt_formats.stores.peers_store import HolderAnswer, PeersStore, is_recorded
from ckpt_formats.universal.chain import chain_file

_LOOK_SECONDS, _PAUSE_EACH = 0.5, 0.1
"""From one look at the holders to the next, and at least so long for each of them."""
_MOST_SKIPPED_SECONDS = 7.5
"""How long to look without a list of all pieces, if the last looks freed nothing."""
_ASK_SECONDS = 5.0
"""How long to wait for a holder."""

Answers = Mapping[NetworkAddress, HolderAnswer]
"""What each holder that answers has."""


@dataclass(frozen=True)
class _Older:
    """A generation that began before this one."""

    name: str
    created: int
    store: PeersStore


class GenerationWatch:
    """Asks all holders in a thread, until they have a generation and nothing older.

    Attributes:
        is_whole: Whether the holders that answer have the generation of all ranks: a replay can begin with it.
        parts: With parity, the files of the base that each rank sends.
    """

    def __init__(self, peers: Peers, generation: SentGeneration, credentials: Credentials) -> None:
        self._peers, self._generation, self._credentials = peers, generation, credentials
        self.is_whole, self.parts = False, list[list[str]]()
        self._closed = threading.Event()
        self._pause = max(_LOOK_SECONDS, _PAUSE_EACH * len(peers.addresses))
        """Seconds from one look to the next."""
        self._looks_to_skip = self._skipped = 0
        """With parity: looks without a list of all pieces after the last one that freed nothing, and those since."""

    def start(self) -> None:
        threading.Thread(target=self._free_others, daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _free_others(self) -> None:
        """Free what is older once all of this generation is held, each holder as soon as it answers."""
        unfreed = set(self._peers.addresses)
        while unfreed and not self._closed.wait(self._pause):
            if not self.is_whole:
                self.look()
            if self._closed.is_set():
                return
            if self.is_whole:
                unfreed -= {address for address in unfreed if self._free(address, self._generation.created)}

    def look(self) -> None:
        """Note whether a replay can begin with what is held: each rank's start, by all holders of it that answer."""
        answers = self._listed(with_pieces=False)
        if self._closed.is_set():
            return  # those that were not asked any more would seem to be lost
        ranks = range(self._generation.world)
        self.is_whole = all(self._is_start_held(rank, answers) for rank in ranks) and self._are_starts_added(
            self._generation.name, answers
        )
        if not self.is_whole:
            self._make_room(answers)

    def _listed(self, *, with_pieces: bool) -> Answers:
        answers = dict[NetworkAddress, HolderAnswer]()
        for address in self._peers.addresses:
            if self._closed.is_set():
                break
            with suppress(CkptError), closing(Connection(address, self._credentials, "holder", _ASK_SECONDS)) as one:
                name, parities = self._generation.run, tuple[HeldParity, ...]()
                run = piece_requests.list_run(one, name, with_pieces=with_pieces)
                if self._peers.sets:
                    parities = parity_requests.list_parities(one, name, with_pieces=with_pieces)
                answers[address] = HolderAnswer(address, run, parities=parities)
        return answers

    def _is_start_held(self, rank: int, answers: Answers) -> bool:
        generation = self._generation
        host = self._peers.host_of(rank, generation.world)
        whole = self._peers.holders_of(host)
        names = [(generation.main_file(rank), whole)]
        if self.parts:
            names += [(name, whole) for name in self.parts[rank]]
        if rank == 0:
            names.append((chain_file.NAME, (*whole, *self._peers.parities_of(host)[: self._peers.parsed.spares])))
        for name, hosts in names:
            addresses = [self._peers.addresses[one] for one in hosts]
            files = [answers[one].run.get(generation.name, {}).get(name) for one in addresses if one in answers]
            if not files and not (self._peers.sets and name != chain_file.NAME):
                return False
            if any(file is None or not file.starts for file in files):
                return False
        return True

    def _are_starts_added(self, generation: str, answers: Answers) -> bool:
        """Whether all parities that answer have the start of each rank, and those that do not may be lost."""
        known = {address: {parity.name: parity for parity in answer.parities} for address, answer in answers.items()}
        own = replace(self._generation, name=generation)
        return all(self._is_added(ColumnStreams(self._peers, own, rank), known) for rank in range(own.world))

    def _is_added(
        self, streams: ColumnStreams, known: Mapping[NetworkAddress, Mapping[ParityName, HeldParity]]
    ) -> bool:
        addresses = self._peers.addresses
        for stream in streams:
            silent = [one for one in (*stream.set.data, *stream.set.parities) if addresses[one] not in known]
            if len(silent) > self._peers.parsed.spares:
                return False
            for row, one in enumerate(stream.set.parities):
                if one not in silent:
                    parity = known[addresses[one]].get(streams.parity_of(stream, row))
                    column = None if parity is None else parity.columns.get(stream.column)
                    if column is None or not column.is_marked:
                        return False
        return True

    # Room for this generation

    def _make_room(self, answers: Answers) -> None:
        """Free what is in the way besides the newest generation that is whole: holders have room for two.

        A generation is left that was given up, or whose job was killed; and one that was not freed yet at the end of
        its job. Only those of this kind are freed: segments of a log, or saves.
        """
        if len(self._older_names(answers)) < 2:
            return
        if self._peers.sets:  # what is lost is in the lists of pieces alone, which are long
            self._skipped += 1
            if self._skipped <= self._looks_to_skip:
                return
            answers = self._listed(with_pieces=True)
            if self._closed.is_set():
                return
        older = [self._opened(name, answers) for name in self._older_names(answers)]
        whole = [one for one in older if one.store.is_whole]
        parts = [one for one in older if one not in whole]
        before = 0
        if whole:
            last = max(whole, key=lambda one: one.created)
            before = last.created if self._has_all(last, answers) else 0
        elif parts and len(answers) < len(self._peers.addresses):  # those that do not answer may have the rest of one
            parts.remove(min(parts, key=lambda one: (one.store.missing, -one.created)))
        names = {one.name for one in parts}
        freed = names | {one.name for one in older if one.created < before}
        for address, answer in answers.items():
            if freed & {*answer.run, *(parity.name.generation for parity in answer.parities)}:
                self._free(address, before, sorted(names))
        most = int(_MOST_SKIPPED_SECONDS / self._pause)
        self._looks_to_skip, self._skipped = 0 if freed else min(2 * self._looks_to_skip + 1, most), 0

    def _older_names(self, answers: Answers) -> set[str]:
        """The generations of this kind that began before this one."""
        names = set[str]()
        for name, created in _created(answers.values()).items():
            is_of_kind = is_recorded(name, answers.values()) == self._generation.is_recorded
            if name != self._generation.name and created < self._generation.created and is_of_kind:
                names.add(name)
        return names

    def _opened(self, name: str, answers: Answers) -> _Older:
        store = PeersStore(self._generation.run, name, list(answers.values()), None, ())
        return _Older(name, _created(answers.values())[name], store)

    def _has_all(self, last: _Older, answers: Answers) -> bool:
        """Whether holders have a generation that is whole as often as the scheme says."""
        copies = [one.run[last.name] for one in answers.values() if last.name in one.run]
        mains = last.store.files_of_ranks.keys()
        counts = Counter(file for one in copies for file, part in one.items() if part.starts or file not in mains)
        if not self._peers.sets:
            return min(counts[file] for one in copies for file in one) >= self._peers.parsed.spares
        # Another number of ranks is another scheme.
        is_own = len(mains) == self._generation.world and all(counts[file] for file in mains)
        return is_own and self._are_starts_added(last.name, answers)

    def _free(self, address: NetworkAddress, before: int, names: Sequence[str] = ()) -> bool:
        """Free the generations in a holder that began before this time, and those of these names.

        Returns whether it answered.
        """
        with suppress(CkptError), closing(Connection(address, self._credentials, "holder", _ASK_SECONDS)) as one:
            piece_requests.drop(one, self._generation.run, before, names)
            return True
        return False


def _created(answers: Iterable[HolderAnswer]) -> dict[str, int]:
    """When each generation began that a holder has a part of."""
    times = dict[str, int]()
    for answer in answers:
        files = [(name, file.created) for name, own in answer.run.items() for file in own.values()]
        columns = [(one.name.generation, column.created) for one in answer.parities for column in one.columns.values()]
        for name, created in files + columns:
            times[name] = min(created, times.get(name, created))
    return times
