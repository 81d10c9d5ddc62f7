"""All commands and all lines of Python in docs/tasks.md and docs/start.md run, in order, on real checkpoints."""

import contextlib
import io
import json
import math
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ckpt as library
from ckpt_cli.main import COMMANDS
from damage import SAMPLES, ckpt
from object_stores import StoreServer, moto, reached

DOCS = Path(__file__).parents[2] / "docs"
PAGE, START = ((DOCS / name).read_text("utf-8") for name in ("tasks.md", "start.md"))
BLOCK = re.compile(r"<!-- runs ?(\d*) -->\n```(console|python)\n(.*?)```", re.DOTALL)
"""A code block, before it the exit code of its commands, if it is not 0."""
FIRST_TRIES = Path(__file__).with_name("first_tries.txt")
"""What somebody types who knows only `--help` and messages: of each task a line that says what is needed, then at most
two tries, each as `[CODE] COMMAND :: WORDS OF ITS OUTPUT`."""
WRITES = {"convert", "reshard", "average", "merge", "merge-lora", "compress", "decompress", "restore"}
SAMPLE_OF = {
    "run": "deepspeed-0.19-zero1-bf16-dp2",
    "zero3": "deepspeed-0.19-zero3-bf16-dp4-tied-frozen",
    "fsdp": "dcp-2.13-fsdp2-w2",
    "megatron": "megatron-0.16-tp2-pp2-dist",
    "megatron-old": "megatron-0.16-tp2-pp2-legacy",
    "trainer": "transformers-5.23-trainer",
    "recorded.chain": "recorded-1/run.chain",
    "deltas.chain": "universal-1-delta",
    "checkpoint-500": "deepspeed-0.19-zero1-bf16-dp2",
    "runs": "damaged",
}
"""The names in the page, and the samples that have them."""

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""Of the model of Megatron's samples, whose arguments leave out some of it."""


