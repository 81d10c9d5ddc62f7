"""Each operation on a store meets each lie: done and exactly right, or refused, with nothing lost or half there."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import ckpt as library
from ckpt.pipeline.targets import clean
from ckpt_formats.core.errors import CkptError, LockedError, OutputError
from ckpt_formats.stores import repetition
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal.chain import chain_file
from damage import OUTPUT, ckpt
from held import states
from lies_of_writing import WRITING
from lying_store import Answer, Handler, Lie, LyingStore, MemoryStore, Object, Request, lying
from object_stores import BUCKET, reached

LIES: dict[str, Lie] = {**WRITING}
SECONDS = 5.0
"""What one operation may take at most, with the budget of these tests for requests that fail."""
BACK = (("out", ()), ("checked", ("--read-back",)))
ROOT = f"s3://{BUCKET}/run"
Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Operation:
    """What a user does with the store."""

    name: str
    run: Callable[[], object]
    target: str
    """The key of what is written in the store."""
    before: Files
    """What is in the bucket before, by keys."""
    after: Files
    """The files at the target when it is done."""

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.target}"


@pytest.fixture(scope="module")
def store() -> Iterator[LyingStore]:
    with lying() as running, reached(running.server):
        yield running


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of these tests for requests that fail."""
    monkeypatch.setattr(repetition, "_FIRST_PAUSE", 0.001)
    monkeypatch.setenv("CKPT_STORE_RETRY", "0.1")


def files_below(folder: Path) -> dict[str, bytes]:
    paths = [folder] if folder.is_file() else sorted(one for one in folder.rglob("*") if one.is_file())
    return {
        "" if one == folder else one.relative_to(folder).as_posix(): one.read_bytes()
        for one in paths
        if one.name != "chain.lock"
    }


def at(key: str, files: Files) -> dict[str, bytes]:
    return {f"{key}/{name}" if name else key: data for name, data in files.items()}


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Operation]:
    """Each operation, with what it gives between folders."""
    folder = tmp_path_factory.mktemp("operations")
    paths = [folder / f"state{step}" for step in range(1, 4)]
    for path, state in zip(paths, states(3, 600), strict=True):
        library.save(state, path, library.Universal())
    source = library.open(paths[0])
    library.save(source, folder / "single.pt", library.Torch())
    for count in (1, 2):
        run = library.Chain(folder / f"{count}.chain")
        for path in paths[:count]:
            run.append(library.open(path))
    whole, single = files_below(paths[0]), files_below(folder / "single.pt")
    chains = {count: files_below(folder / f"{count}.chain") for count in (1, 2)}
    notes = {".ckpt/job": b'{"id": "1", "files": ["packs/00000.safetensors"]}'}
    return {
        one.name: one
        for one in (
            Operation(
                "convert", lambda: library.save(source, f"{ROOT}/out", library.Universal()), "run/out", {}, whole
            ),
            Operation(
                "convert to a file",
                lambda: library.save(source, f"{ROOT}/single.pt", library.Torch()),
                "run/single.pt",
                {},
                single,
            ),
            Operation("copy", lambda: library.copy(paths[0], f"{ROOT}/copy"), "run/copy", {}, whole),
            Operation(
                "append to nothing",
                lambda: library.Chain(f"{ROOT}/new.chain").append(source),
                "run/new.chain",
                {},
                chains[1],
            ),
            Operation(
                "append",
                lambda: library.Chain(f"{ROOT}/old.chain").append(library.open(paths[1])),
                "run/old.chain",
                at("run/old.chain", chains[1]),
                chains[2],
            ),
            Operation(
                "clean a complete one",
                lambda: clean(target_path(f"{ROOT}/whole")),
                "run/whole",
                at("run/whole", {**whole, **notes}),
                whole,
            ),
        )
    }


@pytest.mark.quick(6)
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(
    "name", ["convert", "convert to a file", "copy", "append to nothing", "append", "clean a complete one"]
)
def test_operation_is_exact_or_refused_when_the_store_lies(
    name: str, lie: str, store: LyingStore, operations: dict[str, Operation]
) -> None:
    operation = operations[name]
    store.be_honest()
    store.truth.objects.clear()
    store.truth.objects.update({key: Object.of(data) for key, data in operation.before.items()})
    store.tell(LIES[lie])
    started = time.monotonic()
    error: CkptError | None = None
    try:
        operation.run()
    except CkptError as raised:
        error = raised
    assert time.monotonic() - started < SECONDS
    store.be_honest()
    # Leases of processes that live last for a minute, where they could not be removed.
    for key in [key for key in store.truth.objects if key.endswith("/lease")]:
        del store.truth.objects[key]
    if error is None:
        assert is_whole(operation, store)
    else:
        assert is_whole(operation, store) or is_as_before(operation, store), error
        assert_the_same_command_goes_on(operation, store)


def is_whole(operation: Operation, store: LyingStore) -> bool:
    """Whether a reader gets what the operation is to give, and the bytes of all files are those."""
    try:
        opened(operation)
    except CkptError:
        return False
    there = files_there(operation, store)
    return normal(there) == normal(operation.after)


