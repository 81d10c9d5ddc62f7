"""Whatever a public dataclass or function is given, it takes it, or refuses it in one sentence."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import FunctionType, ModuleType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest

import ckpt
import ckpt_recorder
import ckpt_serving
import ckpt_training
from ckpt_formats.core.arguments import MAY_BE_INFINITE, Checked, annotations_of
from ckpt_formats.core.geometry import Box
from ckpt_formats.universal.chain.chain_file import Member
from damage import SAMPLES
from held import checkpoint, parameter
from public_names import PUBLIC

DATACLASSES = {
    kind.__name__: kind
    for name, kind in PUBLIC.items()
    if isinstance(kind, type)
    and is_dataclass(kind)
    and name != "WritableFormat"
    and (not name.startswith("types.") or issubclass(kind, Checked) or kind is ckpt.types.Tensor)
}
"""Those that users construct, and others that check their fields."""


class Stranger:
    """An object whose `repr` fails, and which is nothing that anything takes."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


HOSTILE = {
    "none": None,
    "zero": 0,
    "negative": -5,
    "huge": 1 << 200,
    "float": 1.5,
    "nan": math.nan,
    "infinite": math.inf,
    "bool": True,
    "text": "1G",
    "empty text": "",
    "bytes": b"bytes",
    "list": [None],
    "nested": [[-1]],
    "dict": {"a": 1},
    "set": {1},
    "array": np.zeros(3),
    "class": int,
    "stranger": Stranger(),
}


def refused(construct: Callable[[], Any]) -> bool:
    """Whether it is refused, in one sentence. Any other error than `InvalidArgumentError` fails the test."""
    try:
        construct()
    except ckpt.InvalidArgumentError as error:
        what = error.what
    else:
        return False
    assert what
    assert "\n" not in what
    assert len(what) < 300
    assert not what.endswith(".")
    return True


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An object of each public dataclass, by its name."""
    run = checkpoint([parameter("head.weight", {"master": np.zeros((2, 2), np.float32)})])
    costs = ckpt.planning.RunCosts(step=1, mtbf=3600, base_stall=1)
    plan = ckpt.planning.plan_schedule(costs)
    result = ckpt.types.Result(Path("t"), 1, 1, 0, 0, 0.5)
    target = tmp_path_factory.mktemp("usual") / "t"
    return {
        "Checkpoint": run,
        "Parameter": run["head.weight"],
        "Tensor": run["head.weight"].weight,
        "RunCosts": costs,
        "LogCosts": ckpt.planning.LogCosts(replay=0.1),
        "FailurePlan": plan,
        "Schedule": plan.bases,
        "Result": result,
        "Sealed": ckpt.types.Sealed(target, 1, 1),
        "RankSet": ckpt.partial.RankSet((1,)),
        "ClusterStatus": ckpt.types.ClusterStatus(40, 12, 8, 8),
        "BlockChange": ckpt.partial.BlockChange("head.weight", (Box((0,), (1,)),), 0.5, 4),
        "Evaluation": ckpt.Evaluation(("python",), 0.1),
        "Rule": ckpt.Rule("head"),
        "Report": ckpt.types.Report(()),
        "Finding": ckpt.types.Finding("coverage", "what", "where"),
        "Diff": ckpt.types.Diff(()),
        "Notice": ckpt.types.Notice("text"),
        "Plan": ckpt.types.Plan(()),
        "FilePlan": ckpt.types.FilePlan("file"),
        "Copy": ckpt.Copy("a", "b"),
        "Repair": ckpt.types.Repair(target, (), 1, True),
        "DamagedFile": ckpt.types.DamagedFile(target, "is missing", 1),
        "Protection": ckpt.types.Protection(target, 1, 1, 1, 1, 1, 1, 1),
        "AppendResult": ckpt.types.AppendResult(Member("base", "base", 1, "id", None, (), 1, 1, "now"), result),
        "Job": ckpt.Job(run, target, ckpt.Torch()),
    }


CASES = [(name, one.name) for name, kind in DATACLASSES.items() for one in fields(kind)]


def test_every_public_dataclass_is_tried() -> None:
    assert {
        "DeepSpeed",
        "Resources",
        "BlockChange",
        "RunCosts",
        "DeltaPolicy",
        "Retention",
        "Rule",
        "Checkpoint",
    } <= DATACLASSES.keys()
    assert all(hasattr(kind, "__post_init__") for kind in DATACLASSES.values())


def alternatives(annotation: Any) -> set[Any]:
    """The classes of which an annotation takes objects, without what is in them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return set().union(*map(alternatives, get_args(annotation)))
    return {origin or annotation}