PRINTS = {
    "inspect run/global_step5": r"zero_stage 1, dp 2.*34,056 in 31 tensors.*word.weight  \[256, 32\] bfloat16",
    "inspect run/global_step5 --depth 2 --json": r'"name": "head.weight"',
    "inspect steps": r"checkpoint-300  newest complete .*means checkpoint-300",
    "inspect run/global_step5 fsdp deltas.chain@11": r"fsdp +folder +dcp +5 .*deltas.chain@11 +chain +chain +11 ",
    "inspect run/global_step5 fsdp deltas.chain@11 --json": r'"kind": "several"',
    "latest steps": r"^steps/checkpoint-300$",
    "latest steps --verify --json": r'"step": 300, .*"verified": true, "passed_over": \[\]',
    "verify run/global_step5": r"^ok: .* 39 checksums over 478.3 KiB match",
    "verify --quick run/global_step5": r"^ok: .* no tensor was read",
    "verify --all saves": r"ok: saves/step-1.*ok: saves/step-2.*ok: all 2 checkpoints",
    "diff run/global_step5 fsdp": r"different: ",
    "diff run/global_step5 fsdp --html diff.html": r"different: ",
    "check ddp.pt --like clean-keys.txt": r"everything fits: --rename '\^module\\.='.*2 missing, 2 unexpected",
    "stats run/global_step5 --fail-on nan,inf": r"no value is NaN or infinite: 136,246 values in ",
    "stats run/global_step5 --by layer --state exp_avg_sq": r" 8,544 .* blocks\.1  exp_avg_sq",
    "stats run/global_step5 --csv": r"^tensor,state,dtype,.*\nodd,master,float32,7,,7,0,0,0,0\.9737",
    "rules run/global_step5": r"blocks\.\*\.mlp\.up\.weight \(2\)",
    "extract run/global_step5 head.weight head.npy": r"wrote head.npy: float32 \[256, 32\]",
    "extract run/global_step5 'head.weight[0:2, :4]'": r"bfloat16 \[2, 4\]\n\[\[-0\.0976562 0\.00213623 ",
    "extract run/global_step5 head.weight.exp_avg momentum.safetensors": r"wrote momentum.safetensors: float32",
    "doctor .": r"kernels +loaded.*ok: ckpt works here",
    "seal weights.safetensors": r"sealed 69.4 KiB in 1 file",
    "verify weights.safetensors": r"^ok: .* 1 checksum over 69.4 KiB matches",
    "index fsdp": r"nothing was written",
    "reshard run/global_step5 for-8-gpus --dp 8 --dry-run": r"pp 0 tp 0 dp 7 .*nothing was written",
    "inspect trainer": r"step        4\nlayout      not sharded; keys .*transformer",
    "inspect stranger.pt": r'keys "model"\n.*2 in 1 tensor.*epoch: 3',
    "protect run/global_step5 --lose 2": r"any 2 of 3 files may be lost: run/global_step5/\.ckpt-parity",
    "repair run/global_step5": r"^ok: run/global_step5: .* fit their hashes",
    "append models.family base --family": r"models.family: base, base, .*, exact\nwrote 1 file",
    "append models.family merged --dry-run": r"models.family: merged, .*nothing was written",
    "append models.family merged": r"models.family: merged, .*, exact",
    "append run.chain run/global_step5": r"step 5, base, .*, exact\nwrote 1 file",
    "append run.chain later --step 10": r"step 10, base.*not stored again: 253.1 KiB",
    "log run.chain": r"\n +5  base .*\n +10  base .*2 states of 835.8 KiB",
    "log run.chain --html chain.html": r"\n +10  base ",
    "log recorded.chain": r"gradients of steps 4 to 6.*exact, without torch",
    "diff run.chain@5 run.chain@last": r"head.weight.*different: 1 of 124 tensors",
    "diff deltas.chain@10 deltas.chain@11 --by layer": r"by layer\n",
    "diff deltas.chain@10 deltas.chain@11 deltas.chain@12 --state model --by layer": r"deltas.chain@12 +12 +1.67 %.*"
    r"frozen +0 +0\ndifferent: 2 of 2 from deltas.chain@10",
    "diff deltas.chain --table --by layer --by state --csv deltas.csv": r"different: 6 of 6 from deltas.chain@10",
    "diff deltas.chain@10 deltas.chain@12 --only '^frozen' --state model --tensors-only": r"the same: 1 tensor",
    "inspect run/global_step5 --html checkpoint.html": r"34,056 in 31 tensors",
    "prune steps --keep last:2,every:1000 --unchanged-for 0s --dry-run": r"checkpoint-100 .*would go\nwould remove 1",
    "prune steps --keep last:2,every:1000 --unchanged-for 0s": r"checkpoint-100 .*removed\nremoved 1 of 3",
    "watch steps watched.chain --once --interval 0.1s --keep last:1": r"-300 in watched.chain: delta, .*pruned: "
    r"checkpoint-200",
    "watch steps copies --once --interval 0.1s": r"stored checkpoint-300 in copies/checkpoint-300: copy",
    "compact saved.chain --keep last:3": r"3 states stay, 1 removed",
    "copy run.chain s3://bucket/run.chain": r"copied|wrote",
    "copy run/global_step5 s3://bucket/run/global_step5": r"copied|wrote",
    "inspect s3://bucket/run/global_step5": r"zero_stage 1, dp 2.*34,056 in 31 tensors",
    "latest s3://bucket/run": r"^s3://bucket/run/global_step5$",
    "plan --step 0.8s --mtbf 3h --stall 20s": r"a base every 805 steps \(10 min 44 s\): wastes 5.96",
}
"""What commands print, as regular expressions, by the line of the page."""
Check = Callable[[library.Checkpoint], bool]


def run() -> library.Checkpoint:
    return library.open("run/global_step5")


def is_same(other: str, *states: str) -> Check:
    """Whether what was written has the tensors of another checkpoint, bit for bit."""

    def check(target: library.Checkpoint) -> bool:
        before = library.open(other)
        before = before.weights_only() if states == ("model",) else before
        pairs = library.diff(before, target, states=states, tensors_only=True).pairs
        return bool(pairs) and {pair.kind for pair in pairs} == {"equal"}

    return check


def is_sharded(other: str, *states: str, **layout: int) -> Check:
    """The same, with this layout."""
    return lambda target: is_same(other, *states)(target) and layout.items() <= target.origin.layout.items()


def has_dtype(dtype: str, count: int) -> Check:
    """Whether so many weights have this type, and no other float type is there."""

    def check(target: library.Checkpoint) -> bool:
        types = [str(parameter.weight.dtype) for parameter in target.parameters.values()]
        return types.count(dtype) == count

    return check


