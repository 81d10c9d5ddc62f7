"""A recorder for training runs, from whose log any step can be restored: docs/recording.md.

Names are imported on first use, because the writer process does not need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.holding.peers import Peers
    from ckpt_recorder.gradient_compression import int8, topk
    from ckpt_recorder.huggingface_callback import HuggingFaceCallback
    from ckpt_recorder.lightning_callback import LightningCallback
    from ckpt_recorder.options import Bases, RecorderWarning
    from ckpt_recorder.recorder import Recorder
    from ckpt_training.random_states import restore_random_states

__all__ = [
    "Bases",
    "HuggingFaceCallback",
    "LightningCallback",
    "Peers",
    "Recorder",
    "RecorderWarning",
    "int8",
    "restore_random_states",
    "topk",
]

_MODULES = {
    "Bases": "ckpt_recorder.options",
    "HuggingFaceCallback": "ckpt_recorder.huggingface_callback",
    "LightningCallback": "ckpt_recorder.lightning_callback",
    "Peers": "ckpt.holding.peers",
    "Recorder": "ckpt_recorder.recorder",
    "RecorderWarning": "ckpt_recorder.options",
    "int8": "ckpt_recorder.gradient_compression",
    "restore_random_states": "ckpt_training.random_states",
    "topk": "ckpt_recorder.gradient_compression",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
