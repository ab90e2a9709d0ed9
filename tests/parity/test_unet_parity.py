"""Live comparison with diffusers: random configurations, saved by its own code, converted by ours.

Run with `make parity`; needs torch and diffusers.
"""

import numpy as np
import pytest

from dime_jax.loading import opening
from dime_jax.loading.conversion import convert

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

pytestmark = pytest.mark.parity

TOLERANCE = 2e-5  # of the output's standard deviation

CONFIGS = [
    # one level, attention only in the middle
    {"block_out_channels": (32,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)},
    # ddpm-cifar10's settings, smaller
    {
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": None,
        "norm_eps": 1e-6,
        "freq_shift": 1,
        "flip_sin_to_cos": False,
        "downsample_padding": 0,
    },
    # diffusers' defaults: many heads, symmetric padding, [cos, sin]; attention on one way only
    {
        "block_out_channels": (32, 32, 64),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D"),
        "attention_head_dim": 8,
        "layers_per_block": 1,
    },
    # classes, no attention in the middle, other groups and time width
    {
        "block_out_channels": (16, 48),
        "down_block_types": ("AttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "AttnUpBlock2D"),
        "attention_head_dim": 16,
        "norm_num_groups": 8,
        "add_attention": False,
        "num_class_embeds": 5,
        "time_embedding_dim": 40,
        "in_channels": 1,
        "out_channels": 1,
    },
]
SCHEDULERS = [
    {"prediction_type": "epsilon"},
    {"prediction_type": "sample", "beta_schedule": "squaredcos_cap_v2"},
    {"prediction_type": "v_prediction", "beta_schedule": "scaled_linear"},
    {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
]


@pytest.mark.parametrize(("config", "scheduler"), list(zip(CONFIGS, SCHEDULERS)))
def test_unet2d(config, scheduler, tmp_path):
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(sample_size=16, **config).eval()
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    noise_schedule = diffusers.DDPMScheduler(num_train_timesteps=200, **scheduler)
    unet.save_pretrained(tmp_path / "pipeline" / "unet")
    noise_schedule.save_pretrained(tmp_path / "pipeline" / "scheduler")
    denoiser = opening.load_denoiser(convert(tmp_path / "pipeline", tmp_path / "model"))

    abar = noise_schedule.alphas_cumprod.double().numpy()
    np.testing.assert_allclose(denoiser.schedule.abar(np.arange(200)), abar, rtol=2e-4, atol=1e-7)
    x = torch.randn(3, unet.config.in_channels, 16, 16)
    labels = torch.tensor([0, 3, 4]) if unet.config.num_class_embeds else None
    for t in (0, 77, 199):
        with torch.no_grad():
            output = unet(x, t, class_labels=labels).sample.double().numpy()
        alpha, sigma = np.sqrt(abar[t]), np.sqrt(1 - abar[t])
        expected = {
            "epsilon": output,
            "sample": (x.double().numpy() - alpha * output) / sigma,
            "v_prediction": alpha * output + sigma * x.double().numpy(),
        }[scheduler["prediction_type"]]
        label = None if labels is None else labels.numpy()
        got = np.asarray(denoiser.eps(np.moveaxis(x.numpy(), 1, -1), t, label), np.float64)
        # at t = 0 the division by sigma magnifies the schedule's own rounding in float32
        tolerance = 1e-3 if scheduler["prediction_type"] == "sample" and t == 0 else TOLERANCE
        assert np.abs(np.moveaxis(got, -1, 1) - expected).max() <= tolerance * expected.std(), f"t={t}"
