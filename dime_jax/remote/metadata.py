"""What a server says about its model, checked: GET /v2/models/NAME, and Triton's GET /v2/models/NAME/config.

    {"name": "mine", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 32, 32, 3]},
                                {"name": "t", "datatype": "INT32", "shape": [-1]}],
     "outputs": [{"name": "eps", "datatype": "FP32", "shape": [-1, 32, 32, 3]}],
     "parameters": {"schedule": "linear:1000:0.0001:0.02", "prediction": "epsilon", "layout": "NHWC",
                    "range": "[-1, 1]", "fingerprint": "5f0c…", "max_batch": 64}}

A class-conditional model has another input `label` (INT32 or INT64, [-1]) and the parameter `num_classes`; one with any
other condition the input `condition` (FP32). Parameters may be texts, as in Triton's configuration. What the server
does not say the user states; if both speak, they must agree.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from dime_jax._util.typing import JsonObject
from dime_jax.core.schedule import NoiseSchedule, schedule_from_betas
from dime_jax.models.schedule_spec import parse_schedule
from dime_jax.models.spec import PREDICTIONS
from dime_jax.remote.options import LAYOUTS
from dime_jax.remote.transport import printable

T = TypeVar("T")

X, T_STEP, LABEL, CONDITION, EPS = "x", "t", "label", "condition", "eps"
_LARGEST_IMAGE = 1 << 26  # numbers
_RANGE = (-1.0, 1.0)
_FEW_CHANNELS = (1, 3, 4)
_TABLES = ("abar", "sqrt_abar", "sigma")


class Stated(NamedTuple):
    """What the user says about a model; None: what the server says."""

    schedule: str | None = None
    prediction: str | None = None
    image_size: int | None = None
    layout: str | None = None
    num_classes: int | None = None


class Contract(NamedTuple):
    """How a hosted model is asked.

    Attributes:
      shape: of one x, channels last.
      layout: of the server's x.
      t: the datatype of t.
      label: of the labels; None for models that take none.
      columns: those of t and label that the server takes as [B, 1], as Triton must, and not as [B].
      condition: the shape of one condition; None for models that take none.
      schedule: the noise schedule.
      prediction: what it predicts.
      num_classes: of a class-conditional model.
      max_batch: images in one request; None for no bound.
      fingerprint: as the server says; empty if it does not.
      latents: whether x are latents and not pictures.
      facts: a line on each of these things that not every server says.
    """

    shape: tuple[int, ...]
    layout: str
    t: str
    label: str | None
    columns: frozenset[str]
    condition: tuple[int, ...] | None
    schedule: NoiseSchedule
    prediction: str
    num_classes: int | None
    max_batch: int | None
    fingerprint: str
    latents: bool
    facts: tuple[str, ...]


def read_contract(metadata: JsonObject, config: JsonObject, stated: Stated) -> Contract:
    """The contract that server and user describe together.

    Args:
      metadata: of the model, as the server has it.
      config: of Triton; empty for other servers.
      stated: what the user says.

    Raises:
      ValueError: in one line, if something is missing, is not what can be asked, or contradicts the user.
    """
    said = _parameters(metadata, config)
    inputs, outputs = _tensors(metadata, "inputs"), _tensors(metadata, "outputs")
    for name, kind in ((X, inputs), (T_STEP, inputs), (EPS, outputs)):
        if name not in kind:
            raise ValueError(
                f"expected the server to declare inputs {X} [-1, H, W, C] and {T_STEP} [-1] and the output {EPS}; its "
                f"metadata has {', '.join([*inputs, *outputs]) or 'none'}, and no {name}"
            )
    unknown = sorted(inputs.keys() - {X, T_STEP, LABEL, CONDITION})
    if unknown:
        raise ValueError(f"expected no other inputs than {X}, {T_STEP}, {LABEL} and {CONDITION}, got {unknown[0]}")
    inputs[X].expect(["FP32"])
    inputs[T_STEP].expect(["INT32", "INT64"], one_number=True)
    outputs[EPS].expect(["FP32"])
    order, layout_fact = _layout(inputs[X], said, stated)
    shape, size_fact = _shape(inputs[X], order, stated)
    _check_answer(outputs[EPS], inputs[X])
    schedule, schedule_fact = _schedule(said, stated)
    prediction, prediction_fact = _prediction(said, stated)
    _check_range(said)
    label = inputs.get(LABEL)
    classes, class_facts = _classes(label, said, stated)
    condition = inputs.get(CONDITION)
    if condition is not None and label is not None:
        raise ValueError(f"expected an input {LABEL} or {CONDITION}, the server declares both")
    fingerprint = printable(str(said.get("fingerprint") or ""))
    most = _integer(said, "max_batch") or _integer(config, "max_batch_size")
    return Contract(
        shape=shape,
        layout=order,
        t=inputs[T_STEP].datatype,
        label=None if label is None else label.expect(["INT32", "INT64"], one_number=True).datatype,
        columns=frozenset(name for name in (T_STEP, LABEL) if name in inputs and len(inputs[name].shape) == 2),
        condition=None if condition is None else condition.expect(["FP32"]).fixed(),
        schedule=schedule,
        prediction=prediction,
        num_classes=classes,
        max_batch=most or None,
        fingerprint=fingerprint,
        latents=said.get("space") == "latents",
        facts=(size_fact, layout_fact, schedule_fact, prediction_fact, *class_facts, _whose(fingerprint)),
    )


def describe_schedule(schedule: NoiseSchedule) -> dict[str, list[float]]:
    """A schedule as `serve` says it: its tables, which are the same to the bit on the other side."""
    tables = (schedule.abar_table, schedule.sqrt_abar_table, schedule.sigma_table)
    return {name: np.asarray(table).tolist() for name, table in zip(_TABLES, tables)}


class _Tensor(NamedTuple):
    name: str
    datatype: str
    shape: tuple[int, ...]

    def expect(self, datatypes: Sequence[str], one_number: bool = False) -> "_Tensor":
        if self.datatype not in datatypes:
            raise ValueError(f"expected {self.name} to be {' or '.join(datatypes)}, the server says {self.datatype}")
        if self.shape[:1] != (-1,) or (one_number and self.shape not in ((-1,), (-1, 1))):
            wanted = "[-1]" if one_number else "[-1, ...]"
            raise ValueError(f"expected {self.name} of shape {wanted}, the server says {list(self.shape)}")
        return self

    def fixed(self) -> tuple[int, ...]:
        """The shape of one row."""
        if any(size < 1 for size in self.shape[1:]) or math.prod(self.shape[1:]) > _LARGEST_IMAGE:
            raise ValueError(f"expected {self.name} of a fixed shape, the server says {list(self.shape)}")
        return self.shape[1:]


def _tensors(metadata: JsonObject, kind: str) -> dict[str, _Tensor]:
    found = {}
    for one in metadata.get(kind) or []:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise ValueError(f"expected the server to name its {kind}, got {printable(str(one))}")
        shape = one.get("shape")
        if not isinstance(shape, list) or len(shape) > 8 or not all(type(size) is int for size in shape):
            raise ValueError(
                f"expected the server to give {printable(one['name'])} a shape, got {printable(str(shape))}"
            )
        tensor = _Tensor(printable(one["name"], 40), printable(str(one.get("datatype")), 20), tuple(shape))
        found[tensor.name] = tensor
    return found


def _parameters(metadata: JsonObject, config: JsonObject) -> JsonObject:
    """The parameters of the metadata, and of Triton's configuration, where each is {"string_value": TEXT}."""
    said: JsonObject = {}
    for place in (config, metadata):
        values = place.get("parameters")
        for name, value in values.items() if isinstance(values, dict) else ():
            said[name] = value.get("string_value", value) if isinstance(value, dict) else value
    return said


