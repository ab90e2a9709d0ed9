"""The attacks of a run with everything frozen: found by name or by AUC."""

from collections.abc import Sequence

from dime_jax.protocol.calibration import Calibration

_LEVEL_AND_CROWDING = ("dime", "dime_central", "dime_theory")


def best_calibrated(frozen: Sequence[Calibration]) -> Calibration:
    """Return the attack of highest AUC on the calibration half; ties go to the fewest queries."""
    return max(frozen, key=lambda one: (one.auc, -one.queries))


def by_label(frozen: Sequence[Calibration], wanted: str) -> Calibration:
    """Return the frozen attack of that label; of plain and adjusted, whichever calibrated better."""
    found = [one for one in frozen if one.label == wanted]
    if not found:
        labels = dict.fromkeys(one.label for one in frozen)
        raise ValueError(f"decide_with must be one of {', '.join(labels)}, got {wanted!r}")
    return best_calibrated(found)


def without_crowding(frozen: Calibration) -> Calibration | None:
    """Return the level B̂² alone, from the same answers at the same setting; None for other attacks than these two."""
    if frozen.attack not in _LEVEL_AND_CROWDING:
        return None
    return frozen._replace(weights=(1.0, 0.0), stats=None, parameters={})


def level_only(frozen: Sequence[Calibration], queries: int) -> Calibration | None:
    """Return level only at its own setting, the largest tier within `queries`; None if there is none."""
    tiers = [one for one in frozen if one.attack == "level_only" and one.queries <= queries]
    return max(tiers, key=lambda one: one.queries, default=None)
