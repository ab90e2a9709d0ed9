"""The answer in plain words: the headline of an audit from its results."""

from collections.abc import Iterable, Sequence

from dime_jax.attacks import describe_attack
from dime_jax.core.denoiser import EMPTY
from dime_jax.evidence import DeletionVerdict, Direction, FractionUsed, Judgement, Way
from dime_jax.evidence.metrics import Estimate
from dime_jax.findings.results import (
    AuditFindings,
    BlindFinding,
    CandidatesFound,
    DeletionFindings,
    Headline,
    LikenessFound,
)
from dime_jax.findings.withholding import failures, partial, told_apart
from dime_jax.protocol.evaluation import AdjustedRow, Evaluation, ResultRow

_SURELY = 0.01
_TELLS_NOTHING = 0.9  # an interval of fractions so wide
_DELETION_ANSWERS = {
    DeletionVerdict.GONE: "The images no longer look like training images.",
    DeletionVerdict.REMAINS: "The images still look like training images after the deletion.",
    DeletionVerdict.MAY_BE_CHANCE: "There is less evidence after the deletion, but the change may be chance.",
    DeletionVerdict.NOTHING_BEFORE: "There was nothing to see before the deletion: the images did not look like "
    "training images.",
}


def headline(results: AuditFindings) -> Headline:
    """The first screen of an audit in words, from all else that was found."""
    wrong, row = failures({"The model": results.model_check}), results.deciding_row
    if wrong:
        return _no_denoiser(wrong, _candidates(results.candidates))
    if row is None:
        return _without_members(results)
    candidates = " ".join(filter(None, [_candidates(results.candidates), fraction(results.fraction_used)]))
    return Headline(_answer(results, row), _detail(results, row), candidates, tuple(_alarms(results, row)))


def _no_denoiser(wrong: Sequence[str], candidates: str) -> Headline:
    """Where a model is no denoiser, or is not asked as it wants to be, that is all there is to say."""
    detail = (
        "The attacks compare noise predictions, so scores of such a model show nothing, neither that it remembers nor "
        "that it does not. Fix the model, or the way it is asked, and audit it again into a new output directory."
    )
    answer = "This cannot be audited as it is: a model does not predict noise the way it was asked to."
    return Headline(answer, detail, candidates, tuple(wrong))


def title(attack: str, queries: int) -> str:
    """ "DIME, 11 queries"."""
    return f"{describe_attack(attack).title}, {queries} {'query' if queries == 1 else 'queries'}"


def minus(way: Way) -> str:
    """What is taken out of a score, behind its name: ", minus what the picture explains"."""
    parts = {
        Way.ADJUSTED: "the picture explains",
        Way.BESIDE: "the reference explains",
        Way.BESIDE_ADJUSTED: "the reference and the picture explain",
    }
    return f", minus what {parts[way]}" if way in parts else ""


def taken_out(way: Way) -> str:
    """How something is taken out of the scores behind p-values, behind other sentences; nothing of plain ones."""
    fit = (
        "by a fit over the held-out images and this candidate that knows no labels and treats all of them alike"
        f"{': what is left is what the model has learned and the reference has not' if way.reference else ''}."
    )
    reference = " The reference was asked the same with the same noise, so what its score explains"
    picture = (
        " A hard picture has a high score whether the model saw it or not, so what statistics of the picture explain"
    )
    return {
        Way.PLAIN: "",
        Way.ADJUSTED: f"{picture} is taken out first, {fit}",
        Way.BESIDE: f"{reference} is taken out first, {fit}",
        Way.BESIDE_ADJUSTED: f"{reference} is taken out first, together with what statistics of the picture do, {fit}",
    }[way]


def queries_made(results: Evaluation | DeletionFindings) -> str:
    """ "1,200 queries made", and those of a reference."""
    asked = results.reference_queries_made if isinstance(results, Evaluation) else None
    return f"{results.queries_made:,} queries made{'' if asked is None else f', and {asked:,} of the reference'}"