def _layout(x: _Tensor, said: JsonObject, stated: Stated) -> tuple[str, str]:
    declared = said.get("layout")
    if declared is not None and declared not in LAYOUTS:
        raise ValueError(f"expected the server's layout to be NHWC or NCHW, got {printable(str(declared))}")
    if len(x.shape) != 4:
        return "NHWC", "layout: as it is, for x has no height and width"
    guess = {
        "NHWC": x.shape[3] in _FEW_CHANNELS and x.shape[1] not in _FEW_CHANNELS,
        "NCHW": x.shape[1] in _FEW_CHANNELS and x.shape[3] not in _FEW_CHANNELS,
    }
    given = _agreed("layout", declared, stated.layout, str)
    if given is not None:
        return given, f"layout: {given} ({'the server says so' if declared else 'as given'})"
    for name, fits in guess.items():
        if fits:
            return name, f"layout: {name}, inferred from the shape {list(x.shape)}"
    raise ValueError(f"the server does not say which axis of x {list(x.shape)} is its channels: expected --layout")


def _shape(x: _Tensor, layout: str, stated: Stated) -> tuple[tuple[int, ...], str]:
    row = list(x.shape[1:])
    if len(row) != 3:
        return x.fixed(), f"shape of x: {row}"
    channels, *sizes = row if layout == "NCHW" else [row[2], row[0], row[1]]
    wanted = stated.image_size
    if wanted is not None and any(size not in (-1, wanted) for size in sizes):
        raise ValueError(f"--image_size={wanted} contradicts the server, which says {sizes[0]} x {sizes[1]}")
    if -1 in sizes and wanted is None:
        raise ValueError("the server takes images of any size: expected --image_size, as in training")
    source = "the server says so" if -1 not in sizes else "as given"
    height, width = (wanted if size == -1 else size for size in sizes)
    shape = _Tensor(X, "FP32", (-1, height or 0, width or 0, channels)).fixed()
    return shape, f"image size: {height} x {width} ({source})"


