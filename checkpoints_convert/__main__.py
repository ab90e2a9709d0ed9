"""`python -m checkpoints_convert` is `dime-jax convert`."""

import sys

from dime_jax import cli

if __name__ == "__main__":
    sys.exit(cli.main(["convert", *sys.argv[1:]]))
