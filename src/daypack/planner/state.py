"""Bytes of optimizer state of any registered optimizer: it allocates its state on the meta device, and that is counted.

There is no table of optimizers here. daypack's own create state from their component specs (`materialize_state`);
torch's own take one step on gradients that exist as shapes only. Neither touches memory.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from daypack.geometry import CHUNK_ELEMENTS
from daypack.optim.base import CompressedOptimizer
from daypack.optim.groups import param_groups
from daypack.optim.registry import REGISTRY, create
from daypack.placement.schedule import PIECE_BYTES
from daypack.planner.live import LiveTensors
from daypack.planner.model import ParamSpec, from_shapes
from daypack.planner.parallel import Parallel

#: State of one parameter: key -> (shape, dtype) of each stored tensor; a plain number counts as one of 8 bytes.
Layout: TypeAlias = "dict[str, tuple[tuple[int, ...], torch.dtype]]"

#: Two fp32 moments: what a compressed state is compared with.
DENSE_BYTES = 8
#: A step of daypack's holds less than this many fp32 buffers of one chunk (docs/memory.md: below 64 MiB).
STEP_BUFFERS = 32
#: One that projects gradients works on whole parameters: two fp32 copies, and while a basis is found three fp64
#: matrices of ``min(rows, cols)^2``; together at most this many fp32 copies of the parameter.
PROJECTION_BUFFERS = 8


@dataclass(frozen=True)
class StatePlan:
    """State of one optimizer on one rank.

    Attributes:
        components: bytes by state key (``exp_avg_codes``), codebooks and counters included.
        temporaries: bytes that a step holds at its peak beyond parameters, gradients and state.
        offloaded: bytes of the state that wait in host memory; ``components`` then have them nonetheless.
        notes: what is unusual about it, in sentences.
    """

    components: dict[str, int]
    temporaries: int
    notes: tuple[str, ...] = ()
    offloaded: int = 0

    @property
    def total_bytes(self) -> int:
        """Wherever it is."""
        return sum(self.components.values())

    @property
    def device_bytes(self) -> int:
        """On the GPU: all of it, or if it is paged, the two pieces that are there at a time."""
        return min(self.total_bytes, 2 * PIECE_BYTES) if self.offloaded else self.total_bytes

    @property
    def keeps_both_moments(self) -> bool:
        """Whether it has AdamW's first and second moment of every element, in whatever form; projected ones are not."""
        kinds = {_moment(key) for key in self.components}
        return {"exp_avg", "exp_avg_sq"} <= kinds and "other" not in kinds


