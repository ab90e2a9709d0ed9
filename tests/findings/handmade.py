"""Findings and records made by hand, for tests that change one thing in them."""

import dataclasses
import pathlib

import numpy as np

from dime_jax.data import Pair, Split
from dime_jax.data.role_checks import DuplicateFacts, RoleCounts
from dime_jax.evidence import Change, Direction, FractionUsed, Judgement, SetTest, Way, WitnessAuc
from dime_jax.evidence.metrics import Estimate
from dime_jax.findings import results
from dime_jax.guards.wiring import DenoiserCheck
from dime_jax.protocol import facts
from dime_jax.protocol.arrays import AuditArrays, PictureStatistics, Thumbnails
from dime_jax.protocol.calibration import Calibration, adjust
from dime_jax.protocol.evaluation import AdjustedRow, AtThreshold, ResultRow
from dime_jax.protocol.record import CompareRecord, KnownImages, Record
from dime_jax.protocol.statistics import Statistics
from dime_jax.scoring.score_table import NOT_FINITE, OK, ScoreTable

SIMA = Calibration("sima_l4", {"t": 70}, (1.0,), {}, None, -np.inf, 0.8, 1)  # its score is the reading itself
FAILED = DenoiserCheck((500,), (1.5,), (0.9,), (), (), 16, 32)
PASSED = dataclasses.replace(FAILED, errors=(0.1,))
ABOVE = Direction(Judgement.ABOVE, True, (WitnessAuc("test", 70, 0.8, 0.7, 0.9),))
BELOW = Direction(Judgement.BELOW, False, (WitnessAuc("test", 70, 0.3, 0.2, 0.4), WitnessAuc("test", 30, 0.2, 0, 0.25)))
UNSURE = Direction(Judgement.UNSURE, False, (WitnessAuc("test", 70, 0.5, 0.4, 0.6),))
# What a reference says of members and held-out images by itself.
KNOWS_MEMBERS = Direction(Judgement.ABOVE, True, (WitnessAuc("test", 70, 0.6, 0.55, 0.65),))
KNOWS_HELDOUT = Direction(Judgement.BELOW, False, (WitnessAuc("test", 70, 0.4, 0.35, 0.45),))
COPIES = DuplicateFacts(0, 0, 0, 0, 0, 0, 0, 0, ())
ENVIRONMENT = facts.Environment("one CPU", "cpu", "3.11", "0.10", "2.2")
MODEL = facts.ModelFacts(
    name="mine", origin="a test", facts=(), fingerprint="m", image_shape=(8, 8, 1), num_classes=None, num_steps=1000
)


def settings(**changes):
    given = {"model": "mine", "profile": "quick", "level": 0.2, "delta": 1e-5}
    return facts.Settings(**{**given, "randomised": False, "seed": 0, **changes})


def counts(members=0, **changes):
    half = facts.HalfCounts(members, 60) if members else None
    given = {"heldout": 19, "calibration": half, "test": half, "candidates": 4, "unusable": RoleCounts(0, 0, 0)}
    return facts.ImageCounts(members=members, **{**given, **changes})


def _run_facts(level, members, changes):
    return {
        "settings": settings(level=level),
        "images": counts(members),
        "unusable_candidates": (),
        "decided_by": SIMA.label,
        "chosen": "it was asked for",
        "adjusted": False,
        "fixed_setting": None if members else {"t_loss": 150, "t_level": 50, "gamma_level": 0.1},
        "duplicates": COPIES,
        "environment": ENVIRONMENT,
        **changes,
    }


# ------------------------------------------------------------------------------------------------------------- records


def pictures(count, far=()):
    """Statistics [count, 2] of pictures on the unit circle, those in `far` a hundred times as far out."""
    angles = 2 * np.pi * np.arange(count) / count
    return np.where(np.isin(np.arange(count), far), 100, 1)[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)


def table(scores, model="m", queries=0, readings=None):
    """A score table of SimA's readings, and others by name, whose image i has the id "i"."""
    status = np.where(np.isfinite(scores), OK, NOT_FINITE)
    identity = {"model": model, "data": "d", "precision": "highest", "seed": 0}
    columns = {"Raw(t=70).l4": np.asarray(scores, np.float64), **(readings or {})}
    ids = [str(index) for index in range(len(scores))]
    return ScoreTable(pathlib.Path(), {"identity": identity}, np.arange(len(ids)), ids, columns, status, queries)


