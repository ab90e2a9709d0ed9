"""Whole audits beside a reference: what decides, what it costs, what is refused and withheld, and what is said."""

import csv
import json
import shutil

import numpy as np
import pytest
from faulty_server import FaultyServer, metadata
from memoriser import SHAPE, Counting, config, floats, partly, source
from memoriser import contrasts as images

import dime_jax as dj
from dime_jax import auditing, cli, evidence
from dime_jax._util.records import plain
from dime_jax.auditing.models import open_models
from dime_jax.evidence import Judgement, Verdict, Way
from dime_jax.findings import json_files
from dime_jax.loading.opening import OpenedModel
from dime_jax.protocol import beside, stages
from dime_jax.report import html

pytestmark = pytest.mark.usefixtures("small_model_check", "no_figures")

MEMBERS, HELDOUT, OTHERS = images(60, 0), images(110, 1), images(60, 4)
CANDIDATES = np.concatenate([images(10, 2), images(9, 3)])  # ten members
STRENGTH = 0.1
MODEL = partly(np.concatenate([MEMBERS, CANDIDATES[:10]]), STRENGTH, "model")
REFERENCE = partly(OTHERS, STRENGTH, "other")
ROLES = {"heldout": source(HELDOUT, "h"), "candidates": source(CANDIDATES, "c")}
KNOWN = {**ROLES, "members": source(MEMBERS, "m"), "attacks": ("loss", "sima_l4"), "grid": [{"t": 70}, {"t": 120}]}
CLASSES = partly(OTHERS, STRENGTH, "classes")
CLASSES.num_classes = 3


@pytest.fixture
def _no_page(monkeypatch):
    monkeypatch.setattr(html, "write_report", lambda record, findings: record.directory / "report.html")


def audit(directory, model=MODEL, reference=REFERENCE, **settings):
    settings = {**ROLES, "reference": reference, **settings}
    return auditing.audit(config(directory, model=model, **settings)).findings


