"""`dime-jax`: the command line.

Exit codes: 0 done, 1 a condition of --fail-if holds, 2 bad input or a failure, also a model that is no denoiser where
--fail-if is given. Errors are one line on standard error; `--debug` shows where they come from. Results go to standard
output, progress to standard error. What a command needs is imported when it runs, so that --help answers at once.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from checkpoints_convert.options import add_conversion_arguments, conversion_options

if TYPE_CHECKING:
    import rich.console

    from dime_jax.denoiser import Denoiser

DONE, GATE_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

# Which of --images, --split, --members and --heldout go together.
_WAYS_TO_NAME_IMAGES = ((False, False, True, True), (True, True, False, False))


def _audit(args: argparse.Namespace) -> int:
    from dime_jax import auditing
    from dime_jax.auditing import gate

    settings = {name: getattr(args, name) for name in _AUDIT_SETTINGS}
    config = auditing.AuditConfig(**settings, options=_options(args), conversion=conversion_options(args))
    for condition in args.fail_if:
        gate.check_possible(condition, gate.AUDIT_KEYS, config.result_labels())
    return _show_audit(auditing.audit(config), args)


def _report(args: argparse.Namespace) -> int:
    from dime_jax import auditing

    directory = args.audit
    if (directory / "compare.json").is_file():
        return _show_comparison(auditing.report_comparison(directory), args)
    if not (directory / "audit.json").is_file():
        raise ValueError(f"{directory} holds no audit and no comparison: no audit.json or compare.json in it")
    return _show_audit(auditing.report(directory), args)


def _compare(args: argparse.Namespace) -> int:
    from dime_jax import auditing
    from dime_jax.auditing import gate

    settings = {name: getattr(args, name) for name in _COMPARE_SETTINGS}
    config = auditing.AuditConfig(
        model=args.before, **settings, options=_options(args), conversion=conversion_options(args)
    )
    for condition in args.fail_if:
        gate.check_possible(condition, gate.COMPARE_KEYS, [])
    return _show_comparison(auditing.compare(config, args.after), args)


def _score(args: argparse.Namespace) -> int:
    from dime_jax import data, model_check, pipeline, planning, scoring
    from dime_jax.auditing.config import PROFILES

    if (bool(args.images), bool(args.split), bool(args.members), bool(args.heldout)) not in _WAYS_TO_NAME_IMAGES:
        raise ValueError("expected either --members and --heldout, or --images and --split")
    sizes = PROFILES[args.profile].replaced(args.calibration_size, args.test_size, args.queries)
    planning.check_tiers(args.attacks, args.queries)
    jobs = planning.grid_jobs(args.attacks, args.profile, sizes.queries)
    options = _options(args)
    denoiser = _open_model(args, args.run)
    if args.split:
        source = data.open_source(args.images)
        split = data.read_split(args.split, source)
    else:
        members, heldout = data.open_source(args.members), data.open_source(args.heldout)
        source, split = data.join(members, heldout), data.split_of_joined(members, heldout)
    halves = data.halves(
        split,
        source.ids,
        seed=args.seed,
        groups=source.identities,
        calibration_size=sizes.calibration_size,
        test_size=sizes.test_size,
    )
    if args.tune:
        options = dataclasses.replace(options, micro_batch=scoring.tune_micro_batch(denoiser))
    run = pipeline.begin(args.run, jobs, halves, args.seed)
    check = model_check.check_once(run, denoiser, source, split.heldout, seed=args.seed, options=options)
    if not check.passed:
        print(f"warning: {check.summary}", file=sys.stderr)
    table = pipeline.score_half(run, args.half, denoiser, source, options=options)
    print(f"{len(table.index):,} images of the {args.half} half scored, {table.queries_made:,} queries made")
    return DONE


def _calibrate(args: argparse.Namespace) -> int:
    from dime_jax import pipeline

    for frozen in pipeline.calibrate_run(args.run):
        print(f"{frozen.attack}: {frozen.setting}, calibration AUC {frozen.auc:.4f}")
    return DONE


def _evaluate(args: argparse.Namespace) -> int:
    from dime_jax import pipeline
    from dime_jax.report import tables, wording

    if (args.run / "audit.json").is_file():
        raise ValueError(f"{args.run} is an audit: expected dime-jax report {args.run}")
    results = pipeline.evaluate_run(args.run)
    if not args.json:
        tables.print_results(results, _console())
        tables.print_alarms(wording.evaluation_alarms(results), _console())
    for warning in results["warnings"]:
        print(f"dime-jax: warning: {warning}", file=sys.stderr)
    return _finish(results, args)


def _convert(args: argparse.Namespace) -> int:
    from checkpoints_convert.convert import convert, describe

    print(describe(convert(args.source, args.output, conversion_options(args))))
    return DONE


def _check_model(args: argparse.Namespace) -> int:
    import numpy as np

    from dime_jax import data
    from dime_jax.models.check import check_model

    denoiser = _open_model(args, args.output)
    source = data.open_source(args.images)
    transform = data.transform_for(source, denoiser.image_shape)
    batch = next(data.batches(source, min(args.count, len(source)), transform))
    labels = None if denoiser.num_classes is None or batch.labels is None else batch.labels[batch.mask]
    found = check_model(denoiser, batch.images[batch.mask], args.output, labels=labels)
    for t, error in zip(found.timesteps, np.asarray(found.errors)):
        print(f"t = {t:4d}   noise-prediction error {error:.4f}")
    print(found.check.summary)
    print(f"samples in {found.figure}")
    return DONE


# --------------------------------------------------------------------------------------------------- what is printed


def _show_audit(result: Any, args: argparse.Namespace) -> int:
    from dime_jax.report import tables

    if not args.json:
        console = _console()
        if result.results["results"]:
            tables.print_results(result.results, console)
        tables.print_headline(result.results["headline"], result.results["warnings"], console)
        print(f"{result.results['queries_made']:,} queries made. The report: {result.report}")
    return _finish(result.results, args)


def _show_comparison(result: Any, args: argparse.Namespace) -> int:
    from dime_jax.report import tables

    if not args.json:
        tables.print_headline(result.results["headline"], result.results["warnings"], _console())
        print(f"{result.results['queries_made']:,} queries made. The report: {result.report}")
    return _finish(result.results, args)


def _finish(results: Mapping[str, Any], args: argparse.Namespace) -> int:
    """Print results for programs, and check the conditions."""
    from dime_jax.auditing import gate

    if args.json:
        print(json.dumps(results, indent=2))
    if args.fail_if:
        gate.refuse_unjudged(results)
    failed = [condition for condition in args.fail_if if gate.check(condition, results)]
    for condition in failed:
        print(f"dime-jax: the gate failed: {condition}", file=sys.stderr)
    return GATE_FAILED if failed else DONE


def _console() -> "rich.console.Console":
    import rich.console

    return rich.console.Console(width=None if sys.stdout.isatty() else 132)


def _open_model(args: argparse.Namespace, cache: pathlib.Path) -> "Denoiser":
    from dime_jax.checkpoints import open_model

    model = open_model(args.model, cache, conversion_options(args))
    print(model.describe(), file=sys.stderr)
    return model.denoiser


def _options(args: argparse.Namespace) -> Any:
    from dime_jax import scoring
    from dime_jax.query_ledger import Budget

    budget = Budget(args.max_queries, args.max_queries_per_image)
    return scoring.Options(micro_batch=args.micro_batch, budget=budget, silent=getattr(args, "quiet", False))


# ---------------------------------------------------------------------------------------------------------- the parser

_DEBUG_HELP = "show the traceback of an error"
_AUDIT_SETTINGS = (
    *("output", "model", "members", "heldout", "candidates", "images", "split", "labels", "groups", "attacks"),
    *("queries", "profile", "calibration_size", "test_size", "decide_with", "level", "timestep", "gamma", "delta"),
    *("randomised", "seed"),
)
_COMPARE_SETTINGS = (
    *("output", "members", "heldout", "candidates", "labels", "groups", "attacks", "queries", "profile"),
    *("calibration_size", "test_size", "decide_with", "level", "timestep", "gamma", "seed"),
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="dime-jax",
        description="Which images was a diffusion model trained on?",
        epilog="example: dime-jax audit    (audits the model that is shipped with the package)",
    )
    parser.add_argument("--debug", action="store_true", help=_DEBUG_HELP)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_audit(commands)
    _add_compare(commands)
    _add_stages(commands)
    _add_report(commands)
    _add_convert(commands)
    _add_models(commands)
    return parser


def _add_audit(commands: Any) -> None:
    audit = _add(
        commands,
        "audit",
        _audit,
        "which images was a model trained on, and how sure is that?",
        "dime-jax audit",
        "dime-jax audit --model ckpt.pt --members a/ --heldout b/ --candidates c/ --output out/mine",
        "dime-jax audit --model ckpt.pt --images cifar10:DIR --split CIFAR10_train_ratio0.5.npz --output out/cifar10",
        "dime-jax audit --model ckpt.pt --heldout b/ --candidates mine/ --groups owners.csv   (no members known)",
        'dime-jax audit --fail-if "dime@11.tpr_at_1pct_fpr.low > 0.05"',
    )
    audit.add_argument(
        "--output", type=pathlib.Path, default="out/audit", help="directory for the audit (default out/audit)"
    )
    audit.add_argument(
        "--model",
        default="digits",
        help="shipped model, model directory, checkpoint, diffusers folder (default digits)",
    )
    audit.add_argument("--members", help="images that the model was trained on: a folder or source URI")
    audit.add_argument("--heldout", help="images like them that it was not trained on")
    audit.add_argument("--images", help="with --split: the source that the split's indices are about")
    audit.add_argument("--split", help="split file (.npz) of SecMI or dime-mia, instead of --members and --heldout")
    audit.add_argument("--randomised", action="store_true", help="a coin decided who became a member, before training")
    audit.add_argument("--delta", type=float, default=0.0, help="of the privacy bound (default 0)")
    add_conversion_arguments(audit)
    _add_evidence_arguments(audit)
    _add_output_arguments(audit)


def _add_compare(commands: Any) -> None:
    compare = _add(
        commands,
        "compare",
        _compare,
        "did a deletion work? The same candidates against the model before and after",
        "dime-jax compare --before m1/ --after m2/ --candidates deleted/ --heldout b/ --output out/deletion",
    )
    compare.add_argument(
        "--output", type=pathlib.Path, default="out/compare", help="directory for the comparison (default out/compare)"
    )
    compare.add_argument("--before", required=True, help="the model before: as --model of audit")
    compare.add_argument("--after", required=True, help="the model after")
    compare.add_argument("--members", help="images that both models were trained on, to calibrate with")
    compare.add_argument("--heldout", help="images like them that neither was trained on")
    add_conversion_arguments(compare)
    _add_evidence_arguments(compare)
    _add_output_arguments(compare)


def _add_stages(commands: Any) -> None:
    score = _add(
        commands,
        "score",
        _score,
        "run every attack on one half of the images, or finish a run that was interrupted",
        "dime-jax score out/run --model models/mine --members a/ --heldout b/ --half calibration",
    )
    score.add_argument("run", type=pathlib.Path, help="directory of the run")
    score.add_argument("--model", required=True, help="as --model of audit")
    score.add_argument("--members", help="images that the model was trained on: a folder or source URI")
    score.add_argument("--heldout", help="images that it was not trained on")
    score.add_argument("--images", help="with --split: the source that the split's indices are about")
    score.add_argument("--split", help="split file (.npz) of SecMI or dime-mia, instead of --members and --heldout")
    score.add_argument("--half", choices=["calibration", "test"], default="calibration", help="default: calibration")
    score.add_argument("--tune", action="store_true", help="measure the fastest micro-batch first")
    add_conversion_arguments(score)
    _add_grid_arguments(score)
    _add_query_arguments(score)

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
        'dime-jax evaluate out/run --json --fail-if "dime@11.auc.low > 0.6"',
    )
    evaluate.add_argument("run", type=pathlib.Path, help="directory of the run")
    _add_output_arguments(evaluate)


def _add_report(commands: Any) -> None:
    report = _add(
        commands,
        "report",
        _report,
        "write the results and the page of an audit or comparison again; needs no model",
        "dime-jax report out/audit",
    )
    report.add_argument("audit", type=pathlib.Path, help="directory of the audit or comparison")
    _add_output_arguments(report)


def _add_convert(commands: Any) -> None:
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
    add_conversion_arguments(convert)


def _add_models(commands: Any) -> None:
    models = commands.add_parser("models", help="look at models", epilog="example: dime-jax models check -h")
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = _add(
        actions,
        "check",
        _check_model,
        "is a model alive? Noise-prediction error over t, and a sheet of samples",
        "dime-jax models check models/cifar10 --images cifar10:DIR --output out/check",
    )
    check.add_argument("model", help="as --model of audit")
    check.add_argument("--images", required=True, help="a few images of the model's kind: a folder or source URI")
    check.add_argument("--output", type=pathlib.Path, required=True, help="directory for check.json and samples.png")
    check.add_argument("--count", type=int, default=16, help="how many images to use (default 16)")
    add_conversion_arguments(check)


def _add_evidence_arguments(parser: argparse.ArgumentParser) -> None:
    """What `audit` and `compare` share."""
    parser.add_argument("--candidates", help="images to decide about")
    parser.add_argument("--labels", help="CSV file of lines id,label, for class-conditional models")
    parser.add_argument("--groups", help="CSV file of lines id,group: images of one owner or shoot count together")
    parser.add_argument("--level", type=float, default=0.05, help="false discovery rate of verdicts (default 0.05)")
    parser.add_argument("--decide_with", metavar="ATTACK@QUERIES", help="default: the best on the calibration half")
    parser.add_argument("--timestep", type=int, default=70, help="of DIME without known members (default 70)")
    parser.add_argument("--gamma", type=float, default=0.1, help="of DIME without known members (default 0.1)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    _add_grid_arguments(parser)
    _add_query_arguments(parser)


def _add_grid_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--attacks", nargs="+", help="default: all")
    parser.add_argument(
        "--profile",
        choices=["light", "quick", "paper"],
        default="quick",
        help="grid and sizes; light for slow models (default quick)",
    )
    parser.add_argument("--queries", nargs="+", type=int, help="query tiers q (default: those of the profile)")
    parser.add_argument("--calibration_size", type=int, help="at most so many images per class choose the settings")
    parser.add_argument("--test_size", type=int, help="at most so many images per class are tested")
    parser.add_argument("--seed", type=int, default=0, help="seed of halves and draws (default 0)")


def _add_query_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--micro_batch", type=int, help="images per device and call")
    parser.add_argument(
        "--max_queries", type=int, help="stop before more queries than this in a stage, over all resumes"
    )
    parser.add_argument("--max_queries_per_image", type=int, help="the same for every image")


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the results as JSON and nothing else")
    parser.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help="exit with 1 if this holds of the results, such as 'dime@11.auc.low > 0.6', and with 2 if the model is no "
        "denoiser; may be repeated",
    )


def _add(commands: Any, name: str, run: Callable[..., int], what: str, *examples: str) -> argparse.ArgumentParser:
    title = "example:" if len(examples) == 1 else "examples:"
    parser = commands.add_parser(
        name,
        help=what,
        description=what,
        epilog="\n  ".join([title, *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Also after the command; without a default here, which would undo the one before it.
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=_DEBUG_HELP)
    parser.set_defaults(command_function=run)
    return parser


def _check_conditions(args: argparse.Namespace) -> None:
    """Refuse conditions that cannot be read, before anything else is done."""
    if getattr(args, "fail_if", ()):
        from dime_jax.auditing import gate

        for condition in args.fail_if:
            gate.parse(condition)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        _check_conditions(args)
        return args.command_function(args)
    except KeyboardInterrupt:
        print("dime-jax: interrupted; the same command again continues", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # a model may fail with any
        if args.debug:
            raise
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        print(f"dime-jax: {kind}{' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
