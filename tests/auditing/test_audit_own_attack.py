"""A user's own attack in a file outside the package, by the documented route, from the command to the page."""

import json
import pathlib
import re
import shutil
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from memoriser import SCHEDULE, SHAPE, config, floats, images, memoriser, source

import dime_jax as dj
from dime_jax import attacks, auditing, cli
from dime_jax.attacks import modules, registry
from dime_jax.loading import opening
from dime_jax.report import html

pytestmark = pytest.mark.usefixtures("no_figures")

GUIDE = (pathlib.Path(__file__).parents[2] / "docs" / "add_attack.md").read_text(encoding="utf-8")
AS_CALLS, AS_FUNCTION = re.findall(r"```py\n(.*?)```", GUIDE, re.DOTALL)
COUNTED = """
TRACES = []


def counted(name):
    method = getattr(Nudged, name)

    def run(self, *arguments):
        TRACES.append(name)
        return method(self, *arguments)

    return run


Nudged.query, Nudged.reduce = counted("query"), counted("reduce")
"""
MEMBERS, HELDOUT = images(60, 0), images(60, 1)
ROLES = {
    "members": source(MEMBERS, "m"),
    "heldout": source(HELDOUT, "h"),
    "candidates": source(np.concatenate([images(6, 2), images(6, 3)]), "c"),
}
TRAIN = np.concatenate([MEMBERS, images(6, 2)])


def compiled_memoriser():
    """`memoriser` in JAX: the engine compiles it."""

    def apply(params, x, t, label):
        train, scales, sigmas = params
        flat = x.reshape(len(x), -1)
        distances = jnp.sum((flat[:, None] - scales[t] * train[None]) ** 2, axis=-1)
        nearest = scales[t] * train[jnp.argmin(distances, axis=1)]
        return ((flat - nearest) / sigmas[t]).reshape(x.shape)

    tables = (jnp.asarray(SCHEDULE.sqrt_abar_table), jnp.asarray(SCHEDULE.sigma_table))
    params = (jnp.asarray(floats(TRAIN).reshape(len(TRAIN), -1)), *tables)
    return dj.Denoiser(apply, params, SCHEDULE, SHAPE, fingerprint="compiled memoriser", name="compiled")


def forget(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(attacks.BUILT_IN))
    monkeypatch.setattr(modules, "_LOADED", {})


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    forget(monkeypatch)