def rows_of(directory):
    with open(directory / "candidates.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def unknown(tmp_path_factory, small_model_check, no_figures):
    """An audit without known members."""
    directory = tmp_path_factory.mktemp("unknown")
    return directory, audit(directory)


@pytest.fixture(scope="module")
def known(tmp_path_factory, small_model_check, no_figures):
    """An audit with known members."""
    directory = tmp_path_factory.mktemp("known")
    return directory, audit(directory, **KNOWN)


# ------------------------------------------------------------------------------------------------------ what is found


def naive_p(record, index):
    """The rank of one image in a fit over the held-out images and this one: by hand, from tables and pixels."""
    table, images = record.candidates, np.append(record.arrays.heldout, index)
    terms = beside.terms(table, stages.frozen_job(record.decider), reference=True)
    own, theirs = np.split(terms[:, [table.index.tolist().index(image) for image in images]], 2)
    left = []
    for scores, answers in zip(own, theirs):
        if record.facts.way is Way.BESIDE:
            design = np.column_stack([answers, np.ones(len(images))])
            left.append(scores - design @ np.linalg.lstsq(design, scores, rcond=None)[0])
        else:
            known = np.column_stack([record.pictures.of(images), answers])
            left.append(evidence.difficulty_residuals(scores, known, 1))
    residuals = sum(one / one.var() for one in left)
    return np.mean(residuals <= residuals[-1] + 1e-9)


@pytest.mark.parametrize("heldout", [60, 110])
@pytest.mark.usefixtures("_no_page")
def test_p_values_are_ranks_of_what_the_reference_does_not_explain(heldout, unknown, tmp_path):
    """From a hundred held-out images on of what the picture does not, either."""
    if heldout == 110:
        directory, results = unknown
    else:
        directory, results = tmp_path, audit(tmp_path, heldout=source(HELDOUT[:heldout], "h"))
    record, rows = json_files.read_record(directory), rows_of(directory)
    assert results.decided_by.label == "loss_level_beside@2"
    assert results.decided_by.taken_out is (Way.BESIDE_ADJUSTED if heldout == 110 else Way.BESIDE)
    expected = [naive_p(record, index) for index in record.arrays.candidates]
    assert [float(row["p_value"]) for row in rows] == pytest.approx(expected)
    named = np.array([row["verdict"] == Verdict.EVIDENCE for row in rows])
    assert named[:10].sum() >= 8
    assert named[10:].sum() <= 1
    alone = record.decider._replace(adjustment=None)
    scores, others = (
        stages.frozen_scores(record.candidates, alone, side)
        for side in (record.arrays.candidates, record.arrays.heldout)
    )
    expected = [(1 + np.sum(others <= score)) / (1 + len(others)) for score in scores]
    assert [float(row["p_not_used"]) for row in rows] == pytest.approx(expected)
    assert evidence.candidate_verdicts(expected, heldout).rejected.sum() <= 5  # who would be found without one


def test_with_members_calibration_chooses_among_four_ways_to_read_each_attack(known):
    directory, results = known
    frozen = [one for way in Way for one in stages.read_calibrations(directory, way) if one.attack != "level_only"]
    labels = {"loss@1", "sima_l4@1"}
    assert {(one.label, one.way) for one in frozen} == {(label, way) for label in labels for way in Way}
    best = max(frozen, key=lambda one: one.auc)
    assert results.decided_by.taken_out is best.way
    assert best.way.reference
    for label in labels:
        row = results.row(label)
        values = {way: row.read(way).auc.value for way in Way}
        assert values[Way.BESIDE] > 0.95 > values[Way.PLAIN] + 0.2
    assert results.direction.judgement is Judgement.ABOVE
    assert results.reference_direction.judgement is Judgement.UNSURE
    assert results.candidates.likeness.reference_p > 0.01


CASES = {
    "candidates": {},
    "candidates and variations": {"variations": True},
    "members": {**KNOWN, "candidates": None},
    "members and candidates": KNOWN,
    "members, candidates and variations": {**KNOWN, "variations": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("_no_page")
def test_what_either_model_was_asked_is_what_it_counts(case, tmp_path):
    model, reference = Counting(MODEL), Counting(REFERENCE)
    few = {"heldout": source(HELDOUT[:30], "h"), "calibration_size": 12, "test_size": 12}
    candidates = CASES[case].get("candidates", source(CANDIDATES[7:12], "c"))
    settings = {**CASES[case], **few, "candidates": candidates}
    results = audit(tmp_path, model.denoiser, reference.denoiser, **settings)
    assert (results.queries_made, results.reference_queries_made) == (model.images, reference.images)
    assert model.images == reference.images  # whatever the answers are
    again = audit(tmp_path, model.denoiser, reference.denoiser, **settings)
    assert (again.queries_made, again.reference_queries_made) == (model.images, reference.images)


@pytest.mark.parametrize("which", ["model", "reference"])
@pytest.mark.usefixtures("_no_page")
def test_an_audit_that_was_interrupted_finds_the_same(which, tmp_path):
    few = {"heldout": source(HELDOUT[:40], "h"), "candidates": source(CANDIDATES[7:12], "c")}
    whole = [Counting(MODEL), Counting(REFERENCE)]
    audit(tmp_path / "whole", *(one.denoiser for one in whole), **few)
    calls = whole[which == "reference"].calls
    for moment in (2, calls - 1, calls):
        models = [Counting(MODEL), Counting(REFERENCE)]
        models[which == "reference"].interrupted, place = moment, tmp_path / str(moment)
        with pytest.raises(KeyboardInterrupt):
            audit(place, *(one.denoiser for one in models), **few)
        audit(place, *(one.denoiser for one in models), **few)
        assert (place / "candidates.csv").read_bytes() == (tmp_path / "whole" / "candidates.csv").read_bytes()


# -------------------------------------------------------------------------------------------------------- what is said


TAKEN_FOR_GRANTED = (
    "This takes for granted that the reference, other, was trained on none of these images or on candidates and "
    "held-out images alike, and that the held-out images are of the candidates’ kind and style"
)


@pytest.mark.parametrize("members", [False, True])
def test_the_first_screen_says_what_it_takes_for_granted_and_the_page_what_was_asked(members, known, unknown):
    directory, results = known if members else unknown
    assert TAKEN_FOR_GRANTED in results.headline.detail
    assert "minus what the reference" in results.headline.detail
    page = " ".join((directory / "report.html").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ").split())
    first = page[page.index("<body>") : page.index("How to read this")]
    assert TAKEN_FOR_GRANTED in first
    assert "The reference was asked the same with the same noise, so what its score explains is taken out first" in page
    assert "<dt>Reference</dt><dd>other, a Python object; 1000 timesteps; asked the same with the same noise" in page
    made = f"<dt>Queries made</dt><dd>{results.queries_made:,}, and {results.reference_queries_made:,} of the reference"
    assert made in page
    assert '<dt>Fingerprint, reference</dt><dd class="mono">function:other</dd>' in page
    assert "picture alone" not in page.replace("alone, tell", "")
    assert ("Is the score low beside another model’s?" in page) == (not members or results.decided_by.way is not None)
    assert ("AUC, beside, adjusted" in page) == members
    if members:
        assert "(beside the reference)" in page
        assert "The reference by itself tells members from held-out images no more than chance does" in page
    stored = json.loads((directory / "results.json").read_text())
    assert stored["reference"]["name"] == "other"
    assert stored["fingerprints"]["reference"] == stored["reference"]["fingerprint"] == "function:other"
    assert (stored["queries_made"], stored["reference_queries_made"]) == (
        results.queries_made,
        results.reference_queries_made,
    )
    assert plain(json_files.read_results(directory)) == stored


@pytest.mark.usefixtures("_no_page")
def test_the_terminal_says_what_the_reference_cost_and_gates_may_be_on_it(known, capsys):
    directory, results = known
    assert cli.main(["report", str(directory), "--fail-if", "loss@1.beside.auc.low > 0.99999"]) in (0, 1)
    printed = " ".join(capsys.readouterr().out.split())
    cost = f"{results.queries_made:,} queries made, and {results.reference_queries_made:,} of the reference. The report"
    assert cost in printed
    low = results.row("loss@1").beside_adjusted.auc.low
    for bound, code in ((low - 1e-6, 1), (low + 1e-6, 0)):
        condition = f"loss@1.beside_adjusted.auc.low > {bound:.9f}"
        assert cli.main(["report", str(directory), "--json", "--fail-if", condition]) == code
        assert cli.main(["report", str(directory), "--json", "--fail-if", "reference_queries_made < 1"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("condition", ["loss@1.beside.auc.low > 0.6", "reference_queries_made > 9"])
def test_a_gate_on_a_reference_that_there_is_not_is_refused_before_anything_is_opened(condition, capsys):
    assert cli.main(["audit", "--model", "missing", "--attacks", "loss", "--fail-if", condition]) == 2
    assert "there is no reference" in capsys.readouterr().err
    assert cli.main(["audit", "--model", "missing", "--reference", "gone", "--attacks", "loss", "--fail-if", condition])
    assert "no model directory 'missing'" in capsys.readouterr().err


def silent_about(pixels, model=REFERENCE):
    """A reference without an answer to what looks like one of some images."""
    dark = floats(pixels).reshape(len(pixels), -1)

    def eps(x, t):
        answer = np.array(model.eps(x, t))
        flat, scale = np.asarray(x).reshape(len(x), -1), float(model.schedule.sqrt_abar(int(t)))
        distances = np.sum((flat[:, None] / scale - dark[None]) ** 2, axis=-1)
        answer[distances.min(axis=1) < 4.0 if t < 100 else np.zeros(len(x), bool)] = np.nan
        return answer

    return dj.Denoiser.from_function(eps, model.schedule, SHAPE, name="other")


@pytest.mark.usefixtures("_no_page")
def test_images_that_the_reference_is_silent_about_are_not_judged_and_named(tmp_path):
    lost = np.concatenate([CANDIDATES[:1], HELDOUT[5:8]])
    results = audit(tmp_path, reference=silent_about(lost))
    first, *others = rows_of(tmp_path)
    assert (first["verdict"], first["reason"]) == ("cannot tell", "the reference gave no finite answer")
    assert not first["p_value"]
    assert not any(row["reason"] for row in others)
    (warning,) = [one for one in results.warnings if "no finite answer" in one]
    said = "the reference gave no finite answer for 3 held-out images, 1 candidates: nothing is read beside it"
    assert warning == said
    assert results.candidates.heldout == 110 - 3


# ---------------------------------------------------------------------------------------------- what is withheld


@pytest.mark.parametrize("saw", ["held-out images", "candidates"])
@pytest.mark.usefixtures("_no_page")
def test_nobody_is_judged_beside_a_reference_that_saw_one_of_the_sets(saw, tmp_path):
    """Beside one that saw held-out images, every innocent would look like a member."""
    innocents = images(30, 7)
    seen = HELDOUT[:60] if saw == "held-out images" else innocents
    partial = partly(np.concatenate([OTHERS, seen]), STRENGTH, "partial")
    fair = audit(tmp_path / "fair", candidates=source(innocents, "c"))
    assert fair.candidates.withheld is None
    found = audit(tmp_path / "partial", reference=partial, candidates=source(innocents, "c"))
    assert found.candidates.withheld == "the reference tells them from the held-out images by itself"
    assert found.candidates.likeness.reference_p < 0.01 <= fair.candidates.likeness.reference_p
    assert not found.candidates.likeness.set_unlike
    assert found.headline.alarms[0].startswith("The reference by itself, without the model, tells the candidates from")
    assert found.headline.answer.startswith("No verdict: the reference tells them")
    assert {(row["verdict"], row["p_value"]) for row in rows_of(tmp_path / "partial")} == {("cannot tell", "")}


@pytest.mark.usefixtures("_no_page")
def test_a_reference_that_saw_held_out_images_makes_no_model_remember(tmp_path, capsys):
    """The model saw none of the images; beside a reference that saw the held-out ones, members look learned."""
    partial = partly(np.concatenate([OTHERS, HELDOUT]), STRENGTH, "partial")
    innocent = partly(images(60, 8), STRENGTH, "innocent")
    found = audit(tmp_path, innocent, partial, **{**KNOWN, "decide_with": "loss@1"})
    assert found.row("loss@1").beside.auc.low > 0.8  # which means nothing
    assert found.reference_direction.judgement is Judgement.BELOW
    assert not any(auc.beside for auc in found.direction.aucs)  # the witness is not heard beside such a reference
    assert found.direction.judgement is not Judgement.ABOVE
    assert found.candidates.withheld == "the reference knows the held-out images better than the members"
    assert found.headline.answer.startswith("The reference knows the held-out images better than the members: nothing")
    assert found.epsilon_lower_bound is None
    (alarm,) = [one for one in found.headline.alarms if one.startswith("The reference by itself")]
    assert "Either it was trained on some held-out images, too" in alarm
    assert cli.main(["report", str(tmp_path), "--fail-if", "queries_made < 0"]) == 2
    assert "the reference knows the held-out images better than the members (see the headl" in capsys.readouterr().err


@pytest.mark.usefixtures("_no_page")
def test_a_reference_that_saw_members_is_said_and_accuses_nobody_more(tmp_path):
    partial = partly(np.concatenate([OTHERS, MEMBERS]), STRENGTH, "partial")
    found = audit(tmp_path, reference=partial, **{**KNOWN, "decide_with": "loss@1"})
    assert found.reference_direction.judgement is Judgement.ABOVE
    assert any(
        "trained on some members, too, which hides what the model remembers" in one for one in found.headline.alarms
    )


# --------------------------------------------------------------------------------------- a style shift without memory


BASIS = np.linalg.qr(np.random.default_rng(99).normal(size=(64, 64)))[0]
HALF = np.arange(64) < 32
STYLE, OTHER_STYLE, ANY_STYLE = np.where(HALF, 0.22, 0.02), np.where(HALF, 0.02, 0.22), np.full(64, 0.12)


def drawn(count, variances, seed):
    """Pictures with these variances along the axes of a basis that no statistic of pictures knows."""
    axes = np.random.default_rng(seed).normal(size=(count, 64)) * np.sqrt(variances)
    pixels = 127.5 * (1 + (axes @ BASIS.T).reshape(count, *SHAPE))
    return np.uint8(np.clip(np.round(pixels), 0, 255))


def tuned(variances, name):
    """The best denoiser of such pictures, which remembers none: E[ξ | y] = σ (ᾱ C + σ²)⁻¹ y."""
    schedule = dj.linear_schedule()

    def eps(x, t):
        abar, sigma = float(schedule.abar(int(t))), float(schedule.sigma(int(t)))
        along = np.asarray(x).reshape(len(x), -1) @ BASIS
        answer = (sigma * along / (abar * variances + sigma**2)) @ BASIS.T
        return answer.reshape(np.shape(x)).astype(np.float32)

    return dj.Denoiser.from_function(eps, schedule, SHAPE, name=name)


def audit_of_style(directory, base, heldout):
    """Innocents of a style that the model was tuned to, of which it remembers no picture."""
    roles = {"heldout": source(drawn(100, heldout, 0), "h"), "candidates": source(drawn(40, STYLE, 1), "c")}
    return audit(directory, tuned(STYLE, "style"), tuned(base, "base"), **roles)


@pytest.mark.parametrize(
    ("base", "heldout", "why"),
    [
        (ANY_STYLE, 2 * OTHER_STYLE, "as pictures they are unlike the held-out images"),
        (OTHER_STYLE, OTHER_STYLE, "the reference tells them from the held-out images by itself"),
        (OTHER_STYLE, STYLE, None),
        (ANY_STYLE, STYLE, None),
    ],
)
@pytest.mark.usefixtures("_no_page")
def test_innocents_of_a_style_that_the_model_was_tuned_to_are_withheld_or_cleared(base, heldout, why, tmp_path):
    found = audit_of_style(tmp_path, base, heldout)
    assert found.candidates.withheld == why
    assert found.candidates.evidence == 0
    if why is None:
        assert found.candidates.set_test.p_value > 0.05


@pytest.mark.usefixtures("_no_page")
def test_what_no_check_can_see_is_said_on_the_first_screen(tmp_path):
    """Held-out pictures of another style, which neither statistics of pictures nor the base tell from the candidates.

    The model does better on every picture of its style, which is all that anybody would see of a member, too.
    """
    found = audit_of_style(tmp_path, ANY_STYLE, OTHER_STYLE)
    assert found.candidates.withheld is None
    assert found.candidates.evidence > 20  # all of them innocent
    assert (
        "that the held-out images are of the candidates’ kind and style: a model that was tuned to a style does "
        in (found.headline.detail)
    )


# ------------------------------------------------------------------------------------------------ the command line


@pytest.fixture
def files(tmp_path):
    """The images as files."""
    for name, pixels in {"m": MEMBERS[:24], "h": HELDOUT[:24], "c": CANDIDATES[8:12]}.items():
        np.savez(tmp_path / f"{name}.npz", images=pixels)
    return tmp_path


@pytest.fixture
def command(files, monkeypatch, capsys, _no_page):
    """Run a command with models that are known by these names; returns its exit code and what it wrote to each."""
    models = {
        **{"model": MODEL, "other": REFERENCE, "third": partly(OTHERS[:30], STRENGTH, "third"), "classes": CLASSES},
        "small": dj.Denoiser.from_function(lambda x, t: np.tanh(x), dj.linear_schedule(), (4, 4, 1), name="small"),
        "same": dj.Denoiser.from_function(lambda x, t: MODEL.eps(x, t), MODEL.schedule, SHAPE, name="same"),
        "ones": dj.Denoiser.from_function(lambda x, t: np.ones_like(x), MODEL.schedule, SHAPE, name="ones"),
    }

    def open_model(named, **options):
        return OpenedModel(models[named] if isinstance(named, str) else named, "a test")

    monkeypatch.setattr(auditing.models, "open_model", open_model)

    def run(name, *words, roles="hc"):
        spoken = {"m": "members", "h": "heldout", "c": "candidates"}
        of_roles = [word for role in roles for word in (f"--{spoken[role]}", files / f"{role}.npz")]
        code = cli.main([str(word) for word in [name, *words, *of_roles]])
        return (code, *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("small", "the reference must have the image_shape of the model, (8, 8, 1), got (4, 4, 1)"),
        ("classes", "the reference must have the num_classes of the model, None, got 3"),
        ("model", "the reference must be another model, got model itself"),
        ("same", "the reference same answers exactly as the model does: there is nothing to find"),
        ("ones", "the reference ones cannot be used: The model does not predict noise"),
    ],
)
def test_a_reference_that_is_none_is_one_line_and_exit_code_2(reference, message, command, tmp_path):
    code, out, error = command("audit", "--model", "model", "--reference", reference, "--output", tmp_path / "out")
    assert (code, out) == (2, "")
    last = error.splitlines()[-1]
    assert last.startswith(f"dime-jax: {message}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reference_lora", "a.safetensors"], "reference_lora needs a reference to merge it into"),
        (["--reference", "none", "--reference_lora", "a"], "reference_lora needs a reference to merge it into"),
        (["--reference", "none", "--lora", "b", "--reference_lora", "a"], "reference_lora needs a reference to merge"),
        (
            ["--attacks", "loss_level_beside"],
            "attack loss_level_beside asks a second model besides: name one with --ref",
        ),
    ],
)
def test_what_needs_a_reference_says_so_before_anything_is_opened(words, message, command, tmp_path):
    code, out, error = command("audit", "--model", "missing", *words, "--output", tmp_path / "out", roles="mhc")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert message in error


def test_another_reference_does_not_go_on_with_a_run(command, tmp_path):
    run = ["score", tmp_path / "run", "--model", "model", "--attacks", "loss", "--quiet"]
    code, out, _ = command(*run, "--reference", "other", roles="mh")
    assert code == 0
    assert out == "24 images of the calibration half scored, 144 queries made, and 144 of the reference\n"
    assert command("calibrate", tmp_path / "run", roles="")[0] == 0
    for other in (["--reference", "third"], []):
        code, _, error = command(*run, *other, "--half", "test", roles="mh")
        assert code == 2
        assert "holds a run with another seed, reference, other attacks or settings" in error.splitlines()[-1]
    audit_words = ["audit", "--model", "model", "--output", tmp_path / "out", "--quiet"]
    assert command(*audit_words, "--reference", "other")[0] == 0
    code, _, error = command(*audit_words, "--reference", "third")
    assert code == 2
    assert "cannot continue the score table" in error.splitlines()[-1]
    assert "model was 'function:other', now 'function:third'" in error.splitlines()[-1]


def test_the_stages_one_by_one_give_the_numbers_of_the_audit(command, tmp_path):
    few = ["--model", "model", "--reference", "other", "--attacks", "loss", "sima_l4", "--quiet"]
    assert command("audit", *few, "--output", tmp_path / "audit", roles="mh")[0] == 0
    assert command("score", tmp_path / "run", *few, roles="mh")[0] == 0
    code, out, _ = command("calibrate", tmp_path / "run", roles="")
    assert code == 0
    assert "loss: {'t': " in out
    assert command("score", tmp_path / "run", *few, "--half", "test", roles="mh")[0] == 0
    code, out, _ = command("evaluate", tmp_path / "run", "--json", roles="")
    assert code == 0
    staged, whole = json.loads(out), json.loads((tmp_path / "audit" / "results.json").read_text())
    for name in ("direction", "reference_direction", "fingerprints", "queries_made", "reference_queries_made"):
        assert staged[name] == whole[name]
    undated = [[{**row, "seconds_per_image": 0} for row in found["results"]] for found in (staged, whole)]
    assert undated[0] == undated[1]
    assert all({"adjusted", "beside", "beside_adjusted"} < row.keys() for row in undated[0])
    code, out, _ = command("evaluate", tmp_path / "run", roles="")
    assert out.count("beside") == 4  # columns, whose headings are broken


def test_a_comparison_takes_no_reference(command, tmp_path):
    words = ["compare", "--before", "model", "--after", "third", "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as error:
        command(*words, "--reference", "other")
    assert error.value.code == 2
    for settings in ({"reference": "other"}, {"reference": "other", "reference_lora": ("a",)}):
        with pytest.raises(ValueError, match="a comparison takes no reference: the models before and after are compar"):
            auditing.compare(config(tmp_path / "out", model=MODEL, **ROLES, **settings), "third")
    use = dj.UseOptions(lora=("a",))
    with pytest.raises(ValueError, match="lora would be merged into both models that are compared"):
        auditing.compare(config(tmp_path / "out", model=MODEL, **ROLES, use=use), "third")


def test_help_has_both_options_under_a_heading_of_their_own(capsys):
    for name in ("audit", "score"):
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        text = capsys.readouterr().out
        under = text[text.index("\na second model:\n") :].removeprefix("\na second model:\n")
        assert [line.split()[0] for line in under[: under.index("\n\n")].splitlines() if line.startswith("  --")] == [
            "--reference",
            "--reference_lora",
        ]


@pytest.mark.parametrize("damage", ["gone", "bit", "none left"])
@pytest.mark.parametrize("table", ["reference/calibration", "reference/test", "reference/candidates/{label}"])
def test_a_finished_audit_whose_reference_was_damaged_is_named(table, damage, known, tmp_path, capsys):
    directory, results = known
    shutil.copytree(directory, tmp_path / "copy")
    place = tmp_path / "copy" / table.format(label=results.decided_by.label)
    file = place / ("scores.parquet" if damage == "bit" else "manifest.json")
    if damage == "none left":
        shutil.rmtree(tmp_path / "copy" / "reference")
    elif damage == "gone":
        shutil.rmtree(place)
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    assert cli.main(["report", str(tmp_path / "copy")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert ("reference/model_check.json" if damage == "none left" else str(file)) in error


# ------------------------------------------------------------------------------------------ hosted models, and LoRAs


@pytest.mark.usefixtures("_no_page")
def test_a_hosted_reference_that_changed_is_noticed(tmp_path):
    few = {"heldout": source(HELDOUT[:24], "h"), "candidates": source(CANDIDATES[8:12], "c")}
    with FaultyServer(said=metadata(SHAPE), model=lambda x, t: np.asarray(REFERENCE.eps(x, int(t[0])))) as server:
        found = audit(tmp_path, reference=server.url, **few)
        assert found.reference_queries_made == sum(server.received)
        audit(tmp_path, reference=server.url, **few)
        server.model = lambda x, t: np.asarray(REFERENCE.eps(x, int(t[0]))) * np.float32(0.99)
        with pytest.raises(ValueError, match="m is not the model that this run was started with") as error:
            audit(tmp_path, reference=server.url, **few)
        assert "\n" not in str(error.value)


def test_a_token_goes_to_one_server_only(tmp_path, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "secret")
    remote = dj.RemoteOptions(token_env="A_TOKEN")
    with FaultyServer(said=metadata(SHAPE)) as one, FaultyServer(said=metadata(SHAPE)) as two:
        with pytest.raises(ValueError, match="both models must be on one server if a token is given"):
            open_models(config(tmp_path, model=one.url, reference=two.url, remote=remote, **ROLES))
        assert (one.connections, two.connections) == (0, 0)
        model, reference = open_models(config(tmp_path, model=MODEL, reference=two.url, remote=remote, **ROLES))
        assert model.denoiser is MODEL
        reference.denoiser.eps(np.zeros((1, *SHAPE), np.float32), 5)
        assert set(two.authorizations) == {"Bearer secret"}
        assert one.connections == 0
        # No token was asked for: two servers are two servers.
        opened = open_models(config(tmp_path, model=one.url, reference=two.url, **ROLES))
        assert [of.denoiser.name for of in opened] == ["m", "m"]


@pytest.mark.parametrize(
    ("settings", "model", "reference"),
    [
        ({"use": dj.UseOptions(lora=("a",))}, {"lora": ("a",)}, {"lora": ()}),
        (
            {"use": dj.UseOptions(lora=("a", "b"), lora_scale=(1.0, 0.6)), "reference_lora": ("b:0.6",)},
            {"lora": ("a", "b"), "lora_scale": (1.0, 0.6)},
            {"lora": ("b",), "lora_scale": (0.6,)},
        ),
        (
            {"use": dj.UseOptions(lora=("a",), latent="sample"), "reference": "named"},
            {"lora": ("a",), "latent": "sample"},
            {"lora": (), "latent": "sample"},
        ),
        ({"reference": "named", "reference_lora": ("x.st", "y:z:-2")}, {"lora": ()}, {"lora": ("x.st", "y:z")}),
        ({"reference": "named", "conversion": dj.ConversionOptions(schedule="cosine")}, {"schedule": "cosine"}, {}),
        ({"use": dj.UseOptions(lora=("a",)), "reference": "none"}, {"lora": ("a",)}, None),
    ],
)
def test_a_lora_reaches_only_the_model_that_it_was_given_to(settings, model, reference, tmp_path, monkeypatch):
    opened = []

    def open_model(named, **options):
        opened.append((named, options))
        return OpenedModel(MODEL, "a test")

    monkeypatch.setattr(auditing.models, "open_model", open_model)
    found = open_models(config(tmp_path, model="mine", **ROLES, **settings))
    assert (found[1] is None) == (reference is None) == (len(opened) == 1)
    for (_, options), expected in zip(opened, (model, reference)):
        assert {name: options[name] for name in expected} == expected
    if reference is not None:
        assert opened[1][0] == settings.get("reference", "mine")
        if "reference" in settings:
            assert opened[1][1]["schedule"] is None
