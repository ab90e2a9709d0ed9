"""What scores are worth as evidence: p-values, verdicts, set tests, privacy bounds and a model-free baseline.

Everywhere a lower score means member. NumPy, SciPy and scikit-learn on the host; nothing here touches a model.
"""

from dime_jax.evidence.blind import BlindBaseline as BlindBaseline
from dime_jax.evidence.blind import Gap as Gap
from dime_jax.evidence.blind import GroupsTooLarge as GroupsTooLarge
from dime_jax.evidence.blind import blind_baseline as blind_baseline
from dime_jax.evidence.blind import gap_over_blind as gap_over_blind
from dime_jax.evidence.blind import image_statistics as image_statistics
from dime_jax.evidence.blind_captions import caption_baseline as caption_baseline
from dime_jax.evidence.blind_captions import caption_form as caption_form
from dime_jax.evidence.candidates import Verdict as Verdict
from dime_jax.evidence.candidates import Verdicts as Verdicts
from dime_jax.evidence.candidates import candidate_verdicts as candidate_verdicts
from dime_jax.evidence.candidates import conformal_p_values as conformal_p_values
from dime_jax.evidence.candidates import power as power
from dime_jax.evidence.candidates import smallest_p as smallest_p
from dime_jax.evidence.deletion import Change as Change
from dime_jax.evidence.deletion import DeletionCheck as DeletionCheck
from dime_jax.evidence.deletion import DeletionVerdict as DeletionVerdict
from dime_jax.evidence.deletion import Ranks as Ranks
from dime_jax.evidence.deletion import deletion_check as deletion_check
from dime_jax.evidence.difficulty import Adjustment as Adjustment
from dime_jax.evidence.difficulty import Combine as Combine
from dime_jax.evidence.difficulty import Difficulty as Difficulty
from dime_jax.evidence.difficulty import Pile as Pile
from dime_jax.evidence.difficulty import Way as Way
from dime_jax.evidence.difficulty import difficulty_p_values as difficulty_p_values
from dime_jax.evidence.difficulty import difficulty_residuals as difficulty_residuals
from dime_jax.evidence.difficulty import difficulty_statistics as difficulty_statistics
from dime_jax.evidence.difficulty import fit_difficulty as fit_difficulty
from dime_jax.evidence.difficulty import freeze_difficulty as freeze_difficulty
from dime_jax.evidence.direction import NOT_CHECKED as NOT_CHECKED
from dime_jax.evidence.direction import Direction as Direction
from dime_jax.evidence.direction import Judgement as Judgement
from dime_jax.evidence.direction import WitnessAuc as WitnessAuc
from dime_jax.evidence.direction import WitnessScores as WitnessScores
from dime_jax.evidence.direction import judge_direction as judge_direction
from dime_jax.evidence.fraction import LEAST_KNOWN as LEAST_KNOWN
from dime_jax.evidence.fraction import FractionUsed as FractionUsed
from dime_jax.evidence.fraction import KnownScores as KnownScores
from dime_jax.evidence.fraction import fraction_used as fraction_used
from dime_jax.evidence.likeness import Likeness as Likeness
from dime_jax.evidence.likeness import likeness as likeness
from dime_jax.evidence.privacy import EpsilonBound as EpsilonBound
from dime_jax.evidence.privacy import dp_tpr_bound as dp_tpr_bound
from dime_jax.evidence.privacy import epsilon_lower_bound as epsilon_lower_bound
from dime_jax.evidence.sets import SetTest as SetTest
from dime_jax.evidence.sets import count_groups as count_groups
from dime_jax.evidence.sets import set_test as set_test
