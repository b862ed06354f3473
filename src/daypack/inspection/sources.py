"""Where state comes from: an object or a path, with the weights that lie beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from daypack.checkpoint import foreign, snapshot
from daypack.checkpoint.file import whole_of
from daypack.checkpoint.snapshot import Snapshot
from daypack.checkpoint.torch_files import read_weights
from daypack.optim.options import plain_name

#: What the folder of a training run calls its checkpoint, and a distributed checkpoint its index.
TRAINED, DISTRIBUTED = "checkpoint.pt", ".metadata"


@dataclass(frozen=True)
class Opened:
    """State, ready to be read.

    Attributes:
        snapshot: the state.
        weights: the model's weights by name; empty if they are not known.
        about: where it comes from, for people.
        notes: what had to be assumed.
    """

    snapshot: Snapshot
    weights: Mapping[str, Tensor]
    about: str
    notes: tuple[str, ...] = ()


def open_state(
    source: Optimizer | Snapshot | Mapping[str, Any] | str | os.PathLike[str],
    weights: Mapping[str, Tensor] | str | os.PathLike[str] | None = None,
    optimizer: str | None = None,
) -> Opened:
    """Find the state and the weights; see `daypack.inspection.inspect_state`."""
    held: Mapping[str, Tensor] = {}
    if isinstance(source, (str, os.PathLike)):
        path = state_file(Path(source))
        found, held = foreign.read_with_weights(path, optimizer)
        about = str(path)
    else:
        found = foreign.of_any(source, optimizer)
        about = type(source).__name__
        if isinstance(source, Optimizer):
            names, _ = snapshot.names_of(source)
            params = (p for group in source.param_groups for p in group["params"])
            held = dict(zip((name for members in names for name in members), params, strict=True))
    if weights is not None:
        held = read_weights(Path(weights)) if isinstance(weights, (str, os.PathLike)) else weights
    return _joined(Opened(found, held, about))


def _joined(opened: Opened) -> Opened:
    """Match weights and parameters: by name, or where the state has no names, by order if all shapes agree."""
    found, weights = opened.snapshot, {plain_name(name): value for name, value in opened.weights.items()}
    opened = replace(opened, weights=weights)
    if not weights or {*map(plain_name, found.params)} & weights.keys():
        return opened
    shapes = [(name, tuple(value.shape)) for name, value in weights.items()]
    if not found.named and [shape for _, shape in shapes] == [entry.shape for entry in found.params.values()]:
        note = "the state has no names; those of the weights are shown, whose shapes agree with it in their order"
        return replace(opened, snapshot=named_by(found, [name for name, _ in shapes]), notes=(note,))
    why = (
        "no name of the weights is one of the state"
        if found.named
        else ("the state has no names, and its shapes are not those of the weights in their order")
    )
    return replace(opened, weights={}, notes=(f"{why}, so the weights are not used",))


def named_by(found: Snapshot, names: list[str]) -> Snapshot:
    """Return a snapshot whose parameters are called ``names``, in order."""
    new = dict(zip(found.params, names, strict=True))
    groups = tuple((options, tuple(new[member] for member in members)) for options, members in found.groups)
    return replace(found, groups=groups, params={new[name]: p for name, p in found.params.items()}, named=True)


def state_file(path: Path) -> Path:
    """Return the state file that ``path`` names: itself, the only one in a folder, or the index of a set of shards.

    Raises:
        ValueError: a folder without such a file, with several, or a distributed checkpoint.
    """
    if not path.is_dir():
        return whole_of(path) if path.is_file() else path
    if (path / DISTRIBUTED).is_file():
        raise ValueError(
            f"{path} is a distributed checkpoint, whose index cannot be read without running what it holds; if you "
            f"trust it, turn it into a file: python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} "
            "state.pt"
        )
    if (path / TRAINED).is_file():
        return path / TRAINED
    names = sorted({whole_of(each).name for each in path.iterdir() if each.suffix in _ENDINGS and each.is_file()})
    if len(names) != 1:
        found = f"several: {', '.join(names[:4])}" if names else f"none (*{', *'.join(_ENDINGS)})"
        raise ValueError(f"{path} should hold one file of optimizer state, or the shards of one; it has {found}")
    return path / names[0]


_ENDINGS = (".safetensors", ".pt", ".pth", ".bin")
