"""The codecs that are tried for a state."""

from ckpt_codecs.base import Codec, DType
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossless.float_planes import Planes
from ckpt_codecs.lossless.integers import Integers
from ckpt_codecs.lossless.moments import FirstMoment, SecondMoment
from ckpt_codecs.lossless.zstd import ZSTD_LEVELS, Zstd

BY_ROWS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "momentum_buffer", "exp_inf", "sum")
"""The states whose size varies by rows and columns, by the optimizers' names for them."""


def candidate_codecs(role: str, state: str, dtype: DType, level: str = "default") -> tuple[Codec, ...]:
    """Return the codecs to try for a state, the best first. Each stores a chunk raw if its own modes save nothing.

    Raises:
        CodecError: There is no such level.
    """
    if level not in ZSTD_LEVELS:
        raise CodecError(f"there is no level {level!r}; there are: {', '.join(ZSTD_LEVELS)}")
    if dtype.kind in "biu" and dtype.name != "bfloat16":
        return (Integers(level),)
    if dtype.kind not in "fcV":
        return (Zstd(ZSTD_LEVELS[level]),)
    if role == "parameter" and state == "exp_avg":
        return FirstMoment(level), Planes(level)
    if role == "parameter" and state in BY_ROWS:
        return SecondMoment(level), Planes(level)
    return (Planes(level),)