def _check_answer(eps: _Tensor, x: _Tensor) -> None:
    fits = len(eps.shape) == len(x.shape) and all(-1 in pair or pair[0] == pair[1] for pair in zip(eps.shape, x.shape))
    if not fits:
        raise ValueError(f"expected {EPS} in the shape of {X}, the server says {list(eps.shape)} and {list(x.shape)}")


def _schedule(said: JsonObject, stated: Stated) -> tuple[NoiseSchedule, str]:
    given = parse_schedule(stated.schedule)
    declared = None if said.get("schedule") is None else _declared_schedule(said["schedule"])
    if declared is None:
        if given is None:
            raise ValueError("the server does not say its noise schedule: expected --schedule, as in training")
        return given.build(), f"noise schedule: {stated.schedule} (as given)"
    if given is not None and not _alike(given.build(), declared):
        raise ValueError(f"--schedule={stated.schedule} contradicts the server, which says another noise schedule")
    return declared, f"noise schedule: {declared.num_steps} steps (the server says so)"


def _declared_schedule(value: object) -> NoiseSchedule:
    """A schedule as servers say it: "linear:1000:0.0001:0.02", a list of betas, or its tables; or that as JSON text."""
    if isinstance(value, str) and value[:1] in "[{":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("expected the server's noise schedule to be JSON or a name, it is neither") from None
    if isinstance(value, str):
        if value.endswith(".json"):  # would be a file of ours
            raise ValueError(f"expected the server to say its noise schedule, got {printable(value)}")
        spec = parse_schedule(printable(value))
        assert spec is not None
        return spec.build()
    if isinstance(value, list):
        return schedule_from_betas(_table(value, "betas"))
    if isinstance(value, dict) and value.keys() >= set(_TABLES):
        return _checked_tables(NoiseSchedule(*(_table(value[name], name) for name in _TABLES)))
    raise ValueError("expected the server's noise schedule to be a name, a list of betas or tables")


