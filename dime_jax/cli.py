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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import shtab

import dime_jax
from dime_jax._util.compilation_cache import use as use_compilation_cache
from dime_jax._util.flags import Parser, read_options
from dime_jax.loading.conversion import ConversionOptions, UseOptions, add_conversion_arguments, add_use_arguments
from dime_jax.remote.options import add_remote_arguments, remote_options

if TYPE_CHECKING:
    import rich.console

    from dime_jax.auditing import AuditConfig, AuditResult
    from dime_jax.core.denoiser import Denoiser
    from dime_jax.findings.results import DeletionFindings
    from dime_jax.protocol.evaluation import Evaluation
    from dime_jax.scoring import ScoringOptions

_Commands: TypeAlias = "argparse._SubParsersAction[Parser]"

DONE, GATE_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

# What a shell may complete with the names of files and folders.
_PATHS = frozenset(
    [
        "after",
        "attack_module",
        "audit",
        "autoencoder",
        "before",
        "candidates",
        "groups",
        "heldout",
        "images",
        "labels",
        "lora",
        "members",
        "model",
        "model_flags",
        "output",
        "run",
        "schedule",
        "source",
        "split",
    ]
)

# Which of --images, --split, --members and --heldout go together.
_WAYS_TO_NAME_IMAGES = ((False, False, True, True), (True, True, False, False))


def _audit(args: argparse.Namespace) -> int:
    from dime_jax import auditing
    from dime_jax.findings import gate

    config = _config(args)
    for condition in args.fail_if:
        gate.check_possible(condition, gate.AUDIT_KEYS, config.result_labels())
    return _show(auditing.audit(config), args)


def _report(args: argparse.Namespace) -> int:
    from dime_jax import auditing

    _load_attack_module(args)
    directory = args.audit
    if (directory / "compare.json").is_file():
        return _show(auditing.report_comparison(directory), args)
    if not (directory / "audit.json").is_file():
        raise ValueError(f"{directory} holds no audit and no comparison: no audit.json or compare.json in it")
    return _show(auditing.report(directory), args)


def _compare(args: argparse.Namespace) -> int:
    from dime_jax import auditing
    from dime_jax.findings import gate

    config = _config(args, model=args.before)
    for condition in args.fail_if:
        gate.check_possible(condition, gate.COMPARE_KEYS, [])
    return _show(auditing.compare(config, args.after), args)


def _score(args: argparse.Namespace) -> int:
    from dime_jax import scoring
    from dime_jax._util.distributed import shared_cache
    from dime_jax.auditing.deciding import run_protocol
    from dime_jax.auditing.images import open_as_given
    from dime_jax.scoring import score_table

    if (bool(args.images), bool(args.split), bool(args.members), bool(args.heldout)) not in _WAYS_TO_NAME_IMAGES:
        raise ValueError("expected either --members and --heldout, or --images and --split")
    config = _config(args, output=args.run)
    denoiser = _open_model(args, shared_cache(args.run))
    images, halves = open_as_given(config, denoiser)
    for warning in [*config.left_out(config.offered(denoiser)), *images.warnings]:
        config.options.say(f"warning: {warning}")
    if args.tune:
        options = dataclasses.replace(config.options, micro_batch=scoring.tune_micro_batch(denoiser))
        config = dataclasses.replace(config, options=options)
    run_protocol(config, denoiser, images, halves, [args.half])
    table = score_table.read_table(args.run / args.half)
    print(f"{len(table.index):,} images of the {args.half} half scored, {table.queries_made:,} queries made")
    return DONE


def _calibrate(args: argparse.Namespace) -> int:
    from dime_jax.findings import wording
    from dime_jax.protocol import stages

    _load_attack_module(args)
    for frozen in stages.calibrate_run(args.run):
        print(f"{frozen.attack}: {frozen.setting}, calibration AUC {frozen.auc:.4f}")
    for alarm in wording.direction_alarms(stages.read_direction(args.run, ["calibration"])):
        print(f"warning: {alarm}", file=sys.stderr)
    return DONE


