"""What may have been meant by a command, an option or a value that ckpt does not have: by meaning, then by spelling."""

from collections.abc import Collection

COMMANDS = {
    **dict.fromkeys(("info", "ls", "show", "list", "cat", "view", "describe", "print", "look"), ("inspect",)),
    **dict.fromkeys(("stat", "statistics", "histogram", "nan", "nans", "norms"), ("stats",)),
    **dict.fromkeys(("compat", "compatible", "fits", "strict", "keys"), ("check",)),
    **dict.fromkeys(("get", "dump", "tensor", "slice"), ("extract",)),
    **dict.fromkeys(("validate", "test", "fsck", "scrub"), ("verify",)),
    **dict.fromkeys(("compare", "cmp"), ("diff",)),
    **dict.fromkeys(("newest", "last", "current"), ("latest",)),
    **dict.fromkeys(("rm", "remove", "delete", "forget", "gc", "expire", "cleanup"), ("prune", "clean")),
    **dict.fromkeys(("export", "import", "consolidate", "gather", "unshard", "translate"), ("convert",)),
    **dict.fromkeys(("shard", "repartition", "resize", "redistribute"), ("reshard",)),
    **dict.fromkeys(("cp", "mv", "sync", "mirror", "rsync", "clone", "download", "upload", "push", "pull"), ("copy",)),
    **dict.fromkeys(("mean", "soup", "ema", "blend"), ("average", "merge")),
    **dict.fromkeys(("lora", "merge_lora", "peft"), ("merge-lora",)),
    **dict.fromkeys(("zip", "pack", "deflate"), ("compress",)),
    **dict.fromkeys(("unzip", "unpack", "uncompress", "inflate"), ("decompress",)),
    **dict.fromkeys(("checksum", "hash", "sign", "sha256"), ("seal",)),
    **dict.fromkeys(("parity", "par2", "erasure", "redundancy"), ("protect",)),
    **dict.fromkeys(("heal", "rebuild", "recover", "fix"), ("repair",)),
    **dict.fromkeys(("history", "steps"), ("log",)),
    **dict.fromkeys(("commit-shards", "join"), ("commit",)),
    **dict.fromkeys(("squash", "vacuum"), ("compact",)),
    **dict.fromkeys(("subscribe", "tail"), ("follow",)),
    **dict.fromkeys(("env", "diagnose", "check-env", "selftest"), ("doctor",)),
}
"""Words of other tools, and the commands of ckpt that do this."""

OPTIONS = {
    **dict.fromkeys(("--no-optimizer", "--without-optimizer", "--skip-optimizer"), ("--drop-optimizer",)),
    **dict.fromkeys(("--weights-only", "--only-model", "--no-extras"), ("--model-only",)),
    **dict.fromkeys(("--force", "-f", "--overwrite-existing", "--clobber", "--replace"), ("--overwrite",)),
    **dict.fromkeys(
        ("--gpus", "--num-gpus", "--ranks", "--world-size", "--nproc", "--nproc-per-node", "--data-parallel"), ("--dp",)
    ),
    **dict.fromkeys(
        (
            "--tensor-parallel",
            "--tensor-parallel-size",
            "--tensor-model-parallel-size",
            "--tp-size",
            "--target-tp",
            "--target-tensor-parallel-size",
        ),
        ("--tp",),
    ),
    **dict.fromkeys(
        (
            "--pipeline-parallel",
            "--pipeline-parallel-size",
            "--pipeline-model-parallel-size",
            "--pp-size",
            "--target-pp",
            "--target-pipeline-parallel-size",
        ),
        ("--pp",),
    ),
    **dict.fromkeys(
        ("--expert-parallel-size", "--expert-model-parallel-size", "--target-expert-parallel-size"), ("--ep",)
    ),
    **dict.fromkeys(("--expert-tensor-parallel-size",), ("--etp",)),
    **dict.fromkeys(("--virtual-pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"), ("--vpp",)),
    **dict.fromkeys(("--stage", "--zero-stage"), ("--zero",)),
    **dict.fromkeys(("--by-layer", "--per-layer", "--layer", "--layers", "--group-by"), ("--by",)),
    **dict.fromkeys(("--format", "--output-format", "--type", "--target-format", "--engine", "--saver"), ("--to",)),
    **dict.fromkeys(
        (
            "--fp16",
            "--bf16",
            "--fp32",
            "--half",
            "--precision",
            "--torch-dtype",
            "--out-dtype",
            "--target-params-dtype",
        ),
        ("--dtype",),
    ),
    **dict.fromkeys(
        ("--threads", "--jobs", "-j", "--num-workers", "--processes", "--num-extract-workers", "--num-merge-workers"),
        ("--workers",),
    ),
    **dict.fromkeys(("--include", "--filter", "--match"), ("--only",)),
    **dict.fromkeys(("--exclude", "--ignore"), ("--skip",)),
    **dict.fromkeys(("--silent", "--no-progress"), ("--quiet",)),
    **dict.fromkeys(("--plan", "--simulate", "-n", "--what-if"), ("--dry-run",)),
    **dict.fromkeys(("--max-shard-size", "--max-size", "--out-shard-size", "--split-max-size"), ("--shard-size",)),
    **dict.fromkeys(("--ram", "--max-memory", "--mem"), ("--memory",)),
    **dict.fromkeys(("--debug", "--traceback"), ("--verbose",)),
    **dict.fromkeys(("--output-json", "--format-json"), ("--json",)),
    **dict.fromkeys(("--compressor", "--compression"), ("--codec",)),
    **dict.fromkeys(("--no-sign-request", "--public"), ("--anonymous",)),
    **dict.fromkeys(("--keep-last", "--keep-daily", "--save-total-limit", "--max-to-keep"), ("--keep",)),
    **dict.fromkeys(("--max-depth",), ("--depth",)),
    **dict.fromkeys(("--vocab", "--vocab-size", "--vocabulary"), ("--pad-vocab", "--vocab-rows")),
}
"""Options of other tools, and those of ckpt that do this."""

