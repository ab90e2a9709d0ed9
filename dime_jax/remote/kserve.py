"""Tensors as the Open Inference Protocol (KServe v2) carries them: a JSON header, then the bytes of binary tensors.

    POST /v2/models/NAME/infer
    Inference-Header-Content-Length: 294        the length of the header; without it, the whole body is JSON
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 32, 32, 3], "parameters": {"binary_data_size": 24576}},
                {"name": "t", "datatype": "INT32", "shape": [2], "data": [70, 70]}], "outputs": [...]}<bytes of x>

Neither side trusts the other: memory is allocated for the bytes that were received, never for those that are declared.
"""

import email.message
import json
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dime_jax._util import records
from dime_jax._util.typing import JsonObject

HEAD_LENGTH = "Inference-Header-Content-Length"
DATATYPES: dict[str, "np.dtype[np.generic]"] = {
    "FP32": np.dtype("<f4"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
}
JSON_BYTES = 32  # of one number, at most
HEAD_BYTES = 1 << 16  # of everything else in a message, at most


class TensorSpec(NamedTuple):
    """A tensor, as a message or a server's metadata declares it."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, object] | None = None

    @property
    def dtype(self) -> "np.dtype[np.generic]":
        """The datatype, which must be one of `DATATYPES`."""
        if self.datatype not in DATATYPES:
            raise ValueError(f"{self.name} must be one of {', '.join(DATATYPES)}, got {self.datatype[:20]}")
        return DATATYPES[self.datatype]


class Message(NamedTuple):
    """The body of a request or an answer, and the length of its header; None if the whole body is JSON."""

    body: bytes
    head_length: int | None

    @property
    def headers(self) -> dict[str, str]:
        """The message's HTTP headers."""
        if self.head_length is None:
            return {"Content-Type": "application/json"}
        return {"Content-Type": "application/octet-stream", HEAD_LENGTH: str(self.head_length)}


class Decoded(NamedTuple):
    """A message's tensors by name, and its JSON header."""

    tensors: dict[str, np.ndarray]
    head: JsonObject


def most_bytes(values: int) -> int:
    """Return the most bytes that a message with this many numbers may have, JSON or binary."""
    return HEAD_BYTES + JSON_BYTES * values


def encode(kind: str, tensors: Mapping[str, np.ndarray], *, binary: bool, **head: object) -> Message:
    """Return a message.

    Args:
      kind: "inputs" or "outputs".
      tensors: arrays by name, each of one of the `DATATYPES`.
      binary: send bytes rather than JSON numbers.
      **head: whatever else goes into the header.

    Raises:
      ValueError: for numbers that are not finite, which JSON does not have.
    """
    described, blobs = [], []
    for name, array in tensors.items():
        datatype, dtype = next((key, one) for key, one in DATATYPES.items() if one == array.dtype)
        one: JsonObject = {"name": name, "datatype": datatype, "shape": list(array.shape)}
        if binary:
            blobs.append(np.ascontiguousarray(array, dtype).tobytes())
            one["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            one["data"] = array.ravel().tolist()
        described.append(one)
    try:
        text = json.dumps({**head, kind: described}, allow_nan=False).encode()
    except ValueError:
        raise ValueError("numbers that are not finite cannot be sent as JSON") from None
    return Message(b"".join([text, *blobs]), len(text) if binary else None)


def decode(kind: str, message: Message) -> Decoded:
    """Return the tensors of a message, each of the type and shape that its header declares.

    Args:
      kind: "inputs" or "outputs".
      message: the message, which may hold anything.

    Raises:
      ValueError: in one line.
    """
    body, binary = message.body, message.head_length is not None
    start = len(body) if message.head_length is None else message.head_length
    if not 0 < start <= len(body):
        raise ValueError(f"the JSON header must have 1 to {len(body)} bytes, got {start}")
    head = parse_object(body[:start])
    specs = records.parse(list[TensorSpec], head.get(kind), kind)
    if len({spec.name for spec in specs}) < len(specs):
        raise ValueError(f"{kind} must have different names")
    tensors: dict[str, np.ndarray] = {}
    for spec, entry in zip(specs, head[kind]):
        size = (spec.parameters or {}).get("binary_data_size") if binary else None
        if size is None:
            values = _numbers(spec, entry.get("data"))
        elif not isinstance(size, int) or not 0 <= size <= len(body) - start:
            raise ValueError(
                f"{spec.name} is truncated: it declares {str(size)[:20]} bytes, {len(body) - start} are left"
            )
        else:
            values = np.frombuffer(body[start : start + size], spec.dtype)
            start += size
        count, shown = math.prod(spec.shape), str(list(spec.shape))[:60]
        if min(spec.shape, default=0) < 0:
            raise ValueError(f"the shape of {spec.name} must be >= 0, got {shown}")
        if values.size != count:
            raise ValueError(f"{spec.name} of shape {shown} must have {count} numbers, got {values.size}")
        tensors[spec.name] = values.reshape(spec.shape)
    if start != len(body):
        raise ValueError(f"{len(body) - start} bytes are left over after the tensors")
    return Decoded(tensors, head)


def parse_length(headers: email.message.Message, name: str) -> int | None:
    """Return the length in an HTTP header; None if there is no such header."""
    length = headers.get(name)
    if length is not None and not re.fullmatch(r"[0-9]{1,12}", length):
        raise ValueError(f"{name} must be a number")
    return None if length is None else int(length)


def parse_object(text: bytes) -> JsonObject:
    """Return the JSON object in a stranger's text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {type(value).__name__}")
    return value


def _numbers(spec: TensorSpec, data: object) -> np.ndarray:
    """Return JSON numbers, flat or nested, as one row; null is NaN where the datatype has it."""
    if not isinstance(data, list):
        raise ValueError(f"{spec.name} must have a list of data")
    floats = spec.dtype.kind == "f"
    try:
        array = np.asarray(data)
        if array.dtype == object and floats:
            array = np.asarray(data, spec.dtype)  # None becomes NaN; lists of unequal lengths fail
    except (ValueError, TypeError):
        array = np.zeros(1, "U1")
    if array.size and array.dtype.kind not in ("iuf" if floats else "iu"):
        raise ValueError(f"the data of {spec.name} must be numbers of its datatype")
    with np.errstate(over="ignore"):
        return array.ravel().astype(spec.dtype)
