"""Steps of Adagrad."""

from dataclasses import dataclass

from ckpt_codecs.base import Array
from ckpt_codecs.native import stepping
from ckpt_codecs.optimizers.base import WEIGHTS, States, check_count, state_of

SUM = "sum"


@dataclass(frozen=True)
class Adagrad:
    """Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011): the bits of `torch.optim.Adagrad(..., fused=True)` on CPUs.

    All elements are rounded in the same way, for any `vectors`. torch initializes `sum` with
    `initial_accumulator_value`.
    """

    lr: float
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0
    maximize: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        return (WEIGHTS, SUM)

    def apply(self, states: States, gradients: Array, count: int, vectors: int) -> None:
        """Update the states in place, (n,) float32; see `OptimizerStep.apply`."""
        check_count(count)
        stepping.step_adagrad(
            state_of(states, WEIGHTS),
            state_of(states, SUM),
            gradients,
            gradient_sign=-1 if self.maximize else 1,
            l2=self.weight_decay,
            rate=self.lr / (1 + (count - 1) * self.lr_decay),
            eps=self.eps,
        )
