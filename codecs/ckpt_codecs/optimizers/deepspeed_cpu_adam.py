"""Steps of DeepSpeed's Adam for CPUs, which it uses for offloaded optimizers."""

from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import stepping
from ckpt_codecs.optimizers.adam import FIRST, SECOND
from ckpt_codecs.optimizers.base import WEIGHTS, States, check_count, check_steps, state_of

DEEPSPEED_VECTOR = 16
"""Elements in a vector of the operator if it was built for AVX-512; 8 for AVX2, 4 for NEON. See `whole_vectors`.

If it was built for none of these, no element is in a whole vector."""


@dataclass(frozen=True)
class DeepSpeedCpuAdam:
    """Adam, or AdamW if `adamw_mode`: the bits of `deepspeed.ops.adam.DeepSpeedCPUAdam` with float32 states.

    The operator computes in float32 what torch computes in float64, including the powers of the betas: each is that of
    the previous step times beta. After a checkpoint is loaded, the first power is computed anew and rounded once.

    Attributes:
        powers_from: The step at which the powers of the betas were last computed anew: the first step after loading, or
            `count` itself if groups have different betas or counts, because then they are at every step. 0: never.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    adamw_mode: bool = True
    bias_correction: bool = True
    powers_from: int = 0

    @property
    def states(self) -> tuple[str, ...]:
        return (WEIGHTS, FIRST, SECOND)

    def apply(self, states: States, gradients: Array, count: int, vectors: int) -> None:
        """Update the states in place, (n,) float32; see `OptimizerStep.apply`. Vectors are the operator's."""
        check_count(count)
        if not 0 <= self.powers_from <= count:
            raise CodecError(f"the powers of step {count} cannot be computed from those of step {self.powers_from}")
        one, lr = np.float32(1), np.float32(self.lr)
        beta1, beta2 = (np.float32(beta) for beta in self.betas)
        bias1 = bias2 = one
        if self.bias_correction:
            bias1, bias2 = (one - rounded_power(float(beta), count, self.powers_from) for beta in (beta1, beta2))
            if not bias1 > 0 or not bias2 > 0:
                raise CodecError(f"betas of {self.betas} make a bias correction zero")
        decay_target, decay = stepping.Decaying.NOTHING, np.float32(self.weight_decay)
        if decay > 0:
            decay_target = stepping.Decaying.WEIGHTS if self.adamw_mode else stepping.Decaying.GRADIENT
        stepping.step_adam_deepspeed(
            state_of(states, WEIGHTS),
            state_of(states, FIRST),
            state_of(states, SECOND),
            gradients,
            vectors,
            decay_target,
            decay=float(-lr * decay if self.adamw_mode else decay),
            first_decay=float(beta1),
            first_gain=float(one - beta1),
            second_decay=float(beta2),
            second_gain=float(one - beta2),
            step_size=float(-lr / bias1),
            bias2_scale=float(one / np.sqrt(bias2)),
            eps=self.eps,
        )


@lru_cache(64)
def rounded_power(beta: float, count: int, start: int) -> np.float32:
    """Return beta^count in float32: beta^start rounded once, then times beta for each further step.

    Raises CodecError if there are more than `MAX_COUNT` further steps.
    """
    check_steps(count - start)
    return np.float32(_POWERS.after(beta, start, count - start))


class _Powers:
    """The float32 products after every `_BLOCK` steps, by (beta, start): each step is computed once for all counts."""

    def __init__(self) -> None:
        self._ends: OrderedDict[tuple[float, int], list[np.float32]] = OrderedDict()

    def after(self, beta: float, start: int, steps: int) -> np.float32:
        """The product after `steps` steps; memory is that of one block, whatever `steps` is."""
        ends = self._ends.setdefault((beta, start), [np.float32(beta**start)])
        self._ends.move_to_end((beta, start))
        while len(self._ends) > _MAX_KEPT:
            self._ends.popitem(last=False)
        while len(ends) <= steps // _BLOCK and not _is_fixed(ends, beta):
            ends.append(_times(ends[-1], beta, _BLOCK))
        blocks = min(steps // _BLOCK, len(ends) - 1)
        return ends[-1] if blocks < steps // _BLOCK else _times(ends[blocks], beta, steps % _BLOCK)


_BLOCK = 1 << 14
_MAX_KEPT = 64
_POWERS = _Powers()


def _is_fixed(ends: list[np.float32], beta: float) -> bool:
    """Whether a further step gives the same product: mostly zero."""
    return bool(ends[-1] * np.float32(beta) == ends[-1])


def _times(product: np.float32, beta: float, steps: int) -> np.float32:
    factors = np.full(steps + 1, beta, np.float32)
    factors[0] = product
    return np.float32(np.multiply.accumulate(factors)[-1])
