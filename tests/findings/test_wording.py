"""The words for every kind of outcome."""

import dataclasses

import pytest
from handmade import (
    ABOVE,
    BELOW,
    FAILED,
    FRACTION,
    KNOWS_HELDOUT,
    KNOWS_MEMBERS,
    PASSED,
    UNSURE,
    audit,
    beside,
    blind,
    deletion,
    found,
    row,
    set_test,
    with_ways,
)

from dime_jax.evidence import NOT_CHECKED, DeletionVerdict, Direction, Judgement, Way, WitnessAuc
from dime_jax.evidence.metrics import Estimate
from dime_jax.findings import wording
from dime_jax.findings.results import LikenessFound
from dime_jax.protocol.facts import BeforeAfter

UNLIKE, TOLD_APART = LikenessFound(0.001, True), LikenessFound(0.5, False, 0, 0.002)
CHANCE, WORSE = (0.5, 0.4, 0.6), (0.3, 0.2, 0.4)
REMEMBERS = "This model remembers its training images"


@pytest.mark.parametrize(
    ("findings", "answer"),
    [
        (audit((row(tpr=(0.6, 0.5, 0.7)),)), f"{REMEMBERS}: most of them can be picked out with few false alarms."),
        (audit((row(tpr=(0.9, 0.49, 1)),)), f"{REMEMBERS}: some of them can be picked out with few false alarms."),
        (audit((row(tpr=(0.9, 0.04, 1)),)), f"{REMEMBERS}, but hardly any single one can be picked out"),
        (audit((row(CHANCE),), direction=UNSURE), "No sign that this model remembers its training images."),
        (audit((row(CHANCE),), direction=ABOVE), "The attack that decides cannot tell members from held-out images, b"),
        (audit((row(WORSE),)), "The attack does worse than chance on the test half: members and held-out images may b"),
        (audit(direction=BELOW), "Members and held-out images look swapped: it is the held-out images that look like"),
        (
            audit((with_ways(),), **beside(reference_direction=KNOWS_HELDOUT)),
            "The reference knows the held-out images better than the members: nothing can be read beside it.",
        ),
        (audit((with_ways(),), **beside(reference_direction=KNOWS_MEMBERS)), f"{REMEMBERS}: some"),
        (audit(reference_direction=KNOWS_HELDOUT), f"{REMEMBERS}: some"),  # what decides does without it
        (audit(blind_baseline=blind(True, True)), "Members and held-out images differ, but they also do without the"),
        (audit(caption_baseline=blind(True, True)), "Members and held-out images differ, but they also do without the"),
        (audit(blind_baseline=blind(True, False)), f"{REMEMBERS}: some"),
        (audit(model_check=FAILED, direction=BELOW), "This cannot be audited as it is: a model does not predict noise"),
        (audit((), candidates=found()), "4 of 40 candidates show evidence of membership."),
        (audit((), candidates=found(withheld="they are unlike")), "No verdict: they are unlike."),
        (audit((), candidates=found(can_decide=False)), "Too few held-out images to decide anything."),
        (audit((), candidates=found(evidence=0)), "As a set, the candidates look like training images, though no si"),
        (audit((), candidates=found(evidence=0, set_test=set_test(0.06))), "No evidence that any candidate was in"),
        (audit((), candidates=found(), model_check=FAILED), "This cannot be audited as it is"),
    ],
)
def test_answers(findings, answer):
    said = wording.headline(findings)
    assert said.answer.startswith(answer)
    assert said.answer.endswith(".")


COUNTS = "4 show evidence of membership, 30 show none, and 6 cannot be decided (false discovery rate 5 %)."
ALONE = "With 60 held-out images, no candidate can be singled out; that would take 799."


@pytest.mark.parametrize(
    ("candidates", "end"),
    [
        (found(), f"{COUNTS} As a set, they look like training images (p = 0.001)."),
        (found(set_test=set_test(0.3)), "they cannot be told apart from images the model never saw (p = 0.30)."),
        (found(evidence=0), "they look like training images (p = 0.001)."),
        (found(can_decide=False), COUNTS),
        (found(set_test=None), COUNTS),
        (found(withheld="they differ"), "No verdict is given on any of the 40 candidates: they differ."),
        (
            found(evidence=0, candidates_needed=2, set_test=set_test(0.05)),
            f"they look like training images (p = 0.050). {ALONE}",
        ),
    ],
)
def test_candidates(candidates, end):
    assert wording.headline(audit(candidates=candidates)).candidates.endswith(end)
    used = wording.headline(audit(candidates=candidates, fraction_used=FRACTION)).candidates
    assert used.endswith(f"{end} {wording.fraction(FRACTION)}")


