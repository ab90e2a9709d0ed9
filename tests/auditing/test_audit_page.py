"""report.html as text, and as a browser shows it."""

import html as text
import itertools
import re

import numpy as np
import pytest
from chromium import BROWSER, Page
from memoriser import config, images, memoriser, source

import dime_jax as dj
from dime_jax import auditing
from dime_jax.report import html

HOSTILE = "</td></table><script>alert(1)</script><img src=x onerror=alert(2)>"
CANDIDATES = images(6, 2)
NAMES = [HOSTILE, *(f"candidate-{i}" for i in range(1, 6))]

in_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    members = images(60, 0)
    return auditing.audit(
        config(
            tmp_path_factory.mktemp("audit"),
            model=memoriser(np.concatenate([members, CANDIDATES]), "<b>model</b>"),
            members=source(members, "m"),
            heldout=source(images(60, 5), "h"),
            candidates=source(CANDIDATES, "c", ids=NAMES),
        )
    )


@pytest.fixture(scope="module")
def page(report):
    return report.report.read_text(encoding="utf-8")


def test_it_answers_first(report, page):
    headline = report.results["headline"]
    body = page[page.index("<body>") :].replace("\N{NO-BREAK SPACE}", " ")
    assert text.escape(headline["answer"]) in body[: body.index("<dl")]
    assert text.escape(headline["detail"]) in body[: body.index("<dl")]


def test_names_stay_text(page):
    assert HOSTILE not in page
    assert str(text.escape(HOSTILE)) in page
    assert "<b>model</b>" not in page


def test_it_is_one_file(page):
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert not re.findall(r"https?://(?!www\.w3\.org)", page)
    assert "default-src 'none'" in page


def test_every_number_has_its_interval_and_its_false_alarms(report, page):
    for row in report.results["results"]:
        for metric in ("auc", "asr", "tpr_at_1pct_fpr"):
            value, low, high = (f"{100 * row[metric][key]:.1f}" for key in ("value", "low", "high"))
            assert f'{value} <span class="range">{low}–{high}</span>' in page
    assert page.count("FP (rate)") == 1


def test_every_thumbnail_says_whose_it_is(report):
    page = report.report.read_text(encoding="utf-8")
    assert page.count('alt="candidate ') == len(NAMES)
    assert 'alt=""' not in page


def test_figures_are_files_too(report):
    names = {"roc", "scores", "budget", "timesteps", "terms", "p_values"}
    files = {file.name for file in (report.directory / "figures").iterdir()}
    assert files == {f"{name}.{suffix}" for name in names for suffix in ("png", "svg")}


def test_no_figure_shows_p_values_that_are_withheld(tmp_path):
    members, candidates = images(60, 0), images(6, 2) // 2
    roles = {"members": source(members, "m"), "heldout": source(images(60, 5), "h")}
    audit = auditing.audit(
        config(tmp_path, model=memoriser(members), candidates=source(candidates, "c"), attacks=("sima_l4",), **roles)
    )
    assert audit.results["candidates"]["withheld"] == "as pictures they are unlike the held-out images"
    page = audit.report.read_text(encoding="utf-8")
    assert 'id="figure-scores"' in page
    assert 'id="figure-p_values"' not in page


def test_every_figure_has_a_description_and_its_numbers(report, page):
    figures = re.findall(r'<figure id="figure-(\w+)".*?</figure>', page, flags=re.DOTALL)
    tables = re.findall(r'<table class="numbers">.*?</table>', page, flags=re.DOTALL)
    assert figures == ["p_values", "scores", "roc", "budget", "timesteps", "terms"]  # the first beside the headline
    assert len(tables) == 6
    assert page.count('role="img" aria-label="') == 6
    assert 'role="img" aria-label=""' not in page
    rows = dict(re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', tables[2]))
    for row in report.findings.results:
        found = re.findall(
            r">([\d.]+)</td>", rows[f"{dj.attacks.describe_attack(row.attack).title} ({row.queries_per_image})"]
        )
        assert float(found[1]) == pytest.approx(100 * row.tpr_at_1pct_fpr.value, abs=0.051)
    assert all(len(re.findall("<tr>", table)) > 1 for table in tables)


def test_a_screen_reader_finds_its_way(page):
    levels = [int(level) for level in re.findall(r"<h(\d)", page)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))  # no level is left out
    assert page.count("<caption") == page.count("<table")
    regions = re.findall(r'<div class="scroll[^>]*>', page)  # a keyboard must reach what scrolls
    assert all('tabindex="0" role="region" aria-label="' in region for region in regions)
    assert 'lang="en"' in page


