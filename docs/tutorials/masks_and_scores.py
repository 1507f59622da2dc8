# %% [markdown]
"""
# Masks and scores

What a row may see, and how much it likes what it sees: from a boolean array to mask terms that
skip work, and from a soft cap to a score function of your own with learned parameters.

This file is a notebook: editors and `jupytext --to notebook` open it as cells, and
`python docs/tutorials/masks_and_scores.py` runs it on any machine, in about half a minute. Each
claim is followed by an assert.
"""

# %%
import jax
import jax.numpy as jnp
import numpy as np

import flashjax
from flashjax import masks, scores

jax.config.update("jax_default_matmul_precision", "highest")  # float32 in full on GPUs too

T, N, H = 256, 4, 16
q, k, v = (jax.random.normal(key, (1, T, N, H)) for key in jax.random.split(jax.random.key(0), 3))
row, column = np.arange(T)[:, None], np.arange(T)[None, :]


def close(a, b):
    return np.allclose(a, b, rtol=1e-4, atol=2e-5)


# %% [markdown]
# ## From an array to a term
# An array of booleans, True where a row may see a column, is a mask as in `jax.nn`. It costs T × S
# bytes and says nothing about its shape. A *term* is the rule itself.

# %%
causal = column <= row
theirs = jax.nn.dot_product_attention(q, k, v, mask=causal[None, None])
as_array = flashjax.dot_product_attention(q, k, v, mask=causal)
as_term = flashjax.dot_product_attention(q, k, v, mask=masks.Causal())
assert close(as_array, theirs)
assert close(as_term, theirs)  # and so gives is_causal=True

# %% [markdown]
# `flashjax.explain` takes the same call, runs no attention, and says what would happen: which
# implementation, which tiles, and how many of them are visited. A *tile* is a block of rows times a
# block of columns. One in which nothing is allowed is skipped, forward and backward; one in which
# everything is allowed needs no mask inside. Arrays may be shapes alone, so that this allocates
# nothing.

# %%
long = jax.ShapeDtypeStruct((1, 16384, N, H), jnp.float32)
print(flashjax.explain(long, long, long, mask=masks.Causal()))

# %% [markdown]
# ## `&`, `|` and `~`
# Terms combine. The words read as sets of columns: *causal, and (among the first 4, or at most 63
# back)* keeps a few sink tokens beside a window.
#
# To look at a mask, ask attention itself: where all scores are equal and the values are one-hot, a
# row's output is above zero in just the columns that it sees.


# %%
def seen(mask, rows=T, columns=T):
    """Which columns each row sees, bool (rows, columns)."""
    zeros = jnp.zeros((rows, 1, 1)), jnp.zeros((columns, 1, 1))
    out = flashjax.dot_product_attention(*zeros, jnp.eye(columns)[:, None], mask=mask)
    return np.asarray(out[:, 0] > 0)


sinks_and_window = masks.Causal() & (masks.Prefix(4) | masks.Window(63, 0))
near = row - column <= 63
assert np.array_equal(seen(sinks_and_window), causal & ((column < 4) | near))
assert np.array_equal(seen(~masks.Window(7, 7)), abs(row - column) > 7)
print(sinks_and_window)

# %% [markdown]
# Work follows the mask. Over 16384 positions, these are the tiles that the forward visits.

# %%
for mask in (
    masks.Causal(),
    sinks_and_window,
    masks.Causal() & masks.Chunked(2048),
):
    tiling = flashjax.explain(long, long, long, mask=mask).forward
    print(f"{tiling.visited / tiling.total:6.1%} of the tiles, schedule {tiling.bytes} B: {mask}")
    assert tiling.visited < 0.55 * tiling.total

# %% [markdown]
# ## Lengths, documents, padding
# `query_seq_lengths` and `key_value_seq_lengths` say where the real tokens end. `segment_ids` packs
# documents into one row of the batch: a row sees columns with its own id, and a negative id is
# padding. Both add to whatever other mask there is.
#
# A row that sees nothing gives 0, its LSE is −inf and its gradients are 0. What lies in padding
# reaches nothing, not even as NaN.