def _evaluate(args: argparse.Namespace) -> int:
    from dime_jax.findings import wording
    from dime_jax.protocol import stages
    from dime_jax.report import tables

    if (args.run / "audit.json").is_file():
        raise ValueError(f"{args.run} is an audit: expected dime-jax report {args.run}")
    _load_attack_module(args)
    results = stages.evaluate_run(args.run)
    if not args.json:
        tables.print_results(results, _console())
        tables.print_alarms(wording.evaluation_alarms(results), _console())
    for warning in results.warnings:
        print(f"dime-jax: warning: {warning}", file=sys.stderr)
    return _finish(results, args)


def _convert(args: argparse.Namespace) -> int:
    from dime_jax.loading.conversion import convert
    from dime_jax.loading.model_directory import describe

    print(
        describe(
            convert(
                args.source, args.output, read_options(args, ConversionOptions), read_options(args, UseOptions).loras()
            )
        )
    )
    return DONE


def _check_model(args: argparse.Namespace) -> int:
    import jax
    import numpy as np

    from dime_jax import data
    from dime_jax._util.distributed import shared_cache
    from dime_jax.guards.samples import check_model

    denoiser = _open_model(args, shared_cache(args.output))
    source = data.open_source(args.images)
    transform = data.transform_for(source, denoiser.image_shape)
    batch = next(data.batches(source, min(args.count, len(source)), transform))
    own = denoiser.conditions_for(batch.labels, batch.captions)["own"]
    condition = jax.tree.map(lambda rows: rows[batch.mask], own)
    found = check_model(denoiser, batch.images[batch.mask], args.output, condition=condition)
    for t, error in zip(found.timesteps, np.asarray(found.errors)):
        print(f"t = {t:4d}   noise-prediction error {error:.4f}")
    print(found.check.summary)
    print(f"samples in {found.figure}")
    return DONE


def _serve(args: argparse.Namespace) -> int:
    from dime_jax.remote import serve
    from dime_jax.remote.options import NO_REMOTE_OPTIONS

    settings = serve.ServeOptions(args.host, args.port, args.token_env, args.max_batch, args.rate)
    args = argparse.Namespace(**{**vars(args), **dataclasses.asdict(NO_REMOTE_OPTIONS)})
    return serve.serve_until_stopped(_open_model(args, args.cache), settings, args.name)


# --------------------------------------------------------------------------------------------------- what is printed


def _show(result: "AuditResult", args: argparse.Namespace) -> int:
    """Print what an audit or a comparison found."""
    from dime_jax.protocol.evaluation import Evaluation
    from dime_jax.report import tables

    found = result.findings
    if not args.json:
        console = _console()
        if isinstance(found, Evaluation) and found.results:
            tables.print_results(found, console)
        tables.print_headline(found.headline, found.warnings, console)
        print(f"{found.queries_made:,} queries made. The report: {result.report}")
    return _finish(found, args)


def _finish(results: "Evaluation | DeletionFindings", args: argparse.Namespace) -> int:
    """Print results for programs, and check the conditions."""
    from dime_jax._util.records import plain_object
    from dime_jax.findings import gate

    if args.json:
        print(json.dumps(plain_object(results), indent=2))
    if args.fail_if:
        gate.refuse_unjudged(results)
    failed = [condition for condition in args.fail_if if gate.check(condition, results)]
    for condition in failed:
        print(f"dime-jax: the gate failed: {condition}", file=sys.stderr)
    return GATE_FAILED if failed else DONE


def _console() -> "rich.console.Console":
    import rich.console

    return rich.console.Console(width=None if sys.stdout.isatty() else 132)


def _open_model(args: argparse.Namespace, cache: pathlib.Path | None) -> "Denoiser":
    from dime_jax.loading.opening import open_model

    options = vars(read_options(args, ConversionOptions)) | vars(read_options(args, UseOptions))
    model = open_model(args.model, cache=cache, remote=remote_options(args), **options)
    print(model.describe(), file=sys.stderr)
    return model.denoiser


def _load_attack_module(args: argparse.Namespace) -> None:
    if args.attack_module is not None:
        from dime_jax.attacks import load_attack_module

        load_attack_module(args.attack_module)


def _config(args: argparse.Namespace, **others: str) -> "AuditConfig":
    """The options as fields of `AuditConfig`, which have the same names, and others besides."""
    from dime_jax.auditing import AuditConfig

    named = [field.name for field in dataclasses.fields(AuditConfig) if hasattr(args, field.name)]
    settings = {name: getattr(args, name) for name in named} | others
    return AuditConfig(
        **settings,
        options=_options(args),
        conversion=read_options(args, ConversionOptions),
        use=read_options(args, UseOptions),
        remote=remote_options(args),
    )


