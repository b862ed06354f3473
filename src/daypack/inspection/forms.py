"""How the state of each parameter of a snapshot is stored, in words and for reading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from daypack.checkpoint import foreign, moments
from daypack.checkpoint.moments import Numbers, StoredMoment
from daypack.checkpoint.snapshot import Coded, ParamState, Snapshot, Stored
from daypack.formats.base import ComponentSpec
from daypack.formats.low_rank import Projection
from daypack.geometry import Geometry, geometry
from daypack.optim import validate
from daypack.rules.base import Rule

#: The largest second moment so far, as torch's ``amsgrad`` keeps it.
AMSGRAD = "max_exp_avg_sq"
#: Options that no optimizer of these leaves open.
_NEVER_NONE = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening")


@dataclass(frozen=True)
class Form:
    """The state of one parameter, read.

    Attributes:
        entry: as it was saved.
        options: of its group.
        rule: the update rule.
        view: what the moments are laid out by: the parameter's geometry, or that of the low shape.
        kept: moments by name, as far as they are there and fit.
        state: tensors and numbers, in the shapes of a live optimizer.
        counts: whether steps are counted.
        projection: of low-rank state.
        faults: what does not fit.
    """

    entry: ParamState
    options: Mapping[str, Any]
    rule: Rule
    view: Geometry
    kept: Mapping[str, StoredMoment]
    state: Mapping[str, Any]
    counts: bool
    projection: Projection | None
    faults: tuple[str, ...]

    @property
    def step(self) -> int | None:
        """Steps taken; None if they are not counted, or their count is damaged."""
        value = self.state.get("step")
        return int(value) if self.counts and value is not None and validate.is_count(value) else None

    def numbers(self, moment: str) -> Numbers:
        return moments.numbers(self.state, self.kept[moment], self.view, self.entry.dtype, 1.0)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that hold the state, in another library's own form where it has one for a moment."""
        result: dict[str, Tensor] = {}
        for key, value in self.state.items():
            saved = self.entry.state[key]
            if isinstance(saved, Stored) and saved.coded is not None:
                parts = {"codes": saved.coded.codes, "scale": saved.coded.scale, "levels": saved.coded.levels}
                result |= {f"{key}_{part}": tensor for part, tensor in parts.items() if tensor is not None}
            elif isinstance(value, Tensor):
                result[key] = value
        return result

    def coded(self, moment: str) -> Coded | None:
        """Return the moment as another library keeps it, if it does."""
        stored = self.entry.state.get(self.kept[moment].key)
        return stored.coded if isinstance(stored, Stored) else None

    def label(self, moment: str) -> str:
        """Return how a moment is stored, in a few characters."""
        coded, at = self.coded(moment), self.kept[moment]
        if coded is not None:
            return f"{coded.form}/{coded.block_size}"
        return at.form.label(dict(self.state), at.key)

    @property
    def format(self) -> str:
        """How all moments are stored."""
        text = " + ".join(self.label(moment) for moment in self.kept) or "none"
        return f"rank {self.projection.rank} of {text}" if self.projection else text


def forms(snapshot: Snapshot) -> Callable[[str], Form]:
    """Return a function that reads the state of the parameter of a given name.

    Raises:
        ValueError: an optimizer that is not known.
    """
    storage = foreign.storages(snapshot)
    options = {name: group for group, names in snapshot.groups for name in names}

    def read(name: str) -> Form:
        entry, found = snapshot.params[name], storage(name)
        for key, value in entry.state.items():
            if isinstance(value, Stored) and value.held not in (None, (0, value.shape[0])):
                raise ValueError(
                    f"{key} of parameter {name} is sharded; save the state with daypack.checkpoint.save_file and "
                    "inspect the files"
                )
        plan, view, kept = found.plan, geometry(entry.shape), dict(found.moments)
        projection = None
        if plan is not None:
            projection, view = plan.projection, plan.view(entry.shape)
            kept = {moment.name: StoredMoment(moment, form, moment.name) for moment, form in plan.kept}
        stored, faults = _on_cpu(entry)
        if entry.state:
            specs = {at.key + s.suffix: s for at in kept.values() for s in at.form.saved(view, entry.dtype)}
            faults += validate.misfits(specs, stored, strict=plan is not None)
        if faults or not entry.state:
            kept = {}
        if AMSGRAD in stored:
            whole = ComponentSpec("", view.shape, torch.float32)
            faults += validate.misfits({AMSGRAD: whole}, stored, strict=False)
        faults += [f"the option {key} is None" for key in _NEVER_NONE if options[name].get(key, 0) is None]
        step: Any = stored.get("step", 0)
        if not validate.is_count(step):
            faults.append(f"step is {validate.shown(step)}, not a whole number from 0")
        kept = {moment: at for moment, at in kept.items() if plan is not None or stored.get(at.key) is not None}
        for at in kept.values():
            at.form.load_(stored, at.key, view)
        return Form(entry, options[name], found.rule, view, kept, stored, found.counts, projection, tuple(faults))

    return read


def _on_cpu(entry: ParamState) -> tuple[dict[str, Any], list[str]]:
    """Return the state of one parameter, on the CPU, and what of it could not be read."""
    stored: dict[str, Any] = {}
    faults = []
    for key, value in entry.state.items():
        try:
            whole = value.whole() if isinstance(value, Stored) else value
            stored[key] = whole.cpu() if isinstance(whole, Tensor) else whole
        except RuntimeError as error:  # sparse tensors have no rows to read
            faults.append(f"{key} cannot be read: {' '.join(str(error).split()):.80}")
    return stored, faults
