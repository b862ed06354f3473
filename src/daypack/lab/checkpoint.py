"""A training job as one file: weights, optimizer state, position, random state, config.

The file is what `torch.save` writes of a dict of tensors, numbers, strings, lists and dicts:

    format           "daypack training"
    version          1
    config           the fields of `TrainConfig`
    corpus           fingerprint of the data
    step             steps done: the position in the learning-rate schedule and in the data
    seconds          time spent so far
    model            state dict of the model
    optimizer        state dict of the optimizer; may be missing, the moments then restart from zero
    optimizer_class  name of its class, by which `daypack.checkpoint` knows whose state it is
    random           states of torch's global generators, for optimizers that draw from them

Batches come from the seed and the step number, the schedule from the step number: neither has a state of its own.
"""

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from daypack.checkpoint.atomic import write_whole
from daypack.checkpoint.torch_files import OPTIMIZER_CLASS, file_damage
from daypack.lab.config import TrainConfig
from daypack.lab.loop import Job
from daypack.lab.parallel import gathered, scatter_, scattered
from daypack.lab.tasks import Task, load_task, task_info

TRAINING_FORMAT = "daypack training"
TRAINING_VERSION = 1
_REMEDY = "resume from another checkpoint, or start again without --resume"


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file, read and checked, with nothing built from it yet."""

    path: Path
    config: TrainConfig
    corpus: str
    step: int
    seconds: float
    model: Mapping[str, torch.Tensor]
    optimizer: dict[str, Any] | None
    random: Mapping[str, torch.Tensor]


def save_checkpoint(path: Path, job: Job) -> None:
    """Write `job` to `path`, whole or not at all. On several ranks all of them call it, and the first one writes."""
    random = {"cpu": torch.get_rng_state()}
    if job.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(job.device)
    content = {
        "format": TRAINING_FORMAT,
        "version": TRAINING_VERSION,
        "config": job.config.to_dict(),
        "corpus": job.task.fingerprint,
        "step": job.step,
        "seconds": job.seconds,
        "model": gathered(job.model.state_dict()),
        "optimizer": gathered(job.optimizer.state_dict()),
        OPTIMIZER_CLASS: type(job.optimizer).__name__,
        "random": random,
    }
    if job.ranks.first:
        write_whole(path, lambda temporary: torch.save(content, temporary))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and check a file of `save_checkpoint`.

    Raises:
        ValueError: missing, truncated, damaged, or not such a file.
    """
    if not path.is_file():
        raise ValueError(f"no checkpoint at {path}; check the path")
    content = _read(path)
    if not isinstance(content, dict) or content.get("format") != TRAINING_FORMAT:
        raise ValueError(f"{path} is not a checkpoint of daypack train; {_REMEDY}")
    if content.get("version") != TRAINING_VERSION:
        raise ValueError(
            f"{path} has version {content.get('version')!r}, this daypack reads {TRAINING_VERSION}; use the other one"
        )
    expected = {"config": dict, "corpus": str, "step": int, "seconds": float, "model": dict, "random": dict}
    for name, type_ in expected.items():
        if not isinstance(content.get(name), type_):
            raise ValueError(f"damaged checkpoint {path}: no valid entry {name!r}; {_REMEDY}")
    try:
        config = TrainConfig.from_dict(content["config"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"damaged checkpoint {path}: {error}; {_REMEDY}") from None
    if not 0 <= content["step"] <= config.steps:
        raise ValueError(f"damaged checkpoint {path}: step {content['step']} of {config.steps}; {_REMEDY}")
    return Checkpoint(
        path=path,
        config=config,
        corpus=content["corpus"],
        step=content["step"],
        seconds=content["seconds"],
        model=content["model"],
        optimizer=content.get("optimizer"),
        random=content["random"],
    )


def resume(checkpoint: Checkpoint, config: TrainConfig | None = None, task: Task | None = None) -> Job:
    """Build the job that `checkpoint` was written from; it goes on bit for bit.

    Args:
        checkpoint: what `load_checkpoint` returned.
        config: the checkpoint's own config with another device, thread count, evaluation or place of the data; None for
            that config as it is.
        task: the data, if it is loaded already.

    Raises:
        ValueError: the data is another one, or weights or optimizer state do not fit the model.

    Warns:
        UserWarning: the checkpoint has no optimizer state.
    """
    path, config = checkpoint.path, config or checkpoint.config
    task = load_task(config) if task is None else task
    if task.fingerprint != checkpoint.corpus:
        raise ValueError(f"{path} was trained on other data than {task.source}; {task_info(config.task).remedy}")
    job = Job(config, task)
    _load_weights(job, checkpoint)
    if checkpoint.optimizer is None:
        warnings.warn(
            f"{path} holds no optimizer state: the moments restart from zero at step {checkpoint.step}, "
            "so the run will not equal an uninterrupted one",
            stacklevel=2,
        )
    else:
        try:
            job.optimizer.load_state_dict(_sharded(job, checkpoint.optimizer))
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise ValueError(f"optimizer state of {path} does not fit: {_first_line(error)}; {_REMEDY}") from None
    job.step, job.seconds = checkpoint.step, checkpoint.seconds
    _restore_random(job, checkpoint)
    return job


def _read(path: Path) -> Any:
    """Return unpickle `path` without running anything in it."""
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not a zip file, which torch.save writes")
        if fault := file_damage(path):  # damaged numbers would train on silently
            raise ValueError(fault)
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; check its permissions") from None
    except (ValueError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"damaged or truncated checkpoint {path}: {_first_line(error)}; {_REMEDY}") from None


def _load_weights(job: Job, checkpoint: Checkpoint) -> None:
    """Copy the weights into the job's model once every name, shape and dtype agrees."""
    for name, own in job.model.state_dict().items():
        saved = checkpoint.model.get(name)
        if not isinstance(saved, torch.Tensor) or saved.shape != own.shape or saved.dtype != own.dtype:
            found = f"{list(saved.shape)} {saved.dtype}" if isinstance(saved, torch.Tensor) else "nothing"
            raise ValueError(
                f"{checkpoint.path} does not fit model {job.config.model!r}: {name} should be {list(own.shape)} "
                f"{own.dtype}, the file has {found}; {_REMEDY}"
            )
    with torch.no_grad():
        scatter_(job.model.state_dict(), checkpoint.model)


def _sharded(job: Job, optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return shard tensors of a parameter's shape as the parameter is, which torch's own optimizers need."""
    params = [p for group in job.optimizer.param_groups for p in group["params"]]
    keys = [key for group in optimizer["param_groups"] for key in group["params"]]
    state = dict(optimizer["state"])
    for key, p in zip(keys, params, strict=False):  # another number of them is refused by the optimizer
        if isinstance(state.get(key), dict):
            state[key] = {name: scattered(value, p) for name, value in state[key].items()}
    return {**optimizer, "state": state}


def _restore_random(job: Job, checkpoint: Checkpoint) -> None:
    try:
        torch.set_rng_state(checkpoint.random["cpu"])
        if job.device.type == "cuda" and "cuda" in checkpoint.random:
            torch.cuda.set_rng_state(checkpoint.random["cuda"], job.device)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"damaged checkpoint {checkpoint.path}: random state: {_first_line(error)}; {_REMEDY}"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
