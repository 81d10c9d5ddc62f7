"""How saves are stored: what a rank writes, and what makes a checkpoint of the files of all ranks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from ckpt_codecs.base import Bytes
from ckpt_codecs.delta import StepInfo
from ckpt_formats.state_dicts.keys import NESTED, StateKeys, keys_of
from ckpt_formats.universal.boxes import (
    CheckpointNotes,
    PackReceipt,
    RankBox,
    RankPack,
    RankValues,
    assemble,
)
from ckpt_formats.universal.manifest import Manifest, Parent, pack_file
from ckpt_training.writing.dcp_items import DcpReceipt, ItemsFile, assemble_items, items_file
from ckpt_training.writing.save_orders import SaveSettings


class RankReceipt(Protocol):
    """What the process of a rank hands over when its file is written."""

    @property
    def number(self) -> int:
        """The rank."""

    @property
    def nbytes(self) -> int:
        """The bytes of its file."""

    def to_bytes(self) -> bytes:
        """The receipt as bytes."""


R = TypeVar("R", bound=RankReceipt)
R_co = TypeVar("R_co", bound=RankReceipt, covariant=True)


class SaveFile(Protocol[R_co]):
    """The file of a rank while it is written."""

    def add(self, box: int, state: str, offset: int, data: Bytes) -> None:
        """Add the next bytes of a state of the box with this number, from byte `offset` of the state on."""

    def finish(self) -> R_co:
        """Write the rest, and flush the file to the disk."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the file."""


@dataclass(frozen=True)
class Deltas:
    """What the boxes of a rank are stored against, where that is smaller."""

    earlier: RankValues | None = None
    steps: Mapping[str, StepInfo] | None = None


@dataclass(frozen=True)
class AssembledSave:
    """What makes a checkpoint of the files of all ranks was written."""

    content: str
    manifest: Manifest | None = None
    """Of a universal checkpoint."""


class SaveFormat(ABC, Generic[R]):
    """The format of saves."""

    name: str

    @abstractmethod
    def file(self, rank: int) -> str:
        """The name of the file of a rank, in the folder of the checkpoint."""

    @abstractmethod
    def begin(
        self, folder: Path, boxes: Sequence[RankBox], save: str, values: Path | None, deltas: Deltas
    ) -> SaveFile[R]:
        """Begin the file of this rank. `values`: a local file for plain values; None if nothing is encoded."""

    @abstractmethod
    def receipt(self, data: bytes, where: Path) -> R:
        """The receipt of a rank. Raises `CorruptError`."""

    @abstractmethod
    def assemble(
        self, folder: Path, receipts: Sequence[R], notes: CheckpointNotes, parent: Parent | None, *, elsewhere: bool
    ) -> AssembledSave:
        """Write what makes a checkpoint of the files of all ranks. `elsewhere`: these are in a store.

        Raises `IncompleteError` if the files do not have each element of each tensor once.
        """


class UniversalSaves(SaveFormat[PackReceipt]):
    """Universal checkpoints of boxes: a pack for each rank."""

    name = "universal"

    def __init__(self, settings: SaveSettings) -> None:
        self._rank, self._codec, self._check = settings.rank, settings.codec, settings.check

    def file(self, rank: int) -> str:
        return pack_file(rank)

    def begin(self, folder: Path, boxes: Sequence[RankBox], save: str, values: Path | None, deltas: Deltas) -> RankPack:
        return RankPack(
            folder,
            self._rank,
            boxes,
            save=save,
            codec=self._codec,
            values=values,
            earlier=deltas.earlier,
            steps=deltas.steps,
            check=self._check,
        )

    def receipt(self, data: bytes, where: Path) -> PackReceipt:
        return PackReceipt.from_bytes(data, where)

    def assemble(
        self,
        folder: Path,
        receipts: Sequence[PackReceipt],
        notes: CheckpointNotes,
        parent: Parent | None,
        *,
        elsewhere: bool,
    ) -> AssembledSave:
        manifest = assemble(folder, receipts, notes, parent, packs_elsewhere=elsewhere)
        return AssembledSave(manifest.content, manifest)


class DcpSaves(SaveFormat[DcpReceipt]):
    """PyTorch Distributed Checkpoints: a file of items for each rank."""

    name = "dcp"

    def __init__(self, settings: SaveSettings) -> None:
        self._rank, self._keys = settings.rank, _keys(settings.dcp_keys)

    def file(self, rank: int) -> str:
        return items_file(rank)

    def begin(
        self, folder: Path, boxes: Sequence[RankBox], save: str, values: Path | None, deltas: Deltas
    ) -> ItemsFile:
        return ItemsFile(folder, self._rank, boxes, save)

    def receipt(self, data: bytes, where: Path) -> DcpReceipt:
        return DcpReceipt.from_bytes(data, where)

    def assemble(
        self,
        folder: Path,
        receipts: Sequence[DcpReceipt],
        notes: CheckpointNotes,
        parent: Parent | None,
        *,
        elsewhere: bool,
    ) -> AssembledSave:
        assemble_items(folder, receipts, notes, self._keys, elsewhere=elsewhere)
        return AssembledSave(receipts[0].save)


def format_of(settings: SaveSettings) -> SaveFormat[Any]:
    """The format of the saves of a process."""
    return UniversalSaves(settings) if settings.dcp_keys is None else DcpSaves(settings)


def _keys(content: Any) -> StateKeys:
    keys = keys_of(content)
    return NESTED if keys is None else keys