def is_as_before(operation: Operation, store: LyingStore) -> bool:
    """Whether a reader gets what was there before: nothing, or a chain as it was, of which all files are there."""
    before = {key.removeprefix(f"{operation.target}/"): data for key, data in operation.before.items()}
    try:
        opened(operation)
    except CkptError:
        return not before
    there = files_there(operation, store)
    return bool(before) and normal({name: there.get(name, b"") for name in before}) == normal(before)


def assert_the_same_command_goes_on(operation: Operation, store: LyingStore) -> None:
    """Now that the store is honest, the same command succeeds, or says that the target is there, which it is."""
    error: CkptError | None = None
    try:
        operation.run()
    except CkptError as raised:
        error = raised
    assert is_whole(operation, store), error


def opened(operation: Operation) -> object:
    if not operation.target.endswith(".chain"):
        return library.open(operation.url)
    run = library.Chain(operation.url)
    assert run.verify().bad_steps == ()
    return run


def files_there(operation: Operation, store: LyingStore) -> dict[str, bytes]:
    """The files at the target, without what jobs note of themselves."""
    if (alone := store.truth.objects.get(operation.target)) is not None:
        return {"": alone.data}
    return {name: data for name, data in store.truth.below(operation.target).items() if ".ckpt" not in name.split("/")}


def normal(files: Files) -> dict[str, object]:
    """The files, but of the list of a chain only what it names: it states times, and where a state came from."""
    return {
        name: [(one.folder, one.content) for one in chain_file.parse(data, Path(name)).members]
        if name == chain_file.NAME and data
        else data
        for name, data in files.items()
    }


def test_read_back_finds_what_the_e_tag_hides(store: LyingStore, tmp_path: Path) -> None:
    """The store damages bytes where they lie, and has the MD5 of those that were sent."""
    library.save(next(iter(states(1, 600))), tmp_path / "state", library.Universal())

    def tell(truth: MemoryStore) -> Handler:
        def answer(request: Request) -> Answer:
            given = truth.answer(request)
            if request.kind == "put" and given.status == 200 and "packs/" in request.key:
                there = truth.objects[request.key]
                truth.objects[request.key] = replace(there, data=there.data[:-1] + bytes([there.data[-1] ^ 1]))
            return given

        return answer

    store.truth.objects.clear()
    store.tell(tell)
    codes = [ckpt("convert", tmp_path / "state", f"{ROOT}/{name}", *options).code for name, options in BACK]
    store.be_honest()
    assert codes == [0, OUTPUT]
    assert not any("/checked/packs/" in key for key in store.truth.objects)


def begun(operation: Operation, store: LyingStore, lie: Lie) -> None:
    """The bucket as it is before an operation, in a store that lies."""
    store.be_honest()
    store.truth.objects.clear()
    store.truth.objects.update({key: Object.of(data) for key, data in operation.before.items()})
    store.tell(lie)


@pytest.mark.parametrize("name", ["convert", "append"])
def test_store_that_ignores_if_match_is_refused_by_this_name(
    name: str, store: LyingStore, operations: dict[str, Operation]
) -> None:
    begun(operations[name], store, LIES["ignores If-Match"])
    with pytest.raises(OutputError, match="If-Match"):
        operations[name].run()
    assert is_as_before(operations[name], store)


@pytest.mark.parametrize("name", ["convert", "append"])
def test_target_is_complete_with_a_note_without_the_right_to_delete(
    name: str, store: LyingStore, operations: dict[str, Operation]
) -> None:
    operation = operations[name]
    begun(operation, store, LIES["gives no right to delete"])
    done = operation.run()
    store.be_honest()
    assert is_whole(operation, store)
    assert any("could not be removed" in one.text for one in done.notes)  # type: ignore[attr-defined]


def test_list_that_is_read_as_it_was_removes_no_step(store: LyingStore, operations: dict[str, Operation]) -> None:
    """Two steps are published; whoever reads the list, or a listing, sees the one that named the first of them."""
    operation = operations["append"]
    begun(operation, store, lambda truth: truth.answer)
    operation.run()
    files = files_there(operation, store)
    key = f"{operation.target}/chain.json"
    old, objects = Object.of(operation.before[key]), dict(store.truth.objects)

    def tell(truth: MemoryStore) -> Handler:
        def answer(request: Request) -> Answer:
            if request.kind not in ("get", "head", "list"):
                return truth.answer(request)
            with truth.lock:
                now = truth.objects[key]
                truth.objects[key] = old
                try:
                    return truth.answer(request)
                finally:
                    truth.objects[key] = now

        return answer

    store.tell(tell)
    with pytest.raises(LockedError, match="another process has changed this chain"):
        operation.run()
    store.be_honest()
    assert store.truth.objects[key].e_tag == objects[key].e_tag
    assert normal(files_there(operation, store)) == normal(files)
    members = [one for one in objects if "/step-" in one]
    assert members
    assert all(store.truth.objects.get(one) is objects[one] for one in members), "removed, and written again"