def has_states(*states: str) -> Check:
    return lambda target: set(states) <= set(target.parameters[next(iter(target.parameters))].states)


def has_names(*names: str) -> Check:
    return lambda target: set(names) <= set(target.parameters)


def is_moved(share: float) -> Check:
    """Whether `head.weight` is this share of its way from the run's values to zeros, within a step of bfloat16."""

    def check(target: library.Checkpoint) -> bool:
        values, before = (
            np.asarray(one["head.weight"], np.float32) for one in (target, library.open("run/global_step5"))
        )
        return np.allclose(values, (1 - share) * before, rtol=2**-7, atol=0)

    return check


WRITTEN: dict[str, Check] = {
    "only-blocks.safetensors": lambda target: len(target) == 24 and all(name.startswith("blocks.") for name in target),
    "renamed.pt": has_names("model.blocks.0.norm1.weight", "head.weight"),
    "clean.pt": has_names("layer0.weight", "layer1.weight"),
    "numbered.pt": has_names("blocks.0.weight", "blocks.1.weight"),
    "weights.safetensors": has_dtype("bfloat16", 32),
    "convert run/global_step5 weights.safetensors --model-only --dtype fp16 --overwrite": has_dtype("float16", 32),
    "weights-fp32.safetensors": is_same("zero3/global_step5", "master"),
    "all.safetensors": is_same("run/global_step5"),
    "weights.pt": is_same("run/global_step5", "model"),
    "for-8-gpus": is_sharded("run/global_step5", dp=8),
    "for-1-gpu": is_sharded("run/global_step5", dp=1),
    "for-2-gpus": is_sharded("zero3/global_step5", dp=2, zero_stage=3),
    "stage-3": is_sharded("run/global_step5", "master", "exp_avg", "exp_avg_sq", dp=4, zero_stage=3),
    "universal-folder": is_same("run/global_step5", "master", "exp_avg", "exp_avg_sq"),
    "universal-of-3": is_same("zero3/global_step5", "master", "exp_avg", "exp_avg_sq"),
    "for-fsdp": is_same("run/global_step5", "exp_avg", "exp_avg_sq"),
    "fsdp-weights.safetensors": is_same("fsdp", "model"),
    "fsdp-all.pt": is_same("fsdp"),
    "fsdp-8": is_same("fsdp"),
    "fsdp-2x2": is_same("fsdp"),
    "start": is_same("weights.safetensors"),
    "from-the-bucket.safetensors": is_same("run/global_step5", "model"),
    "from-fsdp": is_sharded("fsdp", "exp_avg", "exp_avg_sq", dp=2, zero_stage=2),
    "megatron-1": is_sharded("megatron/iter_0000002", tp=1, pp=1),
    "megatron-tp4": is_sharded("megatron/iter_0000002", tp=4, pp=1),
    "megatron-pp2": is_sharded("megatron/iter_0000002", tp=1, pp=2),
    "megatron-new": is_same("megatron-old/iter_0000002"),
    "megatron-back": is_same("megatron/iter_0000002"),
    "llama": has_names("model.layers.3.mlp.up_proj.weight", "lm_head.weight"),
    "megatron-llama": is_same("megatron/iter_0000002", "model"),
    "megatron-llama-tp2": is_sharded("megatron-llama", tp=2, pp=2),
    "to-megatron": has_states("exp_avg", "exp_avg_sq"),
    "to-hf": is_same("trainer", "model"),
    "model": has_dtype("bfloat16", 28),
    "resumed/checkpoint-500": is_sharded("run/global_step5", dp=4),
    "trainer-fsdp": is_same("trainer", "exp_avg", "exp_avg_sq"),
    "trainer-zero": is_sharded("trainer", "exp_avg", "exp_avg_sq", dp=2, zero_stage=1),
    "padded": lambda target: target["transformer.wte.weight"].shape == (64, 8),
    "more-tokens": lambda target: (
        target["word.weight"].shape == target.parameters["word.weight"].states["exp_avg"].shape == (300, 32)
    ),
    "merged": lambda target: bool((np.asarray(target["head.weight"]) == 5).all()),  # 1 + 4 / 2 * (1 * 1 + 1 * 1)
    "mean": is_moved(0.75),
    "mean-of-two": is_same("saves/step-2"),
    "ema.safetensors": lambda target: np.allclose(np.asarray(target["w"]), 1.005989),
    "merged-again.safetensors": is_same("merged"),
    "arc": is_moved(1 - math.sin(0.7 * math.pi / 2)),  # to zeros, which mergekit takes for a right angle
    "ties.safetensors": lambda target: 0 < (target["head.weight"][:] != run()["head.weight"][:]).sum() < 8192,
    "safe.safetensors": has_names("w"),
    "model.safetensors": is_same("weights.pt"),
    "model.pt": is_same("weights.pt"),
    "half.safetensors": has_dtype("bfloat16", 31),
    "model.msgpack": is_same("weights.pt"),
    "small.ucp": is_same("model.safetensors"),
    "again.safetensors": is_same("model.safetensors"),
    "small": is_same("run/global_step5"),
    "again": is_sharded("run/global_step5", dp=2, zero_stage=1),
    "resumed-at-5": is_sharded("run/global_step5", dp=2),
    "step5": lambda target: target.step == 5,
}
"""What is right of each target that a command of the page writes, by its name, or by the line if two write it."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the checkpoints that the page names."""
    for name, sample in SAMPLE_OF.items():
        shutil.copytree(SAMPLES / sample, tmp_path / name, ignore=shutil.ignore_patterns("truth.safetensors"))
    run = library.open(tmp_path / "run")
    later = run.replace({"head.weight": np.zeros_like(run["head.weight"])})
    library.save(later, tmp_path / "later", library.Universal())
    (tmp_path / "base").mkdir()
    save_file({"head.weight": np.ones((256, 32), np.float32)}, tmp_path / "base" / "model.safetensors")
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "lora_alpha": 4, "r": 2}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    low, high = np.ones((2, 32), np.float32), np.ones((256, 2), np.float32)
    names = {"base_model.model.head.lora_A.weight": low, "base_model.model.head.lora_B.weight": high}
    save_file(names, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for name in ("trainer_state.json", "scheduler.pt", "rng_state.pth"):
        shutil.copy(tmp_path / "trainer" / name, tmp_path / "checkpoint-500")
    (tmp_path / "resumed").mkdir()
    torch.save({f"module.layer{i}.weight": torch.ones(2) for i in range(2)}, tmp_path / "ddp.pt")
    (tmp_path / "saves").mkdir()
    for step in (1, 2):
        library.save(run.weights_only(), tmp_path / "saves" / f"step-{step}", library.Universal())
    (tmp_path / "clean-keys.txt").write_text("layer0.weight\nlayer1.weight\n")
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "stranger.pt")
    for step in range(1, 5):
        torch.save({"model": {"w": torch.full((8,), float(step))}, "step": step}, tmp_path / "saved.pt")
        assert ckpt("append", tmp_path / "saved.chain", tmp_path / "saved.pt", "--step", step).code == 0
    for step in (100, 200, 300):
        (folder := tmp_path / "steps" / f"checkpoint-{step}").mkdir(parents=True)
        save_file({"w": np.full(8, step, np.float32)}, folder / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bucket() -> Iterator[StoreServer]:
    """The bucket that the page names."""
    with moto() as server, reached(server):
        yield server


def check_nothing(line: str, out: str) -> None:
    pass


def check_outcome(line: str, out: str) -> None:
    """Check what a command of the page has printed, or written."""
    command = line.removeprefix("$ ckpt ")
    if command in PRINTS:
        assert re.search(PRINTS[command], out, re.DOTALL), f"{line}\n{out}"
        return
    assert command.split()[0] in WRITES, f"{line} has no outcome"
    *_, target = takewhile(lambda word: not word.startswith("-"), shlex.split(command))
    check = WRITTEN.get(command) or WRITTEN[target.rstrip("/")]
    assert check(library.open(target)), line


def run_blocks(page: str, outcome: Callable[[str, str], None] = check_nothing) -> int:
    """Run the marked blocks of a page in their order. Returns how many there are."""
    blocks = BLOCK.findall(page)
    for code, language, text in blocks:
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(text, "a block of Python", "exec"), {})
            assert bool(printed.getvalue()) == ("print(" in text), text
            continue
        for line in text.splitlines():
            outcome(line, run_line(line, int(code or 0)))
    return len(blocks)


