"""Whether values of a model's copy are those of its master, rounded."""

import numpy as np

from ckpt_formats.core.files import Reader
from ckpt_formats.core.tensor import Tensor, read


def is_rounded(copy: Tensor, master: Tensor, reader: Reader) -> bool:
    """Whether all values of `copy` are those of `master`, rounded, to the bit. Both have one shape, any float dtypes.

    All values are read into memory.
    """
    from ckpt_codecs import Rounded  # only optimizers with masters need it

    rounded = Rounded().decode(b"", copy.shape, copy.dtype, read(master, reader))
    return np.ascontiguousarray(rounded).tobytes() == np.ascontiguousarray(read(copy, reader)).tobytes()
