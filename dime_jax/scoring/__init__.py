"""From a list of attacks and images to a score table: the plan, the engine that asks the model, ledger and table."""

from dime_jax.scoring.engine import ScoringOptions, score
from dime_jax.scoring.micro_batch import default_micro_batch, tune_micro_batch
from dime_jax.scoring.retry import Retry, patient

__all__ = ["Retry", "ScoringOptions", "default_micro_batch", "patient", "score", "tune_micro_batch"]