# %%
ids = np.repeat([0, 1, 2, -1], [100, 80, 50, 26])
padding = (ids < 0)[None, :, None, None]
poisoned = [jnp.where(padding, jnp.nan, x) for x in (q, k, v)]


def packed(q, k, v):
    return flashjax.dot_product_attention(
        q, k, v, is_causal=True, segment_ids=ids[None], return_residual=True
    )


out, lse = packed(*poisoned)
assert not out[0, 230:].any()
assert (lse[0, 230:] == -jnp.inf).all()

begin, end = 100, 180
alone = flashjax.dot_product_attention(*(x[:, begin:end] for x in (q, k, v)), is_causal=True)
assert close(out[:, begin:end], alone)  # the second document, as if it were alone

gradients = jax.grad(lambda *qkv: packed(*qkv)[0].sum(), argnums=(0, 1, 2))(*poisoned)
assert all(bool(jnp.isfinite(g).all()) and not g[0, 230:].any() for g in gradients)

# %% [markdown]
# ## A rule of your own
# `Predicate` takes an elementwise function of row and column. Arrays go in by name, as `rows=`
# (T,), `columns=` (S,), `scalars=` or `heads=`, and reach the function tile by tile: a kernel
# cannot see an array that the function captures, and flashjax refuses such a function. Define it
# once, outside the step: it is compared by identity, and a new one compiles anew.


# %%
def same_speaker(row, column, speaks, spoke):
    return speaks == spoke


speaker = jax.random.randint(jax.random.key(1), (T,), 0, 3)
dialogue = masks.Causal() & masks.Predicate(
    same_speaker, rows={"speaks": speaker}, columns={"spoke": speaker}
)
assert np.array_equal(seen(dialogue), causal & (speaker[:, None] == speaker[None, :]))

# %% [markdown]
# Nobody can tell from a function which tiles it leaves empty, so that every tile would be visited
# (above, `Causal` skips half of them). `tile_verdict` tells: from the ends of a tile's rows and
# columns, whether it is EMPTY, FULL, or PARTIAL, which is always a safe answer. Here, tokens are
# the pixels of an image 32 wide, and each sees its neighbours within 2.

# %%
WIDTH, REACH = 32, 2


