"""The candidates as a gallery: as text, and as a browser without scripts shows it."""

import html as text
import re

import numpy as np
import pytest
from chromium import BROWSER, Page
from handmade import audit, found, record

from dime_jax.evidence import Verdict
from dime_jax.findings.finding import Findings
from dime_jax.findings.results import CandidateRow, Truth
from dime_jax.protocol.arrays import Thumbnails
from dime_jax.report import audit_figures, html

HOSTILE = "</li></ul><script>alert(1)</script><img src=x onerror='alert(2)'>" + "long" * 50
EVIDENCE, UNCLEAR, NONE = Verdict.EVIDENCE, Verdict.CANNOT_TELL, Verdict.NO_EVIDENCE
ROWS = [
    CandidateRow(id="far", p_value=0.75, q_value=0.75, verdict=NONE, reason="", member=False),
    CandidateRow(id="weak", p_value=0.03, q_value=0.06, verdict=EVIDENCE, reason="", member=True),
    CandidateRow(id=HOSTILE, p_value=0.02, q_value=0.05, verdict=UNCLEAR, reason="", note=HOSTILE, member=True),
    CandidateRow(id="near", p_value=0.001379, q_value=0.01, verdict=EVIDENCE, reason="", variation="mirrored"),
    CandidateRow(id="same", p_value=0.02, q_value=0.05, verdict=UNCLEAR, reason="", member=True),
    CandidateRow(id="unread", reason="could not be used: is empty"),
]
IN_ORDER = ["near", "weak", HOSTILE, "same", "far", "unread"]  # evidence first, then by p; who has none comes last


def write(directory, results, rows=ROWS):
    """The page of these candidates, without figures; all but the last of them have an answer, and the first four a
    picture.
    """
    made = record(np.arange(1.0, 20.0), np.zeros(len(rows) - 1))
    pixels = np.stack([np.full((8, 8, 3), 40 * k, np.uint8) for k in range(4)])
    none = np.zeros(0, np.int64)
    object.__setattr__(made, "directory", directory)
    object.__setattr__(made.arrays, "thumbnails", Thumbnails(none, none, none, made.arrays.candidates[:4], pixels))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_figures, "draw_all", lambda *arguments: [])
        html.write_report(made, Findings(results, list(rows)))
    return (directory / "report.html").read_text(encoding="utf-8"), [html.picture_uri(one) for one in pixels]


def cards_of(page):
    """The source and the words of each card."""
    cards = re.findall(r"<li class=.*?</li>", re.search(r'<ul class="cards.*?</ul>', page, re.DOTALL)[0], re.DOTALL)
    words = (re.findall(r"<(?:p|span|div)\b[^>]*>([^<]+)", card) for card in cards)
    return [
        (card, [text.unescape(one).replace("\N{NO-BREAK SPACE}", " ") for one in of]) for card, of in zip(cards, words)
    ]


def names_in_table(page):
    return [text.unescape(name) for name in re.findall(r'<th scope="row" class="mono">(.*?)</th>', page)]


def test_cards_say_verdict_p_value_and_name_evidence_first(tmp_path):
    page, pictures = write(tmp_path, audit(candidates=found()))
    cards = cards_of(page)
    assert [words for _, words in cards] == [
        ["Evidence of membership", "p = 0.001", "1 in 725 unseen images would score as low", "near", "best mirrored"],
        ["Evidence of membership", "p = 0.030", "1 in 33 unseen images would score as low", "weak"],
        ["Cannot tell", "p = 0.020", "1 in 50 unseen images would score as low", HOSTILE, HOSTILE],
        ["no picture stored", "Cannot tell", "p = 0.020", "1 in 50 unseen images would score as low", "same"],
        ["No evidence", "p = 0.75", "75 in 100 unseen images would score as low", "far"],
        ["no picture stored", "Cannot tell", "unread", "could not be used: is empty"],
    ]
    shown = [re.findall(r'src="(.*?)"', card) for card, _ in cards]
    assert shown == [[pictures[3]], [pictures[1]], [pictures[2]], [], [pictures[0]], []]
    assert names_in_table(page) == IN_ORDER
    assert page.count("<script>") == 1  # our own
    assert "<img src=x" not in page
    assert not re.findall(r"<details[^>]* open", page)


def test_the_truth_stands_on_the_cards_where_it_is_known(tmp_path):
    page, _ = write(tmp_path, audit(candidates=found(truth=Truth(3, 2, 7, 1))), ROWS[:3])
    assert cards_of(page)[0][1][-2] == "In truth a member"
    assert "In truth not a member" in cards_of(page)[2][1]


