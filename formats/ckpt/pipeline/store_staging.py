"""Targets in a store: each object at its final key, and the one by which formats know a checkpoint last.

    PREFIX/.ckpt/lease         the process that writes
    PREFIX/.ckpt/job           the job's id, and the files of its plan
    PREFIX/.ckpt/journal/N     receipts of finished files: each object is written once
    PREFIX/.ckpt/committed     the names and sizes of the files that make the folder a checkpoint, before they are put
    PREFIX/FILE                data
    PREFIX/.ckpt/published     everything is there: what is below `.ckpt` is to be removed

While there is a `job` without `published`, ckpt reads no checkpoint at this prefix, unless its files prove that it is
whole (`registry.published`): a request that a store carries out late hides nothing, and `clean` removes no file of it.
From the moment when the last file is there and compared, the target is published: what cannot be removed then is a
note. Every object is created, never overwritten, so a process that was taken for dead changes nothing. A target of a
single file appears by one request; its `.ckpt` is the folder `.NAME.ckpt-partial` beside it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt.pipeline import staging
from ckpt.pipeline.lease import Lease, hold_lease
from ckpt.pipeline.object_journal import ObjectJournal
from ckpt.pipeline.scratch import scratch_folder
from ckpt.pipeline.staging import Staging, exists, inside
from ckpt.pipeline.store_attempts import SharedPrefix
from ckpt_formats.core.errors import LockedError, OutputError
from ckpt_formats.core.format import Receipt, WritableFormat
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.core.text import PARTIAL, STAGED, printable
from ckpt_formats.registry.marks import is_mark
from ckpt_formats.registry.published import is_proven_whole
from ckpt_formats.stores.bucket import Bucket
from ckpt_formats.stores.e_tags import TAG
from ckpt_formats.stores.listed_store import StoredObject
from ckpt_formats.stores.object_store import ObjectStore

_LEASE, _JOB, _JOURNAL, _COMMITTED, _PUBLISHED = "lease", "job", "journal", "committed", "published"
_REQUESTS = 16
"""Small objects that are put at once; parts of a large file that is the whole target."""
_UPLOADS = 4
"""Files that are uploaded at once, each of which takes up to 32 MiB of memory."""


@dataclass
class StoreStaging(Staging):
    """The objects of a target before it is complete."""

    target: StorePath
    bucket: Bucket
    scratch: Path
    lease: Lease
    single_file: bool
    place: Path | None = None
    """Where scratch folders are made, here and on other machines; None: where a system has temporary files."""
    _written: dict[str, Receipt] = field(default_factory=dict)
    _files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._journal = ObjectJournal(self.bucket, self._staged(_JOURNAL))

    @property
    def data(self) -> Path:
        return self.scratch

    @property
    def disk(self) -> Path:
        return self.scratch

    @property
    def parallel(self) -> int:
        return _UPLOADS

    @property
    def how_to_give_up(self) -> str:
        return f"`ckpt clean {self.target}` gives up"

    def begin(self, job_id: str, files: Sequence[str]) -> None:
        if not self.single_file:
            for folder in {(self.data / file).parent for file in files}:  # `commit` may write beside files of before
                folder.mkdir(parents=True, exist_ok=True)
            self._files = tuple(files)
        objects = self._objects()
        if self._is_complete(objects):
            self._tidy(objects)
            raise exists(self.target)
        if self._staged(_JOB) not in objects:
            if any(not self._is_staged(key) for key in objects):
                self._tidy(objects)  # a killed process may have left something there, too
                raise exists(self.target)
        elif _fields(self.bucket, self._staged(_JOB)).get("id") != job_id:
            removed = self._remove(objects)
            objects = {key: one for key, one in objects.items() if key not in removed}
        if self._staged(_JOB) not in objects:
            job = {"id": job_id, "files": self._files}
            self.bucket.create(self._staged(_JOB), json.dumps(job).encode())
        self._refuse_others(objects)

    def receipts(self, format: WritableFormat) -> Iterable[Receipt]:
        objects = self._objects()
        for receipt in self._journal.read(objects):
            if is_stored(receipt, objects.get(self._key(receipt.file))):
                self._written[receipt.file] = receipt
        # What has no receipt may be half of another attempt, and would keep this one from creating it.
        self._delete_data(self._own(objects) - {self._key(file) for file in self._written})
        self._delete({self._staged(_COMMITTED)} & objects.keys())
        return list(self._written.values())

    def persist(self, receipt: Receipt) -> Receipt:
        """Upload the file, and remove it from the scratch folder."""
        if self.single_file:
            return receipt
        self.lease.check()
        tag = receipt.entry.get(TAG)
        e_tag = self._create(
            self._key(receipt.file), self.data / receipt.file, tag=tag if isinstance(tag, str) else None
        )
        (self.data / receipt.file).unlink()
        return replace(receipt, e_tag=e_tag)

    def note(self, receipt: Receipt) -> None:
        if self.single_file:
            return
        self._written[receipt.file] = receipt
        if self._journal.add(receipt):
            self.flush()

    def flush(self) -> None:
        """Put the receipts that are not in the journal yet."""
        if self._journal.waiting:
            self.lease.check()  # the notes of another process may be at this place now
        self._journal.flush()

    @contextmanager
    def shared(self) -> Iterator[SharedPrefix]:
        yield SharedPrefix(self.bucket, self.target.key, self._staged(_LEASE), self.lease.owner, self.place)

    def publish(self, product: str | None) -> None:
        """Create the last objects: the file `product`, or what `commit` wrote, marks of the format at the very end.

        Raises `OutputError` if the store does not have them then as it has acknowledged them.
        """
        if product is not None:
            staging.reached("before rename")
            self.lease.check()
            self._put(product, self.data / product, self.target.key, _REQUESTS)
            staging.reached("renamed")
            objects = self._objects()
            self._check_written(objects)
            self._tidy(objects)
            return
        self.lease.check()
        self.flush()
        objects = self._objects()
        self._check_written(objects)
        self._refuse_others(objects)
        sizes = {
            path.relative_to(self.data).as_posix(): path.stat().st_size
            for path in sorted(self.data.rglob("*"))
            if path.is_file()
        }
        marks = sorted(filter(is_mark, sizes), key=lambda file: -file.count("/"))
        committed = {"files": list(sizes), "nbytes": list(sizes.values())}
        self.bucket.create(self._staged(_COMMITTED), json.dumps(committed).encode())
        with ThreadPoolExecutor(_REQUESTS, "ckpt-requests") as pool:
            list(pool.map(self._commit, [file for file in sizes if file not in marks]))
        staging.reached("before rename")
        for file in marks:
            self._commit(file)
        staging.reached("renamed")
        self.lease.check()
        objects = self._objects()
        self._check_written(objects)
        with suppress(OSError):  # its files say so, too
            self.bucket.create(self._staged(_PUBLISHED), b"")
            objects[self._staged(_PUBLISHED)] = StoredObject(0, "", 0.0)
        self._tidy(objects)

    def discard(self) -> None:
        self.remove()

    def remove(self) -> dict[str, StoredObject]:
        """Remove what a job has left: its objects as well, unless the target is complete. What was removed."""
        self.lease.check()
        objects = self._objects()
        if self._is_complete(objects):
            self._remove_staged(objects)  # an error is one here: nothing else was requested
            return {key: one for key, one in objects.items() if self._is_staged(key) and key != self._staged(_LEASE)}
        return self._remove(objects)

    def remove_notes(self) -> None:
        """Remove what is known of jobs. The target must be complete."""
        self.lease.check()
        self._remove_staged(self._objects())

    def _is_complete(self, objects: Mapping[str, StoredObject]) -> bool:
        """Whether a job has published the target, whatever it has left of its notes, or comes late."""
        if self.single_file:
            return self.target.key in objects
        if self._staged(_PUBLISHED) in objects:
            return True
        if self._staged(_JOB) not in objects:
            return False
        store = ObjectStore(self.bucket.url, objects, self.target.key)
        return is_proven_whole(StorePath(store, self.target.key))

    def _check_written(self, objects: Mapping[str, StoredObject]) -> None:
        """Raise `OutputError` if an object that was written is not there as it was acknowledged."""
        for receipt in self._written.values():
            key = self._key(receipt.file)
            if is_stored(receipt, objects.get(key)) or is_stored(receipt, self.bucket.head(key)):
                continue
            raise OutputError(
                "the store does not have this object as it has acknowledged it; or somebody else has changed it since",
                where=f"{self.bucket.url}/{key}",
                hint=f"Run the same command again when nobody else writes at this place; {self.how_to_give_up}.",
            )

    def _commit(self, file: str) -> None:
        self.lease.check()
        self._put(file, self.data / file, self._key(file))

    def _put(self, name: str, file: Path, key: str, parts_at_once: int = 4) -> None:
        """Create one of the last objects, which the listing at the end is compared with."""
        nbytes = file.stat().st_size
        e_tag = self._create(key, file, parts_at_once)
        self._written[name] = Receipt(name, nbytes, (), {}, e_tag=e_tag)

    def _create(self, key: str, file: Path, parts_at_once: int = 4, tag: str | None = None) -> str:
        try:
            return self.bucket.upload(key, file, self.lease.check, parts_at_once, tag)
        except FileExistsError:
            raise OutputError(
                "another process has created this object",
                where=f"{self.bucket.url}/{key}",
                hint="Run the same command again when nobody else writes at this place.",
            ) from None

    def _refuse_others(self, objects: Mapping[str, StoredObject]) -> None:
        """Raise `OutputError` if something at the target is not of this job."""
        own = self._own(objects)
        others = sorted(key for key in objects if key not in own and not self._is_staged(key))
        if others:
            raise OutputError(
                f"there are objects that this job did not write, such as `{printable(others[0])}`",
                where=self.target,
                hint="Choose another target, or remove them first.",
            )

    def _own(self, objects: Mapping[str, StoredObject]) -> set[str]:
        """The keys of objects that this job has put, or an earlier run of it."""
        return self._keys(self._files) & objects.keys() | self._committed(objects)

    def _committed(self, objects: Mapping[str, StoredObject]) -> set[str]:
        stated = _fields(self.bucket, self._staged(_COMMITTED)) if self._staged(_COMMITTED) in objects else {}
        return self._keys(_names(stated)) & objects.keys()

    def _remove(self, objects: Mapping[str, StoredObject]) -> dict[str, StoredObject]:
        """Remove what the job in the store has put, and what is known of it. What was removed."""
        job = _fields(self.bucket, self._staged(_JOB)) if self._staged(_JOB) in objects else {}
        own = self._keys(_names(job)) & objects.keys() | self._committed(objects)
        staged = {key for key in objects if self._is_staged(key)}
        lists = {self._staged(_JOB), self._staged(_COMMITTED)}
        self._delete_data(own)
        self._delete(staged - lists)
        self._delete(staged & lists)  # last: they name the rest
        self._journal.forget()
        self._written.clear()
        return {key: one for key, one in objects.items() if key in own | staged and key != self._staged(_LEASE)}

    def _remove_staged(self, objects: Mapping[str, StoredObject]) -> None:
        """Remove what is known of a job whose target is complete. `published` says so until `job` is away."""
        staged = {key for key in objects if self._is_staged(key)}
        self._delete(staged - {self._staged(_PUBLISHED)})
        self._delete(staged & {self._staged(_PUBLISHED)})

    def _tidy(self, objects: Mapping[str, StoredObject]) -> None:
        """Remove what is known of a job whose target is complete. What cannot be removed is a note."""
        try:
            self._remove_staged(objects)
        except OSError as error:
            folder = f"{self.bucket.url}/{staged_folder(self.target, self.single_file)}"
            why = error.strerror or error
            text = f"the target is complete, but notes of the job stay in {folder}, which could not be removed: {why}"
            self.notes = (Notice(text),)

    def _delete_data(self, keys: set[str]) -> None:
        """Delete objects of a target, unless another process has it now, and may have published it."""
        if keys:
            self.lease.confirm()
            self._delete(keys)

    def _delete(self, keys: set[str]) -> None:
        self.bucket.delete(keys - {self._staged(_LEASE)})

    def _objects(self) -> dict[str, StoredObject]:
        if not self.single_file:
            return self.bucket.list(self.target.key)
        there = self.bucket.head(self.target.key)
        staged = self.bucket.list(staged_folder(self.target, True))
        return staged if there is None else {self.target.key: there, **staged}

    def _key(self, file: str) -> str:
        return self.target.key if self.single_file else _joined(self.target.key, file)

    def _keys(self, files: Iterable[str]) -> set[str]:
        return set(map(self._key, files))

    def _staged(self, name: str) -> str:
        return f"{staged_folder(self.target, self.single_file)}/{name}"

    def _is_staged(self, key: str) -> bool:
        return key.startswith(self._staged(""))


@contextmanager
def open_store(
    target: StorePath, scratch: Path | None, locks: bool, single_file: bool, read_back: bool = False
) -> Iterator[StoreStaging]:
    """The staging of a target in a store. Raises `LockedError`, `OutputError`.

    `scratch`: where files lie until they are uploaded; None: where the system has temporary files.
    Without `locks`, a store that ignores conditions is accepted. `read_back`: read all that was uploaded.
    """
    bucket = Bucket(target.store.url, read_back)
    key = f"{staged_folder(target, single_file)}/{_LEASE}"
    with hold_lease(bucket, key, target, locks) as lease, scratch_folder(scratch) as data:
        stage = StoreStaging(target, bucket, data, lease, single_file, scratch)
        try:
            yield stage
        finally:
            with suppress(OSError, LockedError):  # then the files are written again
                stage.flush()


def staged_folder(target: StorePath, single_file: bool) -> str:
    """The key of the folder in which a job keeps what it knows of itself."""
    return (target.parent / f".{target.name}{PARTIAL}").key if single_file else _joined(target.key, STAGED)


def check_target(target: StorePath, source: Path) -> None:
    """Refuse a target that exists, or that lies inside the source or around it. Raises `OutputError`."""
    if not target.key:
        raise OutputError("is a bucket", where=target, hint=f"Name a target in it, such as {target}/step1000.")
    staged = target.parent / f".{target.name}{PARTIAL}" if target.is_file() else target / STAGED
    if target.exists() and not staged.is_dir():  # else there may be notes of a killed job to be removed first
        raise exists(target)
    if isinstance(source, StorePath) and (target.is_relative_to(source) or source.is_relative_to(target)):
        raise inside(target)


def is_stored(receipt: Receipt, there: StoredObject | None) -> bool:
    """Whether an object is the one of a receipt."""
    if there is None or there.nbytes != receipt.nbytes:
        return False
    return there.e_tag.strip('"') == receipt.e_tag.strip('"')  # Azure quotes it in answers, and not in listings


def _fields(bucket: Bucket, key: str) -> dict[str, Any]:
    """The fields of a small object of ckpt; none if it is not there, or is of another program."""
    read = bucket.read(key)
    try:
        fields = {} if read is None else json.loads(read[0])
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _names(fields: Mapping[str, Any]) -> list[str]:
    files = fields.get("files")
    return [name for name in files if isinstance(name, str)] if isinstance(files, list) else []


def _joined(folder: str, file: str) -> str:
    return f"{folder}/{file}" if folder else file
