"""Whether a compiled library lays out and numbers what it shares with Python as Python does, name by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

#: Of each struct the fields, of each enum the numbers; values as ``daypack_layout`` in ``native/daypack.h`` says.
Description = Mapping[str, Mapping[str, str]]


def parse(text: str) -> Description:
    """Parse what ``daypack_layout`` returns: a line for each struct or enum, its name and ``name=value`` entries."""
    lines = [line.split() for line in text.splitlines()]
    return {name: dict(entry.split("=", 1) for entry in entries) for name, *entries in lines}


def fields(struct: np.dtype[Any]) -> dict[str, str]:
    """Return the type, size and offset of each field (``rank=i8@272``), and the bytes of the struct."""
    places = {name: (kind, offset) for name, (kind, offset, *_) in (struct.fields or {}).items()}
    written = {name: f"{kind.kind}{kind.itemsize}@{offset}" for name, (kind, offset) in places.items()}
    return written | {"sizeof": str(struct.itemsize)}


def differences(library: Description, ours: Description) -> list[str]:
    """Describe each difference and name it. Where names differ, values do too: those are left out then."""
    names: list[str] = []
    values: list[str] = []
    for owner, theirs, here in _pairs(library, ours):
        names += [f"{owner}.{name} is missing from the library" for name in here if name not in theirs]
        names += [f"{owner}.{name} is known to the library alone" for name in theirs if name not in here]
        both = [name for name in here if theirs.get(name, here[name]) != here[name]]
        values += [f"{owner}.{name} is {theirs[name]} in the library and {here[name]} in Python" for name in both]
    return names or values


def _pairs(library: Description, ours: Description) -> Iterator[tuple[str, Mapping[str, str], Mapping[str, str]]]:
    for owner in dict.fromkeys([*ours, *library]):
        yield owner, library.get(owner, {}), ours.get(owner, {})
