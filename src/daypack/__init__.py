"""daypack: optimizer state as a first-class object for PyTorch."""

from torch.optim import SGD, Adam, AdamW

from daypack.optim.base import materialize_state
from daypack.optim.gefen import Gefen
from daypack.optim.groups import param_groups
from daypack.optim.registry import create, names
from daypack.planner.estimate import estimate_state
from daypack.planner.memory import plan_memory as plan
from daypack.planner.report import state_report

__version__ = "0.1.0"
__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Gefen",
    "create",
    "estimate_state",
    "materialize_state",
    "names",
    "param_groups",
    "plan",
    "state_report",
]
