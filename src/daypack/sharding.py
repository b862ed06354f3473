"""The only file that knows distributed tensors and process groups.

A parameter that is a DTensor is stepped on each rank's own part. Its state is sharded like the parameter: tensors
whose dim 0 follows the parameter's are DTensors with its mesh and placements, all others are whole on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from daypack.formats.base import ComponentSpec
from daypack.geometry import Geometry, geometry
from daypack.param import ParamPlan

#: Vectors that are not `nn.Parameter`s and have fewer elements are not treated as flat partitions.
SMALLEST_PARTITION = 1 << 14


def is_distributed(tensor: Any) -> bool:
    """Return whether ``tensor`` is a DTensor, without importing torch.distributed.tensor, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_flat_partition(tensor: Tensor) -> bool:
    """Return whether ``tensor`` looks like a flat piece of other parameters, as ZeRO and FSDP1 use.

    They mark it, or hand over a vector that is not an `nn.Parameter`.
    """
    return tensor.ndim == 1 and (is_fsdp1_piece(tensor) or not isinstance(tensor, Parameter))


def is_fsdp1_piece(tensor: Tensor) -> bool:
    """Return whether ``tensor`` comes from FullyShardedDataParallel, which saves only state that is shaped like it."""
    return bool(getattr(tensor, "_is_flat_param", False) or getattr(tensor, "_fsdp_flattened", False))


def any_distributed(tensors: Iterable[Any]) -> bool:
    """Return whether any of ``tensors`` is a DTensor; costs nothing in a program that has none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in {*map(type, tensors)})


def is_bare_partition(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a flat piece that nobody gathers by parameter (ZeRO's), worth compressing."""
    return tensor.ndim == 1 and not isinstance(tensor, Parameter) and tensor.numel() >= SMALLEST_PARTITION


def refusal(tensor: Tensor) -> str | None:
    """Say why a DTensor cannot be stepped; None if it can, or if it is none."""
    if not is_distributed(tensor):
        return None
    placements = tuple(tensor.placements)  # type: ignore[attr-defined]
    if all(place.is_replicate() or (place.is_shard() and place.dim == 0) for place in placements):
        return None
    return f"is a DTensor placed as {placements}; shard it along dim 0 (fully_shard's default) or replicate it"


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory, or the tensor itself."""
    if not is_distributed(tensor):
        return tensor
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local.wait() if hasattr(local, "wait") else local


def to_local_gradient(param: Tensor) -> Tensor:
    """Return this rank's part of a gradient, laid out as the parameter's; zeros that take no memory if it has none."""
    grad = param.grad
    if grad is None:
        part = to_local(param)
        return part.new_zeros(()).expand(part.shape)
    if is_distributed(param) and grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return to_local(grad)


def local_view(param: Tensor, plan: ParamPlan) -> Geometry:
    """Return the geometry of this rank's part for the formats; whatever depends on shapes is decided by the global
    shape.
    """
    view = plan.view(param.shape)
    if not is_distributed(param):
        return view
    if plan.projection:
        raise ValueError(
            f"a DTensor of shape {tuple(param.shape)} cannot be projected: its gradient is in parts; give its group "
            "rank=None, or use DDP"
        )
    shape, start = _local(param)
    return view.shard(shape, start)


def _local(tensor: Tensor) -> tuple[tuple[int, ...], int]:
    """Return the shape of this rank's part of a DTensor, and where in dim 0 it begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    return tuple(shape), offset[0] if offset else 0


def rows_of(tensor: Tensor) -> tuple[tuple[int, int], bool]:
    """Return which rows of dim 0 are on this rank, and whether it is the first rank that holds them."""
    if not is_distributed(tensor):
        return (0, tensor.shape[0] if tensor.dim() else 1), True
    shape, start = _local(tensor)
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    copies = [mesh.get_local_rank(dim) for dim, placement in enumerate(placements) if placement.is_replicate()]
    start = start if shape[0] else 0
    return (start, start + shape[0]), not any(copies)


def rank_of(params: Sequence[Tensor]) -> tuple[int, int]:
    """Return this process's rank and the number of ranks if any of ``params`` is a DTensor, else 0 and 1."""
    if not any(map(is_distributed, params)):
        return 0, 1
    import torch.distributed

    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def wrap(param: Tensor, local: Tensor, spec: ComponentSpec) -> Tensor:
    """Return ``local`` as a state tensor of ``param``; ``spec`` is that of the whole parameter."""
    if not (is_distributed(param) and spec.follows):
        return local
    from torch.distributed.tensor import DTensor

    # Without the global shape, uneven and empty shards would be taken for even ones.
    stride = torch.empty(spec.shape, device="meta").stride()
    return DTensor.from_local(
        local,
        param.device_mesh,  # type: ignore[attr-defined]
        param.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=stride,
    )