FORMATS = {
    **dict.fromkeys(
        ("fsdp", "fsdp2", "torchtitan", "accelerate", "distcp", "torch-dcp", "torch_dist_checkpoint"), "dcp"
    ),
    **dict.fromkeys(("huggingface", "hugging-face", "transformers", "hub", "pretrained"), "hf"),
    **dict.fromkeys(("pytorch", "pt", "pth", "bin", "lightning"), "torch"),
    **dict.fromkeys(("zero", "ds", "zero3", "zero-3"), "deepspeed"),
    **dict.fromkeys(("ds_universal", "deepspeed_universal", "ucp"), "deepspeed-universal"),
    **dict.fromkeys(("mcore", "megatron-core", "torch_dist", "megatron-lm", "nemo"), "megatron"),
    "jax": "orbax",
    "msgpack": "flax",
    **dict.fromkeys(("llama.cpp", "ggml", "llamacpp"), "gguf"),
    **dict.fromkeys(("safetensor", "st"), "safetensors"),
}
"""Other names of formats that ckpt writes."""

DTYPES = {
    **dict.fromkeys(("fp8", "float8", "f8", "e4m3", "e5m2"), "fp8 is float8_e4m3fn or float8_e5m2"),
    **dict.fromkeys(("fp8_e4m3", "fp8_e4m3fn", "e4m3fn", "float8_e4m3"), "this type is called float8_e4m3fn"),
    **dict.fromkeys(("fp8_e5m2", "fp8_e5m2fn", "float8_e5m2fn"), "this type is called float8_e5m2"),
    **dict.fromkeys(("half", "f16"), "half is fp16"),
    **dict.fromkeys(("float", "f32", "single"), "float is fp32"),
    **dict.fromkeys(("double", "f64"), "double is fp64"),
    **dict.fromkeys(("int8", "int4", "4bit", "8bit", "q4", "q8"), "weights are quantised by --quantise, or --to gguf"),
}
"""Other names of types, and what they are called here."""

_MAX_WORD = 64
"""Letters of a word that is compared with all others, which takes time for each letter of both."""


def commands_like(word: str, commands: Collection[str]) -> list[str]:
    """The commands that a word may have meant, at most three."""
    meant = [name for name in COMMANDS.get(word.lower(), ()) if name in commands]
    return meant or _close(word.lower(), commands)


def options_like(word: str, options: Collection[str]) -> list[str]:
    """The options of a command that a word may have meant, at most three."""
    word = word.partition("=")[0].lower().replace("_", "-")
    meant = [name for name in OPTIONS.get(word, ()) if name in options]
    return meant or _close(word, options)


def _close(word: str, words: Collection[str]) -> list[str]:
    """Those that a word begins, or, if there are none, those of least distance, with one mistake in three letters."""
    word = word.lstrip("-")
    if len(word) > _MAX_WORD:
        return []
    completions = [name for name in words if len(word) > 2 and name.lstrip("-").startswith(word)]
    if completions:
        return completions[:3]
    distances = {name: _distance(word, name.lstrip("-")) for name in words if name.lstrip("-")[1:]}
    least = min(distances.values(), default=0)
    return [name for name, distance in distances.items() if distance == least <= len(word) / 3 + 0.5][:3]


def _distance(one: str, other: str) -> int:
    """How many letters to insert, remove, replace or swap with their neighbour (optimal string alignment).

    Source: https://en.wikipedia.org/wiki/Damerau-Levenshtein_distance
    """
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one):
        last, before, row = before, row, [i + 1]
        for j, target in enumerate(other):
            least = min(before[j] + (letter != target), before[j + 1] + 1, row[j] + 1)
            if i and j and letter == other[j - 1] and target == one[i - 1]:
                least = min(least, last[j - 1] + 1)
            row.append(least)
    return row[-1]
