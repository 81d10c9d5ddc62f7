"""Files of each rank, as PyTorch itself writes them, in every form that is small: put together, or refused in words."""

import shutil
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ckpt.findings import find_problems
from ckpt.pipeline import Execution, check_complete
from ckpt_cli.main import cli
from ckpt_formats.containers.torchfile import TensorRef, open_file
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.tensor import read
from ckpt_formats.core.values import Global, Record, Size
from ckpt_formats.engines.fsdp_ranks import FsdpRanks
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from effort import examples
from rank_files import edit, rows, spread, write

WEIGHT = torch.arange(35.0).reshape(7, 5)


def value(checkpoint: Checkpoint, name: str = "w") -> np.ndarray:
    check_complete(checkpoint)
    return read(checkpoint.parameters[name].weight)


def is_weight(checkpoint: Checkpoint, name: str = "w") -> bool:
    return np.array_equal(value(checkpoint, name), WEIGHT.numpy())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks: a matrix cut by rows, a replicated vector, an optimizer by name, something of each rank's own."""

    def model(rank: int) -> dict[str, Any]:
        return {"w": rows(WEIGHT, 2), "b": torch.ones(3), "note": "a"}

    def optim(rank: int) -> dict[str, Any]:
        state = {"step": torch.tensor(5.0), "exp_avg": rows(WEIGHT + 1, 2)}
        return {"state": {"w": state}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}

    return write(tmp_path / "run", 2, model=model, optim=optim, extra_state=lambda rank: {"rng": rank, "epoch": 3})


def records(value: Any, cls: str, seen: set[int] | None = None) -> Iterator[Record]:
    """Every record of a class, in the order of the pickle."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: list[Any] = []
    if isinstance(value, Record):
        if value.cls.name == cls:
            yield value
        inner = [value.args, value.state]
    elif isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    for one in inner:
        yield from records(one, cls, seen)


def change(path: Path, cls: str, alter: Callable[[Record], None]) -> None:
    """Alter every record of a class in a file."""

    def every(root: Any) -> None:
        for record in list(records(root, cls)):
            alter(record)

    edit(path, every)


def put(name: str, value: Any) -> Callable[[Record], None]:
    """Set an attribute."""

    def alter(record: Record) -> None:
        record.state = {**record.state, name: value}

    return alter


# --- put together


@st.composite
def cuts(draw) -> tuple[torch.Tensor, np.ndarray, list[Placement]]:
    """A tensor, a mesh with its ranks in any order, and placements."""
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    mesh = np.array(draw(st.permutations(range(prod(sizes))))).reshape(sizes)
    axes = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    placements = [Replicate() if axis is None else Shard(axis) for axis in draw(st.tuples(*(axes for _ in sizes)))]
    return torch.arange(float(prod(shape))).reshape(shape), mesh, placements


@given(cuts())
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_fsdp_ranks_joins_tensors_that_torch_distributed(tmp_path_factory, cut):
    tensor, mesh, placements = cut
    folder = tmp_path_factory.mktemp("cut")
    write(folder, mesh.size, model=lambda rank: {"w": spread(tensor, mesh.tolist(), placements)})
    checkpoint = open_checkpoint(folder)
    assert np.array_equal(value(checkpoint), tensor.numpy())
    assert find_problems(checkpoint, Execution(1)) == []
    whole_on = prod(n for n, placement in zip(mesh.shape, placements, strict=True) if placement.is_replicate())
    assert len(checkpoint.parameters["w"].weight.replicas) == whole_on - 1
    shutil.rmtree(folder)


def test_a_slice_of_a_mesh_is_the_mesh_of_the_ranks_that_are_in_it(tmp_path):
    """Every slice of a mesh shares the list of all ranks; which of them are meant, a rank's own place tells."""

    def model(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 2, 3), mesh_dim_names=("pp", "dp", "tp"))
        both = mesh["dp", "tp"]._flatten("both")
        sliced = {name: spread_on(WEIGHT, mesh[name], [Shard(0)]) for name in ("pp", "dp", "tp")}
        return {
            **sliced,
            "two": spread_on(WEIGHT, mesh["pp", "tp"], [Shard(0), Shard(1)]),
            "both": spread_on(WEIGHT, both, [Shard(0)]),
        }

    checkpoint = open_checkpoint(write(tmp_path, 12, model=model))
    for name, copies in {"pp": 6, "dp": 6, "tp": 4, "two": 2, "both": 2}.items():
        assert is_weight(checkpoint, name)
        assert len(checkpoint.parameters[name].weight.replicas) == copies - 1
        assert find_problems(checkpoint, Execution(1)) == []


