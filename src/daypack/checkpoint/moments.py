"""Moments apart from how they are stored: read from one optimizer's state as numbers, written into another's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from daypack.checkpoint.save_load import torch_class
from daypack.checkpoint.snapshot import Stored, Value
from daypack.formats.base import StateFormat
from daypack.formats.dense import Dense
from daypack.geometry import Chunk, Geometry, accumulator, chunks, geometry, write_
from daypack.kernels import dispatch
from daypack.optim.base import CompressedOptimizer
from daypack.param import ParamPlan
from daypack.rules.adamw import ADAM, ADAMW
from daypack.rules.base import Moment, Options, Rule
from daypack.rules.lion import LION
from daypack.rules.sgd import SGD

#: Step count assumed for a parameter whose optimizer (torch's SGD) keeps none: past any warm-up.
UNCOUNTED = 10_000


@dataclass(frozen=True)
class StoredMoment:
    """A moment and how it is stored: its format, and the beginning of its keys in the state."""

    moment: Moment
    form: StateFormat
    key: str


@dataclass(frozen=True)
class Storage:
    """How the state of one parameter is stored.

    Attributes:
        rule: the update rule.
        moments: by name; only those that are kept.
        note: why moments that are kept cannot be carried; empty if they can.
        counts: whether steps are counted.
        plan: of daypack's optimizers; state of equal plans is the same.
    """

    rule: Rule
    moments: Mapping[str, StoredMoment]
    note: str = ""
    counts: bool = True
    plan: ParamPlan | None = None


def dense(rule: Rule, counts: bool = True, **keys: str) -> Storage:
    """Describe state as torch keeps it: each moment one tensor of the parameter's shape."""
    moments = {name: StoredMoment(rule.moment(name), Dense(), key) for name, key in keys.items()}
    return Storage(rule, moments, counts=counts)


#: State that is stored as torch stores it, by class.
PLAIN = {
    "AdamW": dense(ADAMW, exp_avg="exp_avg", exp_avg_sq="exp_avg_sq"),
    "Adam": dense(ADAM, exp_avg="exp_avg", exp_avg_sq="exp_avg_sq"),
    "SGD": dense(SGD, counts=False, exp_avg="momentum_buffer"),
    "Lion": dense(LION, exp_avg="exp_avg"),
}


def storage(optimizer: Optimizer, group: Options, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Storage:
    """Return how ``optimizer`` stores the state of a parameter."""
    if not isinstance(optimizer, CompressedOptimizer):
        found = PLAIN[torch_class(optimizer).__name__]
        return found if group.get("momentum", 1) else Storage(found.rule, {}, counts=False)
    plan = optimizer.plan(torch.Size(shape), dtype, dict(group), name)
    note = "its moments belong to a low-rank projection" if plan.projection else ""
    kept = {} if plan.projection else {m.name: StoredMoment(m, form, m.name) for m, form in plan.kept}
    return Storage(plan.rule, kept, note, plan=plan)


def load_entry(entry: Mapping[str, Value], found: Storage, view: Geometry) -> dict[str, Any]:
    """Read the saved state of one parameter, in the shapes that formats work on."""
    state = {key: value.whole() if isinstance(value, Stored) else value for key, value in entry.items()}
    for moment in found.moments.values():
        moment.form.load_(state, moment.key, view)
    return state


def same_scales(plan: ParamPlan, ours: Options, theirs: Options, step: int) -> bool:
    """Return whether a rule means the same by its moments under the options of two groups."""
    ours, theirs = plan.rule.read(ours), plan.rule.read(theirs)
    scales = [moment.meaning.scale for moment, _ in plan.kept]
    return all(scale(ours, step) == scale(theirs, step) for scale in scales)


@dataclass
class Numbers:
    """A moment as numbers, a chunk at a time: ``[b, r, c]`` in fp32 (fp64 for fp64 parameters).

    Attributes:
        view: the parameter.
        read: decodes a chunk.
        align: chunks of a row start at multiples of this many columns.
        stored: format, key and state that it is decoded from, if these can be copied unchanged.
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
        """Return the whole moment, in the parameter's shape."""
        parts = [(chunk, self.read(chunk)) for chunk in self.chunks()]
        dtype = parts[0][1].dtype if parts else torch.float32
        result = torch.zeros(self.view.shape, dtype=dtype, device=parts[0][1].device if parts else None)
        for chunk, part in parts:
            write_(result, self.view, chunk, part)
        return result


def numbers(
    state: Mapping[str, Any], moment: StoredMoment, view: Geometry, dtype: torch.dtype, scale: float
) -> Numbers:
    """Return a stored moment times ``scale``, to be read chunk by chunk."""
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
    """Return a tensor of the parameter's shape as `Numbers`."""
    view, state = geometry(tuple(tensor.shape)), {"x": tensor}
    decode, real = Dense().decoder(state, "x", view), accumulator(tensor.dtype)
    return Numbers(view, lambda chunk: decode(chunk).to(real), stored=(Dense(), "x", state))


def gradient_like(moment: StoredMoment, source: Numbers) -> Tensor:
    """Return what formats learn from in place of a first gradient: the moment, or the root of a mean of squares."""
    return source.whole().sqrt_() if moment.moment.squares else source.whole()


def learn(form: StateFormat, gradients: Iterable[Tensor]) -> Tensor:
    """Return what a format learns from all ``gradients`` together (see `gradient_like`)."""
    total = None
    for x in gradients:
        view, tools = geometry(tuple(x.shape)), dispatch.tools(x)
        part = form.gather(x, view, tools).cpu()
        total = part if total is None else total + part
    assert total is not None  # asked only where there are some
    return form.solve(total, view, tools)


def write(
    state: MutableMapping[str, Any], moment: StoredMoment, source: Numbers, step: int, found: Tensor | None = None
) -> float:
    """Store a moment in ``state``.

    Args:
        found: what its format has learned together with others; None: it learns from this moment alone.

    Returns:
        The error of what is stored relative to ``source`` (2-norms).
    """
    form, key, view = moment.form, moment.key, source.view
    if source.stored and source.stored[0] == form:
        _, theirs, saved = source.stored
        for suffix in _suffixes(moment, view):
            own = state[key + suffix]
            # A new tensor: what is found from data (blocks of a second moment) has a shape of its own.
            state[key + suffix] = saved[theirs + suffix].to(own.device, own.dtype, copy=True)
        return _error(state, moment, source)
    if form.learned(state, key) is not None and source.any():
        if found is None:
            found = learn(form, [gradient_like(moment, source)])
        form.calibrate_(state, key, view, found)
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


def _suffixes(moment: StoredMoment, view: Geometry) -> list[str]:
    return [spec.suffix for spec in moment.form.components(view, torch.float32)]


def _like(state: Mapping[str, Any], moment: StoredMoment, view: Geometry) -> Tensor:
    """Return a 0-dim tensor on the device of a moment's state, in the dtype of its arithmetic."""
    tensors = [state[moment.key + suffix] for suffix in _suffixes(moment, view)]
    stored = next(t for t in tensors if t.is_floating_point())
    return torch.zeros((), dtype=accumulator(stored.dtype), device=stored.device)


def _error(state: Mapping[str, Any], moment: StoredMoment, source: Numbers) -> float:
    read = numbers(state, moment, source.view, _like(state, moment, source.view).dtype, 1.0).read
    off = size = 0.0
    for chunk in source.chunks(moment.form.align(source.view)):
        wanted = source.read(chunk).double().cpu()
        off += float((read(chunk).double().cpu() - wanted).square().sum())
        size += float(wanted.square().sum())
    return (off / size) ** 0.5 if size else 0.0
