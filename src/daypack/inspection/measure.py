"""Measuring the state of an optimizer, one parameter in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from daypack.checkpoint.snapshot import Snapshot
from daypack.formats.base import Codes
from daypack.formats.dense import Dense
from daypack.inspection import codes, update_size
from daypack.inspection.forms import Form, forms
from daypack.inspection.result import MomentStats, ParamStats, Picture, StateInspection
from daypack.inspection.roles import role_of
from daypack.inspection.sources import Opened, open_state
from daypack.inspection.summary import summarise
from daypack.optim import validate
from daypack.optim.options import plain_name
from daypack.optim.size import value_bytes


def inspect_state(
    source: Optimizer | Snapshot | Mapping[str, Any] | str | os.PathLike[str],
    weights: Mapping[str, Tensor] | str | os.PathLike[str] | None = None,
    match: Iterable[str] = (),
    optimizer: str | None = None,
    pictures: bool = False,
) -> StateInspection:
    """Measure what is in the state of an optimizer: bytes, norms, errors, and what looks wrong.

    Args:
        source: an optimizer, its ``state_dict()``, or a file or folder of state: of `daypack.checkpoint.save_file`, of
            ``torch.save``, of ``daypack train``.
        weights: the model's weights by name, or a file of them; by default those of the optimizer or of the checkpoint
            itself. With them updates are compared with weights.
        match: patterns of names (``*`` stands for any text); only parameters that one matches are measured.
        optimizer: the optimizer that saved the state, where the state does not tell.
        pictures: measure what `daypack.inspection.page` draws too.

    Returns:
        One `ParamStats` for each parameter. Nothing in ``source`` is changed.

    Raises:
        ValueError: no state, of no known optimizer, sharded, or no parameter matches.
    """
    opened = open_state(source, weights, optimizer)
    snapshot, patterns = opened.snapshot, tuple(match)
    names = [name for name in snapshot.params if not patterns or any(fnmatchcase(name, each) for each in patterns)]
    if not names:
        known = ", ".join(list(snapshot.params)[:3])
        raise ValueError(
            f"no parameter matches {', '.join(patterns)}; there are {known} ..." if patterns else "the state is empty"
        )
    read, seen = forms(snapshot), set[int]()
    with torch.no_grad():
        params = tuple(_param(name, read(name), opened, seen, pictures) for name in names)
    notes = [*opened.notes, *_notes(params, bool(opened.weights))]
    return StateInspection(
        opened.about, snapshot.optimizer, params, len(snapshot.params), bool(opened.weights), tuple(notes)
    )


def _param(name: str, form: Form, opened: Opened, seen: set[int], pictures: bool) -> ParamStats:
    weights, note = opened.weights.get(plain_name(name)), ""
    if weights is not None and tuple(weights.shape) != form.entry.shape:
        note = f"its weights have shape {tuple(weights.shape)}, its state {form.entry.shape}"
        weights = None
    weights = None if weights is None else weights.detach().cpu()
    update, why = update_size.update_rms(form, weights)
    elements = torch.Size(form.entry.shape).numel()
    looked = form.tensors() | ({} if weights is None else {"weight": weights})
    nonfinite = {key: count for key, value in looked.items() if (count := _nonfinite(value))}
    finite = weights is not None and nonfinite.get("weight", 0) < elements
    return ParamStats(
        name=name,
        shape=form.entry.shape,
        role=role_of(name, form.entry.shape, form.options, opened.snapshot.named),
        rule=form.rule.name,
        format=form.format,
        components=_components(form, seen),
        step=form.step,
        moments=tuple(_moment(form, moment, pictures) for moment in form.kept),
        lr=update_size.learning_rate(form.options),
        update=update,
        weight=update_size.norm(weights) / elements**0.5 if weights is not None and finite else None,
        nonfinite=nonfinite,
        faults=(*form.faults, *_faults(form, nonfinite)),
        note=note or why,
    )


def _nonfinite(value: Tensor) -> int:
    """Count the elements that are NaN or infinite."""
    if not value.is_floating_point():
        return 0
    eight = value.element_size() == 1  # torch does not ask 8-bit floats
    return sum(int((~(part.float() if eight else part).isfinite()).sum()) for part in update_size.pieces(value))


def _components(form: Form, seen: set[int]) -> dict[str, int]:
    """Return bytes by state key, counted as in `daypack.state_report`; 8 for a plain number.

    bitsandbytes shares one map among all parameters: ``seen`` holds the maps that were counted.
    """
    values = {key: value for key, value in form.state.items() if isinstance(value, (int, float))} | form.tensors()
    return {key: value_bytes(value, seen if key.endswith("_levels") else set()) for key, value in values.items()}


def _moment(form: Form, moment: str, pictures: bool) -> MomentStats:
    at, view, numbers = form.kept[moment], form.view, form.numbers(moment)
    found = summarise(numbers, at.moment.squares, pictures)
    result = MomentStats(
        moment=moment,
        title=at.moment.title,
        symbol=f"√{at.moment.symbol}" if at.moment.squares else at.moment.symbol,
        squares=at.moment.squares,
        format=form.label(moment),
        elements=view.matrices * view.rows * view.cols,
        norm=found.norm,
        largest=found.largest,
        nonfinite=found.nonfinite,
        rows=view.matrices * view.rows,
        zero_rows=found.zero_rows,
    )
    picture = None if found.histogram is None else Picture(found.histogram, found.grid)
    coded = form.coded(moment)
    stored = codes.of_coded(coded) if coded is not None else at.form.codes(dict(form.state), at.key, view)
    if stored is not None and result.elements:
        return _with_codes(result, stored, _plain_norm(form, moment, found.norm), picture)
    means = at.form.means(dict(form.state), at.key)
    if means is not None:
        result = replace(result, blocks=means.numel(), zero_blocks=int((means == 0).sum()))
    exact = isinstance(at.form, Dense) and coded is None
    return replace(result, error=_rounding(form.state[at.key]) if exact else None, picture=picture)


def _plain_norm(form: Form, moment: str, norm: float) -> float:
    """Return the norm of the moment itself; ``norm`` is that of the root of a mean of squares."""
    if not form.kept[moment].moment.squares:
        return norm
    return summarise(form.numbers(moment), False, False).norm


def _with_codes(result: MomentStats, stored: Codes, norm: float, picture: Picture | None) -> MomentStats:
    found = codes.code_stats(stored)
    if picture is not None:
        shown = found.scales if found.scales.numel() > 1 else None
        picture = replace(picture, scales=shown, levels=stored.levels.float().cpu(), codes=found.histogram)
    return replace(
        result,
        blocks=found.blocks,
        zero_blocks=found.zero_blocks,
        saturated=found.saturated,
        error=found.squared_error**0.5 / norm if norm else 0.0,
        picture=picture,
    )


def _rounding(stored: Tensor) -> float:
    """Return the expected RMS error of rounding to a 16-bit type, relative to the RMS of the values; 0 for wider types.

    A number is off by up to half a unit in its last place, either way: ``ulp^2 / 12`` in the mean.
    """
    if stored.dtype not in (torch.bfloat16, torch.float16):
        return 0.0
    off = size = 0.0
    for values in map(update_size.finite, update_size.pieces(stored)):
        unit = torch.finfo(stored.dtype).eps * torch.exp2(values.abs().frexp().exponent.double() - 1)
        off += float(torch.where(values == 0, 0, unit).square().sum())
        size += float(values.square().sum())
    return (off / 12 / size) ** 0.5 if size else 0.0


def _faults(form: Form, nonfinite: Mapping[str, int]) -> list[str]:
    """Return what the formats find wrong with stored values, apart from those that are not finite."""
    kept = [(at.moment, at.key, at.form) for at in form.kept.values()]
    found = validate.damage(kept, form.state, form.view)
    return [text for text in found if not any(text.startswith(key) for key in nonfinite)]


def _notes(params: tuple[ParamStats, ...], weighed: bool) -> list[str]:
    notes = []
    steps = sorted({param.step for param in params if param.step is not None})
    if len(steps) > 1:
        notes.append(f"parameters have taken between {steps[0]:,} and {steps[-1]:,} steps")
    empty = [param.name for param in params if not param.components]
    if empty:
        notes.append(f"{len(empty)} parameters have no state: {', '.join(empty[:3])}{' ...' if empty[3:] else ''}")
    if not weighed:
        notes.append(
            "the weights are not known (give them with --weights): updates are shown without their ratio to them"
        )
    elif all(param.lr == 0 for param in params):
        notes.append("the learning rate is 0, as at the end of a schedule, and so are the ratios of updates to weights")
    reasons: dict[str, int] = {}
    for param in params:
        if param.note:
            reasons[param.note] = reasons.get(param.note, 0) + 1
    return [*notes, *(f"update of {count} parameters not known: {note}" for note, count in reasons.items())]
