"""Open a checkpoint of Orbax with the header of a model of 397 B parameters, and read one block: `orbax_header.py`.

Parameters are bfloat16, both moments float32, every matrix in 64 chunks: 130,000 keys. Data files are holes.
Source of the sizes: Qwen3.5-397B-A17B (60 layers, 512 experts), each layer on its own.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from math import prod
from pathlib import Path

import numpy as np

import ckpt
from ckpt_formats.containers.ocdbt import MANIFEST, ValueRange
from ckpt_formats.containers.ocdbt_write import database
from ckpt_formats.containers.zarr_write import array_json
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box

HIDDEN, LAYERS, EXPERTS, INNER, VOCABULARY, CHUNKS = 4096, 60, 512, 1024, 248_320, 64
STATES = {"params.params": "bfloat16", "opt_state.0.mu.params": "float32", "opt_state.0.nu.params": "float32"}
FILE_NBYTES = 1 << 40


def shapes() -> dict[str, tuple[int, ...]]:
    result: dict[str, tuple[int, ...]] = {"token_embedder.embedding": (VOCABULARY, HIDDEN)}
    result |= {"decoder.logits_dense.kernel": (HIDDEN, VOCABULARY), "decoder.decoder_norm.scale": (HIDDEN,)}
    attention = {"query": (HIDDEN, 16_384), "key": (HIDDEN, 512), "value": (HIDDEN, 512), "out": (8192, HIDDEN)}
    experts = {"wi_0": (EXPERTS, HIDDEN, INNER), "wi_1": (EXPERTS, HIDDEN, INNER), "wo": (EXPERTS, INNER, HIDDEN)}
    shared = {"wi_0": (HIDDEN, INNER), "wi_1": (HIDDEN, INNER), "wo": (INNER, HIDDEN)}
    for layer in range(LAYERS):
        at = f"decoder.layers_{layer}"
        result |= {f"{at}.self_attention.{name}.kernel": shape for name, shape in attention.items()}
        result |= {f"{at}.{name}.scale": (HIDDEN,) for name in ("pre_norm", "post_norm")}
        result |= {f"{at}.router.kernel": (HIDDEN, EXPERTS)}
        result |= {f"{at}.experts.{name}": shape for name, shape in experts.items()}
        result |= {f"{at}.shared.{name}.kernel": shape for name, shape in shared.items()}
    return result


def write(folder: Path) -> int:
    """Write the header. Returns the number of keys."""
    values: dict[str, ValueRange | bytes] = {}
    tree = {}
    file = offset = 0
    for state, dtype in STATES.items():
        for name, shape in shapes().items():
            full = f"{state}.{name}"
            chunk = (shape[0] // CHUNKS, *shape[1:]) if len(shape) > 1 else shape
            nbytes = prod(chunk) * DTYPES[dtype].itemsize
            values[f"{full}/.zarray"] = array_json(shape, DTYPES[dtype], chunk)
            for number in range(shape[0] // chunk[0]):
                place = ".".join(map(str, (number, *(0 for _ in shape[1:]))))
                values[f"{full}/{place}"] = ValueRange(f"d/{file}", offset, nbytes)
                offset += nbytes
                if offset > FILE_NBYTES:
                    file, offset = file + 1, 0
            keys = [{"key": key, "key_type": 1 if key == "0" else 2} for key in full.split(".")]
            tree[full] = {"key_metadata": keys, "value_metadata": {"value_type": "jax.Array"}}
    (folder / "d").mkdir()
    for number in range(file + 1):
        with (folder / f"d/{number}").open("wb") as out:
            out.truncate(FILE_NBYTES + (1 << 36))
    nodes, manifest = database(values, "d/nodes")
    (folder / "d/nodes").write_bytes(nodes)
    (folder / MANIFEST).write_bytes(manifest)
    content = {"tree_metadata": tree, "store_array_data_equal_to_fill_value": True}
    (folder / "_METADATA").write_text(json.dumps(content))
    return len(values)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(f"{write(Path(folder)):,} keys, {sum(map(prod, shapes().values())) / 1e9:.0f} B parameters")
        before = time.process_time()
        checkpoint = ckpt.open(folder)
        seconds = time.process_time() - before
        print(f"opened in {seconds:.2f} s of a processor")
        block = checkpoint["decoder.layers_7.experts.wi_0"].weight.crop(Box((9, 0, 0), (10, 16, INNER)))
        reads: list[int] = []
        with Reader(check=False) as reader, reader.observed(lambda path, offset, data: reads.append(len(data))):
            block.read_into(np.empty(block.shape, block.dtype), reader)
        print(f"{sum(reads):,} bytes read for a block of {block.nbytes:,}")
    print(
        f"peak of this process, which also wrote the header: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss} KiB"
    )


if __name__ == "__main__":
    main()
