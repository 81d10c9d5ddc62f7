"""One merge of an adapter into a model: which weight gets which update, and with which scale."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt.combine.adapter import BASE_LAYER, MODEL_TYPES, PrefixChange, Update, pattern_value, refusal
from ckpt.combine.lora_blob import merged_blob
from ckpt.combine.sources import holder
from ckpt_codecs import Rounded
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.computed_blobs import CastBlob, ComputedBlob
from ckpt_formats.core.dtypes import DType, is_float
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.values import Value


@dataclass(frozen=True)
class LoraMerge:
    """One merge: a model, an adapter, and what the adapter's configuration states."""

    base: Checkpoint
    adapter: Checkpoint
    config: Mapping[str, Value]
    prefix: PrefixChange
    scale: float

    def full_tensors(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors that replace those of the model, by the model's names."""
        saved = self.config.get("modules_to_save") or ()
        if not isinstance(saved, (list, tuple)):
            raise CorruptError("`modules_to_save` is not a list", where=self.adapter.path)
        result: dict[str, Tensor] = {}
        unknown = []
        for stored, tensor in full.items():
            name = self.prefix(stored.replace(BASE_LAYER, "."))
            if name in result:
                raise self._ambiguous(name)
            if name in self.base.parameters or name in self.base.aliases:
                current = self.base.parameters[holder(self.base, name)].weight
                if current.shape != tensor.shape:
                    raise UnsupportedError(
                        f"`{printable(name)}` has the shape {list(tensor.shape)} in the adapter and "
                        f"{list(current.shape)} in the model",
                        where=self.adapter.path,
                        hint="If tokens were added to the vocabulary, resize the model's embeddings first.",
                    )
                if tensor.dtype != current.dtype and not (is_float(tensor.dtype) and is_float(current.dtype)):
                    raise refusal(
                        self.adapter,
                        f"`{printable(name)}` holds {tensor.dtype.name} values in the adapter and "
                        f"{current.dtype.name} values in the model",
                    )
                result[name] = _as_type(name, tensor, current.dtype)
            elif any(f".{printable(str(module))}." in f".{name}" for module in saved):
                result[name] = tensor
            else:
                unknown.append(stored)
        if unknown:
            raise refusal(
                self.adapter, f"{len(unknown)} tensors of the adapter are not known: {list_names(unknown, printable)}"
            )
        return result

    def _ambiguous(self, name: str) -> CkptError:
        return refusal(self.adapter, f"two tensors of the adapter are meant for `{printable(name)}`")

    def base_weight(self, weight: Tensor, name: str, full: Mapping[str, Tensor]) -> Tensor:
        """The weight of the model that an update is added to: the copy in the adapter, if there is one."""
        for stored, tensor in full.items():
            if BASE_LAYER in stored and self.prefix(stored.replace(BASE_LAYER, ".")) == name:
                return _as_type(name, tensor, weight.dtype)
        return weight

    def updated_weights(self, updates: Mapping[str, Update], full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights with their low-rank updates, by the model's names."""
        result: dict[str, Tensor] = {}
        for module, update in updates.items():
            name = self.prefix(f"{module}.weight")
            if name in result:
                raise self._ambiguous(name)
            weight = self.base.parameters[holder(self.base, name)].weight
            if weight.dtype.name not in MODEL_TYPES:
                raise refusal(
                    self.adapter,
                    f"`{printable(name)}` of the model holds {weight.dtype.name} values, to which nothing can be added",
                    "Merge the adapter into the model before its weights are quantized.",
                )
            weight = self.base_weight(weight, name, full)
            result[name] = self._updated(module, name, weight, update)
        return result

    def _updated(self, module: str, name: str, weight: Tensor, update: Update) -> Tensor:
        is_embedding = "lora_embedding_A" in update or "lora_embedding_B" in update
        infix = "embedding_" if is_embedding else ""
        expected = {f"lora_{infix}A", f"lora_{infix}B"}
        if self.config.get("use_dora"):
            expected.add("lora_magnitude_vector")
        if absent := sorted(expected - update.keys()):
            raise IncompleteError(
                f"module `{printable(module)}` lacks {list_names(absent, printable)}", where=self.adapter.path
            )
        if surplus := sorted(update.keys() - expected):
            raise refusal(
                self.adapter, f"module `{printable(module)}` has {list_names(surplus, printable)} without need"
            )
        a, b = update[f"lora_{infix}A"], update[f"lora_{infix}B"]
        magnitude = update.get("lora_magnitude_vector")
        for tensor in update.values():
            if tensor.dtype.name not in MODEL_TYPES:
                raise refusal(self.adapter, f"module `{printable(module)}` holds {tensor.dtype.name} values")
        transposed = self._is_transposed(name, weight, a, b, is_embedding)
        rank = a.shape[0]
        if magnitude is not None and magnitude.size != b.shape[0]:
            raise CorruptError(
                f"module `{printable(module)}` has {magnitude.size} magnitudes for {b.shape[0]} outputs",
                where=self.adapter.path,
            )
        scale = self.module_scale(module, rank)
        return Tensor.of(ComputedBlob(merged_blob(weight, a, b, scale, transposed, magnitude), name))

    def module_scale(self, module: str, rank: int) -> float:
        """The factor of `B @ A`: `lora_alpha / r`, or `lora_alpha / sqrt(r)` for rsLoRA, times the user's factor."""
        stated = pattern_value(self.adapter, self.config, "rank_pattern", "r", module)
        alpha = pattern_value(self.adapter, self.config, "alpha_pattern", "lora_alpha", module)
        if stated != rank or rank < 1:
            raise refusal(
                self.adapter,
                f"module `{printable(module)}` has rank {rank}, but adapter_config.json states {stated}",
            )
        # The order of operations is that of PEFT's `set_scale`.
        return self.scale * alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _is_transposed(self, name: str, weight: Tensor, a: Tensor, b: Tensor, is_embedding: bool) -> bool:
        """Is the weight stored as (in, out)?

        Raises `UnsupportedError` if the shapes do not fit, or allow both layouts.
        """
        shape, inner, outer = weight.shape, a.shape[1:], b.shape[0] if b.shape else 0
        if len(shape) >= 2 and len(a.shape) == len(shape) and b.shape == (outer, a.shape[0], *(1 for _ in shape[2:])):
            plain = shape == (outer, *inner) and not is_embedding
            transposed = shape == (*inner, outer) and len(shape) == 2
            if plain and transposed:
                return self._is_square_transposed(name)
            if plain or transposed:
                return transposed
        raise refusal(
            self.adapter,
            f"`{printable(name)}` has the shape {list(shape)}, to which an update of {list(b.shape)} times "
            f"{list(a.shape)} cannot be added",
        )

    def _is_square_transposed(self, name: str) -> bool:
        """The layout of a square weight: that of modules of the same last name, by their biases; else as configured.

        PEFT's `fan_in_fan_out` is that of the module which it adapted last.
        """
        module = name.removesuffix(".weight").rpartition(".")[2]
        layouts = set()
        for other, parameter in self.base.parameters.items():
            shape = parameter.weight.shape
            if len(shape) != 2 or shape[0] == shape[1] or not f".{other}".endswith(f".{module}.weight"):
                continue
            bias = self.base.parameters.get(f"{other.removesuffix('.weight')}.bias")
            if bias is not None and len(bias.weight.shape) == 1 and bias.weight.shape[0] in shape:
                layouts.add(bias.weight.shape[0] == shape[1])
        if len(layouts) > 1:
            raise refusal(self.adapter, f"`{printable(name)}` is square: whether it is stored as (in, out) is unknown")
        return layouts.pop() if layouts else bool(self.config.get("fan_in_fan_out"))


def _as_type(name: str, tensor: Tensor, dtype: DType) -> Tensor:
    return tensor if tensor.dtype == dtype else Tensor.of(CastBlob(Rounded(), tensor, dtype, name))
