# %% [markdown]
"""
# From jax.nn to packed long-context training

A small language model starts on `jax.nn.dot_product_attention`. In five steps it swaps the import,
packs documents of all lengths into full rows, goes to lengths where T × S would not fit, spends its
memory where it counts, and trains.

This file is a notebook: editors and `jupytext --to notebook` open it as cells, and
`python docs/tutorials/from_jax_nn_to_packed_long_context.py` runs it on any machine, in about
half a minute. Each claim is followed by an assert.
"""

# %%
import ast
import functools
import inspect
import shutil
import textwrap
import tokenize

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import flashjax
import flashjax.nnx

jax.config.update("jax_default_matmul_precision", "highest")  # float32 in full on GPUs too

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 16
WIDTH = HEADS * HEAD_DIM
VOCABULARY = 256  # bytes


# %% [markdown]
# ## 1. Swap the import
# A block of a language model, with attention as an argument. The call is `jax.nn`'s own; grouped
# heads (4 query heads on 2 key heads) work in both.


# %%
def init(key):
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        "query": (WIDTH, HEADS, HEAD_DIM),
        "key": (WIDTH, KEY_HEADS, HEAD_DIM),
        "value": (WIDTH, KEY_HEADS, HEAD_DIM),
        "out": (HEADS, HEAD_DIM, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        n: 0.2 * jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)
    }


def model(params, tokens, attention):
    """(B, T) tokens to (B, T, VOCABULARY) logits of the next."""
    x = params["embed"][tokens]
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, params[name]) for name in ("query", "key", "value"))
    x = x + jnp.einsum("btnh,nhd->btd", attention(q, k, v), params["out"])
    return x @ params["embed"].T


def loss(params, tokens, attention):
    logits = model(params, tokens[:, :-1], attention)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


before = functools.partial(jax.nn.dot_product_attention, is_causal=True)
after = functools.partial(flashjax.dot_product_attention, is_causal=True)

params = jax.jit(init)(jax.random.key(0))
tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 101))
step = jax.jit(jax.value_and_grad(loss), static_argnums=2)
(was, was_gradient), (now, now_gradient) = step(params, tokens, before), step(params, tokens, after)

assert np.allclose(was, now, rtol=1e-6)
for name in params:
    assert np.allclose(was_gradient[name], now_gradient[name], rtol=1e-4, atol=1e-6), name
print(f"loss with jax.nn {was:.6f}, with flashjax {now:.6f}")

# %% [markdown]
# ## 2. Pack documents
# Documents have all lengths. Padding each to the longest wastes most of the batch; instead, several
# share a row, and `segment_ids` keeps them from seeing each other. The documents here are the
# functions of a few modules of the standard library, as bytes, those that fit into a row.


# %%
def functions_of(module):
    members = vars(module).values()
    return [m for m in members if inspect.isfunction(m) and m.__module__ == module.__name__]


modules = (ast, inspect, shutil, textwrap, tokenize)
sources = [inspect.getsource(f) for module in modules for f in functions_of(module)]
documents = [np.frombuffer(source.encode(), np.uint8) for source in sources]
ROW = 1024
documents = [document for document in documents if document.size <= ROW]


def pack(documents, length):
    """Longest first, each into the first row with room: tokens, segment ids, positions, (B, T)."""
    rows = []
    for document in sorted(documents, key=len, reverse=True):
        room = (r for r in rows if sum(map(len, r)) + len(document) <= length)
        row = next(room, None)
        if row is None:
            rows.append(row := [])
        row.append(document)
    tokens, ids, positions = (np.zeros((len(rows), length), np.int32) for _ in range(3))
    ids[:] = -1  # a negative id is padding: it sees nothing, and nothing sees it
    for b, row in enumerate(rows):
        begin = 0
        for segment, document in enumerate(row):
            here = slice(begin, begin + len(document))
            tokens[b, here], ids[b, here] = document, segment
            positions[b, here] = np.arange(len(document))
            begin = here.stop
    return tokens, ids, positions


tokens, ids, positions = pack(documents, ROW)
padded = len(documents) * max(map(len, documents))
print(
    f"{len(documents)} documents: {len(tokens)} rows of {ROW}, {(ids >= 0).mean():.0%} full; "
    f"padded to the longest they would be {padded / sum(map(len, documents)):.1f} times their size"
)
assert (ids >= 0).mean() > 0.8

# %% [markdown]
# A document gives the same whether it stands in a packed row or alone.

# %%
run = jax.jit(model, static_argnums=2)
logits = run(params, tokens[:1], functools.partial(after, segment_ids=ids[:1]))
second = ids[0] == 1
alone = run(params, tokens[:1, second], before)
assert np.allclose(logits[:, second], alone, rtol=1e-4, atol=1e-5)

# %% [markdown]
# And tiles in which no row meets its own document are skipped. Of a causal row that is one long
# document, half of the tiles are visited; of twelve documents, a twelfth of that and the edges.

# %%
shape = jax.ShapeDtypeStruct((1, 16384, HEADS, HEAD_DIM), jnp.float32)
twelve = np.sort(np.random.default_rng(0).integers(0, 12, 16384))
tiles = flashjax.explain(shape, shape, shape, is_causal=True, segment_ids=twelve[None]).forward
print(f"of {tiles.total} tiles, {tiles.visited:g} are visited with twelve documents in the row")
assert tiles.visited < 0.1 * tiles.total

# %% [markdown]
# ## 3. Go long
# The gradient of plain attention keeps the weights of all rows and columns: memory grows with T².
# Here it is recomputed tile by tile, and memory grows with T. The compiled programs tell, without
# running.