def spread_on(tensor: torch.Tensor, mesh: Any, placements: list[Placement]) -> DTensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def test_fsdp_ranks_reads_half_precision_odd_strides_and_scalars(tmp_path):
    tensors = {
        "half": WEIGHT.to(torch.bfloat16),
        "bits": torch.arange(6, dtype=torch.int16),
        "turned": WEIGHT.t(),
        "scalar": torch.tensor(3.5),
    }

    def model(rank: int) -> dict[str, Any]:
        cut = {name: rows(tensor, 3) for name, tensor in tensors.items() if tensor.dim()}
        return {**cut, "scalar": spread(tensors["scalar"], [0, 1, 2], [Replicate()])}

    checkpoint = open_checkpoint(write(tmp_path, 3, model=model))
    for name, tensor in tensors.items():
        assert value(checkpoint, name).astype(np.float64).tolist() == tensor.to(torch.float64).tolist()
    assert checkpoint.parameters["half"].weight.dtype.name == "bfloat16"


def test_fsdp_ranks_takes_a_parameter_as_a_tensor(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path, 1, model=lambda rank: {"w": torch.nn.Parameter(rows(WEIGHT, 1))}))
    assert is_weight(checkpoint)


def test_fsdp_ranks_reads_meshes_of_older_releases(folder):
    """Until 2.9 the ranks as one tensor; until 2.10 sizes and strides in two tuples, or two numbers."""

    def as_tensor(record: Record) -> None:
        state = {key: value for key, value in record.state.items() if key not in ("_layout", "_rank_map")}
        record.state = {**state, "mesh": record.state["_rank_map"]}

    def as_tuples(record: Record) -> None:
        record.state["_layout"].state = {"shape": (2,), "stride": (1,)}

    def as_numbers(record: Record) -> None:
        record.state["_layout"].state = {"shape": 2, "stride": 1}

    for form in (as_numbers, as_tuples, as_tensor):
        for rank in range(2):
            change(folder / f"model_world_size_2_rank_{rank}.pt", "DeviceMesh", form)
        assert is_weight(open_checkpoint(folder))


def test_fsdp_ranks_follows_the_order_of_a_spec(tmp_path):
    """Dimension 1 of the mesh cuts the rows first, then dimension 0: rank 1 holds what rank 2 would."""
    held = {0: WEIGHT[:2].clone(), 1: WEIGHT[4:6].clone(), 2: WEIGHT[2:4].clone(), 3: WEIGHT[6:].clone()}

    def model(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 2))
        return {
            "w": DTensor.from_local(
                held[rank], mesh, [Shard(0), Shard(0)], run_check=False, shape=WEIGHT.shape, stride=(5, 1)
            )
        }

    write(tmp_path, 4, model=model)
    assert not is_weight(open_checkpoint(tmp_path))

    def turned(record: Record) -> None:
        (entry,) = record.state["shard_order"]
        entry.args = (0, (1, 0))

    for rank in range(4):
        change(tmp_path / f"model_world_size_4_rank_{rank}.pt", "DTensorSpec", turned)
    assert is_weight(open_checkpoint(tmp_path))


def test_fsdp_ranks_reads_the_optimizer_and_extras(folder):
    checkpoint = open_checkpoint(folder)
    states = checkpoint.parameters["w"].states
    assert read(states["exp_avg"]).tolist() == (WEIGHT + 1).tolist()
    assert read(states["step"]).item() == 5
    assert checkpoint.groups[0].options == {"lr": 0.1}
    assert checkpoint.groups[0].names == ("w",)
    assert checkpoint.extras["epoch"] == 3
    assert checkpoint.extras["rng"] == 0
    assert checkpoint.extras["ranks"] == {"1": {"rng": 1}}
    assert checkpoint.extras["note"] == "a"
    assert checkpoint.parameters["b"].role == "frozen"


def test_vectors_of_an_optimizer_are_no_slices_where_every_rank_has_all_of_the_model(tmp_path):
    def optim(rank: int) -> dict[str, Any]:
        states = {i: {"exp_avg": torch.arange(3.0) + i} for i in range(2)}
        return {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}

    checkpoint = open_checkpoint(
        write(tmp_path, 2, model=lambda rank: {"a": torch.ones(3), "b": torch.zeros(3)}, optim=optim)
    )
    assert [read(checkpoint.parameters[name].states["exp_avg"]).tolist() for name in "ab"] == [[0, 1, 2], [1, 2, 3]]


def test_tensors_in_lists_of_an_optimizer_are_put_together(tmp_path):
    def optim(rank: int) -> dict[str, Any]:
        state = {"step": 5, "Q": [rows(WEIGHT, 2), torch.eye(5)], "betas": (0.9, 0.99)}
        return {"state": {"w": state}, "param_groups": [{"lr": torch.tensor(0.5), "params": ["w"]}]}

    checkpoint = open_checkpoint(write(tmp_path, 2, model=lambda rank: {"w": rows(WEIGHT, 2)}, optim=optim))
    values = checkpoint.parameters["w"].values
    one, other = (checkpoint.parameters[name.name].weight for name in values["Q"])
    assert np.array_equal(read(one), WEIGHT.numpy())
    assert read(other).tolist() == np.eye(5).tolist()
    assert values["step"] == 5
    assert len(other.replicas) == 1