@pytest.mark.parametrize(
    ("findings", "starts"),
    [
        (audit(), []),
        (audit(direction=NOT_CHECKED), ["Direction not checked: there are no answers that show"]),
        (audit(direction=BELOW), ["Members look less like training images than held-out images do"]),
        (audit(blind_baseline=blind(False, False)), []),
        (audit(blind_baseline=blind(True, False)), ["A classifier that never saw the model tells the two sets apart"]),
        (audit(caption_baseline=blind(False, False)), []),
        (audit(caption_baseline=blind(True, True)), ["The captions alone, without model or pictures, tell the two"]),
        (
            audit(candidates=found(likeness=UNLIKE)),
            ["The candidates are a different kind of picture from the held-out"],
        ),
        (audit((row(CHANCE),), candidates=found(set_test=set_test(0.01))), ["As a set, the candidates look like trai"]),
        (audit((row(CHANCE),), candidates=found(set_test=set_test(0.011))), []),
        (audit(candidates=found(set_test=set_test(0.01))), []),
        (audit(model_check=FAILED, direction=BELOW), ["The model does not predict noise: at t = 500"]),
        (audit((), candidates=found(less_like_members=0.004)), ["The candidates look clearly less like training ima"]),
        (audit(reference_direction=UNSURE), []),
        (audit(reference_direction=KNOWS_HELDOUT), ["The reference by itself, without the model, tells members from"]),
        (audit(reference_direction=KNOWS_MEMBERS), ["The reference by itself, without the model, tells members from"]),
        (
            audit((), candidates=found(likeness=TOLD_APART), **beside()),
            ["The reference by itself, without the model, tells the candidates from the held-out images (p = 0.002)."],
        ),
        (audit((), candidates=found(likeness=LikenessFound(0.5, False, 0, 0.011)), **beside()), []),
    ],
)
def test_alarms(findings, starts):
    alarms = wording.headline(findings).alarms
    assert len(alarms) == len(starts)
    assert all(alarm.startswith(start) for alarm, start in zip(alarms, starts))


@pytest.mark.parametrize(
    ("findings", "answer", "alarms"),
    [
        (deletion(DeletionVerdict.GONE), "The images no longer look like training images.", 0),
        (deletion(DeletionVerdict.REMAINS, after=0.01), "The images still look like training images after the dele", 0),
        (
            deletion(DeletionVerdict.MAY_BE_CHANCE, change=0.3),
            "There is less evidence after the deletion, but the c",
            0,
        ),
        (deletion(DeletionVerdict.NOTHING_BEFORE, before=0.3), "There was nothing to see before the deletion: the", 0),
        (deletion(DeletionVerdict.NOTHING_BEFORE, before=0.3, after=0.01), "There was nothing to see before", 1),
        (deletion(withheld="too few answers"), "No verdict: too few answers.", 0),
        (deletion(withheld="unlike", likeness=UNLIKE), "No verdict: unlike.", 1),
        (deletion(withheld="no", model_check=BeforeAfter(PASSED, FAILED)), "This cannot be audited as it is", 1),
    ],
)
def test_deletions(findings, answer, alarms):
    said = wording.deletion_headline(findings)
    assert said.answer.startswith(answer)
    assert len(said.alarms) == alarms
    assert not findings.withheld or "p =" not in said.detail + said.candidates


