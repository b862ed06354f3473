"""Carrying state over into another optimizer: any to any, through the formats, without code for pairs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from daypack import sharding
from daypack.checkpoint import foreign, moments
from daypack.checkpoint.moments import UNCOUNTED, Numbers, Storage, StoredMoment
from daypack.checkpoint.report import Outcome, Report
from daypack.checkpoint.snapshot import ParamState, Snapshot, names_of
from daypack.formats.base import StateFormat
from daypack.geometry import geometry
from daypack.optim.base import CompressedOptimizer
from daypack.optim.registry import REGISTRY, create
from daypack.param import ParamPlan
from daypack.rules.base import Meaning

#: Largest step count that a parameter with new elements keeps, where a second moment divides. All its elements
#: share one count: with a low one, a zero moment is nearly what a fresh optimizer starts from, and new gradients soon
#: outweigh those of the old model. 10 steps are what a first moment with a decay of 0.9 remembers (docs/resume.md).
HISTORY = 10
_UNSTEPPED = "it was never stepped"
#: Options that mean the same wherever a constructor has them. All others keep the new optimizer's defaults.
SHARED_OPTIONS = ("lr", "betas", "eps", "weight_decay", "maximize", "momentum", "dampening", "nesterov", "nonfinite")


def convert(optimizer: Optimizer, name: str, **options: Any) -> Optimizer:
    """Build another optimizer over the same parameters and groups that continues from the state of ``optimizer``.

    Moments are decoded, scaled where the new rule means something else by them, and stored in the new formats; steps
    are carried over. ``result.conversion`` is a `Report`. The old optimizer is left as it is; learning-rate schedulers
    refer to it and must be built again.

    Args:
        optimizer: one of daypack's, torch's Adam, AdamW or SGD, or one of bitsandbytes' or torchao's.
        name: as for `daypack.create`.
        options: of the new optimizer; others come from the old groups where both have them.

    Raises:
        ValueError: an unknown optimizer, options that do not fit, or sharded parameters.
    """
    require_whole(optimizer)
    source = foreign.take(optimizer)
    groups = []
    for (old, _), live in zip(source.groups, optimizer.param_groups, strict=True):
        params = list(live["params"])
        if "param_names" in live:
            params = list(zip(live["param_names"], params, strict=True))
        groups.append({**kept_options(old, source, name, options), "params": params})
    target = create(name, groups, **options)
    target.conversion = fill(target, source)  # type: ignore[attr-defined]
    return target


def require_whole(optimizer: Optimizer) -> None:
    """Refuse sharded parameters: their codebooks and statistics would have to be found over all ranks.

    Raises:
        ValueError: with what to do instead.
    """
    if sharding.any_distributed(p for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "the parameters are sharded; save the state with daypack.checkpoint.save_file, "
            "turn the file into the new one with `daypack convert` or `daypack transplant`, and load that on all ranks "
            "with daypack.checkpoint.load_file"
        )


def convert_snapshot(source: Snapshot, name: str, **options: Any) -> tuple[Optimizer, Report]:
    """Convert saved state, without its parameters: the optimizer returned is only good for saving."""
    groups = [(kept_options(old, source, name, options), members) for old, members in source.groups]
    target = hollow(name, groups, source.params, source.named, options)
    return target, fill(target, source)


def hollow(
    name: str,
    groups: list[tuple[dict[str, Any], tuple[str, ...]]],
    params: Mapping[str, ParamState],
    named: bool,
    options: Mapping[str, Any],
) -> Optimizer:
    """Build an optimizer over parameters of the right shapes whose memory is never touched."""

    def make(member: str) -> Any:
        entry = params[member]
        empty = torch.empty(entry.shape, dtype=entry.dtype)
        p = Parameter(empty, requires_grad=entry.dtype.is_floating_point)
        return (member, p) if named else p

    return create(
        name, [{**group, "params": [make(member) for member in members]} for group, members in groups], **options
    )


def kept_options(old: Mapping[str, Any], source: Snapshot, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group of the new optimizer takes over: shared options, and keys that are no options of the old
    optimizer.
    """
    if name not in REGISTRY:
        create(name, [])  # raises
    new = inspect.signature(REGISTRY[name]).parameters
    for option in options:
        if option not in new or option == "params":
            raise ValueError(
                f"{name} has no option {option!r}; it has {', '.join(key for key in new if key != 'params')}"
            )
    known = foreign.options_of(source)
    kept = {}
    for key, value in old.items():
        shared = (
            key in SHARED_OPTIONS and key in new and isinstance(value, tuple) == isinstance(new[key].default, tuple)
        )
        extra = key not in known and key not in new and key not in ("rule", "decoupled_weight_decay")
        if (shared or extra) and key not in options:
            kept[key] = _as_long_as(new[key].default, value) if shared else value
    return kept


