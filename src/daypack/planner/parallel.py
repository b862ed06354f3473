"""What each rank holds under data parallelism, replicated or sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from daypack.planner.model import ModelSpec, ParamSpec

KINDS = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp2")


@dataclass(frozen=True)
class Parallel:
    """How a model is spread over GPUs.

    ========  =========================================================  ========  ==========  =======================
    kind      what it plans for                                          weights   gradients   state
    ========  =========================================================  ========  ==========  =======================
    none      one process (or copies that share nothing)                 whole     whole       whole
    ddp       torch's DistributedDataParallel                            whole     whole       whole
    zero1     torch's ZeroRedundancyOptimizer                            whole     whole       whole ones, dealt out
    zero2     DeepSpeed stage 2                                          whole     1 / world   flat, 1 / world, fp32
    zero3     DeepSpeed stage 3                                          1 / world 1 / world   flat, 1 / world, fp32
    fsdp2     torch's fully_shard: rows of each parameter (Shard(0))     rows      rows        rows; the rest replicated
    ========  =========================================================  ========  ==========  =======================

    Attributes:
        world: number of GPUs.
        rank: whose memory is planned; None for the one that needs most.

    Raises:
        ValueError: an unknown kind, or a rank or world that cannot be.
    """

    kind: str = "none"
    world: int = 1
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of parallelism {self.kind!r}; choose one of {', '.join(KINDS)}")
        if self.world < 1:
            raise ValueError(f"the number of GPUs must be at least 1, got {self.world}")
        if self.rank is not None and not 0 <= self.rank < self.world:
            raise ValueError(f"rank must be between 0 and {self.world - 1}, got {self.rank}")

    @property
    def flat(self) -> bool:
        """Whether the optimizer sees one flat fp32 vector per group."""
        return self.kind in ("zero2", "zero3")

    @property
    def whole_parameters(self) -> bool:
        """Whether each parameter's state lives whole on one rank."""
        return self.kind == "zero1"

    @property
    def rows_sharded(self) -> bool:
        return self.kind == "fsdp2"

    @property
    def shards_weights(self) -> bool:
        return self.kind in ("zero3", "fsdp2")

    @property
    def shards_gradients(self) -> bool:
        return self.kind in ("zero2", "zero3", "fsdp2")

    def rows(self, rows: int) -> int:
        """Return how many of ``rows`` rows are on this rank: ``ceil(rows / world)`` each until none are left, as in
        `torch.chunk`.
        """
        each = ceil(rows / self.world)
        return max(0, min(each, rows - (self.rank or 0) * each))

    def share(self, p: ParamSpec) -> int:
        """Return the elements of a sharded parameter on this rank."""
        if self.kind == "fsdp2":
            return self.rows(p.shape[0]) * prod(p.shape[1:]) if p.shape else 1
        return self.rows(p.elements)

    def partitions(self, params: Sequence[ParamSpec]) -> list[ParamSpec]:
        """Return one flat fp32 vector for each combination of group options: this rank's part of it."""
        from daypack.planner.model import ParamSpec

        totals: dict[tuple[tuple[str, object], ...], int] = {}
        for p in params:
            totals[p.options] = totals.get(p.options, 0) + p.elements
        return [
            ParamSpec(f"partition {i}", (self.rows(elements),), torch.float32, True, options)
            for i, (options, elements) in enumerate(totals.items())
        ]

    def owned(self, params: Sequence[ParamSpec]) -> frozenset[str]:
        """Return the names of the parameters whose state this rank keeps, dealt out as by torch's
        ZeroRedundancyOptimizer: the largest first, each to the rank that has the fewest elements. Without a rank, those
        of the fullest one.
        """
        return _dealt(tuple((p.name, p.elements) for p in params), self.world, self.rank)

    def gathered(self, model: ModelSpec, itemsize: int) -> int:
        """Return the bytes of whole parameters and gradients that a rank holds for a while, or of the buckets it sends.

        fsdp2, zero3: what is outside the layers and two layers (one ahead), whole, and one layer's gradients. ddp: the
        buckets, which are a second copy of all gradients (``gradient_as_bucket_view=True`` saves it).
        """
        if self.world == 1:
            return 0
        if self.kind == "ddp" or self.kind == "zero1":
            return sum(p.nbytes for p in model.trainable)
        if not self.shards_weights:
            return 0
        root, *layers = (
            (sum(p.elements for p in block), sum(p.elements for p in block if p.trainable)) for block in model.blocks()
        )
        largest = max(layers, default=(0, 0))
        return itemsize * (root[0] + min(2, len(layers)) * largest[0] + largest[1])


@lru_cache(maxsize=64)
def _dealt(params: tuple[tuple[str, int], ...], world: int, rank: int | None) -> frozenset[str]:
    loads = [0] * world
    owned: list[list[str]] = [[] for _ in range(world)]
    for name, elements in sorted(params, key=lambda p: -p[1]):
        target = loads.index(min(loads))
        loads[target] += elements
        owned[target].append(name)
    return frozenset(owned[loads.index(max(loads)) if rank is None else rank])
