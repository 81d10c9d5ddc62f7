"""A callback that records a run of Lightning's Trainer."""

import os
from pathlib import Path
from typing import Any

from ckpt_recorder.recorder import Recorder
from ckpt_training.installed_classes import installed_class


class LightningCallback(installed_class("lightning.pytorch:Callback", "pytorch_lightning:Callback")):  # type: ignore[misc]
    """Records a run of Lightning's Trainer: `Trainer(..., callbacks=[LightningCallback("run.chain")])`.

    The recorder starts when training starts, and closes when training ends.
    """

    def __init__(self, chain: str | os.PathLike[str], **options: Any) -> None:
        """`chain`: the folder of the chain. `options`: those of `Recorder`; the default `step` is the trainer's."""
        super().__init__()
        self._chain, self._options = Path(chain).absolute(), options
        self.recorder: Recorder | None = None
        self._noted: int | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        options = {"step": trainer.global_step, **self._options}
        self.recorder = Recorder(pl_module, list(trainer.optimizers), self._chain, **options)
        self._noted = options["step"]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.recorder is None or self.recorder.step == self._noted:
            return  # no step: a micro-batch
        self._noted = self.recorder.step
        if trainer.lr_scheduler_configs:
            self.recorder.note(schedulers=[one.scheduler.state_dict() for one in trainer.lr_scheduler_configs])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()
