"""Pages from hand-made findings: hostile names stay text, nothing comes from elsewhere, nothing withheld is shown."""

import html as text
import re

import numpy as np
import pytest
from handmade import audit, deletion, found, record, settings

from dime_jax.evidence import DeletionVerdict, Verdict, Way
from dime_jax.findings.finding import Findings
from dime_jax.findings.results import CandidateRow, DeletionRow, Headline, Truth
from dime_jax.protocol.arrays import Thumbnails
from dime_jax.report import audit_figures, html

HOSTILE = "</td></table><script>alert(1)</script><img src=x onerror='alert(2)'>"
HEADLINE = Headline(f"Answer {HOSTILE}", f"50 % {HOSTILE}", HOSTILE, (f"Alarm {HOSTILE}",))


@pytest.fixture
def render(tmp_path, monkeypatch):
    """The page of findings, without figures."""
    monkeypatch.setattr(audit_figures, "draw_all", lambda *arguments: [])

    def page(results, candidates=()):
        made = record(np.arange(1.0, 20.0))
        object.__setattr__(made, "directory", tmp_path)
        html.write_report(made, Findings(results, list(candidates)))
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return page


def rows_of(page):
    """The texts of the cells of each candidate's row."""
    table = re.search(r'<table id="candidates">.*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    rows = re.findall(r"<tr.*?>(.*?)</tr>", table[1], re.DOTALL)
    cells = (re.findall(r"<t[hd].*?>(.*?)</t[hd]>", one, re.DOTALL) for one in rows)
    return [[text.unescape(re.sub(r"<.*?>", " ", cell)).strip() for cell in one] for one in cells]


def assert_harmless(page):
    assert HOSTILE not in page
    assert text.escape(HOSTILE, quote=False).replace("'", "&#39;") in page
    assert not re.findall(r"<img src=x|onerror='", page)
    assert page.count("<script>") == 1  # our own, by its hash
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert not re.findall(r"https?://(?!www\.w3\.org)|@import|url\((?!#)", page)
    assert "default-src 'none'; img-src data:;" in page


def test_whatever_strangers_named_stays_text(render):
    model = audit().model.__class__(**{**vars(audit().model), "name": HOSTILE, "origin": HOSTILE, "facts": (HOSTILE,)})
    candidate = CandidateRow(id=HOSTILE, reason=HOSTILE, note=HOSTILE, verdict=Verdict.CANNOT_TELL)
    results = audit(
        model=model,
        settings=settings(model=HOSTILE),
        headline=HEADLINE,
        warnings=(HOSTILE,),
        candidates=found(warnings=(HOSTILE,), withheld=HOSTILE),
    )
    page = render(results, [candidate])
    assert_harmless(page)
    assert page.count("&lt;script&gt;") >= 10
    assert "50\N{NO-BREAK SPACE}%" in page


def test_candidates_have_what_is_known_of_them_and_dashes_for_the_rest(render):
    told = {"score": 0.12345, "p_value": 0.05, "q_value": 0.1, "verdict": Verdict.EVIDENCE, "note": "near copy of b"}
    judged = CandidateRow(id="a", reason="", member=True, **told)
    rows = [judged, CandidateRow(id="b", reason="could not be used: is empty")]
    words = "evidence of membership near copy of b", "cannot tell could not be used: is empty"
    assert rows_of(render(audit(candidates=found()), rows)) == [
        ["a", words[0], "0.05", "0.1", "0.1235"],
        ["b", words[1], "–", "–", "–"],
    ]
    assert rows_of(render(audit(candidates=found(truth=Truth(3, 2, 7, 1))), rows)) == [
        ["a", words[0], "0.05", "0.1", "0.1235", "member"],
        ["b", words[1], "–", "–", "–", "not a member"],
    ]


def test_withheld_verdicts_show_no_number(render):
    withheld = found(withheld="they are unlike", set_withheld="they are unlike", set_test=None, can_decide=False)
    page = render(audit((), candidates=withheld), [CandidateRow(id="a", score=0.5, reason="they are unlike")])
    assert "no verdict on 40 candidates: they are unlike" in page
    assert "As a set" not in page
    assert not re.findall(r"p [=&<] ?(?:lt;)? ?0\.\d", page)
    assert rows_of(page)[0][2:4] == ["–", "–"]


@pytest.mark.parametrize("withheld", [None, "they are unlike"])
def test_deletion_pages(tmp_path, withheld):
    verdict = None if withheld else DeletionVerdict.GONE
    results = deletion(verdict, withheld=withheld, headline=HEADLINE, warnings=(HOSTILE,))
    rows = [
        DeletionRow(id="later", p_before=0.5, p_after=0.25, reason=""),
        DeletionRow(id="unread", reason="could not be used: is empty"),
        DeletionRow(id=HOSTILE, p_before=0.0125, p_after=0.5, flagged_before=True, reason="", note="exact copy of x"),
    ]
    html.write_comparison(tmp_path, results, rows)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert_harmless(page)
    assert {file.name for file in (tmp_path / "figures").iterdir()} == {"change.png", "change.svg"}
    if withheld:
        assert not re.findall(r"p [=&<] ?(?:lt;)? ?0\.\d|0\.0125|75\.0", page)
    else:
        assert rows_of(page) == [  # the lowest p before comes first, who has none last
            [HOSTILE, "0.0125", "0.5", "before exact copy of x"],
            ["later", "0.5", "0.25", "–"],
            ["unread", "–", "–", "– could not be used: is empty"],
        ]
        assert "9 → 1" in page


def test_the_extremes_have_their_own_pictures():
    made = record(np.arange(1.0, 20.0), [5.0, 0.5])
    none = np.zeros(0, np.int64)
    object.__setattr__(made.arrays, "thumbnails", Thumbnails(np.array([20]), none, none, none, np.zeros((0, 2, 2, 3))))
    assert html._extremes(made, {19: "other", 20: "own"}) == [("Members with the strongest evidence", ["own"])]


def test_a_figure_in_the_page_has_ids_of_its_own_the_pages_colours_and_a_description():
    svg = (
        '<?xml version="1.0"?><svg width="9" viewBox="0 0 9 9"><metadata>who</metadata><path id="p" '
        f'style="fill: {audit_figures.ACCENT.lower()}; font: 9px Arial"/><use href="#p" clip-path="url(#c)"/></svg>'
    )
    assert html.inline_svg(svg, "roc", 'a "curve" <b>') == (
        '<svg viewBox="0 0 9 9" role="img" aria-label="a &#34;curve&#34; &lt;b&gt;"><path id="roc-p" '
        'style="fill: var(--accent); font: 9px var(--sans)"/><use href="#roc-p" clip-path="url(#roc-c)"/></svg>'
    )


def test_no_figure_of_p_values_that_do_not_exist():
    made = record(np.arange(1.0, 20.0), [5.0, 0.5])
    judged = [CandidateRow(id="a", p_value=0.05, reason=""), CandidateRow(id="b", reason="lost")]
    results = audit((), candidates=found(level=0.2))
    drawn = audit_figures.draw_p_values(made, results, judged)
    assert [cells[0] for cells in drawn.numbers.rows] == ["1"]
    assert audit_figures.draw_p_values(made, results, judged[1:]) is None


@pytest.mark.parametrize("candidates", [8, 0])
def test_scores_beside_what_the_picture_predicts(candidates):
    rng = np.random.default_rng(0)
    predicted, scores = rng.normal(size=(2, 30))
    scores[7] = np.nan
    given = [list(Verdict)[k % 2] for k in range(candidates)]  # evidence and none, nothing unclear
    x, y = rng.normal(size=(2, candidates))
    drawn = audit_figures.draw_difficulty(np.stack([predicted, scores]), np.stack([x, y]), given)
    points = {"held-out": [(a, b) for a, b in zip(predicted, scores) if b == b]}
    for a, b, verdict in zip(x, y, given):
        points.setdefault(verdict.value.split(" of ")[0], []).append((a, b))
    lines = {line.get_label(): line for line in drawn.figure.axes[0].get_lines()}
    assert {name for name in lines if not name.startswith("_")} == set(points)
    for name, count, below, distance in drawn.numbers.rows:
        np.testing.assert_array_equal(np.transpose(lines[name].get_data()), points[name])
        assert int(count) == len(points[name])
        assert float(below) == pytest.approx(100 * sum(b < a for a, b in points[name]) / len(points[name]), abs=0.05)
        assert float(distance) == pytest.approx(np.median([b - a for a, b in points[name]]), rel=0.01)
    (diagonal,) = (line for name, line in lines.items() if name.startswith("_"))
    assert diagonal.get_slope() == 1
    assert diagonal.get_xy1()[0] == diagonal.get_xy1()[1]


@pytest.mark.parametrize(
    ("way", "predicted_by"),
    [
        (Way.ADJUSTED, "the picture alone predicts"),
        (Way.BESIDE, "the reference predicts"),
        (Way.BESIDE_ADJUSTED, "the reference and the picture predict"),
    ],
)
def test_what_predicts_a_score_is_said(way, predicted_by):
    points = np.random.default_rng(0).normal(size=(2, 30))
    drawn = audit_figures.draw_difficulty(points, points[:, :1], [Verdict.EVIDENCE], way)
    assert drawn.figure.axes[0].get_xlabel() == f"score that {predicted_by}"
    assert f"The line is what {predicted_by}" in drawn.caption
    assert f"against what {predicted_by}" in drawn.alt
    assert ("picture" in drawn.title + drawn.caption) == way.picture


def test_no_scores_beside_predictions_that_do_not_exist():
    unpredicted = np.array([[np.nan, 1.0], [0.5, np.nan]])
    assert audit_figures.draw_difficulty(unpredicted, np.ones((2, 1)), [Verdict.EVIDENCE]) is None
