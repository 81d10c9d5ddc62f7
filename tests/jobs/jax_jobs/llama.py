"""A small Llama in plain JAX, with MaxText's names, scanned layers and scaled queries, and batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, GROUPS, WIDTH = 64, 32, 48, 3, 4, 2, 16
LENGTH, BATCH = 12, 8
RATE, DECAY, EPSILON, THETA = 1e-3, 0.01, 1e-8, 10_000.0
NORM_EPSILON = 1e-6


def parameters() -> dict[str, Any]:
    random = np.random.default_rng(7)

    def normal(*shape: int) -> Any:
        return np.float32(0.1) * random.standard_normal(shape, np.float32)

    attention = {
        "query": {"kernel": normal(HIDDEN, LAYERS, HEADS, WIDTH) / np.float32(WIDTH**0.5)},
        "key": {"kernel": normal(HIDDEN, LAYERS, GROUPS, WIDTH)},
        "value": {"kernel": normal(HIDDEN, LAYERS, GROUPS, WIDTH)},
        "out": {"kernel": normal(HEADS, LAYERS, WIDTH, HIDDEN)},
    }
    inner = {name: {"kernel": normal(HIDDEN, LAYERS, INNER)} for name in ("wi_0", "wi_1")}
    layers = {
        "self_attention": attention,
        "mlp": {**inner, "wo": {"kernel": normal(INNER, LAYERS, HIDDEN)}},
        "pre_self_attention_layer_norm": {"scale": 1 + normal(HIDDEN, LAYERS)},
        "post_self_attention_layer_norm": {"scale": 1 + normal(HIDDEN, LAYERS)},
    }
    top = {"decoder_norm": {"scale": 1 + normal(HIDDEN)}, "logits_dense": {"kernel": normal(HIDDEN, VOCABULARY)}}
    return {
        "params": {"decoder": {"layers": layers, **top}, "token_embedder": {"embedding": normal(VOCABULARY, HIDDEN)}}
    }


def batch(step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The tokens of a step: (batch, length) int64."""
    return np.random.default_rng(step).integers(0, VOCABULARY, (BATCH, LENGTH))


def loss(variables: Any, tokens: Any) -> Any:
    """The mean cross-entropy of each next token."""
    model = variables["params"]
    decoder = model["decoder"]
    x = model["token_embedder"]["embedding"][tokens]
    layers = jax.tree.map(lambda stack: jnp.moveaxis(stack, 1, 0), decoder["layers"])
    x, _ = jax.lax.scan(lambda x, layer: (_layer(x, layer), None), x, layers)
    logits = _norm(x, decoder["decoder_norm"]["scale"]) @ decoder["logits_dense"]["kernel"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
    return -chosen.mean()


def _layer(x: Any, layer: Any) -> Any:
    own, inner = layer["self_attention"], layer["mlp"]
    y = _norm(x, layer["pre_self_attention_layer_norm"]["scale"])
    query, key, value = (jnp.einsum("bte,ehd->bthd", y, own[name]["kernel"]) for name in ("query", "key", "value"))
    query, key = _rotary(query), _rotary(key)
    key, value = (jnp.repeat(part, HEADS // GROUPS, axis=2) for part in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)  # MaxText divides the weights of queries by the root of WIDTH
    scores = jnp.where(np.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    x = x + jnp.einsum("bqhd,hde->bqe", mixed, own["out"]["kernel"])
    y = _norm(x, layer["post_self_attention_layer_norm"]["scale"])
    return x + (jax.nn.silu(y @ inner["wi_0"]["kernel"]) * (y @ inner["wi_1"]["kernel"])) @ inner["wo"]["kernel"]


def _norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + NORM_EPSILON) * scale


def _rotary(x: Any) -> Any:
    """Halves are turned against each other; x: (batch, length, heads, width)."""
    angles = np.outer(np.arange(x.shape[1]), THETA ** (-np.arange(0, WIDTH, 2) / WIDTH)).astype(np.float32)
    cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None, :] for f in (np.cos, np.sin))
    low, high = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-high, low], -1) * sin
