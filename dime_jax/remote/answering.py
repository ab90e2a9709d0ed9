"""What a model answers to requests of the Open Inference Protocol; `dime_jax.remote.serve` adds the network."""

import math
import re
import threading
import time
from typing import NamedTuple

import jax
import numpy as np

from dime_jax._util import validate
from dime_jax._util.text import one_line
from dime_jax._util.typing import JsonObject, PyTree
from dime_jax.core.denoiser import Denoiser
from dime_jax.remote import kserve
from dime_jax.remote.metadata import CONDITION, EPS, LABEL, T_STEP, X, schedule_tables
from dime_jax.remote.options import ServeOptions
from dime_jax.scoring import default_micro_batch


class Refused(Exception):
    """A request that is answered with an error.

    Args:
      status: the HTTP status.
      message: the reason, in one line.
      headers: further HTTP headers.
    """

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.headers = status, headers or {}


class HttpAnswer(NamedTuple):
    """An answer, and the number of images evaluated for it."""

    status: int
    message: kserve.Message
    images: int = 0
    headers: dict[str, str] = {}  # noqa: RUF012 (a NamedTuple's, and never changed)


class Hosted:
    """A model, as the protocol presents it; evaluates one request at a time.

    Args:
      denoiser: the model.
      options: how to host it.
      name: the model's name in its URL; its own if None.

    Attributes:
      name: the name, as URLs can hold it.
      queries: the number of images evaluated so far.
      most_bytes: the most bytes that a request may have.
    """

    def __init__(self, denoiser: Denoiser, options: ServeOptions, name: str | None = None):
        self.name = re.sub(r"[^\w.-]", "-", name or denoiser.name, flags=re.ASCII)
        self.queries, self._denoiser, self._options = 0, denoiser, options
        self._lock, self._free = threading.Lock(), time.monotonic()
        condition = denoiser.condition_shape if denoiser.num_classes is None else None
        if condition is not None and not isinstance(condition, jax.ShapeDtypeStruct):
            raise ValueError(f"the condition of {denoiser.name} must be one array to be hosted, it is several")
        self._inputs = [_tensor(X, "FP32", denoiser.shape), _tensor(T_STEP, "INT32", ())]
        if denoiser.num_classes is not None:
            self._inputs.append(_tensor(LABEL, "INT32", ()))
        if condition is not None:
            self._inputs.append(_tensor(CONDITION, "FP32", condition.shape))
        values = math.prod(denoiser.shape) + (0 if condition is None else math.prod(condition.shape)) + 2
        self.most_bytes = kserve.most_bytes(values * options.max_batch)
        platform = jax.local_devices()[0].platform
        self._micro_batch = default_micro_batch(denoiser.shape, platform) if denoiser.traceable else options.max_batch

    def warm_up(self) -> None:
        """Compile the network, on a blank image that is not counted, so that the first request need not wait for it."""
        if self._denoiser.traceable:
            blank = jax.tree.map(lambda one: np.zeros((1, *one.shape), one.dtype), self._denoiser.condition_shape)
            self._evaluate(np.zeros((1, *self._denoiser.shape), np.float32), np.zeros(1, np.int32), blank)

    def metadata(self) -> JsonObject:
        """Return what GET /v2/models/NAME answers: shape, schedule and fingerprint, but nothing about the network."""
        denoiser = self._denoiser
        parameters: JsonObject = {
            "schedule": schedule_tables(denoiser.schedule),
            "prediction": "epsilon",
            "layout": "NHWC",
            "range": [-1, 1],
            "space": "pixels" if denoiser.encode_fn is None else "latents",
            "fingerprint": denoiser.fingerprint,
            "max_batch": self._options.max_batch,
        }
        if denoiser.num_classes is not None:
            parameters["num_classes"] = denoiser.num_classes
        return {
            "name": self.name,
            "versions": ["1"],
            "platform": "dime_jax",
            "inputs": self._inputs,
            "outputs": [_tensor(EPS, "FP32", denoiser.shape)],
            "parameters": parameters,
        }

    def infer(self, message: kserve.Message) -> HttpAnswer:
        """Answer a request.

        Raises:
          Refused: if the request is invalid, or exceeds the rate.
        """
        try:
            given = kserve.decode("inputs", message)
            x, t, condition = self._checked(given.tensors)
            self._check_rate(len(x))
            with self._lock:
                self.queries += len(x)
                eps = self._evaluate(x, t, condition)
        except ValueError as error:
            raise Refused(400, one_line(error, None)) from None
        try:
            answer = kserve.encode("outputs", {EPS: eps}, binary=_wants_binary(given.head), model_name=self.name)
        except ValueError as error:
            raise Refused(500, f"{error}: ask for binary data") from None
        return HttpAnswer(200, answer, len(x))

    def _checked(self, tensors: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, PyTree]:
        """Return x, t and condition, or raise ValueError if there is something wrong with them."""
        denoiser, wanted = self._denoiser, {one["name"] for one in self._inputs}
        if tensors.keys() != wanted:
            raise ValueError(f"inputs must be {', '.join(sorted(wanted))}, got {', '.join(sorted(tensors))[:200]}")
        x, t = tensors[X], tensors[T_STEP]
        condition = tensors.get(LABEL, tensors.get(CONDITION))
        validate.check_shape(x, (None, *denoiser.shape), X)
        if x.dtype != np.float32:
            raise ValueError(f"{X} must be FP32, got {x.dtype}")
        if not 0 < len(x) <= self._options.max_batch:
            raise ValueError(f"a request must have 1 to {self._options.max_batch} images, got {len(x)}")
        validate.check_shape(t, (len(x),), T_STEP)
        validate.check_timestep(t, denoiser.schedule.num_steps)
        denoiser.check_condition(condition, len(x))
        return x, t.astype(np.int32), condition

    def _check_rate(self, images: int) -> None:
        """Refuse a request that exceeds the rate, and say how long to wait."""
        if self._options.rate is None:
            return
        with self._lock:
            ahead = self._free - time.monotonic()
            if ahead > 0:
                raise Refused(429, "too many queries per second", {"Retry-After": str(math.ceil(ahead))})
            self._free = time.monotonic() + images / self._options.rate

    def _evaluate(self, x: np.ndarray, t: np.ndarray, condition: PyTree) -> np.ndarray:
        """Return eps, computed in micro-batches of one size, the last one padded: one program for all requests."""
        size, answers = self._micro_batch, []
        for start in range(0, len(x), size):
            rows = np.minimum(np.arange(start, start + size), len(x) - 1)
            rows = rows if self._denoiser.traceable else rows[: len(x) - start]
            told = jax.tree.map(lambda column, rows=rows: np.asarray(column)[rows], condition)
            when = t[0] if np.all(t == t[0]) else t[rows]  # mostly one, which every function takes
            answers.append(np.asarray(self._denoiser.eps(x[rows], when, told))[: len(x) - start])
        return np.concatenate(answers)


def _tensor(name: str, datatype: str, row: tuple[int, ...]) -> JsonObject:
    return {"name": name, "datatype": datatype, "shape": [-1, *row]}


def _wants_binary(head: JsonObject) -> bool:
    """Return whether a request asks for a binary answer."""
    asked = [one for one in [head, *(head.get("outputs") or [])] if isinstance(one, dict)]
    parameters = [one["parameters"] for one in asked if isinstance(one.get("parameters"), dict)]
    return any(one.get("binary_data") or one.get("binary_data_output") for one in parameters)
