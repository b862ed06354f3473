"""Shared by every test: one torch thread (these tests run on few, shared cores) and a pinned hypothesis profile."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)

# Examples are derived from the test itself, so that a run can be repeated; no deadline, because the machine is shared.
settings.register_profile("daypack", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("daypack")
