"""The latent study end to end: trained, saved as diffusers saves a model, converted, attacked and put into a table."""

import json

import jax
import numpy as np
import pytest

from checkpoints_convert.convert import open_checkpoint
from dime_jax import data
from dime_jax._util.records import plain
from experiments import latent_study, questions, results_page, run_table, runs
from experiments.configs.latent_digits import get_config


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """`:smoke` with a network that has learned next to nothing: what it finds is tested elsewhere."""
    config = get_config("smoke").copy_and_resolve_references().unlock()
    config.train.update(images=30, autoencoder_steps=2, unet_steps=4, width=8)
    workdir = tmp_path_factory.mktemp("study")
    results = latent_study.run(config.lock(), workdir, "experiments/configs/latent_digits.py:smoke")
    return config, workdir, results


@pytest.mark.slow  # compiles gradients, and every call of a U-Net
def test_every_attack_has_a_row_and_every_query_is_counted(study):
    _, workdir, results = study
    rows = {row.attack: row for row in results.results}
    assert {name: row.queries_per_image for name, row in rows.items()} == {
        **{"sima_l4": 1, "dime": 2, "level_only": 1, "clid": 15}
    }
    # 5 members and 5 others in each half; the witness, level_only, is heard for the query of DIME's probe.
    assert results.queries_made == 2 * 10 * (1 + 2 + 15) + results.model_check.queries
    saved = {path.parent.name for path in (workdir / "pipeline").rglob("*.json")}
    assert saved == {"pipeline", "unet", "vae", "text_encoder", "tokenizer", "scheduler"}


@pytest.mark.slow
def test_what_is_there_is_kept(study, monkeypatch):
    config, workdir, results = study
    monkeypatch.setattr(latent_study, "train", lambda *_: 1 / 0)
    assert plain(latent_study.run(config, workdir, "experiments/configs/latent_digits.py:smoke")) == plain(results)


@pytest.mark.slow
def test_the_table_says_how_to_make_it_again(study, tmp_path):
    _, workdir, _ = study
    table = run_table.make_table(runs.read_run(workdir / "attack"))
    (models,) = runs.group_runs([table.run])
    found = results_page.StudyResults(models, [table], questions.answers(models))
    page = results_page.study_section(found, tmp_path / "RESULTS.md")
    assert "## A latent model of digits with captions (latent_digits:smoke)" in page
    assert "python -m experiments.latent_study --config=experiments/configs/latent_digits.py:smoke --workdir=W" in page
    assert "A small-scale study of models that we trained ourselves, not of a published one." in page
    assert str(workdir) not in page + (workdir / "attack" / "config.json").read_text()


@pytest.mark.slow
def test_what_is_saved_is_read_back(tmp_path, monkeypatch):
    saved, write = {}, latent_study.write_pipeline
    monkeypatch.setattr(latent_study, "fit", lambda loss, variables, *_: variables)
    monkeypatch.setattr(
        latent_study, "write_pipeline", lambda *made: (saved.update(spec=made[1], **made[2]), write(*made))
    )
    latent_study.make(tmp_path, latent_study.Size(30, 0, 0, 8))
    pipeline = open_checkpoint(tmp_path / "pipeline")
    assert pipeline.spec == saved["spec"]
    for part, name in (("denoiser", "unet"), ("autoencoder", "vae"), ("text_encoder", "text_encoder")):
        jax.tree.map(np.testing.assert_array_equal, pipeline.variables()[part], saved[name])
    sources = {role: data.open_source(str(tmp_path / role)) for role in ("members", "heldout", "candidates")}
    assert {role: len(source) for role, source in sources.items()} == {"members": 10, "heldout": 10, "candidates": 40}
    assert all(caption.startswith("the digit ") for source in sources.values() for caption in source.captions)
    pictures = [source.read(index).tobytes() for source in sources.values() for index in range(len(source))]
    assert len(set(pictures)) == 60  # nobody is on two sides


@pytest.mark.slow
def test_another_training_is_refused(tmp_path, monkeypatch):
    size = latent_study.Size(30, 0, 0, 8)
    monkeypatch.setattr(latent_study, "fit", lambda loss, variables, *_: variables)
    monkeypatch.setattr(latent_study, "write_images", lambda *_: 1 / 0)  # as if it were interrupted here
    with pytest.raises(ZeroDivisionError):
        latent_study.make(tmp_path, size)
    for other, seed in ((size._replace(unet_steps=9), 0), (size, 1)):
        with pytest.raises(ValueError, match="holds another training, of "):
            latent_study.make(tmp_path, other, seed)
    with pytest.raises(ZeroDivisionError):
        latent_study.make(tmp_path, size)  # goes on


def test_laptop_asks_all_attacks_of_text_conditioned_models():
    assert {"clid", "dime", "pia_l4", "secmi"} <= set(get_config().attack.names)
    assert get_config().to_json() == get_config("laptop").to_json()
    assert json.loads(get_config().to_json())["train"].keys() == set(latent_study.Size._fields)
    with pytest.raises(ValueError, match="unknown variant 'tiny'"):
        get_config("tiny")
