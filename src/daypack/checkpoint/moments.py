"""Moments apart from how they are stored: read from one optimizer's state as numbers, written into another's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from daypack.calibration.blocks import find_block_size
from daypack.checkpoint.live import torch_class
from daypack.checkpoint.snapshot import Stored, Value
from daypack.formats.base import Chunk, Geometry, StateFormat, accumulator, chunks, geometry, write_
from daypack.formats.block_mean import BlockMean
from daypack.formats.dense import Dense
from daypack.optim.base import CompressedOptimizer
from daypack.update import ParamPlan

#: Names of the two moments, as `daypack.update.ParamPlan` has them.
MOMENTS = ("exp_avg", "exp_avg_sq")
#: What a parameter's steps are taken for where its optimizer (torch's SGD) does not count them: past any warm-up.
UNCOUNTED = 10_000

Options = Mapping[str, Any]
#: (options of the group, steps) -> factor from what is stored to the mean of g or of g^2 that it stands for.
Scale = Callable[[Options, int], float]


def _corrected(which: int) -> Scale:
    """A moving average from 0 with decay ``betas[which]``."""
    return lambda options, step: 1 / (1 - float(options["betas"][which]) ** step)


def _summed(options: Options, step: int) -> float:
    """Momentum that adds gradients up: ``m = mu m + (1 - dampening) g``."""
    momentum = float(options["momentum"])
    return (1 - momentum) / ((1 - momentum**step) * (1 - float(options["dampening"]) or 1.0))


def _plain(options: Options, step: int) -> float:
    """An average that is not biased towards 0."""
    return 1.0


#: What each rule's moments stand for. None: not kept, or something else than a mean of g or of g^2 (Adafactor averages
#: directions). State is carried from rule to rule so that these means stay what they are.
MEANINGS: dict[str, tuple[Scale | None, Scale | None]] = {
    "adamw": (_corrected(0), _corrected(1)),
    "adam": (_corrected(0), _corrected(1)),
    "lamb": (_corrected(0), _corrected(1)),
    "lion": (_corrected(1), None),
    "sgd": (_summed, None),
    "adafactor": (None, _plain),
}


@dataclass(frozen=True)
class Moment:
    """How a moment is stored: its format, and the beginning of its keys in the state."""

    form: StateFormat
    key: str


@dataclass(frozen=True)
class Layout:
    """How the state of one parameter is stored.

    Attributes:
        rule: name of the update rule.
        moments: by name; only those that are kept.
        note: why moments that are kept cannot be carried; empty if they can.
        counts: whether steps are counted.
        plan: of daypack's optimizers; state of equal plans is the same.
    """

    rule: str
    moments: Mapping[str, Moment]
    note: str = ""
    counts: bool = True
    plan: ParamPlan | None = None


def dense(rule: str, counts: bool = True, **keys: str) -> Layout:
    """State as torch keeps it: each moment one tensor of the parameter's shape."""
    return Layout(rule, {moment: Moment(Dense(), key) for moment, key in keys.items()}, counts=counts)


#: State that is stored as torch stores it, by class.
PLAIN = {
    "AdamW": dense("adamw", exp_avg="exp_avg", exp_avg_sq="exp_avg_sq"),
    "Adam": dense("adam", exp_avg="exp_avg", exp_avg_sq="exp_avg_sq"),
    "SGD": dense("sgd", counts=False, exp_avg="momentum_buffer"),
    "Lion": dense("lion", exp_avg="exp_avg"),
}