def place(param: Tensor, value: Tensor, spec: ComponentSpec) -> Tensor:
    """Return this rank's part of a saved state tensor of ``param`` (a whole tensor, or a DTensor of any sharding)."""
    follows = is_distributed(param) and spec.follows
    if is_distributed(value):
        if follows and value.device_mesh == param.device_mesh and value.placements == param.placements:  # type: ignore[attr-defined]
            return to_local(value)
        value = value.full_tensor()  # type: ignore[attr-defined]
    if not (follows and value.dim()):
        return value
    shape, start = _local(param)
    return value.narrow(0, start if shape[0] else 0, shape[0])


def gather_rows(param: Tensor, local: Tensor, view: Geometry) -> Tensor:
    """Return whole matrices ``[matrices, rows, cols]`` of which ``local`` has this rank's rows. Every rank calls it.

    Args:
        param: that ``local`` belongs to.
        view: of ``local``.
    """
    if view.batched or not is_distributed(param):
        return local  # a shard of dim 0 holds whole matrices
    shape = tuple(param.shape)
    whole: Tensor = wrap(param, local.view(view.shape), ComponentSpec("", shape, local.dtype)).full_tensor()  # type: ignore[attr-defined]
    return whole.view(geometry(shape).view3)


def own_rows(matrices: Tensor, view: Geometry) -> Tensor:
    """Return the rows of ``view``, a shard, from what `gather_rows` returned."""
    return matrices if view.batched else matrices[:, view.start : view.start + view.rows]


class LocalState(dict[str, Any]):
    """This rank's parts of the state of a DTensor parameter. A tensor set here goes into the state itself, wrapped."""

    def __init__(self, param: Tensor, state: dict[str, Any], specs: dict[str, ComponentSpec]) -> None:
        super().__init__({key: to_local(value) for key, value in state.items()})
        self._param, self._state, self._specs = param, state, specs

    def __setitem__(self, key: str, value: Any) -> None:
        if value is self.get(key):
            return  # changed in place
        super().__setitem__(key, value)
        spec = self._specs[key]
        # Calibration may resize the last dim.
        whole = (*spec.shape[:-1], value.shape[-1]) if value.dim() else spec.shape
        self._state[key] = wrap(self._param, value, ComponentSpec(spec.suffix, whole, spec.dtype, spec.follows))


Groups = tuple[Any, ...]


def groups_of(param: Tensor) -> Groups:
    """Return the process groups to add up the shards of ``param`` over; none where each rank has all of it."""
    if not is_distributed(param):
        return ()
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_shard())


def add_up(groups: Groups, numbers: Tensor) -> Tensor:
    """Sum ``numbers`` over the ranks of ``groups``, in place. Every rank calls it, with tensors of the same size."""
    import torch.distributed

    for group in groups:
        torch.distributed.all_reduce(numbers, group=group)
    return numbers


def agree(params: Sequence[Tensor], error: ValueError | None) -> None:
    """Raise ``error``, or another one on ranks without an error, if any rank that shares one of ``params`` has one."""
    failed = 0
    for groups in {groups_of(p): None for p in params if groups_of(p)}:
        device = next(p.device for p in params if groups_of(p) == groups)
        failed += int(add_up(groups, torch.tensor([error is not None], dtype=torch.float32, device=device)))
    _refuse(error, failed)


def agree_everywhere(params: Sequence[Tensor], error: ValueError | None) -> None:
    """Run `agree` over all ranks; nothing is communicated where no parameter is a DTensor.

    Therefore all ranks of the job must hold a DTensor, or none. A rank without one does not know that others wait for
    it, and must not communicate, since a job without DTensors may call this on its first rank alone.
    """
    _refuse(error, add_up_everywhere(params, error is not None))


def add_up_everywhere(params: Sequence[Tensor], number: int) -> int:
    """Return ``number`` summed over all ranks; where no parameter is a DTensor, ``number`` itself."""
    device = next((p.device for p in params if is_distributed(p)), None)
    if device is None:
        return number
    import torch.distributed

    total = torch.tensor([number], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(total)
    return int(total)


def _refuse(error: ValueError | None, failed: int) -> None:
    if error or failed:
        raise error or ValueError("another rank refused its part; its error says why. Nothing was changed")


class Buffer:
    """Tensors of fixed sizes that are added up over the ranks by one collective per set of process groups.

    Attributes:
        sizes: numbers of each entry.
    """

    def __init__(self, groups: Sequence[Groups], sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._members: dict[Groups, list[int]] = {}
        for i, each in enumerate(groups):
            self._members.setdefault(each, []).append(i)

    def add_up(self, entries: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over all ranks of each entry, 1-D, in the widest dtype of those that are sent together."""
        result = list(entries)
        for groups, members in self._members.items():
            dtype = torch.float64 if any(entries[i].dtype == torch.float64 for i in members) else torch.float32
            together = torch.cat([entries[i].reshape(-1).to(dtype) for i in members])
            parts = torch.split(add_up(groups, together), [self.sizes[i] for i in members])
            for i, part in zip(members, parts, strict=True):
                result[i] = part
        return result