def test_an_extra_state_of_the_name_of_the_optimizer_hides_nothing(folder):
    for rank in range(2):
        edit(folder / f"extra_state_world_size_2_rank_{rank}.pt", lambda root: {"optim": "adam", "rng": 1})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.groups
    assert checkpoint.extras["extra_state"] == {"optim": "adam", "rng": 1}


def test_averages_beside_a_model_are_put_together_from_sharded_tensors(tmp_path):
    """Of FSDP1, whose blocks are no DTensors."""
    write(tmp_path, 3, model=lambda rank: {"model": {"w": sharded(rank)}, "ema": {"w": sharded(rank)}})
    checkpoint = open_checkpoint(tmp_path)
    assert is_weight(checkpoint)
    (name,) = checkpoint.parameters.keys() - {"w"}
    assert is_weight(checkpoint, name)


def test_values_that_differ_between_the_models_of_ranks_are_carried_for_each(tmp_path):
    checkpoint = open_checkpoint(
        write(tmp_path, 2, model=lambda rank: {"w": rows(WEIGHT, 2), "_extra_state": b"%d" % rank})
    )
    assert checkpoint.extras["ranks"] == {
        "0": {"model": {"_extra_state": b"0"}},
        "1": {"model": {"_extra_state": b"1"}},
    }


def test_stages_of_a_pipeline_each_have_their_own_tensors(tmp_path):
    """What a rank does not have is not missing, if the mesh of the tensor is of other ranks."""

    def model(rank: int) -> dict[str, Any]:
        mesh = [0, 1] if rank < 2 else [2, 3]
        return {f"stage{rank // 2}.w": spread(WEIGHT, mesh, [Shard(0)]), f"stage{rank // 2}.b": torch.ones(2)}

    checkpoint = open_checkpoint(write(tmp_path, 4, model=model))
    assert is_weight(checkpoint, "stage0.w")
    assert is_weight(checkpoint, "stage1.w")


def test_an_extra_state_that_looks_like_a_model_is_no_model(tmp_path):
    def extra(rank: int) -> dict[str, Any]:
        return {"model": {"x": torch.zeros(2)}, "optimizer": {"state": {}, "param_groups": []}}

    checkpoint = open_checkpoint(write(tmp_path, 2, model=lambda rank: {"w": rows(WEIGHT, 2)}, extra_state=extra))
    assert is_weight(checkpoint)
    assert checkpoint.extras["extra_state"]["optimizer"] == {"state": {}, "param_groups": []}


def test_notes_name_other_files_in_the_folder(folder):
    (folder / "fsdp_config.json").write_text("{}")
    assert [str(notice) for notice in open_checkpoint(folder).notices] == [
        "in the folder of the checkpoint, and not read: fsdp_config.json"
    ]


def test_shapes_are_given_on_the_command_line(tmp_path):
    write(tmp_path / "run", 2, model=lambda rank: flat(rank, 2, {"w": WEIGHT}))
    torch.save({"w": WEIGHT * 0}, tmp_path / "other.pt")
    result = CliRunner().invoke(cli, ["inspect", str(tmp_path / "run"), "--shapes", str(tmp_path / "other.pt")])
    assert "w  [7, 5] float32" in result.stdout
    with pytest.raises(UnsupportedError):
        CliRunner().invoke(cli, ["inspect", str(tmp_path / "run")], catch_exceptions=False)


def test_an_optimizer_state_that_is_no_dict_is_carried(tmp_path):
    """A plain number among the states of an optimizer says nothing of slices."""

    def optim(rank: int) -> dict[str, Any]:
        return {"state": {"w": {"exp_avg": rows(WEIGHT, 2)}, "seen": 7}, "param_groups": [{"params": ["w"]}]}

    checkpoint = open_checkpoint(write(tmp_path, 2, model=lambda rank: {"w": rows(WEIGHT, 2)}, optim=optim))
    assert is_weight(checkpoint)


# --- refused


def test_file_of_one_rank_alone_is_refused(folder):
    file = folder / "model_world_size_2_rank_0.pt"
    assert isinstance(detect(file), FsdpRanks)
    with pytest.raises(UnsupportedError, match="one rank of several"):
        open_checkpoint(file)


def test_error_names_the_first_part_in_the_file_of_one_rank(tmp_path):
    write(tmp_path, 2, model=lambda rank: {"a": {"x": rows(WEIGHT, 2)}, "b": rows(WEIGHT, 2)})
    alone = (tmp_path / "model_world_size_2_rank_0.pt").rename(tmp_path / "part.pt")
    with pytest.raises(UnsupportedError, match=r"rank of 2: `a\.x` is a block of a DTensor"):
        open_checkpoint(alone)


