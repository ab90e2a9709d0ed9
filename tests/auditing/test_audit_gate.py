import pytest

from dime_jax.auditing import gate

RESULTS = {
    "results": [{"attack": "dime", "queries_per_image": 11, "auc": {"value": 0.7, "low": 0.6}, "setting": None}],
    "candidates": {"evidence": 3},
    "queries_made": 100,
}


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("dime@11.auc.low > 0.5", True),
        ("dime@11.auc.low>0.6", False),
        ("dime@11.auc.low >= .6", True),
        (" candidates.evidence < 3 ", False),
        ("candidates.evidence <= 3", True),
        ("queries_made > 1e2", False),
        ("queries_made > -1", True),
    ],
)
def test_conditions(condition, holds):
    assert gate.check(condition, RESULTS) is holds


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("dime@11.auc.low", "expected a condition such as"),
        ("dime@11.auc.low > high", "expected a number on the right"),
        ("dime@11.auc > 0.5", "expected 'dime@11.auc' to lead to a number, got dict"),
        ("dime@7.auc.low > 0.5", "unknown 'dime@7' in 'dime@7.auc.low'; results.json has .*dime@11"),
        ("dime@11.auc.lower > 0.5", "unknown 'lower' in 'dime@11.auc.lower'; dime@11.auc has low, value"),
        ("dime@11.setting > 0.5", "expected 'dime@11.setting' to lead to a number, got NoneType"),
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
