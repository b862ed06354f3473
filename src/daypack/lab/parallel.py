"""One run on several processes that torchrun started: DDP or FSDP2 around the model, a part of each batch per rank."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from daypack.sharding import is_distributed

#: How the processes of a run share it.
PARALLEL = ("none", "ddp", "fsdp2")


@dataclass(frozen=True)
class Ranks:
    """The processes of a run.

    Attributes:
        kind: "none" (one process), "ddp" (every rank holds the model) or "fsdp2" (every rank holds a part of it).
        rank: this process, from 0.
        world: how many there are.
    """

    kind: str = "none"
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        """Set ``model`` up for this kind, and return what to call instead of ``model.loss``."""
        if self.kind == "ddp":
            return nn.parallel.DistributedDataParallel(_Loss(model))
        if self.kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for block in model.blocks:  # type: ignore[union-attr]
                fully_shard(block)
            # The root's default leaves weights unsharded after an evaluation; the next step would use outdated ones.
            fully_shard(model, reshard_after_forward=True)
        loss: Callable[..., Tensor] = model.loss  # type: ignore[assignment]
        return loss

    def part(self, batch: Tensor) -> Tensor:
        """Cut this rank's part from a batch, whose windows all ranks agree on.

        Raises:
            ValueError: the batch does not divide into equal parts.
        """
        if len(batch) % self.world:
            raise ValueError(f"--batch {len(batch)} does not divide by {self.world} ranks; choose a multiple of it")
        return batch.chunk(self.world)[self.rank]

    def mean(self, value: Tensor) -> float:
        """Average a number over the ranks."""
        value = value.detach().double()
        if self.world > 1:
            torch.distributed.all_reduce(value)
        return float(value) / self.world

    def any(self, flag: bool) -> bool:
        """Say whether ``flag`` is set on any rank."""
        return self.mean(torch.tensor(float(flag))) > 0


class _Loss(nn.Module):
    """A model whose forward is its loss: DDP looks at forward alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor, **options: Any) -> Tensor:
        loss: Tensor = self.model.loss(batch, **options)  # type: ignore[operator]
        return loss


def here(kind: str) -> Ranks:
    """Return the processes of this run, whose process group is up (see `processes`)."""
    if kind == "none":
        return Ranks()
    return Ranks(kind, torch.distributed.get_rank(), torch.distributed.get_world_size())


def gathered(values: Any) -> Any:
    """Copy a state dict so that every tensor is whole, on every rank."""
    if isinstance(values, Mapping):
        return {key: gathered(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(gathered(value) for value in values)
    return values.full_tensor() if is_distributed(values) else values


def scatter_(target: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into those of ``target``, of which this rank may hold a part."""
    for name, tensor in target.items():
        tensor.copy_(scattered(source[name], tensor))


def scattered(value: Any, like: Tensor) -> Any:
    """Return shard ``value`` as ``like`` is, if it is a tensor of the same shape; else return it as it is."""
    if not (is_distributed(like) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the whole tensor: each takes its part, and nobody sends anything.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


@contextlib.contextmanager
def processes(kind: str, device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun started, and leave them at the end.

    Args:
        kind: one of `PARALLEL`.
        device: the device type of the run: "cpu" talks through gloo, "cuda" through nccl.

    Raises:
        ValueError: unknown kind, or not started by torchrun, or started by it without a kind.
    """
    if kind not in PARALLEL:
        raise ValueError(f"unknown --parallel {kind!r}; choose one of {', '.join(PARALLEL)}")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if kind == "none":
        if world > 1:
            raise ValueError(f"torchrun started {world} processes; give --parallel ddp or --parallel fsdp2")
        yield Ranks()
        return
    if "RANK" not in os.environ:
        raise ValueError(
            f"--parallel {kind} needs processes: torchrun --nproc-per-node 2 -m daypack train --parallel {kind} ..."
        )
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.init_process_group("nccl" if cuda else "gloo")
    try:
        yield here(kind)
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def only_first(ranks: Ranks, folder: Path) -> Iterator[Path]:
    """Yield ``folder`` on the first rank, a temporary one on the others, which print nothing."""
    if ranks.first:
        yield folder
        return
    with (
        tempfile.TemporaryDirectory() as other,
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        yield Path(other)
