"""What a user may say about a hosted model, in Python and on the command line.

Nothing slow is imported here: `dime-jax --help` needs it.
"""

import argparse
import dataclasses
import math
import os
import re

LAYOUTS = ("NHWC", "NCHW")
SERVED = "served:"  # begins the fingerprint of a hosted model


@dataclasses.dataclass(frozen=True)
class RemoteOptions:
    """How a hosted model is asked. None of this changes its answers.

    Attributes:
      token_env: the environment variable that holds the bearer token.
      token_file: a file that holds it, in place of the variable.
      layout: "NHWC" or "NCHW", where the server does not say.
      num_classes: of a class-conditional model, where the server does not say.
      max_batch: images in one request; as many as the server takes, and about a megabyte, if None.
      in_flight: requests at a time.
      max_rate: the most queries per second; None for no bound.
      timeout: seconds after which a request has failed.
    """

    token_env: str | None = None
    token_file: str | os.PathLike[str] | None = None
    layout: str | None = None
    num_classes: int | None = None
    max_batch: int | None = None
    in_flight: int = 4
    max_rate: float | None = None
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if self.layout not in (None, *LAYOUTS):
            raise ValueError(f"unknown layout {self.layout!r}; expected one of {', '.join(LAYOUTS)}")
        for name in ("num_classes", "max_batch", "in_flight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"expected {name}={value} >= 1")
        for name in ("max_rate", "timeout"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"expected {name}={value} to be finite and > 0")
        if self.in_flight > 64:
            raise ValueError(f"expected in_flight={self.in_flight} <= 64")
        if self.token_env is not None and self.token_file is not None:
            raise ValueError("expected token_env or token_file, not both")

    def given(self) -> dict[str, str | int | float]:
        """The options that were given, by name, as JSON takes them; without where the token comes from."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        default = dataclasses.asdict(NO_REMOTE_OPTIONS)
        return {name: value for name, value in values.items() if name not in _TOKEN and value != default[name]}

    @property
    def has_token(self) -> bool:
        """Whether a token is named."""
        return self.token_env is not None or self.token_file is not None


_TOKEN = ("token_env", "token_file")
NO_REMOTE_OPTIONS = RemoteOptions()


def is_address(model: object) -> bool:
    """Whether a user names a hosted model: an address that begins with http:// or https://."""
    return isinstance(model, str) and re.match(r"https?://", model, re.IGNORECASE) is not None


def add_remote_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of `RemoteOptions`."""
    group = parser.add_argument_group(
        "asking a hosted model", "for --model http(s)://HOST/v2/models/NAME; --schedule and --prediction say what the "
        "server does not"
    )  # fmt: skip
    group.add_argument("--token_env", metavar="NAME", help="the environment variable that holds the bearer token")
    group.add_argument("--token_file", metavar="FILE", help="a file that holds the bearer token")
    group.add_argument("--layout", choices=LAYOUTS, help="the order of the image's axes, if the server does not say")
    group.add_argument("--num_classes", type=int, help="how many classes there are, if the server does not say")
    group.add_argument("--max_batch", type=int, help="send at most this many images in one request")
    group.add_argument(
        "--in_flight",
        type=int,
        default=NO_REMOTE_OPTIONS.in_flight,
        help="send this many requests at a time (default: %(default)s)",
    )
    group.add_argument("--max_rate", type=float, metavar="N", help="make at most N queries per second")
    group.add_argument(
        "--timeout",
        type=float,
        default=NO_REMOTE_OPTIONS.timeout,
        help="give a request up after this many seconds (default: %(default)s)",
    )


def remote_options(args: argparse.Namespace) -> RemoteOptions:
    """The options of a parser with `add_remote_arguments`."""
    return RemoteOptions(**{field.name: getattr(args, field.name) for field in dataclasses.fields(NO_REMOTE_OPTIONS)})
