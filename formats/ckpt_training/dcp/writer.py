"""Write universal checkpoints through `torch.distributed.checkpoint.save`."""

import io
import json
import os
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt_formats.containers.typed_json import decode, encode
from ckpt_formats.core.arguments import checked
from ckpt_formats.core.checkpoint import MODEL, Origin, Role
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.tensor import Tensor, ZeroBlob
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.dcp.metadata import Steps
from ckpt_formats.engines.dcp.nesting import nested
from ckpt_formats.state_dicts.parameter_order import NamedTensor
from ckpt_formats.state_dicts.read import role_of
from ckpt_formats.state_dicts.steps import step_of
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal.boxes import CheckpointNotes, PackReceipt, RankBox, RankPack
from ckpt_training.dcp.tensor_names import StateDictForm, TensorPlace, form_of, tensor_name
from ckpt_training.dcp.unpublished import UnpublishedSave, begin_save, write_pack
from ckpt_training.local_shards import as_array, dtype_name
from ckpt_training.plain_notes import plain_note
from ckpt_training.writing.save_orders import is_chain


class CkptWriter(StorageWriter):
    """A storage writer for `torch.distributed.checkpoint.save` and `async_save`: it writes a universal checkpoint.

        dcp.save(state_dict, storage_writer=CkptWriter("run/step-1000"))

    Each rank writes the blocks that the planner gives it, in a pack of its own. The checkpoint appears whole under its
    name, or not at all: rank 0 compares what all ranks have written, and publishes it by one rename; in a store, by
    the manifest, which it puts last.

    `save` raises torch's `CheckpointException` on all ranks, with a `CkptError` of at least one rank in `failures`:

    - `OutputError`: the target exists or cannot be written; `LockedError` if another process is writing it
    - `UnsupportedError`: a value that is neither a tensor nor plain, or an optimizer that numbers its parameters
    - `InvalidArgumentError`: several models in one state dict
    - `IncompleteError`: parts of a tensor that no rank has written
    """

    @checked
    def __init__(
        self,
        target: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        codec: Literal["auto"] | None = None,
    ) -> None:
        """Write nothing yet.

        Args:
            target: The folder of the checkpoint, which all ranks see under this path, or a URL such as
                `s3://bucket/run/step-1000`. None: the `checkpoint_id` of `save`, which comes first in any case.
            step: The step of the run. None: what the state dict states (`step`, `train_state.step`).
            codec: `auto`: store values without loss in fewer bytes. None: as they are.
        """
        self._target, self._step, self._codec = target, step, codec
        self._unpublished: UnpublishedSave | None = None
        self._form: StateDictForm | None = None
        self._paths: dict[str, Steps] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be a path or a URL."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, to `checkpoint_id` unless it is None. Removes what a save that failed has left."""
        if checkpoint_id is not None:
            self._target = checkpoint_id
        if self._unpublished is not None:
            self._unpublished.close()
        self._unpublished = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check the target. Raises `InvalidArgumentError` if none is given, `UnsupportedError` for a chain."""
        if self._target is None:
            raise InvalidArgumentError("no target is given", hint="Pass it to CkptWriter, or as checkpoint_id.")
        target = target_path(self._target)
        if is_chain(target):
            raise UnsupportedError(
                "dcp.save writes single checkpoints, and no members of chains",
                where=str(target),
                hint="Use ckpt_training.Saver, or `ckpt append` later.",
            )
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "the ranks write one checkpoint together", hint="Save without use_collectives=False."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan of this rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Find out what each tensor is, and begin the target. Runs on the coordinator."""
        self._paths = {item.index.fqn: (item.index.fqn,) for plan in plans for item in plan.items}
        for plan in plans:
            self._paths.update({key: tuple(path) for key, path in (plan.planner_data or {}).items()})
        tensors = dict.fromkeys(
            item.index.fqn for plan in plans for item in plan.items if item.type is not WriteItemType.BYTE_IO
        )
        self._form = form_of(self._paths, list(tensors))
        target = target_path(self._target or "")
        self.reset()  # after a save that failed, torch does not
        self._unpublished = begin_save(target if is_remote(target) else Path(os.path.abspath(target)), len(plans))
        weakref.finalize(self, self._unpublished.close)
        params = self._form.params_keys(self._paths)
        return [
            replace(
                plan,
                storage_data=_RankPlan(
                    self._unpublished.folder,
                    number,
                    self._unpublished.save,
                    {
                        item.index.fqn: self._form.places[item.index.fqn]
                        for item in plan.items
                        if item.type is not WriteItemType.BYTE_IO
                    },
                    tuple(params),
                    tuple({one.parameter for one in self._form.places.values() if one.state != MODEL}),
                    bool(self._form.nested or self._form.flat),
                ),
            )
            for number, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the pack of this rank."""
        own: _RankPlan = plan.storage_data
        values = {
            item.index.fqn: encode(_plain_value(planner.resolve_data(item), item.index.fqn))
            for item in plan.items
            if item.type is WriteItemType.BYTE_IO
        }
        counts = _counts(plan.items, planner, own)
        receipt, tag = write_pack(own.folder, lambda folder: _write(folder, plan.items, planner, own, self._codec))
        data = receipt.to_bytes()
        future = Future[list[WriteResult]]()
        future.set_result([WriteResult(MetadataIndex(""), len(data), (data, tag, json.dumps([values, counts])))])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint, if all parts of all tensors are there. Runs on the coordinator."""
        unpublished, form = self._unpublished, self._form
        assert unpublished is not None
        assert form is not None
        target = Path(unpublished.folder)
        try:
            receipts, tags, values, counts = list[PackReceipt](), list[str](), dict[str, Value](), dict[str, int]()
            for result in results:
                receipt, tag, text = result[0].storage_data
                receipts.append(PackReceipt.from_bytes(receipt, target))
                tags.append(tag)
                own_values, own_counts = json.loads(text)
                values |= {key: decode(value, target) for key, value in own_values.items()}
                counts |= own_counts
            values |= {key: tensor_name(place) for key, place in form.places.items() if place.is_extra}
            unpublished.publish(receipts, tags, self._notes(form, values, counts, len(results)))
        finally:
            unpublished.close()
            self._unpublished = None

    def _notes(
        self, form: StateDictForm, values: Mapping[str, Value], counts: Mapping[str, int], world: int
    ) -> CheckpointNotes:
        """`counts`: as `_counts` returns them."""

        def extras_of(some: Mapping[str, Value]) -> dict[str, Value]:
            return nested(form.extras(some, self._paths), self._paths, Path(str(self._target)))

        extras = extras_of(values)
        step = self._step if self._step is not None else step_of(extras_of({**values, **counts}))
        weights = [place.parameter for place in form.places.values() if not place.is_extra]
        return CheckpointNotes(
            Origin("torch", torch.__version__, step, {"world": world}),
            tuple(form.groups(values, self._paths)),
            extras=extras,
            order=list(dict.fromkeys(weights)),
        )


@dataclass(frozen=True)
class _RankPlan:
    """What a rank has to know to write its pack."""

    folder: str
    """As `UnpublishedSave.folder`."""
    number: int
    save: str
    places: Mapping[str, TensorPlace]
    """The tensors of its items, by their keys."""
    params: tuple[str, ...]
    """The keys of the lists of names in parameter groups."""
    stepped: tuple[str, ...]
    """The parameters that have states."""
    has_optimizer: bool


def _write(
    folder: Path, items: Sequence[WriteItem], planner: SavePlanner, own: _RankPlan, codec: Literal["auto"] | None
) -> PackReceipt:
    """Write the tensors of a rank below a folder, and return the receipt."""
    trained = {*own.stepped, *_names_in_groups(planner, own.params)}
    numbers: dict[tuple[Any, ...], int] = {}
    boxes: list[tuple[TensorPlace, WriteItem, dict[str, str]]] = []
    order: list[tuple[WriteItem, int, str]] = []
    for item in items:
        if item.tensor_data is None:
            continue
        place, chunk = own.places[item.index.fqn], item.tensor_data.chunk
        if 0 in chunk.sizes and 0 not in item.tensor_data.size:
            continue  # a rank without elements
        key = place.parameter, tuple(item.tensor_data.size), tuple(chunk.offsets), tuple(chunk.sizes)
        number = numbers.setdefault(key, len(numbers))
        if number == len(boxes):
            boxes.append((place, item, {}))
        dtype = dtype_name(item.tensor_data.properties.dtype)
        boxes[number][2][place.state] = dtype
        order.append((item, number, place.state))
    with ExitStack() as stack:
        values = None if codec is None else Path(stack.enter_context(TemporaryDirectory())) / "values"
        rank_boxes = [_box(place, item, states, own, trained) for place, item, states in boxes]
        pack = stack.enter_context(RankPack(folder, own.number, rank_boxes, save=own.save, codec=codec, values=values))
        for item, number, state in order:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            array = as_array(tensor.detach().cpu().contiguous())
            pack.add(number, state, 0, memoryview(array.reshape(-1).view(np.uint8).data))
        return pack.finish()


def _box(
    place: TensorPlace, item: WriteItem, states: Mapping[str, str], own: _RankPlan, trained: Container[str]
) -> RankBox:
    assert item.tensor_data is not None
    chunk, shape = item.tensor_data.chunk, tuple(item.tensor_data.size)
    start = tuple(chunk.offsets)
    block = Box(start, tuple(low + n for low, n in zip(start, chunk.sizes, strict=True)))
    return RankBox(place.parameter, _role(place, item, own, trained), shape, block, states)


def _role(place: TensorPlace, item: WriteItem, own: _RankPlan, trained: Container[str]) -> Role:
    if place.is_extra:
        return "extra"
    if place.parameter in trained:
        return "parameter"
    assert item.tensor_data is not None
    dtype = DTYPES[dtype_name(item.tensor_data.properties.dtype)]
    role = role_of(NamedTensor(place.parameter, Tensor.of(ZeroBlob((), dtype))))
    return "frozen" if role == "parameter" and own.has_optimizer else role


def _counts(items: Sequence[WriteItem], planner: SavePlanner, own: _RankPlan) -> dict[str, int]:
    """The values of tensors that are single integers and belong to no parameter, such as the step of TorchTitan."""
    counts: dict[str, int] = {}
    for item in items:
        if item.tensor_data is None or item.tensor_data.size or not own.places[item.index.fqn].is_extra:
            continue
        tensor = planner.resolve_data(item)
        if isinstance(tensor, torch.Tensor) and not (tensor.is_floating_point() or tensor.is_complex()):
            counts[item.index.fqn] = int(tensor)
    return counts


def _names_in_groups(planner: SavePlanner, keys: Iterable[str]) -> Iterable[str]:
    """The names of all parameters in groups. The default planner shows every rank the whole state dict."""
    state = getattr(planner, "state_dict", {})
    return [name for key in keys for name in state.get(key, ()) if isinstance(name, str)]


def _plain_value(data: Any, key: str) -> Value:
    """A value that the planner has saved, as plain data. Raises `UnsupportedError` for an object of another class."""
    assert isinstance(data, io.BytesIO)
    data.seek(0)
    try:
        return plain_note(torch.load(data, weights_only=True))
    except Exception as error:
        raise UnsupportedError(
            f"`{printable(key)}` is not a plain value: {type(error).__name__}",
            hint="Leave it out of the state dict, or save its state_dict.",
        ) from error
