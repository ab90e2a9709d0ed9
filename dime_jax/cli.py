"""`dime-jax`: the command line. Errors are one line and exit code 2; `--debug` shows where they come from."""

import argparse
import pathlib
import sys
from collections.abc import Sequence


def _audit(args: argparse.Namespace) -> None:
    # Imported here, so that --help answers at once.
    import rich.console

    from dime_jax import auditing
    from dime_jax.report import tables

    console = rich.console.Console(width=None if sys.stdout.isatty() else 132)
    console.print("Model: the closed-form ideal denoiser of 898 of scikit-learn's digits. Candidates: all 1797.")
    results = auditing.closed_form_audit(args.output, args.seed)
    tables.print_results(results, console)
    console.print(f"{results['queries_made']:,} queries made; numbers in {args.output / 'results.json'}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(prog="dime-jax", description="Membership inference for diffusion models.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True)
    audit = commands.add_parser(
        "audit",
        help="which images was a model trained on?",
        epilog="example: dime-jax audit --output out/audit",
    )
    audit.add_argument("--output", type=pathlib.Path, required=True, help="directory for results.json")
    audit.add_argument("--seed", type=int, default=0, help="seed of split, halves and draws (default 0)")
    audit.set_defaults(run=_audit)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0 when done, 2 for bad input."""
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        if args.debug:
            raise
        print(f"dime-jax: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
