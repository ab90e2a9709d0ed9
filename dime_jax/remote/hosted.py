"""RemoteDenoiser: a model that someone else hosts, asked over the Open Inference Protocol (KServe v2).

Its weights stay where they are. Nothing is asked of it when it is opened, only its metadata: every query goes through
`eps`, or through the ledger of a run.
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
from dime_jax.remote import protocol
from dime_jax.remote.metadata import CONDITION, EPS, LABEL, T_STEP, Contract, Stated, X, read_contract
from dime_jax.remote.options import NO_REMOTE_OPTIONS, SERVED, RemoteOptions
from dime_jax.remote.transport import Reply, ServerPlace, Transport, parse_url
from dime_jax.scoring.requests import ask_in_requests
from dime_jax.scoring.retry import Retry, TryLater, patient

_VALUES = 64 * 32 * 32 * 3  # in one request, unless a single image has more
_METADATA_BYTES = 1 << 24
_REFUSES_BINARY = (400, 415, 422, 500)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


class RemoteDenoiser(Denoiser):
    """A hosted model. What its metadata does not say has to be stated, and what both say has to agree.

    `eps` sends requests of as many images as the server takes, several at a time, and waits and tries again where the
    server is busy or unreachable.

    Args:
      url: http(s)://HOST[:PORT]/v2/models/NAME[/versions/V]; or of the server alone, with `model`.
      model: the name of the model, if the address does not have it.
      schedule: "linear:1000:0.0001:0.02" and the like, or a JSON file of betas (`ConversionOptions`).
      prediction: "epsilon", "sample" or "v_prediction".
      image_size: height and width.
      options: how to ask, and where the token is.
      retry: how to ask again, for `eps`; a run has its own.
      say: shows a line.

    Raises:
      ValueError: in one line, if this is no model that can be asked.
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
        self._encoding = _Encoding()
        stated = Stated(schedule, prediction, image_size, options.layout, options.num_classes)
        metadata = self._get(self._path)
        config = {} if "parameters" in metadata else self._get(f"{self._path}/config", optional=True)  # Triton's
        self.contract = contract = read_contract(metadata, config, stated)
        size = max(1, _VALUES // math.prod(contract.shape))
        limits = [size if options.max_batch is None else options.max_batch, contract.max_batch]
        super().__init__(
            self._apply,
            (),
            contract.schedule,
            contract.shape,
            num_classes=contract.num_classes,
            condition_shape=_condition_shape(contract),
            fingerprint=_fingerprint(contract, place, self._path),
            name=self._path.split("/")[3],
            traceable=False,
            requests=Requests(min(limit for limit in limits if limit), options.in_flight),
        )

    @property
    def origin(self) -> str:
        """Where it is, in words."""
        return f"hosted at {self._transport.place}"

    def eps(self, x: ArrayLike, t: ArrayLike, condition: PyTree = None, **unknown: Never) -> jax.Array:
        """As `Denoiser.eps`: in requests, and patiently. Every attempt is counted in `queries`."""
        if unknown:
            return super().eps(x, t, condition, **unknown)
        x = jnp.asarray(x)
        condition = self.check_condition(condition, len(x))
        answer = ask_in_requests(self, x, t, condition, debit=lambda part: None, retry=self._retry, say=self._say)
        return jnp.asarray(answer)

    def wait_turn(self, images: int, stop: threading.Event) -> None:
        """Wait as long as the rate, or a server that was busy, asks for."""
        self._transport.pace.wait(images, stop)

    def conditions_for(self, labels: np.ndarray | None, captions: Sequence[str] | None) -> Mapping[str, PyTree]:
        """As `Denoiser.conditions_for`; only labels can be taken from images."""
        if self.contract.condition is not None:
            raise ValueError(f"{self.name} takes a condition that images do not have: ask it in Python, with eps")
        return super().conditions_for(labels, captions)

    def _apply(self, params: PyTree, x: jax.Array, t: jax.Array, condition: PyTree) -> jax.Array:
        """One request."""
        del params
        contract = self.contract
        given = np.asarray(x, np.float32)
        tensors = {
            X: np.moveaxis(given, -1, 1) if contract.layout == "NCHW" else given,
            T_STEP: np.broadcast_to(np.asarray(t), len(given)).astype(protocol.DATATYPES[contract.t]),
        }
        if contract.label is not None:
            tensors[LABEL] = np.asarray(condition).astype(protocol.DATATYPES[contract.label])
        if contract.condition is not None:
            tensors[CONDITION] = np.asarray(condition, np.float32)
        tensors |= {name: tensors[name][:, None] for name in contract.columns}
        answer = self._infer(tensors)
        if contract.layout == "NCHW":
            answer = np.moveaxis(answer, 1, -1)
        return contract.schedule.noise_of(jnp.asarray(answer), contract.prediction, x, t)

    def _infer(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        binary = self._encoding.binary
        outputs = [{"name": EPS, "parameters": {"binary_data": True}} if binary else {"name": EPS}]
        # KServe gives the id back, and fails if there is none.
        request = protocol.encode("inputs", tensors, binary=binary, outputs=outputs, id="dime_jax")
        x = tensors[X]
        most = protocol.most_bytes(x.size)
        reply = self._transport.post(f"{self._path}/infer", request.body, request.headers, most)
        if reply.status != 200:
            raise self._failure(reply, binary)
        self._encoding.settle()
        return self._answer(reply, x.shape)

    def _answer(self, reply: Reply, shape: tuple[int, ...]) -> np.ndarray:
        """eps, of the datatype and shape it must have; where it is not finite, the run says so of the image."""
        length = reply.headers.get(protocol.HEAD_LENGTH.lower())
        if length is not None and not re.fullmatch(r"\d{1,12}", length):
            raise ValueError(f"{self.name}: expected {protocol.HEAD_LENGTH} to be a number")
        try:
            message = protocol.Message(reply.body, None if length is None else int(length))
            tensors = protocol.decode("outputs", message).tensors
        except protocol.Malformed as error:
            said = self._transport.scrub(str(error))
            raise ValueError(f"{self.name} gave no answer that can be read: {said}") from None
        eps = tensors.get(EPS)
        if eps is None:
            got = self._transport.scrub(", ".join(tensors) or "nothing")
            raise ValueError(f"expected the answer of {self.name} to hold {EPS}, got {got}")
        if eps.dtype != np.float32 or eps.shape != shape:
            got = f"{eps.dtype} {list(eps.shape)}"
            raise ValueError(f"expected {EPS} of {self.name} to be float32 {list(shape)}, got {got}")
        return eps

    def _failure(self, reply: Reply, binary: bool) -> Exception:
        """What to raise about an answer that is an error."""
        text = f"{self.name} answered HTTP {reply.status}: {self._transport.scrub(_message(reply.body))}"
        if reply.status in _REFUSES_BINARY and self._encoding.refuse(binary):
            return TryLater(f"{text}; trying JSON in place of binary tensors", 0.0)
        return ConnectionError(text) if reply.status >= 500 else ValueError(text)

    def _get(self, path: str, optional: bool = False) -> JsonObject:
        """A JSON object; of what not every server has, an empty one."""

        def get() -> Reply:
            reply = self._transport.get(path, _METADATA_BYTES)
            return reply if optional else self._transport.check(reply)

        reply = patient(get, self._retry, self._say)()
        if optional and reply.status != 200:
            return {}
        if reply.status != 200:
            said = self._transport.scrub(_message(reply.body))
            raise ValueError(f"{self._transport.place} has no model at {path}: HTTP {reply.status} {said}".rstrip())
        try:
            return protocol.parse_object(reply.body)
        except protocol.Malformed as error:
            raise ValueError(f"{self._transport.place}{path} is no KServe v2 metadata: {error}") from None


class _Encoding:
    """Whether a server takes binary tensors: tried first, since they are exact and short, and settled by an answer."""

    def __init__(self) -> None:
        self.binary, self._settled, self._lock = True, False, threading.Lock()

    def settle(self) -> None:
        """There was an answer to what was sent."""
        self._settled = True

    def refuse(self, binary: bool) -> bool:
        """There was an error; returns whether JSON is worth a try."""
        with self._lock:
            if binary and not self._settled:
                self.binary = False
            return binary and not self.binary


def _address(url: str, model: str | None) -> tuple[ServerPlace, str]:
    """The place of a server, and the path of the model on it."""
    place, path = parse_url(url)
    path = path.rstrip("/")
    if model is not None:
        path = f"{path.removesuffix('/v2')}/v2/models/{model}"
    if not re.fullmatch(r"/v2/models/[\w.~%:@+-]{1,200}(/versions/[\w.-]{1,40})?", path, re.ASCII):
        raise ValueError(f"expected {place}/v2/models/NAME, got the path {path[:100] or '/'}")
    return place, path


def _condition_shape(contract: Contract) -> PyTree:
    return None if contract.condition is None else jax.ShapeDtypeStruct(contract.condition, jnp.float32)


def _fingerprint(contract: Contract, place: ServerPlace, path: str) -> str:
    """The server's, or the address; and whatever else of what was agreed changes the answers."""
    parts = [contract.fingerprint or f"{place}{path}"]
    parts += [value for value, usual in ((contract.layout, "NHWC"), (contract.prediction, "epsilon")) if value != usual]
    return SERVED + " ".join(parts)


def _message(body: bytes) -> str:
    """What a server says about an error."""
    try:
        said = protocol.parse_object(body)
    except protocol.Malformed:
        return body[:1000].decode("utf-8", "replace")
    return str(said.get("error") or said.get("detail") or said)[:1000]
