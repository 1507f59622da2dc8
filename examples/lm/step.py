"""The mathematics of one step: loss, optimiser, and the state that a step turns into the next.

The state is one pytree of arrays and the step a pure function of it, so that a checkpoint is the
state and a resumed run goes on to the bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from lm.config import Config
from lm.model import LanguageModel, graph_of
from lm.packing import END, Batch


class TrainState(NamedTuple):
    step: Array
    params: Any
    opt_state: Any


class LossSum(NamedTuple):
    """Nats over all targets, END included, and the number of bytes among them.

    Their quotient is the length of a code for the text, in nats per byte.
    """

    nats: Array
    bytes: Array


class Program(NamedTuple):
    """The pure functions of a run."""

    start: Callable[[], TrainState]
    train: Callable[[TrainState, Batch], tuple[TrainState, LossSum]]
    evaluate: Callable[[Any, Batch], LossSum]


def loss_sum(logits: Array, batch: Batch) -> LossSum:
    """Cross-entropy of (B, T, V) logits, over the places that are no padding."""
    counted = batch.segment_ids >= 0
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    is_byte = counted & (batch.targets != END)
    return LossSum(jnp.where(counted, nats, 0.0).sum(), is_byte.sum())


def make_optimiser(config: Config) -> optax.GradientTransformation:
    """AdamW with clipping, linear warm-up and cosine decay; only linear layers' matrices decay."""
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=int(config.warm_up * config.steps),
        decay_steps=config.steps,
        end_value=config.final_rate * config.learning_rate,
    )
    adamw = optax.adamw(rate, b2=config.beta2, weight_decay=config.weight_decay, mask=_decayed)
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


def make_program(config: Config) -> Program:
    optimiser = make_optimiser(config)
    graph = graph_of(config)

    def sums(params: Any, batch: Batch) -> LossSum:
        model = nnx.merge(graph, params)
        logits = model(batch.inputs, batch.segment_ids, batch.positions)
        return loss_sum(logits, batch)

    def start() -> TrainState:
        params = nnx.state(LanguageModel(config, nnx.Rngs(config.seed)), nnx.Param)
        return TrainState(jnp.zeros((), jnp.int32), params, optimiser.init(params))

    def train(state: TrainState, batch: Batch) -> tuple[TrainState, LossSum]:
        summed, total = summed_gradients(sums, state.params, batch, config.accumulate)
        count = jnp.maximum(total.bytes, 1)
        gradients = jax.tree.map(lambda g: g / count, summed)
        updates, opt_state = optimiser.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), total

    return Program(start, train, sums)


def summed_gradients(
    sums: Callable[[Any, Batch], LossSum], params: Any, batch: Batch, parts: int
) -> tuple[Any, LossSum]:
    """The gradient of the batch's nats, taken over `parts` micro-batches one after another.

    Not divided by anything: micro-batches hold different numbers of bytes, and only the sums of
    nats, of gradients and of bytes make theirs equal to the whole batch's.
    """

    def add(so_far: tuple[Any, LossSum], part: Batch) -> tuple[tuple[Any, LossSum], None]:
        def nats(params: Any) -> tuple[Array, LossSum]:
            total = sums(params, part)
            return total.nats, total

        return jax.tree.map(jnp.add, so_far, jax.grad(nats, has_aux=True)(params)), None

    zeros = jax.tree.map(jnp.zeros_like, params), LossSum(jnp.zeros(()), jnp.zeros((), jnp.int32))
    micro_batches = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
    return jax.lax.scan(add, zeros, micro_batches)[0]


def _decayed(params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: "kernel" in jax.tree_util.keystr(path), params)
