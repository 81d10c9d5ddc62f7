"""Let others read a shadow's state over a socket. A peer can neither change anything, nor hold the shadow for long."""

import socket
import ssl
import time
from contextlib import ExitStack

import numpy as np

from ckpt.shadow import described
from ckpt.shadow.listener import Listener
from ckpt.shadow.shadow import Shadow
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.tensor import FlatRangeBlob, Tensor
from ckpt_formats.stores import wire
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.wire import FrameKind

WAIT_SECONDS = 30.0
"""How long a peer waits until the state can be frozen, and how long one answer may take to be sent."""
IDLE_SECONDS = 60.0
"""How long a peer may freeze the state without a request."""
FROZEN_SECONDS = 3600.0
"""How long a peer may freeze the state."""


class Server(Listener):
    """Listens for readers of a shadow, each in a thread, until it is closed."""

    def __init__(
        self, shadow: Shadow, address: NetworkAddress, token: bytes | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen at once. Raises as `Listener`."""
        self._shadow = shadow
        super().__init__(address, token, tls)

    def _answer(self, peer: socket.socket) -> None:
        """Freeze the state, and send what is requested of it. Once, it may be brought to a later step."""
        end = time.monotonic() + FROZEN_SECONDS
        with ExitStack() as stack:
            with self._shadow.frozen_part(WAIT_SECONDS) as (checkpoint, part):
                step = self._send_state(peer, checkpoint, part, end)
                if step is None:
                    return
                if checkpoint.step is None or step <= checkpoint.step:
                    raise CorruptError(f"the shadow is at step {checkpoint.step} already")
                stack.enter_context(self._shadow.not_beyond(step))
            with self._shadow.frozen_part(WAIT_SECONDS, step) as (checkpoint, part):
                if self._send_state(peer, checkpoint, part, end) is not None:
                    raise CorruptError("not a request")

    def _send_state(
        self, peer: socket.socket, checkpoint: Checkpoint, part: described.PartOfState | None, end: float
    ) -> int | None:
        """Answer requests of this state. Returns the step to which the peer wants it to be brought."""
        with Reader(check=False) as reader:
            tensors = [tensor for _, _, tensor in checkpoint.tensors()]
            wire.send(peer, FrameKind.STATE, described.dump(checkpoint, part), WAIT_SECONDS)
            while (seconds := min(IDLE_SECONDS, end - time.monotonic())) > 0:
                kind, body = wire.receive(peer, max(wire.READ.size, wire.ADVANCE.size), seconds)
                if kind is FrameKind.ADVANCE and len(body) == wire.ADVANCE.size:
                    return int(wire.ADVANCE.unpack(body)[0])
                if kind is not FrameKind.READ or len(body) != wire.READ.size:
                    raise CorruptError("not a request")
                number, index = wire.READ.unpack(body)
                wire.send(peer, FrameKind.VALUES, _values(tensors, number, index, reader), WAIT_SECONDS)
        return None


def _values(tensors: list[Tensor], number: int, index: int, reader: Reader) -> memoryview:
    """The values of a chunk of a tensor: (nbytes,) uint8. Raises `CorruptError` if there is no such chunk."""
    if number >= len(tensors):
        raise CorruptError("a request of a tensor that does not exist")
    tensor = tensors[number]
    chunking = Chunking(tensor.shape, (wire.CHUNK_NBYTES // tensor.dtype.itemsize,))
    if index >= chunking.count:
        raise CorruptError("a request of a chunk that does not exist")
    start, stop = chunking.range(index)
    values = np.empty(stop - start, tensor.dtype)
    FlatRangeBlob(tensor, start, stop).read_into(values, reader)
    return values.view(np.uint8).data
