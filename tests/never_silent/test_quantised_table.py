"""What each command does with each scheme of quantised weights: a cell of the table in docs/quantised-weights.md.

The codes and scales are golden arrays, whose values the scheme's own library computed. Each cell is one of: the bits of
all codes and scales are carried; the values are those of the library, rounded once; or the command refuses in words,
and writes nothing. Whatever else happens is silent, and fails. The check tries every second scheme, and `make campaign`
all. This writes the table anew:

    python tests/never_silent/test_quantised_table.py
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np
import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / one) for one in ("support", "never_silent")]

from test_quantised import (  # noqa: E402
    BF16,
    CASES,
    E4M3,
    F16,
    F32,
    MODULE,
    fp8_config,
    random_array,
    tensors_config,
    write_safetensors,
)
from test_quantised import adapter as adapter_of  # noqa: E402

from ckpt_codecs.quantised.gguf_blocks import GgufBlocks  # noqa: E402
from ckpt_formats.containers.gguf import BLOCK_TYPES, header_bytes, placed  # noqa: E402
from ckpt_formats.core.errors import CkptError  # noqa: E402
from ckpt_formats.registry.opening import open_checkpoint  # noqa: E402
from damage import UNSUPPORTED, Ran, ckpt  # noqa: E402
from effort import TIMES  # noqa: E402

PAGE = TESTS.parent / "docs" / "quantised-weights.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->"
EXPERTS = "model.layers.0.mlp.experts"
CARRIED, VALUES, REFUSED, NAMED, FP8, MISSING = "bits", "values", "refused", "named", "FP8", "missing"

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Scheme:
    """A quantised weight as its library stores it, from a file of golden arrays."""

    golden: str
    names: tuple[str, ...]
    """Of the golden parts, in the module."""
    config: Mapping[str, Any] | None = None
    module: str = MODULE
    plain: str = "weight"
    others: Callable[[tuple[int, ...]], Arrays] = field(default=lambda shape: {})
    """Further tensors of the module, which describe the weight, by its shape."""


def shape_of_words(shape: tuple[int, ...]) -> Arrays:
    return {"weight_shape": np.array(shape)}


def quant_state(kind: str, **more: Any) -> Callable[[tuple[int, ...]], Arrays]:
    def state(shape: tuple[int, ...]) -> Arrays:
        stated = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(shape), **more}
        return {f"weight.quant_state.bitsandbytes__{kind}": np.frombuffer(json.dumps(stated).encode(), np.uint8)}

    return state


def hqq_state(axis: int) -> Callable[[tuple[int, ...]], Arrays]:
    return lambda shape: {
        "nbits": np.array([4]),
        "group_size": np.array([64]),
        "axis": np.array([axis]),
        "shape": np.array(shape),
    }


_PACKED, _TABLE = ("weight_packed", "weight_scale"), ("weight", "weight.absmax", "weight.quant_map")
_NESTED = (*_TABLE, "weight.nested_quant_map", "weight.nested_absmax")
_GPTQ = ("qweight", "qzeros", "scales", "g_idx")
_BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
_OFFSET = 0.1298254281282425
DECODED = {
    "FP8 in ragged blocks": Scheme(
        "fp8-blocks-ragged", ("weight", "weight_scale_inv"), fp8_config(weight_block_size=[128, 128])
    ),
    "FP8 with E8M0 scales": Scheme(
        "fp8-blocks-e8m0", ("weight", "weight_scale_inv"), fp8_config(weight_block_size=[32, 32])
    ),
    "FP8 of experts": Scheme(
        "fp8-blocks-stack",
        ("gate_up_proj", "gate_up_proj_scale_inv"),
        fp8_config(weight_block_size=[32, 32]),
        EXPERTS,
        "gate_up_proj",
    ),
    "FP8 for a tensor": Scheme("float8-tensor-float32", ("weight", "weight_scale"), tensors_config("float-quantized")),
    "FP8 for a row": Scheme("float8-channel-bfloat16", ("weight", "weight_scale"), tensors_config("float-quantized")),
    "FP8 of torchao": Scheme("torchao-float8-rows", ("_weight_qdata", "_weight_scale"), {"quant_method": "torchao"}),
    "INT8 of torchao": Scheme("torchao-int8-rows", ("_weight_qdata", "_weight_scale"), {"quant_method": "torchao"}),
    "INT8 for a row": Scheme("int8-channel-bfloat16", ("weight", "weight_scale"), tensors_config("int-quantized")),
    "INT8 with zero points": Scheme(
        "int8-channel-asymmetric", ("weight", "weight_scale", "weight_zero_point"), tensors_config("int-quantized")
    ),
    "INT8 of bitsandbytes": Scheme("int8-bitsandbytes", ("weight", "SCB"), {"load_in_8bit": True}),
    "INT4 in groups": Scheme("int4-groups-bfloat16", _PACKED, tensors_config("pack-quantized"), others=shape_of_words),
    "INT4 with zero points": Scheme(
        "int4-groups-asymmetric",
        (*_PACKED, "weight_zero_point"),
        tensors_config("pack-quantized"),
        others=shape_of_words,
    ),
    "AWQ": Scheme("awq", _GPTQ[:3], {"quant_method": "awq", "bits": 4}),
    "GPTQ, version 1": Scheme(
        "gptq-4-bits-version-1", _GPTQ, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}
    ),
    "GPTQ, version 2": Scheme(
        "gptq-4-bits-version-2", _GPTQ, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}
    ),
    "HQQ": Scheme("hqq-4-bits-axis-0-float16", ("W_q", "scale", "zero"), {"quant_method": "hqq"}, others=hqq_state(0)),
    "NF4": Scheme("nf4", _TABLE, _BITSANDBYTES, others=quant_state("nf4")),
    "NF4, nested": Scheme(
        "nf4-nested", _NESTED, _BITSANDBYTES, others=quant_state("nf4", nested_blocksize=256, nested_offset=_OFFSET)
    ),
    "FP4": Scheme("fp4", _TABLE, _BITSANDBYTES, others=quant_state("fp4")),
    "MXFP4": Scheme(
        "mxfp4", ("gate_up_proj_blocks", "gate_up_proj_scales"), {"quant_method": "mxfp4"}, EXPERTS, "gate_up_proj"
    ),
    "MXFP4, packed": Scheme("mxfp4-packed", _PACKED, tensors_config("mxfp4-pack-quantized")),
    "NVFP4": Scheme("nvfp4", (*_PACKED, "weight_global_scale"), tensors_config("nvfp4-pack-quantized")),
}
BLOCKS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
NOT_DECODED = {"NVFP4 of ModelOpt": "nvfp4-modelopt", "quanto": "quanto", "VPTQ": "vptq", "unknown": "unknown"}
SCHEMES = (*DECODED, *(f"GGUF {kind}" for kind in BLOCKS), *NOT_DECODED)


@dataclass(frozen=True)
class Source:
    """A checkpoint with one quantised weight and a plain norm."""

    path: Path
    adapter: Path
    codes: Mapping[str, bytes]
    """The bytes of its codes and scales, by name."""
    name: str
    """Of the plain weight."""
    values: Any
    """Those of the plain weight that the library computes; None if ckpt does not decode the scheme."""


def digest_of(values: Any) -> str:
    """As tests/ckpt_codecs/test_quantised.py notes values."""
    words = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").copy()
    with np.errstate(invalid="ignore"):
        words[np.isnan(values.astype(F32))] = 0x7FC0
    return blake2b(words.tobytes(), digest_size=16).hexdigest()


def golden(name: str) -> tuple[Any, list[Any], Any]:
    """The quantisation, its parts and its values, of which the digest is the library's."""
    from golden_quantised import read_golden

    quantisation, parts, digest = read_golden(TESTS / "golden_quantised" / f"{name}.z")
    values = quantisation.decode_whole(parts)
    assert digest_of(values) == digest
    return quantisation, parts, values


