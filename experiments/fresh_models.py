"""Judge the rule for audits without known members on models that were trained after it was frozen.

    python -m experiments.train --config=experiments/configs/cifar10.py:overnight --workdir=W --seeds=21,22,23 ...
    python -m experiments.fresh_models (the same)

asks each model about its members and about 1,200 held-out images, or as many as there are, with the three queries of
`attacks.loss_level`. What the pictures explain is fitted to 200 of the held-out images, without labels and without any
member, and then frozen; all members and the other held-out images are counted. Beside it stand the plain loss of the
same two draws, and other readings of the same answers, each adjusted by the same fit. Writes WORKDIR/fresh/fresh.json.
Takes a few minutes for each model.
"""

import json
import pathlib
from collections.abc import Mapping

import numpy as np
from ml_collections.config_dict import ConfigDict

from dime_jax import data, scoring
from dime_jax._util import files, records
from dime_jax.attacks import get_attack
from dime_jax.attacks.loss_level import setting_for
from dime_jax.data import Pair
from dime_jax.data.roles import own_transforms
from dime_jax.evidence import metrics
from dime_jax.protocol import calibration, stages, statistics
from dime_jax.protocol.calibration import Calibration
from dime_jax.protocol.record import KnownImages
from dime_jax.scoring.planning import Job
from experiments.attack import load_model
from experiments.launch import launch
from experiments.study_data import open_study

FITTED, COUNTED = 200, 1000
RULE, PLAIN = "loss and level, adjusted", "loss, mean of 2"


def judge(config: ConfigDict, workdir: str | pathlib.Path) -> Mapping[str, records.Json]:
    """Ask a model of a study, and return what fresh.json holds."""
    directory = pathlib.Path(workdir) / "fresh"
    study = open_study(config, workdir)
    denoiser = load_model(config, pathlib.Path(workdir), study)
    source = own_transforms(study.source, denoiser.image_shape)
    heldout = np.random.default_rng(config.seed).permutation(every_heldout(config, workdir))[: FITTED + COUNTED]
    fitted, counted = heldout[:FITTED], heldout[FITTED:]
    sides = Pair(study.split.member, counted)
    images, schedule = np.concatenate([*sides, fitted]), denoiser.schedule
    setting = setting_for(schedule)
    draws = Job(get_attack("loss_mc"), {"t": setting["t_loss"], "q": 2})
    level = Job(get_attack("level_only"), {"t": setting["t_level"], "gamma": setting["gamma_level"], "q": 1})
    single = Job(get_attack("loss"), {"t": setting["t_loss"]})
    jobs = [Job(get_attack("loss_level"), setting), draws, level, single]
    table = scoring.score(
        denoiser,
        source,
        jobs,
        directory / "table",
        indices=stages.shuffled(images, config.seed),
        seed=config.seed,
        options=scoring.ScoringOptions(),
    )
    statistics.make(directory, source, images, data.transform_for(source, denoiser.image_shape))
    pictures = statistics.read(directory)

    def adjusted(frozen: Calibration) -> Calibration:
        return calibration.adjust(frozen, stages.terms_of(table, frozen, fitted), pictures.of(fitted))

    rule, *plain = (calibration.fixed_rule(job.attack, schedule, job.setting) for job in jobs)
    readings = {RULE: adjusted(rule)}
    for name, frozen in zip((PLAIN, "level", "loss"), plain):
        readings |= {name: frozen, f"{name}, adjusted": adjusted(frozen)}
    known = KnownImages(table, data.Split(*sides), pictures)
    scores = {name: known.scores(frozen) for name, frozen in readings.items()}
    lead = metrics.compare(scores[RULE], scores[PLAIN], seed=config.seed)
    return {
        "seed": config.seed,
        "members": len(sides.member),
        "fitted": len(fitted),
        "counted": len(counted),
        "queries_made": table.queries_made,
        "readings": {name: _rates(*of) for name, of in scores.items()},
        "lead_over_plain_loss": records.plain(lead.auc_difference),
    }


def _rates(member: np.ndarray, heldout: np.ndarray) -> records.Json:
    found = metrics.evaluate(member, heldout)
    return {"auc": records.plain(found.auc), "tpr_at_1pct_fpr": records.plain(found.tpr_at_fpr[0.01])}


def every_heldout(config: ConfigDict, workdir: str | pathlib.Path) -> np.ndarray:
    """Return all held-out images of the study's split, not only those of its own attack."""
    whole = config.copy_and_resolve_references()
    with whole.unlocked():
        whole.data.update(reserved=None, max_members=None, max_heldout=None)
    return open_study(whole, workdir).split.heldout


def main(config: ConfigDict, workdir: str, config_file: str = "") -> None:
    """Judge a model, write what came out, and print it."""
    found = {"file": config_file, **judge(config, workdir)}
    files.write_json(pathlib.Path(workdir) / "fresh" / "fresh.json", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    launch(main, "experiments/configs/cifar10.py", many=True)