def run_line(line: str, code: int) -> str:
    """Run a command of a page; it prints something, and a target that it writes can be opened. Returns the output."""
    assert line.startswith("$ ckpt ")
    command, *words = shlex.split(line)[2:]
    done = ckpt(command, *words)
    assert done.code == code, f"{line}\n{done.out}\n{done.err}"
    assert done.out, line
    if command in WRITES and "--dry-run" not in words:
        places = [Path(word) for word in words[1:] if not word.startswith("-") and Path(word).exists()]
        assert places, line
        assert all(library.open(place).parameters for place in places if place.suffix not in (".chain", ".json")), line
    return done.out


def test_every_task_does_what_the_page_promises(folder: Path, bucket: StoreServer) -> None:
    assert run_blocks(PAGE, check_outcome) >= 45
    names = {path.name for path in folder.iterdir()} - set(SAMPLE_OF)
    assert len(names) > 40
    assert not [name for name in names if name.startswith(".")]
    assert len(library.open("merged")) == 1
    assert Path("resumed/checkpoint-500/trainer_state.json").is_file()
    assert "exp_avg" in library.open("for-fsdp").parameters["head.weight"].states
    assert "exp_avg" in library.open("to-megatron").parameters["embedding.word_embeddings.weight"].states
    assert Path("to-hf/config.json").is_file()
    assert set(library.open("clean.pt").parameters) == {"layer0.weight", "layer1.weight"}
    assert set(library.open("numbered.pt").parameters) == {"blocks.0.weight", "blocks.1.weight"}
    assert library.open("step5").step == 5
    assert ckpt("diff", "model.safetensors", "again.safetensors").code == 0
    assert Path("again.safetensors").read_bytes() == Path("model.safetensors").read_bytes()


