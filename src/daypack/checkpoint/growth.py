"""Carrying state into a changed architecture: wider, deeper, more heads, a larger vocabulary, other names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from daypack.checkpoint import foreign
from daypack.checkpoint.conversion import Source, Sources, fill
from daypack.checkpoint.moments import Numbers, of_dense
from daypack.checkpoint.report import Report
from daypack.checkpoint.snapshot import Snapshot, names_of

#: Pattern of names -> (dim, heads before, heads now): that dim is ``heads * head_dim``.
Heads = Mapping[str, tuple[int, int, int]]


def transplant(
    old_state: Optimizer | Snapshot | Mapping[str, Any] | str | os.PathLike[str],
    new_optimizer: Optimizer,
    rename: Mapping[str, str] | None = None,
    heads: Heads | None = None,
) -> Report:
    """Give ``new_optimizer``, a fresh one over a changed model, the state of the old one, wherever parameters match.

    Parameters are matched by name. Of one whose shape has changed the leading corner is kept: the rows, columns and so
    on that both have. Where elements are new, the first moment starts at 0 and the second at the mean of the kept ones
    of their row or column; the step is that of the old parameter. So kept elements go on as they were, row and column
    means included, and the first update of a new element is at most ``(1 - b1) / sqrt(1 - b2)`` learning rates, AdamW's
    own bound, and a tenth of one where its gradient is like those of its neighbours. Whole new parameters start as in
    a fresh optimizer, with their own bias correction. Options are those of ``new_optimizer``, which may be of another
    class: then state is converted too.

    Args:
        old_state: an optimizer, its ``state_dict()``, or a file of either kind.
        new_optimizer: one of daypack's or torch's, over named parameters, never stepped.
        rename: patterns of old names and what matching ones are called now, such as
            ``{"layers.*.attn.*": "blocks.*.attention.*"}``; each ``*`` stands for the same text on both sides. The
            first one that matches counts; names that none matches stay.
        heads: patterns of new names with a dim that is divided into heads, and the heads before and now, such as
            ``{"*.q_proj.weight": (0, 4, 8)}``: the corner is then taken of heads and of each head.

    Raises:
        ValueError: no names, ``new_optimizer`` has state, or unknown state. ``new_optimizer`` is unchanged then.
    """
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
    """The old name for each name that an old parameter has now.

    Raises:
        ValueError: two old parameters get one name, or a pattern has more stars on the right than on the left.
    """
    result: dict[str, str] = {}
    for name in old.params:
        now = renamed(name, rename)
        if now in result:
            raise ValueError(f"rename gives {result[now]} and {name} the same name, {now}")
        result[now] = name
    return result


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """``name`` by the first pattern that matches it."""
    for pattern, now in rename.items():
        if now.count("*") > pattern.count("*"):
            raise ValueError(f"rename {pattern!r} to {now!r}: the right side has more stars than the left")
        found = re.fullmatch("(.*?)".join(map(re.escape, pattern.split("*"))), name)
        if found:
            texts = iter(found.groups())
            return re.sub(r"\*", lambda _, texts=texts: next(texts), now)  # type: ignore[misc]
    return name


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

        def grown(moment: str) -> Any:
            def of(wanted: float) -> Numbers:
                whole = source.moments[moment](wanted).whole()
                return of_dense(grow(whole, shape, heads, seeded=moment == "exp_avg_sq"))

            return of

        return Source({moment: grown(moment) for moment in source.moments}, source.step, source.note, grown=True)


def grow(
    old: Tensor, shape: tuple[int, ...], heads: tuple[int, int, int] | None = None, seeded: bool = False
) -> Tensor:
    """The leading corner of ``old`` in a tensor of ``shape``.

    Args:
        heads: dim, heads before and heads now, where a dim is divided into heads.
        seeded: new elements get the mean of what stands before them along the dim that grew, instead of 0. Means over
            rows and over columns of the kept part stay what they are.

    Raises:
        ValueError: a dim cannot be divided into so many heads.
    """
    result, target = old, shape
    if heads is not None:
        dim, before, now = heads
        if dim >= old.dim() or old.shape[dim] % before or shape[dim] % now:
            raise ValueError(
                f"dim {dim} of {tuple(old.shape)} and {shape} is not divided into {before} and {now} heads"
            )
        result = old.reshape(*old.shape[:dim], before, old.shape[dim] // before, *old.shape[dim + 1 :])
        target = (*shape[:dim], now, shape[dim] // now, *shape[dim + 1 :])
    for dim, size in enumerate(target):
        result = result.narrow(dim, 0, min(size, result.shape[dim]))
    for dim, size in enumerate(target):
        more = size - result.shape[dim]
        if more:
            mean = result.mean(dim, keepdim=True) if seeded and result.numel() else result.new_zeros(())
            new = mean.expand([more if d == dim else n for d, n in enumerate(result.shape)])
            result = torch.cat([result, new], dim)
    return result.reshape(shape)
