"""What was measured in optimizer state: frozen records, totals over them, and the same as JSON values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

#: A warning is given from this share of codes on an end level, apart from the one per block that its scale puts there.
SATURATED = 0.05
#: A warning is given from this ratio of update to weights; healthy ones are near 1e-3.
LARGE_RATIO = 0.1


@dataclass(frozen=True)
class Picture:
    """What the page draws of a moment; for the second moment, of its root.

    Attributes:
        histogram: counts of ``log10 |x|`` over the edges `daypack.inspection.summary.EDGES`, int64.
        grid: mean ``|x|`` over cells of the parameter's matrix, fp64 ``[R, C]``; None for one row.
        scales: mean scale over cells of blocks, fp64 ``[R, C]``; None without blocks.
        levels: the codebook, fp32 ``[256]``; None without codes.
        codes: how often each level is used, int64 ``[256]``; None without codes.
    """

    histogram: Tensor
    grid: Tensor | None = None
    scales: Tensor | None = None
    levels: Tensor | None = None
    codes: Tensor | None = None


@dataclass(frozen=True)
class MomentStats:
    """One moment of one parameter. Norms are those of finite values; of the second moment, those of its root.

    Attributes:
        moment: its name in the state, such as ``"exp_avg"``.
        title: words for it.
        symbol: a few characters for it, of the root of a mean of squares.
        squares: whether it is a mean of squares, whose root is measured.
        format: how it is stored.
        elements: decoded ones; with a low-rank projection those of the low shape.
        norm: Euclidean norm.
        largest: largest magnitude.
        nonfinite: decoded elements that are NaN or infinite.
        rows: rows of the parameter's matrices; 1 for a vector.
        zero_rows: those in which every element is 0.
        blocks: blocks with a scale or a mean of their own; None without blocks.
        zero_blocks: those that hold nothing but 0.
        saturated: share of codes on an end level, one per block not counted, which its absmax puts there; None without
            codes.
        error: expected RMS of what storing rounded away, relative to the RMS of the moment, from the distance between
            levels (docs/inspect.md); 0 for exact forms, None where it cannot be known.
    """

    moment: str
    title: str
    symbol: str
    squares: bool
    format: str
    elements: int
    norm: float
    largest: float
    nonfinite: int
    rows: int
    zero_rows: int
    blocks: int | None = None
    zero_blocks: int | None = None
    saturated: float | None = None
    error: float | None = None
    picture: Picture | None = field(default=None, repr=False, compare=False)

    @property
    def rms(self) -> float:
        return self.norm / self.elements**0.5 if self.elements else 0.0


@dataclass(frozen=True)
class ParamStats:
    """State of one parameter.

    Attributes:
        name: its own, or ``<group>.<index>``.
        shape: of the parameter.
        role: what it is for, guessed from name and shape (`daypack.inspection.roles`).
        rule: the update rule's name.
        format: how the moments are stored.
        components: bytes by state key, as a live optimizer holds them.
        step: steps taken; None where they are not counted, and where there is no state.
        moments: the first, then the second, as far as they are kept.
        lr: learning rate of its group.
        update: RMS of the update before the learning rate: of the one that a gradient equal to the running mean
            makes, which with Adam and AdamW is the last one taken; None where the state does not tell.
        weight: RMS of the finite weights; None if they are not known or none is finite.
        nonfinite: stored values that are NaN or infinite, by state key; those of the weights under ``weight``.
        faults: what else is wrong with the stored values.
        note: why a number is missing.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    rule: str
    format: str
    components: Mapping[str, int]
    step: int | None
    moments: tuple[MomentStats, ...]
    lr: float | None = None
    update: float | None = None
    weight: float | None = None
    nonfinite: Mapping[str, int] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    note: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def total_bytes(self) -> int:
        return sum(self.components.values())

    @property
    def bytes_per_param(self) -> float:
        return self.total_bytes / self.elements if self.elements else 0.0

    @property
    def ratio(self) -> float | None:
        """RMS of an update, learning rate included, over RMS of the weights."""
        if self.update is None or self.lr is None or not self.weight:
            return None
        return self.lr * self.update / self.weight

    def moment(self, name: str) -> MomentStats | None:
        return next((each for each in self.moments if each.moment == name), None)

    @property
    def error(self) -> float | None:
        """The largest quantisation error among its moments."""
        return max((each.error for each in self.moments if each.error is not None), default=None)

    @property
    def unused(self) -> int:
        """Rows that no gradient has reached: those where the last moment that is kept is 0."""
        last = self.moments[-1] if self.moments else None
        return last.zero_rows if last is not None and self.step != 0 else 0

    @property
    def stalled(self) -> int:
        """Rows whose first moment is 0 though their second is not: gradients came, and come no more."""
        first = next((each for each in self.moments if not each.squares), None)
        second = next((each for each in self.moments if each.squares), None)
        return max(0, first.zero_rows - second.zero_rows) if first and second and self.step != 0 else 0


@dataclass(frozen=True)
class Total:
    """A sum over parameters: how many, their elements, their bytes of state."""

    params: int
    elements: int
    bytes: int

    @property
    def bytes_per_param(self) -> float:
        return self.bytes / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class Warn:
    """Something that deserves a look: the parameter, the kind of trouble in a word, and what was found."""

    param: str
    kind: str
    text: str