def layout(optimizer: Optimizer, group: Options, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Layout:
    """How ``optimizer`` stores the state of a parameter."""
    if not isinstance(optimizer, CompressedOptimizer):
        found = PLAIN[torch_class(optimizer).__name__]
        return found if group.get("momentum", 1) else Layout(found.rule, {}, counts=False)
    plan = optimizer.plan(torch.Size(shape), dtype, dict(group), name)
    if plan.projection is not None:
        return Layout(plan.rule.name, {}, "its moments belong to a low-rank projection", plan=plan)
    return Layout(plan.rule.name, {moment: Moment(form, moment) for moment, form in plan.moments}, plan=plan)


def load_entry(entry: Mapping[str, Value], layout: Layout, view: Geometry) -> dict[str, Any]:
    """The saved state of one parameter, read, in the shapes that formats work on."""
    state = {key: value.whole() if isinstance(value, Stored) else value for key, value in entry.items()}
    for moment in layout.moments.values():
        moment.form.load_(state, moment.key, view)
    return state


def same_scales(plan: ParamPlan, ours: Options, theirs: Options, step: int) -> bool:
    """Whether a rule means the same by its moments under the options of two groups."""
    scales = [scale for scale in MEANINGS.get(plan.rule.name, ()) if scale is not None]
    return all(scale(ours, step) == scale(theirs, step) for scale in scales)


@dataclass
class Numbers:
    """A moment as numbers, a chunk at a time: ``[b, r, c]`` in fp32 (fp64 for fp64 parameters).

    Attributes:
        view: the parameter.
        read: decodes a chunk.
        align: chunks of a row start at multiples of this many columns.
        stored: where it comes from, if that can be taken over as it is: format, key, state.
    """

    view: Geometry
    read: Callable[[Chunk], Tensor]
    align: int = 1
    stored: tuple[StateFormat, str, Mapping[str, Any]] | None = None
    compressed: bool = field(default=False)

    def chunks(self, align: int = 1) -> Iterator[Chunk]:
        return chunks(self.view, lcm(self.align, align))

    def any(self) -> bool:
        return any(bool(self.read(chunk).any()) for chunk in self.chunks())

    def whole(self) -> Tensor:
        """All of it, in the parameter's shape."""
        parts = [(chunk, self.read(chunk)) for chunk in self.chunks()]
        dtype = parts[0][1].dtype if parts else torch.float32
        result = torch.zeros(self.view.shape, dtype=dtype, device=parts[0][1].device if parts else None)
        for chunk, part in parts:
            write_(result, self.view, chunk, part)
        return result


def numbers(state: Mapping[str, Any], moment: Moment, view: Geometry, dtype: torch.dtype, scale: float) -> Numbers:
    """A stored moment, times ``scale``."""
    decoder = moment.form.decoder(dict(state), moment.key, view)
    real = accumulator(dtype)

    def read(chunk: Chunk) -> Tensor:
        rows, cols = chunk[1], chunk[2]
        value = decoder(chunk).to(real)
        # Row means decode to one column, column means to one row.
        size = (value.shape[0], len(range(*rows.indices(view.rows))), len(range(*cols.indices(view.cols))))
        value = value.expand(size)
        return value if scale == 1 else value * scale

    same = (moment.form, moment.key, state) if scale == 1 else None
    return Numbers(view, read, moment.form.align(view), same, not isinstance(moment.form, Dense))


def of_dense(tensor: Tensor) -> Numbers:
    """A tensor of the parameter's shape."""
    view = geometry(tuple(tensor.shape))
    return numbers({"x": tensor}, Moment(Dense(), "x"), view, tensor.dtype, 1.0)


def prepare_(state: MutableMapping[str, Any], moment: Moment, source: Numbers) -> None:
    """Find what a format finds from first gradients: here from the root of the second moment that it will hold."""
    if isinstance(moment.form, BlockMean) and source.any():
        size = find_block_size(source.whole().sqrt_(), source.view)
        moment.form.resize_(state, moment.key, source.view, size)


def write(state: MutableMapping[str, Any], moment: Moment, source: Numbers, step: int) -> float:
    """Store a moment in ``state``; returns the error of what is stored relative to ``source`` (2-norms)."""
    form, key, view = moment.form, moment.key, source.view
    if source.stored and source.stored[0] == form:
        _, theirs, saved = source.stored
        for suffix in _suffixes(moment, view):
            own = state[key + suffix]
            # A new tensor: what is found from data (blocks of a second moment) has a shape of its own.
            state[key + suffix] = saved[theirs + suffix].to(own.device, own.dtype, copy=True)
        return _error(state, moment, source)
    prepare_(state, moment, source)
    like = _like(state, moment, view)
    if form.statistics:
        sums = form.sums(state, key, view, like)
        for chunk in source.chunks(form.align(view)):
            form.observe(sums, view, chunk, source.read(chunk).to(like))
        if view.matrices * view.rows * view.cols:
            form.combine(state, key, view, sums, 0.0)
    else:
        for chunk in source.chunks(form.align(view)):
            form.encode_(state, key, view, chunk, source.read(chunk).to(like), step)
    return _error(state, moment, source)


def _suffixes(moment: Moment, view: Geometry) -> list[str]:
    return [spec.suffix for spec in moment.form.components(view, torch.float32)]


def _like(state: Mapping[str, Any], moment: Moment, view: Geometry) -> Tensor:
    """A 0-dim tensor on the device of a moment's state, in the dtype that it is computed in."""
    tensors = [state[moment.key + suffix] for suffix in _suffixes(moment, view)]
    stored = next(t for t in tensors if t.is_floating_point())
    return torch.zeros((), dtype=accumulator(stored.dtype), device=stored.device)


def _error(state: Mapping[str, Any], moment: Moment, source: Numbers) -> float:
    read = numbers(state, moment, source.view, _like(state, moment, source.view).dtype, 1.0).read
    off = size = 0.0
    for chunk in source.chunks(moment.form.align(source.view)):
        wanted = source.read(chunk).double().cpu()
        off += float((read(chunk).double().cpu() - wanted).square().sum())
        size += float(wanted.square().sum())
    return (off / size) ** 0.5 if size else 0.0
