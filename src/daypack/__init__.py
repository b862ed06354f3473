"""daypack: optimizer state as a first-class object for PyTorch."""

from typing import TYPE_CHECKING, Any

from torch.optim import SGD, Adam, AdamW

from daypack.optim.base import materialize_state
from daypack.optim.gefen import Gefen
from daypack.optim.groups import param_groups
from daypack.optim.registry import create, names
from daypack.planner.estimate import estimate_state
from daypack.planner.report import state_report

if TYPE_CHECKING:
    from daypack import checkpoint

__version__ = "0.1.0"
__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Gefen",
    "checkpoint",
    "create",
    "estimate_state",
    "materialize_state",
    "names",
    "param_groups",
    "state_report",
]


def __getattr__(name: str) -> Any:
    """Import what few programs use when it is first asked for."""
    if name == "checkpoint":
        import importlib

        return importlib.import_module("daypack.checkpoint")
    raise AttributeError(f"module 'daypack' has no attribute {name!r}")
