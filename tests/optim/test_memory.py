"""Temporary memory of a step does not grow with the parameter."""

import os
import subprocess
import sys

import pytest

#: Steps a 512 MiB parameter and prints by how many MiB the process's peak exceeds parameter, gradient and state.
PROGRAM = """
import resource, sys, torch, daypack
torch.set_num_threads(1)
rows, steps, second_moment = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

# Everything that is loaded or allocated once, on a small parameter.
small = torch.nn.Parameter(torch.ones(64, 4096))
small.grad = torch.randn(64, 4096)
daypack.Gefen([small], second_moment=second_moment).step()

p = torch.nn.Parameter(torch.ones(rows, 128 * 1024 * 1024 // rows))
p.grad = torch.empty_like(p)
noise = torch.randn(1 << 20)
for part in p.grad.view(-1).split(1 << 20):
    part.copy_(noise)
optimizer = daypack.Gefen([p], second_moment=second_moment)
before = peak()
for _ in range(steps):
    optimizer.step()
print(peak() - before - daypack.state_report(optimizer).total_bytes / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak resident size as Linux reports it")
@pytest.mark.parametrize(
    ("rows", "steps", "second_moment"), [(32768, 2, "factored"), (32768, 1, "blocks"), (1, 1, "factored")]
)
def test_step_of_a_512_mib_parameter_takes_less_than_64_mib_beyond_its_state(rows, steps, second_moment):
    """Measured on the process, first step and calibration included."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rows), str(steps), second_moment],
        capture_output=True, text=True, timeout=300, check=True,
        # Freed buffers go back to the system at once; otherwise the figure is the allocator's fragmentation as well.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"},
    )  # fmt: skip
    assert 0 < float(run.stdout) < 64
