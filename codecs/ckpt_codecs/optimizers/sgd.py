"""Steps of gradient descent."""

from dataclasses import dataclass

from ckpt_codecs.base import Array
from ckpt_codecs.native import stepping
from ckpt_codecs.optimizers.base import WEIGHTS, States, check_count, state_of

BUFFER = "momentum_buffer"


@dataclass(frozen=True)
class Sgd:
    """Gradient descent, optionally with momentum or Nesterov's momentum: the bits of `torch.optim.SGD` on CPUs.

    The first step of a parameter (`count` 1) sets its momentum to its gradient, as torch does.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        return (WEIGHTS, BUFFER) if self.momentum else (WEIGHTS,)

    def apply(self, states: States, gradients: Array, count: int, vectors: int) -> None:
        """Update the states in place, (n,) float32; see `OptimizerStep.apply`."""
        check_count(count)
        stepping.step_sgd(
            state_of(states, WEIGHTS),
            state_of(states, BUFFER) if self.momentum else None,
            gradients,
            vectors,
            gradient_sign=-1 if self.maximize else 1,
            l2=self.weight_decay,
            momentum=self.momentum,
            gain=1 - self.dampening,
            is_first=count == 1,
            is_nesterov=self.nesterov,
            step_size=-self.lr,
        )