def test_fsdp_ranks_names_a_missing_rank(folder):
    (folder / "optim_world_size_2_rank_1.pt").unlink()
    with pytest.raises(IncompleteError, match="optimizer file of rank 1"):
        open_checkpoint(folder)


def test_fsdp_ranks_names_missing_files_of_the_model(folder):
    for rank in range(2):
        (folder / f"model_world_size_2_rank_{rank}.pt").unlink()
    with pytest.raises(IncompleteError, match="model's files"):
        open_checkpoint(folder)


def test_fsdp_ranks_refuses_files_of_another_world_size(folder):
    shutil.copy(folder / "model_world_size_2_rank_0.pt", folder / "model_world_size_4_rank_0.pt")
    with pytest.raises(CorruptError, match="several world sizes are in one folder: 6 of 2 ranks; 1 of 4 ranks"):
        open_checkpoint(folder)


def test_fsdp_ranks_refuses_a_rank_beyond_the_world(folder):
    shutil.copy(folder / "model_world_size_2_rank_0.pt", folder / "model_world_size_2_rank_2.pt")
    with pytest.raises(CorruptError, match="is of rank 2, but there are 2 ranks"):
        open_checkpoint(folder)


def test_fsdp_ranks_refuses_absurd_numbers_in_names(tmp_path):
    (tmp_path / "model_world_size_999999999_rank_0.pt").touch()
    with pytest.raises(UnsafeError, match="999,999,999 ranks"):
        open_checkpoint(tmp_path)
    (tmp_path / "model_world_size_999999999_rank_0.pt").unlink()
    (tmp_path / "pytorch_model_fsdp_0_rank999999999.bin").touch()
    with pytest.raises(UnsafeError, match="1,000,000,000 ranks"):
        open_checkpoint(tmp_path)


def test_fsdp_ranks_refuses_two_ways_of_saving(folder):
    shutil.copy(folder / "model_world_size_2_rank_0.pt", folder / "pytorch_model_fsdp_0_rank0.bin")
    with pytest.raises(CorruptError, match="two ways of saving"):
        open_checkpoint(folder)


def test_fsdp_ranks_refuses_two_names_of_one_rank(folder, tmp_path):
    for name in ("pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_rank0.bin"):
        shutil.copy(folder / "model_world_size_2_rank_0.pt", tmp_path / name)
    with pytest.raises(CorruptError, match="both of rank 0"):
        open_checkpoint(tmp_path)


def test_world_size_is_that_of_the_mesh_when_names_do_not_state_it(folder, tmp_path):
    shutil.copy(folder / "model_world_size_2_rank_0.pt", tmp_path / "pytorch_model_fsdp_0_rank0.bin")
    with pytest.raises(CorruptError, match="rank 1 lacks it"):
        open_checkpoint(tmp_path)


def test_fsdp_ranks_notes_a_further_model(folder, tmp_path):
    for rank in range(2):
        for number in range(2):
            name = f"pytorch_model_fsdp_{number}_rank{rank}.bin"
            shutil.copy(folder / f"model_world_size_2_rank_{rank}.pt", tmp_path / name)
    checkpoint = open_checkpoint(tmp_path)
    assert is_weight(checkpoint)
    assert any("model 1" in notice for notice in checkpoint.notices)


def test_files_of_two_ranks_that_changed_places_are_refused(folder):
    one, other = (folder / f"model_world_size_2_rank_{rank}.pt" for rank in range(2))
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)
    with pytest.raises(CorruptError, match="was saved as model_world_size_2_rank_1"):
        open_checkpoint(folder)


def test_a_file_of_a_rank_outside_the_mesh_is_refused(tmp_path):
    write(tmp_path, 3, model=lambda rank: {"w": rows(WEIGHT, 3)})
    for rank in range(3):
        shutil.move(tmp_path / f"model_world_size_3_rank_{rank}.pt", tmp_path / f"model_world_size_4_rank_{rank}.pt")
    shutil.copy(tmp_path / "model_world_size_4_rank_0.pt", tmp_path / "model_world_size_4_rank_3.pt")
    with pytest.raises(CorruptError, match="was saved as model_world_size_3_rank_0"):
        open_checkpoint(tmp_path)


