"""A result as one self-contained HTML file: no script, no request, light and dark, desktop and phone."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from daypack.reports.curve import DARK, LIGHT, Theme, curve_svg
from daypack.reports.table import cells
from daypack.reports.verdict import caveat, headline, ratio, sentence
from daypack.training.compare import Summary, summarise
from daypack.training.loop import RunResult
from daypack.training.tasks import kind

_LARGE_MODEL = 7e9  # parameters, for a figure in gigabytes that people know


@dataclass(frozen=True)
class Provenance:
    """How to get the same result again.

    Attributes:
        name: of the run.
        command: the command line.
        source: the data.
        fingerprint: of the data.
        versions: as `daypack.training.environment.versions` gives them.
    """

    name: str
    command: str
    source: str
    fingerprint: str
    versions: Mapping[str, str]


def render_page(results: Sequence[RunResult], provenance: Provenance) -> str:
    """The HTML of a comparison or, with one result, of a single run."""
    summaries = summarise(results)
    return render(
        "report.html.j2",
        headline=headline(summaries),
        sentences=[sentence(summary, summaries[0]) for summary in summaries[2:]],
        caveat=caveat(summaries),
        figures=_figures(summaries),
        baseline=summaries[0].label,
        unit=kind(summaries[0].task).unit,
        rows=[(*cells(summary), light, dark) for summary, light, dark in _coloured(summaries)],
        bars=_bars(summaries),
        curves=sources(lambda theme, wide: curve_svg(results, theme, wide=wide)),
        settings=_settings(results),
        provenance=provenance,
    )


def render(template: str, **content: Any) -> str:
    """A template of this room, filled in; texts are escaped, and a name that is missing is an error."""
    environment = Environment(
        loader=PackageLoader("daypack.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**content)


def _figures(summaries: Sequence[Summary]) -> list[tuple[str, str, str]]:
    """The three numbers at the top: title, value, explanation."""
    first, last = summaries[0], summaries[min(1, len(summaries) - 1)]
    unit = kind(first.task).unit
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


def _coloured(summaries: Sequence[Summary]) -> list[tuple[Summary, str, str]]:
    """Each summary with its curve's colours."""
    count = len(LIGHT.lines)
    return [(summary, LIGHT.lines[i % count], DARK.lines[i % count]) for i, summary in enumerate(summaries)]


def _bars(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """State per parameter as bars, and what it would be for a large model at the same rate."""
    longest = max(summary.bytes_per_param for summary in summaries) or 1.0
    return [
        {
            "label": summary.label,
            "bytes": f"{summary.bytes_per_param:.2f}",
            "percent": f"{100 * summary.bytes_per_param / longest:.1f}",
            "gigabytes": f"{summary.bytes_per_param * _LARGE_MODEL / 1e9:.1f}",
            "light": light,
            "dark": dark,
        }
        for summary, light, dark in _coloured(summaries)
    ]


def sources(draw: Callable[[Theme, bool], bytes]) -> dict[str, str]:
    """Data URIs of an SVG for each theme and width; ``draw`` takes the theme and whether it is wide."""
    return {
        f"{name}_{'wide' if wide else 'narrow'}": "data:image/svg+xml;base64,"
        + base64.b64encode(draw(theme, wide)).decode()
        for name, theme in (("light", LIGHT), ("dark", DARK))
        for wide in (True, False)
    }


def _settings(results: Sequence[RunResult]) -> list[tuple[str, str]]:
    """What all runs share, for people."""
    config, seeds = results[0].config, sorted({result.config.seed for result in results})
    return [
        ("task", config.task),
        ("model", f"{config.model}, {results[0].parameters:,} parameters"),
        ("steps", f"{config.steps:,}"),
        ("batch", kind(config.task).batch(config)),
        ("schedule", f"{config.warmup_steps} steps of warm-up, then cosine to {config.final_lr:g} of the peak"),
        ("weight decay", f"{config.weight_decay:g} on matrices"),
        ("gradient clipping", "none" if config.clip is None else f"at norm {config.clip:g}"),
        ("evaluation", kind(config.task).held_out(config)),
        ("seeds", ", ".join(map(str, seeds))),
        ("device, dtype", f"{config.device}, {config.dtype}"),
    ]
