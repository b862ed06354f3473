"""What `daypack.monitor` costs: steps with a monitor beside the same steps without one, on the CPU.

Two optimizers step equal parameters on the same gradients in turn. The monitored one is read at every 10th step, so
that a round of ten has nine steps with hooks alone and one with a reading. Printed are the ratio of the former to the
bare steps of their round and the time of a reading in bare steps, medians over the rounds; from them what the default
interval costs. The optimizer's step is all that is run: beside a whole training step the share is smaller.
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import Parameter

import daypack
from step import OURS, WORKLOADS, contenders

EVERY = 10


def seconds(step: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    step()
    return clock() - start


def run(workload: str, name: str, rounds: int, clock: Callable[[], float]) -> None:
    torch.manual_seed(0)
    grads = [torch.randn(shape) * 1e-3 for shape in WORKLOADS[workload]]
    bare, watched = (contenders()[name]([Parameter(torch.zeros_like(g)) for g in grads]) for _ in range(2))
    for optimizer in (bare, watched):
        for p, g in zip(optimizer.param_groups[0]["params"], grads, strict=True):
            p.grad = g
        optimizer.step()
        optimizer.step()
    hooks, readings, steps = [], [], []
    with daypack.monitor(watched, interval=EVERY):
        for _ in range(rounds):
            pairs = [(seconds(bare.step, clock), seconds(watched.step, clock)) for _ in range(EVERY)]
            usual = statistics.median(each for each, _ in pairs)
            steps.append(usual)
            hooks.append(statistics.median(each for _, each in pairs[:-1]) / usual)
            readings.append((pairs[-1][1] - usual) / usual)
    hook, reading = statistics.median(hooks), statistics.median(readings)
    interval = inspect.signature(daypack.monitor).parameters["interval"].default
    total = hook - 1 + reading / interval
    print(
        f"{workload:12}{name:14}{1e3 * statistics.median(steps):>9.2f}{hook:>8.3f}"
        f"{1e3 * reading * statistics.median(steps):>12.1f}{reading:>14.2f}{reading / interval:>12.2%}{total:>9.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="gpt2-124m")
    parser.add_argument("--optimizers", default="gefen,adamw8bit,adamw-fused", help=f"{', '.join(OURS)}, adamw-fused")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--processor", action="store_true", help="processor time, which waiting does not enter")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, {options.threads} threads, load {os.getloadavg()[0]:.1f}, {options.rounds} rounds"
    )
    print(f"{'workload':12}{'optimizer':14}{'step, ms':>9}{'hooks':>8}{'reading, ms':>12}{'in steps':>14}", end="")
    print(f"{'per 100':>12}{'in all':>9}")
    for workload in options.workloads.split(","):
        for name in options.optimizers.split(","):
            run(workload, name, options.rounds, time.process_time if options.processor else time.perf_counter)


if __name__ == "__main__":
    main()
