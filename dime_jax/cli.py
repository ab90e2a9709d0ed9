"""`dime-jax`: the command line.

Exit codes: 0 done, 1 a condition of --fail-if holds, 2 bad input or a failure, also a model that is no denoiser where
--fail-if is given. Errors are one line on standard error; `--debug` shows where they come from. Results go to standard
output, progress to standard error. What a command needs is imported when it runs, so that --help answers at once.
"""

import argparse
import dataclasses
import inspect
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import shtab

import dime_jax
from dime_jax._util.compilation_cache import use as use_compilation_cache
from dime_jax._util.flags import REQUIRED, Parser, add_options, read_options, under
from dime_jax.loading.conversion import CONVERTING, LATENT, ConversionOptions, UseOptions
from dime_jax.protocol.options import BESIDE, COST, IMAGES, JUDGING, AuditOptions, OutputOption, ReferenceOptions
from dime_jax.remote.options import HOSTED, RemoteOptions, ServeOptions

if TYPE_CHECKING:
    import rich.console

    from dime_jax.auditing import AuditConfig, AuditResult
    from dime_jax.core.denoiser import Denoiser
    from dime_jax.findings.results import DeletionFindings
    from dime_jax.protocol.evaluation import Evaluation
    from dime_jax.scoring import ScoringOptions

_Commands: TypeAlias = "argparse._SubParsersAction[Parser]"

DONE, GATE_FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

# The headings of options in the order in which --help shows them, after those that nearly everyone needs.
_OUTPUT = "output"
_HEADINGS = (IMAGES, BESIDE, COST, JUDGING, CONVERTING, LATENT, HOSTED, _OUTPUT)
# Values that a shell may complete with the names of files and folders.
_PATHS = ("DIR", "FILE", "FILE.py", "FOLDER", "IMAGES", "JSON", "MODEL", "SCHEDULE")
_NOT_COMPARED = {"model", "reference", "reference_lora", "images", "split", "delta", "randomised", "variations"}
_NOT_SCORED = {"candidates", "labels", "groups", "variations", "decide_with", "level", "timestep", "gamma", "delta"}
_NOT_SCORED |= {"randomised"}


def _audit(args: argparse.Namespace) -> int:
    """find out which images a model was trained on, and how certain that is

    examples:
      dime-jax audit
      dime-jax audit --model ckpt.pt --members a/ --heldout b/ --candidates c/ --output out/mine
      dime-jax audit --model ckpt.pt --images cifar10:DIR --split CIFAR10_train_ratio0.5.npz
      dime-jax audit --model hf:OWNER/NAME --heldout b/ --candidates mine/   (no members known)
      dime-jax audit --model ckpt.pt --heldout b/ --candidates c/ --reference train:500
      dime-jax audit --fail-if "dime@2.tpr_at_1pct_fpr.low > 0.05"
    """
    from dime_jax import auditing
    from dime_jax.findings import gate

    config = _config(args)
    for condition in args.fail_if:
        gate.check_possible(condition, gate.AUDIT_KEYS, config.result_labels(), config.has_reference)
    return _show(auditing.audit(config), args)


def _report(args: argparse.Namespace) -> int:
    """rewrite the results and the report of an audit or a comparison; needs no model

    example:
      dime-jax report out/audit
    """
    from dime_jax import auditing

    _load_attack_module(args)
    directory = args.audit
    if (directory / "compare.json").is_file():
        return _show(auditing.report_comparison(directory), args)
    if not (directory / "audit.json").is_file():
        raise ValueError(f"{directory} holds no audit and no comparison: no audit.json or compare.json in it")
    return _show(auditing.report(directory), args)


def _compare(args: argparse.Namespace) -> int:
    """verify a deletion: query the model before and after it about the same images

    example:
      dime-jax compare --before m1/ --after m2/ --candidates deleted/ --heldout b/ --output out/deletion
    """
    from dime_jax import auditing
    from dime_jax.findings import gate

    config = _config(args, model=args.before)
    for condition in args.fail_if:
        gate.check_possible(condition, gate.COMPARE_KEYS, [])
    return _show(auditing.compare(config, args.after), args)


