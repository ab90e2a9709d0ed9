import json
import pathlib

import numpy as np
import pytest

from dime_jax import auditing, cli

GOLDEN = pathlib.Path(__file__).parent / "golden"


def test_the_audit_prints_a_row_per_attack_and_budget_and_writes_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(auditing, "CLOSED_FORM_TIMES", (300,))
    monkeypatch.setattr(auditing, "CLOSED_FORM_TIERS", (1,))
    assert cli.main(["audit", "--output", str(tmp_path / "audit")]) == 0
    results = json.loads((tmp_path / "audit" / "results.json").read_text())
    rows = {(row["attack"], row["queries_per_image"]): row for row in results["results"]}
    assert len(rows) == len(results["results"])
    assert ("dime", 2) in rows
    for row in rows.values():
        for metric in ("auc", "asr", "tpr_at_1pct_fpr"):
            assert 0 <= row[metric]["low"] <= row[metric]["value"] <= row[metric]["high"] <= 1
    # The ideal denoiser memorises: at t = 300 DIME tells its members with certainty to spare.
    assert rows["dime", 2]["auc"]["low"] > 0.9
    assert "DIME" in capsys.readouterr().out


def test_errors_are_one_line_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["audit", "--output", str(tmp_path / "file" / "audit")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as exit_code:
        cli.main(["audit", "--help"])
    assert exit_code.value.code == 0
    assert "example: dime-jax audit" in capsys.readouterr().out


def test_a_checkpoint_is_converted_and_looked_at(tmp_path, capsys):
    model, check = tmp_path / "model", tmp_path / "check"
    assert cli.main(["convert", "--source", str(GOLDEN / "ddpm_secmi.pt"), "--output", str(model)]) == 0
    assert "weights: ema" in capsys.readouterr().out
    arguments = ["models", "check", str(model), "--images", "digits", "--count", "2", "--output", str(check)]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.count("noise-prediction error") == 10
    assert (check / "samples.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "--source", "missing.pt", "--output", "model"], "no file or folder missing.pt"),
        (["convert", "--source", __file__, "--output", "model"], "not a PyTorch file"),
        (
            ["score", "run", "--model", "missing", "--members", "a"],
            "expected either --members and --heldout, or --images",
        ),
        (["models", "check", "missing", "--images", "digits", "--output", "out"], "no model directory 'missing'"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_stages_run_one_by_one(tmp_path, capsys):
    model, run = str(tmp_path / "model"), str(tmp_path / "run")
    assert cli.main(["convert", "--source", str(GOLDEN / "ddpm_secmi.pt"), "--output", model]) == 0
    images = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "members.npz", images=images[:12])
    np.savez(tmp_path / "heldout.npz", images=images[12:])
    score = ["score", run, "--model", model, "--attacks", "sima_l4", "loss"]
    score += ["--members", str(tmp_path / "members.npz"), "--heldout", str(tmp_path / "heldout.npz")]
    assert cli.main(["evaluate", run]) == 2
    assert cli.main(score) == 0
    assert "12 images of the calibration half scored, 72 queries made" in capsys.readouterr().out  # 2 attacks at 3 t
    assert cli.main([*score, "--half", "test"]) == 2
    assert "calibrate first" in capsys.readouterr().err
    assert cli.main(["calibrate", run]) == 0
    assert cli.main([*score, "--half", "test"]) == 0
    assert "12 images of the test half scored, 24 queries made" in capsys.readouterr().out  # the frozen t only
    assert cli.main(["evaluate", run]) == 0
    assert "SimA" in capsys.readouterr().out
    assert cli.main([*score, "--seed", "1"]) == 2
    assert "another seed" in capsys.readouterr().err
