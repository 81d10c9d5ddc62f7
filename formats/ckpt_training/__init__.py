"""Loading checkpoints into live jobs, and saving them from there: docs/jobs.md.

Names are imported on first use, because the writer process does not need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt_formats.core.gc_pause import gc_paused

if TYPE_CHECKING:
    from ckpt.holding.peers import Peers
    from ckpt_training.dcp.reader import CkptReader
    from ckpt_training.dcp.writer import CkptWriter
    from ckpt_training.engines.huggingface import HuggingFaceSaver
    from ckpt_training.engines.lightning import LightningSaver
    from ckpt_training.inference import load_file
    from ckpt_training.loading import Loaded, load
    from ckpt_training.publisher import Publisher, PublisherWarning, PublishResult
    from ckpt_training.saver import SaveHandle, Saver, SaveResult, SaverWarning

__all__ = [
    "CkptReader",
    "CkptWriter",
    "HuggingFaceSaver",
    "LightningSaver",
    "Loaded",
    "Peers",
    "PublishResult",
    "Publisher",
    "PublisherWarning",
    "SaveHandle",
    "SaveResult",
    "Saver",
    "SaverWarning",
    "load",
    "load_file",
]

_MODULES = {
    "CkptReader": "ckpt_training.dcp.reader",
    "CkptWriter": "ckpt_training.dcp.writer",
    "HuggingFaceSaver": "ckpt_training.engines.huggingface",
    "LightningSaver": "ckpt_training.engines.lightning",
    "Loaded": "ckpt_training.loading",
    "Peers": "ckpt.holding.peers",
    "PublishResult": "ckpt_training.publisher",
    "Publisher": "ckpt_training.publisher",
    "PublisherWarning": "ckpt_training.publisher",
    "SaveHandle": "ckpt_training.saver",
    "SaveResult": "ckpt_training.saver",
    "Saver": "ckpt_training.saver",
    "SaverWarning": "ckpt_training.saver",
    "load": "ckpt_training.loading",
    "load_file": "ckpt_training.inference",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with gc_paused():  # else Python searches all objects of torch for garbage while it makes these classes
        return getattr(import_module(_MODULES[name]), name)
