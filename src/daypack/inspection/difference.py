"""What differs between two states: parameters, options, formats, steps, and the moments as numbers."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from daypack.checkpoint.snapshot import Snapshot
from daypack.inspection.forms import Form, forms
from daypack.inspection.result import jsonable
from daypack.inspection.sources import named_by, open_state
from daypack.optim.options import plain_name


@dataclass(frozen=True)
class MomentDiff:
    """A moment that both states keep, decoded.

    Attributes:
        moment: its name in the state, such as ``"exp_avg"``.
        symbol: a few characters for it.
        distance: ``|a - b| / max(|a|, |b|)`` (Euclidean norms, finite elements), 0 .. 2; 0 where both are 0.
        cosine: of the angle between them; None where one is 0.
    """

    moment: str
    symbol: str
    distance: float
    cosine: float | None


@dataclass(frozen=True)
class ParamDiff:
    """A parameter that both states have; pairs are (in A, in B).

    Attributes:
        name: of the parameter.
        shapes: its shapes.
        rules: names of the update rules.
        formats: how the moments are stored.
        steps: steps taken; None where not counted.
        options: options of its group that differ.
        moments: those that both keep, if the shapes agree.
        identical: whether everything that is stored is the same to the bit.
        note: why moments are not compared.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    rules: tuple[str, str]
    formats: tuple[str, str]
    steps: tuple[int | None, int | None]
    options: Mapping[str, tuple[Any, Any]]
    moments: tuple[MomentDiff, ...]
    identical: bool
    note: str = ""

    @property
    def equal(self) -> bool:
        return self.identical and not self.options and not self.changes

    @property
    def changes(self) -> tuple[str, ...]:
        """What differs of ``shapes``, ``rules``, ``formats`` and ``steps``."""
        return tuple(key for key in ("shapes", "rules", "formats", "steps") if len({*getattr(self, key)}) > 1)


