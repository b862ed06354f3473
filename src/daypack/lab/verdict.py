"""What a comparison says, in words."""

from collections.abc import Sequence

from daypack.lab.compare import OptimizerSummary
from daypack.lab.tasks import task_info

# Runs of the text task that differ in the last bit of one number end about this far apart (nats per byte).
NOISE = 0.01
# Steps of the text task below which a lead has been seen to vanish later on.
LASTING = 1500


def headline(summaries: Sequence[OptimizerSummary]) -> str:
    """Say the result in one line: the second optimizer against the first, or the only one by itself."""
    first = summaries[0]
    if len(summaries) == 1:
        loss = f"ends at {first.loss.value:.3f} nats per {task_info(first.task).unit}" if first.loss else "diverges"
        return f"{first.label} {loss} with {first.bytes_per_param:.2f} bytes of state per parameter"
    return sentence(summaries[1], first)


def sentence(summary: OptimizerSummary, baseline: OptimizerSummary) -> str:
    """Say how `summary` did against `baseline`."""
    return f"{summary.label} {_quality(summary, baseline)}, with {_memory(summary, baseline)}"


def caveat(summaries: Sequence[OptimizerSummary]) -> str:
    """Say how far the comparison can be trusted."""
    seeds, steps = summaries[0].seeds, summaries[0].steps
    text = summaries[0].task == "text"
    few = text and steps < LASTING and len(summaries) > 1
    early = f" {steps:,} steps are few: a lead this early need not last." if few else ""
    if seeds == 1 and not text:
        return "One seed: another one may turn a gap round; --seeds 5 shows the spread."
    if seeds == 1:
        return (
            f"One seed: equal runs that differ in a single last bit end about {NOISE} nats apart, "
            f"so a smaller gap means nothing; --seeds 5 shows the spread.{early}"
        )
    return (
        f"{seeds} seeds; ± is the standard error of the mean over seeds. "
        f"Gaps are paired: both runs of a pair start from the same weights and see the same batches.{early}"
    )


def ratio(value: float, baseline: float) -> str:
    """Say `baseline / value` in words."""
    if value == baseline:
        return "the same"
    if value == 0:
        return "none"
    if baseline == 0:
        return "more"
    return f"{baseline / value:.1f}x less" if value < baseline else f"{value / baseline:.1f}x more"


def _quality(summary: OptimizerSummary, baseline: OptimizerSummary) -> str:
    if summary.loss is None:
        return "diverges"
    if summary.gap is None:
        return f"ends at {summary.loss.value:.3f} nats per {task_info(summary.task).unit}"
    gap = summary.gap
    within = 2 * (NOISE if gap.error is None else gap.error)
    if abs(gap.value) <= within:
        return f"ends level with {baseline.label}"
    return f"ends {abs(gap.value):.3f} nats {'below' if gap.value < 0 else 'above'} {baseline.label}"


def _memory(summary: OptimizerSummary, baseline: OptimizerSummary) -> str:
    if summary.bytes_per_param == 0:
        return "no optimizer state"
    return f"{ratio(summary.bytes_per_param, baseline.bytes_per_param)} optimizer state"
