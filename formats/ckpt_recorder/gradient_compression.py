"""Hooks of DistributedDataParallel that send fewer bytes. The recorder logs the gradients that come out of them.

What a hook returns is what the optimizer gets, so the log of such a run is as small as what the ranks sent, and exact.

Sources: top-k with error feedback, Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", arXiv 1809.07599; its use
in LowDiff, arXiv 2509.04084; 8 bits with one scale for each tensor, Dettmers, arXiv 1511.04561.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ckpt_formats.core.arguments import checked
from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError

_MAX_INT8 = 127


@checked
def topk(ratio: float, *, feedback: bool = True) -> "TopK":
    """Send only the largest elements of each gradient.

    Args:
        ratio: The part of the elements of each parameter that a rank sends: above 0, up to 1. At least one is sent.
        feedback: Add what was not sent to the next gradient (error feedback). It takes 4 bytes a parameter.
    """
    return TopK(ratio, feedback)


@checked
def int8(*, feedback: bool = True) -> "Int8":
    """Send each gradient as integers of 8 bits, with one scale for each parameter.

    Args:
        feedback: Add the error of rounding to the next gradient. It takes 4 bytes a parameter.
    """
    return Int8(feedback)


class GradientCompression(ABC):
    """What all ranks send of their gradients, and what each of them did not send so far (its residual).

    A residual belongs to the units of its gradients: if a GradScaler changes the scale of the loss while the run goes
    on, use `feedback=False`.
    """

    def __init__(self, feedback: bool) -> None:
        self._feedback = feedback
        self._names: dict[Tensor, str] = {}
        self._residuals: dict[str, Tensor] = {}
        """By parameter: (elements,) float32."""

    def register(self, model: DistributedDataParallel) -> None:
        """Use it for the gradients of a model, from the next backward pass on.

        Raises:
            UnsupportedError: The model is no DistributedDataParallel.
        """
        if not isinstance(model, DistributedDataParallel):
            raise UnsupportedError(
                f"gradients of {type(model).__name__} cannot be compressed",
                hint="Compression needs torch.nn.parallel.DistributedDataParallel.",
            )
        self._names = {one: name for name, one in model.module.named_parameters() if one.requires_grad}
        if self._feedback:
            zeros = {name: torch.zeros(one.numel(), device=one.device) for one, name in self._names.items()}
            self._residuals = zeros | self._residuals
        model.register_comm_hook(self, _average)

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals, averaged over the ranks: (elements,) float32 each, by name. All ranks must call it together.

        Each rank goes on with the average, too. The sum over all ranks stays the same; and a run that resumes with the
        average, with any number of ranks, goes on as this one does.
        """
        world = distributed.get_world_size()
        for _, residual in sorted(self._residuals.items()):
            distributed.all_reduce(residual)
            residual /= world
        return {name: residual.clone() for name, residual in self._residuals.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the residuals of `state_dict`: tensors or arrays."""
        for name, value in state.items():
            device = self._residuals[name].device if name in self._residuals else None
            self._residuals[name] = torch.as_tensor(value).to(device, torch.float32, copy=True)

    @abstractmethod
    def start(self, gradients: Sequence[Tensor], used: Tensor, whole: Tensor) -> Future[Tensor]:
        """Send gradients, and return the average over the ranks.

        `gradients`: (elements,) float32 each, with the residuals; what is sent is taken off, so that the new residuals
        remain. `used`: (gradients,) bool, whether this rank has a gradient at all; else nothing of it is sent. `whole`:
        (elements of all,), in the dtype of the gradients; the memory of the result.
        """

    def average(self, bucket: GradBucket) -> Future[Tensor]:
        """The average of a bucket's gradients over all ranks: (elements,), in their dtype."""
        names = [self._names[parameter] for parameter in bucket.parameters()]
        own = [gradient.flatten() for gradient in bucket.gradients()]
        # DDP drops the result for a parameter that no rank used: its residual must not be sent then.
        used = torch.stack([gradient.any() for gradient in own])
        gradients = [self._with_residual(name, gradient) for name, gradient in zip(names, own, strict=True)]
        future = self.start(gradients, used, bucket.buffer())
        if self._feedback:
            for name, rest in zip(names, gradients, strict=True):
                # After an overflow nothing is left that could be sent later.
                self._residuals[name] = torch.where(rest.isfinite(), rest, 0.0)
        return future

    def _with_residual(self, name: str, gradient: Tensor) -> Tensor:
        dense = gradient.to(torch.float32, copy=True)
        return dense.add_(self._residuals[name]) if self._feedback else dense


class TopK(GradientCompression):
    """Sends the elements of largest magnitude, and their indices."""

    def __init__(self, ratio: float, feedback: bool) -> None:
        if not 0 < ratio <= 1:
            raise InvalidArgumentError(
                f"a ratio of {ratio:g} elements", hint="It is above 0 and at most 1, such as 0.01."
            )
        super().__init__(feedback)
        self._ratio = ratio

    def start(self, gradients: Sequence[Tensor], used: Tensor, whole: Tensor) -> Future[Tensor]:
        indices, values, begin = [], [], 0
        for gradient, is_used in zip(gradients, used, strict=True):
            count = math.ceil(self._ratio * gradient.numel())
            # In order, so that the ranks read and write their memory front to back.
            index = gradient.abs().topk(count, sorted=False).indices.sort().values
            value = torch.where(is_used, gradient[index], 0.0).to(whole.dtype)
            gradient[index] -= value.float()
            indices.append(index + begin)
            values.append(value)
            begin += gradient.numel()
        width = torch.int32 if begin < 1 << 31 else torch.int64
        index, value = torch.cat(indices).to(width), torch.cat(values)
        split = index.numel() * index.itemsize

        def average(parts: Sequence[Tensor]) -> Tensor:
            whole.zero_()
            for part in parts:  # by rank, on each rank in the same order, so that sums are equal to the bit
                whole.index_add_(0, part[:split].view(width).long(), part[split:].view(whole.dtype))
            return whole.div_(len(parts))

        return _gather(torch.cat([index.view(torch.uint8), value.view(torch.uint8)]), average)


class Int8(GradientCompression):
    """Sends each gradient as multiples of a power of two, from -127 to 127, which is the same on all ranks."""

    def start(self, gradients: Sequence[Tensor], used: Tensor, whole: Tensor) -> Future[Tensor]:
        largest = torch.stack([gradient.abs().max() for gradient in gradients])
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        # 127 of these units hold the largest value of any rank. Sums of powers of two are exact.
        units = torch.exp2(torch.ceil(torch.log2(largest / _MAX_INT8)))
        units = torch.where(largest > 0, units, 1.0)
        sent = []
        for gradient, unit, is_used in zip(gradients, units, used, strict=True):
            number = torch.where(is_used, torch.round(gradient / unit).clamp(-_MAX_INT8, _MAX_INT8), 0.0)
            gradient -= number * unit
            sent.append(number.to(torch.int8))
        sizes = torch.tensor([gradient.numel() for gradient in gradients], device=whole.device)

        def average(parts: Sequence[Tensor]) -> Tensor:
            total = torch.zeros_like(whole, dtype=torch.float32)
            for part in parts:
                total += part.view(torch.int8)
            return whole.copy_(total * torch.repeat_interleave(units / len(parts), sizes))

        return _gather(torch.cat(sent).view(torch.uint8), average)


def _gather(own: Tensor, average: Callable[[Sequence[Tensor]], Tensor]) -> Future[Tensor]:
    """What `average` makes of the bytes of all ranks: (bytes,) uint8 each."""
    parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    work = distributed.all_gather(parts, own, async_op=True)

    def gathered(done: Future[Any]) -> Tensor:
        done.value()  # raises what the communication raised
        with torch.no_grad():
            return average(parts)

    future: Future[Tensor] = work.get_future().then(gathered)
    return future


@torch.no_grad()
def _average(compression: GradientCompression, bucket: GradBucket) -> Future[Tensor]:
    return compression.average(bucket)
