"""The answer in plain words: the headline of an audit from its results."""

from collections.abc import Mapping, Sequence
from typing import Any

from dime_jax import model_check
from dime_jax.attacks import get_attack
from dime_jax.evidence import Judgement

_SURELY = 0.01


def headline(results: Mapping[str, Any]) -> dict[str, Any]:
    """{answer, detail, candidates, alarms}: one sentence, its uncertainty, what it means for the candidates, doubts."""
    wrong = model_check.failures(results)
    if wrong:
        return _no_denoiser(wrong, _candidates(results))
    if not results["results"]:
        return _without_members(results)
    row = deciding_row(results)
    return {
        "answer": _answer(results, row),
        "detail": _detail(results, row),
        "candidates": _candidates(results),
        "alarms": _alarms(results),
    }


def _no_denoiser(wrong: Sequence[str], candidates: str) -> dict[str, Any]:
    """Where a model is no denoiser, or is not asked as it wants to be, that is all there is to say."""
    detail = (
        "The attacks compare noise predictions, so scores of such a model show nothing, neither that it remembers nor "
        "that it does not. Correct the model or how it is asked, and audit it again with another output directory."
    )
    answer = "This cannot be audited as it is: a model does not predict noise the way it was asked to."
    return {"answer": answer, "detail": detail, "candidates": candidates, "alarms": list(wrong)}


