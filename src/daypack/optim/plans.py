"""The plan that most optimizers make: each moment compressed where that takes fewer bytes."""

from __future__ import annotations

from functools import lru_cache

import torch

from daypack.formats.base import StateFormat, smallest
from daypack.formats.block_quantized import BlockQuantized
from daypack.formats.dense import Dense
from daypack.formats.factored import Factored
from daypack.geometry import geometry
from daypack.param import ParamPlan
from daypack.rules.base import Rule

#: Formats of a second moment by the name of the option ``second_moment``.
SECOND_MOMENTS: dict[str, StateFormat] = {"dense": Dense(), "factored": Factored()}


@lru_cache(maxsize=4096)
def smallest_plan(
    rule: Rule, shape: tuple[int, ...], dtype: torch.dtype, bits: int, second_moment: str, block_size: int
) -> ParamPlan:
    """Plan averages of gradients in ``bits`` bits and means of squares as ``second_moment`` says, for two and more dims
    and each where it takes fewer bytes than fp32; else in fp32. Cached, because every step asks for it.
    """
    view, dense = geometry(shape), Dense()
    first = BlockQuantized(block_size) if bits == 8 else dense
    forms = (SECOND_MOMENTS[second_moment] if moment.squares else first for moment in rule.moments)
    return ParamPlan(rule, tuple(smallest(view, dtype, dense, form) if len(shape) > 1 else dense for form in forms))
