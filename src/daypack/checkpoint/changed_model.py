"""Carrying state into a changed architecture: wider, deeper, more heads, a larger vocabulary, other names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from daypack.checkpoint import foreign
from daypack.checkpoint.conversion import Source, SourceMoment, Sources, fill, require_whole
from daypack.checkpoint.moments import Numbers, of_dense
from daypack.checkpoint.report import Report
from daypack.checkpoint.snapshot import Snapshot, names_of
from daypack.optim.options import check_patterns, unmatched

#: Pattern of names -> (dim, heads before, heads now): that dim is ``heads * head_dim``.
Heads = Mapping[str, tuple[int, int, int]]


def transplant(
    old_state: Optimizer | Snapshot | Mapping[str, Any] | str | os.PathLike[str],
    new_optimizer: Optimizer,
    rename: Mapping[str, str] | None = None,
    heads: Heads | None = None,
) -> Report:
    """Give ``new_optimizer``, a fresh one over a changed model, the state of the old one, wherever parameters match.

    Parameters are matched by name; those of the same shape go on exactly, whole new ones start as in a fresh optimizer.
    Of one whose shape has changed the leading corner is kept: the rows, columns and so on that both have; the report
    calls it ``grown`` where elements are new, else ``cut``. New elements start with both moments 0. They cannot have a
    step of their own, so where a second moment divides, the step of a parameter with new elements goes back to 10
    (`daypack.checkpoint.conversion.HISTORY`) if it was larger, and its moments are rescaled so that the means of g and
    of g^2 that they stand for stay. That gives new elements about the bias correction of a fresh optimizer (under a
    constant gradient AdamW's first update is half a learning rate, no later one above 1.13), and kept ones go on from
    their means and take in the new gradients sooner. Adafactor's ``relative_step`` bounds the rate of such a parameter
    by its new step. Options are those of ``new_optimizer``, which may be of another class: then state is converted too.

    Args:
        old_state: an optimizer, its ``state_dict()``, or a file of either kind.
        new_optimizer: one of daypack's or torch's, over named parameters, never stepped.
        rename: patterns of old names and what matching ones are called now, such as
            ``{"layers.*.attn.*": "blocks.*.attention.*"}``; each ``*`` stands for the same text on both sides. The
            first one that matches counts; names that none matches stay.
        heads: patterns of new names with a dim that is divided into heads, and the heads before and now, such as
            ``{"*.q_proj.weight": (0, 4, 8)}``: the corner is then taken of heads and of each head.

    Raises:
        ValueError: no names, a pattern that matches none, ``new_optimizer`` has state, unknown state, or sharded
            parameters.
            ``new_optimizer`` is unchanged then.
    """
    for each in (old_state, new_optimizer):
        if isinstance(each, Optimizer):
            require_whole(each)
    old, (names, named) = foreign.of_any(old_state), names_of(new_optimizer)
    if not (old.named and named):
        which = "old state" if named else "new optimizer"
        raise ValueError(
            f"the {which} has no parameter names, by which state is transplanted; build the optimizer over "
            "model.named_parameters() or daypack.param_groups(model)"
        )
    if new_optimizer.state:
        raise ValueError("the new optimizer has state already; transplant into a fresh one")
    place = _places(old, rename or {})
    check_patterns(heads or {}, (name for members in names for name in members), "the pattern of heads")
    matcher = _Matcher(Sources(old), place, heads or {})
    try:
        report = fill(new_optimizer, old, matcher.find)
    except BaseException:
        new_optimizer.state.clear()
        raise
    kept = {place[name] for members in names for name in members if name in place}
    for name in old.params:
        if name not in kept:
            report.add(name, "state", "dropped", note="the new model has no such parameter")
    return report


def _places(old: Snapshot, rename: Mapping[str, str]) -> dict[str, str]:
    """Map each name that an old parameter has now to its old name.

    Raises:
        ValueError: two old parameters get one name, a pattern matches none, or has more stars on the right than on the
            left.
    """
    for pattern in rename:
        if not any(_matched(pattern, name) for name in old.params):
            raise unmatched(pattern, old.params, "the pattern of rename")
    result: dict[str, str] = {}
    for name in old.params:
        now = renamed(name, rename)
        if now in result:
            raise ValueError(f"rename gives {result[now]} and {name} the same name, {now}")
        result[now] = name
    return result


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """Return ``name`` as the first pattern that matches it renames it."""
    for pattern, now in rename.items():
        if now.count("*") > pattern.count("*"):
            raise ValueError(f"rename {pattern!r} to {now!r}: the right side has more stars than the left")
        found = _matched(pattern, name)
        if found:
            texts = iter(found.groups())
            return re.sub(r"\*", lambda _, texts=texts: next(texts), now)  # type: ignore[misc]
    return name


def _matched(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch("(.*?)".join(map(re.escape, pattern.split("*"))), name)


@dataclass(frozen=True)
class _Matcher:
    """Finds the old state for each new parameter."""

    sources: Sources
    place: Mapping[str, str]
    heads: Heads

    def find(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Source | None:
        old = self.place.get(name)
        entry = self.sources.snapshot.params[old] if old is not None else None
        if old is None or entry is None or not entry.state:
            return None
        heads = next((value for pattern, value in self.heads.items() if fnmatchcase(name, pattern)), None)
        if entry.shape == shape and heads is None:
            return self.sources.read(old)
        if len(entry.shape) != len(shape):
            return Source({}, 0, f"it has another number of dims than {old} had")
        source = self.sources.read(old)

        def grown(moment: SourceMoment) -> SourceMoment:
            def read(factor: float) -> Numbers:
                return of_dense(grow(moment.read(factor).whole(), shape, heads))

            return replace(moment, read=read)

        sizes = list(zip(*_divided(entry.shape, shape, heads), strict=True))
        more, fewer = (any(now > before for before, now in sizes), any(now < before for before, now in sizes))
        found = {name: grown(moment) for name, moment in source.moments.items()}
        return Source(found, source.step, source.note, grown=more, cut=fewer)


def grow(old: Tensor, shape: tuple[int, ...], heads: tuple[int, int, int] | None = None) -> Tensor:
    """Return a tensor of ``shape`` with the leading corner of ``old``, and 0 elsewhere.

    Args:
        heads: dim, heads before and heads now, where a dim is divided into heads.

    Raises:
        ValueError: a dim cannot be divided into so many heads.
    """
    before, now = _divided(tuple(old.shape), shape, heads)
    corner = tuple(slice(min(sizes)) for sizes in zip(before, now, strict=True))
    result = old.new_zeros(now)
    result[corner] = old.reshape(before)[corner]
    return result.reshape(shape)


def _divided(
    old: tuple[int, ...], new: tuple[int, ...], heads: tuple[int, int, int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return both shapes with the dim of the heads split into two: the heads, and the elements of one."""
    if heads is None:
        return old, new
    dim, before, now = heads
    if not 0 <= dim < len(old) or min(before, now) < 1 or old[dim] % before or new[dim] % now:
        raise ValueError(f"dim {dim} of {old} and {new} is not divided into {before} and {now} heads")
    return (
        (*old[:dim], before, old[dim] // before, *old[dim + 1 :]),
        (*new[:dim], now, new[dim] // now, *new[dim + 1 :]),
    )
