"""With x64 on, where Python's integers become int64 and arrays may be of either width."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashjax
from flashjax import masks
from flashjax.masks import Blocks, Mask, schedule
from flashjax.structure import Dims
from tests.laws.answers import keep
from tests.laws.strategies import AXES, Array


@pytest.mark.parametrize("order", ["ascending", "shuffled"])
@pytest.mark.parametrize("wide_side", ["query", "key", "both"])
def test_ids_match_by_value_and_not_by_their_low_bits(wide_side: str, order: str) -> None:
    """2³² + 5 is no 5, also where the other side's ids are int32."""
    wide, narrow = np.repeat([3, 2**32, 2**32 + 5], 4), np.repeat([3, 5, 7], 4).astype(np.int32)
    query, key = {"query": (wide, narrow), "key": (narrow, wide), "both": (wide, wide)}[wide_side]
    if order == "shuffled":
        query = np.random.default_rng(0).permutation(query)
    dims, rows, columns = Dims((), 1, 12, 12), Blocks(12, 3), Blocks(12, 4)
    with jax.enable_x64(True):
        mask = masks.Segments(jnp.asarray(query), jnp.asarray(key)).aligned(dims)
        kept = np.asarray(keep(mask, dims))[0, 0]
        np.testing.assert_array_equal(kept, query[:, None] == key)
        tiles = kept.reshape(4, 3, 3, 4).any((1, 3))
        assert (np.asarray(mask.verdict(rows, columns))[0, 0][tiles] > 0).all()
        for axis, needed in zip(AXES, (tiles, tiles.T), strict=True):
            walk = schedule(mask, rows, columns, axis)
            steps = [np.asarray(walk.step(jnp.int32(i)).tile)[0, 0] for i in range(4)]
            for block, count in enumerate(np.asarray(walk.count)[0, 0]):
                visited = {int(tile[block]) for tile in steps[:count]}
                assert visited >= set(np.flatnonzero(needed[block]).tolist())


ROWS, COLUMNS = 300, 530
R = np.random.default_rng(0)
MASKS: dict[str, Callable[[], Mask]] = {
    "shared by all": lambda: (
        masks.Dense(R.random((ROWS, COLUMNS)) > 0.5)
        & masks.Intervals(np.arange(COLUMNS) - 50, np.arange(COLUMNS) + 50)
    ),
    "by member and head": lambda: (
        masks.Lengths(key=np.asarray([100, 500]))
        & masks.Segments(*(np.sort(R.integers(0, 4, (2, n))) for n in (ROWS, COLUMNS)))
        & masks.BlockSparse(R.random((2, 5, 9)) > 0.5, 64, 64)
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_tiled_attention_with_operands_of_every_kind(name: str) -> None:
    """Several tiles in both directions, forward and backward, on float32 inputs."""
    mask = MASKS[name]()
    x = tuple(R.normal(size=(2, n, 2, 4)).astype(np.float32) for n in (ROWS, COLUMNS, COLUMNS))

    def gradient(implementation: Any) -> tuple[Array, ...]:
        def loss(query: Any, key: Any, value: Any) -> Any:
            out = flashjax.dot_product_attention(
                query, key, value, mask=mask, implementation=implementation
            )
            return (out**2).sum()

        return tuple(map(np.asarray, jax.grad(loss, (0, 1, 2))(*x)))

    with jax.enable_x64(True):
        for found, expected in zip(gradient("xla"), gradient("reference"), strict=True):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, atol=2e-5)
