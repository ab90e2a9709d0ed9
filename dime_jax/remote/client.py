"""RemoteDenoiser: a model that someone else hosts, asked over the Open Inference Protocol (KServe v2).

Opening it reads its metadata and makes no query: every query goes through `eps`, or through the ledger of a run.
"""

import math
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Never

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dime_jax._util.typing import JsonObject, PyTree
from dime_jax.core.denoiser import Denoiser, Requests
from dime_jax.remote import kserve
from dime_jax.remote.metadata import CONDITION, EPS, LABEL, T_STEP, Contract, UserClaims, X, read_contract
from dime_jax.remote.options import NO_REMOTE_OPTIONS, SERVED, RemoteOptions
from dime_jax.remote.transport import Reply, ServerPlace, Transport, parse_url
from dime_jax.scoring.retry import Retry, TryLater, ask_in_requests, with_retries

_VALUES = 64 * 32 * 32 * 3  # in one request, unless a single image has more
_METADATA_BYTES = 1 << 24
_REFUSES_BINARY = (400, 415, 422, 500)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


class RemoteDenoiser(Denoiser):
    """A hosted model. The user states what its metadata does not say; where both say something, they must agree.

    `eps` sends requests of as many images as the server takes, several at a time, and retries where the server is busy
    or unreachable.

    Args:
      url: http(s)://HOST[:PORT]/v2/models/NAME[/versions/V]; or that of the server alone, with `model`.
      model: the name of the model, if the URL does not have it.
      schedule: "linear:1000:0.0001:0.02" and the like, or a JSON file of betas (`ConversionOptions`).
      prediction: "epsilon", "sample" or "v_prediction".
      image_size: height and width.
      options: how to ask, and where the token is.
      retry: how `eps` retries; a run has its own setting.
      say: shows a line.

    Raises:
      ValueError: in one line, if the model cannot be asked.
      ConnectionError: if the server cannot be reached.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        schedule: str | None = None,
        prediction: str | None = None,
        image_size: int | None = None,
        options: RemoteOptions = NO_REMOTE_OPTIONS,
        retry: Retry = Retry(),  # noqa: B008 (a NamedTuple of numbers)
        say: Callable[[str], object] = _say,
    ):
        place, self._path = _address(url, model)
        self._transport, self._retry, self._say = Transport(place, options), retry, say
        self._takes_binary: bool | None = None  # unknown until the first answer
        claims = UserClaims(schedule, prediction, image_size, options.layout, options.num_classes)
        metadata = self._get(self._path)
        config = {} if "parameters" in metadata else self._get(f"{self._path}/config", optional=True)  # Triton's
        self.contract = contract = read_contract(metadata, config, claims)
        size = max(1, _VALUES // math.prod(contract.shape))
        limits = [size if options.max_batch is None else options.max_batch, contract.max_batch]
        super().__init__(
            self._apply,
            (),
            contract.schedule,
            contract.shape,
            num_classes=contract.num_classes,
            condition_shape=contract.condition and jax.ShapeDtypeStruct(contract.condition, jnp.float32),
            fingerprint=_fingerprint(contract, place, self._path),
            name=self._path.split("/")[3],
            traceable=False,
            requests=Requests(min(limit for limit in limits if limit), options.in_flight),
        )

    @property
    def origin(self) -> str:
        """Where the model is, in words."""
        return f"hosted at {self._transport.place}"

    def eps(self, x: ArrayLike, t: ArrayLike, condition: PyTree = None, **unknown: Never) -> jax.Array:
        """Do as `Denoiser.eps`, in requests, with retries. Every attempt is counted in `queries`."""
        if unknown:
            return super().eps(x, t, condition, **unknown)
        x = jnp.asarray(x)
        condition = self.check_condition(condition, len(x))
        answer = ask_in_requests(self, x, t, condition, debit=lambda part: None, retry=self._retry, say=self._say)
        return jnp.asarray(answer)

    def wait_turn(self, images: int, stop: threading.Event) -> None:
        """Wait as long as the rate limit, or a busy server, asks for."""
        self._transport.pace.wait(images, stop)

    def conditions_for(self, labels: np.ndarray | None, captions: Sequence[str] | None) -> Mapping[str, PyTree]:
        """Do as `Denoiser.conditions_for`; only labels can be taken from images."""
        if self.contract.condition is not None:
            raise ValueError(f"{self.name} takes a condition that images do not have: ask it in Python, with eps")
        return super().conditions_for(labels, captions)

    def _apply(self, params: PyTree, x: jax.Array, t: jax.Array, condition: PyTree) -> jax.Array:
        """Send one request."""
        del params
        contract = self.contract
        given = np.asarray(x, np.float32)
        tensors = {
            X: np.moveaxis(given, -1, 1) if contract.layout == "NCHW" else given,
            T_STEP: np.broadcast_to(np.asarray(t), len(given)).astype(kserve.DATATYPES[contract.t]),
        }
        if contract.label is not None:
            tensors[LABEL] = np.asarray(condition).astype(kserve.DATATYPES[contract.label])
        if contract.condition is not None:
            tensors[CONDITION] = np.asarray(condition, np.float32)
        tensors |= {name: tensors[name][:, None] for name in contract.columns}
        answer = self._infer(tensors)
        if contract.layout == "NCHW":
            answer = np.moveaxis(answer, 1, -1)
        return contract.schedule.noise_of(jnp.asarray(answer), contract.prediction, x, t)

    def _infer(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Send the tensors and return eps. Binary tensors, which are exact and short, are tried first."""
        binary = self._takes_binary is not False
        outputs = [{"name": EPS, "parameters": {"binary_data": True}} if binary else {"name": EPS}]
        # KServe returns the id, and fails if there is none.
        request = kserve.encode("inputs", tensors, binary=binary, outputs=outputs, id="dime_jax")
        shape = tensors[X].shape
        most = kserve.most_bytes(math.prod(shape))
        reply = self._transport.post(f"{self._path}/infer", request.body, request.headers, most)
        if reply.status == 200:
            self._takes_binary = binary or self._takes_binary
            return self._answer(reply, shape)
        text = f"{self.name} answered HTTP {reply.status}: {self._transport.scrub(_message(reply.body))}"
        if binary and self._takes_binary is not True and reply.status in _REFUSES_BINARY:
            self._takes_binary = False
            raise TryLater(f"{text}; trying JSON instead of binary tensors", 0.0)
        raise ConnectionError(text) if reply.status >= 500 else ValueError(text)

    def _answer(self, reply: Reply, shape: tuple[int, ...]) -> np.ndarray:
        """Return eps, of the right datatype and shape; a run reports the images for which it is not finite."""
        try:
            length = kserve.parse_length(reply.headers, kserve.HEAD_LENGTH)
            tensors = kserve.decode("outputs", kserve.Message(reply.body, length)).tensors
        except ValueError as error:
            raise ValueError(f"the answer of {self.name} is invalid: {self._transport.scrub(str(error))}") from None
        eps = tensors.get(EPS)
        if eps is None or eps.dtype != np.float32 or eps.shape != shape:
            got = f"{eps.dtype} {list(eps.shape)}" if eps is not None else ", ".join(tensors) or "nothing"
            wanted = f"{EPS} of float32 {list(shape)}"
            raise ValueError(f"the answer of {self.name} must be {wanted}, got {self._transport.scrub(got)}")
        return eps

    def _get(self, path: str, optional: bool = False) -> JsonObject:
        """Return the JSON object at a path; an empty one if it is optional and not there."""

        def get() -> Reply:
            reply = self._transport.get(path, _METADATA_BYTES)
            return reply if optional else self._transport.check(reply)

        reply = with_retries(get, self._retry, self._say)()
        if optional and reply.status != 200:
            return {}
        if reply.status != 200:
            said = self._transport.scrub(_message(reply.body))
            raise ValueError(f"{self._transport.place} has no model at {path}: HTTP {reply.status} {said}".rstrip())
        try:
            return kserve.parse_object(reply.body)
        except ValueError as error:
            raise ValueError(f"{self._transport.place}{path} is not KServe v2 metadata: {error}") from None


def _address(url: str, model: str | None) -> tuple[ServerPlace, str]:
    """Return the place of a server, and the path of the model on it."""
    place, path = parse_url(url)
    path = path.rstrip("/")
    if model is not None:
        path = f"{path.removesuffix('/v2')}/v2/models/{model}"
    if not re.fullmatch(r"/v2/models/[\w.~%:@+-]{1,200}(/versions/[\w.-]{1,40})?", path, re.ASCII):
        raise ValueError(f"the URL must be {place}/v2/models/NAME, got the path {path[:100] or '/'}")
    return place, path


def _fingerprint(contract: Contract, place: ServerPlace, path: str) -> str:
    """Return the server's fingerprint, or the URL; and whatever else in the contract changes the answers."""
    parts = [contract.fingerprint or f"{place}{path}"]
    parts += [value for value, usual in ((contract.layout, "NHWC"), (contract.prediction, "epsilon")) if value != usual]
    return SERVED + " ".join(parts)


def _message(body: bytes) -> str:
    """Return what a server says about an error."""
    try:
        said = kserve.parse_object(body)
    except ValueError:
        return body[:1000].decode("utf-8", "replace")
    return str(said.get("error") or said.get("detail") or said)[:1000]
