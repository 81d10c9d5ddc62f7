"""All commands and all lines of Python in docs/tasks.md and docs/start.md run, in order, on real checkpoints."""

import contextlib
import io
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ckpt as library
from damage import SAMPLES, ckpt

DOCS = Path(__file__).parents[2] / "docs"
PAGE, START = ((DOCS / name).read_text("utf-8") for name in ("tasks.md", "start.md"))
BLOCK = re.compile(r"<!-- runs ?(\d*) -->\n```(console|python)\n(.*?)```", re.DOTALL)
"""A code block, before it the exit code of its commands, if it is not 0."""
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
    (tmp_path / "kept").mkdir()
    for step in (1, 2):
        library.save(run.weights_only(), tmp_path / "kept" / f"step-{step}", library.Universal())
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


def run_blocks(page: str) -> int:
    """Run the marked blocks of a page in their order. Returns how many there are."""
    blocks = BLOCK.findall(page)
    for code, language, text in blocks:
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(text, "a block of Python", "exec"), {})
            assert bool(printed.getvalue()) == ("print(" in text), text
            continue
        for line in text.splitlines():
            run_line(line, int(code or 0))
    return len(blocks)


def run_line(line: str, code: int) -> None:
    """Run a command of a page; it prints something, and a target that it writes can be opened."""
    assert line.startswith("$ ckpt ")
    command, *words = shlex.split(line)[2:]
    done = ckpt(command, *words)
    assert done.code == code, f"{line}\n{done.out}\n{done.err}"
    assert done.out, line
    if command in WRITES and "--dry-run" not in words:
        places = [Path(word) for word in words[1:] if not word.startswith("-") and Path(word).exists()]
        assert places, line
        assert all(library.open(place).parameters for place in places if place.suffix not in (".chain", ".json")), line


def test_every_task_does_what_the_page_promises(folder: Path) -> None:
    assert run_blocks(PAGE) >= 45
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


def test_every_block_runs_unless_it_needs_a_bucket() -> None:
    rest = re.findall(r"^```\w+\n(.*?)```", BLOCK.sub("", PAGE), re.DOTALL | re.MULTILINE)
    assert all("s3://" in text for text in rest)