def _options(args: argparse.Namespace) -> "ScoringOptions":
    from dime_jax import scoring
    from dime_jax.scoring.query_ledger import Budget

    budget = Budget(args.max_queries, args.max_queries_per_image)
    return scoring.ScoringOptions(micro_batch=args.micro_batch, budget=budget, silent=getattr(args, "quiet", False))


# ---------------------------------------------------------------------------------------------------------- the parser

_CAPTIONS_HELP = "for text-to-image models: ask with each image's own caption, or with none (default: own)"
_NO_CACHE_HELP = "keep no compiled programs on disk, and use none (also: DIME_JAX_CACHE=off)"
_DEBUG_HELP = "show where an error comes from"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = Parser(
        prog="dime-jax",
        description="Which images was a diffusion model trained on?",
        epilog="example: dime-jax audit    (audits the model that ships with the package)",
    )
    parser.add_argument("--version", action="version", version=f"dime-jax {dime_jax.__version__}")
    shtab.add_argument_to(parser, "--print_completion", help="print a completion script for your shell")
    parser.add_argument("--debug", action="store_true", help=_DEBUG_HELP)
    parser.add_argument("--no_cache", action="store_true", help=_NO_CACHE_HELP)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_audit(commands)
    _add_compare(commands)
    _add_stages(commands)
    _add_report(commands)
    _add_convert(commands)
    _add_models(commands)
    _add_serve(commands)
    _complete_paths(parser)
    return parser


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                _complete_paths(subparser)
        elif action.dest in _PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]


def _add_audit(commands: _Commands) -> None:
    audit = _add(
        commands,
        "audit",
        _audit,
        "find out which images a model was trained on, and how sure that is",
        "dime-jax audit",
        "dime-jax audit --model ckpt.pt --members a/ --heldout b/ --candidates c/ --output out/mine",
        "dime-jax audit --model ckpt.pt --images cifar10:DIR --split CIFAR10_train_ratio0.5.npz --output out/cifar10",
        "dime-jax audit --model ckpt.pt --heldout b/ --candidates mine/ --groups owners.csv   (no members known)",
        'dime-jax audit --fail-if "dime@11.tpr_at_1pct_fpr.low > 0.05"',
    )
    audit.add_argument(
        "--output", type=pathlib.Path, default="out/audit", help="where the audit goes (default: %(default)s)"
    )
    audit.add_argument(
        "--model",
        default="digits",
        help="a shipped model, a model directory, a checkpoint, a diffusers folder, or http(s)://HOST/v2/models/NAME "
        "(default: %(default)s)",
    )
    audit.add_argument("--members", help="images the model was trained on: a folder, or KIND:PLACE")
    audit.add_argument("--heldout", help="images like them that it never saw")
    audit.add_argument("--images", help="with --split: the images that the split's indices refer to")
    audit.add_argument("--split", help="a split file (.npz) of SecMI or dime-mia, in place of --members and --heldout")
    audit.add_argument(
        "--variations",
        action="store_true",
        help="ask about each candidate also mirrored, cropped and encoded again, in case such a variation was used; "
        "8 times the queries for candidates",
    )
    audit.add_argument(
        "--randomised", action="store_true", help="say that a coin decided, before training, who became a member"
    )
    audit.add_argument("--delta", type=float, default=0.0, help="δ for the lower bound on ε (default: 0)")
    add_conversion_arguments(audit)
    add_use_arguments(audit)
    add_remote_arguments(audit)
    _add_evidence_arguments(audit)
    _add_output_arguments(audit)


def _add_compare(commands: _Commands) -> None:
    compare = _add(
        commands,
        "compare",
        _compare,
        "check a deletion: put the same images to the model before and after it",
        "dime-jax compare --before m1/ --after m2/ --candidates deleted/ --heldout b/ --output out/deletion",
    )
    compare.add_argument(
        "--output", type=pathlib.Path, default="out/compare", help="where the comparison goes (default: %(default)s)"
    )
    compare.add_argument("--before", required=True, help="the model before the deletion, named as in `audit --model`")
    compare.add_argument("--after", required=True, help="the model after it")
    compare.add_argument("--members", help="images both models were trained on, to calibrate with")
    compare.add_argument("--heldout", help="images like them that neither model saw")
    add_conversion_arguments(compare)
    add_use_arguments(compare)
    add_remote_arguments(compare)
    _add_evidence_arguments(compare)
    _add_output_arguments(compare)


