"""What a user may say about a hosted model, in Python and on the command line.

Nothing slow is imported here: `dime-jax --help` needs it.
"""

import argparse
import dataclasses
import math
import os
import re
from typing import TypeVar

T = TypeVar("T")

LAYOUTS = ("NHWC", "NCHW")
SERVED = "served:"  # begins the fingerprint of a hosted model
_TOKEN = ("token_env", "token_file")


def _option(default: T, help: str, **argument: object) -> T:
    """Return a field with what `argparse` needs to know about it."""
    return dataclasses.field(default=default, metadata={"help": help, **argument})


@dataclasses.dataclass(frozen=True)
class RemoteOptions:
    """How to ask a hosted model. None of this changes its answers.

    Attributes:
      token_env: the environment variable that holds the bearer token.
      token_file: a file that holds the token, instead of the variable.
      layout: "NHWC" or "NCHW", if the server does not say.
      num_classes: the number of classes of a class-conditional model, if the server does not say.
      max_batch: the most images in one request; if None, as many as the server takes, up to about a megabyte.
      in_flight: the number of requests at a time.
      max_rate: the most queries per second; None for no limit.
      timeout: the seconds after which a request has failed.
    """

    token_env: str | None = _option(None, "the environment variable that holds the bearer token", metavar="NAME")
    token_file: str | os.PathLike[str] | None = _option(  # noqa: RUF009 (a field, whose default is None)
        None, "a file that holds the bearer token", metavar="FILE"
    )
    layout: str | None = _option(None, "the order of the image's axes, if the server does not say", choices=LAYOUTS)
    num_classes: int | None = _option(None, "the number of classes, if the server does not say", type=int)
    max_batch: int | None = _option(None, "send at most this many images in one request", type=int)
    in_flight: int = _option(4, "send this many requests at a time (default: %(default)s)", type=int)
    max_rate: float | None = _option(None, "make at most N queries per second", type=float, metavar="N")
    timeout: float = _option(120.0, "give up on a request after this many seconds (default: %(default)s)", type=float)

    def __post_init__(self) -> None:
        if self.layout not in (None, *LAYOUTS):
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        for name in ("num_classes", "max_batch", "in_flight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        for name in ("max_rate", "timeout"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be finite and > 0, got {value}")
        if self.in_flight > 64:
            raise ValueError(f"in_flight must be <= 64, got {self.in_flight}")
        if self.token_env is not None and self.token_file is not None:
            raise ValueError("give token_env or token_file, not both")

    def given(self) -> dict[str, str | int | float]:
        """Return the options that differ from their defaults, by name, without where the token comes from."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        tokens = ("token_env", "token_file")
        return {name: value for name, (value, default) in values.items() if value != default and name not in tokens}

    @property
    def has_token(self) -> bool:
        """Whether a token is named."""
        return self.token_env is not None or self.token_file is not None


NO_REMOTE_OPTIONS = RemoteOptions()


def is_address(model: object) -> bool:
    """Return whether a user names a hosted model: a URL that begins with http:// or https://."""
    return isinstance(model, str) and re.match(r"https?://", model, re.IGNORECASE) is not None


def add_remote_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of `RemoteOptions`."""
    text = "for --model http(s)://HOST/v2/models/NAME; --schedule and --prediction say what the server does not"
    group = parser.add_argument_group("asking a hosted model", text)
    for field in dataclasses.fields(RemoteOptions):
        group.add_argument(f"--{field.name}", default=field.default, **field.metadata)


def remote_options(args: argparse.Namespace) -> RemoteOptions:
    """Return the options of a parser with `add_remote_arguments`."""
    return RemoteOptions(**{field.name: getattr(args, field.name) for field in dataclasses.fields(RemoteOptions)})