def percent(value: float | None, digits: int = 1) -> str:
    """ "84.2 %", and a dash for nothing."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def interval(estimate: Estimate, digits: int = 1) -> str:
    """ "84.2 % (81.0 to 87.1)"."""
    low, high = (f"{100 * end:.{digits}f}" for end in (estimate.low, estimate.high))
    return f"{percent(estimate.value, digits)} ({low} to {high})"


def p_text(p: float | None) -> str:
    """ "p = 0.031", "p < 0.001"."""
    if p is None:
        return "p unknown"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def _answer(results: AuditFindings, row: ResultRow | AdjustedRow) -> str:
    blind = results.blind_baseline
    if partial(results.reference_direction, results.decided_by.taken_out):
        return "The reference knows the held-out images better than the members: nothing can be read beside it."
    if results.direction.judgement == Judgement.BELOW:
        return "Members and held-out images look swapped: it is the held-out images that look like training images."
    if row.auc.high < 0.5:
        return "The attack does worse than chance on the test half: members and held-out images may be swapped."
    if row.auc.low <= 0.5 and results.direction.judgement == Judgement.ABOVE:
        return (
            "The attack that decides cannot tell members from held-out images, but the witness of one query can: "
            "do not read this as a sign of a clean model."
        )
    if row.auc.low <= 0.5:
        return "No sign that this model remembers its training images."
    if any(found and found.explained for found in (blind, results.caption_baseline)):
        return (
            "Members and held-out images differ, but they also do without the model: this says nothing about training."
        )
    return f"This model remembers its training images{_how_much(row)}."


def _how_much(row: ResultRow | AdjustedRow) -> str:
    """What the lower end of the interval supports."""
    low = row.tpr_at_1pct_fpr.low
    if low >= 0.5:
        return ": most of them can be picked out with few false alarms"
    if low >= 0.05:
        return ": some of them can be picked out with few false alarms"
    return ", but hardly any single one can be picked out with confidence"


def _detail(results: AuditFindings, row: ResultRow | AdjustedRow) -> str:
    decided, test = results.decided_by, results.images.test
    assert test is not None  # there is a row, so there is a test half
    attack = f"{title(decided.attack, decided.queries_per_image)} per image{minus(decided.taken_out)}"
    return (
        f"{attack}, tells a member from a held-out image {interval(row.auc)} of the time; 50 % is chance. "
        f"With at most 1 % false alarms it finds {interval(row.tpr_at_1pct_fpr)} of the members. Measured on "
        f"{test.members:,} members and {test.heldout:,} held-out images that were not used to choose any "
        f"setting; ranges are 95 % intervals.{_assumed(results)}"
    )


def _assumed(results: AuditFindings) -> str:
    """What a verdict beside a reference takes for granted, behind other sentences; nothing without one."""
    if not results.decided_by.taken_out.reference or results.reference is None:
        return ""
    asked = "candidates" if results.candidates else "members"
    return (
        f" This takes for granted that the reference, {results.reference.name}, was trained on none of these images or "
        f"on {asked} and held-out images alike, and that the held-out images are of the {asked}’ kind and style: a "
        "model that was tuned to a style does better on every picture of it, whether it saw that picture or not."
    )


def _candidates(found: CandidatesFound | None) -> str:
    """A sentence or two on the candidates, if there are any."""
    if found is None:
        return ""
    sentences = [
        f"Of {found.count:,} candidates, {found.evidence:,} show evidence of membership, {found.no_evidence:,} show "
        f"none, and {found.cannot_tell:,} cannot be decided (false discovery rate {percent(found.level, 0)})."
    ]
    if found.withheld:
        return f"No verdict is given on any of the {found.count:,} candidates: {found.withheld}."
    if not found.set_test:
        return " ".join(sentences)
    p_value = found.set_test.p_value
    if found.can_decide and p_value <= found.level:
        sentences.append(f"As a set, they look like training images ({p_text(p_value)}).")
    elif found.can_decide:
        sentences.append(f"As a set, they cannot be told apart from images the model never saw ({p_text(p_value)}).")
    if found.candidates_needed > 1 and not found.evidence:
        sentences.append(
            f"With {found.heldout:,} held-out images, no candidate can be singled out; that would take "
            f"{found.heldout_needed:,}."
        )
    return " ".join(sentences)


def fraction(found: FractionUsed | None) -> str:
    """A sentence on which fraction of the candidates was used, if that can be estimated."""
    if found is None:
        return ""
    low, high = (f"{100 * end:.0f}" for end in (found.low, found.high))
    if found.high - found.low > _TELLS_NOTHING:
        return f"Which fraction of them was used cannot be told: anything from {low} to {high} % fits."
    return (
        f"About {percent(found.value, 0)} of them were used in training ({percent(found.confidence, 0)} interval: "
        f"{low} to {high} %), if members among them score like the known ones."
    )


def _alarms(results: AuditFindings, row: ResultRow | AdjustedRow) -> list[str]:
    return [
        *direction_alarms(results.direction),
        *reference_alarms(results.reference_direction),
        *_blind_alarms(
            results.blind_baseline,
            "A classifier that never saw the model tells",
            "it",
            "collected or processed differently: use held-out images from the same source",
            "comes from the images",
        ),
        *_blind_alarms(
            results.caption_baseline,
            "The captions alone, without model or pictures, tell",
            "them",
            "captioned differently: use held-out images with captions from the same source, or ask with --captions "
            "none",
            "may come from them",
        ),
        *_candidate_alarms(results.candidates, results.decided_by.taken_out.reference),
        *_contradiction(results.candidates, row),
    ]


def _blind_alarms(blind: BlindFinding | None, tells: str, them: str, differ: str, part: str) -> list[str]:
    """What to read first about sets that pictures or captions alone tell apart; the texts say which and why."""
    if blind is None or not (blind.fires or blind.explained):
        return []
    found = f"{tells} the two sets apart with an AUC of {interval(blind.auc)}"
    if blind.explained:
        return [f"{found}; the attack's lead over {them}, {points(blind.gap)}, may be chance. The sets were {differ}."]
    return [f"{found}: part of the result {part}. The attack is ahead of {them} by {points(blind.gap)}."]


def asked_captions(captions: str, attacks: Iterable[str] = ()) -> str:
    """What a text-conditioned model was told about each image.

    Args:
      captions: "own" or "none".
      attacks: the names of those that asked.
    """
    if captions == "none":
        return "the model was asked about every image with the empty caption"
    own = "the model was asked about every image with the image’s own caption"
    asking = [describe_attack(name) for name in dict.fromkeys(attacks)]
    titles = [attack.title for attack in asking if EMPTY in attack.conditions]
    return f"{own}; {', '.join(titles)} also with each third of it and with the empty one" if titles else own


def _contradiction(found: CandidatesFound | None, row: ResultRow | AdjustedRow) -> list[str]:
    """An alarm if the candidates look like training images of a model that does not seem to remember its members."""
    test = None if found is None else found.set_test
    if test is None or test.p_value > _SURELY or row.auc.low > 0.5:
        return []
    return [
        f"As a set, the candidates look like training images ({p_text(test.p_value)}), but the members do not. The "
        "lists of members and held-out images may be mixed up: check where they come from."
    ]


def evaluation_alarms(results: Evaluation) -> list[str]:
    """What to read first in the results of a run without a headline: is it a denoiser, and are the sets swapped?"""
    about_sets = [*direction_alarms(results.direction), *reference_alarms(results.reference_direction)]
    return [*failures({"The model": results.model_check}), *about_sets]


def direction_alarms(direction: Direction) -> list[str]:
    """What to read first about which set is which."""
    if direction.judgement == Judgement.NOT_CHECKED:
        return [
            "Direction not checked: there are no answers that show whether members and held-out images are swapped. Do "
            "not rely on the verdicts."
        ]
    if direction.judgement != Judgement.BELOW:
        return []
    worst = min(direction.aucs, key=lambda auc: auc.high)
    minus, also = (
        (" minus what the reference explains,", ", or the reference knows members") if worst.beside else ("", "")
    )
    return [
        f"Members look less like training images than held-out images do: the witness, a score that learned nothing "
        f"from the labels,{minus} has an AUC of {percent(worst.value)} at t = {worst.t}, clearly below 50 % (at most "
        f"{percent(worst.high)}). Either the two sets were swapped, or they differ in kind{also}. Check which is "
        "which; until then every other number here may be the wrong way round."
    ]


def reference_alarms(reference: Direction | None) -> list[str]:
    """What to read first about a reference that tells members from held-out images by itself."""
    if reference is None or reference.judgement not in (Judgement.BELOW, Judgement.ABOVE):
        return []
    below = reference.judgement is Judgement.BELOW
    one = min(reference.aucs, key=lambda auc: auc.high) if below else max(reference.aucs, key=lambda auc: auc.low)
    known, so = "members", "hides what the model remembers of them"
    if below:
        known, so = "held-out images", "makes every other image look like a member beside it"
    return [
        f"The reference by itself, without the model, tells members from held-out images: its AUC is "
        f"{percent(one.value)} at t = {one.t}, and should be near 50 %. Either it was trained on some {known}, too, "
        f"which {so}, or the two sets differ in kind or style. Use another reference, or other held-out images."
    ]


def _likeness_alarms(likeness: LikenessFound) -> list[str]:
    if not likeness.set_unlike and told_apart(likeness.reference_p):
        return [
            f"The reference by itself, without the model, tells the candidates from the held-out images "
            f"({p_text(likeness.reference_p)}). Either it was trained on images of one of these sets, or they differ "
            "in kind or style. Use another reference, or held-out images that were made as the candidates were."
        ]
    if not likeness.set_unlike:
        return []
    return [
        f"The candidates are a different kind of picture from the held-out images "
        f"({p_text(likeness.set_p)}, judged without the model). A p-value would compare unlike things. "
        "Use held-out images that were collected and processed the way the candidates were."
    ]


def _candidate_alarms(found: CandidatesFound | None, beside: bool) -> list[str]:
    """What to read first about the candidates, whose scores may be read beside a reference."""
    if found is None:
        return []
    alarms = _likeness_alarms(found.likeness)
    if found.less_like_members is not None:
        alarms.append(
            f"The candidates look clearly less like training images than the held-out images do "
            f"({p_text(found.less_like_members)}). Either some held-out images were trained on, or the two sets "
            f"differ in kind{', or the reference knows the candidates' if beside else ''}."
        )
    return alarms


def points(estimate: Estimate) -> str:
    """ "+3.2 points (+1.0 to +5.4)"."""
    value, low, high = (f"{100 * number:+.1f}".replace("-", "−") for number in estimate)
    return f"{value} points ({low} to {high})"


def _without_members(results: AuditFindings) -> Headline:
    found = results.candidates
    assert found is not None  # without members and candidates there is no audit
    if found.withheld:
        answer = f"No verdict: {found.withheld}."
    elif not found.can_decide:
        answer = "Too few held-out images to decide anything."
    elif found.evidence:
        answer = f"{found.evidence:,} of {found.count:,} candidates show evidence of membership."
    elif found.set_test and found.set_test.p_value <= found.level:
        answer = "As a set, the candidates look like training images, though no single one does for sure."
    else:
        answer = "No evidence that any candidate was in the training set."
    decided = results.decided_by
    detail = (
        f"{title(decided.attack, decided.queries_per_image)} per image{minus(decided.taken_out)}, "
        f"compared with {found.heldout:,} images that the model was not trained on. No members were known, "
        f"so how strong the attack is on this model is not known: finding nothing means little.{_assumed(results)}"
    )
    return Headline(answer, detail, _candidates(found), tuple(_candidate_alarms(found, decided.taken_out.reference)))


def deletion_failures(results: DeletionFindings) -> list[str]:
    """What is wrong with the two models, a line each; nothing if they passed or were not checked."""
    checks = results.model_check
    return failures({"The model before": checks.before, "The model after": checks.after})


def deletion_headline(results: DeletionFindings) -> Headline:
    """The first screen of a deletion check in words, from all else that was found."""
    wrong = deletion_failures(results)
    alarms = direction_alarms(results.direction) if results.facts.fixed_setting is None else []
    alarms += _likeness_alarms(results.likeness)
    if wrong:
        return _no_denoiser(wrong, "")
    before, after, change = results.set_before, results.set_after, results.change
    if results.verdict is None or before is None or after is None or change is None:
        return Headline(f"No verdict: {results.withheld}.", "", "", tuple(alarms))
    if before.p_value > results.facts.settings.level >= after.p_value:
        alarms.append(
            "The images look like training images of the model after the deletion, and not of the model before. Were "
            "the two models swapped?"
        )
    attack = title(results.decided_by.attack, results.decided_by.queries_per_image)
    flagged, of = results.flagged, " of the plain scores" if results.facts.adjusted else ""
    detail = (
        f"{attack} per image{minus(results.facts.taken_out)}, with everything frozen on the model before. As a set, "
        f"the {before.n:,} candidates score below a held-out image {percent(before.statistic)} of the time before "
        f"({p_text(before.p_value)}) and {percent(after.statistic)} after ({p_text(after.p_value)}); 50 % is chance. "
        f"The change{of} is {points(change.difference)}, {p_text(change.p_value)}."
    )
    one_by_one = f"One by one, {flagged.before:,} were flagged before and {flagged.after:,} after."
    return Headline(_DELETION_ANSWERS[results.verdict], detail, one_by_one, tuple(alarms))