@dataclass(frozen=True)
class StateInspection:
    """What is in the state of an optimizer; ``str()`` of it is a summary.

    Attributes:
        source: where it was read.
        optimizer: name of the class, or of the one of torch's that keeps the same moments.
        params: in the order of the groups; those that were asked for.
        of: how many parameters the state has in all.
        weights: whether the weights were known.
        notes: what concerns all parameters.
    """

    source: str
    optimizer: str
    params: tuple[ParamStats, ...]
    of: int
    weights: bool = False
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> Total:
        return _total(self.params)

    @property
    def by_format(self) -> dict[str, Total]:
        return _totals((p.format, p) for p in self.params)

    @property
    def by_role(self) -> dict[str, Total]:
        return _totals((p.role, p) for p in self.params)

    @property
    def components(self) -> dict[str, int]:
        """Bytes by state key, largest first."""
        result: dict[str, int] = defaultdict(int)
        for param in self.params:
            for key, nbytes in param.components.items():
                result[key] += nbytes
        return dict(sorted(result.items(), key=lambda item: -item[1]))

    @property
    def warnings(self) -> tuple[Warn, ...]:
        return tuple(warn for param in self.params for warn in _warnings(param))

    def __str__(self) -> str:
        total = self.total
        lines = [
            f"{self.optimizer}: {total.params} parameters, {total.bytes:,} bytes, {total.bytes_per_param:.3f} each"
        ]
        lines += [f"{name}: {each.bytes:,} bytes" for name, each in self.by_format.items()]
        return "\n".join([*lines, *self.notes, *(f"{w.param}: {w.kind}: {w.text}" for w in self.warnings)])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; numbers that are not finite become None."""
        plain = ("params", "of")
        return {
            **{key: jsonable(getattr(self, key)) for key in _names(self) if key not in plain},
            "parameters_in_all": self.of,
            "total": total_dict(self.total),
            "components": self.components,
            "by_format": {key: total_dict(each) for key, each in self.by_format.items()},
            "by_role": {key: total_dict(each) for key, each in self.by_role.items()},
            "parameters": [_param_dict(param) for param in self.params],
            "warnings": [jsonable(vars(warn)) for warn in self.warnings],
        }


def _names(record: Any) -> list[str]:
    return [entry.name for entry in fields(record) if entry.name != "picture"]


def _param_dict(param: ParamStats) -> dict[str, Any]:
    own = {key: jsonable(getattr(param, key)) for key in _names(param) if key != "moments"}
    moments = [
        {**{key: jsonable(getattr(each, key)) for key in _names(each)}, "rms": jsonable(each.rms)}
        for each in param.moments
    ]
    derived = ("elements", "total_bytes", "bytes_per_param", "ratio", "unused", "stalled")
    return {**own, **{key: jsonable(getattr(param, key)) for key in derived}, "moments": moments}


def total_dict(total: Total) -> dict[str, Any]:
    return {**vars(total), "bytes_per_param": total.bytes_per_param}


def jsonable(value: Any) -> Any:
    """Return ``value`` with tuples as lists, numbers that are not finite as None, and other objects as text."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _total(params: Iterable[ParamStats]) -> Total:
    found = list(params)
    return Total(len(found), sum(p.elements for p in found), sum(p.total_bytes for p in found))


def _totals(keyed: Iterable[tuple[str, ParamStats]]) -> dict[str, Total]:
    groups: dict[str, list[ParamStats]] = defaultdict(list)
    for key, param in keyed:
        groups[key].append(param)
    totals = {key: _total(members) for key, members in groups.items()}
    return dict(sorted(totals.items(), key=lambda item: -item[1].bytes))


def _warnings(param: ParamStats) -> Iterable[Warn]:
    def warn(kind: str, text: str) -> Warn:
        return Warn(param.name, kind, text)

    for key, count in param.nonfinite.items():
        yield warn(
            "not finite",
            f"{key} holds {count:,} {'value that is' if count == 1 else 'values that are'} NaN or infinite",
        )
    for fault in param.faults:
        yield warn("damaged", fault)
    last = param.moments[-1] if param.moments else None
    if last is not None and param.unused and not any(key.startswith(last.moment) for key in param.nonfinite):
        yield warn("dead", f"the {last.title} is 0 in {_of(param.unused, last.rows, 'row')}: no gradient reached them")
    if param.stalled:
        rows = param.moments[0].rows
        yield warn("stalled", f"the first moment is 0 in {_of(param.stalled, rows, 'row')} whose second moment is not")
    for each in param.moments:
        blocks = (each.zero_blocks or 0) if param.step != 0 and each.zero_rows < each.rows else 0
        covered = each.zero_rows * ((each.blocks or 0) // max(1, each.rows))
        if blocks > covered:
            yield warn(
                "dead" if each is param.moments[-1] else "stalled",
                f"{each.moment} is 0 in {_of(blocks, each.blocks or 0, 'block')}",
            )
        if each.saturated is not None and each.saturated > SATURATED:
            yield warn("saturated", f"{each.saturated:.0%} of the codes of {each.moment} are on an end level")
    if param.ratio is not None and param.ratio > LARGE_RATIO:
        yield warn("large update", f"an update is {param.ratio:.2g} of the weights (RMS)")


def _plural(count: int, word: str) -> str:
    return word if count == 1 else word + "s"


def _of(some: int, every: int, word: str) -> str:
    return f"all {every:,} {_plural(every, word)}" if some == every and every > 1 else f"{some:,} of {every:,} {word}s"
