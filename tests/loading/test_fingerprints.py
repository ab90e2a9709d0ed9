"""Fingerprints as they have always been.

A fingerprint is a hash over the spec's JSON and the variables' paths, shapes and bytes: a new field, a renamed module
or 1 read as 1.0 changes it, and then runs cannot be resumed, kept results name another model, and the shipped model
does not open. These literals change only together with the format of model directories.
"""

import pathlib

import pytest

from dime_jax import load_denoiser, open_model

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def test_the_shipped_model():
    assert load_denoiser("digits").fingerprint == "6d28d82e3e8e32fd2513335a2eee38d48bb110be593aec8191511137da4fdd67"


@pytest.mark.parametrize(
    ("source", "options", "fingerprint"),
    [
        ("ddpm_secmi.pt", {}, "f46d0add7af7351ff826cac5772e68a4dc7790ecb39846c4f493cd9744bc9e76"),
        ("ddpm_ddim.pt", {"image_size": 16}, "fd3bf08fdd5edfc82d05c454f0660e4360efdf43557c9d1a6d887f6e9d75ee19"),
        ("ddpm_diffusers", {}, "1469f59515d8e05660c6eb4a3e1400c805d993f3b3cac3e57ec1c9f1321bd537"),
        (
            "guided_cond.pt",
            {"model_flags": GOLDEN / "guided_cond.json"},
            "c6e3b28669107598ac52f500d70220b5a7d1a180f1894e78104cbc7103a01b35",
        ),
        ("latent/stable_diffusion", {}, "22b07e8b9bde2352ae428162a0958048b531972416ebf4a67451c2799aaa90ca"),
        (
            "latent/dit",
            {"autoencoder": GOLDEN / "latent/stable_diffusion/vae"},
            "9776070b79bbafed086b901f4fa91a31f0ae9cc14edf5da8c9a0cbcbc5eb1372",
        ),
    ],
)
def test_one_checkpoint_of_each_dialect(source, options, fingerprint, tmp_path):
    opened = open_model(GOLDEN / source, cache=tmp_path, **options)
    assert opened.denoiser.fingerprint == fingerprint
