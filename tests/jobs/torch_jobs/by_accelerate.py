"""Hugging Face Accelerate's own saving and loading of FSDP2: two folders, one of the model and one of the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import distributed

from torch_jobs.run import Run


def save(run: Run, folder: Path) -> None:
    """Collective, as is `load`."""
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    plugin, accelerator = _settings()
    save_fsdp_model(plugin, accelerator, run.model, str(folder))
    save_fsdp_optimizer(plugin, accelerator, run.optimizer, run.model, str(folder))
    distributed.barrier()


def load(run: Run, folder: Path) -> None:
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer

    plugin, accelerator = _settings()
    load_fsdp_model(plugin, accelerator, run.model, str(folder))
    load_fsdp_optimizer(plugin, accelerator, run.optimizer, run.model, str(folder))


def _settings() -> tuple[Any, Any]:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    return plugin, Accelerator(cpu=True)