def record(
    heldout,
    candidates=(),
    members=(),
    *,
    level=0.2,
    far=(),
    groups=None,
    truth=(),
    calibration=None,
    statistics=None,
    **changes,
):
    """Scores of held-out images, candidates and known members, at positions in this order; `changes` to its facts.

    The calibration half has the same scores, unless it has its own. With `statistics` of all of them [n, k] the scores
    are adjusted for the difficulty of pictures.
    """
    n, m = len(heldout), len(candidates)
    everything, positions = np.concatenate([heldout, candidates, members]), np.arange(n + m + len(members))
    calibration, none = calibration or Pair(members, heldout), np.zeros(0, np.int64)
    changes = {"adjusted": statistics is not None, **changes}
    arrays = AuditArrays(
        heldout=positions[:n],
        candidates=positions[n : n + m],
        truth=np.array(truth, bool),
        groups=np.full(len(positions), -1) if groups is None else np.array(groups),
        thumbnails=Thumbnails(none, none, none, none, np.zeros((0, 2, 2, 3), np.uint8)),
        statistics=PictureStatistics(0.1 * pictures(m, far), positions[:n], pictures(n)),
    )
    of_audit = {"grid_size": 1, "model": MODEL, "warnings": (), **_run_facts(level, len(members), changes)}
    made = Record(pathlib.Path(), facts.AuditFacts(**of_audit), arrays)
    split = Split(positions[n + m :], positions[:n])
    seen = None if statistics is None else Statistics(positions, np.asarray(statistics, np.float64))
    known = KnownImages(table(everything), split, seen)
    cut = len(calibration.member)
    chose = Split(np.arange(cut), np.arange(cut, cut + len(calibration.heldout)))
    chose = KnownImages(table(np.concatenate(calibration)), chose)
    decider = SIMA if seen is None else adjust(SIMA, np.asarray(everything[None]), seen.statistics)
    made.__dict__.update(tables=[known.table] if m else [], known=known, calibrations=[SIMA], pictures=seen)
    made.__dict__.update(calibration_images=chose, decider=decider)
    return made


def compare_record(heldout, candidates, *, level=0.2, far=(), checks=(PASSED, PASSED), direction=None, **changes):
    """Scores [2, n] and [2, m] of held-out images and candidates under the model before and the one after."""
    n, m = np.shape(heldout)[1], np.shape(candidates)[1]
    places = np.arange(n + m)
    seen = PictureStatistics(0.1 * pictures(m, far), places[:n], pictures(n))
    arrays = AuditArrays(places[:n], places[n:], np.full(n + m, -1), statistics=seen)
    models = facts.BeforeAfter(MODEL, dataclasses.replace(MODEL, name="less"))
    of_both = facts.CompareFacts(models=models, image_warnings=("blurred",), **_run_facts(level, 0, changes))
    made = CompareRecord(pathlib.Path(), of_both, arrays)
    tables = [table(np.concatenate([heldout[k], candidates[k]]), name, 100) for k, name in enumerate(("old", "new"))]
    made.__dict__.update(tables=tables, calibrations=[SIMA], decider=SIMA, checks=list(checks), pictures=None)
    made.__dict__.update({} if direction is None else {"direction": direction})
    return made


# ------------------------------------------------------------------------------------------------------------ findings


def row(auc=(0.8, 0.7, 0.9), tpr=(0.4, 0.3, 0.5), attack="sima_l4", queries=1):
    threshold = AtThreshold(0.5, 0.25, 0.125)
    asr = Estimate(0.75, 0.65, 0.85)
    return ResultRow(attack, {"t": 70}, Estimate(*auc), asr, Estimate(*tpr), 0.01, 3, threshold, queries, 0.002)


def set_test(p_value=0.001, statistic=0.75, n=40):
    return SetTest(statistic, p_value, 1e-4, n, n, n, 60, 60, [])


def blind(fires, explained):
    return results.BlindFinding(Estimate(0.6, 0.55, 0.65), Estimate(0.2, 0.1, 0.3), 0.01, fires, explained, (60, 60))