def _as_long_as(default: Any, value: Any) -> Any:
    """Return as many numbers of ``value`` as ``default`` has; missing ones are taken from ``default``."""
    if not isinstance(value, tuple):
        return value
    return (*value[: len(default)], *default[len(value) :])


@dataclass(frozen=True)
class SourceMoment:
    """A moment of the old state.

    Attributes:
        meaning: what it stands for.
        scale: the factor from what is stored to that mean, at the step of the state.
        read: the moment times a factor.
    """

    meaning: Meaning
    scale: float
    read: Callable[[float], Numbers]

    def as_scale(self, scale: float) -> Numbers:
        """Return the moment as it is stored where the factor to the same mean is ``scale``."""
        return self.read(1.0 if self.scale == scale else self.scale / scale)


@dataclass(frozen=True)
class Source:
    """What the state of one target parameter is made from.

    Attributes:
        moments: by name, of the target's shape.
        step: steps taken.
        note: why moments are missing.
        grown: whether some elements were not in the old state.
        cut: whether some elements of the old state are not in these moments.
        plan: of daypack's optimizers; state of an equal plan is taken over as it is.
        state: that state.
        options: of its group.
    """

    moments: Mapping[str, SourceMoment]
    step: int
    note: str = ""
    grown: bool = False
    cut: bool = False
    plan: ParamPlan | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


#: The source of the target parameter of a name, shape and dtype; None: it starts anew.
Find = Callable[[str, tuple[int, ...], torch.dtype], "Source | None"]


