"""Conditions on results: what they may name, when they hold, and when nothing can be judged."""

import dataclasses

import handmade
import pytest
from handmade import BELOW, FAILED, audit, deletion, found

from dime_jax.evidence import DeletionVerdict, Direction, Judgement
from dime_jax.evidence.metrics import Estimate
from dime_jax.findings import gate
from dime_jax.protocol.evaluation import AtThreshold, Evaluation, ResultRow

AUC = Estimate(0.7, 0.6, 0.8)
ROW = ResultRow("dime", {"t": 70}, AUC, AUC, AUC, 0.01, 3, AtThreshold(None, 0.0, 0.0), 11, 0.1)
RESULTS = Evaluation(
    results=(ROW,),
    fingerprints={"model": "m"},
    precision="highest",
    seed=0,
    queries_made=100,
    direction=Direction(Judgement.ABOVE, True, ()),
    warnings=(),
)


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("dime@11.auc.low > 0.5", True),
        ("dime@11.auc.low>0.6", False),
        ("dime@11.auc.low >= .6", True),
        (" dime@11.false_positives < 3 ", False),
        ("dime@11.false_positives <= 3", True),
        ("dime@11.setting.t >= 70", True),
        ("queries_made > 1e2", False),
        ("queries_made > -1", True),
        ("dime@11.auc.low >= 0", True),
        ("dime@11.auc.high > 1", False),
    ],
)
def test_conditions(condition, holds):
    assert gate.check(condition, RESULTS) is holds


def test_a_name_may_have_a_dash():
    results = dataclasses.replace(RESULTS, results=(dataclasses.replace(ROW, attack="my-own"),))
    assert gate.check("my-own@11.auc.low > 0.5", results)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("dime@11.auc.low", "expected a condition such as"),
        ("dime@11.auc.low > high", "expected a number on the right"),
        ("dime@11.auc.low > nan", "expected a finite number on the right of .*, got 'nan'"),
        ("queries_made > inf", "expected a finite number on the right of .*, got 'inf'"),
        ("dime@11.auc.low > 60", "expected a number between 0 and 1 on the right of .*, got '60'"),
        ("candidates.set_test.p_value <= 5", "expected a number between 0 and 1 on the right"),
        ("fraction_used.high > 50", "expected a number between 0 and 1 on the right"),
        ("dime@11.at_threshold.fpr > 5", "expected a number between 0 and 1 on the right"),
        ("dime@11.auc > 0.5", "expected 'dime@11.auc' to lead to a number, got dict"),
        ("dime@7.auc.low > 0.5", "unknown 'dime@7' in 'dime@7.auc.low'; results.json has .*dime@11"),
        ("dime@11.auc.lower > 0.5", "unknown 'lower' in 'dime@11.auc.lower'; dime@11.auc has high, low, value"),
        ("dime@11.at_threshold.tau > 0.5", "expected 'dime@11.at_threshold.tau' to lead to a number, got NoneType"),
        ("results > 0.5", "expected 'results' to lead to a number, got list"),
        ("__import__('os').system('x') > 0", "expected a condition such as"),
    ],
)
def test_bad_conditions_are_refused_in_one_line(condition, message):
    with pytest.raises(ValueError, match=message) as error:
        gate.check(condition, RESULTS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "condition",
    ["dime@11.auc.low > 0.5", "dime@11.at_threshold.fpr > 0", "dime@11.setting.t > 100", "candidates.evidence > 0"],
)
def test_conditions_on_what_will_be_there(condition):
    gate.check_possible(condition, gate.AUDIT_KEYS, ["loss@1", "dime@11"])


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("dime@7.auc.low > 0.5", "no 'dime@7' for the condition .*: the rows that there will be are loss@1, dime@11$"),
        ("dime.auc.low > 0.5", "the results will have no 'dime'"),
        ("candidats.evidence > 0", "the results will have no 'candidats'"),
        ("dime@11.auc > 0.5", "expected 'dime@11.auc' to lead to a number, got dict"),
        ("dime@11.auc.lower > 0.5", "unknown 'lower' in 'dime@11.auc.lower'; dime@11.auc has high, low, value"),
        ("dime@11.auc.low", "expected a condition such as"),
    ],
)
def test_conditions_on_what_cannot_be_there_are_refused(condition, message):
    with pytest.raises(ValueError, match=message) as error:
        gate.check_possible(condition, gate.AUDIT_KEYS, ["loss@1", "dime@11"])
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"there will be no rows of attacks|expected a condition"):
        gate.check_possible(condition, gate.COMPARE_KEYS, [])


def test_nothing_is_judged_where_the_sets_look_swapped():
    gate.refuse_unjudged(RESULTS)
    swapped = dataclasses.replace(RESULTS, direction=Direction(Judgement.BELOW, False, ()))
    with pytest.raises(ValueError, match="no condition can be judged: members and held-out images look swapped"):
        gate.refuse_unjudged(swapped)


