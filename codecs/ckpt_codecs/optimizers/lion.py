"""Steps of Lion."""

from dataclasses import dataclass

from ckpt_codecs.base import Array
from ckpt_codecs.native import stepping
from ckpt_codecs.optimizers.base import WEIGHTS, States, check_count, state_of

AVERAGE = "exp_avg"


@dataclass(frozen=True)
class Lion:
    """Lion (Chen et al., arXiv 2302.06675), written with torch's operations: the same bits on CPUs.

    For the weights w, their gradient g and the average m these operations are `w.mul_(1 - lr * weight_decay)`,
    `w.sub_(m.lerp(g, 1 - beta1).sign(), alpha=lr)` and `m.lerp_(g, 1 - beta2)`. All elements are
    rounded in the same way, for any `vectors`.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    @property
    def states(self) -> tuple[str, ...]:
        return (WEIGHTS, AVERAGE)

    def apply(self, states: States, gradients: Array, count: int, vectors: int) -> None:
        """Update the states in place, (n,) float32; see `OptimizerStep.apply`."""
        check_count(count)
        beta1, beta2 = self.betas
        stepping.step_lion(
            state_of(states, WEIGHTS),
            state_of(states, AVERAGE),
            gradients,
            near_gain=1 - beta1,
            far_gain=1 - beta2,
            weight_factor=1 - self.lr * self.weight_decay,
            rate=self.lr,
        )
