"""Every task of docs/thirty-tasks.md is done as the page says, on checkpoints that real engines wrote."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.state_dicts.keys import STYLES
from damage import SAMPLES, ckpt

PAGE = Path(__file__).parents[2] / "docs" / "thirty-tasks.md"
_TASK = re.compile(r"^\*\*(\d+)\. (.*?)$(.*?)(?=^\*\*\d+\.|^## |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MOST_LINES = 5
_WRITES = {"convert", "reshard", "average", "merge-lora", "decompress", "restore"}


def tasks() -> Iterator[tuple[int, str, list[tuple[str, str]]]]:
    """The number, the title and the blocks of each task."""
    for number, title, text in _TASK.findall(PAGE.read_text("utf-8")):
        yield int(number), title, _BLOCK.findall(text)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything of which the page speaks."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    folder = tmp_path_factory.mktemp("tasks")
    for name, sample in {
        "run": "deepspeed-0.19-zero1-bf16-dp2",
        "zero3": "deepspeed-0.19-zero3-bf16-dp4-tied-frozen",
        "fsdp": "dcp-2.13-fsdp2-w2",
        "megatron": "megatron-0.16-tp2-pp2-dist",
        "trainer": "transformers-5.23-trainer",
        "run.chain": "universal-1-delta",
        "recorded.chain": "recorded-1/run.chain",
        "checkpoint-500": "deepspeed-0.19-zero1-bf16-dp2",
        "runs": "damaged",
    }.items():
        shutil.copytree(SAMPLES / sample, folder / name, ignore=shutil.ignore_patterns("truth.safetensors"))
    for name in ("trainer_state.json", "scheduler.pt", "rng_state.pth"):
        shutil.copy(folder / "trainer" / name, folder / "checkpoint-500")
    (folder / "resumed").mkdir()
    rng = np.random.default_rng(0)
    for name in ("model", "other"):
        weights = {f"layer{i}.weight": rng.standard_normal((4, 4)).astype(np.float32) for i in range(2)}
        save_file(weights, folder / f"{name}.safetensors")
    torch.save({f"module.layer{i}.weight": torch.ones(2) for i in range(2)}, folder / "ddp.pt")
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, folder / "stranger.pt")
    (folder / "adapter").mkdir()
    pair = {"lora_A": rng.standard_normal((2, 4)), "lora_B": rng.standard_normal((4, 2))}
    prefix = "base_model.model.layer0"
    tensors = {f"{prefix}.{kind}.weight": values.astype(np.float32) for kind, values in pair.items()}
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    for step in range(1, 5):
        torch.save({"model": {"w": torch.full((8,), float(step))}, "step": step}, folder / "saved.pt")
        assert ckpt("append", folder / "saved.chain", folder / "saved.pt", "--step", step).code == 0
    return folder


def test_the_page_has_thirty_tasks_of_a_few_lines() -> None:
    listed = list(tasks())
    assert [number for number, _, _ in listed] == list(range(1, len(listed) + 1))
    assert len(listed) >= 30
    for number, _, blocks in listed:
        assert len(blocks) == 1, number
        assert len([line for line in blocks[0][1].splitlines() if line]) <= _MOST_LINES, number
    assert STYLES


def test_every_task_is_done(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the page: some tasks go on with what others wrote."""
    monkeypatch.chdir(here)
    for number, title, ((kind, text),) in tasks():
        if kind == "python":
            exec(compile(text, f"task {number}", "exec"), {})
            assert capsys.readouterr().out.strip(), title
            continue
        for line in text.splitlines():
            assert line.startswith("$ ckpt "), line
            words = shlex.split(line.removeprefix("$ ckpt "))
            done = ckpt(*words)
            assert done.code == 0 or (words[0] == "diff" and done.code == 1), (number, line, done.err)
            assert done.out, line
            if words[0] in _WRITES and "--dry-run" not in words:
                target = [word for word in words[1:] if not word.startswith("-")]
                places = [Path(word) for word in target[1:] if Path(word).exists()]
                assert places, line
                assert all(open_checkpoint(place).parameters for place in places if place.suffix != ".chain")


def test_tasks_do_what_the_page_promises(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the tasks are done: what went along, and what is gone."""
    monkeypatch.chdir(here)
    if not Path("step5").exists():
        pytest.skip("the tasks were not run before")
    assert Path("resumed/checkpoint-500/trainer_state.json").is_file()
    assert "exp_avg" in open_checkpoint(Path("fsdp2")).parameters["head.weight"].states
    assert "exp_avg" in open_checkpoint(Path("to-megatron")).parameters["embedding.word_embeddings.weight"].states
    assert Path("to-hf/config.json").is_file()
    assert set(open_checkpoint(Path("clean.pt")).parameters) == {"layer0.weight", "layer1.weight"}
    assert set(open_checkpoint(Path("renamed.pt")).parameters) == {"blocks.0.weight", "blocks.1.weight"}
    assert open_checkpoint(Path("step5")).step == 5
    assert ckpt("diff", "model.safetensors", "again.safetensors").code == 0
    assert Path("again.safetensors").read_bytes() == Path("model.safetensors").read_bytes()
    assert ckpt("diff", "run.chain@10", "run.chain@12", "--only", "^frozen", "--tensors-only").code == 0
