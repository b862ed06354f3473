"""The jobs behind the command line: text, small models, the step loop, comparisons, checkpoints of a job."""

from daypack.training.compare import Mean, Summary, compare, grid, summarise
from daypack.training.config import TrainConfig
from daypack.training.corpus import Corpus, load_corpus
from daypack.training.loop import Job, Record, RunResult, run
from daypack.training.models import Transformer, TransformerConfig, build_model, model_config, presets

__all__ = [
    "Corpus",
    "Job",
    "Mean",
    "Record",
    "RunResult",
    "Summary",
    "TrainConfig",
    "Transformer",
    "TransformerConfig",
    "build_model",
    "compare",
    "grid",
    "load_corpus",
    "model_config",
    "presets",
    "run",
    "summarise",
]
