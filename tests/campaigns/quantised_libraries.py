"""Compare the values of quantised weights with those of the libraries that write them, and make the golden arrays.

    python tests/campaigns/quantised_libraries.py                          compare, all schemes whose library is here
    python tests/campaigns/quantised_libraries.py --golden tests/golden_quantised

It needs compressed-tensors, torchao, bitsandbytes, gguf and transformers, in an environment of its own; HQQ, AutoAWQ
and GPTQModel only as unpacked sources in the folder that SOURCES names, since their packages need a GPU to be built.
The tests need none of them: they compare with the golden arrays.
"""
# ruff: noqa: E402 -- imports of one library stand with its cases

import argparse
import ast
import importlib.util
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "codecs"), str(ROOT / "formats")]

from ckpt_codecs.quantised import fp4, gguf_blocks, integers, scaled
from ckpt_codecs.quantised.base import Quantisation

SOURCES = Path(os.environ.get("SOURCES", "sources"))
Array = np.ndarray[Any, Any]
T = torch.from_numpy
random = np.random.default_rng(1)


@dataclass
class Case:
    name: str
    quantisation: Quantisation
    parts: tuple[Array, ...]
    values: Array
    """What the library computes."""


def array(tensor: Any) -> Array:
    """The bits of a tensor of torch, in NumPy's type of the same name."""
    import ml_dtypes

    tensor = tensor.detach().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if hasattr(ml_dtypes, name):
        size = {1: torch.uint8, 2: torch.uint16}[tensor.element_size()]
        return tensor.view(size).numpy().view(getattr(ml_dtypes, name))
    return tensor.numpy()


def normal(*shape: int, scale: float = 0.01) -> Any:
    return T(random.normal(0, scale, shape).astype(np.float32))


def codes(*shape: int) -> Array:
    return random.integers(0, 256, shape, np.uint8)


