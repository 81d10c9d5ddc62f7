"""The writer of a recording on a disk that is slow or full, as RECORDING_FAULT says: `slow SECONDS` or `full BYTES`."""

import errno
import os
import time
from collections.abc import Sequence
from typing import Any

from ckpt_recorder import writer


def main() -> None:
    fault, amount = os.environ["RECORDING_FAULT"].split()
    write, room = os.pwritev, [float(amount)]

    def slow(file: int, parts: Sequence[Any], offset: int) -> int:
        time.sleep(float(amount))
        return write(file, parts, offset)

    def full(file: int, parts: Sequence[Any], offset: int) -> int:
        """As a full disk does it: what fits is written, and the next call fails."""
        data = b"".join(parts)[: int(room[0])]
        if not data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= len(data)
        return write(file, [data], offset)

    os.pwritev = {"slow": slow, "full": full}[fault]  # type: ignore[assignment]
    os.pwrite = lambda file, data, offset: os.pwritev(file, [data], offset)  # type: ignore[assignment]
    writer.main()


if __name__ == "__main__":
    main()
