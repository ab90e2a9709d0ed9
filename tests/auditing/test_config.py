"""An option is declared once: what is recorded, checked and documented follows from that."""

import dataclasses

import pytest
from memoriser import SHAPE, images, memoriser, source

import dime_jax as dj
from dime_jax._util.records import parse, plain_object
from dime_jax.protocol.facts import Settings
from dime_jax.protocol.options import AuditOptions

ALWAYS = {
    "model": "digits",
    "profile": "quick",
    "level": 0.05,
    "delta": 0.0,
    "randomised": False,
    "seed": 0,
}


def recorded(config, *after):
    return plain_object(config.settings(*after))


def test_what_was_left_open_is_not_recorded(tmp_path):
    assert list(recorded(dj.AuditConfig(tmp_path)).items()) == list(ALWAYS.items())


def test_all_that_was_asked_for_is_recorded_by_its_name_in_a_fixed_order(tmp_path):
    pixels = images(20, 0)
    config = dj.AuditConfig(
        tmp_path,
        memoriser(pixels),
        members=source(pixels, "m"),
        heldout="h/",
        candidates=source(pixels, "c"),
        labels=tmp_path / "labels.csv",
        groups="groups.csv",
        captions="none",
        attacks=["dime", "sima_l4"],
        queries=[2],
        profile="light",
        grid=[{"t": 70, "gamma": 0.1}],
        calibration_size=20,
        test_size=30,
        variations=True,
        decide_with="dime@2",
        level=0.1,
        delta=1e-5,
        randomised=True,
        seed=3,
        options=dj.ScoringOptions(micro_batch=4),
        conversion=dj.ConversionOptions(image_size=8),
        use=dj.UseOptions(lora=("a", tmp_path / "b")),
        remote=dj.RemoteOptions(max_rate=2.0, token_env="A_TOKEN"),
    )
    expected = {
        "model": "memoriser",
        "members": "m",
        "heldout": "h/",
        "candidates": "c",
        "labels": str(tmp_path / "labels.csv"),
        "groups": "groups.csv",
        "captions": "none",
        "attacks": ["dime", "sima_l4"],
        "queries": [2],
        "profile": "light",
        "grid": [{"t": 70, "gamma": 0.1}],
        "calibration_size": 20,
        "test_size": 30,
        "variations": True,
        "decide_with": "dime@2",
        "level": 0.1,
        "delta": 1e-5,
        "randomised": True,
        "seed": 3,
        "conversion": {"image_size": 8, "lora": f"a, {tmp_path / 'b'}"},
        "remote": {"max_rate": 2.0},
        "after": "later/",
    }
    found = recorded(config, "later/")
    assert list(found.items()) == list(expected.items())
    assert parse(Settings, found, "audit.json") == config.settings("later/")
    assert config.settings("later/").attacks == ("dime", "sima_l4")


def test_settings_hold_nothing_that_is_called(tmp_path):
    config = dj.AuditConfig(tmp_path, memoriser(images(4, 0)))
    assert config.model.image_shape == SHAPE
    values = [*vars(config).values(), *vars(config.options).values()]
    assert [value for value in values if callable(value)] == []


@pytest.mark.parametrize("record", [dj.AuditConfig, dj.ConversionOptions, dj.UseOptions, dj.RemoteOptions])
def test_every_option_is_documented(record):
    options = [field for field in dataclasses.fields(record) if field.metadata]
    assert len(options) >= 5
    for field in options:
        assert f"\n  {field.name}: {field.metadata['help']}." in record.__doc__


def test_choices_are_checked_wherever_they_are_declared(tmp_path):
    with pytest.raises(ValueError, match=r"captions must be one of own, none, got 'mine'"):
        dj.AuditConfig(tmp_path, captions="mine")
    assert {"captions", "profile"} <= {
        field.name for field in dataclasses.fields(AuditOptions) if field.metadata.get("choices")
    }


@pytest.mark.parametrize("members", [True, False])
def test_the_fixed_rule_is_asked_at_its_noise_levels_whatever_the_schedule(tmp_path, members):
    roles = {} if members else {"heldout": source(images(20, 0), "h"), "candidates": source(images(1, 1), "c")}
    config, short = dj.AuditConfig(tmp_path, **roles), dj.linear_schedule(100, 1e-3, 0.2)
    (usual,), (own,) = (
        [job.setting for job in config.jobs(schedule=schedule) if job.attack.name == "loss_level"]
        for schedule in (dj.linear_schedule(), short)
    )
    assert (usual["t_loss"], usual["t_level"]) == (150, 50)
    assert float(short.sigma(own["t_loss"])) == pytest.approx(0.463, abs=0.03)
    assert float(short.sigma(own["t_level"])) == pytest.approx(0.173, abs=0.03)
