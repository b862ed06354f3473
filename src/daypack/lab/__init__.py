"""The jobs behind the command line: tasks with small models, the step loop, comparisons, checkpoints of a job."""

from daypack.lab.compare import Mean, OptimizerSummary, compare, grid, summarise_runs
from daypack.lab.config import TrainConfig
from daypack.lab.corpus import Corpus, load_corpus
from daypack.lab.loop import Job, Record, RunResult, run
from daypack.lab.models import Transformer, TransformerConfig, build_model, model_config, presets
from daypack.lab.tasks import TASKS, Task, load_task
from daypack.lab.text import TextTask

__all__ = [
    "TASKS",
    "Corpus",
    "Job",
    "Mean",
    "OptimizerSummary",
    "Record",
    "RunResult",
    "Task",
    "TextTask",
    "TrainConfig",
    "Transformer",
    "TransformerConfig",
    "build_model",
    "compare",
    "grid",
    "load_corpus",
    "load_task",
    "model_config",
    "presets",
    "run",
    "summarise_runs",
]