def neighbours(row, column):
    down = jnp.abs(row // WIDTH - column // WIDTH)
    across = jnp.abs(row % WIDTH - column % WIDTH)
    return (down <= REACH) & (across <= REACH)


def neighbours_in_tile(row_begin, row_end, column_begin, column_end):
    above = row_begin // WIDTH - (column_end - 1) // WIDTH > REACH
    below = column_begin // WIDTH - (row_end - 1) // WIDTH > REACH
    return jnp.where(above | below, masks.EMPTY, masks.PARTIAL)


plain = masks.Predicate(neighbours)
told = masks.Predicate(neighbours, tile_verdict=neighbours_in_tile)
everywhere, where_needed = (
    flashjax.explain(long, long, long, mask=m).forward for m in (plain, told)
)
assert everywhere.visited == everywhere.total
assert where_needed.visited < 0.2 * where_needed.total
print(
    f"neighbours: {where_needed.visited:g} tiles with tile_verdict, {everywhere.visited:g} without"
)
assert np.array_equal(seen(told), seen(plain))

# %% [markdown]
# ## Scores
# Before any mask, a score is `soft_cap(score_mod(scale · q·k + bias))`. A *soft cap* keeps it
# within ±cap. *ALiBi* takes off a slope times the distance, a slope a head. Neither makes a T × S
# array. With a single column, the LSE of a row is its score, so that one can look at it.

# %%
x = jnp.linspace(-60, 60, 5)
one = jnp.ones((1, 1, 1))


def score_of(x, **arguments):
    _, lse = flashjax.dot_product_attention(
        x[:, None, None], one, one, scale=1.0, return_residual=True, **arguments
    )
    return lse[:, 0]


assert close(score_of(x, logits_soft_cap=30.0), 30 * jnp.tanh(x / 30))

alibi = flashjax.dot_product_attention(q, k, v, score_mod=scores.Alibi(), is_causal=True)
slopes = 2.0 ** (-8 * np.arange(1, N + 1) / N)
as_bias = -slopes[:, None, None] * abs(row - column)
dense = jax.nn.dot_product_attention(q, k, v, bias=jnp.float32(as_bias)[None], is_causal=True)
assert close(alibi, dense)

# %% [markdown]
# `ScoreMod` takes a function of your own. Its float arrays get gradients; the derivative is taken
# inside each tile, so there is none to write. Here is KERPLE's logarithmic kernel (Chi et al. 2022,
# arXiv:2205.09921), two learned numbers a head, beside the same as a bias of jax.nn.


# %%
def logarithmic(score, row, column, batch, head, strength, rate):
    return score - strength * jnp.log1p(rate * jnp.abs(row - column))


def by_score_mod(strength, rate):
    mod = scores.ScoreMod(logarithmic, heads={"strength": strength, "rate": rate})
    out = flashjax.dot_product_attention(q, k, v, score_mod=mod, is_causal=True)
    return (out**2).sum()


def by_bias(strength, rate):
    distance = jnp.abs(row - column)
    bias = -strength[:, None, None] * jnp.log1p(rate[:, None, None] * distance)
    return (jax.nn.dot_product_attention(q, k, v, bias=bias[None], is_causal=True) ** 2).sum()


learned = jnp.array([0.5, 1.0, 1.5, 2.0]), jnp.array([1.0, 0.5, 0.2, 0.1])
value, gradient = jax.value_and_grad(by_score_mod, argnums=(0, 1))(*learned)
wanted_value, wanted = jax.value_and_grad(by_bias, argnums=(0, 1))(*learned)
assert np.allclose(value, wanted_value, rtol=1e-5)
assert all(np.allclose(g, w, rtol=1e-3, atol=1e-3) for g, w in zip(gradient, wanted, strict=True))
print("gradient of strength, a head each:", np.round(gradient[0], 2))

# %% [markdown]
# ## Sinks
# A *sink* is a logit a head that takes weight and has no value (as in gpt-oss): a head with nothing
# to say may say little. It scales a row's output by the share that is left.

# %%
sinks = jnp.array([-1.0, 0.0, 4.0, 8.0])
without, lse = flashjax.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
with_sinks = flashjax.dot_product_attention(q, k, v, is_causal=True, sinks=sinks)
left = jax.nn.sigmoid(lse - sinks)[..., None]
assert close(with_sinks, left * without)

# %% [markdown]
# ## Merge
# Attention over parts of the columns combines exactly, given each part's LSE. So a prompt that many
# requests share is attended to once, a long cache is split, or keys live on several devices. The
# second part's columns begin at 64, so its causal rule is moved by as much.

# %%
SPLIT = 64
prefix = flashjax.dot_product_attention(
    q, k[:, :SPLIT], v[:, :SPLIT], mask=masks.Causal(), return_residual=True
)
rest = flashjax.dot_product_attention(
    q, k[:, SPLIT:], v[:, SPLIT:], mask=masks.Causal(offset=-SPLIT), return_residual=True
)
merged, merged_lse = flashjax.merge([prefix, rest])
assert (rest[1][:, :SPLIT] == -jnp.inf).all()  # early rows see nothing of the second part
assert close(merged, without)
assert close(merged_lse, lse)

# %% [markdown]
# The pictures of all terms are in [docs/pictures/masks.png](../pictures/masks.png); exact semantics
# are in [docs/numerics.md](../numerics.md). Next: [from jax.nn to packed long-context
# training](from_jax_nn_to_packed_long_context.py).
