"""State of one optimizer on one rank: what it takes, and how the options of `daypack plan` name it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, cast

import torch
from torch import nn

from daypack.optim.base import CompressedOptimizer
from daypack.optim.registry import REGISTRY, create
from daypack.optim.state_dict import STEP
from daypack.placement.schedule import PIECE_BYTES
from daypack.planner.model import ParamSpec, from_shapes
from daypack.planner.parallel import Parallel
from daypack.planner.prediction import Predicted, StoredTensors, is_ours, predict, sizes


@dataclass(frozen=True)
class StateEstimate:
    """Predicted state of a set of parameters.

    Attributes:
        parameters: elements.
        total_bytes: bytes of state, step counters and codebooks included.
    """

    parameters: int
    total_bytes: int

    @property
    def bytes_per_param(self) -> float:
        return self.total_bytes / self.parameters if self.parameters else 0.0


@dataclass(frozen=True)
class StatePlan:
    """State of one optimizer on one rank.

    Attributes:
        components: bytes by state key (``exp_avg_codes``), codebooks and counters included.
        temporaries: bytes that a step holds at its peak beyond parameters, gradients and state.
        offloaded: bytes of the state that wait in host memory; ``components`` then have them nonetheless.
        keeps_both_moments: whether it has AdamW's first and second moment of every element, in whatever form; projected
            ones are not.
        notes: what is unusual about it, in sentences.
    """

    components: dict[str, int]
    temporaries: int
    notes: tuple[str, ...] = ()
    offloaded: int = 0
    keeps_both_moments: bool = False

    @property
    def total_bytes(self) -> int:
        """Wherever it is."""
        return sum(self.components.values())

    @property
    def device_bytes(self) -> int:
        """On the GPU: all of it, or if it is paged, the two pieces that are there at a time."""
        return min(self.total_bytes, 2 * PIECE_BYTES) if self.offloaded else self.total_bytes


def parse_optimizer(text: str) -> tuple[str, dict[str, Any]]:
    """Read name and options of ``sgd:momentum=0.9`` or ``gefen:second_moment=blocks:block_size=128``.

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
    """Predict the bytes of state that ``optimizer`` keeps in one process: exactly what it allocates.

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


def estimate_state(
    shapes: Iterable[Sequence[int]], dtype: torch.dtype = torch.float32, optimizer: str = "gefen", **options: object
) -> StateEstimate:
    """Predict the state that an optimizer keeps for trainable parameters of ``shapes`` (global shapes) and ``dtype``.

    Exact but for Gefen's ``second_moment="blocks"``, whose block size is found from data: the estimate is that of a row
    without structure.

    Args:
        optimizer: the name of one of daypack's own.
        options: its options, such as Gefen's ``second_moment`` or ``bits=8`` of ``adam_mini``.

    Raises:
        ValueError: no such optimizer, or an option or a shape that cannot be.
    """
    if not is_ours(optimizer):
        raise ValueError(f"{optimizer!r} is one of torch's own; estimates are made for daypack's, such as 'gefen'")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype of estimate_state must be a torch.dtype, got {dtype!r}")
    try:
        whole = [torch.Size(shape) for shape in shapes]
    except TypeError:
        raise ValueError(
            "estimate_state takes shapes, such as [p.shape for p in model.parameters()], got "
            f"{type(shapes).__name__} {shapes!r:.60}"
        ) from None
    # An optimizer over an empty tensor checks the options and holds the defaults.
    empty = cast(CompressedOptimizer, create(optimizer, [torch.empty(0)], **options))
    total = 0
    for shape in whole:
        if any(size < 0 for size in shape):
            raise ValueError(f"a shape has sizes of at least 0, got {tuple(shape)}")
        total += STEP.nbytes + empty.plan(shape, dtype, empty.param_groups[0], "").nbytes(shape, dtype)
    return StateEstimate(sum(map(prod, whole)), total)


def plan_state(
    name: str,
    params: Sequence[ParamSpec],
    options: Mapping[str, Any] | None = None,
    parallel: Parallel | None = None,
    *,
    module: nn.Module | None = None,
    foreach: bool = True,
) -> StatePlan:
    """Predict the state of the trainable parameters ``params`` on one rank of ``parallel``.

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
    found = predict(name, params, options, module=module, foreach=foreach, flat=parallel.flat)
    temporaries = found.temporaries
    sharded = parallel.rows_sharded and parallel.world > 1
    if sharded and not is_ours(name):  # they step what this rank has of each parameter
        temporaries = ceil(temporaries / parallel.world)
    total: Counter[str] = Counter()
    for p, kept in zip(params, found.params, strict=True):
        total.update(_sharded(p, kept.tensors, parallel) if sharded else sizes(kept.tensors))
    notes = (*found.notes, *_larger_than_dense(params, found.params))
    offloaded = sum(total.values()) if paged else 0
    return StatePlan(dict(total), temporaries, notes, offloaded, all(kept.adamw for kept in found.params))


def _sharded(p: ParamSpec, tensors: StoredTensors, parallel: Parallel) -> dict[str, int]:
    """Return the bytes of one parameter's state on one rank, by key: its rows of what follows the parameter's dim 0,
    and all of everything else (column factors, codebooks, counters).
    """
    result = sizes(tensors)
    for key, spec in tensors.items():
        if spec.follows and p.shape and p.shape[0] and spec.shape[:1] == p.shape[:1]:
            result[key] = result[key] // p.shape[0] * parallel.rows(p.shape[0])
    return result


def _larger_than_dense(params: Sequence[ParamSpec], each: Sequence[Predicted]) -> tuple[str, ...]:
    """Return a sentence if some state takes more than dense moments: its rank is too high, or its rows too short."""
    larger = [p for p, kept in zip(params, each, strict=True) if _moment_bytes(kept) > kept.dense]
    if not larger:
        return ()
    return (
        f"the state of {len(larger)} parameters, such as {larger[0].name} {larger[0].shape}, takes more than dense "
        "moments would; lower the rank, or leave them to AdamW",
    )


def _moment_bytes(kept: Predicted) -> int:
    return sum(size for key, size in sizes(kept.tensors).items() if key != "step")


def _literal(text: str) -> Any:
    """Return ``text`` as a Python number, flag or None, else as it is."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