def test_no_task_needs_more_than_five_lines_of_python() -> None:
    blocks = [text for _, language, text in BLOCK.findall(PAGE) if language == "python"]
    assert blocks
    assert all(len(text.split("\n\n")) <= 2 and len(list(filter(str.strip, text.splitlines()))) <= 5 for text in blocks)


def test_no_task_needs_more_than_five_commands() -> None:
    assert all(text.count("\n") <= 5 for _, language, text in BLOCK.findall(PAGE) if language == "console")


def test_the_first_two_minutes_go_as_the_page_says(folder: Path) -> None:
    assert run_blocks(START) >= 4
    assert len(library.open("from-python.safetensors")) == len(library.open("weights.safetensors"))


def test_every_block_runs_unless_it_needs_two_machines() -> None:
    rest = re.findall(r"^```\w+\n(.*?)```", BLOCK.sub("", PAGE), re.DOTALL | re.MULTILINE)
    assert all("ckpt serve" in text for text in rest)


class Try(NamedTuple):
    words: list[str]
    code: int
    says: str


def first_tries() -> dict[str, list[Try]]:
    blocks = FIRST_TRIES.read_text("utf-8").strip().split("\n\n")
    tries = dict[str, list[Try]]()
    for task, *lines in (block.split("\n") for block in blocks):
        matches = [re.fullmatch(r"\[(\d+)\] ckpt (.*?) :: (.*)", line) for line in lines]
        assert all(matches), task
        tries[task] = [Try(shlex.split(one[2]), int(one[1]), one[3]) for one in matches if one is not None]
    assert len(tries) == len(blocks)
    return tries


def test_first_tries_are_at_most_two_for_each_of_36_tasks() -> None:
    tries = first_tries()
    assert len(tries) >= 36
    assert {len(of_task) for of_task in tries.values()} == {1, 2}
    assert all(of_task[-1].code in (0, 1) for of_task in tries.values())


def test_a_wrong_first_try_leads_to_the_right_second_by_its_message_or_help(folder: Path) -> None:
    save_file({"w": np.array([1, np.nan], np.float32)}, folder / "nan.safetensors")
    for task, tries in first_tries().items():
        leads = ""
        for one in tries:
            done = ckpt(*one.words)
            text = done.out + done.err
            assert (done.code, one.says in text) == (one.code, True), f"{task} ckpt {shlex.join(one.words)}\n{text}"
            new = {one.words[0], *(word for word in one.words if word.startswith("--"))} - set(tries[0].words)
            assert all(word in leads for word in new), f"{task} {new} is neither in the message nor in the help"
            leads = text + ckpt(*(one.words[:1] if one.words[0] in COMMANDS else ()), "--help").out