def found(**changes):
    given = {
        **{"count": 40, "evidence": 4, "no_evidence": 30, "cannot_tell": 6, "level": 0.05, "heldout": 60},
        **{"smallest_p": 1 / 61, "candidates_needed": 1, "heldout_needed": 799, "can_decide": True},
        **{"withheld": None, "set_withheld": None, "set_test": set_test(), "less_like_members": None},
        **{"likeness": results.LikenessFound(0.5, False, 0), "truth": None, "warnings": ()},
        **{"adjusted": False, "power": ()},
    }
    return results.CandidatesFound(**{**given, **changes})


def beside(way=Way.BESIDE, **changes):
    """What decides beside a reference, and the facts of that, for `audit`."""
    of = {"attack": "sima_l4", "queries_per_image": 1, "setting": {"t": 70}, "chosen": "it was best"}
    decided = results.AuditDecidedBy(**of, label="sima_l4@1", calibration_auc=0.8, adjusted=True, way=way)
    reference = dataclasses.replace(MODEL, name="base", fingerprint="b")
    return {"decided_by": decided, "reference": reference, "reference_queries_made": 1200, **changes}


def with_ways(of=None):
    """A row with what the picture, a reference or both explain taken out: 60, 70 and 75 % in place of its AUC."""
    of = of or row()
    aucs = {"adjusted": 0.6, "beside": 0.7, "beside_adjusted": 0.75}
    others = {
        name: AdjustedRow(
            of.setting, Estimate(auc, auc - 0.1, auc + 0.1), of.asr, Estimate(0.5, 0.4, 0.6), of.at_threshold
        )
        for name, auc in aucs.items()
    }
    return dataclasses.replace(of, **others)


FRACTION = FractionUsed(0.5, 0.4, 0.62, 0.95, 40, 60, 60)


def audit(rows=None, **changes):
    """Findings with known members, unless there are no `rows`."""
    rows = (row(),) if rows is None else rows
    of = {"attack": "sima_l4", "queries_per_image": 1, "setting": {"t": 70}, "chosen": "it was best"}
    given = {
        **{"results": rows, "fingerprints": {"model": "m"}, "precision": "highest", "seed": 0, "queries_made": 100},
        **{"warnings": (), "model_check": PASSED, "direction": ABOVE, "comparisons": (), "blind_baseline": None},
        **{"epsilon_lower_bound": None, "candidates": None, "duplicates": COPIES, "grid_size": 1, "model": MODEL},
        **{"settings": settings(), "environment": ENVIRONMENT, "crowding": ()},
        "decided_by": results.AuditDecidedBy(**of, label="sima_l4@1", calibration_auc=0.8, adjusted=False),
        "images": counts(members=60 if rows else 0),
        "headline": results.Headline("", "", "", ()),
    }
    return results.AuditFindings(**{**given, **changes})


def deletion(verdict=None, before=0.001, after=0.6, change=0.001, level=0.05, **changes):
    """Findings of a deletion check from the p-values of its tests; with `withheld`, without these."""
    tests = {"set_before": set_test(before), "set_after": set_test(after, 0.5)}
    tests["change"] = Change(Estimate(0.25, 0.125, 0.375), change)
    given = {
        **({"set_before": None, "set_after": None, "change": None} if changes.get("withheld") else tests),
        **{"verdict": verdict, "withheld": None, "likeness": results.LikenessFound(0.5, False), "p_cutoff": 0.01},
        **{"rule": "p <= 0.01", "flagged": facts.BeforeAfter(9, 1), "precision": "highest", "seed": 0},
        **{"queries_made": 100, "model_check": facts.BeforeAfter(PASSED, PASSED), "warnings": (), "direction": ABOVE},
        "facts": compare_record(np.ones((2, 3)), np.ones((2, 2)), level=level).facts,
        "decided_by": results.DecidedBy(attack="sima_l4", queries_per_image=1, setting={"t": 70}, chosen="asked for"),
        "fingerprints": facts.BeforeAfter("old", "new"),
        "headline": results.Headline("", "", "", ()),
    }
    return results.DeletionFindings(**{**given, **changes})
