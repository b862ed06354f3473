"""What is in optimizer state, and what differs between two states."""

from daypack.inspection.difference import StateDiff, diff_states
from daypack.inspection.measure import inspect_state
from daypack.inspection.result import MomentStats, ParamStats, StateInspection

__all__ = ["MomentStats", "ParamStats", "StateDiff", "StateInspection", "diff_states", "inspect_state"]