def _score(args: argparse.Namespace) -> int:
    """run every attack on one half of the images, or resume an interrupted run

    example:
      dime-jax score out/run --model models/mine --members a/ --heldout b/ --half calibration
    """
    from dime_jax import scoring
    from dime_jax.auditing.deciding import run_protocol
    from dime_jax.auditing.images import open_as_given
    from dime_jax.auditing.models import denoisers, open_models
    from dime_jax.auditing.run_audit import begin
    from dime_jax.protocol import beside

    if not (args.images and args.split) and not (args.members and args.heldout):
        raise ValueError("name the images with --members and --heldout, or with --images and --split")
    config = _config(args, output=args.run)
    if config.trains_reference:
        raise ValueError(f"reference must be a model, got {config.reference}: train it first, with dime-jax reference")
    opened = open_models(config)
    print("\n".join(model.describe() for model in opened if model), file=sys.stderr)
    denoiser, reference = denoisers(opened)
    images, halves = open_as_given(config, denoiser)
    begin(config, denoiser, images)
    if args.tune:
        options = dataclasses.replace(config.options, micro_batch=scoring.tune_micro_batch(denoiser))
        config = dataclasses.replace(config, options=options)
    run_protocol(config, denoiser, images, halves, [args.half], reference=reference)
    table = beside.read(args.run, args.half)
    asked = "" if table.reference is None else f", and {table.reference.queries_made:,} of the reference"
    print(f"{len(table.index):,} images of the {args.half} half scored, {table.queries_made:,} queries made{asked}")
    return DONE


def _calibrate(args: argparse.Namespace) -> int:
    """choose each attack's setting on the calibration half and freeze it; needs no model

    example:
      dime-jax calibrate out/run
    """
    from dime_jax.findings import wording
    from dime_jax.protocol import stages

    _load_attack_module(args)
    for frozen in stages.calibrate_run(args.run):
        print(f"{frozen.attack}: {frozen.setting}, calibration AUC {frozen.auc:.4f}")
    alarms = wording.direction_alarms(stages.read_direction(args.run, ["calibration"]))
    for alarm in [*alarms, *wording.reference_alarms(stages.reference_direction(args.run, ["calibration"]))]:
        print(f"warning: {alarm}", file=sys.stderr)
    return DONE


def _evaluate(args: argparse.Namespace) -> int:
    """measure the frozen attacks on the test half; needs no model

    examples:
      dime-jax evaluate out/run
      dime-jax evaluate out/run --json --fail-if "dime@11.auc.low > 0.6"
    """
    from dime_jax.findings import wording
    from dime_jax.protocol import stages
    from dime_jax.report import tables

    if (args.run / "audit.json").is_file():
        raise ValueError(f"{args.run} is an audit; use dime-jax report {args.run}")
    _load_attack_module(args)
    results = stages.evaluate_run(args.run)
    if not args.json:
        tables.print_results(results, _console())
        tables.print_alarms(wording.evaluation_alarms(results), _console())
    for warning in results.warnings:
        print(f"dime-jax: warning: {warning}", file=sys.stderr)
    return _finish(results, args)


def _reference(args: argparse.Namespace) -> int:
    """train a second model to ask beside a model, on images that the model has not seen

    example:
      dime-jax reference --model ckpt.pt --images never_seen/ --output out/reference
      dime-jax audit --model ckpt.pt --reference out/reference/model --heldout b/ --candidates c/
    """
    from dime_jax import data
    from dime_jax.data.roles import with_labels
    from dime_jax.loading.opening import open_model
    from dime_jax.training import train_reference

    options = read_options(args, ReferenceOptions)
    model = open_model(args.model, **vars(read_options(args, ConversionOptions)))
    source = data.open_source(args.images)
    source = with_labels(source, args.labels, model.denoiser.name, model.denoiser.num_classes)
    trained = train_reference(model, source, args.output, options, silent=args.quiet)
    print(f"the reference is {trained}: use it as --reference {trained}")
    return DONE


def _convert(args: argparse.Namespace) -> int:
    """convert a PyTorch checkpoint or a diffusers folder to a model directory

    example:
      dime-jax convert --source ckpt.pt --output models/cifar10
    """
    from dime_jax.loading.conversion import convert
    from dime_jax.loading.model_directory import describe

    print(describe(convert(args.source, args.output, read_options(args, ConversionOptions))))
    return DONE


def _check_model(args: argparse.Namespace) -> int:
    """check that a model works: its error at several timesteps, and a sheet of samples

    example:
      dime-jax models check models/cifar10 --images cifar10:DIR --output out/check
    """
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
    """host a model over the Open Inference Protocol (KServe v2), for clients that may query it without its weights

    example:
      dime-jax serve models/mine --port 8000 --token-env AUDIT_TOKEN
    """
    from dime_jax.remote import serve

    settings = read_options(args, ServeOptions)
    return serve.serve_until_stopped(_open_model(args, args.cache, RemoteOptions()), settings, args.name)


# --------------------------------------------------------------------------------------------------- what is printed


def _show(result: "AuditResult", args: argparse.Namespace) -> int:
    """Print what an audit or a comparison found."""
    from dime_jax.findings import wording
    from dime_jax.protocol.evaluation import Evaluation
    from dime_jax.report import tables

    found = result.findings
    if not args.json:
        console = _console()
        if isinstance(found, Evaluation) and found.results:
            tables.print_results(found, console)
        tables.print_headline(found.headline, found.warnings, console)
        print(f"{wording.queries_made(found)}. The report: {result.report}")
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


