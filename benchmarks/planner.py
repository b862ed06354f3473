"""Plan against measurement: what `daypack.plan` says of real models, and what the process takes.

    python benchmarks/planner.py                 # every model, as a table for docs/planner.md
    python benchmarks/planner.py llama mlp --json

Each model runs in a process of its own: one training step, then a second forward pass with the first gradients still
there. Then weights, gradients, state and activations are all alive, and the anonymous memory of the process (Linux) is
compared with the plan; the state also with the optimizer's own tensors, which it must equal to the byte. Then the
backward pass runs, and the process's peak is compared with the planned peak.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import daypack
from daypack.planner.lora import with_lora
from daypack.planner.memory import plan_memory
from daypack.planner.model import ModelSpec, from_module

#: Freed buffers go back to the system at once; otherwise the figure is the allocator's fragmentation as well.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
BATCH, SEQUENCE = 2, 256


def hugging_face(kind: str, *, checkpointing: bool = False, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """A builder of a transformers model and of the plan's view of it."""
    from daypack.planner.pretrained import class_for, describe, quiet, transformers

    library = transformers()

    def build() -> nn.Module:
        with quiet():
            config = library.AutoConfig.for_model(kind, **sizes)
            config.use_cache = False
            if getattr(config, "is_encoder_decoder", False):
                config.decoder_start_token_id = 0
            model = class_for(library, config)(config).to(dtype).train()
            if checkpointing:
                model.gradient_checkpointing_enable()
        return model

    return build, lambda module: describe(module)


def plain(build: Callable[[], nn.Module], *sample: int, dtype: torch.dtype = torch.float32) -> Any:
    def inputs(batch: int, sequence: int) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(batch, *sample, dtype=dtype, device="meta"),)

    return build, lambda module: from_module(module, inputs=inputs)


def lora() -> Any:
    """PEFT's own adapters in the process; the plan adds adapters itself."""
    build, describe = llama()

    def adapted() -> nn.Module:
        base = build()
        if next(base.parameters()).is_meta:
            return base
        from peft import LoraConfig, get_peft_model

        return get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))

    return adapted, lambda module: with_lora(describe(module), 8, ["q_proj", "v_proj"])


def mlp() -> nn.Module:
    return nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(2048, 2048), nn.GELU())], nn.Linear(2048, 10))


def conv_net() -> nn.Module:
    def block(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]

    layers = [*block(3, 64), *block(64, 128), nn.MaxPool2d(2), *block(128, 512), nn.MaxPool2d(2), *block(512, 1024)]
    return nn.Sequential(*layers, *block(1024, 1024), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 100))


def llama(**more: Any) -> Any:
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
    return hugging_face("llama", **{**sizes, "num_key_value_heads": 2, "vocab_size": 16000, **more})


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: hugging_face("gpt2", n_embd=512, n_layer=8, n_head=8, vocab_size=20000, attn_pdrop=0.0),
    "llama": llama,
    "llama, bf16": lambda: llama(dtype=torch.bfloat16),
    "llama, checkpointing": lambda: llama(checkpointing=True),
    "llama, tied embeddings": lambda: llama(tie_word_embeddings=True),
    "llama, LoRA r = 8": lora,
    "mistral, sliding window": lambda: hugging_face(
        "mistral", hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=16000, sliding_window=64,
    ),
    "qwen3": lambda: hugging_face(
        "qwen3", hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=16000, head_dim=64,
    ),
    "mixtral": lambda: hugging_face(
        "mixtral", hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=8000, num_local_experts=8,
    ),
    "bert": lambda: hugging_face(
        "bert", hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        attention_probs_dropout_prob=0.0,
    ),
    "t5": lambda: hugging_face(
        "t5", d_model=512, d_ff=2048, num_layers=6, num_heads=8, vocab_size=16000, dropout_rate=0.0,
    ),
    "vit": lambda: hugging_face(
        "vit", hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        attention_probs_dropout_prob=0.0,
    ),
    "mamba": lambda: hugging_face("mamba", hidden_size=512, num_hidden_layers=6, vocab_size=16000),
    "resnet-50": lambda: hugging_face("resnet", image_size=128),
    "conv net": lambda: plain(conv_net, 3, 64, 64),
    "mlp": lambda: plain(mlp, 2048),
}  # fmt: skip
#: (batch, sequence) where it is not the usual one: loops over time are slow, and an MLP keeps little.
CALLED = {"mamba": (1, 64), "mlp": (256, 1), "resnet-50": (4, 1), "conv net": (4, 1), "vit": (4, 1)}