def test_every_number_has_its_interval():
    detail, without = wording.headline(audit()).detail, wording.headline(audit((), candidates=found())).detail
    assert "1 query per image, tells a member from a held-out image 80.0 % (70.0 to 90.0) of the time" in detail
    assert "it finds 40.0 % (30.0 to 50.0) of the members. Measured on 60 members and 60 held-out images" in detail
    assert "compared with 60 images that the model was not trained on. No members were known" in without
    (worst,) = wording.direction_alarms(BELOW)
    assert "an AUC of 20.0 % at t = 30, clearly below 50 % (at most 25.0 %)" in worst
    (explained,) = wording.headline(audit(blind_baseline=blind(True, True))).alarms
    assert "an AUC of 60.0 % (55.0 to 65.0); the attack's lead over it, +20.0 points (+10.0 to +30.0), may" in explained
    gone = wording.deletion_headline(deletion(DeletionVerdict.GONE))
    assert "75.0 % of the time before (p = 0.001) and 50.0 % after (p = 0.60); 50 % is chance" in gone.detail
    assert gone.detail.endswith("The change is +25.0 points (+12.5 to +37.5), p = 0.001.")
    adjusted = deletion(DeletionVerdict.GONE)
    adjusted = dataclasses.replace(adjusted, facts=dataclasses.replace(adjusted.facts, adjusted=True))
    said = wording.deletion_headline(adjusted).detail
    assert "minus what the picture explains" in said
    assert "The change of the plain scores is" in said
    assert gone.candidates == "One by one, 9 were flagged before and 1 after."
    assert "About 50 % of them were used in training (95 % interval: 40 to 62 %), if" in wording.fraction(FRACTION)
    wide = wording.fraction(FRACTION._replace(low=0.04, high=0.95))
    assert wide == "Which fraction of them was used cannot be told: anything from 4 to 95 % fits."
    assert wording.points(Estimate(0.0, -0.013, 0.054)) == "+0.0 points (−1.3 to +5.4)"
    assert [wording.p_text(p) for p in (None, 0.00099, 0.25)] == ["p unknown", "p < 0.001", "p = 0.25"]


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("members", [True, False])
def test_what_a_verdict_beside_a_reference_takes_for_granted_is_said_and_only_there(way, members):
    given = beside(way if way.reference else None) if way is not Way.PLAIN else {}
    asked = "members" if members else "candidates"
    findings = audit((with_ways(),) if members else (), candidates=None if members else found(), **given)
    detail = wording.headline(findings).detail
    granted = (
        "This takes for granted that the reference, base, was trained on none of these images or on "
        f"{asked} and held-out images alike, and that the held-out images are of the {asked}’ kind and style"
    )
    assert (granted in detail) == way.reference
    assert wording.minus(way) in detail
    assert ("the reference" in wording.minus(way), "the picture" in wording.minus(way)) == (
        way.reference,
        "picture" in wording.minus(way),
    )


@pytest.mark.parametrize("way", list(Way))
def test_how_it_is_taken_out_names_what_is_taken_out(way):
    said = wording.taken_out(way)
    assert bool(said) == (way is not Way.PLAIN)
    assert ("The reference was asked the same with the same noise" in said) == way.reference
    assert ("statistics of the picture" in said) == way.picture
    assert not said or (said.startswith(" ") and said.endswith("."))


def test_alarms_beside_a_reference_name_it_as_a_cause():
    least = WitnessAuc("test", 70, 0.3, 0.2, 0.4, beside=True)
    (alarm,) = wording.direction_alarms(Direction(Judgement.BELOW, False, (least,)))
    assert "from the labels, minus what the reference explains, has an AUC of 30.0 %" in alarm
    assert "or they differ in kind, or the reference knows members. Check which" in alarm
    (alarm,) = wording.direction_alarms(BELOW)
    assert "reference" not in alarm
    for settings, named in (({}, False), (beside(), True)):
        less = audit((), candidates=found(less_like_members=0.004), **settings)
        (alarm,) = wording.headline(less).alarms
        assert ("or the reference knows the candidates" in alarm) == named


def test_what_was_asked_of_a_reference_is_counted_apart():
    assert wording.queries_made(audit()) == "100 queries made"
    assert wording.queries_made(audit((with_ways(),), **beside())) == "100 queries made, and 1,200 of the reference"
    assert wording.queries_made(deletion(DeletionVerdict.GONE)) == "100 queries made"


def test_only_attacks_that_ask_with_parts_of_captions_are_said_to():
    said = wording.asked_captions("own", ["loss_level_beside", "dime", "clid"])
    assert said.endswith("; CLiD also with each third of it and with the empty one")
    assert "also" not in wording.asked_captions("own", ["loss_level_beside", "dime"])
