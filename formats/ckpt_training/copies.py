"""How pieces of a state are copied from a device into memory that another process reads.

A piece may be copied in two stages: first beside the state, on its own device, so that the state may change, and later
from there. On a CPU the second copy would save nothing, so there is no memory for it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ckpt_codecs.base import Array
from ckpt_training.local_shards import as_array, as_tensor, dtype_name

_CAST_ELEMENTS = 1 << 15
"""Elements that are cast at once: of more, torch would take several cores away from the training."""


class HostCopies:
    """Copies of tensors in the memory of the CPU. A thread copies with one core, and without the lock of Python."""

    def free_nbytes(self) -> int:
        """The bytes of the device that copies of late pieces may take."""
        return 0

    def mark(self) -> Any:
        """A point in the work of the device, at which the state is complete. The thread of the training calls it."""
        return None

    def stage(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Copies on the device, which the next work of the device cannot change; and the point where they exist."""
        return [source.clone() for source in sources], None

    def pin(self, memory: Array) -> None:
        """Prepare the memory of the ring, (n,) uint8, for fast copies."""

    def copy(self, targets: Sequence[Array], sources: Sequence[torch.Tensor], after: Any) -> None:
        """Copy tensors to arrays of the same shapes, once the device has reached a point. They are there then.

        If the dtypes differ, values are cast: rounded to nearest even, as `Tensor.to` does.
        """
        for target, source in zip(targets, sources, strict=True):
            if dtype_name(source.dtype) == target.dtype.name:
                np.copyto(target, as_array(source))
                continue
            own = as_tensor(target)
            if not source.is_contiguous() or not own.is_contiguous():
                own.copy_(source)
                continue
            blocks = (torch.split(one.view(-1), _CAST_ELEMENTS) for one in (own, source))
            for some, values in zip(*blocks, strict=True):
                some.copy_(values)


class CudaCopies(HostCopies):
    """Copies of tensors of a GPU, on a stream of their own. Not tested on a GPU yet.

    The state of a step is complete at an event after its update. The copying stream waits for that event, and the
    thread until its copy has ended, before it reports the piece as copied; only then the next update is given to the
    device. A piece that is staged is cloned on the stream of the training, so before the next update.
    """

    _RESERVE = 1 << 30
    """The bytes that stay free for the activations of the next steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def free_nbytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return max(0, int(free) + cached - self._RESERVE)

    def mark(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stage(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        copies = [source.clone() for source in sources]
        for one in copies:
            one.record_stream(self._stream)  # its memory is not used again before the stream has read it
        return copies, self.mark()

    def pin(self, memory: Array) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)  # if it fails, copies are only slower

    def copy(self, targets: Sequence[Array], sources: Sequence[torch.Tensor], after: Any) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            for target, source in zip(targets, sources, strict=True):
                as_tensor(target).copy_(source, non_blocking=True)
        self._stream.synchronize()


def copies_of(device: torch.device) -> HostCopies:
    """The way to copy from a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()
