"""What a model answers to requests of the Open Inference Protocol; `dime_jax.remote.serve` adds the network."""

import dataclasses
import math
import re
import threading
import time
from typing import NamedTuple

import jax
import numpy as np

from dime_jax._util import validate
from dime_jax._util.typing import JsonObject, PyTree
from dime_jax.core.denoiser import Denoiser
from dime_jax.remote import kserve
from dime_jax.remote.metadata import CONDITION, EPS, LABEL, T_STEP, X, describe_schedule
from dime_jax.remote.transport import ServerPlace
from dime_jax.scoring import default_micro_batch


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """How a model is hosted.

    Attributes:
      host: the address to listen on.
      port: 0 takes a free one.
      token_env: the environment variable that holds the token that is asked for; None asks for none.
      max_batch: images in one request.
      rate: the most queries per second, in the long run; None for no bound.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token_env: str | None = None
    max_batch: int = 64
    rate: float | None = None

    def __post_init__(self) -> None:
        validate.check_at_least(self.max_batch, 1, "max_batch")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"expected 0 <= port < 65536, got port={self.port}")
        if self.rate is not None:
            validate.check_positive(self.rate, "rate")
        if not ServerPlace("http", self.host, self.port).loopback and self.token_env is None:
            raise ValueError(f"expected --token-env with --host {self.host}: others than this machine could ask")


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.headers = status, headers or {}


class HttpAnswer(NamedTuple):
    """An answer, and how many images were evaluated for it."""

    status: int
    message: kserve.Message
    images: int = 0
    headers: dict[str, str] = {}  # noqa: RUF012 (a NamedTuple's, and never changed)


class Hosted:
    """A model, and what the protocol says about it; evaluates one request at a time.

    Attributes:
      name: in its address.
      queries: images that were evaluated so far.
      most_bytes: that a request may have.
    """

    def __init__(self, denoiser: Denoiser, options: ServeOptions, name: str | None = None):
        self.name = re.sub(r"[^\w.-]", "-", name or denoiser.name, flags=re.ASCII)
        self.queries, self._denoiser, self._options = 0, denoiser, options
        self._lock, self._free = threading.Lock(), time.monotonic()
        condition = denoiser.condition_shape if denoiser.num_classes is None else None
        if condition is not None and not isinstance(condition, jax.ShapeDtypeStruct):
            raise ValueError(f"{denoiser.name} takes a condition of several arrays: expected one")
        self._condition = condition
        values = math.prod(denoiser.shape) + (0 if condition is None else math.prod(condition.shape)) + 2
        self.most_bytes = kserve.most_bytes(values * options.max_batch)
        platform = jax.local_devices()[0].platform
        self._micro_batch = default_micro_batch(denoiser.shape, platform) if denoiser.traceable else options.max_batch

    def warm_up(self) -> None:
        """Compile a network, on a blank image that counts as no query, so that the first request need not wait."""
        if self._denoiser.traceable:
            blank = jax.tree.map(lambda one: np.zeros((1, *one.shape), one.dtype), self._denoiser.condition_shape)
            self._evaluate(np.zeros((1, *self._denoiser.shape), np.float32), np.zeros(1, np.int32), blank)

    def metadata(self) -> JsonObject:
        """What GET /v2/models/NAME answers: shape, schedule and fingerprint, and nothing about the network."""
        denoiser = self._denoiser
        shape = [-1, *denoiser.shape]
        inputs = [_tensor(X, "FP32", shape), _tensor(T_STEP, "INT32", [-1])]
        parameters: JsonObject = {
            "schedule": describe_schedule(denoiser.schedule),
            "prediction": "epsilon",
            "layout": "NHWC",
            "range": [-1, 1],
            "space": "pixels" if denoiser.encode_fn is None else "latents",
            "fingerprint": denoiser.fingerprint,
            "max_batch": self._options.max_batch,
        }
        if denoiser.num_classes is not None:
            inputs.append(_tensor(LABEL, "INT32", [-1]))
            parameters["num_classes"] = denoiser.num_classes
        if self._condition is not None:
            inputs.append(_tensor(CONDITION, "FP32", [-1, *self._condition.shape]))
        return {
            "name": self.name,
            "versions": ["1"],
            "platform": "dime_jax",
            "inputs": inputs,
            "outputs": [_tensor(EPS, "FP32", shape)],
            "parameters": parameters,
        }

    def infer(self, message: kserve.Message) -> HttpAnswer:
        """Answer a request.

        Raises:
          Refused: if it is not one, or too many queries were made lately.
        """
        try:
            given = kserve.decode("inputs", message)
        except kserve.Malformed as error:
            raise Refused(400, str(error)) from None
        x, t, condition = self._checked(given.tensors)
        self._wait_turn(len(x))
        with self._lock:
            self.queries += len(x)
            try:
                eps = self._evaluate(x, t, condition)
            except ValueError as error:
                raise Refused(400, " ".join(str(error).split())) from None
        try:
            answer = kserve.encode("outputs", {EPS: eps}, binary=_wants_binary(given.head), model_name=self.name)
        except kserve.Malformed as error:
            raise Refused(500, f"{error}: ask for binary data") from None
        return HttpAnswer(200, answer, len(x))

    def _checked(self, tensors: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, PyTree]:
        denoiser, wanted = self._denoiser, {X, T_STEP}
        if denoiser.num_classes is not None:
            wanted |= {LABEL}
        if self._condition is not None:
            wanted |= {CONDITION}
        if tensors.keys() != wanted:
            raise Refused(400, f"expected the inputs {', '.join(sorted(wanted))}")
        x, t = tensors[X], tensors[T_STEP]
        condition = tensors.get(LABEL, tensors.get(CONDITION))
        try:
            validate.check_shape(x, (None, *denoiser.shape), X)
            if x.dtype != np.float32:
                raise ValueError(f"expected {X} to be FP32")
            if not 0 < len(x) <= self._options.max_batch:
                raise ValueError(f"expected 1 to {self._options.max_batch} images in a request, got {len(x)}")
            validate.check_shape(t, (len(x),), T_STEP)
            validate.check_timestep(t, denoiser.schedule.num_steps)
            denoiser.check_condition(condition, len(x))
        except ValueError as error:
            raise Refused(400, str(error)) from None
        return x, t.astype(np.int32), condition

    def _wait_turn(self, images: int) -> None:
        """Refuse what goes beyond the rate, and say when it would not."""
        if self._options.rate is None:
            return
        with self._lock:
            ahead = self._free - time.monotonic()
            if ahead > 0:
                raise Refused(429, "too many queries per second", {"Retry-After": str(math.ceil(ahead))})
            self._free = time.monotonic() + images / self._options.rate

    def _evaluate(self, x: np.ndarray, t: np.ndarray, condition: PyTree) -> np.ndarray:
        """eps, in micro-batches of one size, the last one filled up: one program, whatever the size of the request."""
        size, answers = self._micro_batch, []
        for start in range(0, len(x), size):
            rows = np.minimum(np.arange(start, start + size), len(x) - 1)
            rows = rows if self._denoiser.traceable else rows[: len(x) - start]
            told = jax.tree.map(lambda column, rows=rows: np.asarray(column)[rows], condition)
            when = t[0] if np.all(t == t[0]) else t[rows]  # mostly one, which every function takes
            answers.append(np.asarray(self._denoiser.eps(x[rows], when, told))[: len(x) - start])
        return np.concatenate(answers)


def _tensor(name: str, datatype: str, shape: list[int]) -> JsonObject:
    return {"name": name, "datatype": datatype, "shape": shape}


def _wants_binary(head: JsonObject) -> bool:
    """Whether a request asks for its answer as bytes."""
    for one in [head, *(head.get("outputs") or [])]:
        parameters = one.get("parameters") if isinstance(one, dict) else None
        if isinstance(parameters, dict) and (parameters.get("binary_data") or parameters.get("binary_data_output")):
            return True
    return False
