"""What scores are worth as evidence: p-values, verdicts, set tests, privacy bounds and a model-free baseline.

Everywhere a lower score means member. NumPy, SciPy and scikit-learn on the host; nothing here touches a model.
"""

from dime_jax.evidence.blind import BlindBaseline, Gap, GroupsTooLarge, blind_baseline, gap_over_blind, image_statistics
from dime_jax.evidence.candidates import (
    CANNOT_TELL,
    EVIDENCE,
    NO_EVIDENCE,
    Verdicts,
    candidate_verdicts,
    conformal_p_values,
    smallest_p,
)
from dime_jax.evidence.deletion import Change, DeletionCheck, deletion_check
from dime_jax.evidence.direction import (
    NOT_CHECKED,
    Direction,
    Judgement,
    WitnessAuc,
    WitnessScores,
    judge_direction,
)
from dime_jax.evidence.likeness import Likeness, likeness
from dime_jax.evidence.privacy import EpsilonBound, dp_tpr_bound, epsilon_lower_bound
from dime_jax.evidence.sets import SetTest, set_test

__all__ = [
    "CANNOT_TELL",
    "EVIDENCE",
    "NOT_CHECKED",
    "NO_EVIDENCE",
    "BlindBaseline",
    "Change",
    "DeletionCheck",
    "Direction",
    "EpsilonBound",
    "Gap",
    "GroupsTooLarge",
    "Judgement",
    "Likeness",
    "SetTest",
    "Verdicts",
    "WitnessAuc",
    "WitnessScores",
    "blind_baseline",
    "candidate_verdicts",
    "conformal_p_values",
    "deletion_check",
    "dp_tpr_bound",
    "epsilon_lower_bound",
    "gap_over_blind",
    "image_statistics",
    "judge_direction",
    "likeness",
    "set_test",
    "smallest_p",
]