def _table(value: object, name: str) -> np.ndarray:
    numbers = isinstance(value, list) and all(type(one) in (int, float) and math.isfinite(one) for one in value)
    if not isinstance(value, list) or not numbers or not 0 < len(value) <= 100_000:
        raise ValueError(f"expected the server's {name} to be a list of numbers")
    return np.asarray(value, np.float64 if name == "betas" else np.float32)


def _checked_tables(schedule: NoiseSchedule) -> NoiseSchedule:
    abar, root, sigma = (np.asarray(table, np.float64) for table in (
        schedule.abar_table, schedule.sqrt_abar_table, schedule.sigma_table))  # fmt: skip
    right = len(abar) == len(root) == len(sigma) and np.all(np.diff(abar) <= 0) and np.all((abar >= 0) & (abar <= 1))
    if not right or max(np.max(np.abs(root**2 - abar)), np.max(np.abs(sigma**2 + abar - 1))) > 1e-5:
        raise ValueError("the server's noise schedule is none: expected falling ᾱ in [0, 1], √ᾱ and σ = √(1 - ᾱ)")
    return schedule


def _alike(one: NoiseSchedule, two: NoiseSchedule) -> bool:
    a, b = np.asarray(one.abar_table), np.asarray(two.abar_table)
    return a.shape == b.shape and bool(np.max(np.abs(a - b)) < 1e-5)


def _prediction(said: JsonObject, stated: Stated) -> tuple[str, str]:
    declared = said.get("prediction")
    for value, whose in ((declared, "the server's prediction"), (stated.prediction, "--prediction")):
        if value not in (None, *PREDICTIONS):
            raise ValueError(f"expected {whose} to be one of {', '.join(PREDICTIONS)}, got {printable(str(value))}")
    agreed = _agreed("prediction", declared, stated.prediction, str)
    if agreed is None:
        raise ValueError(
            "the server does not say what it predicts: expected --prediction epsilon, sample or v_prediction"
        )
    return agreed, f"prediction: {agreed} ({'the server says so' if declared else 'as given'})"


def _classes(label: _Tensor | None, said: JsonObject, stated: Stated) -> tuple[int | None, list[str]]:
    if label is None:
        if stated.num_classes is not None:
            raise ValueError(f"--num_classes={stated.num_classes} contradicts the server, which takes no {LABEL}")
        return None, []
    agreed = _agreed("num_classes", _integer(said, "num_classes"), stated.num_classes, int)
    if agreed is None:
        raise ValueError("the server takes labels and does not say how many classes there are: expected --num-classes")
    return agreed, [f"classes: {agreed} ({'as given' if said.get('num_classes') is None else 'the server says so'})"]


def _check_range(said: JsonObject) -> None:
    declared = said.get("range")
    if declared is None:
        return
    try:
        value = json.loads(declared) if isinstance(declared, str) else declared
        right = tuple(map(float, value)) == _RANGE
    except (ValueError, TypeError, RecursionError):
        right = False
    if not right:
        raise ValueError(f"expected a model of images in [-1, 1], the server says {printable(str(declared))}")


def _integer(said: Mapping[str, object], name: str) -> int | None:
    value = said.get(name)
    if value is None:
        return None
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if not 0 <= number <= 1 << 31:
        raise ValueError(f"expected the server's {name} to be a number, got {printable(str(value))}")
    return number


def _agreed(name: str, declared: T | None, given: T | None, kind: Callable[..., T]) -> T | None:
    """What both say, or the one who speaks."""
    if declared is not None and given is not None and kind(declared) != given:
        raise ValueError(f"--{name}={given} contradicts the server, which says {printable(str(declared))}")
    return given if declared is None else kind(declared)


def _whose(fingerprint: str) -> str:
    return (
        f"fingerprint: {fingerprint[:16]} (the server says so)" if fingerprint else "fingerprint: the server has none"
    )
