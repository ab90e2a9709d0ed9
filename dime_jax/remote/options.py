"""What a user may say about a hosted model, in Python and on the command line.

Nothing slow is imported here: `dime-jax --help` needs it.
"""

import dataclasses
import ipaddress
import math
import os
import re

from dime_jax._util.flags import changed, check_choices, documented, option

LAYOUTS = ("NHWC", "NCHW")
SERVED = "served:"  # begins the fingerprint of a hosted model
HOSTED = "hosted models"
_TOKEN = ("token_env", "token_file")


def _check_positive(value: float | None, name: str) -> None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and > 0, got {value}")


@documented
@dataclasses.dataclass(frozen=True)
class RemoteOptions:
    """How to ask a hosted model. None of this changes its answers."""

    token_env: str | None = option(None, "the environment variable with the bearer token", HOSTED, "NAME")
    token_file: str | os.PathLike[str] | None = option(
        None, "a file with the bearer token, instead of a variable", HOSTED, "FILE"
    )
    layout: str | None = option(
        None, "the order of an image's axes, if the server does not say", HOSTED, choices=LAYOUTS
    )
    num_classes: int | None = option(None, "the number of classes, if the server does not say", HOSTED, type=int)
    max_batch: int | None = option(
        None, "send at most N images per request (default: as the server allows, about 1 MB)", HOSTED, type=int
    )
    in_flight: int = option(4, "keep up to N requests in flight", HOSTED)
    max_rate: float | None = option(None, "make at most X queries per second", HOSTED, type=float)
    timeout: float = option(120.0, "give up on a request after X seconds", HOSTED)

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("num_classes", "max_batch", "in_flight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        _check_positive(self.max_rate, "max_rate")
        _check_positive(self.timeout, "timeout")
        if self.in_flight > 64:
            raise ValueError(f"in_flight must be <= 64, got {self.in_flight}")
        if self.token_env is not None and self.token_file is not None:
            raise ValueError("give token_env or token_file, not both")

    def given(self) -> dict[str, str | int | float]:
        """Return the options that differ from their defaults, by name, without where the token comes from."""
        return {name: value for name, (value,) in changed(self).items() if name not in _TOKEN}

    @property
    def has_token(self) -> bool:
        """Whether a token is named."""
        return self.token_env is not None or self.token_file is not None


NO_REMOTE_OPTIONS = RemoteOptions()


@documented
@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """How a model is hosted."""

    host: str = option("127.0.0.1", "the address to listen on; 127.0.0.1 is this machine only", metavar="ADDRESS")
    port: int = option(0, "the port; 0 takes a free one")
    token_env: str | None = option(
        None, "the environment variable with the token that clients must send", metavar="NAME"
    )
    max_batch: int = option(64, "accept at most N images per request")
    rate: float | None = option(None, "answer at most X queries per second on average", type=float)

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ValueError(f"max_batch must be >= 1, got {self.max_batch}")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port must be in [0, 65535], got {self.port}")
        _check_positive(self.rate, "rate")
        if not is_loopback(self.host) and self.token_env is None:
            raise ValueError(f"--host {self.host} requires --token_env: other machines could query the model")


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_address(model: object) -> bool:
    """Return whether a user names a hosted model: a URL that begins with http:// or https://."""
    return isinstance(model, str) and re.match(r"https?://", model, re.IGNORECASE) is not None