def _add_stages(commands: _Commands) -> None:
    score = _add(
        commands,
        "score",
        _score,
        "run every attack on one half of the images, or finish an interrupted run",
        "dime-jax score out/run --model models/mine --members a/ --heldout b/ --half calibration",
    )
    score.add_argument("run", type=pathlib.Path, help="the run's directory")
    score.add_argument("--model", required=True, help="the model, named as in `audit --model`")
    score.add_argument("--members", help="images the model was trained on: a folder, or KIND:PLACE")
    score.add_argument("--heldout", help="images like them that it never saw")
    score.add_argument("--images", help="with --split: the images that the split's indices refer to")
    score.add_argument("--split", help="a split file (.npz) of SecMI or dime-mia, in place of --members and --heldout")
    score.add_argument(
        "--half",
        choices=["calibration", "test"],
        default="calibration",
        help="which half to score (default: %(default)s)",
    )
    score.add_argument("--captions", choices=["own", "none"], help=_CAPTIONS_HELP)
    score.add_argument("--tune", action="store_true", help="find the fastest micro-batch first")
    add_conversion_arguments(score)
    add_use_arguments(score)
    add_remote_arguments(score)
    _add_grid_arguments(score)
    _add_query_arguments(score)

    calibrate = _add(
        commands,
        "calibrate",
        _calibrate,
        "choose each attack's setting on the calibration half and freeze it; needs no model",
        "dime-jax calibrate out/run",
    )
    calibrate.add_argument("run", type=pathlib.Path, help="the run's directory")
    _add_attack_module(calibrate)

    evaluate = _add(
        commands,
        "evaluate",
        _evaluate,
        "measure the frozen attacks on the test half; needs no model",
        "dime-jax evaluate out/run",
        'dime-jax evaluate out/run --json --fail-if "dime@11.auc.low > 0.6"',
    )
    evaluate.add_argument("run", type=pathlib.Path, help="the run's directory")
    _add_attack_module(evaluate)
    _add_output_arguments(evaluate)


def _add_report(commands: _Commands) -> None:
    report = _add(
        commands,
        "report",
        _report,
        "write the results and the page of an audit or a comparison again; needs no model",
        "dime-jax report out/audit",
    )
    report.add_argument("audit", type=pathlib.Path, help="the directory of the audit or the comparison")
    _add_attack_module(report)
    _add_output_arguments(report)


def _add_convert(commands: _Commands) -> None:
    convert = _add(
        commands,
        "convert",
        _convert,
        "turn a PyTorch checkpoint or a diffusers folder into a model directory",
        "dime-jax convert --source ckpt.pt --output models/cifar10",
    )
    convert.add_argument(
        "--source", required=True, help="a checkpoint file (.pt, .ckpt, .safetensors) or a diffusers folder"
    )
    convert.add_argument("--output", required=True, help="the model directory to write; must not exist yet")
    add_conversion_arguments(convert)
    add_use_arguments(convert, only="lora")


def _add_models(commands: _Commands) -> None:
    models = commands.add_parser("models", help="look at a model", epilog="example: dime-jax models check -h")
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = _add(
        actions,
        "check",
        _check_model,
        "see whether a model works: its error over timesteps, and a sheet of samples",
        "dime-jax models check models/cifar10 --images cifar10:DIR --output out/check",
    )
    check.add_argument("model", help="the model, named as in `audit --model`")
    check.add_argument(
        "--images", required=True, help="a few images of the kind it was trained on: a folder, or KIND:PLACE"
    )
    check.add_argument("--output", type=pathlib.Path, required=True, help="where check.json and samples.png go")
    check.add_argument("--count", type=int, default=16, help="how many images to use (default: 16)")
    add_conversion_arguments(check)
    add_use_arguments(check)
    add_remote_arguments(check)


