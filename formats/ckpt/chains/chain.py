"""A chain as a mapping from steps to checkpoints; of a family of models, also from names."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt.chains import family
from ckpt.chains.append import append
from ckpt.chains.compact import CompactResult, Retention, compact
from ckpt.chains.restore import open_step, restore
from ckpt.chains.verify import verify_chain
from ckpt.chains.write import AppendResult, DeltaPolicy
from ckpt.findings.report import Report
from ckpt.job import AnyProgress, format_for
from ckpt.pipeline import Execution, Resources, Result
from ckpt_formats.core.arguments import StrPath, checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import InvalidArgumentError, NotFoundError
from ckpt_formats.core.format import ReadOptions, WritableFormat
from ckpt_formats.core.short_repr import cut
from ckpt_formats.stores.location import listed_again, source_path, target_path
from ckpt_formats.universal.chain import chain_file, states
from ckpt_formats.universal.chain.address import Address
from ckpt_formats.universal.chain.chain_file import ChainIndex


class Chain(Mapping[int, Checkpoint]):
    """A folder of states of one run, by step: most of them deltas, or steps of a log of gradients.

    Or a family of models, by number or name (`models`): `append` with a `name` begins one.

    The folder need not exist before the first `append`. The list is read anew at each use, so a chain that a run
    extends meanwhile shows its new steps.
    """

    @checked
    def __init__(self, path: StrPath, *, anonymous: bool = False, locks: bool = True, read_back: bool = False) -> None:
        """`anonymous`: ask a store without credentials, for what is public. `locks`, `read_back`: as in `Job.run`."""
        self._path = source_path(path, anonymous)
        self._locks, self._read_back = locks, read_back

    @property
    def path(self) -> Path:
        """The folder, or where the chain is in a store: as it is now."""
        return listed_again(self._path)

    def __repr__(self) -> str:
        return f"<Chain {cut(str(self._path), 120)}: {len(self)} steps>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from ckpt.chains.notebook import of_chain

        return of_chain(self.path, self.index, len(self), self.last)

    def _execution(self, resources: Resources | None) -> Execution:
        return Execution.of(resources, locks=self._locks, read_back=self._read_back)

    @property
    def index(self) -> ChainIndex:
        """The list of members and segments. Raises `CkptError` if it cannot be read."""
        return _index(self.path)

    def __getitem__(self, step: int | str | None) -> Checkpoint:
        """The state of a step, or the model of a name.

        None, the step of a checkpoint that states none, is in no chain: `KeyError`.
        """
        path = self.path
        chain = _index(path)
        if isinstance(step, str):
            step = self.models[step]
        if step is None or not any(step in steps for steps in states.step_ranges(path, chain)):
            raise KeyError(step)
        return states.open_state(path, chain, step)

    def __iter__(self) -> Iterator[int]:
        path = self.path
        return iter(states.all_steps(path, _index(path)))

    def __len__(self) -> int:
        path = self.path
        return len(states.all_steps(path, _index(path)))

    def __contains__(self, step: object) -> bool:
        path = self.path
        if isinstance(step, str):
            return step in self.models
        return any(step in steps for steps in states.step_ranges(path, _index(path)))

    @property
    def models(self) -> dict[str, int]:
        """The names of the models of a family, in the order of appending, with their numbers; empty in other chains."""
        return {member.name: member.step for member in _index(self.path).members if member.name is not None}

    @property
    def last(self) -> int | None:
        """The last step; None if there is none."""
        path = self.path
        return max((steps.stop - 1 for steps in states.step_ranges(path, _index(path))), default=None)

    @checked
    def append(
        self,
        state: Checkpoint,
        policy: DeltaPolicy | None = None,
        *,
        step: int | None = None,
        parent: Checkpoint | str | None = None,
        name: str | None = None,
        resources: Resources | None = None,
        progress: AnyProgress | None = None,
    ) -> AppendResult:
        """Write a state at the end, as a base or as a delta against the last one. `step` None: that of the state.

        `parent`: a checkpoint with the values of the last state, such as the one that was appended last: they are read
        there, and compared. None: they are read from where the last state was appended from, or replayed.

        `name` begins a family of models, or adds one to it. `parent` is the name of the model that this one is stored
        against; None or `auto`: the one against which it takes the fewest bytes; `none`: it is stored in full.
        If this fails, the chain is unchanged. Raises `CkptError` of the kind that fits.
        """
        path, execution, chosen = self.path, self._execution(resources), policy or DeltaPolicy()
        if name is None and not (path.exists() and family.is_family(path)):
            if isinstance(parent, str):
                raise InvalidArgumentError("`parent` is a checkpoint; in a family of models it is the name of one")
            return append(path, state, step, chosen, execution, progress, parent)
        if step is not None or isinstance(parent, Checkpoint):
            raise InvalidArgumentError("in a family of models there is no `step`, and `parent` is the name of a model")
        return family.append_model(path, state, name, parent or family.AUTO, chosen, execution, progress)

    @checked
    def restore(
        self,
        step: int | str | None,
        target: StrPath,
        format: WritableFormat | str | None = None,
        *,
        resources: Resources | None = None,
        progress: AnyProgress | None = None,
    ) -> Result:
        """Write the state of a step (None: the last) in a format as `save` takes it. Each delta is replayed once.

        In a family, `step` is the name of a model.
        Raises `CkptError`; if a delta is damaged, its hint names the last step before it that can be restored.
        """
        path = self.path
        if not path.exists():
            raise NotFoundError("there is no chain at this path", where=path)
        if isinstance(step, str):
            step = states.step_of(_index(path), Address(path, None, name=step))
        place = target_path(target)
        return restore(
            open_step(path, step, ReadOptions()),
            place,
            format_for(format, place),
            self._execution(resources),
            progress,
        )

    @checked
    def verify(
        self, *, replay: bool = False, resources: Resources | None = None, progress: AnyProgress | None = None
    ) -> Report:
        """Check every member and every logged step; with `replay`, repeat the logged steps and compare.

        Reads all of the chain. The report is empty if nothing is wrong; `bad_steps` cannot be restored.
        """
        return verify_chain(self.path, self._execution(resources), progress, replay).report

    @checked
    def compact(
        self,
        retention: Retention,
        policy: DeltaPolicy | None = None,
        *,
        resources: Resources | None = None,
        progress: AnyProgress | None = None,
    ) -> CompactResult:
        """Remove states, and write states again that depend on them. A state that stays keeps all its bits."""
        return compact(self.path, retention, policy or DeltaPolicy(), self._execution(resources), progress)


def _index(path: Path) -> ChainIndex:
    return chain_file.read(path) if path.exists() else ChainIndex(())
