"""A callback that saves a run of Lightning's Trainer with `Saver`, and continues it with `load`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_formats.core.errors import InvalidArgumentError, NotFoundError
from ckpt_training.installed_classes import installed_class
from ckpt_training.loading import Loaded, load
from ckpt_training.opening import open_together
from ckpt_training.saver import Saver


class LightningSaver(installed_class("lightning.pytorch:Callback", "pytorch_lightning:Callback")):  # type: ignore[misc]
    """Saves a run of Lightning's Trainer, and continues it.

        Trainer(..., callbacks=[LightningSaver("run.chain")], enable_checkpointing=False).fit(model, data)

    It saves after each epoch, or every so many steps, while training goes on: the model, the optimizers, schedulers,
    generators and the progress of the loops. If the target has a checkpoint when `fit` begins, training continues from
    the newest complete one. After a save within an epoch, Lightning begins the data of the epoch again, unless the data
    loader has a state. States of other callbacks and of data modules are not saved.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        every_n_train_steps: int | None = None,
        resume: bool = True,
        **options: Any,
    ) -> None:
        """Save nothing yet.

        Args:
            target: That of `Saver`.
            every_n_train_steps: Save after so many steps; None: after each epoch.
            resume: Continue from the newest checkpoint of the target, if there is one.
            options: Others of `Saver`.

        Raises:
            InvalidArgumentError: `every_n_train_steps` is below 1.
        """
        super().__init__()
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise InvalidArgumentError(f"every_n_train_steps={every_n_train_steps} is below 1")
        text = os.fspath(target)
        self._target = text if "://" in text else os.path.abspath(text)
        self._every, self._resumes, self._options = every_n_train_steps, resume, options
        self._last = 0
        self.saver: Saver | None = None
        self.loaded: Loaded | None = None
        """What was loaded when `fit` began; None if training began anew."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not self._resumes:
            return
        try:
            opened = open_together(self._target)
        except NotFoundError:
            return
        self.loaded = load(opened.checkpoint, pl_module, list(trainer.optimizers), **_parts_of(trainer))
        self._last = self.loaded.step or 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizers, parts = list(trainer.optimizers), _parts_of(trainer)
        self.saver = Saver(pl_module, optimizers, self._target, **parts, **self._options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        is_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self._every is not None and is_step and trainer.global_step % self._every == 0:
            self._save(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        # At the end of an epoch, Lightning has not stepped its schedulers yet. Nothing is trained until it begins here.
        if self._every is None:
            self._save(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._every is None:
            self._save(trainer)
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _save(self, trainer: Any) -> None:
        if self.saver is not None and trainer.global_step > self._last:
            self._last = trainer.global_step
            self.saver.save(self._last)

    def _close(self) -> None:
        if self.saver is not None:
            self.saver.close()


@dataclass(frozen=True)
class LightningSchedulers:
    """The learning rate schedulers of a Trainer, as one part of a checkpoint."""

    schedulers: Sequence[Any]

    def state_dict(self) -> dict[str, Any]:
        """The states of all, in order."""
        return {"schedulers": [one.state_dict() for one in self.schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states. Raises `ValueError` if there are not as many."""
        for one, own in zip(self.schedulers, state["schedulers"], strict=True):
            one.load_state_dict(own)


def _parts_of(trainer: Any) -> dict[str, Any]:
    """What a checkpoint has besides the model and the optimizers."""
    schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
    own = {"lr_schedulers": LightningSchedulers(schedulers)} if schedulers else {}
    return {"fit_loop": trainer.fit_loop, **own}