@pytest.mark.parametrize(("name", "field"), CASES, ids=[f"{name}.{field}" for name, field in CASES])
def test_dataclass_takes_or_refuses_hostile_values(name: str, field: str, usual: dict[str, Any]) -> None:
    """A value that is taken is one that the annotation states: everything else is refused when it is constructed."""
    annotation = dict(annotations_of(DATACLASSES[name]))[field]
    if name == "Job":  # its own `__init__` takes the name of a format, too
        annotation = signature(ckpt.Job).parameters[field].annotation
    taken = {case for case, value in HOSTILE.items() if not refused(partial(_with, name, field, value, usual))}
    if annotation is object:
        assert taken == HOSTILE.keys()
        return
    kinds = alternatives(annotation)
    infinite = MAY_BE_INFINITE in str(annotation)
    texts, sequences = kinds & {str, Path, Literal, tuple, Sequence}, kinds & {tuple, Sequence}
    allowed = {
        "none": type(None) in kinds,
        "zero": kinds & {int, float},
        "negative": kinds & {float},
        "huge": float in kinds,
        "float": float in kinds,
        "bool": bool in kinds,
        "text": texts,
        "empty text": texts,
        "list": sequences,
        "nested": sequences,
        "dict": kinds & {dict, Mapping},
        "set": Sequence in kinds,
        "class": Callable in kinds,
        "infinite": infinite,
    }
    assert taken <= {case for case, allows in allowed.items() if allows}


def _with(name: str, field: str, value: object, usual: dict[str, Any]) -> Any:
    if name in usual:
        return replace(usual[name], **{field: value})
    return DATACLASSES[name](**{field: value})


JOB = ckpt.Job(checkpoint([parameter("head.weight", {"master": np.zeros((2, 2), np.float32)})]), "no-such", "torch")

