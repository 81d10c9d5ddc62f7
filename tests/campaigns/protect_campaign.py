"""Damage protected folders, kill what writes parity and what repairs, and compare all bytes afterwards.

`patterns` loses all sets of blocks of small codes, `damage` files of random folders: removed, torn, flipped, exchanged,
lengthened, up to what parity replaces and beyond. No file may ever have other bytes than the original or the damaged
ones, and what cannot be repaired must be named. So it does in chains with logs, and in buckets. `kills` ends protect
and repair in front of each change to the file system: parity is absent or whole, each file is damaged as before or
whole, and the next run finishes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import obstore

import ckpt as library
from ckpt.chains.append import append
from ckpt.chains.write import DeltaPolicy
from ckpt.pipeline import Execution
from ckpt.protection.damage import find_damage
from ckpt.protection.members import protect_members
from ckpt.protection.work_files import REPAIRED
from ckpt_formats.core.checkpoint import Origin
from ckpt_formats.core.folders import CHAIN_LOCK, PARITY
from ckpt_formats.parity.blocks import find_parity
from ckpt_formats.parity.code import multiply, parity_matrix, recovery_matrix
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal.chain import chain_file
from gradient_logs import small_log
from held import checkpoint, parameter
from killing import killed, points
from object_stores import BUCKET, Killer, StoreServer, killing, moto, reached, start
from run import Round, alternated

RESOURCES = library.Resources(workers=2)
MAX_BLOCKS, MAX_PARITIES = 12, 4
_LENGTHS = (0, 1, 17, 5000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 2_500_000)
"""Lengths of files: around those of blocks."""
_ODDS = (1, 2, 6, 12, 1, 2, 2, 1)


def patterns(data: int, parities: int, nbytes: int = 33) -> int:
    """Lose every set of blocks that a code replaces, and compare what is computed. Returns how many sets."""
    generator = np.random.default_rng(data * 100 + parities)
    blocks = generator.integers(0, 256, (data, nbytes), np.uint8)
    blocks = np.concatenate([blocks, multiply(parity_matrix(data, parities), blocks)])
    everything, seen = set(range(data + parities)), 0
    for count in range(1, parities + 1):
        for lost in itertools.combinations(range(data + parities), count):
            present = sorted(everything - set(lost))[:data]
            computed = multiply(recovery_matrix(data, parities, present, lost), blocks[present])
            assert np.array_equal(computed, blocks[list(lost)]), f"{data} + {parities} without {lost}"
            seen += 1
    return seen


def codes() -> Iterator[tuple[int, int]]:
    """All codes with up to MAX_BLOCKS blocks, of which up to MAX_PARITIES are parities."""
    for parities in range(1, MAX_PARITIES + 1):
        for data in range(1, MAX_BLOCKS - parities + 1):
            yield data, parities


Contents = Mapping[str, bytes]


def contents_of(root: Path) -> dict[str, bytes]:
    """All files below a folder by name, those of parity too."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def fill(root: Path, contents: Contents) -> None:
    """Make a folder that has these files, and no others."""
    shutil.rmtree(root, ignore_errors=True)
    for name, data in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def make_contents(generator: random.Random) -> dict[str, bytes]:
    """Files of several lengths, some in folders."""
    return {
        f"{generator.choice(('', '', 'a/', 'a/b/'))}file-{number}": generator.randbytes(
            generator.choices(_LENGTHS, _ODDS)[0]
        )
        for number in range(generator.randint(2, 9))
    }


def harm(root: Path, generator: random.Random, spared: Collection[str] = ()) -> set[str]:
    """Damage one file, or exchange two, but none that is spared. Returns their names."""
    names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file()]
    names = [name for name in names if name not in spared]
    path = root / generator.choice(names)
    data, way = path.read_bytes(), generator.randrange(6)
    if way == 0:
        path.unlink()
    elif way == 1:
        path.write_bytes(data[: generator.randrange(len(data) + 1)])
    elif way == 2:
        path.write_bytes(data + generator.randbytes(generator.randint(1, 3000)))
    elif way == 3 and data:
        flipped = bytearray(data)
        for _ in range(generator.choice((1, 1, 3))):
            flipped[generator.randrange(len(flipped))] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
    elif way == 4 and data:
        start = generator.randrange(len(data))
        path.write_bytes(data[:start] + bytes(min(len(data) - start, 4096)) + data[start + 4096 :])
    else:
        other = root / generator.choice(names)
        other_data = other.read_bytes()
        path.write_bytes(other_data)
        other.write_bytes(data)
        return {path.relative_to(root).as_posix(), other.relative_to(root).as_posix()}
    return {path.relative_to(root).as_posix()}


