"""Names, order and shapes of the tensors of every family, against the models that transformers builds and saves."""

import json
from pathlib import Path
from typing import Any

import pytest

from ckpt_formats.names.config import ConfiguredModel, configured_model, read_config
from ckpt_formats.names.hyperparameters import differences
from ckpt_formats.names.packings import stored_shape
from ckpt_formats.names.tables import families, places_of_atoms
from engines.launch import run_script
from hf_jobs.random_models import RANDOM, model, names

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

JOBS = Path(__file__).parents[1] / "jobs"
MODELS = names(2)


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("registered")
    run_script(JOBS / "hf_jobs" / "registered.py", [str(out), *MODELS], 3)
    return out


def stored(configured: ConfiguredModel, dialect: str) -> list[tuple[str, list[int]]]:
    model = configured.model.of_present(dialect, ())  # no layers for multi-token prediction
    tie = model.tie(dialect)
    return [
        (one.names[0], list(stored_shape(one.packing, one.scope, model.shape)))
        for one in model.stored(dialect)
        if not (tie and one.names[0] == tie.alias) and not one.is_copy
    ]


@pytest.mark.parametrize("name", MODELS)
def test_tensors_have_the_names_and_shapes_of_the_models_of_transformers(name: str, registered: Path) -> None:
    truth: dict[str, Any] = json.loads((registered / f"{name}.json").read_text())
    configured = configured_model(truth["config"])
    assert configured is not None
    assert not configured.reading.problems
    others = configured.family.others
    files, memory = (
        [(key, shape) for key, shape in truth[kind] if not others.fullmatch(key)] for kind in ("files", "memory")
    )
    assert sorted(stored(configured, "hf")) == sorted(files)
    in_memory = stored(configured, "hf_memory")
    assert sorted(in_memory) == sorted(memory)
    # Optimizers number parameters; buffers come last in what transformers lists.
    buffers = {key for key, _ in in_memory if key.endswith("correction_bias")}
    assert [one for one in in_memory if one[0] not in buffers] == [one for one in memory if one[0] not in buffers]


@pytest.mark.parametrize("model_type", RANDOM)
def test_an_absent_entry_has_the_default_of_transformers_or_is_missed(model_type: str, registered: Path) -> None:
    """An entry that a configuration omits is never read as another value than transformers takes."""
    whole: dict[str, Any] = json.loads((registered / "defaults.json").read_text())[model_type]
    expected = configured_model(whole)
    assert expected is not None
    rotary = whole.get("rope_parameters") or {}
    parts = [{key: value for key, value in whole.items() if key != absent} for absent in whole.keys() - {"model_type"}]
    parts += [
        whole | {"rope_parameters": {key: value for key, value in rotary.items() if key != absent}}
        for absent in {"rope_theta", "partial_rotary_factor"} & rotary.keys()
    ]
    for part in parts:
        reading = ConfiguredModel(expected.family, read_config(part, expected.family)).reading
        if not reading.problems:
            differing = [name for name, *_ in differences(expected.reading.values, reading)]
            assert not differing, (differing, whole.keys() - part.keys())


def test_every_family_has_random_models() -> None:
    types = {model_type for family in families() for model_type in family.model_types}
    assert types - RANDOM.keys() == {"kimi_k2"}  # transformers does not have it


def test_every_atom_is_in_some_family() -> None:
    """An atom that no model has would be a block that nothing proves."""
    seen: set[str] = set()
    for name in names(6):
        configured = configured_model(model(name))
        assert configured is not None
        seen |= {key[0] for one in configured.model.stored("hf") for key in one.keys}
    assert places_of_atoms().keys() <= seen
