"""The result of a comparison, or of one run, as a page of HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from daypack.lab.compare import Mean, OptimizerSummary, summarise_runs
from daypack.lab.config import TrainConfig
from daypack.lab.curve import draw
from daypack.lab.loop import RunResult
from daypack.lab.options import option_of
from daypack.lab.pareto import draw_pareto, plottable
from daypack.lab.table import cells
from daypack.lab.tasks import task_info
from daypack.lab.verdict import caveat, headline, ratio, sentence
from daypack.planner.units import show_bytes
from daypack.presentation.figure import DARK, LIGHT
from daypack.presentation.html import pictures, render

_LARGE_MODEL = 7e9  # parameters, for a figure in gigabytes that people know


@dataclass(frozen=True)
class Provenance:
    """How to get the same result again.

    Attributes:
        name: of the run.
        command: the command line.
        source: the data.
        fingerprint: of the data.
        versions: as `daypack.lab.environment.versions` gives them.
    """

    name: str
    command: str
    source: str
    fingerprint: str
    versions: Mapping[str, str]


def render_page(results: Sequence[RunResult], provenance: Provenance) -> str:
    """Render a comparison or, with one result, a single run as HTML."""
    summaries = summarise_runs(results)
    return render(
        "daypack.lab",
        "report.html.j2",
        provenance.name,
        headline=headline(summaries),
        sentences=[sentence(summary, summaries[0]) for summary in summaries[2:]],
        caveat=caveat(summaries),
        figures=_figures(summaries),
        baseline=summaries[0].label,
        unit=task_info(summaries[0].task).unit,
        rows=[(*cells(summary), light, dark) for summary, light, dark in _coloured(summaries)],
        bars=_bars(summaries),
        curves=pictures(lambda theme, wide: draw(results, theme, wide=wide)),
        pareto=pictures(lambda theme, wide: draw_pareto(summaries, theme, wide=wide))
        if len(plottable(summaries)) > 1
        else None,
        steps=_steps(summaries),
        seeds=summaries[0].seeds,
        diverged=", ".join(summary.label for summary in summaries if summary.loss is None),
        settings=_settings(results),
        provenance=provenance,
    )


def _figures(summaries: Sequence[OptimizerSummary]) -> list[tuple[str, str, str]]:
    """Return the three numbers at the top: title, value, explanation."""
    first, last = summaries[0], summaries[min(1, len(summaries) - 1)]
    unit = task_info(first.task).unit
    loss = "diverged" if last.loss is None else f"{last.loss.value:.3f}"
    if first is last:
        return [
            ("Validation loss", loss, f"nats per {unit}"),
            ("Optimizer state", f"{last.bytes_per_param:.2f} B", "per parameter, measured"),
            ("Optimizer step", f"{last.optimizer_ms:.1f} ms", "median"),
        ]
    gap = "–" if last.gap is None else f"{last.gap.value:+.4f}"
    spread = "" if last.gap is None or last.gap.error is None else f" ± {last.gap.error:.4f}"
    reference = "diverged" if first.loss is None else f"{first.loss.value:.3f}"
    return [
        (
            f"Validation loss, gap to {first.label}",
            gap,
            f"{spread} nats per {unit}; {loss} against {reference}".strip(),
        ),
        (
            "Optimizer state",
            ratio(last.bytes_per_param, first.bytes_per_param),
            f"{last.bytes_per_param:.2f} against {first.bytes_per_param:.2f} bytes per parameter, measured",
        ),
        (
            "Optimizer step",
            f"{last.optimizer_ms / first.optimizer_ms:.2f}x the time",
            f"{last.optimizer_ms:.1f} against {first.optimizer_ms:.1f} ms, median",
        ),
    ]


def _coloured(summaries: Sequence[OptimizerSummary]) -> list[tuple[OptimizerSummary, str, str]]:
    """Return pair each summary with its curve's colours."""
    count = len(LIGHT.lines)
    return [(summary, LIGHT.lines[i % count], DARK.lines[i % count]) for i, summary in enumerate(summaries)]


def _bars(summaries: Sequence[OptimizerSummary]) -> list[dict[str, Any]]:
    """Describe memory as stacked bars, and what the state of a large model would be at the same rate."""
    longest = max(summary.memory.total for summary in summaries) or 1
    return [
        {
            "label": summary.label,
            "total": show_bytes(summary.memory.total),
            "parts": [
                (name, show_bytes(size), f"{100 * size / longest:.2f}")
                for name, size in (
                    ("weights", summary.memory.weights),
                    ("gradients", summary.memory.gradients),
                    ("state", summary.memory.state),
                )
            ],
            "bytes": f"{summary.bytes_per_param:.2f}",
            "gigabytes": f"{summary.bytes_per_param * _LARGE_MODEL / 1e9:.1f}",
        }
        for summary in summaries
    ]


def _steps(summaries: Sequence[OptimizerSummary]) -> list[tuple[str, ...]]:
    """Return label, median step, ratio to the first optimizer's, first step, share of the run."""
    return [
        (
            summary.label,
            f"{summary.optimizer_ms:.2f}",
            "1" if summary.step_ratio is None else _ratio(summary.step_ratio),
            f"{summary.first_step_ms:.1f}",
            f"{100 * summary.optimizer_share:.1f}",
        )
        for summary in summaries
    ]


def _ratio(mean: Mean) -> str:
    return f"{mean.value:.2f}" + ("" if mean.error is None else f" ± {mean.error:.2f}")


def _settings(results: Sequence[RunResult]) -> list[tuple[str, str]]:
    """Return list the settings of the runs for people, a row for each `Option` that has one."""
    configs = [result.config for result in results]
    rows = {row[0]: row[1](configs) for entry in fields(TrainConfig) if (row := option_of(entry).row)}
    rows["model"] += f", {results[0].parameters:,} parameters"
    return list(rows.items())
