"""One rank of a DeepSpeed ZeRO run: trains, saves, resumes, and prints what happened. Started by test_deepspeed.py."""

from __future__ import annotations

import json
import os
import sys

import deepspeed  # type: ignore[import-not-found]
import torch
from torch import nn

import daypack

STAGE, FOLDER = int(sys.argv[1]), sys.argv[2]
RANK = int(os.environ["RANK"])


def build() -> tuple[deepspeed.DeepSpeedEngine, daypack.Gefen]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))
    optimizer = daypack.Gefen(net.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": STAGE},
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    return engine, optimizer


def steps(engine: deepspeed.DeepSpeedEngine, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(10 * step + RANK)).bfloat16()
        loss = (engine(x) - x.flip(1)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


torch.set_num_threads(1)
engine, optimizer = build()
losses = steps(engine, 0, 20)
held = sum(value.numel() * value.element_size() for state in optimizer.state.values() for value in state.values())
elements = sum(p.numel() for p in optimizer.state)
engine.save_checkpoint(FOLDER)
on = steps(engine, 20, 25)
again, _ = build()
again.load_checkpoint(FOLDER)
resumed = steps(again, 20, 25)
result = {"first": losses[0], "last": losses[-1], "bytes_per_param": held / elements, "on": on, "resumed": resumed}
with open(f"{FOLDER}/result{RANK}.json", "w", encoding="utf-8") as file:
    json.dump(result, file)
