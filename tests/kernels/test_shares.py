"""How the items of a call are shared out: each tile once, and all programs end together."""

import numpy as np
import pytest

from flashjax.kernels.hopper.shares import LEAST, OVERHEAD, WORTH, Shares, shared_out

CALLS = {
    "one item": [1000],
    "fewer items than programs": [300] * 10,
    "a last round half empty": [64] * 330,
    "short walks": [4] * 330,
    "causal": sorted([*range(1, 33)] * 64, reverse=True),
    "one long walk": [500] + [3] * 300,
    "walks of a tile": [1] * 200,
    "odd": [17, 5, 90, 33, 2, 61, 40, 1, 1, 7] * 20,
}


def loads(tiles: list[int], found: Shares) -> list[float]:
    def cost(i: int) -> float:
        return OVERHEAD + (tiles[i] if i < len(tiles) else found.parts[i - len(tiles)].tiles)

    return [sum(map(cost, own)) for own in found.taken]


@pytest.mark.parametrize("programs", [1, 7, 66, 132])
@pytest.mark.parametrize("name", CALLS)
def test_every_tile_has_one_program(name: str, programs: int) -> None:
    tiles = CALLS[name]
    found = shared_out(np.array(tiles), programs)
    seen = [np.zeros(n, int) for n in tiles]
    for own in found.taken:
        assert own  # a program without items would wait for ever
        for i in own:
            if i < len(tiles):
                seen[i] += 1
            else:
                part = found.parts[i - len(tiles)]
                assert LEAST <= part.tiles < tiles[part.item]
                seen[part.item][part.begin : part.begin + part.tiles] += 1
    assert all((x == 1).all() for x in seen)
    assert len(found.taken) <= programs
    numbers = [i - len(tiles) for own in found.taken for i in own if i >= len(tiles)]
    assert sorted(numbers) == list(range(len(found.parts)))


@pytest.mark.parametrize("programs", [7, 66, 132])
@pytest.mark.parametrize("name", CALLS)
def test_no_program_ends_much_later_than_all_could(name: str, programs: int) -> None:
    tiles = CALLS[name]
    ends = loads(tiles, shared_out(np.array(tiles), programs))
    least = sum(tiles) / programs + OVERHEAD * len(tiles) / programs
    assert max(ends) <= least + WORTH + OVERHEAD


def test_what_is_not_worth_it_is_not_cut() -> None:
    """A round of 16 tiles of which half is lost is; one of 8 is not, nor are 100 rounds."""
    assert shared_out(np.full(198, 32), 132).parts
    assert not shared_out(np.full(198, 8), 132).parts
    assert not shared_out(np.full(132 * 100 + 66, 32), 132).parts
    assert not shared_out(np.full(132 * 15 + 66, 32), 132, gain=0.05).parts
    assert shared_out(np.full(132 + 66, 32), 132, gain=0.05).parts
