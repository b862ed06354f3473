"""Fixed 8-bit maps: 256 levels that are known beforehand and need not be stored (Dettmers et al. 2021, 2110.02861).

A *signed* map has levels in [-1, 1] for a first moment, an *unsigned* one in [0, 1] for a second; 0 is a level of each.
``linear`` and ``companded`` second moments are squares of evenly spaced or companded levels: they store ``sqrt(v)``,
which is what an update divides by, the way the signed map stores ``m``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

MAP_LEVELS = 256
_DECADES = 7


def dynamic(signed: bool) -> Tensor:
    """Return the dynamic tree map: seven decades below 1, each cut into half as many equal parts as the decade above
    it.

    The top decade (0.1, 1] has 64 parts (128 unsigned) and the lowest one 1 (2); a level is the middle of a part, and 0
    and 1 are levels too. Relative precision falls from 1 % near 1 to a factor of 2 at 1e-7.
    """
    positive = []
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, (64 if signed else 128) // 2**decade + 1)
        positive.append((edges[:-1] + edges[1:]) / 2 * 10.0**-decade)
    inner = torch.cat(positive)
    outer = torch.tensor([0.0, 1.0])
    return torch.cat([inner, -inner, outer] if signed else [inner, outer]).sort().values


def even(signed: bool) -> Tensor:
    """Return multiples of 1/127 from -1 to 1 and the level 1/254; if not ``signed``, squares of multiples of 1/255."""
    if not signed:
        return torch.linspace(0, 1, MAP_LEVELS, dtype=torch.float64).square().float()
    half = torch.arange(1, 128, dtype=torch.float64) / 127
    return torch.cat([-half.flip(0), torch.tensor([0.0, 0.5 / 127], dtype=torch.float64), half]).float()


def companded(signed: bool) -> Tensor:
    """Return the `even` levels times their own magnitude: finer near 0, down to 1.5e-5 (2e-10 if not ``signed``)."""
    levels = even(signed).double()
    return (levels * levels.abs()).float()


#: Levels by name: fp32 ``[256]``, rising.
MAPS: dict[str, Callable[[], Tensor]] = {
    f"{kind} {name}": (lambda make=make, signed=kind == "signed": make(signed))  # type: ignore[misc]
    for name, make in (("dynamic", dynamic), ("linear", even), ("companded", companded))
    for kind in ("signed", "unsigned")
}


def is_unsigned(name: str) -> bool:
    return name.startswith("unsigned")


@lru_cache(maxsize=64)
def levels(name: str, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the levels of the map ``name``, ``[256]``. The tensor is shared: do not write to it."""
    return MAPS[name]().to(device, dtype)


@lru_cache(maxsize=64)
def thresholds(name: str, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return where the nearest level changes, ``[255]``: half of the sum of two neighbours, rounded to fp32."""
    known = levels(name)
    return ((known[1:] + known[:-1]) / 2).to(device, dtype)


def nearest(x: Tensor, name: str) -> Tensor:
    """Return the codes of the levels nearest to ``x`` ``[n]``, int32: how many thresholds are at or below each."""
    edges = thresholds(name, x.device, x.dtype)
    if x.dtype != torch.float32:
        return torch.bucketize(x, edges, out_int32=True, right=True)
    # Ten times faster than that binary search: a table over what the upper 16 bits of an fp32 number say, and one
    # comparison for the only threshold that numbers with the same upper bits can have between them.
    count = _table(name, x.device).index_select(0, x.view(torch.int32).bitwise_right_shift(16).add_(1 << 15))
    return count.add_(x >= torch.nn.functional.pad(edges, (0, 1), value=float("inf")).index_select(0, count))


@lru_cache(maxsize=64)
def _table(name: str, device: torch.device) -> Tensor:
    """Count, for each upper half of an fp32 number's bits, the thresholds at or below the smallest such number; int32
    ``[65536]``.
    """
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).bitwise_left_shift(16)
    ends = torch.stack([upper, upper | 0xFFFF]).view(torch.float32).nan_to_num(nan=2.0)
    low, high = torch.bucketize(ends.sort(0).values, thresholds(name), out_int32=True, right=True)
    if (high - low)[ends.abs().amax(0) <= 1].max() > 1:
        raise ValueError(f"two thresholds of the map {name!r} agree in their upper 16 bits; space its levels further")
    table: Tensor = low.to(device)
    return table
