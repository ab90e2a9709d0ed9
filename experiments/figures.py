"""Every figure of the paper, and those it lacks, as PNG and SVG with the numbers behind them as JSON.

    python -m experiments.figures --output=out/figures                       all that a laptop can make, on the digits
    python -m experiments.figures --output=out/figures --runs=W1/attack,...  those of finished attack runs
    python -m experiments.figures --output=out/figures --model               those that ask the digits model itself

Without `--runs` it makes the synthetic studies, attacks the digits model by `configs/digits_figures.py` (the run is
kept in OUTPUT/digits and continued if it was interrupted), draws that run, and measures what needs the model itself.

From the closed form: three_cases (the paper's overview), bias_crowding, dataset_size and query_budget (its grids with q
and n fixed), denoiser_1d. From runs: distributions and stability (the paper's); frontier, AUC and TPR against queries;
roc, log-log. From the digits model: norm_effect, what p does to PIA and SimA; ideal_gap, how far a trained network is
from the ideal denoiser of its own members, which the paper leaves open.
"""

import pathlib
from collections.abc import Callable, Sequence

from absl import flags
from matplotlib.figure import Figure
from ml_collections.config_dict import ConfigDict

from dime_jax.report import figures
from experiments import attack, model_figures, run_figures, synthetic
from experiments.configs import digits_figures
from experiments.configs import synthetic as synthetic_config
from experiments.launch import run_app
from experiments.runs import Run, read_run
from experiments.study_data import open_study

RUN_FIGURES: dict[str, tuple[Callable[[Sequence[Run]], object], Callable[..., Figure]]] = {
    "distributions": (run_figures.distributions, run_figures.draw_distributions),
    "stability": (run_figures.stability, run_figures.draw_stability),
    "frontier": (run_figures.frontier, run_figures.draw_frontier),
    "roc": (run_figures.roc, run_figures.draw_roc),
}


def draw_runs(runs: Sequence[Run], output: pathlib.Path) -> None:
    """Draw the figures of finished runs."""
    output.mkdir(parents=True, exist_ok=True)
    with figures.style():
        for name, (compute, draw) in RUN_FIGURES.items():
            synthetic.save_study(output, name, compute(runs), draw)


def draw_model(config: ConfigDict, workdir: pathlib.Path, output: pathlib.Path) -> None:
    """Draw the figures that ask the model, on the halves that an attack with the config would have.

    Args:
      config: with a section `figures`.
      workdir: where the model is, if it is not a shipped one.
      output: where the figures go.
    """
    output.mkdir(parents=True, exist_ok=True)
    study = open_study(config, workdir)
    halves = attack.halves_of(config, study)
    denoiser = attack.load_model(config, workdir, study)
    shape, section = denoiser.image_shape, config.figures
    calibration = model_figures.read_half(study, halves.calibration, shape)
    test = model_figures.read_half(study, halves.test, shape)
    train = model_figures.read_images(study, study.split.member, shape)
    effect = model_figures.norm_effect(denoiser, calibration, test, section.p, section.norm_timesteps)
    few = test.map(lambda side: side[: section.gap_images])
    gap = model_figures.ideal_gap(denoiser, train, few, section.gap_timesteps, config.seed)
    with figures.style():
        synthetic.save_study(output, "norm_effect", effect, model_figures.draw_norm_effect)
        synthetic.save_study(output, "ideal_gap", gap, model_figures.draw_ideal_gap)


def draw_all(output: pathlib.Path, variant: str = "laptop") -> None:
    """Draw everything that needs no accelerator; "smoke" is for tests."""
    synthetic.run(synthetic_config.get_config("smoke" if variant == "smoke" else "paper"), output)
    config, workdir = digits_figures.get_config(variant), output / "digits"
    attack.run(config, workdir, f"experiments/configs/digits_figures.py:{variant}")
    run = read_run(workdir / "attack")
    draw_runs([run], output)
    draw_model(config, workdir, output)


if __name__ == "__main__":
    _OUTPUT = flags.DEFINE_string("output", "out/figures", "where figures and numbers go")
    _RUNS = flags.DEFINE_list("runs", [], "run directories: W/attack, separated by commas")
    _MODEL = flags.DEFINE_bool("model", False, "only what asks the digits model itself: norm_effect and ideal_gap")

    def _main() -> None:
        output = pathlib.Path(_OUTPUT.value)
        if _MODEL.value:
            draw_model(digits_figures.get_config(), output, output)
        elif _RUNS.value:
            draw_runs([read_run(run) for run in _RUNS.value], output)
        else:
            draw_all(output)

    run_app(_main)
