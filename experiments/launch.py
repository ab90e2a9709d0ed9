"""Start an experiment: its flags, and one process or several.

On one host nothing is needed. On a cluster that JAX knows (Slurm, Open MPI, Kubernetes, Cloud TPU) start one process
per host with `--distributed`; elsewhere also give `--coordinator=HOST:PORT --num_processes=N --process_id=I`. All
processes must see the same workdir.

With `--seeds=0,1,2` a study of several models runs one after the other (see `experiments.seeds`).

Compiled programs are kept in the user's cache directory, as the command line keeps them.
"""

import sys
from collections.abc import Callable

import jax
from absl import app, flags, logging
from ml_collections import config_flags
from ml_collections.config_dict import ConfigDict

from dime_jax._util import compilation_cache
from dime_jax._util.flags import underscored
from experiments.seeds import seeded

Main = Callable[[ConfigDict, str, str], None]


def run_app(main: Callable[[], None]) -> None:
    """Parse absl's flags in either spelling, `--num-processes` or `--num_processes`, and call `main`.

    Bad input and a full disk end in one line. The arguments are respelt where everyone looks, since a config's
    overrides (`--config.attack.seed=1`) are read from `sys.argv` again.
    """

    def run(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
        logging.set_verbosity(logging.WARNING)  # orbax logs every step it takes
        try:
            main()
        except (ValueError, OSError) as error:
            raise SystemExit(f"error: {error}") from None

    sys.argv[1:] = underscored(sys.argv[1:])
    app.run(run)


def launch(main: Main, config_file: str, *, many: bool = False) -> None:
    """Parse the command line and call `main(config, workdir, config_file)`.

    Flags are defined here and not when a module is imported, so that programs and tests can import several experiments:
    flag names are global.

    Args:
      main: the experiment.
      config_file: for the help text.
      many: whether it takes `--seeds`.
    """
    config = config_flags.DEFINE_config_file("config", help_string=f"{config_file}[:variant]")
    workdir = flags.DEFINE_string("workdir", None, "where everything that is made goes", required=True)
    distributed = flags.DEFINE_bool("distributed", False, "join the other processes of this run")
    coordinator = flags.DEFINE_string("coordinator", None, "HOST:PORT of the first process")
    num_processes = flags.DEFINE_integer("num_processes", None, "how many processes there are")
    process_id = flags.DEFINE_integer("process_id", None, "which of them this is, from 0")
    seeds = flags.DEFINE_list("seeds", [], "a model for each, in WORKDIR/seed_N") if many else None
    flags.mark_flag_as_required("config")

    def run() -> None:
        keep_programs()
        if distributed.value:
            jax.distributed.initialize(coordinator.value, num_processes.value, process_id.value)
        file = config_flags.get_config_filename(flags.FLAGS["config"])
        for one, directory in seeded(config.value, workdir.value, () if seeds is None else seeds.value):
            main(one, str(directory), file)

    run_app(run)


def keep_programs() -> None:
    """Keep what is compiled from now on; JAX is imported already, so that variables alone would not reach it."""
    directory = compilation_cache.use(logging.warning)
    if directory is not None:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
