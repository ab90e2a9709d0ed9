"""What scores are worth as evidence: p-values, verdicts, set tests, privacy bounds and a model-free baseline.

Everywhere a lower score means member. NumPy, SciPy and scikit-learn on the host; nothing here touches a model.
"""

from dime_jax.evidence.adjusting import (
    Adjustment,
    ScoredPictures,
    adjusted_p_values,
    fit_adjustment,
    least_to_fit,
)
from dime_jax.evidence.blind import BlindBaseline, Gap, GroupsTooLarge, blind_baseline, gap_over_blind, image_statistics
from dime_jax.evidence.blind_captions import caption_baseline, caption_form
from dime_jax.evidence.candidates import (
    Verdict,
    Verdicts,
    candidate_verdicts,
    conformal_p_values,
    power,
    smallest_p,
)
from dime_jax.evidence.deletion import Change, DeletionCheck, DeletionVerdict, deletion_check
from dime_jax.evidence.direction import (
    NOT_CHECKED,
    Direction,
    Judgement,
    WitnessAuc,
    WitnessScores,
    judge_direction,
)
from dime_jax.evidence.fraction import LEAST_KNOWN, FractionUsed, KnownScores, fraction_used
from dime_jax.evidence.likeness import Likeness, likeness
from dime_jax.evidence.privacy import EpsilonBound, dp_tpr_bound, epsilon_lower_bound
from dime_jax.evidence.sets import SetTest, count_groups, set_test

__all__ = [
    "LEAST_KNOWN",
    "NOT_CHECKED",
    "Adjustment",
    "BlindBaseline",
    "Change",
    "DeletionCheck",
    "DeletionVerdict",
    "Direction",
    "EpsilonBound",
    "FractionUsed",
    "Gap",
    "GroupsTooLarge",
    "Judgement",
    "KnownScores",
    "Likeness",
    "ScoredPictures",
    "SetTest",
    "Verdict",
    "Verdicts",
    "WitnessAuc",
    "WitnessScores",
    "adjusted_p_values",
    "blind_baseline",
    "candidate_verdicts",
    "caption_baseline",
    "caption_form",
    "conformal_p_values",
    "count_groups",
    "deletion_check",
    "dp_tpr_bound",
    "epsilon_lower_bound",
    "fit_adjustment",
    "fraction_used",
    "gap_over_blind",
    "image_statistics",
    "judge_direction",
    "least_to_fit",
    "likeness",
    "power",
    "set_test",
    "smallest_p",
]