@pytest.mark.parametrize(
    ("condition", "candidates", "message"),
    [
        ("candidates.evidence > 0", found(can_decide=False), "with so few held-out images no candidate could have bee"),
        ("candidates.truth.members > 0", found(can_decide=False), "with so few held-out images no candidate could ha"),
        ("candidates.evidence > 0", found(set_withheld="most are lost"), "no verdict was given .* since most are lost"),
        ("candidates.count > 0", found(set_withheld="most are lost"), "no verdict was given .* since most are lost"),
        ("candidates.set_test.p_value < 0.5", found(set_test=None), "unknown 'p_value' in"),
    ],
)
def test_conditions_on_candidates_who_were_not_judged_are_refused(condition, candidates, message):
    with pytest.raises(ValueError, match=message):
        gate.check(condition, audit(candidates=candidates))
    assert gate.check("sima_l4@1.auc.low > 0.6", audit(candidates=candidates))
    assert gate.check("candidates.evidence > 3", audit(candidates=found()))
    assert gate.check("candidates.count > 0", audit(candidates=found(can_decide=False)))  # no verdict


GONE, CHANCE = deletion(DeletionVerdict.GONE), deletion(DeletionVerdict.MAY_BE_CHANCE, change=0.3)


@pytest.mark.parametrize(
    "condition", ["flagged.after > 0", "set_after.p_value > 0.5", "set_before.p_value < 0.5", "change.p_value < 0.5"]
)
def test_conditions_on_a_deletion_need_a_verdict(condition):
    assert gate.check(condition, GONE)
    with pytest.raises(ValueError, match="the verdict on the deletion is 'cannot tell: the change may be chance'"):
        gate.check(condition, CHANCE)
    assert gate.check("queries_made >= 100", CHANCE)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (audit(model_check=FAILED), "The model does not predict noise: at t = 500"),
        (audit(direction=BELOW), "members and held-out images look swapped, or differ in kind"),
        (audit((handmade.row((0.3, 0.2, 0.49)),)), "sima_l4@1 does worse than chance on the test half"),
        (deletion(withheld="too few answers"), "too few answers"),
        (deletion(withheld="w", model_check=handmade.facts.BeforeAfter(None, FAILED)), "The model after does not pred"),
    ],
)
def test_no_condition_is_judged_on_results_that_cannot_be_relied_on(results, message):
    with pytest.raises(ValueError, match=f"no condition can be judged: {message}"):
        gate.refuse_unjudged(results)
    for fine in (audit(), audit((handmade.row((0.3, 0.2, 0.5)),)), GONE, CHANCE):
        gate.refuse_unjudged(fine)


@pytest.mark.parametrize("name", ["adjusted", "beside", "beside_adjusted"])
def test_conditions_on_what_is_taken_out_of_a_score(name):
    results = dataclasses.replace(RESULTS, results=(handmade.with_ways(ROW),))
    value = getattr(results.results[0], name).auc.low
    assert gate.check(f"dime@11.{name}.auc.low > {value - 0.01}", results)
    assert not gate.check(f"dime@11.{name}.auc.low > {value + 0.01}", results)
    with pytest.raises(ValueError, match=f"unknown {name!r}"):
        gate.check(f"dime@11.{name}.auc.low > 0", RESULTS)
    gate.check_possible(f"dime@11.{name}.auc.low > 0", gate.AUDIT_KEYS, ["dime@11"], reference=True)


@pytest.mark.parametrize(
    "condition",
    [
        "dime@11.beside.auc.low > 0",
        "dime@11.beside_adjusted.tpr_at_1pct_fpr.low > 0",
        "reference_queries_made > 0",
        "reference.num_steps > 0",
    ],
)
def test_conditions_on_a_reference_that_will_not_be_there_are_refused(condition):
    with pytest.raises(ValueError, match=r"the results will have nothing for .*: there is no reference") as error:
        gate.check_possible(condition, gate.AUDIT_KEYS, ["dime@11"], reference=False)
    assert "\n" not in str(error.value)
    gate.check_possible(condition, gate.AUDIT_KEYS, ["dime@11"])
    gate.check_possible("dime@11.adjusted.auc.low > 0", gate.AUDIT_KEYS, ["dime@11"], reference=False)


def test_nothing_is_judged_beside_a_reference_that_knows_the_held_out_images():
    rows = (handmade.with_ways(),)
    partial = handmade.beside(reference_direction=handmade.KNOWS_HELDOUT)
    with pytest.raises(ValueError, match="the reference knows the held-out images better than the members"):
        gate.refuse_unjudged(audit(rows, **partial))
    gate.refuse_unjudged(audit(rows, reference_direction=handmade.KNOWS_HELDOUT))  # it does not decide
    gate.refuse_unjudged(audit(rows, **handmade.beside(reference_direction=handmade.KNOWS_MEMBERS)))