def parse_optimizer(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of ``sgd:momentum=0.9`` or ``gefen:second_moment=blocks:block_size=128``.

    Raises:
        ValueError: the name is not registered, or an option is not ``key=value``.
    """
    name, *rest = (part.strip() for part in text.split(":"))
    if name not in REGISTRY:
        raise ValueError(f"unknown optimizer {name!r}; choose one of {', '.join(REGISTRY)}")
    options: dict[str, Any] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ValueError(f"cannot read the option {part!r} of {text!r}; write it as in sgd:momentum=0.9")
        options[key.strip()] = _literal(value.strip())
    return name, options


def state_bytes(
    optimizer: str,
    params: Iterable[Any],
    dtype: torch.dtype = torch.float32,
    options: Mapping[str, Any] | None = None,
) -> int:
    """Bytes of state that ``optimizer`` keeps in one process: exactly what it allocates.

    Args:
        optimizer: a registered name, with options as in ``sgd:momentum=0.9`` if need be.
        params: parameters, shapes, or pairs of a name and either. A parameter that comes twice counts once, one with
            ``requires_grad`` False not at all.
        dtype: of parameters given as shapes.
        options: constructor arguments.

    Raises:
        ValueError: no such optimizer, or it refuses an option or a parameter.
    """
    name, given = parse_optimizer(optimizer)
    spec = from_shapes(params, dtype)
    return plan_state(name, spec.trainable, {**given, **(options or {})}).total_bytes


def plan_state(
    name: str,
    params: Sequence[ParamSpec],
    options: Mapping[str, Any] | None = None,
    parallel: Parallel | None = None,
    *,
    module: nn.Module | None = None,
    foreach: bool = True,
) -> StatePlan:
    """State of the trainable parameters ``params`` on one rank of ``parallel``.

    Args:
        module: what the parameters are of, for optimizers that ask what a parameter is for (heads, transposed weights).
        foreach: whether torch's own optimizers step all parameters at once, as they do by default on a GPU and never
            on a CPU: it decides their temporaries, not their state.
    """
    parallel, options = parallel or Parallel(), dict(options or {})
    paged = options.get("placement") == "paged"
    if paged:  # on the meta device it has no other place, and the same size
        options |= {"placement": "resident", "spill_dir": None}
    params = [p for p in params if p.trainable]
    if parallel.flat:
        params = parallel.partitions(params)
    elif parallel.whole_parameters:
        owned = parallel.owned(params)
        params = [p for p in params if p.name in owned]
    if not params:
        return StatePlan({}, 0)
    module = None if parallel.flat else module
    layouts, temporaries, notes = allocate(name, params, options, module=module, foreach=foreach, flat=parallel.flat)
    total: Counter[str] = Counter()
    if parallel.rows_sharded and parallel.world > 1:
        near = [_neighbour(name, params, options, module, change) for change in CHANGES]
        for i, (p, layout) in enumerate(zip(params, layouts, strict=True)):
            others = [
                (change(p.shape[0]), found[i]) for change, found in zip(CHANGES, near, strict=True) if found and p.shape
            ]
            total.update(_sharded(p, layout, others, parallel))
        if not issubclass(REGISTRY[name], CompressedOptimizer):  # they step what this rank has of each parameter
            temporaries = ceil(temporaries / parallel.world)
    else:
        for layout in layouts:
            total.update(_sizes(layout))
    notes = (*notes, *_larger_than_dense(params, layouts))
    return StatePlan(dict(total), temporaries, notes, sum(total.values()) if paged else 0)


def allocate(
    name: str,
    params: Sequence[ParamSpec],
    options: Mapping[str, Any],
    *,
    module: nn.Module | None = None,
    foreach: bool = True,
    flat: bool = False,
) -> tuple[list[Layout], int, tuple[str, ...]]:
    """Layout of each parameter's state, temporary bytes of a step, and the optimizer's own warnings.

    Args:
        flat: the parameters are plain one-dimensional tensors, as ZeRO hands them over, and not `nn.Parameter`.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not issubclass(REGISTRY[name], CompressedOptimizer):
            return (*_stepped(name, params, options, foreach), ())
        tensors = [_placeholder(p, flat) for p in params]
        groups = _groups(params, tensors)
        if module is not None and any(p.requires_grad for p in module.parameters()):
            known = param_groups(module)  # it may know the module; its parameters are exchanged for those planned for
            known[:] = groups
            groups = known
        optimizer = _create(name, groups, options)
        cast(CompressedOptimizer, optimizer).materialize_state()
    layouts = [_layout(optimizer.state.get(p, {})) for p in tensors]
    projected = [p.elements for p, layout in zip(params, layouts, strict=True) if "other" in map(_moment, layout)]
    temporaries = _bound(params) + PROJECTION_BUFFERS * 4 * max(projected, default=0)
    return layouts, temporaries, tuple(dict.fromkeys(_shortened(str(warning.message)) for warning in caught))


def _placeholder(p: ParamSpec, flat: bool = False) -> Tensor:
    tensor = torch.empty(p.shape, dtype=p.dtype, device="meta")
    return tensor.requires_grad_() if flat else nn.Parameter(tensor)


def _groups(params: Sequence[ParamSpec], tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Parameter groups of named tensors, one for each combination of group options."""
    groups: dict[tuple[tuple[str, Any], ...], list[tuple[str, Tensor]]] = {}
    for p, tensor in zip(params, tensors, strict=True):
        groups.setdefault(p.options, []).append((p.name, tensor))
    return [{"params": members, **dict(extra)} for extra, members in groups.items()]


def _create(name: str, groups: list[dict[str, Any]], options: Mapping[str, Any]) -> Optimizer:
    try:
        return create(name, groups, **options)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None


def _stepped(
    name: str, params: Sequence[ParamSpec], options: Mapping[str, Any], foreach: bool
) -> tuple[list[Layout], int]:
    """Layouts and temporaries of an optimizer that creates its state only in its step.

    Such an optimizer treats parameters of one shape, dtype and group alike, so one of each takes the step. All at once
    (foreach) their temporaries add up, one by one only the largest counts, and fused kernels have none.
    """
    fused = bool(options.get("fused"))
    given = {**options, "fused": False} if fused else dict(options)  # fused kernels refuse the meta device
    given.setdefault("foreach", foreach and not fused)
    found: dict[Any, tuple[Layout, int]] = {}
    for p in params:
        key = (p.shape, p.dtype, p.options)
        if key not in found:
            found[key] = _step(name, p, given)
    each = [found[p.shape, p.dtype, p.options] for p in params]
    peaks = [temporaries for _, temporaries in each]
    return [layout for layout, _ in each], 0 if fused else sum(peaks) if given["foreach"] else max(peaks)


def _step(name: str, spec: ParamSpec, options: Mapping[str, Any]) -> tuple[Layout, int]:
    """State after a step on one parameter, and the peak of the second step's temporaries in bytes."""
    p = _placeholder(spec)
    optimizer = _create(name, _groups([spec], [p]), options)
    p.grad = torch.empty_like(p)
    try:
        optimizer.step()
        state = [value for value in optimizer.state.get(p, {}).values() if isinstance(value, Tensor)]
        with LiveTensors([p, p.grad, *state]) as live:
            optimizer.step()
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{name} cannot be planned: its step does not run on shapes alone ({error})") from None
    return _layout(optimizer.state.get(p, {})), live.peak


def _layout(state: Mapping[str, Any]) -> Layout:
    layout: Layout = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            layout[str(key)] = (tuple(value.shape), value.dtype)
        elif isinstance(value, (int, float)):
            layout[str(key)] = ((), torch.int64)
    return layout


def _sizes(layout: Layout) -> dict[str, int]:
    return {key: torch.Size(shape).numel() * dtype.itemsize for key, (shape, dtype) in layout.items()}


#: Other numbers of rows that a parameter is planned with, to see which tensors follow them.
CHANGES: tuple[Callable[[int], int], ...] = (
    lambda rows: rows + 1,
    lambda rows: max(0, rows - 1),
    lambda rows: 2 * rows,
)


def _neighbour(
    name: str,
    params: Sequence[ParamSpec],
    options: Mapping[str, Any],
    module: nn.Module | None,
    change: Callable[[int], int],
) -> list[Layout] | None:
    """Layouts of the same parameters with other numbers of rows; None if the optimizer refuses them."""
    moved = [replace(p, shape=(change(p.shape[0]), *p.shape[1:]) if p.shape else ()) for p in params]
    try:
        return allocate(name, moved, options, module=module)[0]
    except ValueError:
        return None


def _sharded(p: ParamSpec, layout: Layout, others: Sequence[tuple[int, Layout]], parallel: Parallel) -> dict[str, int]:
    """Bytes of one parameter's state on one rank: what has a row for each row of the parameter is sharded with it, all
    else (column factors, codebooks, counters) is on every rank.

    Args:
        others: numbers of rows and the layouts that the parameter would have with them. Without any, the shapes decide.
    """
    sizes = _sizes(layout)
    for key, (shape, _) in layout.items():
        if not shape or not shape[0] or shape[0] != p.shape[0]:
            continue
        if not others or any(key in other and other[key][0] == (rows, *shape[1:]) for rows, other in others):
            sizes[key] = sizes[key] // shape[0] * parallel.rows(shape[0])
    return sizes


def _bound(params: Sequence[ParamSpec]) -> int:
    """Temporary bytes of a step of daypack's: it touches at most a row chunk at a time."""
    largest = max(p.elements for p in params)
    return STEP_BUFFERS * 4 * min(CHUNK_ELEMENTS, largest)


def _moment(key: str) -> str:
    """Which of AdamW's moments a state key belongs to; ``"step"``, or ``"other"`` for what AdamW does not have."""
    if key == "step" or key.startswith("exp_avg_sq"):
        return "step" if key == "step" else "exp_avg_sq"
    return "exp_avg" if key.startswith("exp_avg") else "other"


def _larger_than_dense(params: Sequence[ParamSpec], layouts: Sequence[Layout]) -> tuple[str, ...]:
    """One sentence where state takes more than two dense fp32 moments: a rank too high, rows too short."""
    larger = [
        p
        for p, layout in zip(params, layouts, strict=True)
        if sum(size for key, size in _sizes(layout).items() if key != "step")
        > DENSE_BYTES * p.elements * (2 if p.dtype == torch.float64 else 1)
    ]
    if not larger:
        return ()
    return (
        f"the state of {len(larger)} parameters, such as {larger[0].name} {larger[0].shape}, takes more than two dense "
        "moments would; lower the rank, or leave them to AdamW",
    )


def _shortened(text: str, length: int = 240) -> str:
    """A warning without the end of a long list of names."""
    return text if len(text) <= length else text[: text.rfind(",", 0, length)] + ", ..."


def _literal(text: str) -> Any:
    """A Python number, flag or None, else the text itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
