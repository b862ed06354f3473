"""What became of each moment when state was carried over."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["exact", "expanded", "requantised", "grown", "cut", "new", "dropped"]


@dataclass(frozen=True)
class Carried:
    """One moment of one parameter.

    Attributes:
        param: the parameter's name; of one that is only in the source, the source's.
        moment: its name in the state, such as ``"exp_avg"``, or ``"state"`` (all of it).
        outcome: ``"exact"``: the same numbers, stored alike; ``"expanded"``: the same numbers, from a compressed form
            into a plain one; ``"requantised"``: rounded or averaged anew; ``"grown"``: kept where the old parameter
            was, started elsewhere; ``"cut"``: kept where the new parameter is, the rest dropped; ``"new"``: started;
            ``"dropped"``: not carried.
        error: of what is stored relative to what was to be stored, 2-norms.
        note: the reason.
    """

    param: str
    moment: str
    outcome: Outcome
    error: float = 0.0
    note: str = ""


@dataclass
class Report:
    """What was carried, moment by moment; ``str()`` of it is a summary, `table` the whole.

    Attributes:
        entries: one for each moment.
        notes: what concerns all parameters.
    """

    entries: list[Carried] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, param: str, moment: str, outcome: Outcome, error: float = 0.0, note: str = "") -> None:
        self.entries.append(Carried(param, moment, outcome, error, note))

    def counts(self) -> dict[str, int]:
        """Return the number of moments by outcome."""
        return dict(Counter(entry.outcome for entry in self.entries))

    def __str__(self) -> str:
        lines = []
        for (moment, outcome, note), entries in self._kinds().items():
            worst = max(entry.error for entry in entries)
            error = f", error {_mean(entries):.2%} (largest {worst:.2%})" if worst else ""
            reason = f": {note}" if note else ""
            lines.append(f"{moment} of {len(entries)} parameters {outcome}{error}{reason}")
        return "\n".join([*lines, *self.notes])

    def _kinds(self) -> dict[tuple[str, str, str], list[Carried]]:
        kinds: dict[tuple[str, str, str], list[Carried]] = {}
        for entry in self.entries:
            kinds.setdefault((entry.moment, entry.outcome, entry.note), []).append(entry)
        return kinds

    def table(self) -> str:
        """Return a text with a line for each moment."""
        width = max((len(entry.param) for entry in self.entries), default=0)
        return "\n".join(
            f"{entry.param:{width}}  {entry.moment:10}  {entry.outcome:11}  {entry.error:8.2%}  {entry.note}".rstrip()
            for entry in self.entries
        )


def _mean(entries: list[Carried]) -> float:
    return sum(entry.error for entry in entries) / len(entries)
