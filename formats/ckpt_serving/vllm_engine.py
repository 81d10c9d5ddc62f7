"""vLLM's weight transfer engine `ckpt`: each worker follows a published chain, and writes the values that change.

Read in vLLM 0.32 and 0.33: `distributed/weight_transfer/base.py`, `model_executor/model_loader/reload`, and
`model_executor/model_loader/checkpoint_weight_patch.py`.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import xxhash

from ckpt.following.changes import TensorChange
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.interchange import to_torch
from ckpt_serving.posting import EngineError
from ckpt_serving.vllm_updates import ChainInfo
from ckpt_training.installed_classes import installed_class

_PATCHES = "vllm.model_executor.model_loader.checkpoint_weight_patch"
_RELOAD = "vllm.model_executor.model_loader.reload"
_log = logging.getLogger("vllm.ckpt_serving")  # vLLM shows what its own loggers say


@dataclass
class WorkerUpdate:
    """The body of `/update_weights`."""

    step: int | None = None
    """A step of the newest epoch; None: the last one."""


class ChainEngine(installed_class("vllm.distributed.weight_transfer.base:WeightTransferEngine")):  # type: ignore[misc]
    """Brings the model of one vLLM worker to a published step.

    The first update loads all tensors, later ones only the values that change, by the model's own loader: names,
    tensor and expert parallelism and packed parameters are its concern. Each worker has the published weights once in
    the memory of its host.

    vLLM may serve weights in another form than it loads: quantized, permuted, or with tensors that it has computed from
    them. So the engine proves that it may write changed values: the first time that a tensor changes, it loads all
    tensors afterwards, and compares the bits of all tensors of the model. If any differ, all updates load all tensors.
    So they do where vLLM cannot write values: in quantized models, on CPUs, for values that become NaN, for integers.

    A live update is no transaction: if it fails after the first value, the engine loads all verified tensors.
    """

    init_info_cls = ChainInfo
    update_info_cls = WorkerUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, info: ChainInfo) -> None:
        """Follow a chain from now on; nothing is read yet."""
        self.shutdown()
        self._follower = info.follow()
        self._writes_changes = not self.model_config.quantization and not any(map(_is_packed, self.model.modules()))
        self._proved = set[str]()
        """Tensors whose changed values may be written alone."""

    def start_weight_update(self) -> None:
        """Do nothing: an update is one call."""

    def receive_weights(self, info: WorkerUpdate) -> None:
        """Fetch and verify a step, and write it into the model.

        Raises as `Follower.update`, with the weights unchanged; `EngineError` if the model has weights of two steps.
        """
        follower = self._follower
        changes = list(follower.iter_changes(info.step))
        how = "wrote changed values"
        if not self._written(changes):
            self._load(follower.iter_changes(info.step, whole=True))
            how = "loaded all tensors"
        elif new := {change.name for change in changes} - self._proved:
            written = _digests(self.model)
            self._load(follower.iter_changes(info.step, whole=True))
            self._writes_changes = written == _digests(self.model)
            self._proved |= new
            how = "proved changed values" if self._writes_changes else "refuted changed values"
        step = follower.confirm(info.step)
        _log.info("step %d: %s, %d tensors, state %s", step.step, how, len(changes), step.hash)

    def finish_weight_update(self) -> None:
        """Do nothing: an update is one call."""

    def shutdown(self) -> None:
        """Free the weights that the follower has in memory."""
        if (follower := getattr(self, "_follower", None)) is not None:
            follower.close()

    def _written(self, changes: Sequence[TensorChange]) -> bool:
        """Write the values that change. False: the model has to be loaded as a whole."""
        import torch

        if not self._writes_changes:
            return False
        patches = import_module(_PATCHES)
        prepared = []
        for change in changes:
            if change.indices is None:
                return False
            values = to_torch(change.values.copy())
            if not values.is_floating_point() or bool(torch.isnan(values).any()):
                return False
            indices = torch.from_numpy(change.indices.copy()).to(self.device)
            values = values.to(self.device)
            prepared.append(patches.CheckpointWeightPatch(change.name, change.shape, values.dtype, values, indices))
        try:
            # The follower yields each index once.
            patches.load_checkpoint_weight_patches(self.model, prepared, validate_unique_indices=False)
        except Exception as error:
            _log.warning("cannot write the changed values (%s); loading all tensors", error)
            return False
        return True

    def _load(self, tensors: Iterator[TensorChange]) -> None:
        """Load all tensors, as vLLM loads them from a folder."""
        reload = import_module(_RELOAD)
        try:
            reload.initialize_layerwise_reload(self.model)
            self.model.load_weights((one.name, to_torch(one.values.copy())) for one in tensors)
            reload.finalize_layerwise_reload(self.model, self.model_config)
        except CkptError:
            raise
        except Exception as error:
            raise EngineError(
                f"vLLM cannot load the step: {error}",
                hint="The weights of this worker may be of two steps: restart it.",
            ) from error


def _is_packed(module: Any) -> bool:
    """Whether vLLM computes with a packed copy of a layer's weights, as it does on CPUs."""
    from torch.nn.functional import linear

    return getattr(module, "cpu_linear", linear) is not linear


def _digests(model: Any) -> dict[str, str]:
    """Of all tensors that the modules of a model have: parameters, buffers, and those that vLLM has computed."""
    import torch

    digests = {}
    for place, module in model.named_modules():
        for name, tensor in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(tensor, torch.Tensor):
                memory = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                digests[f"{place}.{name}"] = xxhash.xxh3_128_hexdigest(memory.data)
    return digests