def test_inline_svg_follows_the_page():
    svg = (
        '<?xml version="1.0"?><svg xmlns="x" width="9pt" viewBox="0 0 9 9" version="1.1"><metadata>1</metadata>'
        '<g id="a" style="fill: #0072b2; font: 8px \'DejaVu Sans\', sans-serif"/><use xlink:href="#a"/></svg>'
    )
    assert html.inline_svg(svg, "roc", '"<alt>') == (
        '<svg viewBox="0 0 9 9" role="img" aria-label="&#34;&lt;alt&gt;">'
        '<g id="roc-a" style="fill: var(--accent); font: 8px var(--sans)"/><use xlink:href="#roc-a"/></svg>'
    )


@pytest.fixture(scope="module")
def browser(report):
    if BROWSER is None:
        pytest.skip("needs Chromium")
    with Page(report.report) as opened:
        yield opened


@in_browser
def test_nothing_is_fetched_and_nothing_fails(browser):
    requests = [event["request"]["url"] for event in browser.named("Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith(("data:", "file:///"))] == []
    assert sum(url.startswith("file:") for url in requests) == 1  # the page itself
    assert browser.named("Runtime.exceptionThrown") == []
    assert browser.named("Log.entryAdded") == []
    assert browser.named("Page.javascriptDialogOpening") == []


@in_browser
def test_every_figure_and_picture_renders(browser):
    sizes = browser.run(
        "[...document.querySelectorAll('figure svg')].map(s => [s.getBoundingClientRect().width,"
        " s.querySelectorAll('path').length, s.querySelectorAll('text').length, s.getAttribute('aria-label').length])"
    )
    assert len(sizes) == 6
    assert all(width > 200 and paths > 5 and texts > 3 and alt > 20 for width, paths, texts, alt in sizes)
    pictures = browser.run("[...document.images].map(i => i.complete && i.naturalWidth)")
    assert len(pictures) >= 6
    assert all(pictures)
    assert browser.run("document.querySelectorAll('img:not([alt])').length") == 0


@in_browser
def test_a_hostile_name_stays_text(browser):
    assert browser.run("document.querySelectorAll('script').length") == 1
    names = browser.run("[...document.querySelectorAll('#candidates tbody th')].map(c => c.textContent)")
    assert sorted(names) == sorted(f"candidates/{name}" for name in NAMES)


@in_browser
def test_the_table_sorts_both_ways(browser):
    def column():
        cells = "[...document.querySelectorAll('#attacks tbody tr')].map(r => +r.cells[2].dataset.sort)"
        browser.run("document.querySelectorAll('#attacks th button')[2].click()")
        return browser.run(cells)

    rising, falling = column(), column()
    assert rising == sorted(rising)
    assert falling == sorted(rising, reverse=True)
    assert browser.run("document.querySelectorAll('#attacks th')[2].getAttribute('aria-sort')") == "descending"


@in_browser
def test_the_verdict_is_in_sight_on_a_phone(browser):
    browser.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)
    head = browser.run("[...document.querySelectorAll('#candidates thead th')].map(c => c.textContent.trim())")
    assert head[:2] == ["Name", "Verdict"]
    browser.run("document.querySelector('#candidates').closest('details').open = true")
    right = browser.run(
        "[...document.querySelectorAll('#candidates tbody tr')].map(r => r.cells[1].getBoundingClientRect().right)"
    )
    assert 100 < max(right) <= 400


@in_browser
def test_it_fits_a_phone_and_changes_with_the_dark(browser):
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    colors = {}
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        colors[scheme] = browser.run("getComputedStyle(document.querySelector('figure svg text')).fill")
    assert colors["light"] != colors["dark"]


@in_browser
@pytest.mark.parametrize(("width", "beside"), [(1200, True), (400, False)])
def test_the_headline_and_a_figure_share_the_first_screen(browser, width, beside):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    browser.run("scrollTo(0, 0)")
    place = "document.querySelector('%s').getBoundingClientRect().toJSON()"
    title, figure = browser.run(place % "h1"), browser.run(place % ".lead figure svg")
    assert (figure["left"] > title["right"]) == (figure["top"] < title["bottom"]) == beside
    assert figure["height"] > 150
    assert figure["top"] < 800  # pixels, the height of the screen
    pictures = browser.run(place % ".cards img")
    assert not beside or pictures["top"] < 800
