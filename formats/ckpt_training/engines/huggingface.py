"""A callback that saves a run of Hugging Face's Trainer with `Saver`, and continues it with `load`."""

import dataclasses
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ckpt
from ckpt_formats.core.errors import IncompleteError, NotFoundError, UnsupportedError
from ckpt_training.installed_classes import installed_class
from ckpt_training.loading import Loaded, load
from ckpt_training.opening import OpenedSource, open_together
from ckpt_training.random_states import restore_random_states
from ckpt_training.ranks import rank_and_world
from ckpt_training.saver import Saver
from ckpt_training.writing.rank_notes import rank_name

_STATE_FILE = "trainer_state.json"
_WEIGHTS_FILE = "model.safetensors"
_PART = "trainer_state"


class HuggingFaceSaver(installed_class("transformers:TrainerCallback")):  # type: ignore[misc]
    """Saves a run of Hugging Face's Trainer, and continues it.

        saver = HuggingFaceSaver("run.chain")
        trainer = Trainer(..., callbacks=[saver])
        trainer.train(resume_from_checkpoint=saver.checkpoint())

    Whenever Trainer would save (`save_strategy`, `save_steps`), a `Saver` does instead, while training goes on:
    Trainer itself writes no checkpoint. Plain models and DDP; with FSDP or DeepSpeed, `checkpoint` refuses.
    """

    def __init__(self, target: str | os.PathLike[str], **options: Any) -> None:
        """`target` and `options`: those of `Saver`."""
        text = os.fspath(target)
        self._target, self._options = text if "://" in text else os.path.abspath(text), options
        self._resumed: tuple[OpenedSource, TemporaryDirectory[str]] | None = None
        self._random_states: Any = None
        self.saver: Saver | None = None
        self.loaded: Loaded | None = None
        """What was loaded when training began; None if it began anew."""

    def checkpoint(self) -> str | None:
        """Return the newest complete checkpoint for Trainer's `resume_from_checkpoint`; None if there is none yet.

        It is a temporary folder, from which Trainer takes its own state and the weights. When training begins, the
        callback loads everything from the target, and compares all checksums. All ranks must call it together. Raises
        the errors of `load` for a source that cannot be opened.
        """
        try:
            opened = open_together(self._target)
        except NotFoundError:
            return None
        state = opened.checkpoint.extras.get(_PART)
        if not isinstance(state, dict) or not isinstance(state.get("json"), str):
            raise IncompleteError(
                "the checkpoint has no state of a Trainer", where=opened.address, hint="Save it with HuggingFaceSaver."
            )
        folder = TemporaryDirectory(prefix="ckpt-trainer-")
        (Path(folder.name) / _STATE_FILE).write_text(state["json"])
        ckpt.save(opened.checkpoint.weights_only(), Path(folder.name) / _WEIGHTS_FILE, ckpt.Safetensors())
        self._resumed = opened, folder
        return folder.name

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        optimizer, scheduler = named.get("optimizer"), named.get("lr_scheduler")
        if self._resumed is not None:
            if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
                raise UnsupportedError(
                    "Trainer with FSDP or DeepSpeed cannot continue from this callback",
                    hint="Call ckpt_training.load with the model and the optimizer that Trainer has prepared.",
                )
            opened, folder = self._resumed
            self.loaded = load(opened.checkpoint, model, optimizer, random_states=False, scheduler=scheduler)
            self._random_states = self.loaded.extras.get("random_states")
            folder.cleanup()
            self._resumed = None
        part = TrainerStatePart(state)
        self.saver = Saver(model, optimizer, self._target, scheduler=scheduler, trainer_state=part, **self._options)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        # Trainer restores generators before the first batch of an epoch is drawn, else after the batches that it skips.
        if float(state.epoch or 0).is_integer():
            self._restore_random_states()

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._restore_random_states()

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
        return self._save(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
        return self._save(state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self.saver is not None:
            self.saver.close()

    def _save(self, state: Any, control: Any) -> Any:
        if self.saver is not None and control.should_save:
            self.saver.save(state.global_step)
            control.should_save = False
        return control

    def _restore_random_states(self) -> None:
        states, self._random_states = self._random_states, None
        own = rank_name(rank_and_world()[0])
        if isinstance(states, dict) and own in states:
            restore_random_states(states[own])


@dataclasses.dataclass(frozen=True)
class TrainerStatePart:
    """The state of a Trainer, as JSON."""

    state: Any

    def state_dict(self) -> dict[str, str]:
        """The state as Trainer would write it."""
        return {"json": json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True)}
