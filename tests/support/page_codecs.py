"""The functions of `universal_decoder.py` that decode chunks, which other pages specify: those of `ckpt_codecs`."""

from pathlib import Path

import numpy as np

from ckpt_codecs import from_config
from ckpt_codecs.registry import delta_from_config
from ckpt_formats.containers import typed_json
from ckpt_formats.core.dtypes import DTYPES


def decode(codec, data, shape, dtype, base, base_dtype):
    block = None if base is None else np.frombuffer(base, DTYPES[base_dtype]).reshape(shape)
    return from_config(dict(codec)).decode(data, tuple(shape), DTYPES[dtype], block).tobytes()


def decode_delta(codec, data, shape, parent_values, dtypes):
    types = {name: DTYPES[dtype] for name, dtype in dtypes.items()}
    parent = {name: np.frombuffer(values, types[name]).reshape(shape) for name, values in parent_values.items()}
    decoded = delta_from_config(typed_json.decode(codec, Path())).decode(data, parent, tuple(shape), types)
    return {name: values.tobytes() for name, values in decoded.items()}
