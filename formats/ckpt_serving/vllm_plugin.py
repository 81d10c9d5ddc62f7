"""The plugin that vLLM loads in each of its processes: it imports nothing that a server without `ckpt` needs not."""

from importlib import import_module
from typing import Any

NAME = "ckpt"
"""The backend's name in `--weight-transfer-config`."""


def register() -> None:
    """Register the weight transfer engine `ckpt`, which vLLM imports if its configuration names it.

    A vLLM that has no weight transfer engines is left as it is.
    """
    try:
        factory: Any = import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    except ImportError:
        return
    if NAME not in factory._registry:
        factory.register_engine(NAME, "ckpt_serving.vllm_engine", "ChainEngine")