def test_a_long_gallery_ends_and_the_table_has_everyone_once(tmp_path):
    p = np.random.default_rng(0).permutation(np.arange(1, 301)) / 301
    rows = [CandidateRow(id=f"c{k}", p_value=float(one), verdict=NONE, reason="") for k, one in enumerate(p)]
    page, _ = write(tmp_path, audit(candidates=found()), rows)
    in_order = [f"c{k}" for k in np.argsort(p)]
    assert [re.search(r'class="name mono">(.*?)<', card)[1] for card, _ in cards_of(page)] == in_order[:200]
    assert names_in_table(page) == in_order
    assert "first 200 of 300</label>" in page
    assert not re.findall(r"<(?:tr|li)[^>]* hidden", page)


def test_withheld_p_values_are_on_no_card(tmp_path):
    rows = [CandidateRow(id=row.id, score=0.5, reason="they are unlike") for row in ROWS]
    page, _ = write(tmp_path, audit((), candidates=found(withheld="they are unlike", set_test=None)), rows)
    assert cards_of(page)[0][1] == ["Cannot tell", "far"]
    assert not re.findall(r"\bp(?: |\xa0)[=<&]|p unknown|would score as low", page[page.index("<body>") :])
    assert "evidence first" not in page  # nothing to sort by


@pytest.mark.parametrize(
    ("p", "words"),
    [(0.0, "1 in 1,000,000"), (1 / 725, "1 in 725"), (0.0999, "1 in 10"), (0.1, "10 in 100"), (1.0, "100 in 100")],
)
def test_p_values_in_words(p, words):
    assert html._odds(p) == words


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """The page without its script."""
    if BROWSER is None:
        pytest.skip("needs Chromium")
    directory = tmp_path_factory.mktemp("gallery")
    page, _ = write(directory, audit(candidates=found()))
    bare = directory / "bare.html"
    bare.write_text(re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL), encoding="utf-8")
    with Page(bare) as opened:
        yield opened


def seen(browser):
    """The names on the cards that are shown, as the eye reads them."""
    places = browser.run(
        "[...document.querySelectorAll('.cards li')].filter(c => c.offsetParent).map(c => [Math.round(c.offsetTop),"
        " Math.round(c.offsetLeft), c.querySelector('.name').textContent])"
    )
    return [name for *_, name in sorted(places)]


def choose(browser, value):
    browser.run(f"document.querySelector('.choices [value={value}]').closest('label').click()")
    return seen(browser)


@pytest.mark.parametrize("width", [400, 1200])
def test_one_filters_and_sorts_without_scripts(browser, width):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    assert browser.run("document.scripts.length") == 0
    assert seen(browser) == IN_ORDER
    assert choose(browser, "yes") == ["near", "weak"]
    assert choose(browser, "unclear") == [HOSTILE, "same", "unread"]
    assert choose(browser, "no") == ["far"]
    assert choose(browser, "all") == IN_ORDER
    assert choose(browser, "last") == IN_ORDER[::-1]
    assert choose(browser, "name") == sorted(IN_ORDER)
    assert choose(browser, "first") == IN_ORDER


@pytest.mark.parametrize("width", [400, 1200])
def test_pictures_are_large_and_nothing_sticks_out(browser, width):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    sizes = browser.run(
        "[...document.querySelectorAll('.cards img, .blank')].map(i => Math.min(i.clientWidth, i.clientHeight))"
    )
    assert len(sizes) == len(ROWS)
    assert min(sizes) >= 96
    browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.run("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('.cards li, .cards p')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
    assert browser.run(wide) == 0
    browser.run("for (const one of document.querySelectorAll('details')) one.open = false")


def test_the_table_and_the_explanations_are_one_click_away_without_scripts(browser):
    def open_ones():
        parts = "[...document.querySelectorAll('details.reading')].map(d => d.lastElementChild.checkVisibility())"
        return browser.run(parts)

    assert not any(open_ones())
    summaries = browser.run("[...document.querySelectorAll('details.reading > summary')].map(s => s.textContent)")
    assert "The table of all 6 candidates" in summaries
    assert "How to read this: p-values, verdicts, and what an audit cannot show" in summaries
    browser.run("for (const one of document.querySelectorAll('details.reading > summary')) one.click()")
    assert all(open_ones())
    words = browser.run("document.body.innerText")
    assert "It is evidence, not proof." in words
    browser.run("for (const one of document.querySelectorAll('details.reading > summary')) one.click()")