@dataclass(frozen=True)
class StateDiff:
    """What differs between the states A and B; ``str()`` of it is a summary.

    Attributes:
        sources: where they were read.
        optimizers: names of their classes.
        only: names of parameters that only A, and only B has.
        params: parameters that both have, in the order of A.
        notes: what had to be assumed.
    """

    sources: tuple[str, str]
    optimizers: tuple[str, str]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    params: tuple[ParamDiff, ...]
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs: classes, parameters, options, steps, and every stored bit."""
        return len({*self.optimizers}) == 1 and not any(self.only) and all(param.equal for param in self.params)

    @property
    def options(self) -> list[tuple[str, Any, Any, int]]:
        """Options that differ, with their values in A and in B, and the number of parameters concerned."""
        found: dict[tuple[str, str, str], list[tuple[Any, Any]]] = defaultdict(list)
        for param in self.params:
            for key, (a, b) in param.options.items():
                found[key, repr(a), repr(b)].append((a, b))
        return [(key[0], *pairs[0], len(pairs)) for key, pairs in found.items()]

    def changed(self, what: str) -> list[tuple[Any, Any, int]]:
        """Return the differing pairs of ``"shapes"``, ``"rules"``, ``"formats"`` or ``"steps"``, and how often each
        occurs.
        """
        return [(*pair, n) for pair, n in Counter(getattr(p, what) for p in self.params if what in p.changes).items()]

    def __str__(self) -> str:
        if self.equal:
            return f"equal: {len(self.params)} parameters, every bit of their state, and all options"
        lines = [f"optimizer: {self.optimizers[0]} -> {self.optimizers[1]}"] if len({*self.optimizers}) > 1 else []
        for where, names in zip("AB", self.only, strict=True):
            lines += [f"only in {where}: {name}" for name in names]
        lines += [f"{p.name}: shape {p.shapes[0]} -> {p.shapes[1]}" for p in self.params if "shapes" in p.changes]
        lines += [f"{key}: {_arrow(a, b)} ({n} parameters)" for key, a, b, n in self.options]
        for what in ("rules", "formats", "steps"):
            lines += [f"{what[:-1]}: {a} -> {b} ({n} parameters)" for a, b, n in self.changed(what)]
        same = sum(param.identical for param in self.params)
        return "\n".join(
            [*lines, f"{same} of {len(self.params)} parameters have the same state to the bit", *self.notes]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "equal": self.equal,
            "sources": [*self.sources],
            "optimizers": [*self.optimizers],
            "only_in_a": [*self.only[0]],
            "only_in_b": [*self.only[1]],
            "options": [
                {"option": key, "a": jsonable(a), "b": jsonable(b), "parameters": n} for key, a, b, n in self.options
            ],
            "parameters": [
                {**jsonable(vars(param)), "equal": param.equal, "moments": [jsonable(vars(m)) for m in param.moments]}
                for param in self.params
            ],
            "notes": [*self.notes],
        }


AnyState = Optimizer | Snapshot | Mapping[str, Any] | str | os.PathLike[str]


def diff_states(a: AnyState, b: AnyState, optimizer: str | None = None) -> StateDiff:
    """Compare two states, holding one parameter of each in memory at a time. Takes anything that `inspect_state` takes.

    Parameters are matched by name, without what wrappers (DDP, torch.compile, FSDP) put into it; where one state has
    no names, by order, if number and shapes agree.

    Args:
        optimizer: the optimizer that saved them, where the states do not tell.

    Raises:
        ValueError: no state, of no known optimizer, or parameters that cannot be matched.
    """
    first, second = open_state(a, optimizer=optimizer), open_state(b, optimizer=optimizer)
    one, other, notes = _matched(first.snapshot, second.snapshot)
    ours, theirs = _keyed(one, other)
    read = forms(one), forms(other)
    alike = one.optimizer == other.optimizer
    with torch.no_grad():
        params = tuple(
            _compare(name, read[0](ours[name]), read[1](theirs[name]), alike) for name in ours if name in theirs
        )
    only = tuple(name for name in ours if name not in theirs), tuple(name for name in theirs if name not in ours)
    return StateDiff((first.about, second.about), (one.optimizer, other.optimizer), only, params, notes)


def _matched(one: Snapshot, other: Snapshot) -> tuple[Snapshot, Snapshot, tuple[str, ...]]:
    """Return both states with the same names for the same parameters, and notes."""
    if one.named == other.named:
        return one, other, ()
    if [p.shape for p in one.params.values()] != [p.shape for p in other.params.values()]:
        raise ValueError(
            "one of the states has no parameter names, and the shapes do not agree in their order; compare states that "
            "both have names (an optimizer over model.named_parameters() saves them)"
        )
    note = ("one state has no names: parameters are matched by their order",)
    if one.named:
        return one, named_by(other, [*one.params]), note
    return named_by(one, [*other.params]), other, note


def _keyed(*found: Snapshot) -> list[dict[str, str]]:
    """Map, for each state, the names to match by to its own names: without wrappers' additions, unless two would
    collide.
    """
    keyed = [{plain_name(name): name for name in each.params} for each in found]
    if all(len(names) == len(each.params) for names, each in zip(keyed, found, strict=True)):
        return keyed
    return [{name: name for name in each.params} for each in found]


def _compare(name: str, a: Form, b: Form, alike: bool) -> ParamDiff:
    moments: tuple[MomentDiff, ...] = ()
    note = _incomparable(a, b)
    if not note:
        moments = tuple(_distance(moment, a, b) for moment in a.kept if moment in b.kept)
    return ParamDiff(
        name=name,
        shapes=(a.entry.shape, b.entry.shape),
        rules=(a.rule.name, b.rule.name),
        formats=(a.format, b.format),
        steps=(a.step, b.step),
        options=_options(a.options, b.options, alike),
        moments=moments,
        identical=_identical(a, b),
        note=note,
    )


def _incomparable(a: Form, b: Form) -> str:
    if a.entry.shape != b.entry.shape:
        return "other shapes"
    if a.projection != b.projection:
        return "moments of another projection"
    if a.projection and not _same(a.state.get("basis"), b.state.get("basis")):
        return "the bases of the projections differ, and so does what their moments mean"
    return "; ".join((*a.faults, *b.faults))


def _distance(moment: str, a: Form, b: Form) -> MomentDiff:
    one, other = a.numbers(moment), b.numbers(moment)
    off = aa = bb = ab = 0.0
    for chunk in one.chunks(other.align):
        x, y = one.read(chunk).double(), other.read(chunk).double()
        finite = x.isfinite() & y.isfinite()
        x, y = torch.where(finite, x, 0), torch.where(finite, y, 0)
        off += float((x - y).square().sum())
        aa, bb, ab = aa + float(x.square().sum()), bb + float(y.square().sum()), ab + float((x * y).sum())
    largest, product = max(aa, bb) ** 0.5, aa**0.5 * bb**0.5
    cosine = max(-1.0, min(1.0, ab / product)) if product else None
    return MomentDiff(moment, a.kept[moment].moment.symbol, off**0.5 / largest if largest else 0.0, cosine)


def _options(a: Mapping[str, Any], b: Mapping[str, Any], alike: bool) -> dict[str, tuple[Any, Any]]:
    """Return the options that differ; of two different classes, only options that both have."""
    keys = [key for key in {**a, **b} if alike or (key in a and key in b)]
    pairs = {key: (_plain(a.get(key)), _plain(b.get(key))) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _plain(value: Any) -> Any:
    """Return a tuple for a list, and a number for a tensor with one element."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _arrow(a: Any, b: Any) -> str:
    """Format both values, floats in as many digits as it takes to tell them apart."""
    if isinstance(a, float) and isinstance(b, float) and f"{a:.6g}" != f"{b:.6g}":
        return f"{a:.6g} -> {b:.6g}"
    return f"{a} -> {b}"


def _identical(a: Form, b: Form) -> bool:
    if any(form.state.keys() != form.entry.state.keys() for form in (a, b)):
        return False  # what could not be read is not known to be the same
    one, other = {**a.state, **a.tensors()}, {**b.state, **b.tensors()}
    return a.entry.shape == b.entry.shape and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)


def _same(x: Any, y: Any) -> bool:
    """Return whether two values agree to the bit; a number may be a tensor with one element."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return bool(_plain(x) == _plain(y))
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    bits = (each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (x, y))
    return torch.equal(*bits)
