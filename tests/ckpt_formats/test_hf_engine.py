"""Folders of Hugging Face's libraries, against these libraries: what they saved is read, what we write they load."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt.findings import find_problems
from ckpt.job import Job, save
from ckpt.pipeline import Execution, check_complete
from ckpt_formats.core.checkpoint import MODEL, Checkpoint
from ckpt_formats.core.edits import cast
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.tensor import read
from ckpt_formats.core.values import Record, TensorName
from ckpt_formats.names.config import configured_model
from ckpt_formats.registry import writable
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from engines import launch
from hf_jobs.models import MODELS, STEPS
from trained import once

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

JOBS = Path(__file__).parents[1] / "jobs" / "hf_jobs"
TRAINED = ("llama_tied", "gpt2", "qwen3")


@pytest.fixture(scope="module")
def samples() -> Path:
    """What the libraries saved: see `hf_jobs/make.py`."""
    return once(JOBS.name, "made", lambda out: launch.run_script(JOBS / "make.py", [str(out), "deepspeed"], 4))


def raw(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


def held(source: Checkpoint, name: str, state: str = MODEL) -> tuple[str, tuple[int, ...], bytes]:
    values = read(source.parameters[name].states[state])
    return values.dtype.name, values.shape, values.tobytes()


def weights(source: Checkpoint) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    check_complete(source)
    return {name: held(source, name) for name, p in source.parameters.items() if p.role != "extra"}


def truth(samples: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = torch.load(samples / "truth" / f"{name}.pt")
    return result


def stored(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: raw(tensor) for name, tensor in state.items()}


def say(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


# Models


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("part", ["models", "sharded"])
def test_a_saved_model_is_read_bit_for_bit(part: str, name: str, samples: Path) -> None:
    folder = samples / part / name
    assert detect(folder).name == "hf"
    checkpoint = open_checkpoint(folder)
    files = sorted(folder.glob("*.safetensors"))
    assert weights(checkpoint) == stored({n: t for file in files for n, t in load_file(file).items()})
    state = truth(samples, name)["state"]
    same = {n: value for n, value in weights(checkpoint).items() if n in state}
    assert same == stored({n: state[n] for n in same})
    assert {*checkpoint.parameters, *checkpoint.aliases} == set(state) or name == "mixtral"
    assert checkpoint.extras["hf/config.json"] == say(folder, "config.json")
    assert not checkpoint.notices
    assert (len(files) == 1) == (part == "models")


@pytest.mark.parametrize("name", MODELS)
def test_the_tables_know_the_names_of_a_model_in_its_own_order(name: str, samples: Path) -> None:
    config = say(samples / "models" / name, "config.json")
    configured = configured_model(config)
    assert configured is not None
    tie, model = configured.tie, truth(samples, name)
    assert bool(tie) == (model["state"].keys() > set(model["names"]))
    in_files, in_memory = configured.names("hf"), configured.names("hf_memory")
    assert [n for n in in_memory or () if tie is None or n != tie.alias] == model["names"]
    files = load_file(samples / "models" / name / "model.safetensors")
    assert {n for n in in_files or () if tie is None or n != tie.alias} == set(files)


def test_shards_of_torch_are_read_by_their_index(samples: Path) -> None:
    checkpoint = open_checkpoint(samples / "bin")
    state = truth(samples, "llama_tied")["state"]
    assert len(checkpoint.files) > 3
    assert checkpoint.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert weights(checkpoint) == stored({n: t for n, t in state.items() if n != "lm_head.weight"})
    assert len(checkpoint.seals) > len(checkpoint.parameters)
    assert not list(find_problems(checkpoint, Execution(2)))


# Runs


def assert_is_the_optimizer(actual: Checkpoint, expected: Mapping[str, Any]) -> None:
    for name, states in expected["states"].items():
        for state, tensor in states.items():
            assert held(actual, name, state) == raw(tensor), (name, state)
        assert set(actual.parameters[name].states) == {*states, MODEL}
        assert held(actual, name) == raw(expected["weights"][name])
    assert [list(group.names) for group in actual.groups] == [group["names"] for group in expected["groups"]]
    for group, group_fields in zip(actual.groups, expected["groups"], strict=True):
        assert {key: group.options[key] for key in ("lr", "weight_decay", "betas")} == {
            key: group_fields[key] for key in ("lr", "weight_decay", "betas")
        }


@pytest.mark.parametrize("name", TRAINED)
def test_the_trainers_optimizer_is_told_to_the_names_of_the_model(name: str, samples: Path) -> None:
    folder = samples / "trainer" / name / f"checkpoint-{STEPS}"
    checkpoint = open_checkpoint(folder)
    check_complete(checkpoint)
    assert len(checkpoint.groups) == 2
    assert_is_the_optimizer(checkpoint, torch.load(folder.parent / "optimizer.truth.pt"))
    assert checkpoint.origin.step == STEPS
    assert not checkpoint.notices
    assert checkpoint.extras["hf/trainer_state.json"] == say(folder, "trainer_state.json")
    assert checkpoint.extras["hf/scheduler.pt"]["last_epoch"] == STEPS
    arguments = checkpoint.extras["hf/training_args.bin"]
    assert isinstance(arguments, Record)
    assert arguments.get("weight_decay") == 0.1
    random = checkpoint.extras["hf/rng_state.pth"]
    assert isinstance(random["cpu"], TensorName)
    assert held(checkpoint, random["cpu"].name) == raw(torch.load(folder / "rng_state.pth", weights_only=False)["cpu"])
    assert not list(find_problems(checkpoint, Execution(2)))


def test_an_adapter_is_read_and_its_optimizer_when_its_order_is_given(samples: Path) -> None:
    folder = samples / "peft" / f"checkpoint-{STEPS}"
    checkpoint = open_checkpoint(folder)
    assert weights(checkpoint) == stored(load_file(folder / "adapter_model.safetensors"))
    assert checkpoint.extras["hf/adapter_config.json"] == say(folder, "adapter_config.json")
    assert checkpoint.origin.step == STEPS
    assert checkpoint.groups == ()
    assert "--param-order" in " ".join(map(str, checkpoint.notices))
    assert set(checkpoint.extras["hf/optimizer.pt"]["state"]) == set(range(8))
    expected = torch.load(folder.parent / "optimizer.truth.pt")
    for part in ("states", "weights"):
        expected[part] = {name.replace(".default", ""): value for name, value in expected[part].items()}
    for group in expected["groups"]:
        group["names"] = [name.replace(".default", "") for name in group["names"]]
    order = tuple(name for group in expected["groups"] for name in group["names"])
    assert_is_the_optimizer(open_checkpoint(folder, ReadOptions(order=order)), expected)


def test_parameter_order_is_never_guessed_without_a_configuration(samples: Path) -> None:
    """The names are in the order of the alphabet, in which shapes would fit other parameters."""
    checkpoint, expected = open_checkpoint(samples / "accelerate"), torch.load(samples / "accelerate.0.truth.pt")
    assert checkpoint.groups == ()
    assert all(set(p.states) == {MODEL} for p in checkpoint.parameters.values())
    assert "--param-order" in " ".join(map(str, checkpoint.notices))
    assert checkpoint.extras["hf/custom_checkpoint_0.pkl"]["count"] == 3
    assert checkpoint.extras["hf/scheduler.bin"]["last_epoch"] == 4
    order = tuple(expected["groups"][0]["names"])
    ordered = open_checkpoint(samples / "accelerate", ReadOptions(order=order))
    check_complete(ordered)
    assert_is_the_optimizer(ordered, expected)


def test_states_of_accelerate_get_names_by_the_configuration_beside_them(samples: Path, tmp_path: Path) -> None:
    for file in [*(samples / "accelerate").iterdir(), samples / "models" / "llama" / "config.json"]:
        (tmp_path / file.name).symlink_to(file)
    checkpoint = open_checkpoint(tmp_path)
    assert_is_the_optimizer(checkpoint, torch.load(samples / "accelerate.0.truth.pt"))
    assert not checkpoint.notices


def test_further_models_of_several_are_carried(samples: Path) -> None:
    checkpoint = open_checkpoint(samples / "two")
    first, second = (torch.load(samples / f"two.{i}.truth.pt") for i in (0, 1))
    expected = {n: t for n, t in first["weights"].items() if n != "lm_head.weight"}
    assert weights(checkpoint) == stored(expected)
    further = checkpoint.extras["hf/model_1.safetensors"]
    assert {n: held(checkpoint, place.name) for n, place in further.items()} == stored(second["weights"])
    assert set(checkpoint.extras["hf/optimizer_1.bin"]["state"]) == set(range(len(second["states"])))


def test_full_state_dicts_of_fsdp_name_their_parameters(samples: Path) -> None:
    checkpoint = open_checkpoint(samples / "fsdp_full")
    check_complete(checkpoint)
    assert_is_the_optimizer(checkpoint, torch.load(samples / "fsdp_full.truth.pt"))
    assert not checkpoint.notices


def test_a_cut_model_in_a_trainers_folder_is_read_with_all_that_is_around(samples: Path) -> None:
    assert detect(samples / "distcp").name == "hf"
    checkpoint = open_checkpoint(samples / "distcp")
    check_complete(checkpoint)
    assert_is_the_optimizer(checkpoint, torch.load(samples / "distcp.truth.pt"))
    assert checkpoint.origin.step == STEPS
    around = ("config.json", "generation_config.json", "trainer_state.json", "scheduler.pt", "rng_state.pth")
    assert {f"hf/{name}" for name in (*around, "training_args.bin")} <= set(checkpoint.extras)
    assert not checkpoint.notices
    assert not list(find_problems(checkpoint, Execution(2)))


@pytest.mark.parametrize("name", ["ranks", "consolidated", "consolidated/sharded"])
def test_shards_of_ranks_are_joined(name: str, samples: Path) -> None:
    """Among it a number without axes, which PyTorch's own consolidation turns into zero."""
    assert detect(samples / name).name == "hf"
    checkpoint = open_checkpoint(samples / name)
    assert weights(checkpoint) == stored(torch.load(samples / "ranks.truth.pt"))