def source_of(scheme: str, work: Path) -> Source:
    """The checkpoint of a scheme in the folder `work`."""
    if scheme.startswith("GGUF "):
        quantisation, (blocks,), values = golden(f"gguf-{scheme.removeprefix('GGUF ')}")
        return gguf(quantisation, blocks, values, work)
    if scheme in NOT_DECODED:
        case = CASES[NOT_DECODED[scheme]]
        module, plain, values = case.module, case.plain, None
        own = {name: case.values.get(name, random_array(*form, 0)) for name, form in case.layout.items()}
        config = case.config
    else:
        entry = DECODED[scheme]
        quantisation, parts, values = golden(entry.golden)
        module, plain, config = entry.module, entry.plain, entry.config
        own = {**dict(zip(entry.names, parts, strict=True)), **entry.others(quantisation.shape)}
    codes = {f"{module}.{name}": array for name, array in own.items()}
    folder = work / "model"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", {**codes, "model.norm.weight": random_array((32,), F32, 0)})
    stated = {} if config is None else {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", **stated}))
    matrix = (64, 32) if values is None else values.shape[-2:]
    adapter = adapter_of(work / "adapter", module, matrix).path
    return Source(
        folder, adapter, {name: array.tobytes() for name, array in codes.items()}, f"{module}.{plain}", values
    )


def gguf(quantisation: GgufBlocks, blocks: Any, values: Any, work: Path) -> Source:
    """A file of llama.cpp, of an architecture that is not known: its names stay as they are."""
    name, kinds = f"{MODULE}.weight", (BLOCK_TYPES[quantisation.type], BLOCK_TYPES["F32"])
    tensors = placed([(name, kinds[0], quantisation.shape), ("model.norm.weight", kinds[1], (32,))], 32)
    data = blocks.tobytes().ljust(tensors[1].offset, b"\0") + random_array((32,), F32, 0).tobytes()
    path = work / "model.gguf"
    path.write_bytes(header_bytes({"general.architecture": "own"}, tensors) + data)
    return Source(path, adapter_of(work / "adapter", MODULE, values.shape).path, {name: blocks.tobytes()}, name, values)


def are_equal(first: Any, second: Any) -> bool:
    """Whether two arrays have the same type, shape and bits; all NaNs are one."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    first_nan, second_nan = (np.isnan(one.astype(F32)) for one in (first, second))
    same = np.ascontiguousarray(first).view(np.uint8) == np.ascontiguousarray(second).view(np.uint8)
    of_value = same.reshape(*first.shape, first.itemsize).all(axis=-1)
    return bool(np.array_equal(first_nan, second_nan) and (of_value | first_nan).all())


class SilentError(AssertionError):
    """A command that neither did what it was asked nor said so."""


def refused(ran: Ran, target: Path | None = None) -> bool:
    """Whether a command refused in words, and wrote nothing."""
    if ran.code == 0:
        return False
    if ran.code != UNSUPPORTED or not ran.err.splitlines()[-3:] or "error: " not in ran.err:
        raise SilentError(f"exit code {ran.code}: {ran.err}")
    if target is not None and target.exists():
        raise SilentError(f"refused, but there is {target.name}")
    return True


def result_of(source: Source, ran: Ran, target: Path, dtype: Any = None) -> str:
    """What a command wrote."""
    if refused(ran, target):
        return REFUSED
    written = open_checkpoint(target)
    own = {name: np.asarray(parameter) for name, parameter in written.items()}
    is_gguf = source.path.suffix == ".gguf"
    if dtype is None and target.suffix == ".gguf":
        stored = written[source.name].weight.fragments[0].blob.stored[0]
        return CARRIED if np.asarray(stored).tobytes() == source.codes[source.name] else silent("other blocks")
    if dtype is None and not is_gguf:
        same = all(name in own and own[name].tobytes() == raw for name, raw in source.codes.items())
        return CARRIED if same else silent("codes or scales changed")
    if source.values is None or source.name not in own:
        return silent(f"{source.name} is not there")
    with np.errstate(over="ignore", invalid="ignore"):
        expected, actual = source.values.astype(dtype or F32), own[source.name]
    if not are_equal(actual, expected):
        return silent("other values")
    if "dequantised from" not in ran.err and "their values are float32" not in ran.err:
        return silent("nothing was said")
    if not is_gguf and source.codes.keys() & own.keys() - {source.name}:
        return silent("scales remain")
    return VALUES


def silent(why: str) -> str:
    raise SilentError(why)


def then(ran: Ran, *arguments: object) -> Ran:
    """Run a command after another one, whose messages come first."""
    done = ckpt(*arguments)
    return Ran(done.code, done.out, ran.err + done.err)


Cell = Callable[[Source, Path], str]


def convert(*options: object, name: str = "out", dtype: Any = None) -> Cell:
    def cell(source: Source, work: Path) -> str:
        target = work / name
        return result_of(source, ckpt("convert", source.path, target, *options), target, dtype)

    return cell


def inspect(source: Source, work: Path) -> str:
    ran = ckpt("inspect", source.path, "--json")
    assert ran.code == 0, ran.err
    (one,) = json.loads(ran.out)["quantised"]
    if {*one["parts"]} - source.codes.keys() or (one["bits"] is None) != (source.values is None):
        silent("other parts")
    text = ckpt("inspect", source.path).out
    return NAMED if one["scheme"] in text or (source.values is None and "not decoded" in text) else silent("not named")


def verify(source: Source, work: Path) -> str:
    ran = ckpt("verify", source.path)
    assert ran.code == 0, ran.err
    return CARRIED if "ok: " in ran.out + ran.err else silent("not read")


def quantise(source: Source, work: Path) -> str:
    """Blocks of llama.cpp are plain values for ckpt, so they become FP8 in blocks."""
    ran = ckpt("convert", source.path, work / "out.pt", "--quantise", "fp8-block")
    if refused(ran, work / "out.pt"):
        return REFUSED
    actual, values = np.asarray(open_checkpoint(work / "out.pt").cast("fp32")[source.name]), source.values.astype(F32)
    if "quantised to fp8-block" not in ran.err or np.abs(actual - values).max() > np.abs(values).max() / 16:
        silent("not FP8 of the values")
    return FP8


def reshard(source: Source, work: Path) -> str:
    ran = ckpt("reshard", source.path, work / "out", "--to", "dcp", "--dp", 2)
    return result_of(source, ran, work / "out")


def compress(source: Source, work: Path) -> str:
    ran = ckpt("compress", source.path, work / "small.ucp")
    if refused(ran, work / "small.ucp"):
        return REFUSED
    return result_of(source, then(ran, "convert", work / "small.ucp", work / "out.pt"), work / "out.pt")


def append(*options: object) -> Cell:
    def cell(source: Source, work: Path) -> str:
        for step in (1, 2):
            ran = ckpt("append", work / "chain", source.path, "--step", step, *options)
            if refused(ran):
                return REFUSED
        return result_of(source, then(ran, "restore", work / "chain", work / "out.pt"), work / "out.pt")

    return cell


def publish(*options: object, dtype: Any = None) -> Cell:
    def cell(source: Source, work: Path) -> str:
        ran = ckpt("publish", source.path, work / "chain", "--step", 1, "--names", "as-is", *options)
        if refused(ran, work / "chain"):
            return REFUSED
        return result_of(source, then(ran, "restore", work / "chain", work / "out.pt"), work / "out.pt", dtype)

    return cell


def diff(source: Source, work: Path) -> str:
    """Compare with a copy, and with one in which a bit of the first code is another."""
    copy = work / source.path.name
    shutil.copytree(source.path, copy) if source.path.is_dir() else shutil.copy(source.path, copy)
    file = copy / "model.safetensors" if copy.is_dir() else copy
    equal, raw, own = ckpt("diff", source.path, copy), bytearray(file.read_bytes()), next(iter(source.codes.values()))
    raw[raw.index(own[:64])] ^= 16
    file.write_bytes(raw)
    other = ckpt("diff", source.path, copy)
    if (equal.code, other.code) != (0, 1):
        silent(f"exit codes {equal.code} and {other.code}")
    return CARRIED if source.path.is_dir() else VALUES


def average(source: Source, work: Path) -> str:
    ran = ckpt("average", source.path, source.path, work / "out.pt")
    return result_of(source, ran, work / "out.pt", F32)


def merge_lora(source: Source, work: Path) -> str:
    ran = ckpt("merge-lora", source.path, source.adapter, work / "out.pt")
    if refused(ran, work / "out.pt"):
        return REFUSED if "quantised weight" in ran.err else silent(ran.err)
    update = [np.asarray(one) for one in open_checkpoint(source.adapter).values()]
    expected = source.values.astype(F32) + 2 * update[1] @ update[0]
    actual = np.asarray(open_checkpoint(work / "out.pt")[source.name])
    return VALUES if np.allclose(actual, expected, rtol=1e-6, equal_nan=True) else silent("other values")


def load(strict: bool, dtype: Any) -> Cell:
    """Load into a module of torch that has the plain weight."""

    def cell(source: Source, work: Path) -> str:
        import torch

        import ckpt_training

        run = torch.nn.Module()
        shape = (64, 32) if source.values is None else source.values.shape
        _register(run, source.name if source.values is not None else f"{MODULE}.weight", shape, dtype)
        _register(run, "model.norm.weight", (32,), "float32")
        before = {name: one.detach().clone() for name, one in run.named_parameters()}
        try:
            loaded = ckpt_training.load(source.path, run, strict=strict)
        except CkptError as error:
            same = all(torch.equal(before[name], one) for name, one in run.named_parameters())
            return REFUSED if same and error.hint else silent(f"refused after a change: {error}")
        (name, own), _ = run.named_parameters()
        if name in {*loaded.missing_keys, *loaded.mismatched_keys}:
            return MISSING if torch.equal(own, before[name]) else silent("missing, but changed")
        values = own.detach().float().numpy()
        expected = source.values.astype(getattr(ml_dtypes, dtype, dtype)).astype(F32)
        return VALUES if are_equal(values, expected) else silent("other values")

    return cell


def _register(run: Any, name: str, shape: tuple[int, ...], dtype: str) -> None:
    """Give a module of torch a parameter of a dotted name."""
    import torch

    *path, own = name.split(".")
    for part in path:
        if not hasattr(run, part):
            run.add_module(part, torch.nn.Module())
        run = getattr(run, part)
    run.register_parameter(own, torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))))


COMMANDS: dict[str, Cell] = {
    "`inspect`": inspect,
    "`verify`": verify,
    "`convert --to hf`": convert("--to", "hf"),
    "`convert --to universal`": convert("--to", "universal"),
    "`convert --to torch`": convert(name="out.pt"),
    "`convert --to safetensors`": convert(name="out.safetensors"),
    "`convert --to dcp`": convert("--to", "dcp"),
    "`convert --to flax`": convert("--separator", "/", name="out.msgpack"),
    "`convert --to gguf`": convert(name="out.gguf"),
    "`convert --to deepspeed`": convert("--to", "deepspeed", "--dp", 1),
    "`convert --to deepspeed-universal`": convert("--to", "deepspeed-universal", "--dp", 1),
    "`convert --to megatron`": convert("--to", "megatron", "--dp", 1),
    "`convert --to megatron-legacy`": convert("--to", "megatron-legacy", "--dp", 1),
    "`convert --to torch --dtype bf16`": convert("--dtype", "bf16", name="out.pt", dtype=BF16),
    "`convert --to torch --dtype fp16`": convert("--dtype", "fp16", name="out.pt", dtype=F16),
    "`convert --to torch --dtype fp32`": convert("--dtype", "fp32", name="out.pt", dtype=F32),
    "`convert --to torch --dtype float8_e4m3fn`": convert(
        "--dtype", "float8_e4m3fn", "--allow-overflow", name="out.pt", dtype=E4M3
    ),
    "`convert --to universal --dtype bf16`": convert("--to", "universal", "--dtype", "bf16", dtype=BF16),
    "`convert --to dcp --dtype bf16`": convert("--to", "dcp", "--dtype", "bf16", dtype=BF16),
    "`convert --quantise fp8-block`": quantise,
    "`reshard --to dcp --dp 2`": reshard,
    "`compress`": compress,
    "`append`, `restore`": append(),
    "`append --preset balanced`, `restore`": append("--preset", "balanced"),
    "`publish`": publish(),
    "`publish --dtype bf16`": publish("--dtype", "bf16", dtype=BF16),
    "`diff`": diff,
    "`average`": average,
    "`merge-lora`": merge_lora,
    "`ckpt_training.load`, bfloat16": load(True, "bfloat16"),
    "`ckpt_training.load(strict=False)`, bfloat16": load(False, "bfloat16"),
    "`ckpt_training.load(strict=False)`, float32": load(False, "float32"),
}


def column_of(scheme: str) -> tuple[str, ...]:
    """The cells of a scheme, in the order of the commands."""
    cells = []
    with TemporaryDirectory() as root:
        source = source_of(scheme, Path(root))
        for number, (command, cell) in enumerate(COMMANDS.items()):
            work = Path(root) / str(number)
            work.mkdir()
            try:
                cells.append(cell(source, work))
            except SilentError as error:
                raise SilentError(f"{scheme}, {command}: {error}") from None
    return tuple(cells)


def table_of(columns: Mapping[str, tuple[str, ...]]) -> str:
    """The table of the page: schemes for which all commands do the same are one column."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for scheme, cells in columns.items():
        alike.setdefault(cells, []).append(scheme)
    titles = [", ".join(schemes) for schemes in alike.values()]
    lines = [f"{number}. {title}" for number, title in enumerate(titles, 1)]
    lines += ["", f"| command | {' | '.join(str(number) for number in range(1, len(titles) + 1))} |"]
    lines.append("|---" * (len(titles) + 1) + "|")
    lines += [f"| {command} | {' | '.join(cells)} |" for command, *cells in zip(COMMANDS, *alike, strict=True)]
    return "\n".join(lines) + "\n"


def stated_columns() -> dict[str, tuple[str, ...]]:
    """The cells of each scheme as the page states them."""
    text = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    listed, _, table = text.partition("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == list(COMMANDS)
    stated = {}
    for number, line in enumerate(listed.splitlines(), 1):
        for scheme in SCHEMES:
            if scheme in _split(line.partition(". ")[2]):
                stated[scheme] = tuple(row[number] for row in rows)
    return stated


def _split(title: str) -> list[str]:
    """The schemes of a title: some have a comma in their names."""
    schemes, rest = [], title
    while rest:
        scheme = max((one for one in SCHEMES if rest.startswith(one)), key=len)
        schemes.append(scheme)
        rest = rest.removeprefix(scheme).removeprefix(", ")
    return schemes


def test_page_states_every_scheme() -> None:
    assert stated_columns().keys() == set(SCHEMES)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES if TIMES > 1 else SCHEMES[::2])
def test_no_command_is_silent_and_the_page_states_what_it_does(scheme: str) -> None:
    assert column_of(scheme) == stated_columns()[scheme]


if __name__ == "__main__":
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    table = table_of({scheme: column_of(scheme) for scheme in SCHEMES})
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}", "utf-8")