def anonymous() -> int:
    """Anonymous resident memory of this process, bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not report anonymous memory")


def reset_peak() -> int:
    """Start a new peak; returns what is resident now, bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key + ":")).split()[1]) * 1024


def call(model: nn.Module, spec: ModelSpec, batch: int, sequence: int) -> torch.Tensor:
    """Forward with real inputs of the planned shapes; returns the loss and keeps nothing else."""
    assert spec.inputs is not None
    given = spec.inputs(batch, sequence)

    def real(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape, dtype=x.dtype) if x.dtype == torch.long else torch.rand(x.shape).to(x.dtype)

    if isinstance(given, dict):
        made = {key: real(value) for key, value in given.items()}
        output = model(**made)
    else:
        output = model(*map(real, given))
    loss = getattr(output, "loss", None)
    if loss is None:
        found = output if isinstance(output, torch.Tensor) else next(iter(output.values()))
        loss = found.sum()
    return loss


def settle() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def measure(name: str, optimizer_name: str) -> dict[str, Any]:
    """Plan and measurement of one model, in bytes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    batch, sequence = CALLED.get(name, (BATCH, SEQUENCE))
    build, describe = MODELS[name]()
    with torch.device("meta"):
        spec = describe(build())
    plan = plan_memory(
        spec, optimizers=[optimizer_name], batch=batch, sequence=sequence, foreach=False,
        gradient_checkpointing="checkpointing" in name,
    )  # fmt: skip
    row = plan[optimizer_name]

    def train() -> Any:
        torch.manual_seed(0)
        model = build()
        optimizer = daypack.create(optimizer_name, daypack.param_groups(model))
        call(model, spec, batch, sequence).backward()
        optimizer.step()
        return model, optimizer

    kept = train()  # what libraries allocate once
    call(kept[0], spec, batch, sequence).backward()
    del kept
    settle()
    start = anonymous()
    model, optimizer = train()
    settle()
    between = anonymous()
    loss = call(model, spec, batch, sequence)
    settle()
    alive = anonymous() - start
    resident = reset_peak()
    loss.backward()
    return {
        "model": name,
        "optimizer": optimizer_name,
        "parameters": plan.parameters,
        "how": plan.activations.how,
        "weights": row.weights,
        "gradients": row.gradients,
        "planned_state": row.state,
        "state": daypack.state_report(optimizer).total_bytes,
        "planned_activations": plan.activations.saved,
        "activations": alive - (between - start),
        "planned": row.weights + row.gradients + row.state + plan.activations.saved,
        "measured": alive,
        "planned_peak": row.resident + row.activations,
        "measured_peak": alive + _status("VmHWM") - resident,
        "versions": {"torch": torch.__version__},
    }


def run(name: str, optimizer: str) -> dict[str, Any]:
    """`measure` in a fresh process."""
    result = subprocess.run(
        [sys.executable, __file__, name, "--optimizer", optimizer, "--here"],
        capture_output=True, text=True, check=False, env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    if result.returncode:
        raise SystemExit(f"{name}: {result.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def line(r: dict[str, Any]) -> str:
    mb = {key: value / 1e6 for key, value in r.items() if isinstance(value, int)}
    state = "equal" if r["state"] == r["planned_state"] else f"{r['planned_state'] - r['state']:+} B"
    cells = (
        r["model"],
        f"{mb['parameters']:.1f} M",
        f"{mb['planned_state']:.2f}, {state}",
        f"{mb['planned_activations']:.1f} / {mb['activations']:.1f}",
        f"{mb['planned']:.1f} / {mb['measured']:.1f}",
        f"{r['planned'] / r['measured'] - 1:+.1%}",
        f"{mb['planned_peak']:.1f} / {mb['measured_peak']:.1f}",
        f"{r['planned_peak'] / r['measured_peak'] - 1:+.1%}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--optimizer", default="gefen")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.models[0], options.optimizer)))
        return
    if not options.json:
        print("| model | parameters | state, MB | activations | alive after forward | | peak of backward | |")
        print("|---|---|---|---|---|---|---|---|")
    for name in options.models:
        result = run(name, options.optimizer)
        print(json.dumps(result) if options.json else line(result), flush=True)


if __name__ == "__main__":
    main()