def _add_serve(commands: _Commands) -> None:
    serve = _add(
        commands,
        "serve",
        _serve,
        "host a model over the Open Inference Protocol (KServe v2), for clients that may query it without its weights",
        "dime-jax serve models/mine --port 8000 --token-env AUDIT_TOKEN",
    )
    serve.add_argument("model", help="the model, named as in `audit --model`")
    serve.add_argument("--name", help="the model's name in its URL (default: its own name)")
    serve.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on (default: %(default)s, this machine)"
    )
    serve.add_argument("--port", type=int, default=8000, help="the port; 0 takes a free one (default: %(default)s)")
    serve.add_argument(
        "--token_env",
        metavar="NAME",
        help="the environment variable that holds the token clients must send",
    )
    serve.add_argument(
        "--max_batch", type=int, default=64, help="the most images in one request (default: %(default)s)"
    )
    serve.add_argument("--rate", type=float, metavar="N", help="answer at most N queries per second")
    serve.add_argument(
        "--cache",
        type=pathlib.Path,
        metavar="DIR",
        help="where converted checkpoints are kept (default: your cache directory)",
    )
    add_conversion_arguments(serve)
    add_use_arguments(serve)


def _add_evidence_arguments(parser: argparse.ArgumentParser) -> None:
    """What `audit` and `compare` share."""
    parser.add_argument("--candidates", help="the images in question")
    parser.add_argument("--labels", help="for class-conditional models: a CSV file with lines id,label")
    parser.add_argument("--captions", choices=["own", "none"], help=_CAPTIONS_HELP)
    parser.add_argument(
        "--groups", help="a CSV file with lines id,group: images of one owner or one shoot are resampled together"
    )
    parser.add_argument("--level", type=float, default=0.05, help="the false discovery rate to allow (default: 0.05)")
    parser.add_argument(
        "--decide_with",
        metavar="ATTACK@QUERIES",
        help="the attack that decides (default: the best on the calibration half)",
    )
    parser.add_argument(
        "--timestep", type=int, default=70, help="the timestep at which DIME asks if no members are known (default: 70)"
    )
    parser.add_argument(
        "--gamma", type=float, default=0.1, help="the size of DIME's step if no members are known (default: 0.1)"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    _add_grid_arguments(parser)
    _add_query_arguments(parser)


def _add_grid_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--attacks", nargs="+", metavar="ATTACK", help="which attacks to run (default: all)")
    _add_attack_module(parser)
    parser.add_argument(
        "--profile",
        choices=["light", "quick", "paper"],
        default="quick",
        help="how many settings and images to use: light is for slow models (default: %(default)s)",
    )
    parser.add_argument(
        "--queries",
        nargs="+",
        type=int,
        metavar="N",
        help="ask at most N queries per image: each attack runs at its largest tier that costs no more, and what costs "
        "more than the largest N is left out (default: as the profile says)",
    )
    parser.add_argument(
        "--calibration_size",
        type=int,
        help="use at most this many members, and as many held-out images, to choose settings",
    )
    parser.add_argument("--test_size", type=int, help="test at most this many members, and as many held-out images")
    parser.add_argument("--seed", type=int, default=0, help="seed for halves and random draws (default: 0)")


def _add_attack_module(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attack_module",
        metavar="FILE.py",
        help="a Python file of yours that registers attacks; it is run, so name only one that you trust",
    )


def _add_query_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--micro_batch", type=int, help="images per device in one call")
    parser.add_argument("--max_queries", type=int, help="never make more queries than this, restarts included")
    parser.add_argument("--max_queries_per_image", type=int, help="the same limit for each image")


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the results as JSON and nothing else")
    parser.add_argument(
        "--fail_if",
        action="append",
        default=[],
        metavar="CONDITION",
        help="exit with code 1 if the results meet this condition, such as 'dime@11.auc.low > 0.6', and with 2 if the "
        "model is no denoiser; may be given more than once",
    )


def _add(commands: _Commands, name: str, run: Callable[..., int], what: str, *examples: str) -> argparse.ArgumentParser:
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
    parser.add_argument("--no_cache", action="store_true", default=argparse.SUPPRESS, help=_NO_CACHE_HELP)
    parser.set_defaults(command_function=run)
    return parser


def _check_conditions(args: argparse.Namespace) -> None:
    """Refuse conditions that cannot be read, before anything else is done."""
    if getattr(args, "fail_if", ()):
        from dime_jax.findings import gate

        for condition in args.fail_if:
            gate.parse(condition)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        _check_conditions(args)
        if not args.no_cache:
            use_compilation_cache(lambda line: print(f"dime-jax: {line}", file=sys.stderr))
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
