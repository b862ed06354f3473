"""Shared by every test: one thread (these tests run on few, shared cores) and a pinned hypothesis profile."""

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # of numpy, and of every process that a test starts
    os.environ.setdefault(variable, "1")

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)

# Examples are derived from the test itself, so that a run can be repeated; no deadline, because the machine is shared.
settings.register_profile("daypack", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("daypack")
