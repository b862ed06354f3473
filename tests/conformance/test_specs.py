"""The declarations themselves: every registered optimizer is crossed, and every exception is about a real scenario."""

from __future__ import annotations

import ast
from pathlib import Path

import daypack

from .specs import CASES, SPECS


def scenarios() -> set[str]:
    found = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any("crossed" in ast.unparse(d) for d in node.decorator_list):
                found.add(node.name.removeprefix("test_"))
    return found


def test_every_registered_optimizer_is_crossed() -> None:
    assert {case.spec.name for case in CASES} == set(daypack.names())
    assert set(SPECS) <= set(daypack.names())
    for case in CASES:
        assert set(case.spec.bytes_per_param) == set(case.spec.variants)


def test_every_exception_is_about_a_scenario_and_has_a_reason() -> None:
    known = scenarios()
    assert len(known) > 60
    for spec in SPECS.values():
        excepted = {key.partition("@")[0] for key in spec.otherwise}
        assert excepted <= known, excepted - known
        assert all(len(reason.split()) > 2 for reason in spec.otherwise.values())
