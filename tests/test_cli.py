import argparse
import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import dime_jax as dj
from dime_jax import auditing, cli
from dime_jax._util.flags import underscored
from dime_jax.report import html
from experiments import generated, torch_writer

pytestmark = pytest.mark.usefixtures("small_batches", "small_model_check", "no_figures")


@pytest.fixture(scope="module")
def secmi(tmp_path_factory):
    """A checkpoint of pytorch-ddpm with a network that compiles quickly; beside it the bare EMA weights alone."""
    directory = tmp_path_factory.mktemp("checkpoints")
    contents = generated.secmi_contents(np.random.default_rng(0), image_size=16)
    torch_writer.write_zip(directory / "bare.pt", contents["ema_model"])
    torch_writer.write_zip(directory / "secmi.pt", contents)
    return directory / "secmi.pt"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Files of random images, as a user names them: members, heldout and candidates."""
    directory = tmp_path_factory.mktemp("images")
    sizes = {"members": 24, "heldout": 26, "candidates": 4}
    for number, (name, count) in enumerate(sizes.items()):
        pixels = np.random.default_rng(number).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
        np.savez(directory / f"{name}.npz", images=pixels)
    return {name: str(directory / f"{name}.npz") for name in sizes}


@pytest.fixture(scope="module")
def audit_command(secmi, images, tmp_path_factory):
    arguments = [part for name, file in images.items() for part in (f"--{name}", file)]
    output = ["--output", str(tmp_path_factory.mktemp("out") / "audit")]
    return ["audit", "--model", str(secmi), *arguments, *output, "--attacks", "sima_l4", "--quiet"]


def test_an_audit_converts_prints_its_answer_and_where_the_report_is(audit_command, capsys):
    assert cli.main(audit_command) == 0
    printed = capsys.readouterr().out
    report = pathlib.Path(audit_command[audit_command.index("--output") + 1]) / "report.html"
    assert printed.rstrip().endswith(str(report))
    assert report.is_file()
    assert "SimA" in printed
    results = json.loads((report.parent / "results.json").read_text())
    assert results["headline"]["answer"] in printed
    assert results["model"]["origin"].startswith("converted from secmi.pt, cached in model-")
    assert "\x1b" not in printed  # no colours when this is not a terminal


def test_it_is_not_converted_again_and_prints_json(audit_command, capsys):
    assert cli.main([*audit_command, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["model"]["origin"].startswith("converted from secmi.pt before")


def test_no_gate_passes_a_network_of_random_weights(audit_command, capsys, monkeypatch):
    monkeypatch.setattr(html, "write_report", lambda record, findings: record.directory / "report.html")
    directory = audit_command[audit_command.index("--output") + 1]
    assert cli.main(["report", directory, "--json", "--fail-if", "sima_l4@1.auc.high > 1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dime-jax: no condition can be judged: The model does not predict noise: at t = ")
    assert error.count("\n") == 1


def test_without_images_the_shipped_model_is_audited(tmp_path, capsys, monkeypatch):
    small = ["--attacks", "sima_l4", "--calibration_size", "60", "--test_size", "150", "--quiet", "--json"]
    assert cli.main(["audit", "--output", str(tmp_path), *small]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["model"]["origin"] == "shipped with dime_jax"
    assert results["model_check"]["passed"]
    assert results["results"][0]["auc"]["low"] > 0.6
    truth = results["candidates"]["truth"]  # reserved: in neither half
    assert (truth["members"], truth["others"]) == (24, 24)
    assert results["candidates"]["set_test"]["p_value"] < 0.05

    monkeypatch.setattr(html, "write_report", lambda record, findings: record.directory / "report.html")
    again = ["report", str(tmp_path)]
    assert cli.main([*again, "--fail-if", "sima_l4@1.auc.high <= 1"]) == 1
    assert capsys.readouterr().err == "dime-jax: the gate failed: sima_l4@1.auc.high <= 1\n"
    assert cli.main([*again, "--json", "--fail-if", "sima_l4@1.auc.high > 1"]) == 0
    assert cli.main([*again, "--fail-if", "sima@1.auc.high > 1"]) == 2
    assert "unknown 'sima@1'" in capsys.readouterr().err


def test_one_model_is_no_deletion(secmi, images, tmp_path, capsys):
    roles = ["--heldout", images["heldout"], "--candidates", images["candidates"], "--queries", "3", "--quiet"]
    models = ["--before", str(secmi), "--after", str(secmi)]
    assert cli.main(["compare", *models, *roles, "--output", str(tmp_path / "same")]) == 2
    assert "the models before and after must differ, got" in capsys.readouterr().err


def test_any_failure_is_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch):
    def fails(config):
        raise RuntimeError("the model\nis away")

    monkeypatch.setattr(auditing, "audit", fails)
    assert cli.main(["audit", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "dime-jax: RuntimeError: the model is away\n"
    with pytest.raises(RuntimeError):
        cli.main(["audit", "--output", str(tmp_path), "--debug"])
    with pytest.raises(RuntimeError):
        cli.main(["--debug", "audit", "--output", str(tmp_path)])


def test_an_interruption_says_how_to_resume(tmp_path, capsys, monkeypatch):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(auditing, "audit", interrupted)
    assert cli.main(["audit", "--output", str(tmp_path)]) == 130
    assert "interrupted; re-run the same command to resume" in capsys.readouterr().err


COMMANDS = (
    "audit",
    "compare",
    "score",
    "calibrate",
    "evaluate",
    "report",
    "reference",
    "convert",
    "models",
    "models check",
    "serve",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as exit_code:
        cli.main([*command.split(), "--help"])
    assert exit_code.value.code == 0
    printed = capsys.readouterr().out
    assert "example" in printed
    assert f"dime-jax {command} " in printed.replace("\n", " ")


NEEDED = ("model", "members", "heldout", "candidates", "captions", "output", "level")
FIRST = {  # what a screen shows of each command
    "audit": NEEDED,
    "compare": ("before", "after", *NEEDED[1:]),
    "score": ("model", "members", "heldout", "captions", "half"),
    "reference": ("model", "images", "output", "size", "steps", "batch_size", "learning_rate", "seed"),
    "convert": ("source", "output", "dialect", "weights", "image_size", "schedule"),
    "models check": ("images", "output", "count"),
    "serve": ("name", "host", "port", "token_env", "max_batch", "rate"),
    "evaluate": ("json", "fail_if"),
    "report": ("json", "fail_if"),
    "calibrate": ("attack_module",),
}


@pytest.mark.parametrize(("command", "options"), FIRST.items())
def test_what_nearly_everyone_needs_fits_on_a_screen(command, options, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"usage: dime-jax {command}( \S+)* \[options\]", lines[0])
    assert lines[1] == ""  # a usage of one line
    assert max(map(len, lines)) < 120
    screen = "\n".join(lines[:30])
    assert f"\n  dime-jax {command}" in screen
    for option in options:
        assert f"\n  --{option}" in screen
    if command == "audit":
        assert "hf:" in screen
        headings = [line for line in lines if re.fullmatch(r"[A-Za-z ]+:", line)]
        assert headings[2:] == [f"{heading}:" for heading in cli._HEADINGS]


@pytest.mark.parametrize("command", ["", "audit", "score", "serve"])
def test_help_is_quick(command):
    """It must import neither JAX nor NumPy; seconds are not asserted, since machines differ."""
    script = (
        f"import sys, dime_jax.cli\ntry: dime_jax.cli.main({[*command.split(), '--help']})\n"
        "except SystemExit: print({'jax', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\nset()\n")


def test_a_checkpoint_is_converted_and_looked_at(secmi, tmp_path, capsys):
    model, check = tmp_path / "model", tmp_path / "check"
    assert cli.main(["convert", "--source", str(secmi), "--output", str(model)]) == 0
    assert "weights: ema" in capsys.readouterr().out
    arguments = ["models", "check", str(model), "--images", "digits", "--count", "2", "--output", str(check)]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.count("noise-prediction error") == 10
    assert (check / "samples.png").stat().st_size > 0


def test_every_command_opens_what_needs_conversion(secmi, tmp_path, capsys):
    """Without the image size, which this file does not hold, each asks for it; with it, each goes on."""
    checkpoint, other = str(secmi.parent / "bare.pt"), str(secmi)
    members, heldout = (str(tmp_path / f"{name}.npz") for name in ("members", "heldout"))
    pixels = np.random.default_rng(0).integers(0, 256, (48, 16, 16, 3), dtype=np.uint8)
    np.savez(members, images=pixels[:24])
    np.savez(heldout, images=pixels[24:])
    roles, few = ["--members", members, "--heldout", heldout], ["--attacks", "sima_l4"]
    deletion = ["--before", checkpoint, "--after", other, "--candidates", members, "--heldout", heldout]
    commands = (
        ["convert", "--source", checkpoint, "--output", str(tmp_path / "model")],
        ["models", "check", checkpoint, "--images", members, "--count", "2", "--output", str(tmp_path / "check")],
        ["score", str(tmp_path / "run"), "--model", checkpoint, *roles, *few],
        ["audit", "--model", checkpoint, *roles, *few, "--output", str(tmp_path / "audit")],
        ["compare", *deletion, "--queries", "3", "--output", str(tmp_path / "compare")],
    )
    for command in commands:
        assert cli.main(command) == 2, command
        error = capsys.readouterr().err
        assert "bare.pt: add --image_size" in error
        assert error.count("\n") == 1
    inferred = "noise schedule: linear from 0.0001 to 0.02, 1000 steps (by convention of pytorch-ddpm"
    for command in commands[:4]:
        assert cli.main([*command, "--image_size", "16"]) == 0, command
        printed = capsys.readouterr()
        assert inferred in (printed.out if command[0] == "convert" else printed.err)
    results = json.loads((tmp_path / "audit" / "results.json").read_text())
    assert results["settings"]["conversion"] == {"image_size": 16}
    assert any(fact.startswith(inferred) for fact in results["model"]["facts"])
    # The two files hold the same EMA weights: both were converted, with the option, before that was found.
    assert cli.main([*commands[4], "--image_size", "16"]) == 2
    assert "the models before and after must differ, got" in capsys.readouterr().err


def assert_refused(arguments, message, capsys):
    """In one line, with nothing written to the working directory."""
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(pathlib.Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["audit", "--image_size", "8"],
            "--image_size applies only when a checkpoint is converted; digits is shipped with dime_jax",
        ),
        (["convert", "--source", "missing.pt", "--output", "model"], "no file or folder missing.pt"),
        (["convert", "--source", __file__, "--output", "model"], "not a PyTorch file"),
        (
            ["score", "run", "--model", "missing", "--members", "a"],
            "name the images with --members and --heldout, or with --images and --split",
        ),
        (["models", "check", "missing", "--images", "digits", "--output", "out"], "no model directory 'missing'"),
        (["audit", "--model", "missing"], "no model directory 'missing'"),
        (["audit", "--level", "2"], "level must be > 0 and < 1, got 2.0"),
        (["report", "."], "holds no audit and no comparison: no audit.json or compare.json in it"),
        (["compare", "--before", "a", "--after", "b"], "candidates must be given"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert_refused(arguments, message, capsys)


AUDIT = ["audit", "--model", "missing"]
COMPARE = ["compare", "--before", "missing", "--after", "gone", "--heldout", "no images", "--candidates", "none"]
SCORE = ["score", "run", "--model", "missing", "--members", "no images", "--heldout", "none"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*AUDIT, "--fail-if", "dime@11.auc.low"], "expected a condition such as 'dime@2.auc.low > 0.6'"),
        ([*AUDIT, "--fail-if", "dime@7.auc.low > 0"], "no 'dime@7' for the condition 'dime@7.auc.low > 0': the rows "),
        ([*AUDIT, "--fail-if", "dime@7.auc.low > 0"], "that there will be are loss@1, pia_l2@2"),
        ([*AUDIT, "--fail-if", "dime@31.auc.low > 0"], "the results will have no 'dime@31'"),  # not at these tiers
        ([*AUDIT, "--heldout", "b", "--fail-if", "dime@11.auc.low > 0"], "there will be no rows of attacks"),
        ([*AUDIT, "--decide_with", "dime"], "decide_with must be one of loss@1"),
        ([*AUDIT, "--attacks", "dimes"], "unknown attack 'dimes'; expected one of loss"),
        (
            [*AUDIT, "--attacks", "dime", "secmi", "--queries", "1"],
            "queries per image must be >= 2, the cost of",
        ),
        ([*AUDIT, "--micro_batch", "0"], "micro_batch must be >= 1, got 0"),
        ([*COMPARE, "--fail-if", "dime@11.auc.low > 0"], "there will be no rows of attacks"),
        ([*COMPARE, "--decide_with", "dime@11"], "decide_with must be one of loss_level@3, got 'dime@11'"),
        (
            [*COMPARE, "--queries", "1"],
            "queries per image must be >= 3, the cost of loss_level",
        ),
        ([*COMPARE, "--micro_batch", "0"], "micro_batch must be >= 1, got 0"),
        ([*SCORE, "--attacks", "dimes"], "unknown attack 'dimes'"),
        ([*SCORE, "--queries", "0"], "queries must be >= 1, got [0]"),
        ([*SCORE, "--micro_batch", "0"], "micro_batch must be >= 1, got 0"),
        (["evaluate", "missing", "--fail-if", "dime@11.auc.low >"], "expected a condition such as"),
        (["report", "missing", "--fail-if", "dime@11.auc.low > x"], "expected a number on the right"),
    ],
)
def test_what_is_asked_for_is_checked_before_any_model_or_image_is_opened(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    assert_refused(arguments, message, capsys)


def test_stages_run_one_by_one(secmi, tmp_path, capsys):
    model, run = str(tmp_path / "model"), str(tmp_path / "run")
    assert cli.main(["convert", "--source", str(secmi), "--output", model]) == 0
    images = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "members.npz", images=images[:12])
    np.savez(tmp_path / "heldout.npz", images=images[12:])
    score = ["score", run, "--model", model, "--attacks", "sima_l4", "loss"]
    score += ["--members", str(tmp_path / "members.npz"), "--heldout", str(tmp_path / "heldout.npz")]
    assert cli.main(["evaluate", run]) == 2
    assert cli.main(score) == 0
    # Two attacks and the witness, at three timesteps each.
    assert "12 images of the calibration half scored, 108 queries made" in capsys.readouterr().out
    assert cli.main([*score, "--half", "test"]) == 2
    assert "calibrate first" in capsys.readouterr().err
    assert cli.main(["calibrate", run]) == 0
    assert cli.main([*score, "--half", "test"]) == 0
    # Two attacks at their frozen timesteps, the witness at all three.
    assert "12 images of the test half scored, 60 queries made" in capsys.readouterr().out
    assert cli.main(["evaluate", run]) == 0
    assert "SimA" in capsys.readouterr().out
    assert cli.main([*score, "--seed", "1"]) == 2
    assert "another seed" in capsys.readouterr().err


def test_every_setting_of_an_audit_is_an_option():
    """What the command line lacks is for programs: a grid of settings."""
    options = vars(cli.build_parser().parse_args(["audit"]))
    fields = {field.name for field in dataclasses.fields(auditing.AuditConfig)}
    fields -= {"grid", "options", "conversion", "use", "remote"}
    assert fields <= set(options)
    for part in (dj.ConversionOptions, dj.RemoteOptions):
        assert {field.name for field in dataclasses.fields(part)} <= set(options)
    compared = vars(cli.build_parser().parse_args(["compare", "--before", "a", "--after", "b"]))
    assert fields - set(compared) == {
        "model",
        "reference",
        "reference_lora",
        "images",
        "split",
        "delta",
        "randomised",
        "variations",
    }


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as exit_code:
        cli.main(["--version"])
    assert exit_code.value.code == 0
    assert capsys.readouterr().out == f"dime-jax {dj.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", dj.__version__)


def options_of(parser, command=()):
    """Every command of a parser with the long options that it takes."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                yield from options_of(subparser, (*command, name))
        else:
            yield from ((command, option) for option in action.option_strings if option.startswith("--"))


