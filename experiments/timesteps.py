"""Would the bands of several timesteps say more than those of one? From the calibration halves of finished runs.

    STUDY=docs/results/cifar10_overnight
    python -m experiments.timesteps --runs=$STUDY/seed_1,$STUDY/seed_2,$STUDY/seed_3 --output=$STUDY

One probe at each of one, two or three timesteps, and at all of the grid, is read in bands as `dime_bands` reads one;
beside that, ten probes at one timestep. The calibration half was asked at every setting, so no model is needed. It is
cut in two: one part chooses timesteps, γ and weights, the other judges them, both ways, for several cuts. With
all timesteps at once only γ and the weights are left to choose.

Writes timesteps.json, .png and .svg; the first, kept below docs/results, becomes a section of the results page.
"""

import itertools
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from dime_jax.attacks import Attack, Recipe, Setting, bands
from dime_jax.attacks.dime import FAMILY
from dime_jax.attacks.rules import Discriminant
from dime_jax.report import figures
from dime_jax.scoring import planning
from experiments import cross_fit, markdown, questions, synthetic
from experiments.launch import run_app
from experiments.runs import CalibrationHalf, Run, group_runs, read_run

NAME = "timesteps"
CUTS = 5
_PROBES = 10


class Variant(NamedTuple):
    """One way to spend queries.

    Attributes:
      title: in words.
      queries: per image.
      auc: of each model, the mean over cuts.
    """

    title: str
    queries: int
    auc: list[float]


class TimestepStudy(NamedTuple):
    """What several models say.

    Attributes:
      study: config and variant.
      models: what each is called.
      cuts: how often each calibration half was cut in two.
      variants: by the number of timesteps, then by that of probes.
    """

    study: str
    models: list[str]
    cuts: int
    variants: list[Variant]


def several_timesteps(setting: Setting) -> Recipe:
    """The bands of a probe's answer at each of the timesteps t_0, t_1, …, and of the image."""
    times = [int(value) for name, value in sorted(setting.items()) if name.startswith("t_")]
    return bands.answers_at(times, float(setting["gamma"]))


def attack_at(count: int) -> Attack:
    """The attack that reads so many timesteps."""
    signs = (1,) * (count * bands.BANDS) + (0,) * bands.BANDS
    rule = Discriminant(asked=count * bands.BANDS)
    title = f"DIME bands at {count} timesteps"
    return Attack(f"{NAME}_{count}", title, "ours", recipe=several_timesteps, signs=signs, rule=rule, family=FAMILY)


def run(runs: Sequence[Run], cuts: int = CUTS) -> TimestepStudy:
    """Judge every variant on every model.

    Raises:
      ValueError: if the runs are not of one study, or were not asked what the bands need.
    """
    studies = group_runs(runs)
    if len(studies) != 1:
        raise ValueError(f"expected runs of one study, got {', '.join(study.first.name for study in studies)}")
    (study,) = studies
    found = [_judge(run.calibration_half(), run.directory, cuts) for run in study.runs]
    shared = [key for key in found[0] if all(key in one for one in found)]
    variants = [Variant(title, queries, [one[title, queries] for one in found]) for title, queries in shared]
    return TimestepStudy(study.first.name, study.labels, cuts, variants)


def _judge(half: CalibrationHalf, directory: pathlib.Path, cuts: int) -> Mapping[tuple[str, int], float]:
    """AUC by title and queries, the mean over cuts."""
    parts = [cross_fit.cut(half, seed) for seed in range(cuts)]
    return {
        key: float(np.mean([cross_fit.auc(part, cross_fit.scores(part, jobs)) for part in parts]))
        for key, jobs in _variants(half, directory).items()
    }


