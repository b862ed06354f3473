"""Options of `compare` and `train`, from the table that `TrainConfig` is."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any, get_type_hints

import typer

from daypack.lab import TrainConfig
from daypack.lab.options import option_of


def with_options(command: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a function the options of ``command`` in place of its parameter ``given``, which gets them by name.

    An option that is not given is None in it, and takes its default later: so --resume can tell the two apart.
    """
    entries = [entry for entry in fields(TrainConfig) if command in option_of(entry).commands]
    types = get_type_hints(TrainConfig)

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        @wraps(function)
        def call(**arguments: Any) -> int:
            given = {entry.name: arguments.pop(entry.name) for entry in entries}
            return function(given=given, **arguments)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name == "given":
                parameters += [
                    inspect.Parameter(
                        entry.name,
                        inspect.Parameter.KEYWORD_ONLY,
                        default=typer.Option(None, help=option_of(entry).help, show_default=default_of(entry.name)),
                        annotation=types[entry.name] | None,
                    )
                    for entry in entries
                ]
            else:
                parameters.append(parameter)
        call.__signature__ = inspect.signature(function).replace(parameters=parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def default_of(name: str) -> str:
    """Return the default of an option as its help shows it."""
    entry = next(entry for entry in fields(TrainConfig) if entry.name == name)
    assert entry.default is not MISSING
    return option_of(entry).default or (
        f"{entry.default:g}" if isinstance(entry.default, float) else str(entry.default)
    )
