"""Images as they come: what cannot be used is found before any query, listed, and stops nobody else's verdict."""

import csv
import io
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from memoriser import config, floats, images, memoriser, source
from PIL import Image

import dime_jax as dj
from dime_jax import auditing
from dime_jax.auditing import images as audit_images
from dime_jax.data.role_checks import CandidateCopy
from dime_jax.report import html

MEMBERS, HELDOUT, CANDIDATES = images(60, 0), images(60, 21), images(12, 2)
LOST = CANDIDATES[10:11]
MODEL = memoriser(np.concatenate([MEMBERS, CANDIDATES[:6]]))


@pytest.fixture
def _no_page(monkeypatch):
    monkeypatch.setattr(html, "write_report", lambda record, findings: record.directory / "report.html")


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def encoded(pixels, format="PNG", mode=None, **options):
    buffer = io.BytesIO()
    image = Image.fromarray(pixels[..., 0])
    (image if mode is None else image.convert(mode)).save(buffer, format, **options)
    return buffer.getvalue()


def broken(pixels, bad, name):
    """A source of which some images cannot be read."""

    def read(index):
        if index in bad:
            raise dj.data.BadImage("is broken")
        return pixels[index]

    return dj.data.Source(name, dj.data.from_images(pixels, name=name).ids, read)


def recording(calls):
    def eps(x, t):
        calls.append(len(x))
        return MODEL.eps(x, t)

    return dj.Denoiser.from_function(eps, MODEL.schedule, MODEL.image_shape, name="recording")


def without_answer(pixels):
    """The model, with NaN in the place of its answer about images that are near to these."""
    known = floats(pixels).reshape(len(pixels), -1)

    def eps(x, t):
        flat = np.asarray(x).reshape(len(x), -1) / float(MODEL.schedule.sqrt_abar(int(t)))
        lost = np.min(np.mean((flat[:, None] - known) ** 2, axis=-1), axis=1) < 0.1
        return np.where(lost[:, None, None, None], np.nan, MODEL.eps(x, t))

    return dj.Denoiser.from_function(eps, MODEL.schedule, MODEL.image_shape, name="without answers")


# ------------------------------------------------------------------------------------------------- a folder of anything