def _open_model(
    args: argparse.Namespace, cache: pathlib.Path | None, remote: RemoteOptions | None = None
) -> "Denoiser":
    from dime_jax.loading.opening import open_model

    options = vars(read_options(args, ConversionOptions)) | vars(read_options(args, UseOptions))
    model = open_model(args.model, cache=cache, remote=remote or read_options(args, RemoteOptions), **options)
    print(model.describe(), file=sys.stderr)
    return model.denoiser


def _load_attack_module(args: argparse.Namespace) -> None:
    if args.attack_module is not None:
        from dime_jax.attacks import load_attack_module

        load_attack_module(args.attack_module)


def _config(args: argparse.Namespace, **others: str) -> "AuditConfig":
    """The options as fields of `AuditConfig`, which have the same names, and others besides."""
    from dime_jax.auditing import AuditConfig

    return read_options(
        args,
        AuditConfig,
        options=_options(args),
        conversion=read_options(args, ConversionOptions),
        use=read_options(args, UseOptions),
        remote=read_options(args, RemoteOptions),
        **others,
    )


def _options(args: argparse.Namespace) -> "ScoringOptions":
    from dime_jax import scoring
    from dime_jax.scoring.query_ledger import Budget

    budget = Budget(args.max_queries, args.max_queries_per_image)
    return scoring.ScoringOptions(micro_batch=args.micro_batch, budget=budget, silent=args.quiet)


# ---------------------------------------------------------------------------------------------------------- the parser

_NO_CACHE_HELP = "neither use nor store compiled programs on disk (as does DIME_JAX_CACHE=off)"
_DEBUG_HELP = "show the traceback of an error"
_MODEL_HELP = "the model, named as in `dime-jax audit`"
_RUN: dict[str, Any] = {"type": pathlib.Path, "metavar": "DIR", "help": "the directory of the run"}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = Parser(
        prog="dime-jax",
        usage="%(prog)s COMMAND [options]",
        description="Which images was a diffusion model trained on?",
        epilog="example: dime-jax audit    (audits the model that ships with the package)",
    )
    parser.add_argument("--version", action="version", version=f"dime-jax {dime_jax.__version__}")
    shtab.add_argument_to(parser, "--print_completion", help="print a completion script for your shell")
    parser.add_argument("--debug", action="store_true", help=_DEBUG_HELP)
    parser.add_argument("--no_cache", action="store_true", help=_NO_CACHE_HELP)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", prog="dime-jax")
    _add_audit(subparsers)
    _add_compare(subparsers)
    _add_stages(subparsers)
    _add_report(subparsers)
    _add_reference(subparsers)
    _add_convert(subparsers)
    _add_models(subparsers)
    _add_serve(subparsers)
    for subparser in commands(parser).values():
        for action in subparser._actions:
            if action.metavar in _PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser


def commands(parser: argparse.ArgumentParser | None = None, above: str = "") -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every command, by its name as it is typed."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in (parser or build_parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                found |= commands(subparser, f"{above}{name} ") or {above + name: subparser}
    return found


def _add_audit(commands: _Commands) -> None:
    audit = _add(commands, "audit", _audit)
    add_options(audit, AuditOptions)
    add_options(audit, OutputOption, output="out/audit")
    _add_model_options(audit)
    _add_query_options(audit)
    _add_output_options(audit)


def _add_compare(commands: _Commands) -> None:
    compare = _add(commands, "compare", _compare, "--before MODEL --after MODEL [options]")
    compare.add_argument(
        "--before", required=True, metavar="MODEL", help="the model before the deletion, named as in `audit`"
    )
    compare.add_argument("--after", required=True, metavar="MODEL", help="the model after the deletion")
    add_options(compare, AuditOptions, AuditOptions.__dataclass_fields__.keys() - _NOT_COMPARED)
    add_options(compare, OutputOption, output="out/compare")
    _add_model_options(compare)
    _add_query_options(compare)
    _add_output_options(compare)


def _add_stages(commands: _Commands) -> None:
    score = _add(commands, "score", _score, "DIR --model MODEL [options]")
    score.add_argument("run", **_RUN)
    add_options(score, AuditOptions, AuditOptions.__dataclass_fields__.keys() - _NOT_SCORED, model=REQUIRED)
    half = "the half to score (default: %(default)s)"
    score.add_argument("--half", choices=["calibration", "test"], default="calibration", help=half)
    under(score, COST).add_argument("--tune", action="store_true", help="find the fastest micro-batch first")
    _add_model_options(score)
    _add_query_options(score)
    calibrate = _add(commands, "calibrate", _calibrate, "DIR [options]")
    calibrate.add_argument("run", **_RUN)
    add_options(calibrate, AuditOptions, ["attack_module"])
    evaluate = _add(commands, "evaluate", _evaluate, "DIR [options]")
    evaluate.add_argument("run", **_RUN)
    add_options(evaluate, AuditOptions, ["attack_module"])
    _add_output_options(evaluate)


