"""A file of `torch.save` in a tar archive: models of NeMo (`.nemo`), and archives of a model. Read, not written.

    model_weights.ckpt    the state dict
    model_config.yaml     the configuration, as text: see `ckpt_formats.names.nemo`
    *.model, vocab.txt    tokenizers and others, which are not read

Nothing is unpacked: tensors are read where they are in the archive. One that is compressed has no such places.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path

from ckpt_formats.containers.file_starts import HEAD_NBYTES, TAR, is_file_inside
from ckpt_formats.containers.torchfile import TorchFile, open_file
from ckpt_formats.containers.torchfile.file_window import Window
from ckpt_formats.core.checkpoint import Checkpoint, Origin, SourceFile
from ckpt_formats.core.claims import MAX_NAMES
from ckpt_formats.core.errors import CkptError, CorruptError, NotFoundError, UnsafeError, UnsupportedError
from ckpt_formats.core.files import open_regular
from ckpt_formats.core.format import Format, ReadOptions
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.state_dicts.read import training_state

_WEIGHTS = "model_weights.ckpt"
_TEXTS = (".yaml", ".yml", ".json", ".txt")
_MAX_TEXT = 1 << 20
"""Bytes of a text that becomes an extra, and of the parts of a header."""
_UNPACK = "Unpack it, and name the file or folder of the checkpoint in it."


class Tar(Format):
    name = "tar"
    summary = "a file of torch.save in a tar archive, such as a model of NeMo (.nemo)"

    def detect(self, path: Path) -> bool:
        try:
            if not path.is_file():
                return False
            with open_regular(path) as file:
                return TAR.match(file.read(HEAD_NBYTES)) is not None
        except (CkptError, OSError):
            return False

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        with Window(path) as window:
            members = list(_members(window))
            weights = _weights(members, window)
            texts = {
                name: window.at(member.offset_data, member.size).decode("utf-8", "replace")
                for member in members
                if (name := _name(member)).endswith(_TEXTS) and member.size <= _MAX_TEXT
            }
        file = open_file(path, weights.offset_data, weights.size)
        state = training_state(_root(file), path, options.order, options.orders, further_extras=dict(texts))
        if not state.parameters:
            raise NotFoundError(f"`{printable(weights.name)}` has no tensor", where=path)
        unread = tuple(one.name for one in members if one is not weights and _name(one) not in texts)
        notice = Notice("files of the archive that are not read", unread, Weight.UNSURE)
        return Checkpoint(
            path=path,
            origin=Origin("nemo" if _name(weights) == _WEIGHTS else "torch", None, state.step),
            parameters=state.parameters,
            groups=state.groups,
            extras=state.extras,
            aliases=state.aliases,
            files=(SourceFile(path, path.stat().st_size, "all"),),
            seals=file.seals(),
            notices=(*state.notices, *([notice] if unread else [])),
        )


class _Headers:
    """The archive for `tarfile`, which reads only headers: it gets no more than such a header may have."""

    def __init__(self, window: Window) -> None:
        self._window, self._at = window, 0

    def read(self, nbytes: int) -> bytes:
        if nbytes > _MAX_TEXT:
            raise UnsafeError(f"a header states {nbytes:,} bytes: it would exhaust memory", where=self._window.path)
        nbytes = max(min(nbytes, self._window.length - self._at), 0)
        data = self._window.at(self._at, nbytes)
        self._at += nbytes
        return data

    def seek(self, offset: int) -> None:
        self._at = offset

    def tell(self) -> int:
        return self._at


def _members(window: Window) -> Iterator[tarfile.TarInfo]:
    """The regular files of an archive. Raises `CorruptError`, or `UnsafeError` for sizes that no archive has."""
    count = 0
    try:
        with tarfile.open(fileobj=_Headers(window), mode="r:") as archive:  # type: ignore[call-overload]
            for member in archive:
                count += 1
                if count > MAX_NAMES:
                    raise UnsafeError(f"has more than {MAX_NAMES:,} files", where=window.path)
                if member.isreg() and not member.issparse():
                    if member.offset_data + member.size > window.length:
                        raise window.corrupt(f"`{printable(member.name)}` ends after the end of the archive")
                    yield member
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise CorruptError(f"is not a valid tar archive: {error}", where=window.path) from None


def _weights(members: list[tarfile.TarInfo], window: Window) -> tarfile.TarInfo:
    """The member that is a file of torch. Raises `UnsupportedError` if there is none, or if there are several."""
    files = [one for one in members if is_file_inside(window.at(one.offset_data, min(one.size, HEAD_NBYTES)))]
    chosen = [one for one in files if _name(one) == _WEIGHTS] or files
    if len(chosen) == 1:
        return chosen[0]
    what = f"{len(chosen)} files of tensors" if chosen else "no file of torch.save"
    raise UnsupportedError(f"a tar archive with {what}, which is not read", where=window.path, hint=_UNPACK)


def _name(member: tarfile.TarInfo) -> str:
    return member.name.rpartition("/")[2]


def _root(file: TorchFile) -> dict[str, Value]:
    if not isinstance(file.root, dict):
        raise UnsupportedError("the file of torch in the archive has no dict", where=file.path, hint=_UNPACK)
    return {str(key): value for key, value in file.root.items()}