# %%
def temporary_bytes(attention, length):
    shape = jax.ShapeDtypeStruct((1, length, HEADS, HEAD_DIM), jnp.float32)
    gradient = jax.grad(lambda q, k, v: attention(q, k, v).sum(), argnums=(0, 1, 2))
    compiled = jax.jit(gradient).lower(shape, shape, shape).compile()
    return compiled.memory_analysis().temp_size_in_bytes


growth = {}
for name, attention in (("jax.nn", before), ("flashjax", after)):
    short, long = (temporary_bytes(attention, length) for length in (4096, 16384))
    print(f"{name}: {short / 2**20:.0f} MiB at 4096, {long / 2**20:.0f} MiB at 16384")
    growth[name] = long / short
assert growth["jax.nn"] > 15
assert growth["flashjax"] < 4.1

# %% [markdown]
# Time grows with T² in both, unless rows see a bounded past. With a sliding window the tiles
# visited grow with T, here 1024 back.

# %%
visited = []
for length in (16384, 65536):
    shape = jax.ShapeDtypeStruct((1, length, HEADS, HEAD_DIM), jnp.float32)
    told = flashjax.explain(shape, shape, shape, is_causal=True, local_window_size=(1024, 0))
    visited.append(told.forward.visited)
print(f"a window of 1024: {visited[0]:g} tiles at 16384, {visited[1]:g} at 65536")
assert visited[1] < 4.3 * visited[0]

# %% [markdown]
# ## 4. A layer, and what it keeps
# `flashjax.nnx.MultiHeadAttention` is Flax's layer with what today's models need: grouped heads,
# rotary embedding, windows, segment ids. Positions count from 0 in each document.


# %%
class Block(nnx.Module):
    """Attention and an MLP, (B, T, WIDTH) to the same."""

    def __init__(self, rngs):
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = flashjax.nnx.MultiHeadAttention(
            HEADS, WIDTH, num_kv_heads=KEY_HEADS, rotary=flashjax.Rotary(), is_causal=True,
            decode=False, rngs=rngs,
        )  # fmt: skip
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.widen = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, ids, positions):
        x = x + self.attention(self.attention_norm(x), segment_ids=ids, positions=positions)
        return x + self.narrow(nnx.silu(self.widen(self.mlp_norm(x))))


# %% [markdown]
# `jax.checkpoint` forgets what a block computed and computes it again in the backward. Attention is
# the dear part of that, and what its backward needs is small: its output and LSE, O(T). They carry
# the names `flashjax_out` and `flashjax_lse`. A policy that keeps these two has the backward repeat
# the projections and the MLP, but not attention. Traced programs tell, without running:

# %%
keep_attention = jax.checkpoint_policies.save_only_these_names("flashjax_out", "flashjax_lse")
definition, weights = nnx.split(Block(nnx.Rngs(0)))
x = jax.ShapeDtypeStruct((1, 256, WIDTH), jnp.float32)


def cost(wrap):
    """Floating-point operations of a block's gradient, and the bytes kept for its backward."""
    block = wrap(lambda weights, x: nnx.merge(definition, weights)(x, None, None))
    gradient = jax.grad(lambda weights, x: (block(weights, x) ** 2).sum())
    operations = jax.jit(gradient).lower(weights, x).cost_analysis()["flops"]
    kept = jax.eval_shape(lambda weights, x: jax.vjp(block, weights, x)[1], weights, x)
    return operations, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


costs = {
    "everything": cost(lambda block: block),
    "the two names": cost(functools.partial(jax.checkpoint, policy=keep_attention)),
    "nothing": cost(jax.checkpoint),
}
for name, (operations, kept) in costs.items():
    print(f"keep {name}: {operations / 1e6:.0f} MFLOP, {kept / 2**20:.2f} MiB kept")
operations, kept = zip(*costs.values(), strict=True)
assert operations[0] < operations[1] < operations[2]
assert kept[0] > 2 * kept[1] > 2 * kept[2]

# %% [markdown]
# ## 5. Train
# A target counts where the next token is of the same document.


# %%
class LanguageModel(nnx.Module):
    """(B, T) tokens to (B, T, VOCABULARY) logits of the next, from a document's own past."""

    def __init__(self, layers, rngs):
        self.embed = nnx.Embed(
            VOCABULARY, WIDTH, embedding_init=nnx.initializers.normal(0.1), rngs=rngs
        )
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens, ids, positions):
        x = self.embed(tokens)
        for block in self.blocks:
            x = nnx.remat(Block.__call__, policy=keep_attention)(block, x, ids, positions)
        return self.embed.attend(self.norm(x))


def packed_loss(lm, tokens, ids, positions):
    logits = lm(tokens, ids, positions)[:, :-1]
    counts = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.where(counts, losses, 0).sum() / counts.sum()


@nnx.jit
def train_step(lm, optimizer, *batch):
    value, gradient = nnx.value_and_grad(packed_loss)(lm, *batch)
    optimizer.update(lm, gradient)
    return value


lm = LanguageModel(layers=1, rngs=nnx.Rngs(0))  # one block, so that this runs in seconds
optimizer = nnx.Optimizer(lm, optax.adamw(1e-2), wrt=nnx.Param)
losses = []
for i in range(12):
    rows = np.random.default_rng(i).choice(len(tokens), 2, replace=False)
    losses.append(float(train_step(lm, optimizer, tokens[rows], ids[rows], positions[rows])))
print(f"loss in nats a byte: {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")
assert losses[-1] < losses[0] - 1.5

# %% [markdown]
# From here: `examples/train_lm.py` is this, whole, with mixed precision, checkpoints and
# generation; [masks and scores](masks_and_scores.py) tells what else a row may see;
# [docs/numerics.md](../numerics.md) says where results differ from jax.nn's, and by how much.
