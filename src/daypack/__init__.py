"""daypack: optimizer state as a first-class object for PyTorch."""

from typing import TYPE_CHECKING, Any

from torch.optim import SGD, Adam, AdamW

from daypack.optim.adafactor import Adafactor
from daypack.optim.adam_mini import AdamMini
from daypack.optim.ademamix import AdEMAMix
from daypack.optim.adopt import ADOPT
from daypack.optim.eight_bit import Adam8bit, AdamW8bit, Lion8bit, SGD8bit
from daypack.optim.galore import GaLore
from daypack.optim.gefen import Gefen
from daypack.optim.groups import param_groups
from daypack.optim.lamb import LAMB
from daypack.optim.muon import Muon
from daypack.optim.registry import create, materialize_state, names
from daypack.optim.size import state_report
from daypack.planner.memory import plan_memory as plan
from daypack.planner.state import estimate_state
from daypack.telemetry import monitor

if TYPE_CHECKING:
    from daypack import checkpoint
    from daypack.checkpoint import convert, transplant
    from daypack.inspection import diff_states, inspect_state

__version__ = "0.1.0"
__all__ = [
    "ADOPT",
    "LAMB",
    "SGD",
    "AdEMAMix",
    "Adafactor",
    "Adam",
    "Adam8bit",
    "AdamMini",
    "AdamW",
    "AdamW8bit",
    "GaLore",
    "Gefen",
    "Lion8bit",
    "Muon",
    "SGD8bit",
    "checkpoint",
    "convert",
    "create",
    "diff_states",
    "estimate_state",
    "inspect_state",
    "materialize_state",
    "monitor",
    "names",
    "param_groups",
    "plan",
    "state_report",
    "transplant",
]

#: Names of rooms that are imported late, and the room of each late name.
_ROOMS = ("checkpoint", "inspection")
_LATE = {
    "convert": "checkpoint",
    "transplant": "checkpoint",
    "diff_states": "inspection",
    "inspect_state": "inspection",
}


def __getattr__(name: str) -> Any:
    """Import what few programs use when it is first asked for."""
    if name in _ROOMS or name in _LATE:
        import importlib

        room = importlib.import_module(f"daypack.{_LATE.get(name, name)}")
        return room if name in _ROOMS else getattr(room, name)
    raise AttributeError(f"module 'daypack' has no attribute {name!r}")