def hostile_folder(root):
    """Candidates as a stranger sends them; returns the names of the readable ones."""
    root.mkdir()
    rotated = Image.Exif()
    rotated[0x112] = 6
    frames = [Image.fromarray(one[..., 0]) for one in images(3, 5)]
    animation = io.BytesIO()
    frames[0].save(animation, "GIF", save_all=True, append_images=frames[1:])
    sixteen = io.BytesIO()
    Image.fromarray(images(1, 6)[0, ..., 0].astype(np.uint16) * 257).save(sixteen, "PNG")
    large = images(1, 7, (64, 64, 1))[0]
    bad = {
        "empty.png": b"",
        "truncated.jpg": encoded(large, "JPEG")[:600],
        "animated.gif": animation.getvalue(),
        "cmyk.jpg": encoded(CANDIDATES[0], "JPEG", "CMYK"),
        "sixteen.png": sixteen.getvalue(),
        "=cmd|' /C calc'!A0.png": b"no image",
    }
    good = {
        "rotated.jpg": encoded(CANDIDATES[6], "JPEG", exif=rotated),
        "snow\N{SNOWMAN}.png": encoded(CANDIDATES[0]),
        "<img src=x onerror=alert(1)>.png": encoded(CANDIDATES[1]),
        "a/b/nested.png": encoded(CANDIDATES[7]),
        "line\nbreak.png": encoded(CANDIDATES[8]),
        "copy.png": encoded(HELDOUT[5]),
        "lost.png": encoded(LOST[0]),
    }
    for name, content in {**bad, **good, "notes.txt": b"hello", "a/README": b"hello"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    os.mkfifo(root / "x.png")
    (root / "loop.png").symlink_to("loop.png")
    (root / "dir.png").mkdir()
    with open(os.fsencode(root) + b"/\xff.png", "wb") as file:
        file.write(encoded(CANDIDATES[9]))
    return [*good, r"\xff.png"]


def known_folder(root, pixels):
    """60 images, and 2 files that cannot be read."""
    root.mkdir()
    for number, one in enumerate(pixels):
        (root / f"{number:03}.png").write_bytes(encoded(one))
    os.mkfifo(root / "pipe.png")
    (root / "empty.jpg").write_bytes(b"")


AUDIT = """
import json, pathlib, sys
import dime_jax as dj
from dime_jax import auditing
import test_audit_bad_images as test
root = pathlib.Path(sys.argv[1])
listed = []

def eps(x, t):
    listed.append((root / "out" / "unusable_images.csv").is_file())
    return lossy.eps(x, t)

lossy = test.without_answer(test.LOST)
model = dj.Denoiser.from_function(eps, test.MODEL.schedule, test.MODEL.image_shape)
auditing.audit(
    test.config(
        root / "out",
        model=model,
        level=0.15,
        **{role: str(root / role) for role in ("members", "heldout", "candidates")},
    )
)
print(json.dumps([len(listed), all(listed)]))
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    known_folder(root / "members", MEMBERS)
    known_folder(root / "heldout", HELDOUT)
    good = hostile_folder(root / "candidates")
    here = pathlib.Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])}
    # In another process: whoever opens a pipe would wait for ever.
    done = subprocess.run(
        [sys.executable, "-c", AUDIT, str(root)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return root / "out", good, json.loads(done.stdout)


UNREADABLE = {
    "empty.png": "not one of PNG",
    "truncated.jpg": "truncated",
    "animated.gif": "more than one frame",
    "cmyk.jpg": "is CMYK",
    "sixteen.png": "more than 8 bits",
    "=cmd|' /C calc'!A0.png": "not one of PNG",
    "x.png": "is a named pipe",
    "loop.png": "Too many levels",
    "dir.png": "is a folder",
}


def test_every_readable_candidate_of_a_hostile_folder_gets_a_verdict(hostile):
    out, good, _ = hostile
    found = {row["id"].removeprefix("candidates/"): row for row in rows(out / "candidates.csv")}
    lost = found.pop("lost.png")
    assert (lost["verdict"], lost["reason"]) == ("cannot tell", "the model gave no finite answer")
    readable = [row for row in found.values() if not row["reason"]]
    names = {name.replace("\n", r"\n") for name in good} - {"lost.png"}
    assert {row["id"] for row in readable} == {f"candidates/{name}" for name in names}
    assert all(row["p_value"] and row["verdict"] for row in readable)
    assert found["snow\N{SNOWMAN}.png"]["verdict"] == "evidence of membership"
    assert found["<img src=x onerror=alert(1)>.png"]["verdict"] == "evidence of membership"


def test_every_other_candidate_gets_a_row_with_the_reason(hostile):
    out, _, _ = hostile
    table = rows(out / "candidates.csv")
    unread = {row["id"].removeprefix("candidates/"): row for row in table if "used" in row["reason"]}
    assert set(unread) == set(UNREADABLE)
    for name, reason in UNREADABLE.items():
        assert unread[name]["verdict"] == "cannot tell"
        assert unread[name]["reason"].startswith("could not be used: ")
        assert reason in unread[name]["reason"]
        assert unread[name]["p_value"] == unread[name]["score"] == ""


def test_all_unusable_files_are_listed_before_the_first_query(hostile):
    out, _, (calls, listed_before) = hostile
    assert calls > 0
    assert listed_before
    listed = [(row["role"], row["id"]) for row in rows(out / "unusable_images.csv")]
    known = [(role, f"{role}/{name}") for role in ("members", "heldout") for name in ("empty.jpg", "pipe.png")]
    assert sorted(listed) == sorted([*known, *(("candidates", f"candidates/{name}") for name in UNREADABLE)])
    results = json.loads((out / "results.json").read_text())
    (warning,) = [one for one in results["warnings"] if "cannot be used" in one]
    assert warning.startswith(
        "13 images cannot be used (2 members, 2 held-out images, 9 candidates; unusable_images.csv"
    )
    assert "members/pipe.png: is a named pipe, not an image file; " in warning
    assert warning.endswith("; and 3 more")
    assert warning.isprintable()


def test_unusable_images_are_counted_by_role(hostile):
    out, good, _ = hostile
    results = json.loads((out / "results.json").read_text())
    counts = results["images"]
    assert counts["unusable"] == {"members": 2, "heldout": 2, "candidates": 9}
    assert (counts["members"], counts["heldout"], counts["candidates"]) == (60, 59, len(good) + 9)
    found = results["candidates"]
    assert found["count"] == len(good) + 9 == found["evidence"] + found["no_evidence"] + found["cannot_tell"]
    # More than a tenth got no answer, so that the set is not judged by the others.
    words = "9 of 17 candidates could not be used, and the model gave no finite answer for 1"
    assert found["set_withheld"] == words
    assert found["set_test"] is None


def test_the_report_shows_who_could_not_be_read_or_answered_and_copies(hostile):
    out, _, _ = hostile
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("could not be used: ") == 2 * 9  # cards and table
    assert "<dt>Could not be used</dt><dd>2 members, 2 held-out, 9 candidates</dd>" in page
    assert "<dt>No finite answer</dt><dd>0 members, 0 held-out, 1 candidates</dd>" in page
    assert page.count('<span class="why">the model gave no finite answer</span>') == 1
    assert '<span class="why">exact copy of heldout/005.png</span>' in page
    assert "<img src=x" not in page


# ------------------------------------------------------------------------------------------------------- the 10 % rule


@pytest.mark.parametrize(("role", "words"), [("members", "members"), ("heldout", "held-out images")])
def test_more_than_a_tenth_of_a_known_role_refuses_the_audit_before_any_query(tmp_path, role, words):
    calls = []
    roles = {"members": source(MEMBERS, "m"), "heldout": source(HELDOUT, "h")}
    roles[role] = broken(roles_pixels(role), range(7), "b")
    message = f"too many {words} that cannot be used: must be <= 10% of 60, got 7, such as {role}/b-00000: is broken"
    with pytest.raises(ValueError, match=message) as error:
        auditing.audit(config(tmp_path, model=recording(calls), **roles))
    assert "\n" not in str(error.value)
    assert calls == []
    assert len(rows(tmp_path / "unusable_images.csv")) == 7


def roles_pixels(role):
    return MEMBERS if role == "members" else HELDOUT


def test_a_tenth_of_a_known_role_is_left_out_and_the_list_goes_when_it_is_mended(tmp_path):
    roles = {"members": source(MEMBERS, "m"), "candidates": source(CANDIDATES, "c")}
    found = audit_images.open_images(
        config(tmp_path, heldout=broken(HELDOUT, {0, 5, 7, 30, 31, 59}, "h"), **roles), MODEL
    )
    assert len(found.split.heldout) == 54
    assert not {60 + 0, 60 + 5, 60 + 7} & set(found.split.heldout.tolist())
    assert [one.id for one in found.unusable[:2]] == ["heldout/h-00000", "heldout/h-00005"]
    assert (tmp_path / "unusable_images.csv").exists()
    found = audit_images.open_images(config(tmp_path, heldout=source(HELDOUT, "h"), **roles), MODEL)
    assert found.unusable == []
    assert not (tmp_path / "unusable_images.csv").exists()


def test_candidates_none_of_which_can_be_used_are_one_line(tmp_path):
    roles = {"heldout": source(HELDOUT, "h"), "candidates": broken(CANDIDATES, range(12), "c")}
    with pytest.raises(ValueError, match="none of the 12 candidates can be used, such as candidates/c-00000: is br"):
        audit_images.open_images(config(tmp_path, **roles), MODEL)


def test_candidates_that_the_model_cannot_take_stop_nobody(tmp_path):
    colourful = images(3, 9, (8, 8, 3))
    small = images(2, 10, (6, 8, 1))
    pictures = [*CANDIDATES[:4], *colourful, *small]
    candidates = dj.data.Source("c", [f"c{i}" for i in range(9)], pictures.__getitem__)
    found = audit_images.open_images(config(tmp_path, heldout=source(HELDOUT, "h"), candidates=candidates), MODEL)
    assert [found.source.ids[i] for i in found.candidates] == [f"candidates/c{i}" for i in range(4)]
    assert [one.reason.split(",")[0] for one in found.unusable] == ["is coloured"] * 3 + ["is 6x8"] * 2


def test_every_image_is_read_once(tmp_path):
    reads = []

    def counting(pixels, name):
        def read(index):
            reads.append((name, index))
            return pixels[index]

        return dj.data.Source(name, dj.data.from_images(pixels, name=name).ids, read)

    roles = {"members": (MEMBERS, "m"), "heldout": (HELDOUT, "h"), "candidates": (CANDIDATES, "c")}
    audit_images.open_images(config(tmp_path, **{role: counting(*given) for role, given in roles.items()}), MODEL)
    assert len(reads) == len(set(reads)) == 132


# ------------------------------------------------------------------------------------------------------------ answers


@pytest.mark.usefixtures("_no_page")
def test_images_without_a_finite_answer_are_counted_and_said(tmp_path):
    model = without_answer(np.concatenate([MEMBERS[:3], HELDOUT[:2], CANDIDATES[4:9]]))
    roles = {"members": source(MEMBERS, "m"), "heldout": source(HELDOUT, "h"), "candidates": source(CANDIDATES, "c")}
    results = auditing.audit(config(tmp_path, model=model, level=0.15, attacks=("sima_l4",), **roles)).results
    assert results["images"]["no_finite_answer"] == {"members": 3, "heldout": 2, "candidates": 5}
    said = "the model gave no finite answer for 3 members, 2 held-out images, 5 candidates"
    assert any(warning.startswith(said) for warning in results["warnings"])
    found = rows(tmp_path / "candidates.csv")
    reasons = [row["reason"] for row in found]
    assert reasons == [""] * 4 + ["the model gave no finite answer"] * 5 + [""] * 3
    assert {row["verdict"] for row in found[4:9]} == {"cannot tell"}
    assert {row["verdict"] for row in found[:4]} == {"evidence of membership"}


@pytest.mark.usefixtures("_no_page")
def test_without_members_most_candidates_may_go_without_an_answer(tmp_path):
    roles = {"heldout": source(HELDOUT, "h"), "candidates": source(CANDIDATES, "c")}
    results = auditing.audit(config(tmp_path, model=without_answer(CANDIDATES[1:]), level=0.2, **roles)).results
    assert results["images"]["no_finite_answer"] == {"members": 0, "heldout": 0, "candidates": 11}
    assert (results["candidates"]["evidence"], results["candidates"]["cannot_tell"]) == (1, 11)


def test_a_deletion_check_gives_unreadable_candidates_a_row(tmp_path):
    roles = {"heldout": source(HELDOUT, "h"), "candidates": broken(CANDIDATES, {2}, "c")}
    after = memoriser(MEMBERS, name="after")
    result = auditing.compare(config(tmp_path, model=MODEL, **roles), after)
    found = rows(tmp_path / "candidates.csv")
    assert len(found) == 12
    assert (found[-1]["id"], found[-1]["reason"]) == ("candidates/c-00002", "could not be used: is broken")
    assert found[-1]["flagged_before"] == found[-1]["flagged_after"] == "False"
    assert "could not be used: is broken" in result.report.read_text(encoding="utf-8")
    assert result.results["facts"]["images"]["unusable"]["candidates"] == 1


# ------------------------------------------------------------------------------------------------------ copies, sizes


def near(pixels):
    """Copies that differ by at most 3 of 255."""
    noise = np.random.default_rng(0).integers(-3, 4, pixels.shape)
    return np.clip(pixels + noise, 0, 255).astype(np.uint8)


@pytest.mark.usefixtures("_no_page")
def test_copies_of_candidates_are_named(tmp_path):
    pixels = np.concatenate([CANDIDATES[:6], near(MEMBERS[4:5]), HELDOUT[9:10], near(CANDIDATES[3:4])])
    roles = {"members": source(MEMBERS, "m"), "heldout": source(HELDOUT, "h"), "candidates": source(pixels, "c")}
    settings = config(tmp_path, model=MODEL, attacks=("sima_l4",), **roles)
    expected = [
        CandidateCopy("candidates/c-00003", "candidates", "candidates/c-00008", "near"),
        CandidateCopy("candidates/c-00006", "members", "members/m-00004", "near"),
        CandidateCopy("candidates/c-00007", "heldout", "heldout/h-00009", "exact"),
        CandidateCopy("candidates/c-00008", "candidates", "candidates/c-00003", "near"),
    ]
    assert audit_images.open_images(settings, MODEL).duplicates.candidates == tuple(expected)
    results = auditing.audit(settings).results
    assert results["duplicates"]["candidates"] == [copy._asdict() for copy in expected]
    notes = {row["id"]: row["note"] for row in rows(tmp_path / "candidates.csv")}
    assert notes["candidates/c-00006"] == "near copy of members/m-00004"
    assert notes["candidates/c-00007"] == "exact copy of heldout/h-00009"
    assert notes["candidates/c-00008"] == "near copy of another candidate, candidates/c-00003"
    assert notes["candidates/c-00000"] == ""
    assert any(warning.startswith("2 candidates are copies or near copies of other") for warning in results["warnings"])


def test_a_few_candidates_that_are_known_are_named_and_not_refused(tmp_path):
    roles = {"members": source(MEMBERS, "m"), "heldout": source(HELDOUT, "h")}
    found = audit_images.open_images(config(tmp_path, candidates=source(MEMBERS[:3], "c"), **roles), MODEL)
    assert [copy.other for copy in found.duplicates.candidates] == [f"members/m-0000{i}" for i in range(3)]
    assert len(found.split.member) == 57


@pytest.mark.parametrize(("shape", "said"), [((8, 8, 1), False), ((16, 12, 1), True)])
def test_candidates_in_sizes_of_their_own_are_said(tmp_path, shape, said):
    odd = images(3, 11, shape)
    candidates = dj.data.Source("c", [f"c{i}" for i in range(9)], [*CANDIDATES[:6], *odd].__getitem__)
    roles = {"members": source(MEMBERS, "m"), "heldout": source(HELDOUT, "h"), "candidates": candidates}
    found = audit_images.open_images(config(tmp_path, **roles), MODEL)
    warning = "3 of 9 candidates come in sizes that no held-out image has, so they were"
    assert any(one.startswith(warning) for one in found.warnings) == said
