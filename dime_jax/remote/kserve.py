"""Tensors as the Open Inference Protocol (KServe v2) carries them: a JSON head, then the bytes of all binary tensors.

    POST /v2/models/NAME/infer
    Inference-Header-Content-Length: 294        the length of the head; without it, all of the body is JSON
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 32, 32, 3], "parameters": {"binary_data_size": 24576}},
                {"name": "t", "datatype": "INT32", "shape": [2], "data": [70, 70]}], "outputs": [...]}<bytes of x>

What either side sends is a stranger's: nothing is allocated by what it claims, only by the bytes that there are.
"""

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dime_jax._util.typing import JsonObject

HEAD_LENGTH = "Inference-Header-Content-Length"
DATATYPES: dict[str, "np.dtype[np.generic]"] = {
    "FP32": np.dtype("<f4"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
}
JSON_BYTES = 32  # of one number, at most
HEAD_BYTES = 1 << 16  # of everything else in a message, at most


class Malformed(ValueError):
    """A message is not what the protocol says it should be."""


class Message(NamedTuple):
    """The body of a request or an answer, and the length of its head; None if all of it is JSON."""

    body: bytes
    head_length: int | None

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that go with it."""
        if self.head_length is None:
            return {"Content-Type": "application/json"}
        return {"Content-Type": "application/octet-stream", HEAD_LENGTH: str(self.head_length)}


class Decoded(NamedTuple):
    """A message's tensors by name, and its head."""

    tensors: dict[str, np.ndarray]
    head: JsonObject


def most_bytes(values: int) -> int:
    """The most bytes that a message about so many numbers may have, JSON or binary."""
    return HEAD_BYTES + JSON_BYTES * values


def encode(kind: str, tensors: Mapping[str, np.ndarray], *, binary: bool, **head: object) -> Message:
    """A message.

    Args:
      kind: "inputs" or "outputs".
      tensors: by name, of one of the `DATATYPES`.
      binary: send bytes in place of JSON numbers.
      **head: what else the head says.

    Raises:
      Malformed: for numbers that are not finite, which JSON cannot say.
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
        raise Malformed("numbers that are not finite cannot be sent as JSON") from None
    return Message(b"".join([text, *blobs]), len(text) if binary else None)


def decode(kind: str, message: Message) -> Decoded:
    """The tensors of a message, each of the type and shape that it says.

    Raises:
      Malformed: in one line.
    """
    length = len(message.body) if message.head_length is None else message.head_length
    if not 0 < length <= len(message.body):
        raise Malformed(f"expected a head of 1 to {len(message.body)} bytes, got {length}")
    head = parse_object(message.body[:length])
    described = head.get(kind)
    if not isinstance(described, list) or not all(isinstance(one, dict) for one in described):
        raise Malformed(f"expected a list of {kind}")
    tensors: dict[str, np.ndarray] = {}
    start = length
    for one in described:
        name = one.get("name")
        if not isinstance(name, str) or name in tensors:
            raise Malformed(f"expected {kind} with names, each once")
        size = (one.get("parameters") or {}).get("binary_data_size") if message.head_length is not None else None
        blob = None
        if size is not None:
            blob = _cut(message.body, start, size, name)
            start += len(blob)
        tensors[name] = _tensor(name, one, blob)
    if start != len(message.body):
        raise Malformed(f"{len(message.body) - start} bytes are left over behind the tensors")
    return Decoded(tensors, head)


def parse_object(text: bytes) -> JsonObject:
    """A JSON object of a stranger's."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed("not JSON") from None
    if not isinstance(value, dict):
        raise Malformed(f"expected a JSON object, got {type(value).__name__}")
    return value


def _cut(body: bytes, start: int, size: object, name: str) -> bytes:
    if not isinstance(size, int) or not 0 <= size <= len(body) - start:
        raise Malformed(f"{name} is cut short: {len(body) - start} bytes are left, it says {str(size)[:20]}")
    return body[start : start + size]


def _tensor(name: str, described: JsonObject, blob: bytes | None) -> np.ndarray:
    datatype, shape = described.get("datatype"), described.get("shape")
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise Malformed(f"expected {name} to be one of {', '.join(DATATYPES)}, got {str(datatype)[:20]}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise Malformed(f"expected {name} to have a shape, got {str(shape)[:60]}")
    dtype = DATATYPES[datatype]
    values = _numbers(name, described.get("data"), dtype) if blob is None else blob
    count = len(values) if blob is None else len(values) / dtype.itemsize
    if count != math.prod(shape):
        raise Malformed(f"expected {math.prod(shape)} numbers in {name} of shape {shape}, got {count:g}")
    array = values if isinstance(values, np.ndarray) else np.frombuffer(values, dtype)
    return array.reshape(shape)


def _numbers(name: str, data: object, dtype: "np.dtype[np.generic]") -> np.ndarray:
    """JSON numbers, flat or nested; null is NaN, where there is one."""
    if not isinstance(data, list):
        raise Malformed(f"expected {name} to have data")
    try:
        array = np.asarray(data)
        if array.dtype == object and dtype.kind == "f":
            array = np.asarray(data, dtype)  # None becomes NaN; lists of unequal lengths fail
    except (ValueError, TypeError):
        array = np.zeros(0, "U1")
    if array.size and array.dtype.kind not in ("iuf" if dtype.kind == "f" else "iu"):
        raise Malformed(f"expected {name} to hold numbers of its datatype")
    with np.errstate(over="ignore"):
        return array.ravel().astype(dtype)
