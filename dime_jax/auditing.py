"""The audit: score known members and held-out images with every attack, calibrate on one half, report on the other.

The model here is the closed-form ideal denoiser of half of scikit-learn's digits: a perfect memoriser, so what the
attacks differ in is how much noise they see through.
"""

import pathlib
from typing import Any

import numpy as np

from dime_jax import data, pipeline, planning
from dime_jax.ideal import IdealDenoiser
from dime_jax.schedule import linear_schedule

# Below t = 300 the ideal denoiser knows its 898 digits perfectly and every attack is right.
CLOSED_FORM_TIMES = (300, 400, 500)
CLOSED_FORM_TIERS = (1, 5, 10)


def closed_form_audit(output: pathlib.Path, seed: int = 0) -> dict[str, Any]:
    """Audit the ideal denoiser of a random half of the digits; `output` then holds the run, and results.json."""
    source = data.open_source("digits")
    split = data.random_split(source, len(source) // 2, seed)
    transform = data.transform_for(source, (8, 8, 1))
    members = np.stack([transform(source[i].image) for i in split.member])
    jobs = planning.grid_jobs(None, "quick", CLOSED_FORM_TIERS, [{"t": t} for t in CLOSED_FORM_TIMES])
    return pipeline.run(
        output,
        IdealDenoiser(members, linear_schedule()),
        source,
        data.halves(split, source.ids, seed=seed),
        jobs,
        seed=seed,
    )
