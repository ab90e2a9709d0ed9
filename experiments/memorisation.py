"""When does memorisation become visible? The training loss, and the AUC of a one-query attack, over updates.

    python -m experiments.memorisation --config=experiments/configs/cifar10.py:overnight --workdir=W [--seeds=1,2,3]

reads what `experiments.train` leaves in W: the log, and a model for every `train.snapshot_every` updates. Each model is
asked one query per image and timestep about the calibration half, by SimA (l4) at timesteps that are fixed here:
nothing is chosen, and the test half plays no part. Writes W/progress.json, progress.png and progress.svg; the first,
kept below docs/results, becomes a section of its study's page.
"""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from ml_collections.config_dict import ConfigDict

import dime_jax as dj
from dime_jax.evidence import metrics
from dime_jax.report import figures
from dime_jax.training.loop import SNAPSHOTS
from dime_jax.training.records import read_records
from experiments import attack, model_figures, synthetic
from experiments.launch import launch
from experiments.study_data import open_study

TIMES = (30, 70, 150)


class TrainingProgress(NamedTuple):
    """What a training showed on its way.

    Attributes:
      study: config and variant, with the seed of the training.
      images: members and held-out images that were asked about.
      logged: updates at which the log has a line.
      loss: mean training loss before each of them.
      updates: of each snapshot.
      fingerprints: of their weights.
      auc: of SimA (l4) at each snapshot, by timestep.
      visible: by timestep, the first snapshot from which on the interval of the AUC stays above 1/2; None if there is
        none.
    """

    study: str
    images: tuple[int, int]
    logged: list[int]
    loss: list[float]
    updates: list[int]
    fingerprints: list[str]
    auc: dict[str, list[metrics.Estimate]]
    visible: dict[str, int | None]


def run(config: ConfigDict, workdir: pathlib.Path, study_name: str) -> TrainingProgress:
    """Ask every snapshot in the workdir.

    Raises:
      ValueError: if there is none.
    """
    study = open_study(config, workdir)
    half = attack.halves_of(config, study).calibration
    images, auc = None, {str(t): list[metrics.Estimate]() for t in TIMES}
    updates, fingerprints = [], []
    for number, model in _snapshots(workdir):
        denoiser = dj.load_denoiser(model)
        images = images or model_figures.read_half(study, half, denoiser.image_shape)
        scores = model_figures.norm_scores(denoiser, "SimA", images, [4.0], TIMES)
        for place, t in enumerate(TIMES):
            auc[str(t)].append(metrics.auc_interval(scores.member[0, place], scores.heldout[0, place]))
        updates.append(number)
        fingerprints.append(denoiser.fingerprint)
    lines = read_records(workdir / "train")
    return TrainingProgress(
        study_name,
        (len(half.member), len(half.heldout)),
        [line["step"] for line in lines],
        [line["loss"] for line in lines],
        updates,
        fingerprints,
        auc,
        {t: first_visible(updates, estimates) for t, estimates in auc.items()},
    )


def first_visible(updates: list[int], aucs: list[metrics.Estimate]) -> int | None:
    """Return the first of the snapshots from which on no interval reaches down to 1/2."""
    unseen = [number for number, auc in enumerate(aucs) if auc.low <= 0.5]
    first = unseen[-1] + 1 if unseen else 0
    return updates[first] if first < len(updates) else None


def draw(numbers: TrainingProgress) -> Figure:
    """Draw two panels over updates: the loss, and the AUC by timestep with its interval."""
    figure, axes = figures.new_figure(1, 2, height=2.5)
    loss, auc = axes[0]
    loss.plot(numbers.logged, numbers.loss, color=figures.SERIES[0].color)
    loss.set(title="training loss", yscale="log", ylabel="mean squared error")
    for (t, estimates), series in zip(numbers.auc.items(), figures.SERIES):
        values = 100 * np.array(estimates)
        auc.plot(numbers.updates, values[:, 0], **series._asdict(), label=f"$t$ = {t}")
        auc.fill_between(numbers.updates, values[:, 1], values[:, 2], color=series.color, alpha=0.15, linewidth=0)
    auc.axhline(50, color=figures.MUTED, lw=0.7)
    auc.set(title="SimA (l4), one query", ylabel="AUC, calibration half, %")
    auc.legend(loc="best", fontsize=6)
    for panel in axes[0]:
        panel.set_xlabel("updates")
    figures.letter_panels(axes)
    return figure


def _snapshots(workdir: pathlib.Path) -> Iterator[tuple[int, pathlib.Path]]:
    found = sorted((int(path.name), path) for path in (workdir / SNAPSHOTS).glob("[0-9]*") if path.name.isdecimal())
    if not found:
        raise ValueError(f"no models in {workdir / SNAPSHOTS}: train with --config.train.snapshot_every=N")
    yield from found


def main(config: ConfigDict, workdir: str, config_file: str = "") -> None:
    """Ask, draw, and say when it became visible."""
    directory = pathlib.Path(workdir)
    name = pathlib.Path(config_file.partition(":")[0]).stem + ":" + config_file.partition(":")[2]
    numbers = run(config, directory, f"{name.rstrip(':')}, seed {config.train.recipe.seed}")
    with figures.style(**{"savefig.dpi": 150}):
        synthetic.save_study(directory, "progress", numbers, draw)
    for t, number in numbers.visible.items():
        print(f"t = {t}: " + ("not visible so far" if number is None else f"visible from {number:,} updates on"))


if __name__ == "__main__":
    launch(main, "experiments/configs/cifar10.py", many=True)
