"""Read checkpoints of any format through `torch.distributed.checkpoint.load`."""

import os
from dataclasses import replace

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

import ckpt
from ckpt_formats.core.arguments import checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CorruptError, InvalidArgumentError, UnsupportedError
from ckpt_training import ranks
from ckpt_training.dcp.filling import StateDictLoad
from ckpt_training.dcp.matching import AllKeys, KeyAgreement, KeyPaths, NamedSource, Renaming
from ckpt_training.loading import Loaded
from ckpt_training.matching import Rounding
from ckpt_training.opening import digest_of


class CkptReader(StorageReader):
    """A storage reader for `torch.distributed.checkpoint.load`: it reads checkpoints of any format that ckpt opens.

        dcp.load(state_dict, storage_reader=CkptReader("s3://bucket/run.chain@1234"))

    The keys of the state dict may be those of any trainer: see docs/dcp.md. Each rank reads its blocks straight into
    the memory of its tensors. The checksums of everything that the ranks read are compared, over all ranks, before
    `load` returns. No pickle of the checkpoint is run.

    `load` raises torch's `CheckpointException` on all ranks, with a `CkptError` of at least one rank in `failures`:

    - `IncompleteError`: keys that the checkpoint lacks, unless the planner has `allow_partial_load`
    - `InvalidArgumentError`: tensors of the checkpoint that no rank's state dict has, with `strict`
    - `UnsupportedError`: values that would be rounded, or that are no plain values
    - `CorruptError`: a checksum that does not match. The state dict has values of both then

    torch itself raises `ValueError` for other shapes. After a load, `loaded` reports it.
    """

    @checked
    def __init__(
        self,
        source: str | os.PathLike[str] | Checkpoint | None = None,
        *,
        names: Renaming | None = None,
        strict: bool = True,
        rounding: Rounding = "weights",
        resources: ckpt.Resources | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            source: A path, a URL, a step of a chain (`run.chain@1234`), or a `ckpt.Checkpoint` after any edits. None:
                the `checkpoint_id` of `load`, which comes first in any case.
            names: How tensors are called: `hf` or `megatron`, or a mapping or a function from stored names to the
                model's. None: as they are stored; if keys are missing then, as `hf` or `megatron` call them.
            strict: If the state dict has weights, it must have all of the checkpoint, on one rank at least, and so
                for the optimizer's states.
            rounding: What may be rounded to the dtype of the memory, to nearest even: `weights`, `none`, or `all`.
            resources: The threads and the memory of each rank.
        """
        self._source, self._renaming, self._strict = source, names, strict
        self._rounding, self._resources = rounding, resources
        self._target: NamedSource | None = None
        self.loaded: Loaded | None = None
        """What the last `load` did."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be a path or a URL."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of `checkpoint_id` unless it is None."""
        if checkpoint_id is not None:
            self._source = checkpoint_id
        self._target, self.loaded = None, None

    def read_metadata(self) -> Metadata:
        """Return metadata that open the checkpoint when a key is looked up. As mappings they have one form of keys.

        Any key can be looked up. One that the checkpoint lacks looks like that of a plain value: a load that needs it
        is refused later, with all other such keys.
        """
        # Errors of opening are raised by `set_up_storage_reader`: of those of this method, torch shows only the text.
        return Metadata(AllKeys(self._open), KeyPaths(self._open))  # type: ignore[arg-type]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Open the checkpoint. Raises the errors of `ckpt.open`, and `InvalidArgumentError` if none is given."""
        self._open()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the plan of this rank what identifies the checkpoint that this rank has opened."""
        return replace(plan, storage_data=digest_of(self._open().checkpoint))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Compare the keys of all ranks with the checkpoint. Runs on the coordinator; no value is changed yet.

        Raises `CorruptError` if ranks have opened different checkpoints, `InvalidArgumentError` for keys that do not
        go together, and for tensors of the checkpoint that no rank has, with `strict`.
        """
        if any(plan.storage_data != plans[0].storage_data for plan in plans):
            raise CorruptError(
                "the ranks have opened different checkpoints at this path",
                where=self._open().checkpoint.path,
                hint="Load from storage that all ranks share, and from a checkpoint that nobody writes.",
            )
        world = ranks.rank_and_world()[1]
        if len(plans) not in (1, world):
            raise UnsupportedError(
                f"{len(plans)} of {world} ranks load",
                hint="Load on all ranks, without process_group; or on one rank, with no_dist=True.",
            )
        keys = dict.fromkeys(item.dest_index.fqn for plan in plans for item in plan.items)
        agreed = self._open().agreement(keys, len(plans))
        if not agreed.missing:
            agreed.check((), self._strict, self._open().checkpoint)
        return [replace(plan, storage_data=agreed) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of the plan into the memory of the planner's state dict, and verify them over all ranks."""
        agreed: KeyAgreement = plan.storage_data
        self.loaded = StateDictLoad(self._open(), agreed, planner, self._rounding).run(
            plan.items, self._strict, self._resources
        )
        future = Future[None]()
        future.set_result(None)
        return future

    def _open(self) -> NamedSource:
        if self._target is None:
            if self._source is None:
                raise InvalidArgumentError("no checkpoint is given", hint="Pass it to CkptReader, or as checkpoint_id.")
            is_open = isinstance(self._source, Checkpoint)
            opened = self._source if is_open else ckpt.open(self._source)  # type: ignore[arg-type]
            self._target = NamedSource(opened, self._renaming)  # type: ignore[arg-type]
        return self._target
