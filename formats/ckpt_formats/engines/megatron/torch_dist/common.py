"""Write `common.pt` in a new layout: the values that all ranks share."""

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
        tree: dict[str, Value] = {"args": self.args(), **items}
        if self.optimizer is not None:
            tree["optimizer"] = self._optimizer(self.optimizer)
        return {**tree, CONTENT: self._content()}

    def args(self) -> Record:
        """The new run's arguments.

        They state what is not saved (no_save_optim, no_save_rng), so that Megatron skips it.
        """
        record, extras = self.items.args(_FIRST), self.target.source.extras
        stated: dict[str, Value] = {
            "ckpt_format": "torch_dist",
            "use_dist_ckpt": True,
            "dist_ckpt_format": "torch_dist",
        }
        if self.target.distributed:
            stated["dist_ckpt_optim_fully_reshardable"] = True
        changed = {name: value for name, value in stated.items() if record.get(name) is not None}
        for name, is_saved in (("no_save_optim", self.optimizer is not None), ("no_save_rng", RANDOM in extras)):
            if not is_saved or record.get(name):
                changed[name] = not is_saved
        return replace(record, state={**record.state, **changed})

    def _content(self) -> dict[str, Value]:
        """The `content_metadata`, by which Megatron chooses the keys to load."""
        content = self.target.source.extras.get(CONTENT)
        entries = content.items() if isinstance(content, dict) else ()
        retained = {key: value for key, value in entries if not str(key).startswith("distrib_optim")}
        encoding = {_TYPE: _RESHARDABLE} if self.target.distributed else {}
        mixed = {MIXED: True} if self.keys.differing else {}
        return {**retained, **encoding, "singleton_local_shards": False, "chained_optim_avoid_prefix": True, **mixed}

    def _optimizer(self, optimizer: WrittenOptimizer) -> Value:
        own = self.items.optimizer(_FIRST)
        if not optimizer.separate_experts:
            return self._one(optimizer, False, own)
        return {int(experts): self._one(optimizer, experts, own) for experts in (False, True)}

    def _one(self, optimizer: WrittenOptimizer, experts: bool, own: Value) -> dict[str, Value]:
        """The items of one optimizer that are not states; `experts` selects the groups of experts or the others."""
        source = self.target.source
        other_items = {
            key: tensors_for_names(value, source.parameters) for key, value in of_one(own, int(experts)).items()
        }
        groups: list[Value] = [dict(group.options) for group in optimizer.groups if group.experts == experts]
        state: dict[str, Value] = {}
        step = optimizer.step
        if step is not None and (self.target.distributed or isinstance(step, int)):
            groups = [{**group, "step": step} for group in groups]  # fused optimizers store the step there as well
        elif step is not None:
            state["common_step"] = Tensor.of(ArrayBlob(np.array(step, np.float32)))
        inner: dict[str, Value] = {"param_groups": groups, **other_items.pop("optimizer", {})}
        if self.target.distributed:
            return {"optimizer": inner, **other_items, "param_state_sharding_type": _RESHARDABLE}
        inner = {"state": state, **inner}
        return {"optimizer": inner, **other_items} if optimizer.low_precision else {**inner, **other_items}
