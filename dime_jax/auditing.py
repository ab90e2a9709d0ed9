"""The audit: score known members and held-out images with every attack, calibrate on one half, report on the other.

The model here is the closed-form ideal denoiser of half of scikit-learn's digits: a perfect memoriser, so what the
attacks differ in is how much noise they see through.
"""

import json
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import rich.progress

from dime_jax import data, draws
from dime_jax.attacks import Attack, Setting, attack_names, get_attack, grid
from dime_jax.calibration import Outcome, TermPair, calibrate, evaluate
from dime_jax.denoiser import PRECISION, Denoiser
from dime_jax.ideal import IdealDenoiser
from dime_jax.schedule import linear_schedule

SCHEMA_VERSION = 1
# Below t = 300 the ideal denoiser knows its 898 digits perfectly and every attack is right.
CLOSED_FORM_TIMES = (300, 400, 500)
CLOSED_FORM_MOST_PROBES = 10


def run_terms(
    attack: Attack, denoiser: Denoiser, images: jax.Array, ids: Sequence[str], setting: Setting, seed: int
) -> np.ndarray:
    """The attack's terms [columns, n] for all images at one setting."""
    batch = draws.Draws(jax.random.key(seed), draws.id_numbers(ids))
    return np.asarray(attack.run(denoiser.eps_fn(), denoiser.schedule, images, batch, setting))


def closed_form_audit(output: pathlib.Path, seed: int = 0) -> dict[str, Any]:
    """Audit the ideal denoiser of a random half of the digits; writes `results.json` into `output` and returns it."""
    output.mkdir(parents=True, exist_ok=True)
    source = data.open_source("digits")
    split = data.random_split(source, len(source) // 2, seed)
    halves = data.halves(split, source.ids, seed=seed)
    transform = data.transform_for(source, (8, 8, 1))
    images = np.concatenate([b.images[b.mask] for b in data.batches(source, 256, transform)])
    denoiser = IdealDenoiser(images[split.member], linear_schedule())

    def terms(attack: Attack, half: data.Split, setting: Setting) -> TermPair:
        sides = (half.member, half.heldout)
        return TermPair(
            *(run_terms(attack, denoiser, images[i], [source.ids[j] for j in i], setting, seed) for i in sides)
        )

    rows = []
    for attack, tier in rich.progress.track(list(_attacks_and_tiers()), "attacks", transient=True):
        settings = _closed_form_settings(attack, tier)
        calibration = calibrate(
            attack, denoiser.schedule, settings, [terms(attack, halves.calibration, setting) for setting in settings]
        )
        start = time.perf_counter()
        test = terms(attack, halves.test, calibration.setting)
        seconds = (time.perf_counter() - start) / (len(halves.test.member) + len(halves.test.heldout))
        outcome = evaluate(calibration, test, seed=seed)
        rows.append(_row(outcome, attack.queries(calibration.setting), seconds))

    results = {
        "schema_version": SCHEMA_VERSION,
        "results": rows,
        "fingerprints": {"model": denoiser.fingerprint, "data": data.fingerprint(source)},
        "precision": PRECISION,
        "seed": seed,
        "queries_made": denoiser.queries.count,
        "warnings": [],
    }
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def _attacks_and_tiers() -> Iterator[tuple[Attack, int | None]]:
    for name in attack_names():
        attack = get_attack(name)
        if not attack.tiers:
            yield attack, None
        yield from ((attack, tier) for tier in attack.tiers if tier <= CLOSED_FORM_MOST_PROBES)


def _closed_form_settings(attack: Attack, tier: int | None) -> list[Setting]:
    """The attack's quick grid, moved to the noise levels that tell attacks on the closed form apart."""
    axes = {key: sorted({s[key] for s in attack.settings("quick", tier)}) for key in attack.settings("quick", tier)[0]}
    return grid(**{**axes, "t": CLOSED_FORM_TIMES})


def _row(outcome: Outcome, queries: int, seconds: float) -> dict[str, Any]:
    """One row of results.json."""
    calibration, metrics = outcome.calibration, outcome.metrics
    phi = {} if calibration.phi is None else {"phi": calibration.phi}
    tau = calibration.tau if np.isfinite(calibration.tau) else None  # no threshold beats calling nobody a member
    return {
        "attack": calibration.attack,
        "setting": {**calibration.setting, **phi},
        "auc": metrics.auc._asdict(),
        "asr": metrics.asr._asdict(),
        "tpr_at_1pct_fpr": metrics.tpr_at_fpr[0.01]._asdict(),
        "attained_fpr": metrics.attained_fpr[0.01],
        "false_positives": metrics.false_positives[0.01],
        "at_threshold": {"tau": tau, "tpr": outcome.at_threshold.tpr, "fpr": outcome.at_threshold.fpr},
        "queries_per_image": queries,
        "seconds_per_image": seconds,
    }
