"""From a list of attacks and images to a score table: the plan, the engine that asks the model, ledger and table."""

from dime_jax.scoring.engine import NO_HOOKS, Hooks, ScoringOptions, score
from dime_jax.scoring.micro_batch import default_micro_batch, micro_batch_of, tune_micro_batch
from dime_jax.scoring.query_ledger import Budget
from dime_jax.scoring.requests import ask_in_requests
from dime_jax.scoring.retry import Retry, TryLater, with_retries

__all__ = [
    "NO_HOOKS",
    "Budget",
    "Hooks",
    "Retry",
    "ScoringOptions",
    "TryLater",
    "ask_in_requests",
    "default_micro_batch",
    "micro_batch_of",
    "score",
    "tune_micro_batch",
    "with_retries",
]
