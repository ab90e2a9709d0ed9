import dataclasses

import pytest

from dime_jax.evidence import Direction, Judgement
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
