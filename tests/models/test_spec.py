"""Specs: round trips, refusals, and schedules against their definitions."""

import dataclasses
import json

import numpy as np
import pytest

from dime_jax.models import DdpmUnetSpec, GuidedUnetSpec, ModelSpec, ScheduleSpec
from dime_jax.models.schedule_spec import parse_schedule

SPECS = [
    ModelSpec(denoiser=DdpmUnetSpec(time_table_steps=1000, norm_eps=1e-5), image_shape=(32, 32, 3)),
    ModelSpec(
        denoiser=GuidedUnetSpec(num_classes=10, head_channels=64, up_attention_levels=(0, 1)),
        image_shape=(64, 32, 3),
        schedule=ScheduleSpec(kind="betas", num_steps=3, betas=(0.1, 0.2, 1.0)),
        prediction="v_prediction",
    ),
]


@pytest.mark.parametrize("spec", SPECS)
def test_json_round_trip(spec):
    again = ModelSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert hash(again) == hash(spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stem_channels": 10**9}, "stem_channels"),
        ({"level_channels": (128, 10**12)}, "level_channels"),
        ({"level_channels": ()}, "level_channels"),
        ({"level_channels": 128}, "level_channels"),
        ({"level_channels": (128, 100)}, "norm_groups=32"),
        ({"level_channels": (128.0,)}, "level_channels"),
        ({"num_res_blocks": 10**6}, "num_res_blocks"),
        ({"num_res_blocks": True}, "num_res_blocks"),
        ({"attention_levels": (4,)}, "attention_levels"),
        ({"head_channels": 48}, "head_channels=48"),
        ({"num_heads": 7}, "num_heads=7"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"dropout": 1.5}, "dropout"),
        ({"learned_sigma": 1}, "learned_sigma"),
        ({"num_classes": 10**9}, "num_classes"),
        ({"time_features": 127}, "time_features"),
        ({"time_table_steps": 10**9}, "time_table_steps"),
        ({"time_frequency_shift": 64}, "time_frequency_shift"),
        ({"symmetric_downsample": None}, "symmetric_downsample"),
    ],
)
def test_bad_architectures_are_refused_in_one_line(change, message):
    with pytest.raises(ValueError, match=message) as error:
        DdpmUnetSpec(**change)
    assert "\n" not in str(error.value)


def test_bad_models_are_refused():
    unet = DdpmUnetSpec()
    for change, message in [
        ({"image_shape": (36, 36, 3)}, "divisible by 8"),
        ({"image_shape": (32, 32, 1)}, "image_channels=3"),
        ({"image_shape": (32, 32)}, "image_shape"),
        ({"prediction": "score"}, "prediction 'score'"),
        ({"denoiser": dataclasses.replace(unet, time_table_steps=10)}, "time_table_steps must be >= 1000"),
    ]:
        with pytest.raises(ValueError, match=message):
            ModelSpec(**{"denoiser": unet, "image_shape": (32, 32, 3), **change})
    fields = SPECS[0].to_json()
    with pytest.raises(ValueError, match="unknown 'widht', missing 'prediction'"):
        ModelSpec.from_json({**{k: v for k, v in fields.items() if k != "prediction"}, "widht": 1})
    with pytest.raises(
        ValueError,
        match=r"unknown spec\.denoiser kind 'vit'; expected one of ddpm_unet, guided_unet, conditional_unet, dit$",
    ):
        ModelSpec.from_json({**fields, "architecture": {"kind": "vit"}})


def test_schedules():
    linear = np.linspace(1e-4, 0.02, 1000)
    scaled = np.linspace(0.01, np.sqrt(0.02), 1000) ** 2
    for spec, betas in [(ScheduleSpec(), linear), (ScheduleSpec(kind="scaled_linear"), scaled)]:
        np.testing.assert_allclose(spec.build().abar(np.arange(1000)), np.cumprod(1 - betas), rtol=1e-6)
    cosine = ScheduleSpec(kind="cosine", num_steps=50).build()
    levels = np.cos((np.arange(1, 50) / 50 + 0.008) / 1.008 * np.pi / 2) ** 2 / np.cos(0.008 / 1.008 * np.pi / 2) ** 2
    np.testing.assert_allclose(cosine.abar(np.arange(49)), levels, rtol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "scaled_linear", "cosine"])
def test_zero_terminal_snr_keeps_the_start_and_ends_in_noise(kind):
    plain = np.asarray(ScheduleSpec(kind=kind).build().sqrt_abar_table, np.float64)
    schedule = ScheduleSpec(kind=kind, zero_terminal_snr=True).build()
    rescaled = np.asarray(schedule.sqrt_abar_table, np.float64)
    assert rescaled[-1] == 0
    assert schedule.sigma(999) == 1
    np.testing.assert_allclose(rescaled, (plain - plain[-1]) * plain[0] / (plain[0] - plain[-1]), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "sigmoid"}, "schedule 'sigmoid'"),
        ({"num_steps": 10**9}, "num_steps"),
        ({"kind": "betas"}, "betas"),
        ({"betas": (0.1,)}, "betas"),
        ({"kind": "betas", "num_steps": 2, "betas": (0.1, 2.0)}, "beta"),
        ({"beta_start": "0.1"}, "beta_start"),
        ({"beta_start": 0.0}, "beta"),
    ],
)
def test_bad_schedules_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ScheduleSpec(**fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("linear:10", "--schedule must be linear or linear:STEPS:BETA_START:BETA_END, got linear:10"),
        ("cosine:10:0.1:0.2", "--schedule must be cosine or cosine:STEPS, got cosine:10:0.1:0.2"),
        ("none.json", "there is no file none.json, which --schedule names"),
    ],
)
def test_a_schedule_that_cannot_be_parsed_is_explained(text, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        parse_schedule(text)
