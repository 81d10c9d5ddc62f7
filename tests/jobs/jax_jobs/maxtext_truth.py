"""What MaxText itself makes of small models: `maxtext_truth.py digests OUT.json` and `maxtext_truth.py logits FOLDER`.

`maxtext_truth.py train FOLDER` and `trained FOLDER`: the same of a training, from MaxText to transformers.

`digests` writes the names and shapes of MaxText's own models, scanned and not, and digests of the weights that its own
converter makes of those of transformers. `logits` reads FOLDER/NAME/hf (saved by transformers) and FOLDER/NAME/orbax
(converted by ckpt) and prints how far the logits of both libraries are from each other. `train` takes a step with
DeepSeek V3 and saves FOLDER/scanned and FOLDER/one-by-one as MaxText does, with logits; `trained` compares these with
those of transformers from FOLDER/scanned-hf and FOLDER/one-by-one-hf, converted by ckpt.

MaxText needs Python 3.12: pip install --no-deps maxtext==0.2.5; pip install jax flax orbax-checkpoint aqtp qwix
omegaconf pydantic grain absl-py pathwaysutils tabulate psutil datasets tensorboardX google-cloud-storage sentencepiece
tokamax ml-goodput-measurement cloud-tpu-diagnostics drjax pillow tiktoken torch transformers isal zstandard xxhash.
ckpt's folders `formats` and `codecs` must be in PYTHONPATH.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import json
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import maxtext
import ml_dtypes
import numpy as np
from maxtext.checkpoint_conversion.to_maxtext import _get_hf_loading_function, get_maxtext_model_info
from maxtext.checkpoint_conversion.utils.param_mapping import HOOK_FNS, PARAM_MAPPING
from maxtext.common.common_types import MODEL_MODE_TRAIN
from maxtext.configs import pyconfig
from maxtext.models import models
from maxtext.utils import maxtext_utils
from maxtext_models import CONFIGS, config_of, weight

from ckpt_formats.names.config import configured_model
from ckpt_formats.names.packings import stored_shape

TOKENS = np.random.default_rng(1).integers(0, 96, (1, 16))
BASE = Path(maxtext.__file__).parent / "configs" / "base.yml"
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "sparse_matmul": False, "megablox": False}
_LATENT = {
    **_EXPERTS,
    "base_num_kv_heads": 4,
    "base_moe_mlp_dim": 24,
    "first_num_dense_layers": 1,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "base_num_decoder_layers": 3,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama2-7b", {}),
    "llama3.1": ("llama3.1-8b", {}),
    "mistral": ("mistral-7b", {}),
    "mixtral": ("mixtral-8x7b", {**_EXPERTS, "base_moe_mlp_dim": 48}),
    "qwen2": ("qwen2.5-7b", {}),
    "qwen3": ("qwen3-8b", {}),
    "qwen3_moe": ("qwen3-30b-a3b", {**_EXPERTS, "base_mlp_dim": 24, "base_moe_mlp_dim": 24}),
    "gemma": ("gemma-7b", {}),
    "gemma2": ("gemma2-2b", {"base_num_decoder_layers": 2}),
    "gemma3": (
        "gemma3-4b",
        {
            "base_num_decoder_layers": 8,
            "use_multimodal": False,
            "rope_max_timescale": 1000000,
            "rope_linear_scaling_factor": 1.0,
        },
    ),
    "gpt_oss": ("gpt-oss-20b", {**_EXPERTS, "base_mlp_dim": 24, "base_moe_mlp_dim": 24, "rope_max_timescale": 150000}),
    "deepseek_v2": ("deepseek2-16b", {**_LATENT, "q_lora_rank": 0, "rope_factor": 1}),
    "deepseek_v3": (
        "deepseek3-671b",
        {**_LATENT, "q_lora_rank": 20, "rope_factor": 1, "n_routing_groups": 2, "topk_routing_group": 1},
    ),
}
"""By the names of `maxtext_models.py`: MaxText's name of the model, and entries of its configuration."""


def configured(name: str, scan: bool) -> Any:
    """MaxText's configuration of a small model."""
    model, more = MODELS[name]
    entries = {
        "model_name": model,
        "override_model_config": True,
        "base_emb_dim": 64,
        "base_mlp_dim": 48,
        "base_num_decoder_layers": 4,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "normalization_layer_epsilon": 1e-6,
        "rope_max_timescale": 10000,
        "max_target_length": 16,
        "per_device_batch_size": 1,
        "scan_layers": scan,
        "attention": "dot_product",
        "dtype": "float32",
        "weight_dtype": "float32",
        "matmul_precision": "highest",
        "float32_logits": True,
        "logits_dot_in_fp32": True,
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "enable_checkpointing": False,
        "run_name": "small",
    } | more
    return pyconfig.initialize(["", str(BASE), *(f"{key}={value}" for key, value in entries.items())])


def digest(values: Any) -> str:
    return sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:8]


