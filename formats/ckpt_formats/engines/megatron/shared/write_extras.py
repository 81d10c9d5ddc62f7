"""The extras of each rank of a new layout: the inverse of `extras`.

A rank that also exists in the source gets its own values. A new rank gets the values of a rank of the source: its
coordinates modulo the source's degrees.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ckpt_formats.core.values import Record, Value, is_natural
from ckpt_formats.engines.megatron.shared.extras import EXTRA_STATE, label
from ckpt_formats.engines.megatron.shared.split import RankCoords
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout
from ckpt_formats.state_dicts.extras import tensors_for_names

_ELSEWHERE = ("args", "optimizer", "ranks", "content_metadata", EXTRA_STATE)
"""Extras that are written by other code, or only in `torch_dist`."""


@dataclass(frozen=True)
class RankExtras:
    """The extras of every rank of a target."""

    target: WriteLayout

    def of(self, place: RankCoords) -> dict[str, Value]:
        """The extras of a rank (scheduler, random states, counters, ...), without arguments and optimizer."""
        source = self.target.source
        items: dict[str, Value] = {"checkpoint_version": 3.0, "iteration": 0}
        items |= {key: value for key, value in source.extras.items() if key not in _ELSEWHERE}
        items |= {key: _merged(items.get(key), v) for key, v in self._own(place).items() if key not in _ELSEWHERE}
        if source.origin.step is not None:  # the extras of a replayed state are those of its base
            items["iteration"] = source.origin.step
        items = {key: tensors_for_names(value, source.parameters) for key, value in items.items()}
        if "rng_state" in items:
            items["rng_state"] = self._random(items["rng_state"])
        return items

    def optimizer(self, place: RankCoords) -> Value:
        """The items of the optimizer that are neither states nor groups, such as a loss scaler."""
        own = self._own(place)
        return own["optimizer"] if "optimizer" in own else self.target.source.extras.get("optimizer")

    def args(self, place: RankCoords) -> Record:
        """The new run's arguments, as this rank saves them."""
        record, own = self.target.args.record, self._own(place).get("args")
        state: dict[str, Value] = dict(record.state)
        if isinstance(own, Record) and isinstance(own.state, dict):
            state |= own.state
        if "rank" in state:
            state["rank"] = self.rank(place)
        return replace(record, state=state)

    def rank(self, place: RankCoords) -> int:
        """The global number of a rank that saves. Tensor-parallel ranks are counted first, stages last."""
        parallel, args = self.target.parallel, self.target.args
        inside = place.ep * parallel.etp + place.etp
        if args.flag("use_tp_pp_dp_mapping"):
            return place.tp + parallel.tp * (place.pp + parallel.pp * (inside // parallel.tp))
        return place.pp * parallel.tp * parallel.dp + inside

    def extra_states(self, place: RankCoords) -> Mapping[str, Value]:
        """The extra states of all modules. This rank's own take precedence over those of other ranks."""
        return {**self._extra_states, **_extra_states_of(self._own(place))}

    @cached_property
    def _extra_states(self) -> Mapping[str, Value]:
        """The extra states of all ranks; those of the first rank take precedence."""
        states: dict[str, Value] = {}
        for own in reversed((self.target.source.extras, *self._ranks.values())):
            states |= _extra_states_of(own)
        return states

    def is_new(self, place: RankCoords) -> bool:
        """True if the source has no rank with these coordinates."""
        tp, pp, ep = self._degrees
        return place.tp >= tp or place.pp >= pp or place.ep >= ep

    @property
    def count(self) -> int:
        """The number of tensor-parallel ranks of the source, over all stages."""
        tp, pp, _ = self._degrees
        return tp * pp

    def _own(self, place: RankCoords) -> Mapping[str, Value]:
        """The items in which a rank differs from the first; for a new rank, those of its substitute in the source."""
        tp, pp, ep = self._degrees
        three_numbers = any(name.count("_") == 2 for name in self._ranks)
        items = self._ranks.get(label(place.tp % tp, place.pp % pp, place.ep % ep if three_numbers else None))
        return items if isinstance(items, dict) else {}

    @cached_property
    def _ranks(self) -> Mapping[str, Mapping[str, Value]]:
        ranks = self.target.source.extras.get("ranks")
        return ranks if isinstance(ranks, dict) and self.target.source.origin.engine == "megatron" else {}

    @cached_property
    def _degrees(self) -> tuple[int, int, int]:
        """The source's tp, pp, and the third number in the labels of its ranks."""
        layout = self.target.source.origin.layout if self.target.source.origin.engine == "megatron" else {}
        # In distributed checkpoints the third number of a label is the data-parallel rank, which includes ep.
        names = ("tp", "pp", "dp" if layout.get("container") == "torch_dist" else "ep")
        tp, pp, ep = (degree if is_natural(degree := layout.get(name)) and degree else 1 for name in names)
        return tp, pp, ep

    def _random(self, states: Value) -> Value:
        """Random states for the new number of data-parallel ranks. One state for all ranks stays as it is."""
        count = self.target.parallel.dp
        if not isinstance(states, list) or len(states) < 2 or len(states) == count:
            return states
        return [states[i % len(states)] for i in range(count)]


def _extra_states_of(items: Mapping[str, Value]) -> Mapping[str, Value]:
    states = items.get(EXTRA_STATE)
    return states if isinstance(states, dict) else {}


def _merged(first: Value, own: Value) -> Value:
    """A value of the first rank, updated with the entries in which another rank differs."""
    if isinstance(first, Record) and isinstance(own, Record):
        return replace(first, state=_merged(first.state, own.state))
    return {**first, **own} if isinstance(first, dict) and isinstance(own, dict) else own
