"""Bytes of live tensors: the only place that counts them, and `state_report`, which shows those of an optimizer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from daypack.optim.base import CompressedOptimizer
from daypack.sharding import to_local

#: Bytes per element of AdamW's two fp32 moments, which other state is compared with.
ADAMW_BYTES = 8


@dataclass(frozen=True)
class StateEntry:
    """Measured state of one parameter; of a sharded one, of this rank's part.

    Attributes:
        components: bytes by state key.
        kernel: the one that took the last step; empty before the first one and for torch's own optimizers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    components: dict[str, int]
    kernel: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(self.components.values())

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class StateReport:
    """Measured state of an optimizer; ``str()`` of it is a table.

    Attributes:
        entries: one for each parameter that is trainable or has state; without state it has no components.
    """

    entries: tuple[StateEntry, ...]

    @property
    def parameters(self) -> int:
        """Elements of the parameters listed."""
        return sum(entry.elements for entry in self.entries)

    @property
    def total_bytes(self) -> int:
        return sum(entry.total_bytes for entry in self.entries)

    @property
    def bytes_per_param(self) -> float:
        """Everything counted: codes, scales, statistics, codebooks and step counters."""
        return self.total_bytes / self.parameters if self.parameters else 0.0

    @property
    def components(self) -> dict[str, int]:
        """Bytes by component over all parameters."""
        total: Counter[str] = Counter()
        for entry in self.entries:
            total.update(entry.components)
        return dict(total)

    def __str__(self) -> str:
        width = max([9, *(len(entry.name) for entry in self.entries)])
        lines = [f"{'parameter':<{width}}  {'shape':<20} {'bytes':>14} {'B/param':>8}  {'kernel':<9}  components"]
        for entry in self.entries:
            each = entry.total_bytes / entry.elements if entry.elements else 0.0
            lines.append(
                f"{entry.name:<{width}}  {'x'.join(map(str, entry.shape)) or 'scalar':<20} {entry.total_bytes:>14,} "
                f"{each:>8.3f}  {entry.kernel:<9}  {', '.join(entry.components) or 'no state'}"
            )
        lines += [f"{key:<{width}}  {'':<20} {nbytes:>14,}" for key, nbytes in self.components.items()]
        adamw = ADAMW_BYTES * self.parameters
        share = f", {adamw / self.total_bytes:.2f}x less than AdamW's {adamw:,}" if self.total_bytes else ""
        lines.append(f"total: {self.total_bytes:,} bytes, {self.bytes_per_param:.3f} per parameter{share}")
        return "\n".join(lines)


def state_report(optimizer: Optimizer) -> StateReport:
    """Measure the state of any torch optimizer. Storage that several tensors share is counted once.

    Raises:
        ValueError: ``optimizer`` is none.
    """
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise ValueError(f"state_report takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    seen: set[int] = set()
    entries = []
    kernels = optimizer.kernels() if isinstance(optimizer, CompressedOptimizer) else {}
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for i, p in enumerate(group["params"]):
            state = optimizer.state.get(p, {})
            if not state and not p.requires_grad:
                continue
            name = names[i] if names else f"group {g}, parameter {i}"
            components = {str(key): value_bytes(value, seen) for key, value in state.items()}
            entries.append(StateEntry(name, tuple(to_local(p).shape), p.dtype, components, kernels.get(p, "")))
    return StateReport(tuple(entries))


def value_bytes(value: Any, seen: set[int]) -> int:
    """Count the bytes of one state value: a tensor's elements on this rank, 8 for a plain number.

    Args:
        seen: addresses of the storages counted so far, to which this one is added; what lies in one of them counts 0.
    """
    if not isinstance(value, Tensor):
        return 8 if isinstance(value, (int, float)) else 0
    value = to_local(value)
    storage = value.untyped_storage().data_ptr()
    if storage in seen and value.numel():
        return 0
    seen.add(storage)
    return tensor_bytes(value)


def tensor_bytes(*tensors: Tensor) -> int:
    """Add up the bytes of the elements that this rank has of each tensor."""
    return sum(to_local(tensor).nbytes for tensor in tensors)