class DamagedFolders:
    """Protected folders that are damaged again and again, and repaired."""

    spared: ClassVar[tuple[str, ...]] = ()
    """The names of files without parity, which are not damaged."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._root, self._generator = folder / "protected", random.Random(seed)
        self._whole: Contents = {}
        self._lose, self._left = 0, 0

    def _protect(self) -> None:
        """Fill the folder, and protect it."""
        contents = make_contents(self._generator)
        if not any(contents.values()):
            contents["more"] = b"more"
        fill(self._root, contents)
        by, jump = self._generator.choice((("file", 1), ("file", 1), ("folder", 1), ("file", 2)))
        library.protect(self._root, self._lose, by=by, jump=jump, resources=RESOURCES)

    @property
    def _place(self) -> str:
        """What is repaired."""
        return str(self._root)

    def _send(self) -> None:
        """Bring the folder to what is repaired."""

    def _contents(self) -> dict[str, bytes]:
        """What is there, by name."""
        return contents_of(self._root)

    def _name(self, path: Path) -> str:
        return str(path).removeprefix(f"{self._place}/")

    def round(self) -> Counter[str]:
        """Damage some files, repair, and compare: all bytes, or what is named as lost."""
        generator = self._generator
        if not self._left:
            self._left, self._lose = 25, generator.choice((1, 2, 2, 3, 4))
            self._protect()
            self._whole = self._contents()
        self._left -= 1
        fill(self._root, self._contents())
        for _ in range(generator.randint(1, self._lose + 1)):
            harm(self._root, generator, self.spared)
        self._send()
        before = self._contents()
        try:
            result = library.repair(self._place, resources=RESOURCES)
        except library.CkptError:
            self._left = 0
            copies = [name for name in self._whole if name.endswith("/manifest")]
            assert all(before.get(name) != self._whole[name] for name in copies), "a copy of the manifest is whole"
            assert self._contents() == before
            return Counter({"no manifest": 1})
        after, lost = self._contents(), {self._name(one.path) for one in result.unrepairable}
        for name, data in self._whole.items():
            assert after.get(name) == (before.get(name) if name in lost else data), name
        # What is left of a file that cannot be repaired, and was in one that was replaced.
        parts = {str(Path(name).with_name(f".{Path(name).name}{REPAIRED}")) for name in lost}
        new = set(after) - parts
        assert new | lost == set(self._whole) | (set(before) & new), sorted(after)
        again = library.repair(self._place, dry_run=True, resources=RESOURCES)
        ranges = {one.path: one.lost_ranges for one in result.unrepairable}
        assert {one.path: one.lost_ranges for one in again.damaged} == ranges
        if not lost:
            return Counter({"repaired": bool(result.damaged), "unharmed": not result.damaged})
        other = self._root.with_name("other")
        fill(other, self._whole)
        assert not library.repair(self._place, others=[other], resources=RESOURCES).unrepairable
        assert self._contents() == self._whole
        return Counter({"lost and named": 1})


class DamagedChains(DamagedFolders):
    """Chains with states, packs of a removed state that others need, and a segment of a log, all in groups."""

    spared: ClassVar[tuple[str, ...]] = (chain_file.NAME, CHAIN_LOCK)

    def _protect(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        log = small_log(steps=3, seed=self._generator.randrange(1 << 20), scale=self._generator.choice((1, 300)))
        log.write(self._root)
        still = np.frombuffer(self._generator.randbytes(4 * self._generator.choice((40_000, 400_000))), np.int32)
        for step in range(10, 14):
            values = np.random.default_rng(step).standard_normal(3000).astype(np.float32)
            both = [parameter("still", {"model": still}, "frozen"), parameter("w", {"master": values}, step=step)]
            state = checkpoint(both, origin=Origin("held", None, step))
            append(self._root, state, None, DeltaPolicy(base_every=1), Execution(workers=1))
        library.Chain(self._root).compact(library.Retention(keep=("11,12,13",)))
        protect_members(self._root, self._lose, resources=RESOURCES)


class DamagedObjects(DamagedFolders):
    """Folders in a bucket that are damaged again and again, and repaired."""

    def __init__(self, folder: Path, seed: int, server: StoreServer) -> None:
        super().__init__(folder, seed)
        self._server = server

    @property
    def _place(self) -> str:
        return f"s3://{BUCKET}/protected"

    def _protect(self) -> None:
        super()._protect()
        self._send()

    def _send(self) -> None:
        there, wanted = self._contents(), contents_of(self._root)
        for name in there.keys() - wanted:
            obstore.delete(self._server.client, f"protected/{name}")
        for name, data in wanted.items():
            if there.get(name) != data:
                obstore.put(self._server.client, f"protected/{name}", data)

    def _contents(self) -> dict[str, bytes]:
        return objects_below(self._server, "protected")


def objects_below(server: StoreServer, key: str) -> dict[str, bytes]:
    """The objects of a bucket below a key, but for a lease that is left."""
    metas = [meta["path"] for page in obstore.list(server.client, f"{key}/") for meta in page]
    objects = {one[len(key) + 1 :]: bytes(obstore.get(server.client, one).bytes()) for one in metas}
    return {name: data for name, data in objects.items() if not name.endswith(".lock")}


class DamagedParts:
    """A protected file whose blocks are damaged again and again, and repaired."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._file, self._generator = folder / "single" / "file", random.Random(seed)
        self._file.parent.mkdir()

    def round(self) -> Counter[str]:
        """Damage blocks, perhaps cut off the end, repair, and compare: all bytes, or what is named as lost."""
        generator, file = self._generator, self._file
        lose, whole = generator.choice((1, 2, 3)), generator.randbytes(generator.randrange(1, 9 << 20))
        file.write_bytes(whole)
        library.protect(file, lose, overwrite=True, resources=RESOURCES)
        data = bytearray(whole)
        for _ in range(generator.randint(1, lose + 1)):
            start = generator.randrange(len(data))
            span = data[start : start + generator.choice((1, 5000, 1 << 20))]
            data[start : start + len(span)] = bytes(one ^ 0x55 for one in span)
        del data[generator.choice((len(data), len(data), generator.randrange(len(data)))) :]
        file.write_bytes(data)
        lost = library.repair(file, resources=RESOURCES).unrepairable
        if not lost:
            assert file.read_bytes() == whole
            return Counter({"repaired": 1})
        assert file.read_bytes() == data
        copy = file.with_name("copy")
        copy.write_bytes(whole)
        assert not library.repair(file, others=[copy], resources=RESOURCES).unrepairable
        assert file.read_bytes() == whole
        return Counter({"lost and named": 1})


