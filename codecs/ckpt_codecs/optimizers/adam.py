"""Steps of Adam and AdamW."""

from dataclasses import dataclass

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import stepping
from ckpt_codecs.optimizers.base import WEIGHTS, States, check_count, state_of

FIRST, SECOND, LARGEST = "exp_avg", "exp_avg_sq", "max_exp_avg_sq"


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, arXiv 1412.6980), or AdamW (Loshchilov and Hutter, 1711.05101) if `decoupled_weight_decay`.

    The results are the bits of `torch.optim.Adam(..., fused=True)` on CPUs. The for-loop and foreach implementations
    compute the same moments, but their square root is not that of IEEE 754 on every machine, so weights may differ by
    one bit.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = True
    amsgrad: bool = False
    maximize: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        return (WEIGHTS, FIRST, SECOND, LARGEST) if self.amsgrad else (WEIGHTS, FIRST, SECOND)

    def apply(self, states: States, gradients: Array, count: int, vectors: int) -> None:
        """Update the states in place, (n,) float32; see `OptimizerStep.apply`."""
        check_count(count)
        beta1, beta2 = self.betas
        bias1, bias2 = 1 - beta1**count, 1 - beta2**count
        if not bias1 or not bias2:
            raise CodecError(f"betas of {self.betas} make a bias correction zero")
        stepping.step_adam(
            state_of(states, WEIGHTS),
            state_of(states, FIRST),
            state_of(states, SECOND),
            state_of(states, LARGEST) if self.amsgrad else None,
            gradients,
            vectors,
            gradient_sign=-1 if self.maximize else 1,
            weight_factor=1 - self.lr * self.weight_decay if self.decoupled_weight_decay and self.weight_decay else 1,
            l2=0 if self.decoupled_weight_decay else self.weight_decay,
            first_gain=1 - beta1,
            second_decay=beta2,
            second_gain=1 - beta2,
            step_size=-(self.lr / bias1),
            bias2_root=bias2**0.5,
            eps=self.eps,
        )