def fp8() -> Iterator[Case]:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    library = Fp8Dequantize(None)
    for name, n, m in (("whole", 256, 256), ("one-block", 128, 128)):
        q, s = (
            T(codes(n, m)).view(torch.float8_e4m3fn),
            T(random.lognormal(-8, 2, (n // 128, m // 128)).astype(np.float32)),
        )
        own = scaled.ScaledCodes((n, m), "float8_e4m3fn", "float32", (128, 128))
        yield Case(f"fp8-blocks-{name}", own, (array(q), array(s)), array(library._dequantize_one(q, s, torch.float32)))
    q, s = T(codes(130, 200)).view(torch.float8_e4m3fn), T(random.lognormal(-8, 2, (2, 2)).astype(np.float32))
    expanded = s.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :200]  # as DeepSeek's kernel reads it
    own = scaled.ScaledCodes((130, 200), "float8_e4m3fn", "float32", (128, 128))
    yield Case("fp8-blocks-ragged", own, (array(q), array(s)), array(q.float() * expanded))
    q, s = T(codes(2, 64, 96)).view(torch.float8_e4m3fn), T(random.lognormal(-8, 2, (2, 2, 3)).astype(np.float32))
    own = scaled.ScaledCodes((2, 64, 96), "float8_e4m3fn", "float32", (1, 32, 32))
    yield Case("fp8-blocks-stack", own, (array(q), array(s)), array(library._dequantize_one(q, s, torch.float32)))
    q, s = T(codes(64, 96)).view(torch.float8_e4m3fn), T(codes(2, 3))
    s[0, 0], s[1, 2] = 0, 254
    own = scaled.ScaledCodes((64, 96), "float8_e4m3fn", "float8_e8m0fnu", (32, 32))
    yield Case(
        "fp8-blocks-e8m0",
        own,
        (array(q), array(s.view(torch.float8_e8m0fnu))),
        array(library._dequantize_one(q, s, torch.float32)),
    )


def compressed_tensors() -> Iterator[Case]:
    from compressed_tensors.compressors.nvfp4 import helpers
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    for kind, dtype in (
        ("float", torch.bfloat16),
        ("float", torch.float32),
        ("float", torch.float16),
        ("int", torch.bfloat16),
    ):
        for strategy, shape, block in (("channel", (48, 1), (1, 64)), ("tensor", (1,), (48, 64))):
            q = T(codes(48, 64)).view(torch.float8_e4m3fn if kind == "float" else torch.int8)
            s = normal(*shape).abs().to(dtype)
            arguments = QuantizationArgs(num_bits=8, type=kind, strategy=strategy, symmetric=True)
            own = scaled.ScaledCodes((48, 64), str(q.dtype)[6:], str(dtype)[6:], block, shape)
            yield Case(
                f"{kind}8-{strategy}-{str(dtype)[6:]}",
                own,
                (array(q), array(s)),
                array(dequantize(q, s, args=arguments)),
            )
    q, s, z = T(codes(48, 64)).view(torch.int8), normal(48, 1).abs().bfloat16(), T(codes(48, 1)).view(torch.int8)
    arguments = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=False)
    own = scaled.ScaledCodes((48, 64), "int8", "bfloat16", (1, 64), (48, 1), "int8")
    yield Case(
        "int8-channel-asymmetric", own, (array(q), array(s), array(z)), array(dequantize(q, s, z, args=arguments))
    )
    for bits in (4, 8):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            values = T(random.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (40, 128)).astype(np.int8))
            s = normal(40, 4).abs().to(dtype)
            arguments = QuantizationArgs(num_bits=bits, type="int", strategy="group", group_size=32, symmetric=True)
            packed, name = pack_to_int32(values, bits), str(dtype)[6:]
            own = integers.PackedIntegers((40, 128), bits, 4, name)
            theirs = dequantize(unpack_from_int32(packed, bits, values.shape), s, args=arguments)
            yield Case(f"int{bits}-groups-{name}", own, (array(packed), array(s)), array(theirs))
        zeros = T(random.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (40, 4)).astype(np.int8))
        s, arguments = (
            normal(40, 4).abs().bfloat16(),
            QuantizationArgs(num_bits=bits, type="int", strategy="group", group_size=32, symmetric=False),
        )
        own = integers.PackedIntegers((40, 128), bits, 4, "bfloat16", zeros=True)
        packed_zeros = pack_to_int32(zeros, bits, packed_dim=0)
        theirs = dequantize(unpack_from_int32(packed, bits, values.shape), s, zeros, args=arguments)
        yield Case(f"int{bits}-groups-asymmetric", own, (array(packed), array(s), array(packed_zeros)), array(theirs))
    values, s = T(random.integers(-8, 8, (24, 52)).astype(np.int8)), normal(24, 1).abs().bfloat16()
    arguments = QuantizationArgs(num_bits=4, type="int", strategy="channel", symmetric=True)
    own = integers.PackedIntegers((24, 52), 4, 1, "bfloat16")
    yield Case(
        "int4-channel-ragged",
        own,
        (array(pack_to_int32(values, 4)), array(s)),
        array(dequantize(values, s, args=arguments)),
    )
    packed, s, overall = T(codes(24, 32)), T(codes(24, 4)).view(torch.float8_e4m3fn), torch.tensor([37.25])
    arguments = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    unpacked = helpers.unpack_fp4_from_uint8(packed, 24, 64, torch.float32)
    theirs = dequantize(unpacked, s.float(), args=arguments, dtype=torch.float32, global_scale=overall)
    yield Case("nvfp4", fp4.Nvfp4((24, 64)), (array(packed), array(s), array(overall)), array(theirs))
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    packed, s = T(codes(24, 48)), T(random.integers(90, 140, (24, 3)).astype(np.uint8))
    kind = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True)
    parts = {"weight_packed": packed, "weight_scale": s}
    theirs = MXFP4PackedCompressor.decompress(parts, QuantizationScheme(targets=["Linear"], weights=kind))["weight"]
    own = fp4.Mxfp4((24, 96), transposed=False, grouped=False)
    yield Case("mxfp4-packed", own, (array(packed), array(s)), array(theirs))


def torchao() -> Iterator[Case]:
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    for config, name in ((Float8WeightOnlyConfig(), "float8"), (Int8WeightOnlyConfig(), "int8")):
        linear = torch.nn.Linear(128, 48, bias=False)
        with torch.no_grad():
            linear.weight.copy_(normal(48, 128, scale=1))
        quantize_(linear, config)
        weight = linear.weight
        q, s = weight.qdata, weight.scale
        own = scaled.ScaledCodes((48, 128), str(q.dtype)[6:], str(s.dtype)[6:], (1, 128), tuple(s.shape))
        yield Case(f"torchao-{name}-rows", own, (array(q), array(s)), array(weight.dequantize()))


