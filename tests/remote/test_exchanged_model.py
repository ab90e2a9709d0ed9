"""A hosted model that is exchanged behind its address is noticed by whatever runs the protocol."""

import numpy as np
import pytest
from faulty_server import FaultyServer, metadata, tanh_model
from ml_collections.config_dict import ConfigDict

import dime_jax as dj
from dime_jax import auditing, cli, scoring
from dime_jax.scoring import query_ledger
from experiments import attack
from experiments.configs.attack_section import attack_section, data_section

pytestmark = pytest.mark.usefixtures("no_figures")

SHAPE = (8, 8, 1)
PIXELS = np.random.default_rng(0).integers(0, 256, (80, *SHAPE), dtype=np.uint8)


def run_audit(url, directory):
    known = {"members": dj.data.from_images(PIXELS[:40]), "heldout": dj.data.from_images(PIXELS[40:])}
    settings = {"attacks": ["sima_l4"], "grid": [{"t": 70}], "options": scoring.ScoringOptions(silent=True)}
    auditing.audit(auditing.AuditConfig(directory, model=url, **known, **settings))


def run_score(url, directory):
    args = ["score", directory, "--model", url, "--attacks", "sima_l4", "--profile", "light", "--debug"]
    for role, part in (("members", PIXELS[:40]), ("heldout", PIXELS[40:])):
        np.save(directory.with_name(f"{role}.npy"), part)
        args += [f"--{role}", directory.with_name(f"{role}.npy")]
    assert cli.main([*map(str, args)]) == 0


def run_study(url, directory):
    config = ConfigDict({"seed": 0, "data": data_section("digits"), "attack": attack_section()})
    config.data.split_size = 30
    config.attack.update(model=url, names=("sima_l4",), budgets=(2,), grids={"all": {"t": (70,)}})
    attack.run(config, directory.parent)


@pytest.mark.parametrize("run", [run_audit, run_score, run_study])
def test_an_exchanged_model_is_noticed(run, tmp_path):
    with FaultyServer(said=metadata(SHAPE)) as server:
        run(server.url, tmp_path / "attack")
        first = sum(server.received)
        assert first == query_ledger.queries_made(tmp_path / "attack")
        run(server.url, tmp_path / "attack")
        assert sum(server.received) == first + 1  # the same model is asked one question
        server.model = lambda x, t: tanh_model(x, t) * np.float32(0.99)
        with pytest.raises(ValueError, match="m is not the model that this run was started with"):
            run(server.url, tmp_path / "attack")
        assert sum(server.received) == first + 2
