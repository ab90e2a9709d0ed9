"""From a list of attacks and images to a score table: the plan, the engine that asks the model, ledger and table."""

from dime_jax.scoring.engine import NO_HOOKS as NO_HOOKS
from dime_jax.scoring.engine import Hooks as Hooks
from dime_jax.scoring.engine import ScoringOptions as ScoringOptions
from dime_jax.scoring.engine import score as score
from dime_jax.scoring.micro_batch import default_micro_batch as default_micro_batch
from dime_jax.scoring.micro_batch import micro_batch_of as micro_batch_of
from dime_jax.scoring.micro_batch import tune_micro_batch as tune_micro_batch
from dime_jax.scoring.query_ledger import Budget as Budget
from dime_jax.scoring.retry import Retry as Retry
from dime_jax.scoring.retry import TryLater as TryLater
from dime_jax.scoring.retry import ask_in_requests as ask_in_requests
from dime_jax.scoring.retry import with_retries as with_retries
