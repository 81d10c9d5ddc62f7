"""Write the objects of a `torch_dist` checkpoint: modules' extra states, random states, and all others."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_formats.core.values import Value
from ckpt_formats.engines.dcp.entries import Entry
from ckpt_formats.engines.megatron.shared.names import is_expert, is_extra_state
from ckpt_formats.engines.megatron.shared.split import RankCoords
from ckpt_formats.engines.megatron.shared.write_extras import RankExtras
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout
from ckpt_formats.engines.megatron.torch_dist.keys import Key, Keys
from ckpt_formats.engines.megatron.torch_dist.shards import KeyedTensors, place_of
from ckpt_formats.state_dicts.extras import tensors_for_names

RANDOM = "rng_state"
_SUFFIX = "._extra_state"
_HEAD = f"output_layer{_SUFFIX}"
_OBJECT = re.compile(r".+/shard_\d+(?:\.\d+)*_\d+(?:\.\d+)*")
_LINEAR = re.compile(r"(.*\.(?:linear_[a-z0-9_]+|in_proj|out_proj|eh_proj|fc[12]_latent_proj))\.weight")
_FUSED = re.compile(r"(.*\.layers\.\d+\.(?:.*\.)?self_attention)\.linear_proj\.weight")
_GROUPED = re.compile(r"(.*\.experts)\.(linear_fc[12])\._extra_state")


@dataclass(frozen=True)
class ObjectShards:
    """All objects of a target."""

    target: WriteLayout
    keys: Keys
    items: RankExtras
    tensors: KeyedTensors

    def entries(self, number: int) -> Iterator[tuple[RankCoords, Entry]]:
        """Every object and the rank that writes it. Entries are numbered from `number`."""
        objects = (*self._extra_states(), *self._random_states(), *self._others())
        for i, (place, key, value) in enumerate(objects):
            # Megatron saves each object as a list of one.
            yield place, Entry(key, (key,), number + i, [tensors_for_names(value, self.target.source.parameters)])

    def _extra_states(self) -> Iterator[tuple[RankCoords, str, Value]]:
        stored = {n: v for n, v in self.items.extra_states(RankCoords(0, 0)).items() if is_extra_state(n)}
        needed = dict.fromkeys(self._modules())
        # Without fp8 extra states are empty, so those that the source does not have can be created.
        for name in {**needed, **{n: None for n in stored if not _GROUPED.fullmatch(n) and (n != _HEAD or stored[n])}}:
            value = stored.get(name)
            if value is None and is_expert(name):
                value = stored.get(re.sub(r"\.local_experts\.\d+", "", name))
            yield self.tensors.writer(name), self.keys.of(name).object(), value

    def _modules(self) -> Iterator[str]:
        """The extra states that Megatron expects: those of all modules that multiply by a matrix."""
        names = self.target.source.parameters
        for name in names:
            if match := _LINEAR.fullmatch(name):
                yield match[1] + _SUFFIX
            if self.target.fused_norms and (match := _FUSED.fullmatch(name)):
                yield f"{match[1]}.core_attention{_SUFFIX}"
        if any(".mixer." in name for name in names):  # models other than GPT also save that of the output layer
            yield _HEAD

    def _random_states(self) -> Iterator[tuple[RankCoords, str, Value]]:
        """The random states: of each (stage, tp) rank; with expert parallelism, of all ranks."""
        parallel = self.target.parallel
        ranks = [(pp, tp) for pp in range(parallel.pp) for tp in range(parallel.tp)]
        if parallel.ep == 1:
            for pp, tp in ranks:
                value = self.items.of(RankCoords(tp, pp)).get(RANDOM)
                if value is not None:
                    yield place_of(parallel, pp, tp), Key(RANDOM, (pp, tp), (parallel.pp, parallel.tp)).object(), value
            return
        for pp, tp in ranks:
            for dp in range(parallel.dp):
                value = self.items.of(RankCoords(tp, pp, dp)).get(RANDOM)
                if value is not None:
                    key = Key(RANDOM, (pp, tp, dp), (parallel.pp, parallel.tp, parallel.dp)).object()
                    yield place_of(parallel, pp, dp * parallel.tp + tp), key, value

    def _others(self) -> Iterator[tuple[RankCoords, str, Value]]:
        """Objects of other kinds, unchanged."""
        for key, value in self.target.source.extras.items():
            if is_object(key):
                yield RankCoords(0, 0), key, value


def is_object(key: str) -> bool:
    """True if it is the key of an object shard: `rng_state/shard_0.1_2.2`."""
    return _OBJECT.fullmatch(key) is not None
