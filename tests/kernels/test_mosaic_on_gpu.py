"""The Hopper kernel in each configuration, on a GPU."""

from typing import Any

import jax
import numpy as np
import pytest

from flashjax.bind import Arguments, bind
from flashjax.kernels.hopper import BACKEND, config
from flashjax.kernels.hopper.config import ForwardConfig
from flashjax.plan import current_device
from tests.features import build
from tests.inputs import BF16, CHOSEN, F16, Shape, arrays_of, said, same_bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("columns", [328, 333])
@pytest.mark.parametrize(
    ("dtype", "width", "value", "key_heads"),
    [
        (BF16, 64, 64, 12), (F16, 96, 96, 12), (BF16, 128, 128, 12), (F16, 128, 128, 24),
        (BF16, 192, 128, 24), (BF16, 256, 256, 12),
    ],
)  # fmt: skip
def test_every_configuration_offered(
    dtype: Any,
    width: int,
    value: int,
    key_heads: int,
    columns: int,
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held to the bound, and the same bits three times."""
    monkeypatch.setattr(config, "PAIRS_FROM", 0)  # pairs of programs for short walks too
    if CHOSEN not in (None, "mosaic"):
        pytest.skip("the configurations of the Mosaic GPU kernels")
    # More items than programs; columns that TMA takes in eights, and not.
    made = build(
        Shape(2, 424, columns, 24, key_heads, width, value), ("is_causal",) * causal, dtype
    )
    bound = bind(made.query, made.key, made.value, Arguments(is_causal=causal))
    device = current_device()
    reason = BACKEND.unsupported(bound.spec, device)
    if reason is not None:
        pytest.skip(reason)
    offered = BACKEND.configs(bound.spec, device)
    assert len({str(x) for x in offered}) == len(offered) > 1
    for one in offered:
        attend = jax.jit(lambda x, c=one: BACKEND.forward(bound.spec, c, x))
        out, lse = attend(bound.operands)
        made.judge.hold({"out": np.asarray(out), "lse": np.asarray(lse).swapaxes(1, 2)})
        for _ in range(2):
            again = attend(bound.operands)
            assert same_bits(again[0], out), one
            assert same_bits(again[1], lse), one


@pytest.mark.parametrize("names", [(), ("sinks",), ("soft_cap",)], ids=["full", "sinks", "capped"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (Shape(1, 130, 3300, 2, 1, 64, 64), BF16),
        (Shape(2, 1, 5001, 3, 1, 128, 80), BF16),
        (Shape(1, 70, 1700, 2, 2, 192, 128), F16),
        (Shape(1, 130, 1700, 1, 1, 256, 256), BF16),
        (Shape(2, 20, 1700, 70, 35, 128, 128), BF16),  # a few more than programs, in pairs
    ],
)
def test_few_items_with_long_walks(shape: Shape, dtype: Any, names: tuple[str, ...]) -> None:
    """Programs share the walks in parts."""
    if CHOSEN not in (None, "mosaic"):
        pytest.skip("the configurations of the Mosaic GPU kernels")
    made = build(shape, names, dtype)
    arguments = Arguments(**said(made, dict(made.operands), arrays_of(made.arguments)))
    bound = bind(made.query, made.key, made.value, arguments)
    reason = BACKEND.unsupported(bound.spec, current_device())
    if reason is not None:
        pytest.skip(reason)
    offered = BACKEND.configs(bound.spec, current_device())
    sharing = [c for c in offered if isinstance(c, ForwardConfig) and c.programs]
    assert sharing[0] == offered[0]
    for one in sharing[:3]:
        attend = jax.jit(lambda x, c=one: BACKEND.forward(bound.spec, c, x))
        out, lse = attend(bound.operands)
        made.judge.hold({"out": np.asarray(out), "lse": np.asarray(lse).swapaxes(1, 2)})
        assert same_bits(attend(bound.operands)[0], out), one
