"""The recorder of Hugging Face's Trainer: constructed when training begins, and closed when it ends."""

from typing import Any

from ckpt_recorder.callbacks import installed
from ckpt_recorder.recorder import Recorder


class HuggingFaceCallback(installed("transformers:TrainerCallback")):  # type: ignore[misc]
    """A callback of Hugging Face's Trainer: `Trainer(..., callbacks=[HuggingFace("run.chain")])`."""

    def __init__(self, chain: str, **options: Any) -> None:
        """`options`: those of `Recorder`. `step` is what the trainer has counted, if it is not among them."""
        self._chain, self._options = chain, options
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