def damage(folder: Path, seed: int) -> Iterator[Round]:
    """Yield damaged folders, files and chains without end."""
    (folder / "c").mkdir()
    works = {
        "folders": DamagedFolders(folder, seed).round,
        "parts": DamagedParts(folder, seed).round,
        "chains": DamagedChains(folder / "c", seed).round,
    }
    yield from alternated(works)


def store_damage(folder: Path, seed: int) -> Iterator[Round]:
    """Yield damaged folders in a bucket without end."""
    with moto() as server, reached(server):
        yield from alternated({"objects": DamagedObjects(folder, seed, server).round})


def all_patterns(folder: Path, seed: int) -> Iterator[Round]:
    """Yield all sets of lost blocks of all small codes, and then again."""
    yield from alternated({f"{k} + {m}": partial(_counted, k, m) for k, m in codes()})


def _counted(data: int, parities: int) -> dict[str, int]:
    return {"sets of blocks": patterns(data, parities)}


class Kills:
    """A folder that is protected or repaired, and killed meanwhile."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._root, self._other = folder / "run", folder / "elsewhere"
        self._generator = random.Random(seed)
        generator = random.Random(seed)
        self._contents = {f"{above}f{n}": generator.randbytes(n * 700_001) for n in range(4) for above in ("", "a/")}
        self._protected: Contents = {}
        self._done: dict[bool, tuple[int, Contents]] = {}
        """Whether parity is elsewhere: how many changes to the file system `protect` makes, and all files then."""

    def _protect(self, elsewhere: bool) -> None:
        into = [self._other / "x", self._other / "y"] if elsewhere else []
        library.protect(self._root, 2, into=into, resources=RESOURCES)

    def _fresh(self) -> None:
        fill(self._root, self._contents)
        shutil.rmtree(self._other, ignore_errors=True)
        self._other.mkdir()

    def protect(self) -> Counter[str]:
        """Kill `protect`, perhaps again; then finish."""
        elsewhere, generator = self._generator.random() < 0.3, self._generator
        work = partial(self._protect, elsewhere)
        if elsewhere not in self._done:
            self._fresh()
            self._done[elsewhere] = points(work, self._root.parent), contents_of(self._root.parent)
        count, whole = self._done[elsewhere]
        self._fresh()
        seen: Counter[str] = Counter()
        for _ in range(generator.choice((1, 1, 2))):
            if os.path.lexists(self._root / PARITY):
                break
            killed(work, self._root.parent, generator.randrange(count))
            assert {name: (self._root / name).read_bytes() for name in self._contents} == self._contents
            if os.path.lexists(self._root / PARITY):
                assert find_damage(find_parity(self._root), RESOURCES).is_whole
                seen["whole"] += 1
            else:
                seen["absent"] += 1
        if not os.path.lexists(self._root / PARITY):
            self._protect(elsewhere)
        after = contents_of(self._root.parent)
        after.pop("run/.ckpt-parity.lock", None)
        assert after == whole
        return seen

    def repair(self) -> Counter[str]:
        """Damage, kill `repair`, perhaps again; then finish."""
        generator = self._generator
        if not self._protected:
            self._fresh()
            self._protect(False)
            self._protected = contents_of(self._root)
        whole = self._protected
        fill(self._root, whole)
        for name in generator.sample(sorted(name for name in whole if not name.endswith("manifest")), 2):
            path = self._root / name
            if generator.random() < 0.5:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:-5] + b"torn")
        first, second = generator.sample(sorted(self._contents), 2)
        if generator.random() < 0.5 and all((self._root / name).is_file() for name in (first, second)):
            # Blocks of exchanged files are found by their hashes; but these files are also among those that are lost.
            one, two = (self._root / first).read_bytes(), (self._root / second).read_bytes()
            (self._root / first).write_bytes(two)
            (self._root / second).write_bytes(one)
        damaged = contents_of(self._root)
        work = partial(library.repair, self._root, resources=RESOURCES)
        count = points(work, self._root)
        expected = contents_of(self._root)
        fill(self._root, damaged)
        seen: Counter[str] = Counter()
        for _ in range(generator.choice((1, 1, 2))):
            killed(work, self._root, generator.randrange(count))
            for name, data in whole.items():
                path = self._root / name
                now = path.read_bytes() if path.is_file() else None
                assert now in (data, damaged.get(name)), name
                seen["whole" if now == data else "damaged"] += 1
        library.repair(self._root, resources=RESOURCES)
        after = contents_of(self._root)
        after.pop(".ckpt-parity.lock", None)
        assert after == expected
        return seen


class ChainKills:
    """A chain whose last state joins the others in groups of parity, and is killed meanwhile."""

    def __init__(self, folder: Path, seed: int, states: int = 19) -> None:
        self._run, self._before = folder / "run.chain", folder / "before"
        self._generator, self._states = random.Random(seed), states

    def _join(self) -> None:
        protect_members(self._run, 2, resources=RESOURCES)

    def _prepare(self) -> None:
        for step in range(1, self._states + 1):
            values = np.random.default_rng(step).standard_normal(3000).astype(np.float32)
            state = checkpoint([parameter("w", {"master": values}, step=step)], origin=Origin("held", None, step))
            append(self._run, state, None, DeltaPolicy(base_every=1), Execution(workers=1))
            if step < self._states:
                self._join()
        shutil.copytree(self._run, self._before)
        self._count, self._whole = points(self._join, self._run), contents_of(self._run)

    def join(self) -> Counter[str]:
        """Kill it, perhaps again: the groups are those before or after. Then finish."""
        if not self._before.exists():
            self._prepare()
        shutil.rmtree(self._run)
        shutil.copytree(self._before, self._run)
        seen: Counter[str] = Counter()
        for _ in range(self._generator.choice((1, 1, 2))):
            killed(self._join, self._run, self._generator.randrange(self._count))
            there = find_parity(self._run)
            assert find_damage(there, RESOURCES).is_whole
            states = sum(bool(domain.files) for group in there.manifest.groups for domain in group.domains)
            seen["after" if states == self._states else "before"] += 1
        self._join()
        after = contents_of(self._run)
        after.pop(".ckpt-parity.lock", None)
        assert after == self._whole
        return seen


CHAIN = f"s3://{BUCKET}/run.chain"


def join_in_store() -> None:
    """The work of a process that is killed."""
    protect_members(target_path(CHAIN), 2, resources=library.Resources(workers=1))


class StoreKills:
    """A chain in a bucket whose last state joins the others in groups of parity, and is killed meanwhile."""

    def __init__(self, folder: Path, seed: int, server: StoreServer, killer: Killer) -> None:
        self._folder, self._server, self._killer = folder, server, killer
        self._generator, self._processes = random.Random(seed), multiprocessing.get_context("forkserver")
        self._before: Contents = {}
        self._whole: Contents = {}
        self._count = 0

    def _join(self, at: int = -1) -> None:
        """Let a process join the state, killed at a request."""
        self._killer.expect(at=at)
        process = start(self._processes, self._server, join_in_store, killer=self._killer)
        process.join(60)
        assert process.exitcode == (0 if at < 0 else -9), process.exitcode

    def _put(self, contents: Contents) -> None:
        metas = [meta["path"] for page in obstore.list(self._server.client, "run.chain/") for meta in page]
        obstore.delete(self._server.client, metas)
        for name, data in contents.items():
            obstore.put(self._server.client, f"run.chain/{name}", data)

    def _prepare(self) -> None:
        run = self._folder / "run.chain"
        for step in range(1, 5):
            values = np.random.default_rng(step).standard_normal(3000).astype(np.float32)
            state = checkpoint([parameter("w", {"master": values}, step=step)], origin=Origin("held", None, step))
            append(run, state, None, DeltaPolicy(base_every=1), Execution(workers=1))
            if step < 4:
                protect_members(run, 2, resources=RESOURCES)
        self._before = contents_of(run)
        self._put(self._before)
        self._join()
        self._whole, self._count = objects_below(self._server, "run.chain"), self._killer.requests

    def join(self) -> Counter[str]:
        """Kill it, perhaps again, and lose an object: it is repaired or named. Then finish: all is as without kills."""
        generator = self._generator
        if not self._before:
            self._prepare()
        self._put(self._before)
        for _ in range(generator.choice((1, 1, 2))):
            self._join(generator.randrange(self._count // 2))
        states = {name: data for name, data in self._before.items() if name.startswith("step-")}
        lost = generator.choice(sorted(states))
        obstore.delete(self._server.client, f"run.chain/{lost}")
        result = library.repair(CHAIN, resources=RESOURCES)
        now = objects_below(self._server, "run.chain")
        assert {name: now.get(name) for name in states} in (states, {**states, lost: None})
        # The manifest before does not know the last state.
        assert (lost in now) == (not result.unrepairable) or lost.startswith("step-0000000004")
        if lost not in now:
            obstore.put(self._server.client, f"run.chain/{lost}", states[lost])
        self._join()
        library.repair(CHAIN, resources=RESOURCES)
        assert objects_below(self._server, "run.chain") == self._whole
        return Counter({"lost": lost not in now, "repaired": lost in now})


def kills(folder: Path, seed: int) -> Iterator[Round]:
    """Yield kills of protect, of repair and of a state that joins a group, in turn."""
    protecting, repairing = Kills(folder / "p", seed), Kills(folder / "r", seed)
    joining = ChainKills(folder / "c", seed)
    for one in ("p", "r", "c"):
        (folder / one).mkdir()
    yield from alternated({"protect": protecting.protect, "repair": repairing.repair, "chain": joining.join})


def store_kills(folder: Path, seed: int) -> Iterator[Round]:
    """Yield kills of a state that joins a group in a bucket."""
    with moto() as server, reached(server), killing(server) as killer:
        yield from alternated({"store": StoreKills(folder, seed, server, killer).join})
