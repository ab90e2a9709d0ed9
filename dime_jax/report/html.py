"""report.html: one page, one file, nothing fetched from outside.

The page is a Jinja template with autoescaping on, so that ids and file names stay text whatever they hold. Its
content security policy allows inline styles, data-URI images and exactly one script, by its hash.
"""

import base64
import hashlib
import importlib.resources
import io
import itertools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

import jinja2
import markupsafe
import numpy as np
from PIL import Image

from dime_jax._util import files as _files
from dime_jax._util.records import plain_object
from dime_jax.attacks import describe_attack
from dime_jax.attacks.dime import FAMILY as DIME
from dime_jax.evidence import Verdict
from dime_jax.findings import wording
from dime_jax.findings.finding import Findings
from dime_jax.findings.results import CandidateRow, DeletionFindings, DeletionRow
from dime_jax.protocol.record import Record
from dime_jax.report import audit_figures, figures, tables

PAGE = "report.html"
MOST_CARDS = 200  # candidates in the gallery; the table has them all

_COARSE = 64  # a picture of fewer pixels a side is shown with sharp pixels
_COLORS = {
    audit_figures.INK: "var(--ink)",
    audit_figures.MUTED: "var(--muted)",
    audit_figures.RULE: "var(--rule)",
    audit_figures.ACCENT: "var(--accent)",
    audit_figures.SECOND: "var(--second)",
    "#ffffff": "var(--paper)",
}
_VERDICT_CLASSES = {Verdict.EVIDENCE: "yes", Verdict.CANNOT_TELL: "unclear", Verdict.NO_EVIDENCE: "no"}


def write_report(record: Record, findings: Findings) -> None:
    """Draw the figures of an audit as figures/*.png and *.svg, and write report.html with them in it."""
    results, pictures = findings.results, _thumbnails(record)
    drawn = audit_figures.draw_all(record, results, findings.candidates)
    page = render(
        "audit.html",
        results=results,
        row=results.deciding_row,
        asked=plain_object(results.settings),
        candidates=sorted(findings.candidates, key=_rank),
        cards=_cards(record, findings.candidates, pictures),
        coarse=max(record.arrays.thumbnails.pictures.shape[1:3]) < _COARSE,
        verdict_classes=_VERDICT_CLASSES,
        figures=_save_figures(drawn, record.directory / "figures"),
        extremes=_extremes(record, pictures),
        ways=tables.ways(results),
        floor=40 if min((row.auc.low for row in results.results), default=1.0) >= 0.4 else 0,
    )
    _files.write_atomically(record.directory / PAGE, page.encode())


def write_comparison(directory: pathlib.Path, results: DeletionFindings, candidates: Sequence[DeletionRow]) -> None:
    """Draw the figure of a deletion check, and write its report.html."""
    with audit_figures.audit_style():
        drawn = audit_figures.draw_change(candidates, results.p_cutoff)
    page = render(
        "compare.html",
        results=results,
        asked=plain_object(results.facts.settings),
        candidates=sorted(candidates, key=lambda row: row.p_before or 2),
        figures=_save_figures([drawn], directory / "figures"),
    )
    _files.write_atomically(directory / PAGE, page.encode())


def render(template: str, **values: object) -> str:
    """Fill in one of the templates beside this module."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dime_jax.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    words: list[Callable[..., str]] = [wording.percent, wording.interval, wording.points, wording.p_text]
    environment.filters.update({function.__name__: _unbroken_words(function) for function in words})
    environment.filters.update(number=_number, odds=_odds, unbroken=_unbroken, asked_captions=wording.asked_captions)
    environment.filters.update(minus=wording.minus, taken_out=wording.taken_out, queries_made=wording.queries_made)
    environment.globals.update(describe_attack=describe_attack, DIME=DIME)
    script = (importlib.resources.files("dime_jax.report") / "page.js").read_text(encoding="utf-8")
    style = (importlib.resources.files("dime_jax.report") / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        script=markupsafe.Markup(script), script_hash=digest, style=markupsafe.Markup(style), **values
    )


def inline_svg(svg: str, name: str, alt: str) -> markupsafe.Markup:
    """Turn an SVG file into part of a page: its colours follow the page's, and its ids are its own.

    `svg` must be ours; `alt` may be anything.
    """
    view_box = re.search(r'viewBox="[-\d. ]+"', svg)
    assert view_box is not None
    body = svg[svg.index(">", view_box.end()) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r"(font: [\d.]+px) [^;\"]*", r"\g<1> var(--sans)", body)
    for color, variable in _COLORS.items():
        body = body.replace(color.lower(), variable)
    head = markupsafe.Markup('<svg {} role="img" aria-label="{}">').format(markupsafe.Markup(view_box.group()), alt)
    return head + markupsafe.Markup(body)


def picture_uri(pixels: np.ndarray) -> str:
    """Return a PNG data URI of an image uint8 [H, W, 3]."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _save_figures(
    drawn: Sequence[audit_figures.AuditFigure], directory: pathlib.Path
) -> list[tuple[audit_figures.AuditFigure, markupsafe.Markup]]:
    directory.mkdir(exist_ok=True)
    shown = []
    with audit_figures.audit_style():
        for one in drawn:
            _, svg = figures.save_figure(one.figure, directory, one.name)
            shown.append((one, inline_svg(svg.read_text(encoding="utf-8"), one.name, one.alt)))
    return shown


def _cards(
    record: Record, candidates: Sequence[CandidateRow], pictures: Mapping[int, str]
) -> list[tuple[CandidateRow, str | None, int]]:
    """Return the first candidates, each with its picture, if there is one, and its place in the order of names."""
    # Those that could not be read have no index, and no picture.
    known = itertools.zip_longest(candidates, record.arrays.candidates.tolist())
    first = sorted(known, key=lambda one: _rank(one[0]))[:MOST_CARDS]
    names = sorted(row.id for row, _ in first)
    return [(row, pictures.get(index), names.index(row.id)) for row, index in first]


def _rank(row: CandidateRow) -> tuple[bool, float]:
    """Rank those with evidence first, then by p-value; those without a p-value come last."""
    return row.verdict != Verdict.EVIDENCE, np.inf if row.p_value is None else row.p_value


def _extremes(record: Record, pictures: Mapping[int, str]) -> list[tuple[str, list[str]]]:
    kept = record.arrays.thumbnails
    rows = (
        ("Members with the strongest evidence", kept.members_found),
        ("Held-out images least like training images", kept.heldout_cleared),
        ("Held-out images most like training images: the false alarms", kept.heldout_mistaken),
    )
    return [(title, [pictures[index] for index in row.tolist()]) for title, row in rows if len(row)]


def _thumbnails(record: Record) -> dict[int, str]:
    pairs = zip(record.arrays.thumbnails.index.tolist(), record.arrays.thumbnails.pictures)
    return {index: picture_uri(pixels) for index, pixels in pairs}


def _unbroken(text: str) -> str:
    """Keep per cent signs on the line of their number."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _unbroken_words(function: Callable[..., str]) -> Callable[..., str]:
    return lambda *arguments: _unbroken(function(*arguments))


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def _odds(p: float) -> str:
    """Return "1 in 250", "45 in 100"."""
    return f"1 in {1 / max(p, 1e-6):,.0f}" if p < 0.1 else f"{100 * p:.0f} in 100"