FAULTS = {
    "DeepSpeed(dp=0)": lambda: ckpt.DeepSpeed(dp=0),
    "DeepSpeed(tp=-1)": lambda: ckpt.DeepSpeed(tp=-1),
    "DeepSpeed(zero=4)": lambda: ckpt.DeepSpeed(zero=4),
    "DCP(dp=0)": lambda: ckpt.DCP(dp=0),
    "Safetensors(shard_nbytes=-5)": lambda: ckpt.Safetensors(shard_nbytes=-5),
    "HuggingFace(shard_nbytes=-5)": lambda: ckpt.HuggingFace(shard_nbytes=-5),
    "Universal(pack_nbytes=0)": lambda: ckpt.Universal(pack_nbytes=0),
    "Universal(codec='nought')": lambda: ckpt.Universal(codec="nought"),
    "Universal(content='x')": lambda: ckpt.Universal(content="x"),
    "run_shard(9, 8)": lambda: JOB.run_shard(9, 8),
    "run_shard(0, 0)": lambda: JOB.run_shard(0, 0),
    "run_shard(0, 0.5)": lambda: JOB.run_shard(0, 0.5),  # type: ignore[arg-type]
    "Resources(memory='1G')": lambda: ckpt.Resources(memory="1G"),  # type: ignore[arg-type]
    "Resources(workers=0)": lambda: ckpt.Resources(workers=0),
    "Resources.of_machine(-1)": lambda: ckpt.Resources.of_machine(-1),
    "DeltaPolicy(base_every=0)": lambda: ckpt.DeltaPolicy(base_every=0),
    "DeltaPolicy(partial=nan)": lambda: ckpt.DeltaPolicy(partial=math.nan),
    "DeltaPolicy(exact='(')": lambda: ckpt.DeltaPolicy(exact="("),  # type: ignore[arg-type]
    "DeltaPolicy(codec='nought')": lambda: ckpt.DeltaPolicy(codec="nought"),
    "Retention(keep='last')": lambda: ckpt.Retention(keep=("last",)),
    "Retention(keep='last:0')": lambda: ckpt.Retention(keep=("last:0",)),
    "RankSet(())": lambda: ckpt.partial.RankSet(()),
    "RunCosts(step=nan)": lambda: ckpt.planning.RunCosts(math.nan, 1, 1),
    "RunCosts(restart > mtbf)": lambda: ckpt.planning.RunCosts(1, 1, 1, restart=2),
    "DataRates(cores=0)": lambda: ckpt.planning.DataRates(cores=0),
    "Evaluation((), 1)": lambda: ckpt.Evaluation((), 1),
    "Rule('(')": lambda: ckpt.Rule("("),
    "Rule(how='nought')": lambda: ckpt.Rule("a", "nought"),  # type: ignore[arg-type]
    "Flax(separator='x')": lambda: ckpt.Flax(separator="x"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("fault", FAULTS)
def test_dataclass_refuses_a_wrong_value_when_it_is_constructed(fault: str) -> None:
    assert refused(FAULTS[fault])


def test_a_refusal_names_the_class_the_field_and_what_it_may_be() -> None:
    with pytest.raises(ckpt.InvalidArgumentError) as caught:
        ckpt.DeepSpeed(dp=0)
    assert str(caught.value) == "DeepSpeed: dp must be a whole number from 1 to 65,536 or None, not 0"


def test_values_in_another_form_are_taken_as_what_they_mean() -> None:
    rule = ckpt.Rule("head")
    format = ckpt.DeepSpeed(dp=np.int64(2), stages=[0, 4], rules=[rule])  # type: ignore[arg-type]
    assert (format.dp, type(format.dp), format.stages, format.rules) == (2, int, (0, 4), (rule,))
    assert ckpt.DeltaPolicy(exact="head").exact == ("head",)  # type: ignore[arg-type]
    assert ckpt.Retention(keep="last:3").keep == ("last:3",)  # type: ignore[arg-type]
    assert ckpt.HuggingFace(config="here").config == Path("here")  # type: ignore[arg-type]
    source = ckpt.from_state_dict({"w": np.ones(2, np.float32)})
    average = ckpt.average({"a": source, "b": source}.values(), np.array([0.25, 0.75]))  # type: ignore[arg-type]
    assert average["w"].weight[:].tolist() == [1, 1]
    assert list(source.select(np.array(["w"]))) == ["w"]  # type: ignore[arg-type]


def test_names_of_parameters_are_texts() -> None:
    source = ckpt.from_state_dict({"w": np.ones(2, np.float32)})
    calls: list[Callable[[], object]] = [
        lambda: source.rename({1: "a"}),  # type: ignore[dict-item]
        lambda: source.rename(lambda name: 5),  # type: ignore[arg-type, return-value]
        lambda: source.replace({1: np.ones(2)}, new_names=True),  # type: ignore[dict-item]
    ]
    for call in calls:
        with pytest.raises(ckpt.CkptError, match="each name must be a text"):
            call()


def test_all_fields_that_are_checked_have_annotations_that_can_be_read() -> None:
    """An annotation that only type checkers could evaluate would check nothing."""
    open_ended = {("FilePlan", "content")}
    for name, kind in DATACLASSES.items():
        unread = {(name, one) for one, annotation in annotations_of(kind) if annotation in (Any, object)}
        assert unread <= open_ended


def test_text_is_one_pattern_wherever_patterns_are_taken() -> None:
    run = ckpt.open(SAMPLES / "deepspeed-0.19-zero1-bf16-dp2")
    assert set(run.select(only="head")) == set(run.select(only=["head"]))
    assert set(run.select(skip="bias")) == set(run.select(skip=["bias"]))
    assert 0 < len(run.select(only="head")) < len(run.select(skip="bias")) < len(run)
    same = ckpt.diff(run, run, only="head", states="model")
    listed = ckpt.diff(run, run, only=["head"], states=["model"])
    assert [pair.name for pair in same.pairs] == [pair.name for pair in listed.pairs]
    for wrong in (5, b"head", [5], {"head": 1}):
        with pytest.raises(ckpt.InvalidArgumentError):
            run.select(only=wrong)  # type: ignore[arg-type]


def _calls(thing: Any) -> Iterator[Callable[..., Any]]:
    """The function, or the constructor and the public methods of a class."""
    if not isinstance(thing, type):
        yield thing
        return
    for name, method in vars(thing).items():
        if callable(method) and (name == "__init__" or not name.startswith("_")):
            yield method


def test_resources_and_progress_are_keywords_whose_default_is_none() -> None:
    """None stands for `Resources.of_machine()` in all of them."""
    users = {call for thing in PUBLIC.values() if isinstance(thing, (type, FunctionType)) for call in _calls(thing)}
    users = {call for call in users if "resources" in signature(call).parameters}
    assert {ckpt.save, ckpt.verify, ckpt.Job.run, ckpt.Chain.append, ckpt.Shadow.__init__} <= users
    for call in users:
        parameters = signature(call).parameters
        for one in (parameters[name] for name in ("resources", "progress") if name in parameters):
            assert (one.kind, one.default) == (one.KEYWORD_ONLY, None), call.__qualname__
    assert ckpt.Resources() == ckpt.Resources.of_machine()
    assert [one.name for one in fields(ckpt.Resources)] == ["workers", "memory", "scratch"]


UNCHECKED = {
    # Of jobs: an error of one rank's arguments reaches all ranks, or another constructor checks the options.
    *("load", "Recorder.__init__", "Publisher.__init__", "HuggingFaceSaver.__init__", "LightningSaver.__init__"),
    *("HuggingFaceCallback.__init__", "LightningCallback.__init__"),
    "SaveHandle.__init__",  # a Saver constructs it
}


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ((ckpt, ckpt.planning, ckpt.partial, ckpt.runs, ckpt_serving), set()),
        pytest.param((ckpt_training, ckpt_recorder), UNCHECKED, marks=pytest.mark.slow),  # imports all frameworks
    ],
    ids=["of anyone", "of trainers"],
)
def test_public_functions_and_constructors_check_their_arguments(
    modules: tuple[ModuleType, ...], expected: set[str]
) -> None:
    """Without it, `ckpt.average(["a.pt", "b.pt"])` ends in "'str' object has no attribute 'path'"."""
    things = [getattr(module, name) for module in modules for name in module.__all__]
    plain = {thing for thing in things if isinstance(thing, FunctionType) and signature(thing).parameters}
    plain |= {
        thing.__init__
        for thing in things
        if isinstance(thing, type)
        and not is_dataclass(thing)
        and not issubclass(thing, Exception)
        and isinstance(vars(thing).get("__init__"), FunctionType)
    }
    unchecked = {call.__qualname__ for call in plain if not hasattr(call, "__wrapped__")}
    assert plain
    assert unchecked == expected


