"""Bring published steps into the inference servers of vLLM, SGLang, slime, TRL and prime-rl: docs/weight-sync.md.

Names are imported on first use, because most of them need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_serving.posting import EngineError
    from ckpt_serving.reloads import ServedStep, reload_engines
    from ckpt_serving.vllm_updates import update_live

__all__ = ["EngineError", "ServedStep", "reload_engines", "update_live"]

_MODULES = {
    "EngineError": "ckpt_serving.posting",
    "ServedStep": "ckpt_serving.reloads",
    "reload_engines": "ckpt_serving.reloads",
    "update_live": "ckpt_serving.vllm_updates",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