def _variants(half: CalibrationHalf, directory: pathlib.Path) -> dict[tuple[str, int], list[planning.Job]]:
    """The settings that each variant chooses from."""
    settings = [job.setting for job in half.jobs if job.attack.name == "dime_bands"]
    if not settings:
        raise ValueError(f"expected a run of dime_bands in {directory}")
    times, gammas = (sorted({setting[axis] for setting in settings}) for axis in ("t", "gamma"))
    found = {}
    for count in sorted({1, 2, 3, len(times)}):
        if count <= len(times):
            some = itertools.product(itertools.combinations(times, count), gammas)
            title = f"one probe at {'each timestep' if count == len(times) else _words(count)}"
            found[title, count] = [_job(chosen, gamma) for chosen, gamma in some]
    more = [job for job in half.jobs if job.attack.name == "dime_bands_all" and job.setting["q"] == _PROBES]
    if more:
        found[f"{_PROBES} probes and the scaled image at one timestep", _PROBES + 1] = more
    return found


def _job(times: Sequence[float], gamma: float) -> planning.Job:
    named = {f"t_{place:02d}": t for place, t in enumerate(times)}
    return planning.Job(attack_at(len(times)), {**named, "gamma": gamma})


def _words(count: int) -> str:
    return {1: "one timestep", 2: "two timesteps", 3: "three timesteps"}[count]


# ------------------------------------------------------------------------------------------------------------ rendering


def draw(numbers: TimestepStudy) -> Figure:
    """AUC over queries, a line for each model; ten probes at one timestep stand apart."""
    figure, axes = figures.new_figure(1, 1, height=2.5)
    panel = axes[0][0]
    *timesteps, last = numbers.variants
    probes = [last] if last.title.startswith(f"{_PROBES} probes") else []
    timesteps += [] if probes else [last]
    for place, (model, series) in enumerate(zip(numbers.models, figures.SERIES)):
        queries = [variant.queries for variant in timesteps]
        panel.plot(queries, [100 * variant.auc[place] for variant in timesteps], **series._asdict(), label=model)
        for variant in probes:
            panel.plot(variant.queries, 100 * variant.auc[place], marker="*", ms=9, ls="", color=series.color)
    panel.set(xlabel="queries: timesteps with one probe each (stars: ten probes at one)", ylabel="AUC, cross-fitted, %")
    panel.legend(loc="best", fontsize=6)
    return figure


def to_section(numbers: TimestepStudy, picture: str) -> str:
    """A section of the results page.

    Args:
      numbers: of one study.
      picture: the link to its figure.
    """
    rows = []
    for variant in numbers.variants:
        mean = questions.over_models(variant.auc, least=0.0)
        cells = [f"{100 * auc:.1f}" for auc in variant.auc] + ([markdown.percent(mean)] if mean else [])
        rows.append([variant.title, str(variant.queries), *cells])
    several = [f"mean of {len(numbers.models)} models"] if len(numbers.models) > 1 else []
    return "\n".join(
        [
            f"## More timesteps, or more probes? ({numbers.study})\n",
            "DIME's answers in bands, from one probe at each of several timesteps, and from ten probes at one "
            f"(`experiments.timesteps`). Calibration halves only, cross-fitted over {numbers.cuts} cuts: one part "
            "chooses timesteps, γ and weights, the other judges. AUC in per cent.\n",
            f"![AUC over queries]({picture})\n",
            markdown.table(["", "queries", *numbers.models, *several], rows),
        ]
    )


if __name__ == "__main__":
    _RUNS = flags.DEFINE_list("runs", None, "run directories of one study, separated by commas", required=True)
    _OUTPUT = flags.DEFINE_string("output", None, "directory for the numbers and the figure", required=True)

    def _main(argv: list[str]) -> None:
        del argv
        output = pathlib.Path(_OUTPUT.value)
        try:
            output.mkdir(parents=True, exist_ok=True)
            numbers = run([read_run(directory) for directory in _RUNS.value])
        except (ValueError, OSError) as error:
            sys.exit(f"error: {error}")
        with figures.style(**{"savefig.dpi": 150}):
            synthetic.save_study(output, NAME, numbers, draw)
        print(to_section(numbers, f"{NAME}.png"))

    run_app(_main)
