"""Fuzz the kernels of Numba in a process where Numba checks every index, those of loads of whole words included.

`NUMBA_BOUNDSCHECK=1 python bounds_check.py SEED TIMES`; prints what came of it.
"""

import sys

import delta_fuzz
import lossy_fuzz
from ckpt_codecs.engine import engine
from ckpt_codecs.kernels import memory


def main() -> None:
    seed, times = int(sys.argv[1]), int(sys.argv[2])
    assert engine().NAME == "kernels"
    assert memory.CHECKED
    print(delta_fuzz.some(seed, 25 * times))
    print(lossy_fuzz.some(seed, 60 * times))


if __name__ == "__main__":
    main()