def test_options_are_declared_with_underscores():
    """With dashes they would not be found: both spellings become underscores."""
    declared = list(options_of(cli.build_parser()))
    assert (("audit",), "--fail_if") in declared
    assert (("models", "check"), "--image_size") in declared
    assert not [option for _, option in declared if "-" in option[2:]]


@pytest.mark.parametrize(("dash", "line"), [(dash, line) for dash in "-_" for line in ("{}=8", "{} 8")])
def test_both_spellings_of_an_option_are_read(dash, line):
    option = line.format(f"--image{dash}size").split()
    parsed = cli.build_parser().parse_args(
        ["audit", *option, f"--fail{dash}if", "dime-x@1.auc > 0", "--output=a-b/--c-d"]
    )
    assert (parsed.image_size, parsed.fail_if, parsed.output) == (8, ["dime-x@1.auc > 0"], pathlib.Path("a-b/--c-d"))


def test_names_after_the_end_of_options_stay_as_they_are():
    assert underscored(["--a-b", "c-d", "-e-f", "--", "--g-h"]) == ["--a_b", "c-d", "-e-f", "--", "--g-h"]
    assert cli.build_parser().parse_args(["report", "--", "--my-audit"]).audit == pathlib.Path("--my-audit")


COMPLETIONS = {
    "aud": ["audit"],
    "audit --cal": ["--calibration_size"],
    "audit --profile p": ["paper"],
    "audit --model gold": ["golden"],
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_choices_and_files(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["--print-completion", "bash"])
    (tmp_path / "golden").mkdir()
    (tmp_path / "complete.sh").write_text(capsys.readouterr().out)
    ask = (
        "COMP_WORDS=(dime-jax {}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=(); "
        "_shtab_dime_jax; echo ${{COMPREPLY[@]}}"
    )
    script = "\n".join(["source ./complete.sh", *(ask.format(words) for words in COMPLETIONS)])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert [line.split() for line in done.stdout.splitlines()] == list(COMPLETIONS.values())
