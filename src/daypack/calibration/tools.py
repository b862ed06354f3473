"""The slow functions of calibration. A backend may have faster ones with the same results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from daypack.calibration import blocks, codebook
from daypack.geometry import Geometry


@dataclass(frozen=True)
class Tools:
    """See the functions of the same names in `daypack.calibration.codebook` and `daypack.calibration.blocks`."""

    histogram: Callable[[Tensor, Geometry, int], Tensor]
    block_scores: Callable[[Tensor, Geometry], list[float]]
    optimal_levels: Callable[[codebook.Array, int], codebook.Array]


#: In torch and numpy: what faster ones must equal.
REFERENCE = Tools(codebook.histogram, blocks.block_scores, codebook.optimal_levels)