def test_a_trainers_folder_goes_into_the_universal_format_and_back(samples: Path, tmp_path: Path) -> None:
    folder = samples / "trainer" / "llama_tied" / f"checkpoint-{STEPS}"
    source = open_checkpoint(folder)
    save(source, tmp_path / "universal", writable("universal"))
    middle = open_checkpoint(tmp_path / "universal")
    assert_is_the_optimizer(middle, torch.load(folder.parent / "optimizer.truth.pt"))
    save(middle, tmp_path / "hf", writable("hf"))
    made_of_it = open_checkpoint(tmp_path / "hf")
    assert weights(made_of_it) == weights(source)
    assert made_of_it.aliases == source.aliases
    assert (tmp_path / "hf" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


# Writing


def write(source: Checkpoint, target: Path, **options: Any) -> list[str]:
    """Write a folder; the notes of its plan."""
    job = Job(source, target, writable("hf", **options))
    job.run(resources=Execution())
    return [str(note) for note in job.plan().notes]


def wrapped(source: Checkpoint, prefix: str) -> Checkpoint:
    parameters = {f"{prefix}{n}": replace(p, name=f"{prefix}{n}") for n, p in source.parameters.items()}
    aliases = {f"{prefix}{alias}": f"{prefix}{name}" for alias, name in source.aliases.items()}
    return replace(source, parameters=parameters, aliases=aliases, extras={})


@pytest.fixture(scope="module")
def loaded(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What transformers says of folders that we wrote, by what they are made of."""
    out, jobs = tmp_path_factory.mktemp("ours"), []

    def job(name: str, source: Checkpoint, truth: Path, **goal: Any) -> None:
        remarks = write(source, out / name, **goal)
        (out / f"{name}.remarks").write_text(json.dumps(remarks))
        jobs.append({"folder": out / name, "truth": truth, "report": out / f"{name}.json"})

    for name in MODELS:
        expected = samples / "truth" / f"{name}.pt"
        source, folder = open_checkpoint(samples / "models" / name), samples / "models" / name
        job(name, source, expected)
        job(f"{name}_sharded", source, expected, shard_nbytes=20_000)
        saved = out / f"{name}.pt"
        torch.save({f"module.{n}": t for n, t in torch.load(expected)["state"].items()}, saved)
        job(f"{name}_from_torch", open_checkpoint(saved), expected, config=folder)
    tied = open_checkpoint(samples / "models" / "llama_tied")
    for prefix in WRAPPED:
        named = f"llama_tied_{prefix}"
        job(named, wrapped(tied, prefix), samples / "truth" / "llama_tied.pt", config=samples / "models" / "llama_tied")
    save(tied, out / "universal", writable("universal"))
    job("llama_tied_from_universal", open_checkpoint(out / "universal"), samples / "truth" / "llama_tied.pt")
    engine = open_checkpoint(samples / "deepspeed")
    assert len(engine.groups[0].names) == len(engine.parameters)
    config = samples / "deepspeed.config" / "config.json"
    job("llama_tied_from_deepspeed", engine, samples / "deepspeed.truth.pt", config=config)
    (out / "jobs.json").write_text(json.dumps(jobs, default=str))
    launch.run_script(JOBS / "load.py", [str(out / "jobs.json")], 2)
    return {
        Path(one["folder"]).name: json.loads(Path(one["report"]).read_text())
        | {"remarks": say(out, f"{Path(one['folder']).name}.remarks")}
        for one in jobs
    }


WRAPPED = ("module.model.", "_orig_mod.", "module._orig_mod.")
SOURCES = [
    *(f"{name}{how}" for name in MODELS for how in ("", "_sharded", "_from_torch")),
    *(f"llama_tied_{how}" for how in (*WRAPPED, "from_universal", "from_deepspeed")),
]


@pytest.mark.parametrize("name", SOURCES)
def test_transformers_loads_what_we_write(name: str, loaded: dict[str, dict[str, Any]]) -> None:
    report = loaded[name]
    assert {key: report[key] for key in ("missing", "unexpected", "mismatched", "unlike", "logits")} == {
        "missing": [],
        "unexpected": [],
        "mismatched": [],
        "unlike": [],
        "logits": True,
    }
    assert not any("missing" in remark or "not in the model" in remark for remark in report["remarks"])
    assert any("stacks of experts are divided" in remark for remark in report["remarks"]) == (
        name == "mixtral_from_torch"
    )


def test_stacks_of_experts_are_taken_apart_as_transformers_does_it(samples: Path, tmp_path: Path) -> None:
    torch.save({f"module.{n}": t for n, t in truth(samples, "mixtral")["state"].items()}, tmp_path / "running.pt")
    write(open_checkpoint(tmp_path / "running.pt"), tmp_path / "out", config=samples / "models" / "mixtral")
    theirs = load_file(samples / "models" / "mixtral" / "model.safetensors")
    assert stored(load_file(tmp_path / "out" / "model.safetensors")) == stored(theirs)


def test_transformers_rounds_to_the_type_that_the_configuration_says_so_it_says_the_weights(
    samples: Path, tmp_path: Path
) -> None:
    source = cast(open_checkpoint(samples / "models" / "llama"), "bf16")
    remarks = write(source, tmp_path / "out")
    assert say(tmp_path / "out", "config.json")["dtype"] == "bfloat16"
    assert any("bfloat16" in remark for remark in remarks)
