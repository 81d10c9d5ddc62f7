"""What lies in the place of a published chain: its list, its folders, and objects that never change."""

import tempfile
from pathlib import Path

from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import CorruptError, OutputError, UnsupportedError
from ckpt_formats.core.place import Place, Version
from ckpt_formats.core.publish import flush
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.universal.chain import chain_file, folder
from ckpt_formats.universal.published.model import MAX_MODEL, PublishedModel
from ckpt_formats.universal.published.records import FOLDER, MAX_RECORD, ObjectRef

_SINGLE_REQUEST = 16 << 20
"""Bytes of an object that is put by one request; larger ones are uploaded in parts."""
_FOLDERS = ("steps", "folds", "objects", "receipts")


def put_object(place: Place, ref: ObjectRef, data: bytes, scratch: Path | None = None) -> None:
    """Store an object of a chain; if it is there, nothing is written. Raises `OSError`, `OutputError`.

    scratch: the folder for a large object on its way to a store; None: where the system has temporary files.
    """
    try:
        if place.local is None and len(data) > _SINGLE_REQUEST:
            _upload(place, ref.key, data, scratch)
        else:
            create(place, ref.key, data)
    except FileExistsError:
        there = place.head(ref.key)
        if there is None or there.nbytes != ref.nbytes:
            raise OutputError(
                "the object with this name is damaged", where=place.where(ref.key), hint="Remove it, and publish again."
            ) from None


def create(place: Place, key: str, data: bytes) -> Version:
    """Create an object of a chain, which stays when this returns. Raises `FileExistsError` if it exists."""
    below, _, name = key.rpartition("/")
    return place.within(below).replace(name, data, None)


def read_record_bytes(place: Place, key: str) -> bytes | None:
    """Return the bytes of a record, or of a fold; None if it is not there."""
    there = place.read(key, MAX_RECORD)
    return None if there is None else there[0]


def read_model(place: Place, ref: ObjectRef, run: Path) -> PublishedModel:
    """Read the model that a step names. Raises `CorruptError` if it is missing or has another hash."""
    there = place.read(ref.key, MAX_MODEL)
    if there is None:
        raise CorruptError("the model of the last step is missing", where=run / ref.key)
    ref.check(there[0], str(run / ref.key))
    return PublishedModel.from_bytes(there[0], run / ref.key)


def _upload(place: Place, key: str, data: bytes, scratch: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix="ckpt-", dir=scratch) as temporary:
        path = Path(temporary, "object")
        path.write_bytes(data)
        place.create_from(key, path, lambda: None)


def create_chain(run: Path, place: Place) -> None:
    """Create `chain.json` and the folders, unless they are there. Raises unless it is that of a published chain."""
    if isinstance(run, StorePath) and not run.key:
        raise OutputError("is a bucket", where=run, hint=f"Name a chain in it, such as {run}/policy.chain.")
    there = place.read(chain_file.NAME)
    if there is None:
        if run.exists():
            _check_no_other(run)
        if place.local is not None:
            folder.make(run)
            _make_folders(run)
        data = chain_file.dump(chain_file.ChainIndex((), is_published=True))
        try:
            place.replace(chain_file.NAME, data, None)
            return
        except FileExistsError:
            there = place.read(chain_file.NAME)
    if there is None or len(there[0]) > MAX_LIST or not chain_file.parse(there[0], run / chain_file.NAME).is_published:
        raise UnsupportedError(
            "is a chain of checkpoints, into which no steps are published",
            where=run,
            hint="Publish into a new chain. `ckpt append` adds a checkpoint to this one.",
        )
    if place.local is not None:
        _make_folders(run)


def _check_no_other(run: Path) -> None:
    """Raise `OutputError` if a folder has something else than the beginning of a published chain."""
    if not run.is_dir() or any(
        one.name != FOLDER and not one.name.startswith(f".{chain_file.NAME}-") for one in run.iterdir()
    ):
        raise OutputError(
            "exists already, and is not a published chain", where=run, hint="Name a folder that does not exist yet."
        )


def _make_folders(run: Path) -> None:
    parent = run / FOLDER
    missing = [one for one in (parent, *(parent / name for name in _FOLDERS)) if not one.is_dir()]
    for one in missing:
        one.mkdir(exist_ok=True)
    if missing:
        flush(parent)
        flush(run)