def deciding_row(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row of the attack that decides."""
    wanted = [results["decided_by"][key] for key in ("attack", "queries_per_image")]
    return next(row for row in results["results"] if [row["attack"], row["queries_per_image"]] == wanted)


def title(attack: str, queries: int) -> str:
    """ "DIME, 11 queries"."""
    return f"{get_attack(attack).title}, {queries} {'query' if queries == 1 else 'queries'}"


def percent(value: float | None, digits: int = 1) -> str:
    """ "84.2 %", and a dash for nothing."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def interval(estimate: Mapping[str, float], digits: int = 1) -> str:
    """ "84.2 % (81.0 to 87.1)"."""
    low, high = (f"{100 * estimate[end]:.{digits}f}" for end in ("low", "high"))
    return f"{percent(estimate['value'], digits)} ({low} to {high})"


def p_text(p: float | None) -> str:
    """ "p = 0.031", "p < 0.001"."""
    if p is None:
        return "p unknown"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def _answer(results: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    blind = results["blind_baseline"]
    if results["direction"]["judgement"] == Judgement.BELOW:
        return "Members and held-out images look swapped: it is the held-out images that look like training images."
    if row["auc"]["high"] < 0.5:
        return "The attack does worse than chance on the test half: members and held-out images may be swapped."
    if row["auc"]["low"] <= 0.5:
        return "No sign that this model remembers its training images."
    if blind and blind["explained"]:
        return (
            "Members and held-out images differ, but so they do without the model: this shows nothing about training."
        )
    return f"This model remembers its training images{_how_much(row)}."


def _how_much(row: Mapping[str, Any]) -> str:
    """What the lower end of the interval supports."""
    low = row["tpr_at_1pct_fpr"]["low"]
    if low >= 0.5:
        return ": most of them can be told with few false alarms"
    if low >= 0.05:
        return ": some of them can be told with few false alarms"
    return ", but hardly any single one can be told with confidence"


def _detail(results: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    attack, test = title(row["attack"], row["queries_per_image"]), results["images"]["test"]
    return (
        f"{attack} per image, tells a member from a held-out image {interval(row['auc'])} of the time; 50 % is chance. "
        f"With at most 1 % false alarms it finds {interval(row['tpr_at_1pct_fpr'])} of the members. Measured on "
        f"{test['members']:,} members and {test['heldout']:,} held-out images that were not used to choose any "
        "setting; ranges are 95 % intervals."
    )


def _candidates(results: Mapping[str, Any]) -> str:
    """A sentence or two on the candidates, if there are any."""
    found = results["candidates"]
    if not found:
        return ""
    sentences = [
        f"Of {found['count']:,} candidates {found['evidence']:,} show evidence of membership, {found['no_evidence']:,} "
        f"show none, and for {found['cannot_tell']:,} it cannot be told (false discovery rate "
        f"{percent(found['level'], 0)})."
    ]
    if found["withheld"]:
        return f"No verdict is given on any of the {found['count']:,} candidates: {found['withheld']}."
    if not found["set_test"]:
        return " ".join(sentences)
    p_value = found["set_test"]["p_value"]
    if found["can_decide"] and p_value <= found["level"]:
        sentences.append(f"As a set they look like training images ({p_text(p_value)}).")
    elif found["can_decide"]:
        sentences.append(f"As a set they cannot be told from images that the model never saw ({p_text(p_value)}).")
    if found["candidates_needed"] > 1:
        sentences.append(
            f"With {found['heldout']:,} held-out images no candidate can be named on its own; that takes "
            f"{found['heldout_needed']:,}."
        )
    return " ".join(sentences)


def _alarms(results: Mapping[str, Any]) -> list[str]:
    alarms = []
    alarms += direction_alarms(results["direction"])
    blind = results["blind_baseline"]
    if blind and blind["explained"]:
        alarms.append(
            f"A classifier that never saw the model tells the two sets apart with an AUC of {interval(blind['auc'])}; "
            f"the attack's lead over it, {points(blind['gap'])}, may be nothing. The sets were collected or processed "
            "differently: take held-out images of the same origin."
        )
    elif blind and blind["fires"]:
        alarms.append(
            f"A classifier that never saw the model tells the two sets apart with an AUC of {interval(blind['auc'])}: "
            f"part of the result is in the images. The attack is ahead of it by {points(blind['gap'])}."
        )
    return alarms + candidate_alarms(results["candidates"]) + _contradiction(results)


def _contradiction(results: Mapping[str, Any]) -> list[str]:
    """An alarm if the candidates look like training images of a model that does not seem to remember its members."""
    test = (results["candidates"] or {}).get("set_test")
    if test is None or test["p_value"] > _SURELY or deciding_row(results)["auc"]["low"] > 0.5:
        return []
    return [
        f"As a set the candidates look like training images ({p_text(test['p_value'])}), but the members do not. The "
        "lists of members and held-out images may be mixed up: check where they come from."
    ]


def evaluation_alarms(results: Mapping[str, Any]) -> list[str]:
    """What to read first in the results of a run without a headline: is it a denoiser, and are the sets swapped?"""
    return [*model_check.failures(results), *direction_alarms(results["direction"])]


def direction_alarms(direction: Mapping[str, Any]) -> list[str]:
    """What to read first about which set is which."""
    if direction["judgement"] == Judgement.NOT_CHECKED:
        return [
            "Direction not checked: this audit was made before swapped sets were looked for. Make it again before you "
            "rely on its verdicts."
        ]
    if direction["judgement"] != Judgement.BELOW:
        return []
    worst = min(direction["aucs"], key=lambda auc: auc["high"])
    return [
        f"Members look less like training images than held-out images do: the witness, a score that learned nothing "
        f"from the labels, has an AUC of {percent(worst['value'])} at t = {worst['t']}, surely below 50 % (at most "
        f"{percent(worst['high'])}). Either the two sets were swapped, or they differ in kind. Check which is which; "
        "until then every other number here may be the wrong way round."
    ]


def candidate_alarms(found: Mapping[str, Any] | None) -> list[str]:
    """What to read first about the candidates."""
    alarms = []
    if found and found["likeness"] and found["likeness"]["set_unlike"]:
        alarms.append(
            f"The candidates are another kind of picture than the held-out images "
            f"({p_text(found['likeness']['set_p'])}, judged without the model). A p-value would compare unlike things. "
            "Take held-out images that were collected and processed as the candidates were."
        )
    if found and found["less_like_members"] is not None:
        alarms.append(
            f"The candidates look surely less like training images than the held-out images do "
            f"({p_text(found['less_like_members'])}). Either some held-out images were trained on, or the two sets "
            "differ in kind."
        )
    return alarms


def points(estimate: Mapping[str, float]) -> str:
    """ "+3.2 points (1.0 to 5.4)"."""
    value, low, high = (f"{100 * estimate[key]:+.1f}".replace("-", "−") for key in ("value", "low", "high"))
    return f"{value} points ({low} to {high})"


def _without_members(results: Mapping[str, Any]) -> dict[str, Any]:
    found = results["candidates"]
    if found["withheld"]:
        answer = f"No verdict: {found['withheld']}."
    elif not found["can_decide"]:
        answer = "Too few held-out images to decide anything."
    elif found["evidence"]:
        answer = f"{found['evidence']:,} of {found['count']:,} candidates show evidence of membership."
    elif found["set_test"] and found["set_test"]["p_value"] <= found["level"]:
        answer = "As a set the candidates look like training images, though no single one does for sure."
    else:
        answer = "No evidence that any candidate was in the training set."
    detail = (
        f"{title(results['decided_by']['attack'], results['decided_by']['queries_per_image'])} per image, compared "
        f"with {found['heldout']:,} images that the model was not trained on. No members were known, so nothing was "
        "calibrated and how strong the attack is on this model is not known: finding nothing means little."
    )
    return {
        "answer": answer,
        "detail": detail,
        "candidates": _candidates(results),
        "alarms": candidate_alarms(found),
    }


def deletion_headline(results: Mapping[str, Any]) -> dict[str, Any]:
    """{answer, detail, candidates, alarms} of a deletion check."""
    wrong = model_check.failures(results)
    if wrong:
        return _no_denoiser(wrong, "")
    alarms = deletion_alarms(results)
    if results["withheld"]:
        return {"answer": f"No verdict: {results['withheld']}.", "detail": "", "candidates": "", "alarms": alarms}
    answers = {
        "no evidence of membership after": "The images no longer look like training images.",
        "evidence of membership remains": "The images still look like training images after the deletion.",
        "cannot tell: the change may be chance": "Less evidence after the deletion, but the change may be chance.",
        "cannot tell: no evidence of membership before": "There was nothing to see before the deletion: the images "
        "did not look like training images.",
    }
    before, after, change = results["set_before"], results["set_after"], results["change"]
    if before["p_value"] > results["facts"]["settings"]["level"] >= after["p_value"]:
        alarms.append(
            "The images look like training images of the model after the deletion, and not of the model before. Were "
            "the two models exchanged?"
        )
    attack = title(results["decided_by"]["attack"], results["decided_by"]["queries_per_image"])
    flagged = results["flagged"]
    detail = (
        f"{attack} per image, with everything frozen on the model before. As a set the {before['n']:,} candidates "
        f"score below a held-out image {percent(before['statistic'])} of the time before ({p_text(before['p_value'])}) "
        f"and {percent(after['statistic'])} after ({p_text(after['p_value'])}); 50 % is chance. The change is "
        f"{points(change['difference'])}, {p_text(change['p_value'])}."
    )
    one_by_one = f"One by one, {flagged['before']:,} were flagged before and {flagged['after']:,} after."
    return {"answer": answers[results["verdict"]], "detail": detail, "candidates": one_by_one, "alarms": alarms}


def deletion_alarms(results: Mapping[str, Any]) -> list[str]:
    """What to read first in a deletion check."""
    learned = results["facts"]["theory_setting"] is None
    return [
        *(direction_alarms(results["direction"]) if learned else []),
        *candidate_alarms({"likeness": results["likeness"], "less_like_members": None}),
    ]