def _add_report(commands: _Commands) -> None:
    report = _add(commands, "report", _report, "DIR [options]")
    report.add_argument("audit", type=pathlib.Path, metavar="DIR", help="the directory of the audit or the comparison")
    add_options(report, AuditOptions, ["attack_module"])
    _add_output_options(report)


def _add_reference(commands: _Commands) -> None:
    reference = _add(commands, "reference", _reference, "--model MODEL --images IMAGES --output DIR [options]")
    add_options(reference, AuditOptions, ["model"], model=REQUIRED)
    images = "images that the model was not trained on, and that no audit beside the reference will need"
    reference.add_argument("--images", required=True, metavar="IMAGES", help=images)
    add_options(reference, OutputOption)
    add_options(reference, ReferenceOptions)
    add_options(reference, AuditOptions, ["labels"])
    add_options(reference, ConversionOptions)
    _add_quiet(reference)


def _add_convert(commands: _Commands) -> None:
    convert = _add(commands, "convert", _convert, "--source FILE --output DIR [options]")
    source = "a checkpoint (.pt, .ckpt, .safetensors) or a diffusers folder"
    convert.add_argument("--source", required=True, metavar="FILE", help=source)
    output = "the model directory to write; it must not exist yet"
    convert.add_argument("--output", required=True, metavar="DIR", help=output)
    add_options(convert, ConversionOptions)


def _add_models(commands: _Commands) -> None:
    models = commands.add_parser("models", help="inspect a model", epilog="example: dime-jax models check -h")
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = _add(actions, "check", _check_model, "MODEL --images IMAGES --output DIR [options]")
    check.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    images, output = "a few images of the kind it was trained on", "where to write check.json and samples.png"
    check.add_argument("--images", required=True, metavar="IMAGES", help=images)
    check.add_argument("--output", required=True, metavar="DIR", type=pathlib.Path, help=output)
    check.add_argument("--count", type=int, default=16, metavar="N", help="use N images (default: 16)")
    _add_model_options(check)


def _add_serve(commands: _Commands) -> None:
    serve = _add(commands, "serve", _serve, "MODEL [options]")
    serve.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    serve.add_argument("--name", help="the name of the model in its URL (default: its own name)")
    add_options(serve, ServeOptions, port=8000)
    cache = "where to store converted checkpoints (default: your cache directory)"
    serve.add_argument("--cache", type=pathlib.Path, metavar="DIR", help=cache)
    add_options(serve, ConversionOptions)
    add_options(serve, UseOptions)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    for record in (ConversionOptions, UseOptions, RemoteOptions):
        add_options(parser, record)


def _add_query_options(parser: argparse.ArgumentParser) -> None:
    cost, at_most = under(parser, COST), "never make more than N queries in all, resumed runs included"
    cost.add_argument("--micro_batch", type=int, metavar="N", help="send N images to each device at a time")
    cost.add_argument("--max_queries", type=int, metavar="N", help=at_most)
    cost.add_argument("--max_queries_per_image", type=int, metavar="N", help="the same limit for each image")
    _add_quiet(parser)


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    under(parser, _OUTPUT).add_argument("--quiet", action="store_true", help="show no progress")


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    output = under(parser, _OUTPUT)
    output.add_argument("--json", action="store_true", help="print the results as JSON and nothing else")
    output.add_argument(
        "--fail_if",
        action="append",
        default=[],
        metavar="CONDITION",
        help="exit with code 1 if the results meet this condition, such as 'dime@2.auc.low > 0.6', and with 2 if the "
        "model does not predict noise; may be given more than once",
    )


def _add(commands: _Commands, name: str, run: Callable[..., int], usage: str = "[options]") -> argparse.ArgumentParser:
    """Add a command, whose help begins with the docstring of the function that runs it."""
    text = inspect.getdoc(run) or name
    parser = commands.add_parser(
        name,
        usage=f"%(prog)s {usage}",
        help=text.partition("\n")[0],
        description=text,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30),
        add_help=False,
    )
    for heading in _HEADINGS:
        parser.add_argument_group(heading)
    output = under(parser, _OUTPUT)
    output.add_argument("-h", "--help", action="help", help="show this help and exit")
    # Also after the command; without a default here, which would undo the one before it.
    output.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=_DEBUG_HELP)
    output.add_argument("--no_cache", action="store_true", default=argparse.SUPPRESS, help=_NO_CACHE_HELP)
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
        print("dime-jax: interrupted; re-run the same command to resume", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # a model may fail with any
        if args.debug:
            raise
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        print(f"dime-jax: {kind}{' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
