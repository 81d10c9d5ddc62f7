"""Recorders for trainers that own the loop: they are constructed when training begins, and closed when it ends."""

from importlib import import_module
from typing import Any

from ckpt_recorder.recorder import Recorder


def _base(*places: str) -> type[Any]:
    """The first class of these that is installed; `object` if none is."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            found: type[Any] = getattr(import_module(module), name)
        except ImportError:
            continue
        return found
    return object


class HuggingFace(_base("transformers:TrainerCallback")):  # type: ignore[misc]
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


class Lightning(_base("lightning.pytorch:Callback", "pytorch_lightning:Callback")):  # type: ignore[misc]
    """A callback of Lightning's Trainer: `Trainer(..., callbacks=[Lightning("run.chain")])`."""

    def __init__(self, chain: str, **options: Any) -> None:
        """`options`: those of `Recorder`. `step` is what the trainer has counted, if it is not among them."""
        super().__init__()
        self._chain, self._options = chain, options
        self.recorder: Recorder | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        options = {"step": trainer.global_step, **self._options}
        self.recorder = Recorder(pl_module, list(trainer.optimizers), self._chain, **options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.recorder is not None and trainer.lr_scheduler_configs:
            self.recorder.note(schedulers=[one.scheduler.state_dict() for one in trainer.lr_scheduler_configs])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()
