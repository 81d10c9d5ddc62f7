"""A callback that records a run of Hugging Face's Trainer."""

import os
from pathlib import Path
from typing import Any

from ckpt_recorder.recorder import Recorder
from ckpt_training.installed_classes import installed_class


class HuggingFaceCallback(installed_class("transformers:TrainerCallback")):  # type: ignore[misc]
    """Records a run of Hugging Face's Trainer: `Trainer(..., callbacks=[HuggingFaceCallback("run.chain")])`.

    The recorder starts when training starts, and closes when training ends.
    """

    def __init__(self, chain: str | os.PathLike[str], **options: Any) -> None:
        """`chain`: the folder of the chain. `options`: those of `Recorder`; the default `step` is the trainer's."""
        self._chain, self._options = Path(chain).absolute(), options
        self.recorder: Recorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        optimizer = named.get("optimizer")
        self.recorder = Recorder(model, optimizer, self._chain, **{"step": state.global_step, **self._options})

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self.recorder is not None:
            notes = {"scheduler": named.get("lr_scheduler")}
            self.recorder.note(**{name: item for name, item in notes.items() if item is not None})

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self.recorder is not None:
            self.recorder.close()