def test_a_tensor_that_a_rank_of_its_mesh_lacks_is_named(folder):
    edit(folder / "model_world_size_2_rank_1.pt", lambda root: root.pop("w") and None)
    with pytest.raises(CorruptError, match=r"`w` is spread over .*, but rank 1 lacks it"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda rank: rows(WEIGHT[:, :4], 2), r"shape \[7, 4\]"),
        (lambda rank: rows(WEIGHT.to(torch.float64), 2), "float64"),
        (lambda rank: spread(WEIGHT, [0, 1], [Shard(1)]), r"Shard\(1\)"),
        (lambda rank: spread(WEIGHT, [0, 1], [Replicate()]), r"Replicate\(\)"),
        (lambda rank: spread(WEIGHT, [1, 0], [Shard(0)]), "."),
        (lambda rank: spread(WEIGHT, [[0], [1]], [Shard(0), Replicate()]), "."),
        (lambda rank: WEIGHT, "is a DTensor on rank 0, but a TensorRef on rank 1"),
        (lambda rank: "w", "a tensor on some ranks"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(tmp_path, other, message):
    write(tmp_path, 2, model=lambda rank: {"w": other(rank) if rank else rows(WEIGHT, 2)})
    with pytest.raises(CorruptError, match=message):
        open_checkpoint(tmp_path)


def test_fsdp_ranks_refuses_partial_sums(tmp_path):
    def model(rank: int) -> dict[str, Any]:
        return {"w": DTensor.from_local(WEIGHT, init_device_mesh("cpu", (2,)), [Partial()], run_check=False)}

    write(tmp_path, 2, model=model)
    with pytest.raises(UnsupportedError, match="placed as Partial"):
        open_checkpoint(tmp_path)


def test_a_local_tensor_that_is_not_what_the_placements_say_is_refused(folder):
    change(folder / "model_world_size_2_rank_0.pt", "TensorMeta", lambda record: None)

    def shorter(root: Any) -> None:
        state = root["w"].args[3][1]
        local: TensorRef = state["_local_tensor"]
        state["_local_tensor"] = TensorRef(local.storage, local.dtype, 0, (3, 5), (5, 1))

    edit(folder / "model_world_size_2_rank_0.pt", shorter)
    with pytest.raises(CorruptError, match=r"rank 0 should hold \[4, 5\] of it, and holds \[3, 5\]"):
        open_checkpoint(folder)


def test_replicas_are_never_joined_and_differences_are_found(tmp_path):
    """A plain tensor is all of it on every rank, whatever its values; that they agree is checked when they are read."""
    write(tmp_path, 2, model=lambda rank: {"w": rows(WEIGHT, 2), "b": torch.full((4,), float(rank))})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.parameters["b"].weight.shape == (4,)
    assert [(finding.kind, finding.tensors) for finding in find_problems(checkpoint, Execution(1))] == [
        ("replicas", ("b",))
    ]
    with pytest.raises(CorruptError, match="replicas"):
        read(checkpoint.parameters["b"].weight)


def test_equal_shards_are_not_taken_for_replicas(tmp_path):
    ones = torch.ones(8)
    checkpoint = open_checkpoint(write(tmp_path, 4, model=lambda rank: {"w": rows(ones, 4)}))
    assert value(checkpoint).tolist() == [1] * 8


def test_replicas_of_other_shapes_are_refused(tmp_path):
    write(tmp_path, 2, model=lambda rank: {"b": torch.ones(3 + rank)})
    with pytest.raises(CorruptError, match="should be the same on every rank"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("where", ["step", "lr", "params"])
def test_optimizers_of_different_steps_are_refused(tmp_path, where):
    def optim(rank: int) -> dict[str, Any]:
        state = {"step": torch.tensor(5.0 + (where == "step") * rank), "exp_avg": rows(WEIGHT, 2)}
        names = ["w", "b"] if where == "params" and rank else ["w"]
        return {"state": {"w": state}, "param_groups": [{"lr": 0.1 + (where == "lr") * rank, "params": names}]}

    write(tmp_path, 2, model=lambda rank: {"w": rows(WEIGHT, 2), "b": torch.ones(1)}, optim=optim)
    with pytest.raises(CorruptError, match=r"different steps|on rank 1"):
        open_checkpoint(tmp_path)


def test_schedulers_of_different_steps_are_refused(tmp_path):
    def extra(rank: int) -> dict[str, Any]:
        return {"lr_scheduler": {"last_epoch": 5 + rank}}

    write(tmp_path, 2, model=lambda rank: {"w": rows(WEIGHT, 2)}, extra_state=extra)
    with pytest.raises(CorruptError, match=r"counted to 5 in .*_rank_0\.pt, but to 6 here"):
        open_checkpoint(tmp_path)


def test_names_that_become_one_without_wrappers_are_refused(tmp_path):
    write(tmp_path, 1, model=lambda rank: {"a.w": torch.ones(2), "a._orig_mod.w": torch.ones(2)})
    with pytest.raises(CorruptError, match=r"two tensors are called `a\.w`"):
        open_checkpoint(tmp_path)


def test_names_of_modules_that_only_end_like_wrappers_stay(tmp_path):
    names = {"my_orig_mod.w", "module.w", "a.module.w"}
    checkpoint = open_checkpoint(write(tmp_path, 1, model=lambda rank: {name: torch.ones(2) for name in names}))
    assert checkpoint.parameters.keys() == names


def test_verify_finds_a_flipped_bit_of_a_rank(folder):
    checkpoint = open_checkpoint(folder)
    (raw, *_) = checkpoint.parameters["w"].weight.sources()
    data = bytearray(raw.path.read_bytes())
    data[raw.offset] ^= 1
    raw.path.write_bytes(data)
    (finding,) = find_problems(open_checkpoint(folder), Execution(1))
    assert (finding.kind, finding.tensors) == ("checksum", ("w",))


@pytest.mark.parametrize("endless", [False, True])
def test_dicts_nested_without_end_are_refused(tmp_path, endless):
    nested: dict[str, Any] = {}
    inner = nested
    for _ in range(60):
        inner["x"] = inner = {}
    if endless:
        inner["x"] = nested
    with pytest.raises(UnsafeError, match="without end"):
        open_checkpoint(write(tmp_path, 2, model=lambda rank: {"w": rows(WEIGHT, 2), "nested": nested}))


def test_dicts_repeated_without_end_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpt_formats.engines.fsdp_ranks.rank_file.MAX_VALUES", 1000)
    repeated: dict[str, Any] = {"x": 1}
    for _ in range(10):
        repeated = {"a": repeated, "b": repeated}
    with pytest.raises(UnsafeError, match="without end"):
        open_checkpoint(write(tmp_path, 1, model=lambda rank: {"w": rows(WEIGHT, 1), "repeated": repeated}))


@pytest.mark.parametrize(
    ("cls", "alter", "error"),
    [
        ("Shard", put("dim", 2), CorruptError),
        ("Shard", put("dim", -1), CorruptError),
        ("Shard", put("dim", "0"), CorruptError),
        ("DTensorSpec", put("placements", ()), CorruptError),
        ("DTensorSpec", put("shard_order", ()), CorruptError),
        ("DTensorSpec", put("mesh", None), CorruptError),
        ("DeviceMesh", lambda record: setattr(record, "cls", Global("other", "Mesh")), CorruptError),
        ("DeviceMesh", put("_rank_map", None), CorruptError),
        ("DeviceMesh", put("_layout", None), CorruptError),
        ("DeviceMesh", put("_coordinate_on_dim", (1, 1)), CorruptError),
        ("_FlatLayout", put("shape", (1 << 40,)), CorruptError),
        ("_FlatLayout", put("shape", (-1,)), CorruptError),
        ("_FlatLayout", put("stride", (7,)), CorruptError),
        ("_FlatLayout", put("stride", (0,)), CorruptError),
        ("TensorMeta", lambda record: setattr(record, "args", (Size((9, 9)), *record.args[1:])), CorruptError),
    ],
)
def test_specs_that_cannot_be_are_refused(folder, cls, alter, error):
    for rank in range(2):
        change(folder / f"model_world_size_2_rank_{rank}.pt", cls, alter)
    with pytest.raises(error):
        open_checkpoint(folder)


def test_a_tensor_of_an_unknown_class_is_refused_by_name(folder):
    def other(root: Any) -> None:
        record = root["w"]
        record.args = (record.args[0], Global("torchao.dtypes", "AffineQuantizedTensor"), *record.args[2:])

    edit(folder / "model_world_size_2_rank_0.pt", other)
    with pytest.raises(UnsupportedError, match="AffineQuantizedTensor"):
        open_checkpoint(folder)


# --- sharded tensors


BLOCKS = [([0, 0], [3, 5]), ([3, 0], [3, 5]), ([6, 0], [1, 5])]


def sharded(rank: int, blocks: list[tuple[list[int], list[int]]] = BLOCKS) -> ShardedTensor:
    """What a rank holds of the weight, where these are the blocks of the ranks in order."""
    every = [ShardMetadata(*block, f"rank:{i}/cpu") for i, block in enumerate(blocks)]
    metadata = ShardedTensorMetadata(every, WEIGHT.shape, TensorProperties(dtype=torch.float32))
    held = []
    if rank < len(blocks):
        index = tuple(slice(a, a + n) for a, n in zip(*blocks[rank], strict=True))
        held = [LocalShard(WEIGHT[index].clone(), every[rank])]
    return ShardedTensor._init_from_local_shards_and_global_metadata(held, metadata)


@pytest.fixture
def fsdp1(tmp_path: Path) -> Path:
    return write(tmp_path / "fsdp1", 3, model=lambda rank: {"w": sharded(rank)})


def test_fsdp_ranks_reads_sharded_tensors_where_they_lie(fsdp1):
    assert is_weight(open_checkpoint(fsdp1))


def test_fsdp_ranks_takes_a_rank_that_holds_nothing(tmp_path):
    assert is_weight(open_checkpoint(write(tmp_path, 4, model=lambda rank: {"w": sharded(rank)})))


def move(name: str, numbers: list[int]) -> Callable[[Record], None]:
    """Other offsets or sizes, for the blocks of the last rank."""

    def alter(record: Record) -> None:
        slots = record.state[1]
        if slots["shard_offsets"] == [6, 0] or slots["shard_sizes"] == [1, 5]:
            record.state = (None, {**slots, name: numbers})

    return alter


@pytest.mark.parametrize(
    ("numbers", "message"), [([5, 0], "overlap"), ([7, 0], "outside"), ([2, 0], "no file holds"), ([3, 0], "overlap")]
)
def test_blocks_that_do_not_tile_the_tensor_are_refused(fsdp1, numbers, message):
    for rank in range(3):
        change(fsdp1 / f"model_world_size_3_rank_{rank}.pt", "ShardMetadata", move("shard_offsets", numbers))
    with pytest.raises(CkptError, match=message):
        value(open_checkpoint(fsdp1))


@pytest.mark.parametrize(
    ("cls", "alter", "message"),
    [
        ("ShardMetadata", move("shard_offsets", [5, 0]), "other blocks"),
        ("ShardMetadata", move("shard_sizes", [2, 5]), "holds float32 of shape"),
        ("ShardMetadata", move("shard_sizes", [1]), "in a tensor of shape"),
        ("ShardMetadata", move("shard_sizes", [-1, 5]), "whole numbers"),
        ("ShardedTensorMetadata", put("size", Size((8, 5))), "another shape"),
        ("ShardedTensorMetadata", put("shards_metadata", []), "lists others"),
        ("ShardedTensor.ProcessGroupState", put("global_rank", 1), "written by rank 1"),
        ("ShardedTensor.ProcessGroupState", put("global_world_size", 4), "of 4"),
        ("ShardedTensor.ProcessGroupState", put("local_world_size", 0), "process group"),
        ("ShardedTensor.ProcessGroupState", put("local_world_size", 1), "process group of 1"),
        ("TensorProperties", lambda record: setattr(record, "state", (Global("torch", "int32"),)), "int32"),
    ],
)
def test_sharded_tensors_that_contradict_themselves_or_others_are_refused(fsdp1, cls, alter, message):
    change(fsdp1 / "model_world_size_3_rank_2.pt", cls, alter)
    with pytest.raises(CorruptError, match=message):
        open_checkpoint(fsdp1)


def test_fsdp_ranks_names_a_missing_shard(fsdp1):
    def empty(root: Any) -> None:
        record = root["w"]
        record.args = (*record.args[:3], ([], *record.args[3][1:]))

    edit(fsdp1 / "model_world_size_3_rank_1.pt", empty)
    with pytest.raises(CorruptError, match=r"block \[3:6, 0:5\] of \[7, 5\] is held by 0 ranks, not by 1"):
        open_checkpoint(fsdp1)


# --- flat parameters


def flat(rank: int, world: int, tensors: dict[str, torch.Tensor], *, views: bool = True) -> dict[str, Any]:
    """As FSDP1 with `use_orig_params` holds them: end to end, cut in equal parts, and a view of each."""
    whole = torch.cat([tensor.flatten() for tensor in tensors.values()])
    size = -(-len(whole) // world)
    part = whole[rank * size : (rank + 1) * size].clone()
    every = [ShardMetadata([i * size], [min(size, len(whole) - i * size)], f"rank:{i}/cpu") for i in range(world)]
    metadata = ShardedTensorMetadata(every, whole.shape, TensorProperties(dtype=torch.float32))
    held = ShardedTensor._init_from_local_shards_and_global_metadata([LocalShard(part, every[rank])], metadata)
    state: dict[str, Any] = {}
    begin = 0
    for name, tensor in tensors.items():
        low, high = (min(max(x - rank * size, 0), len(part)) for x in (begin, begin + tensor.numel()))
        state[name] = part[low:high] if views else part[low:high].clone()
        begin += tensor.numel()
    return {**state, "_flat_param": held}


def shapes_of(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> ReadOptions:
    torch.save(tensors, tmp_path / "shapes.pt")
    return ReadOptions(shapes=open_checkpoint(tmp_path / "shapes.pt"))


@given(st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=5), st.integers(1, 4), st.booleans())
@settings(max_examples=examples(25))
def test_fsdp_ranks_joins_slices_of_a_flat_parameter(tmp_path_factory, sizes, world, views):
    folder = tmp_path_factory.mktemp("flat")
    tensors = {f"p{i}": torch.rand(shape) for i, shape in enumerate(sizes)}
    while sum(map(torch.Tensor.numel, tensors.values())) < max(world * world, 2):  # so that each rank has some
        tensors[f"q{len(tensors)}"] = torch.rand(5)
    buffer = torch.rand(3)
    write(folder / "run", world, model=lambda rank: {"buffer": buffer, **flat(rank, world, tensors, views=views)})
    checkpoint = open_checkpoint(folder / "run", shapes_of(folder, {**tensors, "buffer": buffer}))
    for name, tensor in {**tensors, "buffer": buffer}.items():
        assert np.array_equal(value(checkpoint, name), tensor.numpy())
    assert set(checkpoint.parameters) == {*tensors, "buffer"}


def test_fsdp_ranks_refuses_a_vector_that_may_be_a_slice(tmp_path):
    """Copied apart from the flat parameter, nothing but its shape tells a slice from a buffer."""
    tensors = {"w": WEIGHT}
    write(tmp_path / "run", 2, model=lambda rank: flat(rank, 2, tensors, views=False))
    with pytest.raises(UnsupportedError, match="may be a buffer, or a slice") as caught:
        open_checkpoint(tmp_path / "run")
    assert "--shapes" in caught.value.hint
    assert is_weight(open_checkpoint(tmp_path / "run", shapes_of(tmp_path, tensors)))


def test_a_flat_parameter_without_views_needs_the_order(tmp_path):
    tensors = {"w": WEIGHT, "v": WEIGHT[0] + 9}

    def model(rank: int) -> dict[str, Any]:
        return {"_flat_param": flat(rank, 3, tensors)["_flat_param"]}

    write(tmp_path / "run", 3, model=model)
    options = shapes_of(tmp_path, dict(sorted(tensors.items())))
    with pytest.raises(UnsupportedError, match="40 elements, but the 0 known parameters") as caught:
        open_checkpoint(tmp_path / "run", options)
    assert "--param-order" in caught.value.hint
    checkpoint = open_checkpoint(tmp_path / "run", ReadOptions(order=("w", "v"), shapes=options.shapes))
    assert is_weight(checkpoint)
    assert np.array_equal(value(checkpoint, "v"), tensors["v"].numpy())


def test_slices_of_another_length_than_the_shape_are_refused(tmp_path):
    write(tmp_path / "run", 2, model=lambda rank: flat(rank, 2, {"w": WEIGHT}))
    with pytest.raises(CorruptError, match=r"35 elements, but shape \[6, 5\] has 30"):
        open_checkpoint(tmp_path / "run", shapes_of(tmp_path, {"w": WEIGHT[:6]}))


def test_states_of_an_optimizer_that_are_no_dict_state_no_shapes(tmp_path):
    def optim(rank: int) -> dict[str, Any]:
        return {"state": [], "param_groups": []}

    write(tmp_path / "run", 2, model=lambda rank: flat(rank, 2, {"w": WEIGHT}), optim=optim)
    with pytest.raises(UnsupportedError, match="without their shapes"):
        open_checkpoint(tmp_path / "run")


def test_a_flat_parameter_that_one_rank_has_as_a_plain_tensor_is_refused(tmp_path):
    write(tmp_path, 2, model=lambda rank: {"_flat_param": flat(rank, 2, {"w": WEIGHT})["_flat_param"]})
    torch.save({"_flat_param": WEIGHT.flatten()[18:]}, tmp_path / "model_world_size_2_rank_1.pt")
    with pytest.raises(CorruptError, match="is a ShardedTensor on rank 0, but a TensorRef on rank 1"):
        open_checkpoint(tmp_path)


# --- hostile


JUNK = (None, -1, 1 << 70, 1.5, "x", b"x", [], {}, (), [None], Global("torch", "float64"), Size((1 << 40, 1 << 40)))


@pytest.mark.slow
def test_fsdp_ranks_gives_no_wrong_result_when_one_value_changes(folder, fsdp1):
    """Every value in the tree of one rank's file, replaced by each kind of junk: refused, or harmless."""
    for path in (folder / "model_world_size_2_rank_1.pt", fsdp1 / "model_world_size_3_rank_1.pt"):
        original = path.read_bytes()
        count = len(list(places(open_file(path).root)))
        assert count > 20
        for number in range(count):
            for junk in JUNK:
                edit(path, lambda root, n=number, j=junk: list(places(root))[n](j))
                try:
                    checkpoint = open_checkpoint(path.parent)
                    assert "w" not in checkpoint.parameters or is_weight(checkpoint)
                except CkptError:
                    pass
                finally:
                    path.write_bytes(original)


def places(value: Any, seen: set[int] | None = None) -> Iterator[Callable[[Any], None]]:
    """Setters for every value below a dict or record, but for what it is called."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Record):
        for i, one in enumerate(value.args):
            yield lambda new, i=i: setattr(value, "args", (*value.args[:i], new, *value.args[i + 1 :]))
            yield from places(one, seen)
        if value.state is not None:
            yield lambda new: setattr(value, "state", new)
            yield from places(value.state, seen)
    elif isinstance(value, dict):
        for key in list(value):
            yield lambda new, key=key: value.__setitem__(key, new)
            yield from places(value[key], seen)
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield lambda new, i=i: value.__setitem__(i, new)
            yield from places(one, seen)
    elif isinstance(value, tuple):
        for one in value:
            yield from places(one, seen)
