"""Which optimizer to take, and why, in one sentence."""

from __future__ import annotations

from dataclasses import replace

from daypack.planner.result import MemoryPlan, OptimizerPlan
from daypack.planner.units import show_bytes

BASELINE = "adamw"


def recommend(plan: MemoryPlan) -> MemoryPlan:
    """Return ``plan`` with a recommendation.

    AdamW if it fits, if need be with ``fused=True``: compressing gains nothing where memory is not scarce. Else, of
    those that keep both of AdamW's moments, the one that leaves most room; else the one with the least state, but
    some; else one without state.
    """
    rows = plan.planned
    if not rows:
        return replace(plan, reason="No optimizer can be planned for this model.")
    if plan.memory is None:
        return replace(plan, reason=_without_limit(rows))
    fitting = [row for row in rows if row.fits]
    baseline = next((row for row in rows if row.optimizer == BASELINE), None)
    if baseline is not None and not baseline.fits and _fused(baseline) <= plan.memory:
        reason = (
            f"{BASELINE} fits with fused=True, {show_bytes(plan.memory - _fused(baseline))} to spare; without it its "
        )
        reason += f"step takes {show_bytes(baseline.temporaries)} of temporaries."
        return replace(plan, recommended=BASELINE, reason=reason)
    if not fitting:
        return replace(plan, reason=_nothing_fits(plan, rows, plan.memory))
    if baseline is not None and baseline.fits:
        reason = (
            f"{BASELINE} fits with {show_bytes(plan.memory - baseline.total)} to spare, so nothing need be compressed"
        )
        roomier = max(fitting, key=lambda row: (row.keeps_both_moments, row.largest_batch or 0, -row.total))
        if roomier.keeps_both_moments and (roomier.largest_batch or 0) > (baseline.largest_batch or 0):
            reason += f"; {roomier.optimizer} would fit a micro-batch of {roomier.largest_batch} instead of "
            reason += str(baseline.largest_batch)
        return replace(plan, recommended=BASELINE, reason=reason + ".")
    best = min(fitting, key=_preference)
    reason = f"{best.optimizer} fits with {show_bytes(plan.memory - best.total)} to spare"
    if best.largest_batch:
        reason += f" and a micro-batch of up to {best.largest_batch}"
    if baseline is not None:
        reason += f", where {BASELINE} lacks {show_bytes(_fused(baseline) - plan.memory)}"
        reason += " even with fused=True" if _fused(baseline) < baseline.total else ""
    if best.keeps_both_moments:
        reason += ", and keeps both of its moments" if baseline is not None else ", and keeps both moments"
    elif not best.state:
        reason += "; it keeps no state at all and needs its own learning rate"
    return replace(plan, recommended=best.optimizer, reason=reason + ".")


def _fused(row: OptimizerPlan) -> int:
    """Return the total of one of torch's optimizers with ``fused=True``, whose step has no temporaries."""
    return row.resident + row.activations


def _preference(row: OptimizerPlan) -> tuple[int, int]:
    kind = 0 if row.keeps_both_moments else 1 if row.state else 2
    return kind, row.total


def _without_limit(rows: tuple[OptimizerPlan, ...]) -> str:
    keeping = [row for row in rows if row.keeps_both_moments] or list(rows)
    least = min(keeping, key=lambda row: row.total)
    what = " of those that keep AdamW's moments" if least.keeps_both_moments else ""
    size = show_bytes(least.total)
    return f"{least.optimizer} takes the least{what}, {size}; give a GPU or its memory to see what fits."


def _nothing_fits(plan: MemoryPlan, rows: tuple[OptimizerPlan, ...], memory: int) -> str:
    least = min(rows, key=lambda row: row.total)
    lacking = show_bytes(least.total - memory)
    if least.resident + least.temporaries <= memory:
        remedy = "use gradient checkpointing or a shorter sequence"
        if plan.batch > 1:
            remedy = f"use a smaller batch than {plan.batch}, {remedy.removeprefix('use ')}"
    else:
        sharded = plan.parallel in ("fsdp2", "zero3")
        smaller = "16-bit weights or LoRA" if plan.weights_dtype == "fp32" else "LoRA"
        remedy = f"use more GPUs, or {smaller}" if sharded else f"shard it over several GPUs (fsdp2), or use {smaller}"
    return f"Nothing fits: even {least.optimizer} lacks {lacking}; {remedy}."
