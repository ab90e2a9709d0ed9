"""`dime-jax`: the command line. Errors are one line and exit code 2; `--debug` shows where they come from.

What a command needs is imported when it runs, so that --help answers at once.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

# Which of --images, --split, --members and --heldout go together.
_WAYS_TO_NAME_IMAGES = ((False, False, True, True), (True, True, False, False))


def _audit(args: argparse.Namespace) -> None:
    import rich.console

    from dime_jax import auditing
    from dime_jax.report import tables

    console = rich.console.Console(width=None if sys.stdout.isatty() else 132)
    console.print("Model: the closed-form ideal denoiser of 898 of scikit-learn's digits. Candidates: all 1797.")
    results = auditing.closed_form_audit(args.output, args.seed)
    tables.print_results(results, console)
    console.print(f"{results['queries_made']:,} queries made; numbers in {args.output / 'results.json'}")


def _score(args: argparse.Namespace) -> None:
    from dime_jax import data, pipeline, planning, scoring
    from dime_jax.checkpoints import load_denoiser
    from dime_jax.query_ledger import Budget

    if (bool(args.images), bool(args.split), bool(args.members), bool(args.heldout)) not in _WAYS_TO_NAME_IMAGES:
        raise ValueError("expected either --members and --heldout, or --images and --split")
    denoiser = load_denoiser(args.model)
    if args.split:
        source = data.open_source(args.images)
        split = data.read_split(args.split, source)
    else:
        members, heldout = data.open_source(args.members), data.open_source(args.heldout)
        source, split = data.join(members, heldout), data.split_of_joined(members, heldout)
    halves = data.halves(
        split, source.ids, seed=args.seed, calibration_size=args.calibration_size, test_size=args.test_size
    )
    jobs = planning.grid_jobs(args.attacks, args.profile, args.queries)
    micro_batch = scoring.tune_micro_batch(denoiser) if args.tune else args.micro_batch
    options = scoring.Options(micro_batch=micro_batch, budget=Budget(args.max_queries, args.max_queries_per_image))
    run = pipeline.begin(args.run, jobs, halves, args.seed)
    table = pipeline.score_half(run, args.half, denoiser, source, options=options)
    print(f"{len(table.index):,} images of the {args.half} half scored, {table.queries_made:,} queries made")


def _calibrate(args: argparse.Namespace) -> None:
    from dime_jax import pipeline

    for frozen in pipeline.calibrate_run(args.run):
        print(f"{frozen.attack}: {frozen.setting}, calibration AUC {frozen.auc:.4f}")


def _evaluate(args: argparse.Namespace) -> None:
    import rich.console

    from dime_jax import pipeline
    from dime_jax.report import tables

    results = pipeline.evaluate_run(args.run)
    tables.print_results(results, rich.console.Console(width=None if sys.stdout.isatty() else 132))


def _convert(args: argparse.Namespace) -> None:
    from checkpoints_convert.convert import Options, convert, describe

    options = Options(args.dialect, args.weights, args.model_flags, args.image_size, args.schedule)
    print(describe(convert(args.source, args.output, options)))


def _check_model(args: argparse.Namespace) -> None:
    import numpy as np

    from dime_jax import data
    from dime_jax.checkpoints import load_denoiser
    from dime_jax.models.check import check_model

    denoiser = load_denoiser(args.model)
    source = data.open_source(args.images)
    transform = data.transform_for(source, denoiser.image_shape)
    batch = next(data.batches(source, min(args.count, len(source)), transform))
    labels = None if denoiser.num_classes is None or batch.labels is None else batch.labels[batch.mask]
    found = check_model(denoiser, batch.images[batch.mask], args.output, labels=labels)
    for t, error in zip(found.timesteps, np.asarray(found.errors)):
        print(f"t = {t:4d}   noise-prediction error {error:.4f}")
    print(f"samples in {found.figure}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(prog="dime-jax", description="Membership inference for diffusion models.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    audit = _add(commands, "audit", _audit, "which images was a model trained on?", "dime-jax audit --output out/audit")
    audit.add_argument("--output", type=pathlib.Path, required=True, help="directory for results.json")
    audit.add_argument("--seed", type=int, default=0, help="seed of split, halves and draws (default 0)")

    convert = _add(
        commands,
        "convert",
        _convert,
        "make a model directory from a PyTorch checkpoint or a diffusers folder",
        "dime-jax convert --source ckpt.pt --output models/cifar10",
    )
    convert.add_argument(
        "--source", required=True, help="checkpoint file (.pt, .ckpt, .safetensors) or diffusers folder"
    )
    convert.add_argument("--output", required=True, help="model directory to write; must not exist")
    convert.add_argument("--dialect", default="auto", help="whose tensor names the checkpoint has (default auto)")
    convert.add_argument("--weights", choices=["ema", "raw"], help="default: the EMA if there is one")
    convert.add_argument("--model_flags", help="JSON file with a guided-diffusion network's constructor arguments")
    convert.add_argument("--image_size", type=int, help="height and width, where the checkpoint does not hold them")
    convert.add_argument(
        "--schedule", help="linear[:T:START:END], scaled_linear[:…], cosine[:T] or a JSON file of betas"
    )

    score = _add(
        commands,
        "score",
        _score,
        "run every attack on one half of the images, or finish a run that was interrupted",
        "dime-jax score out/run --model models/mine --members a/ --heldout b/ --half calibration",
    )
    score.add_argument("run", type=pathlib.Path, help="directory of the run")
    score.add_argument("--model", required=True, help="model directory, or the name of a shipped model")
    score.add_argument("--members", help="images that the model was trained on: a folder or source URI")
    score.add_argument("--heldout", help="images that it was not trained on")
    score.add_argument("--images", help="with --split: the source that the split's indices are about")
    score.add_argument("--split", help="split file (.npz) of SecMI or dime-mia, instead of --members and --heldout")
    score.add_argument("--half", choices=["calibration", "test"], default="calibration", help="default: calibration")
    score.add_argument("--attacks", nargs="+", help="default: all")
    score.add_argument("--profile", choices=["quick", "paper"], default="quick", help="the grid (default quick)")
    score.add_argument("--queries", nargs="+", type=int, help="query tiers q (default: all of each attack)")
    score.add_argument("--calibration_size", type=int, help="at most so many images per class in the calibration half")
    score.add_argument("--test_size", type=int, help="at most so many images per class in the test half")
    score.add_argument("--seed", type=int, default=0, help="seed of halves and draws (default 0)")
    score.add_argument("--micro_batch", type=int, help="images per device and call")
    score.add_argument("--tune", action="store_true", help="measure the fastest micro-batch first")
    score.add_argument("--max_queries", type=int, help="stop before more queries than this, over all resumes")
    score.add_argument("--max_queries_per_image", type=int, help="the same for every image")

    calibrate = _add(
        commands,
        "calibrate",
        _calibrate,
        "freeze each attack's setting from the calibration half; needs no model",
        "dime-jax calibrate out/run",
    )
    calibrate.add_argument("run", type=pathlib.Path, help="directory of the run")

    evaluate = _add(
        commands,
        "evaluate",
        _evaluate,
        "the frozen attacks on the test half; needs no model",
        "dime-jax evaluate out/run",
    )
    evaluate.add_argument("run", type=pathlib.Path, help="directory of the run")

    models = commands.add_parser("models", help="look at model directories")
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = _add(
        actions,
        "check",
        _check_model,
        "is a converted model alive? Noise-prediction error over t, and a sheet of samples",
        "dime-jax models check models/cifar10 --images cifar10:DIR --output out/check",
    )
    check.add_argument("model", help="model directory, or the name of a shipped model")
    check.add_argument("--images", required=True, help="a few images of the model's kind: a folder or source URI")
    check.add_argument("--output", type=pathlib.Path, required=True, help="directory for check.json and samples.png")
    check.add_argument("--count", type=int, default=16, help="how many images to use (default 16)")
    return parser


def _add(commands: Any, name: str, run: Callable[..., None], what: str, example: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=what, description=what, epilog=f"example: {example}")
    parser.set_defaults(command_function=run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0 when done, 2 for bad input."""
    args = build_parser().parse_args(argv)
    try:
        args.command_function(args)
    except (ValueError, OSError) as error:
        if args.debug:
            raise
        print(f"dime-jax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
