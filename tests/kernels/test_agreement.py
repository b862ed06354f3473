"""A library that lays out or numbers anything otherwise than Python is refused, and what differs is named."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from daypack.kernels.native import library as native
from daypack.kernels.native import tables
from daypack.kernels.native.agreement import Description, differences, fields, parse

OURS = tables.description()
RANK, LR = OURS["DaypackParam"]["rank"], OURS["DaypackOptions"]["lr"]
GROUPS, BYTES = OURS["DaypackParam"]["groups"], OURS["DaypackParam"]["sizeof"]


def text(layout: Description) -> str:
    """As the library writes it."""
    return "\n".join(" ".join([owner, *(f"{k}={v}" for k, v in each.items())]) for owner, each in layout.items())


def changed(owner: str, **entries: str | None) -> Description:
    """`OURS` with entries replaced, or removed where they are None."""
    each = {name: value for name, value in (dict(OURS[owner]) | entries).items() if value is not None}
    return {**OURS, owner: each}


def inserted(after: str) -> Description:
    """A struct that got a field in the middle, so that all later ones moved."""
    kinds: list[Any] = []
    for name in tables.PARAM.names or ():
        kinds += [(name, tables.PARAM[name])] + [("newcomer", np.int64)] * (name == after)
    return {**OURS, "DaypackParam": fields(np.dtype(kinds))}


TAMPERED = {
    "offset": (changed("DaypackParam", rank="i8@8"), f"DaypackParam.rank is i8@8 in the library and {RANK} in Python"),
    "type": (changed("DaypackOptions", lr="f4@0"), f"DaypackOptions.lr is f4@0 in the library and {LR} in Python"),
    "bytes": (changed("DaypackParam", sizeof="8"), f"DaypackParam.sizeof is 8 in the library and {BYTES} in Python"),
    "missing": (changed("DaypackParam", basis=None), "DaypackParam.basis is missing from the library"),
    "extra": (changed("DaypackOptions", late="f8@0"), "DaypackOptions.late is known to the library alone"),
    "renamed": (
        changed("DaypackParam", groups=None, bundles=GROUPS),
        "DaypackParam.groups is missing from the library, DaypackParam.bundles is known to the library alone",
    ),
    "in the middle": (inserted("scale"), "DaypackParam.newcomer is known to the library alone"),
    "rule": (changed("DaypackRule", SGD="99"), "DaypackRule.SGD is 99 in the library and 2 in Python"),
    "dtype": (changed("DaypackType", BF16="2"), "DaypackType.BF16 is 2 in the library and 1 in Python"),
    "moment": (changed("DaypackSecondMoment", ROWS=None), "DaypackSecondMoment.ROWS is missing from the library"),
    "limit": (changed("DaypackLimit", NO_MEMORY="-3"), "DaypackLimit.NO_MEMORY is -3 in the library and -2 in Python"),
}


@pytest.mark.parametrize(("library", "words"), TAMPERED.values(), ids=TAMPERED)
def test_what_differs_is_named_and_nothing_else(library: Description, words: str) -> None:
    assert ", ".join(differences(parse(text(library)), OURS)) == words


def test_an_enum_that_one_side_lacks_is_named() -> None:
    without = {owner: each for owner, each in OURS.items() if owner != "DaypackRule"}
    assert differences(without, OURS)[0] == "DaypackRule.ADAMW is missing from the library"
    assert differences(OURS, without)[0] == "DaypackRule.ADAMW is known to the library alone"


def test_the_library_agrees() -> None:
    if native.library() is None:
        pytest.skip("the native kernels are not built")
    assert parse(native.loaded().daypack_layout().decode()) == parse(text(OURS)) == OURS


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What loading the library says, which it does anew."""
    if native.library() is None:
        pytest.skip("the native kernels are not built")
    lines: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    logging.getLogger("daypack").addHandler(handler)
    native.library.cache_clear()
    yield lines
    logging.getLogger("daypack").removeHandler(handler)
    native.library.cache_clear()


def test_a_library_for_other_structs_is_not_used(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "description", lambda: changed("DaypackParam", rank="i8@8"))
    assert native.library() is None
    assert len(log) == 1
    assert f"DaypackParam.rank is {RANK} in the library and i8@8 in Python: it was built from other sources" in log[0]


def test_a_library_with_other_functions_is_not_used(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "INTERFACE", native.INTERFACE + 1)
    assert native.library() is None
    assert len(log) == 1
    assert f"interface {native.INTERFACE - 1} where {native.INTERFACE} is wanted" in log[0]


def test_a_library_of_something_else_is_not_used(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAYPACK_NATIVE", str(next(Path(torch.__file__).parent.glob("lib/*c10.*"))))
    assert native.library() is None
    assert len(log) == 1
    assert "daypack_interface" in log[0]