@pytest.fixture(scope="module")
def nudge(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine") / "nudge.py"
    path.write_text(AS_CALLS + COUNTED, encoding="utf-8")
    return path


class Finished(NamedTuple):
    directory: pathlib.Path
    results: dict
    traces: list


def audited(directory, nudge, model):
    settings = {"attacks": ("dime", "nudge"), "attack_module": nudge, "decide_with": "nudge@3"}
    return auditing.audit(config(directory, model=model, queries=(11,), **settings, **ROLES)).results


@pytest.fixture(scope="module")
def finished(tmp_path_factory, nudge):
    """An audit with the file, of which nothing is known any more when it is done."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        forget(monkeypatch)
        directory = tmp_path_factory.mktemp("out")
        results = audited(directory, nudge, compiled_memoriser())
        return Finished(directory, results, list(attacks.get_attack("nudge").recipe.__globals__["TRACES"]))


def test_it_is_compiled_once(finished):
    assert finished.traces == ["query", "reduce"]


def test_it_stands_in_results_and_page_under_its_family(finished, nudge):
    (row,) = [row for row in finished.results["results"] if row["attack"] == "nudge"]
    assert (row["queries_per_image"], row["auc"]["value"]) == (3, 1.0)
    assert row["setting"]["t"] in (70, 120)
    assert finished.results["settings"]["attack_module"] == str(nudge)
    assert finished.results["decided_by"]["label"] == "nudge@3"
    page = (finished.directory / "report.html").read_text(encoding="utf-8")
    assert 'data-family="Nudges" title="Your name, 2026">Nudge, Nudges<' in page
    assert 'data-family="DIME"' in page


def test_it_is_a_rival_of_dime(finished):
    (comparison,) = finished.results["comparisons"]
    assert (comparison["budget"], comparison["dime"], comparison["baseline"]) == (11, "dime@11", "nudge@3")


def test_a_plain_function_is_asked_the_same(tmp_path, finished, nudge, monkeypatch):
    monkeypatch.setattr(html, "write_report", lambda record, findings: record.directory / "report.html")
    plain = audited(tmp_path, nudge, memoriser(TRAIN))
    assert [row["auc"] for row in plain["results"]] == [row["auc"] for row in finished.results["results"]]
    recognised = 2  # a function is known by its answer to a fixed question, asked twice
    assert plain["queries_made"] == finished.results["queries_made"] + recognised


def test_a_file_that_has_changed_does_not_continue_its_audit(finished, nudge, tmp_path, monkeypatch):
    directory, edited = shutil.copytree(finished.directory, tmp_path / "out"), tmp_path / "nudge.py"
    edited.write_text(nudge.read_text(encoding="utf-8") + "# another formula\n", encoding="utf-8")
    assert audited(directory, nudge, compiled_memoriser()) == finished.results
    forget(monkeypatch)
    with pytest.raises(ValueError, match=r"cannot continue the score table .*: attack_files was \{'nudge': '") as error:
        audited(directory, edited, compiled_memoriser())
    assert "\n" not in str(error.value)


def test_the_report_runs_the_file_again(finished, tmp_path, capsys):
    directory = shutil.copytree(finished.directory, tmp_path / "out")
    page = (directory / "report.html").read_bytes()
    assert cli.main(["report", str(directory)]) == 0
    assert re.search(r"Nudge, Nudges\W+3 ", capsys.readouterr().out)
    assert (directory / "report.html").read_bytes() == page
    assert "nudge" in attacks.attack_names()


def test_the_report_works_without_the_file(finished, nudge, tmp_path, capsys):
    directory, before = shutil.copytree(finished.directory, tmp_path / "out"), finished.results
    away = nudge.rename(tmp_path / "away.py")
    try:
        assert cli.main(["report", str(directory)]) == 0
    finally:
        away.rename(nudge)
    assert re.search(r"nudge\W+3 ", capsys.readouterr().out)
    after = json.loads((directory / "results.json").read_text())
    for name in ("results", "candidates", "decided_by", "comparisons", "blind_baseline"):
        assert after[name] == before[name]
    (warning,) = [warning for warning in after["warnings"] if warning not in before["warnings"]]
    assert warning == f"attacks of {nudge} are shown by their names only: it is not there"
    assert 'data-family="nudge" title="">nudge<' in (directory / "report.html").read_text(encoding="utf-8")
    assert "nudge" not in attacks.attack_names()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"path": "{inside}"}, "it is in the directory of the run, from which nothing is executed"),
        ({"path": "{link}"}, "it is in the directory of the run"),
        ({"path": "nudge.py"}, "it is not there"),
        ({"digest": "00"}, "it has changed since"),
        ({"owner": -1}, "it belongs to another user"),
    ],
)
def test_a_finished_run_cannot_make_us_run_just_any_file(tmp_path, nudge, monkeypatch, change, reason):
    directory = tmp_path / "out"
    directory.mkdir()
    inside = pathlib.Path(shutil.copy(nudge, directory))
    link = tmp_path / "link.py"
    link.symlink_to(inside)
    module = modules.describe_module(nudge)
    path = change.get("path", module.path).format(inside=inside, link=link)
    module = modules.ModuleFacts(path, change.get("digest", module.digest))
    if "owner" in change:
        monkeypatch.setattr(modules.os, "getuid", lambda: change["owner"], raising=False)
    monkeypatch.chdir(nudge.parent)
    forget(monkeypatch)
    (warning,) = modules.load_again(module, directory)
    assert reason in warning
    assert "nudge" not in attacks.attack_names()
    assert modules.load_again(None, directory) == []


def test_stages_of_the_command_line(tmp_path, nudge, monkeypatch, capsys):
    opened = opening.OpenedModel(memoriser(TRAIN), "a test", {})
    monkeypatch.setattr(opening, "open_model", lambda *arguments, **options: opened)
    run, few = str(tmp_path / "run"), ["--calibration_size", "20", "--test_size", "20"]
    digits = ["--images", "digits", "--split", str(tmp_path / "split.npz"), "--model", "digits"]
    np.savez(tmp_path / "split.npz", mia_train_idxs=np.arange(0, 200, 2), mia_eval_idxs=np.arange(1, 200, 2))
    option = ["--attack-module", str(nudge), "--attacks", "nudge"]
    assert cli.main(["score", run, *digits, *option, *few]) == 0
    forget(monkeypatch)
    assert cli.main(["calibrate", run]) == 2
    assert "unknown attack 'nudge'" in capsys.readouterr().err
    assert cli.main(["calibrate", run, "--attack-module", str(nudge)]) == 0
    assert "nudge: {'t': " in capsys.readouterr().out
    assert cli.main(["score", run, *digits, *option, *few, "--half", "test"]) == 0
    forget(monkeypatch)
    capsys.readouterr()
    assert cli.main(["evaluate", run]) == 0
    assert re.search(r"nudge\W+3 ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no attack module .*mine.py: name a Python file that registers attacks"),
        ("x = 1\n", "mine.py registers no attack: it must call dime_jax.register_attack"),
        ("x = 1\n\n1 / 0\n", "mine.py, line 3: ZeroDivisionError: division by zero"),
        ("x = 1\ndef f(:\n", "mine.py, line 2: SyntaxError"),
        ("import sys\nsys.exit(0)\n", "mine.py, line 2: SystemExit: 0"),
        (
            AS_CALLS.replace('name="nudge"', 'name="dime"'),
            r"line \d+: ValueError: an attack named 'dime' is registered already",
        ),
        (
            AS_CALLS.replace('name="nudge"', 'name="../x"'),
            "an attack's name must consist of letters, digits, _ and -, got",
        ),
        (AS_FUNCTION + AS_CALLS.replace('name="nudge"', 'name="odd"'), "an attack named 'odd' is registered already"),
    ],
)
def test_a_file_that_fails_is_one_line(tmp_path, capsys, content, message):
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    before = attacks.attack_names()
    assert cli.main(["audit", "--attack-module", str(path), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1
    assert attacks.attack_names() == before


def test_a_changed_file_is_run_again_and_an_unchanged_one_is_not(nudge):
    first = attacks.load_attack_module(nudge)
    entry = attacks.get_attack("nudge")
    assert attacks.load_attack_module(nudge) == first
    assert attacks.get_attack("nudge") is entry
    nudge.write_text(AS_CALLS.replace('title="Nudge"', 'title="Shove"'), encoding="utf-8")
    attacks.load_attack_module(nudge)
    assert attacks.get_attack("nudge").title == "Shove"
    assert attacks.attack_names().count("nudge") == 1