class Sources:
    """The parameters of a snapshot, read one at a time."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._storage = foreign.storages(snapshot)
        self._options = {name: options for options, names in snapshot.groups for name in names}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Source | None:
        """Return the state of ``name`` for a parameter of the same shape.

        Raises:
            ValueError: it has another shape.
        """
        entry = self.snapshot.params.get(name)
        if entry is None or not entry.state:
            return None
        if entry.shape != shape:
            raise ValueError(f"parameter {name} has shape {shape}, its state is of shape {entry.shape}; transplant it")
        return self.read(name)

    def read(self, name: str) -> Source:
        entry, options = self.snapshot.params[name], self._options[name]
        found, view = self._storage(name), geometry(entry.shape)
        state = moments.load_entry(entry.state, found, view)
        step = int(state.get("step") or 0) if found.counts else UNCOUNTED
        result = {}
        for moment, at in found.moments.items():
            if step == 0 or state.get(at.key, 0) is None:
                continue
            meaning = at.moment.meaning

            def read_moment(factor: float, at: StoredMoment = at) -> Numbers:
                return moments.numbers(state, at, view, entry.dtype, factor)

            result[moment] = SourceMoment(meaning, meaning.scale(found.rule.read(options), step), read_moment)
        return Source(result, step, found.note, plan=found.plan, state=state, options=options)


def fill(target: Optimizer, snapshot: Snapshot, find: Find | None = None) -> Report:
    """Give every parameter of ``target``, a fresh optimizer, the state that ``find`` has for it."""
    sources = Sources(snapshot)
    find = find or sources.get
    filler = _Filler(target, find, snapshot.optimizer)
    filler.run()
    return filler.report


class _Filler:
    """Fills a fresh optimizer in two passes: one learns the codebook where one is needed, the other writes."""

    def __init__(self, target: Optimizer, find: Find, origin: str) -> None:
        self.target, self.find, self.origin, self.report = target, find, origin, Report()
        names, _ = names_of(target)
        self.params: list[tuple[str, Tensor, dict[str, Any]]] = [
            (name, p, group)
            for members, group in zip(names, target.param_groups, strict=True)
            for name, p in zip(members, group["params"], strict=True)
        ]

    def run(self) -> None:
        if isinstance(self.target, CompressedOptimizer):
            self.target.materialize_state()
        lessons = self._lessons()
        for name, p, group in self.params:
            source = self.find(name, tuple(p.shape), p.dtype) if p.requires_grad else None
            if source is not None:
                self._fill(name, p, group, source, lessons)
            elif p.requires_grad:
                self.report.add(name, "state", "new", note="it has no state in the source")

    def _storage(self, name: str, p: Tensor, group: dict[str, Any]) -> Storage:
        return moments.storage(self.target, group, tuple(p.shape), p.dtype, name)

    def _missing(self, found: Storage, source: Source) -> str:
        """Say why a parameter must start anew; empty if it need not."""
        if found.note or source.note:
            return found.note or source.note
        if source.step == 0:
            return _UNSTEPPED
        for name, at in found.moments.items():
            if at.moment.squares and (reason := self._unfit(name, at, source)):
                return f"{reason}, so the parameter starts anew at step 0"
        return ""

    def _unfit(self, name: str, at: StoredMoment, source: Source) -> str:
        """Say why the target's moment ``name`` cannot be made from the source; empty if it can."""
        if name not in source.moments:
            return f"{self.origin} keeps no {'second moment to divide by' if at.moment.squares else name}"
        theirs, ours = source.moments[name].meaning.of, at.moment.meaning.of
        return "" if theirs == ours else f"{name} of {self.origin} is a mean of {theirs}, not of {ours}"

    def _wanted(self, found: Storage, group: dict[str, Any], source: Source) -> dict[str, Numbers]:
        """Return the moments of a target parameter, scaled to what the target means by them."""
        options, step = found.rule.read(group), _steps(found, source)
        return {
            name: source.moments[name].as_scale(at.moment.meaning.scale(options, step))
            for name, at in found.moments.items()
            if not self._unfit(name, at, source)
        }

    def _lessons(self) -> dict[str, Tensor]:
        """Return what the target's formats learn together, by lesson: taken from the source, else learned from the new
        moments.
        """
        known: dict[str, Tensor] = {}
        teachers: dict[str, tuple[StateFormat, list[Callable[[], Tensor]]]] = {}
        for name, p, group in self.params:
            found = self._storage(name, p, group)
            together = {key: at for key, at in found.moments.items() if at.form.lesson is not None}
            source = self.find(name, tuple(p.shape), p.dtype) if together and p.requires_grad else None
            if source is None or self._missing(found, source):
                continue
            wanted = self._wanted(found, group, source)
            for key in together.keys() & wanted.keys():
                at, lesson = together[key], str(together[key].form.lesson)
                learned = _learned_of(wanted[key], lesson)
                if learned is not None:
                    known.setdefault(lesson, learned)
                teachers.setdefault(lesson, (at.form, []))[1].append(partial(moments.gradient_like, at, wanted[key]))
        return {
            lesson: known[lesson] if lesson in known else moments.learn(form, (make() for make in makers))
            for lesson, (form, makers) in teachers.items()
        }

    @torch.no_grad()
    def _fill(self, name: str, p: Tensor, group: dict[str, Any], source: Source, lessons: Mapping[str, Tensor]) -> None:
        found = self._storage(name, p, group)
        if _is_same(found, group, source):
            for key, value in source.state.items():
                own = self.target.state[p].get(key)
                device = own.device if isinstance(own, Tensor) else p.device
                self.target.state[p][key] = value.to(device, copy=True) if isinstance(value, Tensor) else value
            for moment in found.moments or ("state",):
                self.report.add(name, moment, "exact")
            return
        missing = self._missing(found, source)
        if missing:
            self.report.add(name, "state", "new" if missing == _UNSTEPPED else "dropped", note=missing)
            return
        wanted, state = self._wanted(found, group, source), self._state(p, found, source)
        for moment, at in found.moments.items():
            if moment not in wanted:
                self.report.add(name, moment, "new", note=f"{self._unfit(moment, at, source)}; it starts at 0")
                continue
            learned = lessons.get(at.form.lesson or "")
            error = moments.write(state, at, wanted[moment], _steps(found, source), learned)
            note = "elements beyond the new shape were dropped" if source.cut else ""
            self.report.add(name, moment, _outcome(wanted[moment], at, error, source), error, note)
        for moment in source.moments.keys() - wanted.keys():
            if moment not in found.moments:
                self.report.add(name, moment, "dropped", note=f"{type(self.target).__name__} keeps none")

    def _state(self, p: Tensor, found: Storage, source: Source) -> dict[str, Any]:
        """Return the state of a parameter before its moments are written."""
        step = torch.tensor(float(_steps(found, source)), dtype=torch.float32)
        state: dict[str, Any] = self.target.state[p]
        if isinstance(self.target, CompressedOptimizer):
            state["step"] = step
        else:
            state |= {"step": step} if found.counts else {}
            state |= {at.key: torch.zeros_like(p) for at in found.moments.values()}
        return state


def _is_same(found: Storage, group: dict[str, Any], source: Source) -> bool:
    """Return whether the target stores the same things as the source and means the same by them."""
    if found.plan is None or found.plan != source.plan or source.step == 0:
        return False
    return moments.same_scales(found.plan, group, source.options, source.step)


def _steps(found: Storage, source: Source) -> int:
    """Return the step count that a target parameter continues from."""
    divides = any(at.moment.squares for at in found.moments.values())
    return min(source.step, HISTORY) if source.grown and divides else source.step


def _learned_of(source: Numbers, lesson: str) -> Tensor | None:
    """Return what the format of a source moment has learned under ``lesson``, or None."""
    form, key, state = source.stored or (None, "", {})
    if form is None or form.lesson != lesson:
        return None
    learned = form.learned(dict(state), key)
    return learned if learned is not None and bool(learned.any()) else None


def _outcome(numbers: Numbers, at: StoredMoment, error: float, source: Source) -> Outcome:
    if source.grown:
        return "grown"
    if source.cut:
        return "cut"
    if error:
        return "requantised"
    alike = numbers.stored is not None and numbers.stored[0] == at.form
    return "expanded" if numbers.compressed and not alike else "exact"