def mxfp4() -> Iterator[Case]:
    from transformers.integrations import mxfp4 as library

    blocks, scales = T(codes(2, 24, 3, 16)), T(random.integers(90, 140, (2, 24, 3)).astype(np.uint8))
    own = fp4.Mxfp4((2, 96, 24))
    yield Case("mxfp4", own, (array(blocks), array(scales)), array(library.convert_moe_packed_tensors(blocks, scales)))
    blocks = T(
        np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 1, 16), (16, 256, 16)).copy().reshape(1, 4096, 1, 16)
    )
    scales = T(np.tile(np.arange(256, dtype=np.uint8), 16).reshape(1, 4096, 1))
    own = fp4.Mxfp4((1, 32, 4096))
    yield Case(
        "mxfp4-all-codes-and-scales",
        own,
        (array(blocks), array(scales)),
        array(library.convert_moe_packed_tensors(blocks, scales)),
    )


def bitsandbytes() -> Iterator[Case]:
    import bitsandbytes.functional as library

    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            # Without its kernels, as for odd sizes on a CPU, bitsandbytes gives code 8 of FP4 as +0, else as -0.
            for shape in ((96, 130), (33, 7)) if kind == "nf4" else ((96, 130),):
                packed, state = library.quantize_4bit(
                    normal(*shape, scale=0.05), quant_type=kind, compress_statistics=nested, blocksize=64
                )
                packed = T(codes(*packed.shape))  # every code
                inner = state.state2 if nested else None
                more = (array(inner.code), array(inner.absmax)) if nested else ()
                options = {"nested_block": inner.blocksize, "offset": state.offset.item()} if nested else {}
                own = fp4.LookupTable(shape, 64, kind == "fp4", **options)
                theirs = library.dequantize_4bit(packed, state)
                name = f"{kind}{'-nested' if nested else ''}{'' if shape[0] == 96 else '-odd'}"
                yield Case(name, own, (array(packed), array(state.absmax), array(state.code), *more), array(theirs))
    q, s = T(codes(64, 32)).view(torch.int8), normal(64, scale=2).abs()
    own = scaled.ScaledCodes((64, 32), "int8", "float32", (1, 32), (64,), factor=scaled.ONE_127TH)
    yield Case("int8-bitsandbytes", own, (array(q), array(s)), array(library.int8_vectorwise_dequant(q, s)))


