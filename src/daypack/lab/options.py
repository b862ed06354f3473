"""What is known of each option of a run beside its name, type and default, and the checks of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field
from typing import Any, TypeAlias

#: The largest count of anything; a larger one is taken for a typing error.
MOST = 2**31 - 1
#: The commands that take options of a run.
COMPARE, TRAIN = "compare", "train"

#: (name, value) -> nothing, or a ValueError that names both.
Check: TypeAlias = "Callable[[str, Any], None]"


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        help: what it is, for the command line and for readers of `TrainConfig`.
        commands: the commands that take it; empty where only Python can set it.
        default: the default in words, where the value does not say it.
        check: refuses values that cannot be; None is never refused.
        may_differ: whether a resumed run may have another value: where and how long something runs, not what is
            computed.
        row: title and text of a row in the report's table of settings. The text is made from the configs of all runs,
            and may cover several options.
    """

    help: str
    commands: tuple[str, ...] = (COMPARE, TRAIN)
    default: str = ""
    check: Check | None = None
    may_differ: bool = False
    row: tuple[str, Callable[[Sequence[Any]], str]] | None = None


def option(default: Any, help: str, *, words: str = "", **known: Any) -> Any:
    """Return a dataclass field that carries an `Option`.

    Args:
        default: its value; an empty dict stands for a fresh one each time.
        words: `Option.default`.
        known: the other attributes of `Option`.
    """
    metadata = {"option": Option(help, default=words, **known)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def option_of(entry: Field[Any]) -> Option:
    """Return what `option` put into a field."""
    found: Option = entry.metadata["option"]
    return found


def flag(name: str) -> str:
    """Return the name of an option on the command line."""
    return "--" + name.replace("_", "-")


def count(most: int = MOST) -> Check:
    """Return a check for whole numbers from 1 to ``most``."""

    def check(name: str, value: Any) -> None:
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
        if value > most:
            raise ValueError(f"{name} must be at most {most}, got {value}")

    return check


def not_negative(name: str, value: Any) -> None:
    """Check a finite number of at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}")


def seed_number(name: str, value: Any) -> None:
    """Check a seed of torch's generators."""
    if not 0 <= value < 2**63:
        raise ValueError(f"{name} must lie in 0 .. 2**63 - 1, got {value}")


def one_of(choices: Sequence[str]) -> Check:
    """Return a check for one of ``choices``."""

    def check(name: str, value: Any) -> None:
        if value not in choices:
            raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(choices)}")

    return check