def test_function_of_checkpoints_says_that_a_path_is_none() -> None:
    for call in (lambda: ckpt.average(["a.pt"]), lambda: ckpt.merge_lora("a.pt", "b")):  # type: ignore[list-item, arg-type]
        with pytest.raises(ckpt.InvalidArgumentError, match="Checkpoint"):
            call()


class Place:
    """A path that is neither a text nor a `Path`."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)

    def __fspath__(self) -> str:
        return self.path


@pytest.mark.parametrize("form", [str, Place])
def test_path_may_be_a_text_or_any_path_object(form: Callable[[Path], Any], tmp_path: Path) -> None:
    def at(name: str) -> Any:
        return form(tmp_path / name)

    run = checkpoint([parameter("head.weight", {"model": np.ones((2, 2), np.float32)})])
    assert ckpt.save(run, at("m.safetensors")).files == 1
    assert list(ckpt.open(at("m.safetensors"))) == ["head.weight"]
    assert ckpt.copy(at("m.safetensors"), at("copy.safetensors")).files == 1
    assert ckpt.seal(at("m.safetensors")).files == 1
    assert ckpt.clean(at("m.safetensors")).files == 0
    ckpt.Chain(at("run.chain")).append(run)
    ckpt.Chain(at("run.chain")).restore(None, at("restored"), "flax")
    assert ckpt.Job(run, at("out")).run().target == tmp_path / "out"
    assert ckpt.Shadow(at("run.chain")).path == tmp_path / "run.chain"
    assert ckpt.HuggingFace(config=at("here")).config == tmp_path / "here"
    assert ckpt.Resources(scratch=at("here")).scratch == tmp_path / "here"
    for local in (partial(ckpt.open, at("m")), partial(ckpt.Follower, at("m"))):
        with pytest.raises(
            ckpt.InvalidArgumentError, match=r"rules must be a .*local path.*, not 's3://bucket/r.toml'"
        ):
            local(rules="s3://bucket/r.toml")
    assert ckpt.HuggingFace(config=at("a:/b")).config == ckpt.HuggingFace(config=f"{tmp_path}/a://b").config
    with pytest.raises(ckpt.InvalidArgumentError, match="config must be a local path or None, not ''"):
        ckpt.HuggingFace(config="")
    for wrong in (5, b"bytes", None):
        for call in (ckpt.open, ckpt.clean, ckpt.Chain, ckpt.seal, partial(ckpt.save, run), partial(ckpt.copy, "a")):
            with pytest.raises(ckpt.InvalidArgumentError, match="must be a path"):
                call(wrong)  # type: ignore[operator]


def test_url_of_any_path_object_stays_a_url() -> None:
    with pytest.raises(ckpt.UnsupportedError, match="must be in the file system"):
        ckpt.Shadow(Place("s3://bucket/run.chain"))
    assert ckpt.Copy(Place("s3://bucket/run"), "out").source == "s3://bucket/run"


def test_format_may_be_a_name(tmp_path: Path) -> None:
    run = checkpoint([parameter("head.weight", {"model": np.ones((2, 2), np.float32)})])
    assert ckpt.Job(run, tmp_path, "hf").format == ckpt.HuggingFace()
    assert ckpt.Job(run, tmp_path / "a.pt").format == ckpt.Torch()
    ckpt.save(run, tmp_path / "model", "flax")
    assert ckpt.open(tmp_path / "model").format == "flax"
    with pytest.raises(ckpt.InvalidArgumentError, match="there is no format nought"):
        ckpt.save(run, tmp_path / "a", "nought")
    with pytest.raises(ckpt.UnsupportedError, match="can be read, not written"):
        ckpt.save(run, tmp_path / "a", "torchtune")
