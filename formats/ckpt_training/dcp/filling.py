"""Fill the tensors of a state dict with blocks of a checkpoint, and give the planner its plain values."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

import ckpt
from ckpt.reading import Reading
from ckpt_formats.core.checkpoint import MODEL, Checkpoint
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import IncompleteError, InvalidArgumentError, UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Global, Record, Value
from ckpt_training.dcp.entries import PARAMS, Entry, GroupOption, ModelWeight, OptimizerState, StoredEntries
from ckpt_training.dcp.matching import KeyAgreement, NamedSource
from ckpt_training.filling import changing, fill, verify_together
from ckpt_training.group_options import OF_THE_RUN
from ckpt_training.loading import Loaded
from ckpt_training.local_shards import LocalPart, dtype_name, local_shard
from ckpt_training.matching import Matching, Rounding
from ckpt_training.mismatches import check_rounding, listed
from ckpt_training.plain_values import PlainValues

_COUNT = "step"


@dataclass(eq=False)
class StateDictLoad:
    """One load of one rank."""

    target: NamedSource
    agreed: KeyAgreement
    planner: LoadPlanner
    rounding: Rounding
    notices: dict[str, None] = field(default_factory=dict)

    def run(self, items: Sequence[ReadItem], strict: bool, resources: ckpt.Resources | None) -> Loaded:
        """Read, compare checksums, and give plain values to the planner."""
        entries = self.target.entries(self.agreed.naming)
        assert entries is not None
        source = entries.source
        matching = Matching(source, {}, self.rounding)
        fills, values = list[tuple[Tensor, torch.Tensor]](), list[tuple[ReadItem, Any]]()
        tensors = list[tuple[ReadItem, torch.Tensor]]()
        with self.agreed.together():
            missing = self._missing(items)
            is_partial = getattr(self.planner, "allow_partial_load", False)
            self.agreed.check(() if is_partial else missing, strict and not is_partial, source)
            for item in items:
                entry = entries.find(item.dest_index.fqn)
                if entry is None:
                    continue
                if item.type is LoadItemType.BYTE_IO:
                    values += self._value(item, entry, entries)
                    continue
                memory = self.planner.resolve_tensor(item).detach()
                tensors.append((item, memory))
                stored = self._stored(item, entry, entries, matching, memory.dtype)
                if stored is not None:
                    fills.append((stored, memory))
            check_rounding(matching.mismatches, source, "state dict")
            encoded = [(item, _encoded(item, value)) for item, value in values]
        with Reading(source, resources=resources) as reading:
            with changing("state dict"):
                with self.agreed.together(), torch.no_grad():
                    fill(reading, fills)
                if self.agreed.ranks > 1:
                    seals, unverified = verify_together(reading)
                else:
                    alone = reading.verify()
                    seals, unverified = alone.seals, alone.unverified
            for item, memory in tensors:
                self.planner.commit_tensor(item, memory)
            for item, data in encoded:
                self.planner.load_bytes(item, data)
            if self.agreed.naming is not None:
                self.notices[f"the checkpoint's tensors are called as `{self.agreed.naming}` calls them"] = None
            return Loaded(
                source=str(self.target.checkpoint.path),
                step=source.step,
                missing_keys=tuple(missing),
                unexpected_keys=self.agreed.unexpected,
                cast=matching.mismatches.cast,
                unverified=unverified,
                verified=seals,
                notices=tuple(self.notices),
                nbytes=reading.nbytes,
            )

    def _missing(self, items: Sequence[ReadItem]) -> list[str]:
        """The keys that the checkpoint lacks. A tied tensor gets its values under another key, so it is not missing."""
        if not self.agreed.missing:
            return []
        missing = set(self.agreed.missing)
        memories = {
            _memory_of(self._current(item.dest_index.fqn)) for item in items if item.dest_index.fqn not in missing
        }
        own = {item.dest_index.fqn for item in items}
        tied = {key for key in missing & own if (memory := _memory_of(self._current(key))) and memory in memories}
        if tied:
            self.notices[f"tied tensors that the checkpoint has under another name: {listed(sorted(tied))}"] = None
        return [key for key in self.agreed.missing if key not in tied]

    def _current(self, key: str) -> Any:
        """What the state dict has under a key; None if the planner does not show it, or has a placeholder."""
        value = getattr(self.planner, "state_dict", {}).get(key)
        return None if isinstance(value, BytesStorageMetadata) else value

    def _stored(
        self, item: ReadItem, entry: Entry, entries: StoredEntries, matching: Matching, dtype: torch.dtype
    ) -> Tensor | None:
        """The stored block of an item, for memory of this dtype; None if something does not fit, which is noted."""
        key, start = item.dest_index.fqn, tuple(item.storage_offsets)
        value = entries.value(entry)
        self._check_planned(key, value, entries.source)
        box = Box(start, tuple(low + n for low, n in zip(start, item.lengths, strict=True)))
        if isinstance(entry, ModelWeight):
            part = LocalPart(entry.name, value.shape, dtype_name(dtype), box, 0, box.size, 0)
            return matching.values(part, MODEL, dtype)
        block = value.crop(box)
        is_count = isinstance(entry, OptimizerState) and entry.state == _COUNT and value.shape == ()
        state = entry.state if isinstance(entry, OptimizerState) else ""
        if not (is_count and _is_exact_count(value, dtype)):
            matching.may_have(key, state, value.dtype, DTYPES[dtype_name(dtype)])
        return block

    def _check_planned(self, key: str, value: Tensor | Value, source: Checkpoint) -> None:
        """Compare a value with what torch has planned for. They differ only if other names were chosen meanwhile."""
        planned = self.target.metadata_of(key)
        shape = tuple(planned.size) if isinstance(planned, TensorStorageMetadata) else None
        if shape != (value.shape if isinstance(value, Tensor) else None):
            raise InvalidArgumentError(
                f"`{printable(key)}` is another value under the names that fit best",
                where=source.path,
                hint="Pass names=.",
            )

    def _value(self, item: ReadItem, entry: Entry, entries: StoredEntries) -> Iterator[tuple[ReadItem, Any]]:
        """The item with its plain value; nothing if the state dict stays as it is."""
        key, source = item.dest_index.fqn, entries.source
        current = self._current(key)
        if isinstance(entry, GroupOption):
            if entry.option in OF_THE_RUN and current is not None:
                return
            options = self._options(entry, entries)
            if entry.option != PARAMS and entry.option not in options:
                if not hasattr(self.planner, "state_dict"):
                    raise IncompleteError(f"no group of the checkpoint has the option of `{key}`", where=source.path)
                self.notices[f"the checkpoint does not state `{entry.option}`: the run's own value stays"] = None
                return
            value = entries.value(entry) if entry.option == PARAMS else options[entry.option]
        else:
            value = entries.value(entry)
            self._check_planned(key, value, source)
        plain = PlainValues(source).of(value)
        if isinstance(current, tuple) and isinstance(plain, list):
            plain = tuple(plain)
        if isinstance(current, torch.Tensor) and isinstance(plain, (int, float)):
            plain = torch.full_like(current, plain)
        if type(current) in (int, float) and isinstance(plain, torch.Tensor) and plain.numel() == 1:
            plain = plain.item()
        yield item, plain

    def _options(self, entry: GroupOption, entries: StoredEntries) -> Mapping[str, Value]:
        """The stored options for a group of the state dict: by its parameters, if the planner shows them."""
        if isinstance(entry.group, str):
            return entries.options.of(entry.group)
        names = self._current(f"{entry.prefix}param_groups.{entry.group}.{PARAMS}")
        groups = entries.source.groups
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return groups[entry.group].options if entry.group < len(groups) else {}
        return entries.options.of_group(entry.group, names, (entry.option,))


def _encoded(item: ReadItem, value: Any) -> io.BytesIO:
    """A plain value as the planner reads it, which uses `torch.load`. Raises `UnsupportedError` for any other."""
    _check_plain(value, item.dest_index.fqn)
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def _check_plain(value: Any, key: str) -> None:
    if isinstance(value, (Global, Record)):
        raise UnsupportedError(
            f"`{printable(key)}` is an object of the class {value if isinstance(value, Global) else value.cls}",
            hint="ckpt builds no objects of other classes: leave it out of the state dict.",
        )
    for one in (*value, *value.values()) if isinstance(value, dict) else value if type(value) in (list, tuple) else ():
        _check_plain(one, key)


def _is_exact_count(count: Tensor, dtype: torch.dtype) -> bool:
    """Whether a number of steps is the same in a dtype."""
    value = count[...].item()
    return bool(torch.tensor(value, dtype=dtype).item() == value)


def _memory_of(value: Any) -> tuple[Any, ...] | None:
    """What identifies the memory of a tensor on this rank; None for anything else, and for no memory."""
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        value = shards[0].tensor if shards else None
    local = local_shard(value) if isinstance(value, torch.Tensor) else None
    return (local.data_ptr(), tuple(local.shape), local.dtype) if local is not None and local.numel() else None
