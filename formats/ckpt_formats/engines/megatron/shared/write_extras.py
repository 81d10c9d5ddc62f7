"""What each rank of a new layout keeps beside tensors and optimizer states: the inverse of `carried`.

A rank that was there before has its own again. Another has what the nearest one had, since nobody else
has anything for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.core.values import Record, Value
from ckpt_formats.engines.megatron.shared.extras import EXTRA_STATE, label
from ckpt_formats.engines.megatron.shared.split import RankCoords
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout
from ckpt_formats.state_dicts.extras import tensors_for_names

_ELSEWHERE = ("args", "optimizer", "ranks", "content_metadata", EXTRA_STATE)
"""What is written in another place, or only `torch_dist` has."""


@dataclass(frozen=True)
class RankExtras:
    """The items of every rank of a target."""

    target: WriteLayout

    def of(self, place: RankCoords) -> dict[str, Value]:
        """Scheduler, random states, counters and whatever else was saved, without arguments and optimizer."""
        source = self.target.source
        items: dict[str, Value] = {"checkpoint_version": 3.0, "iteration": source.origin.step or 0}
        items |= {key: value for key, value in source.extras.items() if key not in _ELSEWHERE}
        items |= {key: _merged(items.get(key), v) for key, v in self._own(place).items() if key not in _ELSEWHERE}
        items = {key: tensors_for_names(value, source.parameters) for key, value in items.items()}
        if "rng_state" in items:
            items["rng_state"] = self._random(items["rng_state"])
        return items

    def optimizer(self, place: RankCoords) -> Value:
        """What the optimizer kept beside states and groups, such as a loss scaler."""
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
        """The number of a rank that saves, among all. Tensor-parallel ranks are counted first, stages last."""
        parallel, args = self.target.parallel, self.target.args
        inside = place.ep * parallel.etp + place.etp
        if args.flag("use_tp_pp_dp_mapping"):
            return place.tp + parallel.tp * (place.pp + parallel.pp * (inside // parallel.tp))
        return place.pp * parallel.tp * parallel.dp + inside

    def extra_states(self, place: RankCoords) -> Mapping[str, Value]:
        """The modules' extra states of the whole model, as far as any rank had them: this rank's own first."""
        return {**self._extra_states, **_extra_states_of(self._own(place))}

    @cached_property
    def _extra_states(self) -> Mapping[str, Value]:
        """Those of the first rank, then of the first that has others."""
        states: dict[str, Value] = {}
        for own in reversed((self.target.source.extras, *self._ranks.values())):
            states |= _extra_states_of(own)
        return states

    def is_new(self, place: RankCoords) -> bool:
        """Had the source no rank at this place?"""
        tp, pp, ep = self._degrees
        return place.tp >= tp or place.pp >= pp or place.ep >= ep

    @property
    def count(self) -> int:
        """How many tensor-parallel ranks all stages of the source have."""
        tp, pp, _ = self._degrees
        return tp * pp

    def _own(self, place: RankCoords) -> Mapping[str, Value]:
        """What the rank at this place had otherwise than the first; for a new one, the rank that stands in for it."""
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
        """Of the source."""
        layout = self.target.source.origin.layout if self.target.source.origin.engine == "megatron" else {}
        # In distributed checkpoints the third number of a rank counts data-parallel ranks, experts' among them.
        names = ("tp", "pp", "dp" if layout.get("container") == "torch_dist" else "ep")
        tp, pp, ep = (degree if is_natural(degree := layout.get(name)) and degree else 1 for name in names)
        return tp, pp, ep

    def _random(self, states: Value) -> Value:
        """Random states: one for all data-parallel ranks, or one for each."""
        count = self.target.parallel.dp
        if not isinstance(states, list) or len(states) < 2 or len(states) == count:
            return states
        return [states[i % len(states)] for i in range(count)]


def _extra_states_of(items: Mapping[str, Value]) -> Mapping[str, Value]:
    states = items.get(EXTRA_STATE)
    return states if isinstance(states, dict) else {}


def _merged(first: Value, own: Value) -> Value:
    """A value of the first rank with what another had otherwise in it."""
    if isinstance(first, Record) and isinstance(own, Record):
        return replace(first, state=_merged(first.state, own.state))
    return {**first, **own} if isinstance(first, dict) and isinstance(own, dict) else own
