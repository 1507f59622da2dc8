"""What the Triton lowering has of the primitives in users' functions, JAX 0.11.2 and 0.12.0.1."""

from __future__ import annotations

import dataclasses

from flashjax.kernels.replay import RULES, Lowering, tanh_by_exp2

_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type broadcast_in_dim
broadcast_to cbrt ceil clamp convert_element_type cos cosh div eq erf_inv exp exp2 expm1 floor
ge gt integer_pow iota is_finite le log log1p log2 logistic lt max min mul ne neg nextafter not
one_minus_square or pow rem reshape reshard rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square squeeze stop_gradient sub tan
tanh xor
"""
_NARROW = """
abs add add_any broadcast_in_dim broadcast_to ceil convert_element_type eq exp exp2 floor ge gt
is_finite le lt max min mul ne neg reshape reshard select_n sin squeeze stop_gradient sub
"""
_LIBRARY = "atan2 cbrt expm1 log log1p nextafter pow tanh"
_names, _narrow, _library = (frozenset(x.split()) for x in (_NAMES, _NARROW, _LIBRARY))
TRITON = Lowering("Triton", _names, _narrow, _library, RULES)

# For scores of 16-bit inputs: wrong by 2⁻²³ of 1 where libdevice's tanh is by that much of its
# value, and P is rounded to 2⁻⁹ or 2⁻¹² of its own; at a third of the instructions.
TRITON_16_BIT = dataclasses.replace(TRITON, rules={**RULES, "tanh": tanh_by_exp2})