def from_source(path: Path, names: set[str], scope: dict[str, Any]) -> dict[str, Any]:
    """Functions of a library's file, without importing the library."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef) and n.name in names]
    for node in nodes:
        node.decorator_list, node.returns = [], None
    exec(compile(ast.fix_missing_locations(ast.Module(nodes, [])), str(path), "exec"), scope)
    return scope


def module_of(pattern: str) -> Any:
    (path,) = SOURCES.glob(pattern)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(*shape: int) -> Array:
    return random.integers(-(2**31), 2**31, shape, np.int64).astype(np.int32)


def awq() -> Iterator[Case]:
    library = module_of("autoawq*/awq/utils/packing_utils.py")
    qweight, qzeros, s = words(128, 6), words(4, 6), array(normal(4, 48).half())
    theirs = library.dequantize_gemm(T(qweight), T(qzeros), T(s), 4, 32).T
    yield Case("awq", integers.Awq((48, 128), 4, "float16"), (qweight, qzeros, s), array(theirs))


def gptq() -> Iterator[Case]:
    (text,) = SOURCES.glob("gptqmodel*/gptqmodel/nn_modules/qlinear/__init__.py")
    scope = {
        "t": torch,
        "torch": torch,
        "_torch_right_shift": torch.bitwise_right_shift,
        "_torch_left_shift": torch.bitwise_left_shift,
    }
    scope = from_source(text, {"dequantize_weight", "_dequantize_from_codes"}, scope)

    class Linear:
        pass

    for bits in (2, 4, 8):
        for version in (1, 2):
            qweight, qzeros = words(128 * bits // 32, 64), words(4, 64 * bits // 32)
            if version == 1:  # no zero point of all ones, which libraries read apart
                fields = random.integers(0, 2**bits - 1, (4, 2 * bits, 32 // bits)).astype(np.uint32)
                qzeros = (
                    (fields << (np.arange(32 // bits, dtype=np.uint32) * bits)).sum(-1).astype(np.uint32).view(np.int32)
                )
            s, g = array(normal(4, 64).half()), random.integers(0, 4, 128).astype(np.int32)
            it = Linear()
            it.planar, it.bits, it.pack_factor, it.maxq, it.in_features = False, bits, 32 // bits, 2**bits - 1, 128
            shifts = torch.arange(0, 32, bits, dtype=torch.int32)
            it.wf_unsqueeze_zero, it.wf_unsqueeze_neg_one = shifts[None, None], shifts[None, :, None]
            it._init_wf_unsqueeze_buffers = lambda: None
            it.dequant_dtype = torch.int16 if bits == 8 else torch.int8
            ones = int(sum(1 << i for i in range(0, 32, bits))) if version == 1 else 0  # what version 1 becomes 2 by
            it.qweight, it.qzeros, it.scales, it.g_idx = (
                T(qweight),
                T((qzeros.view(np.uint32) + np.uint32(ones)).view(np.int32)),
                T(s),
                T(g),
            )
            it._dequantize_from_codes = lambda *a, it=it, **k: scope["_dequantize_from_codes"](it, *a, **k)
            theirs = scope["dequantize_weight"](it).T
            own = integers.Gptq((64, 128), bits, 4, "float16", stored_less_one=version == 1)
            yield Case(f"gptq-{bits}-bits-version-{version}", own, (qweight, qzeros, s, g), array(theirs))


def hqq() -> Iterator[Case]:
    library = module_of("hqq*/hqq/core/bitpack.py").BitPack
    for bits in (8, 4, 2, 1):
        for axis in (0, 1):
            for dtype in (torch.float16, torch.bfloat16):
                grouped = (64, 48) if axis == 0 else (48, 64)
                packed = T(codes(grouped[0] * bits // 8, grouped[1]))
                one = (1, 48) if axis == 0 else (48, 1)
                s, z = normal(*one).to(dtype), (normal(*one, scale=1) + 2 ** (bits - 1)).to(dtype)
                unpack = getattr(library, f"unpack_{bits}bit_u8")
                fields = unpack(packed).to(dtype) if bits == 8 else unpack(packed, dtype=dtype)
                theirs = ((fields - z) * s).reshape(32, 96)  # as Quantizer.dequantize
                own = integers.Hqq((32, 96), bits, 64, axis, str(dtype)[6:])
                yield Case(
                    f"hqq-{bits}-bits-axis-{axis}-{str(dtype)[6:]}",
                    own,
                    (array(packed), array(s), array(z)),
                    array(theirs),
                )


def gguf() -> Iterator[Case]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    for name, kind in gguf_blocks.GGUF_TYPES.items():
        blocks = codes(48, kind.nbytes)
        halves = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "MXFP4": ()}.get(name, (0,))
        for at in halves:
            blocks[:, at : at + 2] = random.normal(0, 0.01, (48, 1)).astype(np.float16).view(np.uint8)
        if name == "MXFP4":
            blocks[:, 0] = np.resize(np.arange(0, 255, 5), 48)
            blocks[:4, 0] = (0, 1, 2, 254)
        theirs = dequantize(blocks, GGMLQuantizationType[name])
        own = gguf_blocks.GgufBlocks((12, 4 * kind.values), name)
        yield Case(f"gguf-{name}", own, (blocks.reshape(12, -1),), theirs.reshape(12, -1))


def quantised_out() -> Iterator[tuple[str, Array, Array]]:
    """What ckpt stores for given weights, and what the library stores: names, bits, bits."""
    import ml_dtypes
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    edges = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    edges = edges[np.isfinite(edges)]
    middles = (np.sort(edges)[1:] + np.sort(edges)[:-1]) / 2
    values = np.concatenate([random.normal(0, s, 100_000) for s in (300, 3, 1e-3)] + [edges, middles]).astype(
        np.float32
    )
    values = np.clip(values, -448, 448)[None]
    mine = np.empty(values.shape, ml_dtypes.float8_e4m3fn)
    scaled.codes_of(values, np.ones((1, 1), np.float32), (1, values.size), mine)
    yield "codes of FP8 (torch)", mine.view(np.uint8), T(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    weights = array(normal(300, 576, scale=0.02).bfloat16()).astype(np.float32)
    weights[:128, :128] = 0
    scales, own = scaled.scales_of(weights, (128, 128)), np.empty(weights.shape, ml_dtypes.float8_e4m3fn)
    scaled.codes_of(weights, scales, (128, 128), own)
    tiles = [
        [T(weights[i : i + 128, j : j + 128]).abs().max() / 448.0 for j in range(0, 576, 128)] for i in (0, 128, 256)
    ]
    theirs = torch.tensor(tiles)
    theirs = torch.where(theirs == 0, 1.0, theirs)  # DeepSeek's recipe
    spread = theirs.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :576]
    yield "scales of FP8 blocks (torch)", scales.view(np.uint32), theirs.numpy().view(np.uint32)
    yield (
        "codes of FP8 blocks (torch)",
        own.view(np.uint8),
        (T(weights) / spread).to(torch.float8_e4m3fn).view(torch.uint8).numpy(),
    )
    weights = array(normal(512, 256, scale=0.05).bfloat16()).astype(np.float32)
    weights[0, :32], weights[1, :32] = 0, 0
    weights[1, :8] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]
    blocks, powers = np.empty((512, 8, 16), np.uint8), np.empty((512, 8), np.uint8)
    fp4.mxfp4_of(weights, blocks, powers)
    exponents, packed = to_mx(T(weights).bfloat16(), torch.float4_e2m1fn_x2, 32)
    yield "scales of MXFP4 (torchao)", powers.reshape(-1), exponents.view(torch.uint8).numpy().reshape(-1)
    yield "codes of MXFP4 (torchao)", blocks.reshape(-1), packed.view(torch.uint8).numpy().reshape(-1)
    weights = np.concatenate(
        [random.normal(0, 1, (400, 32)), random.integers(-127, 128, (50, 32)) * 0.5, np.zeros((2, 32))]
    )
    weights = weights.astype(np.float32)
    q8_0 = np.empty((452, 34), np.uint8)
    gguf_blocks.encode_q8_0(weights, q8_0)
    yield "blocks of Q8_0 (gguf)", q8_0, quantize(weights, GGMLQuantizationType.Q8_0).reshape(452, 34)


FAMILIES: tuple[Callable[[], Iterator[Case]], ...] = (
    fp8,
    compressed_tensors,
    torchao,
    mxfp4,
    bitsandbytes,
    awq,
    gptq,
    hqq,
    gguf,
)


def bits_of(values: Array) -> Array:
    """The bits of values, with one NaN: processors give others."""
    words = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").copy()
    with np.errstate(invalid="ignore"):
        words[np.isnan(values.astype(np.float32))] = 0x7FC0
    return words


def store(case: Case, folder: Path) -> None:
    """A golden file: JSON that says what the parts are and has the hash of the values; then the parts' bytes."""
    head = {"class": type(case.quantisation).__name__, "fields": asdict(case.quantisation)}
    head["parts"] = [[part.dtype.name, list(part.shape)] for part in case.parts]
    head["values"] = blake2b(bits_of(case.values).tobytes(), digest_size=16).hexdigest()
    data = json.dumps(head).encode() + b"\n" + b"".join(np.ascontiguousarray(part).tobytes() for part in case.parts)
    (folder / f"{case.name}.z").write_bytes(zlib.compress(data, 9))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--golden", type=Path)
    folder = parser.parse_args().golden
    total = wrong = count = 0
    for family in FAMILIES:
        for case in family():
            mine = case.quantisation.decode_whole(case.parts)
            same = mine.shape == case.values.shape and mine.dtype == case.values.dtype
            differ = int((bits_of(mine) != bits_of(case.values)).sum()) if same else mine.size
            print(
                f"{'ok  ' if not differ else 'DIFF'} {case.name}: {mine.size} values, {differ} differ",
                mine.dtype,
                case.values.dtype if not same else "",
            )
            total, wrong, count = total + mine.size, wrong + differ, count + 1
            if folder is not None:
                store(case, folder)
    for name, mine, theirs in quantised_out():
        differ = int((mine != theirs).sum())
        print(f"{'ok  ' if not differ else 'DIFF'} {name}: {mine.size} numbers, {differ} differ")
        total, wrong, count = total + mine.size, wrong + differ, count + 1
    print(f"{count} comparisons, {total:,} values, {wrong:,} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
