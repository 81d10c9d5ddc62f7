"""`common.pt` of a new layout: what all ranks have in common."""

from dataclasses import dataclass, replace

import numpy as np

from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.core.values import Record, Value
from ckpt_formats.engines.megatron.shared.split import RankCoords
from ckpt_formats.engines.megatron.shared.write_extras import RankExtras
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout
from ckpt_formats.engines.megatron.shared.write_optimizer import WrittenOptimizer, of_one
from ckpt_formats.engines.megatron.torch_dist.keys import MIXED, Keys
from ckpt_formats.engines.megatron.torch_dist.objects import RANDOM, is_object
from ckpt_formats.state_dicts.extras import tensors_for_names

CONTENT = "content_metadata"
_RESHARDABLE = "fully_reshardable"
_TYPE = "distrib_optim_sharding_type"
_FIRST = RankCoords(0, 0)


@dataclass(frozen=True)
class CommonState:
    """The contents of `common.pt`."""

    target: WriteLayout
    keys: Keys
    items: RankExtras
    optimizer: WrittenOptimizer | None

    def tree(self) -> dict[str, Value]:
        items = {k: v for k, v in self.items.of(_FIRST).items() if k != RANDOM and not is_object(k)}
        made: dict[str, Value] = {"args": self.args(), **items}
        if self.optimizer is not None:
            made["optimizer"] = self._optimizer(self.optimizer)
        return {**made, CONTENT: self._content()}

    def args(self) -> Record:
        """The new run's arguments. What they say was not saved, Megatron does not try to load."""
        record, extras = self.items.args(_FIRST), self.target.source.extras
        said: dict[str, Value] = {"ckpt_format": "torch_dist", "use_dist_ckpt": True, "dist_ckpt_format": "torch_dist"}
        if self.target.distributed:
            said["dist_ckpt_optim_fully_reshardable"] = True
        changed = {name: value for name, value in said.items() if record.get(name) is not None}
        for name, there in (("no_save_optim", self.optimizer is not None), ("no_save_rng", RANDOM in extras)):
            if not there or record.get(name):
                changed[name] = not there
        return replace(record, state={**record.state, **changed})

    def _content(self) -> dict[str, Value]:
        """What tells Megatron which keys to ask for."""
        said = self.target.source.extras.get(CONTENT)
        items = said.items() if isinstance(said, dict) else ()
        kept = {key: value for key, value in items if not str(key).startswith("distrib_optim")}
        encoding = {_TYPE: _RESHARDABLE} if self.target.distributed else {}
        mixed = {MIXED: True} if self.keys.unlike else {}
        return {**kept, **encoding, "singleton_local_shards": False, "chained_optim_avoid_prefix": True, **mixed}

    def _optimizer(self, optimizer: WrittenOptimizer) -> Value:
        own = self.items.optimizer(_FIRST)
        if not optimizer.apart:
            return self._one(optimizer, False, own)
        return {int(experts): self._one(optimizer, experts, own) for experts in (False, True)}

    def _one(self, optimizer: WrittenOptimizer, experts: bool, own: Value) -> dict[str, Value]:
        """What one optimizer keeps beside states: of all parameters, of experts, or of all others."""
        source = self.target.source
        beside = {key: tensors_for_names(value, source.parameters) for key, value in of_one(own, int(experts)).items()}
        groups: list[Value] = [dict(group.options) for group in optimizer.groups if group.experts == experts]
        state: dict[str, Value] = {}
        step = optimizer.step
        if step is not None and (self.target.distributed or isinstance(step, int)):
            groups = [{**group, "step": step} for group in groups]  # fused optimizers keep it there anyway
        elif step is not None:
            state["common_step"] = Tensor.of(ArrayBlob(np.array(step, np.float32)))
        inner: dict[str, Value] = {"param_groups": groups, **beside.pop("optimizer", {})}
        if self.target.distributed:
            return {"optimizer": inner, **beside, "param_state_sharding_type": _RESHARDABLE}
        inner = {"state": state, **inner}
        return {"optimizer": inner, **beside} if optimizer.low_precision else {**inner, **beside}