def digests(out: Path) -> None:
    result: dict[str, Any] = {}
    for name in sys.argv[3:] or CONFIGS:
        for scan in (True, False):
            try:
                config = configured(name, scan)
                known, _ = get_maxtext_model_info(config)
            except Exception as error:
                print(name, scan, type(error).__name__, str(error)[:400])
                continue
            entry = {key: [list(shape)] for key, (_, shape) in known.items()}
            if config.model_name in PARAM_MAPPING:
                try:
                    _add_digests(entry, name, config, known)
                except Exception as error:  # MaxText's converter has its own bugs: its models' shapes still count
                    print(name, scan, type(error).__name__, str(error)[:200])
            plain = {key.removeprefix("params-").replace("-", "."): one for key, one in entry.items()}
            result[f"{name} {'scanned' if scan else 'one by one'}"] = plain
    lines = (f"{json.dumps(name)}: {json.dumps(one, sort_keys=True)}" for name, one in result.items())
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _add_digests(entry: dict[str, list[Any]], name: str, config: Any, known: Any) -> None:
    own = config_of(name)
    table = {**own, "text_config": own, "vision_config": {"num_hidden_layers": 0}}
    mapping = PARAM_MAPPING[config.model_name](table, config, config.scan_layers)
    hooks = HOOK_FNS[config.model_name](table, config, config.scan_layers, saving_to_hf=False)
    configured_by_ckpt = configured_model(own)
    assert configured_by_ckpt is not None
    shapes = {
        one.names[0]: stored_shape(one.packing, one.scope, configured_by_ckpt.model.shape)
        for one in configured_by_ckpt.model.stored("hf")
    }
    for key, sources in mapping.items():
        targets = key if isinstance(key, tuple) else (key,)
        if not all(target in known for target in targets):
            continue
        shape = [known[target][1] for target in targets]
        for dtype in (np.float32, ml_dtypes.bfloat16):

            def get(text: str, dtype: Any = dtype) -> Any:
                text = text.replace("model.language_model.", "model.")
                return weight(text, shapes[text]).astype(dtype)

            load: Callable[[], Any] = _get_hf_loading_function(
                sources, get, hooks.get(key), shape if len(targets) > 1 else shape[0], config, targets[0]
            )
            try:
                values = np.asarray(load())
            except Exception as error:
                print(name, key, type(error).__name__, str(error)[:120])
                continue
            for i, target in enumerate(targets):
                one = values[..., i] if len(targets) > 1 else values
                if one.shape != known[target][1]:
                    print(name, target, one.shape, known[target][1])
                    continue
                entry[target].append(digest(one.astype(dtype)))


def logits(folder: Path) -> None:
    import torch
    import transformers

    for name in sys.argv[3:] or CONFIGS:
        if not (folder / name / "orbax").exists():
            continue
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / name / "hf", dtype=torch.float32, attn_implementation="eager"
        )
        if model.config.tie_word_embeddings:
            # MaxText rounds a shared table to bfloat16 where it computes logits (embeddings.attend_on_embedding).
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().bfloat16().float())
        with torch.no_grad():
            theirs = model(torch.from_numpy(TOKENS)).logits.numpy()
        try:
            ours = _computed(configured(name, True), folder / name / "orbax", TOKENS)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            continue
        print(f"{name}: logits of {np.abs(theirs).max():.3g} differ by {np.abs(theirs - ours).max():.3g}")


def _computed(config: Any, path: Path, tokens: Any) -> Any:
    import orbax.checkpoint as ocp

    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    model = models.transformer_as_linen(config, mesh, quant=None, model_mode=MODEL_MODE_TRAIN)
    tree = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path.absolute())["params"]
    positions = np.arange(tokens.shape[1])[None]
    with jax.set_mesh(mesh):
        result = model.apply(
            tree,
            tokens,
            positions,
            decoder_segment_ids=np.ones_like(tokens),
            enable_dropout=False,
            rngs={"aqt": jax.random.key(0)},
        )
    return np.asarray(result[0] if isinstance(result, tuple) else result)


def train(folder: Path) -> None:
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx
    from maxtext.common import train_state_nnx

    for name, scan in (("scanned", True), ("one-by-one", False)):
        config = configured("deepseek_v3", scan)
        mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
        with jax.set_mesh(mesh):
            rngs = nnx.Rngs(params=0, dropout=1, aqt=2)
            model = models.Transformer(config, mesh, quant=None, model_mode=MODEL_MODE_TRAIN, rngs=rngs)
            for i, (_, node) in enumerate(nnx.iter_graph(model)):
                if type(node).__name__ == "GateLogit":
                    node.bias[...] = jax.random.normal(jax.random.key(i), node.bias.shape)
            optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
            state = train_state_nnx.TrainStateNNX(model, optimizer)
            state.apply_gradients(jax.tree.map(jax.numpy.sin, nnx.state(model, nnx.Param)))
            tree = train_state_nnx.to_checkpoint_dict(state)
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(
                (folder / name).absolute(), args=ocp.args.PyTreeSave(tree)
            )
            result = model(
                TOKENS,
                np.arange(TOKENS.shape[1])[None],
                decoder_segment_ids=np.ones_like(TOKENS),
                enable_dropout=False,
            )
        np.save(folder / f"{name}.npy", np.asarray(result[0] if isinstance(result, tuple) else result))


def trained(folder: Path) -> None:
    import torch
    import transformers

    for name in ("scanned", "one-by-one"):
        ours = np.load(folder / f"{name}.npy")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / f"{name}-hf", dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            theirs = model(torch.from_numpy(TOKENS)).logits.numpy()
        print(f"{name}: logits of {np.abs(ours).max():.3g} differ by {np.abs(theirs - ours).max():.3g}")


if __name__ == "__main__":
    {"digests": digests, "logits": logits, "train": train, "trained": trained}[sys.argv[1]](Path(sys.argv[2]))
