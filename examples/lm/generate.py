"""Text from a trained model: the prompt at once, then token by token through the KV cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from lm.config import Config
from lm.model import graph_of
from lm.packing import BEGIN, END

TEMPERATURE = 0.8


def generate(
    config: Config, params: Any, prompt: np.ndarray, count: int, temperature: float = TEMPERATURE
) -> tuple[bytes, bytes]:
    """A prompt of tokens as bytes, and up to `count` bytes that the model writes after it.

    A pure function of the parameters and `config.seed`.
    """
    program = jax.jit(continued, static_argnums=(0, 3, 4))
    batch = prompt[None].astype(np.int32)
    tokens = program(config, params, batch, count, temperature, jax.random.key(config.seed))
    return as_bytes(prompt), as_bytes(np.asarray(tokens)[0])


def continued(
    config: Config, params: Any, prompt: Array, count: int, temperature: float, key: Array
) -> Array:
    """The `count` tokens after each (B, T) prompt, (B, count), in one program."""
    batch, length = prompt.shape
    model = nnx.merge(graph_of(config), params)
    model.init_cache(batch, length + count)

    def draw(logits: Array, number: Array) -> Array:
        # No text holds BEGIN within it, nor what fills the vocabulary up.
        token = jnp.arange(logits.shape[-1])
        logits = jnp.where((token == BEGIN) | (token > END), -jnp.inf, logits)
        drawn = jax.random.categorical(jax.random.fold_in(key, number), logits / temperature)
        return drawn.astype(jnp.int32)

    first = draw(model.decode(prompt)[:, -1], jnp.int32(0))
    graph = nnx.graphdef(model)

    def step(carry: tuple[Any, Array], number: Array) -> tuple[tuple[Any, Array], Array]:
        cache, token = carry
        # nnx.scan wants variables that were made in this trace; an identity map makes them anew.
        model = nnx.merge(graph, jax.tree.map(lambda x: x, params), cache)
        following = draw(model.decode(token[:, None])[:, 0], number)
        return (nnx.state(model, nnx.Cache), following), following

    _, others = jax.lax.scan(step, (nnx.state(model, nnx.Cache), first), jnp.arange(1, count))
    return jnp.concatenate([first[:, None], others.swapaxes(0, 1)], axis=1)


def as_bytes(tokens: np.ndarray) -> bytes:
    """The bytes among the tokens, up to the document's end."""
    ends = np.flatnonzero(tokens == END)
    tokens = tokens[: ends[0]] if ends.size else tokens
    return tokens[tokens < 256].astype(np.uint8).tobytes()
