"""What a server says about its model, checked: GET /v2/models/NAME, and Triton's GET /v2/models/NAME/config.

    {"name": "mine", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 32, 32, 3]},
                                {"name": "t", "datatype": "INT32", "shape": [-1]}],
     "outputs": [{"name": "eps", "datatype": "FP32", "shape": [-1, 32, 32, 3]}],
     "parameters": {"schedule": "linear:1000:0.0001:0.02", "prediction": "epsilon", "layout": "NHWC",
                    "range": "[-1, 1]", "fingerprint": "5f0c…", "max_batch": 64}}

A class-conditional model also has the input `label` (INT32 or INT64, [-1]) and the parameter `num_classes`; a model
with any other condition has the input `condition` (FP32). Parameters may be strings, as in Triton's configuration. The
user states what the server does not declare; where both do, they must agree.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from dime_jax._util import records
from dime_jax._util.text import one_line
from dime_jax._util.typing import JsonObject
from dime_jax.core.schedule import NoiseSchedule, schedule_from_betas
from dime_jax.models.schedule_spec import parse_schedule
from dime_jax.models.spec import MAX_STEPS, PREDICTIONS
from dime_jax.remote.kserve import TensorSpec
from dime_jax.remote.options import LAYOUTS

T = TypeVar("T")

X, T_STEP, LABEL, CONDITION, EPS = "x", "t", "label", "condition", "eps"
_LARGEST_IMAGE = 1 << 26  # numbers
_FEW_CHANNELS = (1, 3, 4)
_TABLES = ("abar", "sqrt_abar", "sigma")


class UserClaims(NamedTuple):
    """What the user says about a model; None leaves it to the server."""

    schedule: str | None = None
    prediction: str | None = None
    image_size: int | None = None
    layout: str | None = None
    num_classes: int | None = None


class Contract(NamedTuple):
    """How a hosted model is asked.

    Attributes:
      shape: the shape of one x, channels last.
      layout: the order of the axes of the server's x, "NHWC" or "NCHW".
      t: the datatype of t.
      label: the datatype of labels; None for models that take none.
      columns: which of t and label the server takes as [B, 1], as Triton must, rather than as [B].
      condition: the shape of one condition; None for models that take none.
      schedule: the noise schedule.
      prediction: "epsilon", "sample" or "v_prediction".
      num_classes: the number of classes; None for models that take no labels.
      max_batch: the most images in one request; None for no bound.
      fingerprint: the server's own; empty if it declares none.
      latents: whether x is a latent rather than an image.
      facts: a line on each setting that not every server declares, with how it is known.
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


def read_contract(metadata: JsonObject, config: JsonObject, claims: UserClaims) -> Contract:
    """Return the contract that server and user describe together.

    Args:
      metadata: the server's metadata of the model.
      config: Triton's configuration of it; empty for other servers.
      claims: what the user says.

    Raises:
      ValueError: in one line, if something is missing, unsupported, or contradicts the user.
    """
    said = _parameters(metadata, config)
    inputs, eps = _read_tensors(metadata)
    x, label, condition = inputs[X], inputs.get(LABEL), inputs.get(CONDITION)
    if len(eps.shape) != len(x.shape) or not all(-1 in pair or pair[0] == pair[1] for pair in zip(eps.shape, x.shape)):
        says = one_line(f"{list(eps.shape)} and {list(x.shape)}")
        raise ValueError(f"{EPS} must have the shape of {X}, the server says {says}")
    limits = said.get("range")
    if limits is not None and [float(number) for number in re.findall(r"-?\d+\.?\d*", str(limits))] != [-1, 1]:
        raise ValueError(f"the model must take images in [-1, 1], the server says {one_line(limits)}")
    layout, layout_fact = _layout(x, said, claims)
    shape, size_fact = _shape(x, layout, claims)
    schedule, schedule_fact = _schedule(said, claims)
    declared = _choice(said.get("prediction"), "the server's prediction", PREDICTIONS)
    given = _choice(claims.prediction, "--prediction", PREDICTIONS)
    prediction, source = _settle("prediction", declared, given)
    facts = [size_fact, layout_fact, schedule_fact, f"prediction: {prediction} ({source})"]
    num_classes = None
    if label is not None:
        num_classes, source = _settle("num_classes", _integer(said, "num_classes"), claims.num_classes)
        facts.append(f"classes: {num_classes} ({source})")
    elif claims.num_classes is not None:
        raise ValueError(f"--num_classes={claims.num_classes} contradicts the server, which takes no {LABEL}")
    fingerprint = one_line(said.get("fingerprint") or "")
    facts.append(f"fingerprint: {f'{fingerprint[:16]} (the server says so)' if fingerprint else 'the server has none'}")
    return Contract(
        shape=shape,
        layout=layout,
        t=inputs[T_STEP].datatype,
        label=None if label is None else label.datatype,
        columns=frozenset(name for name in (T_STEP, LABEL) if name in inputs and len(inputs[name].shape) == 2),
        condition=None if condition is None else _row_shape(CONDITION, condition.shape),
        schedule=schedule,
        prediction=prediction,
        num_classes=num_classes,
        max_batch=_integer(said, "max_batch") or _integer(config, "max_batch_size") or None,
        fingerprint=fingerprint,
        latents=said.get("space") == "latents",
        facts=tuple(facts),
    )


def schedule_tables(schedule: NoiseSchedule) -> dict[str, list[float]]:
    """Return a schedule as `serve` declares it: its tables, which the client reads back to the bit."""
    tables = (schedule.abar_table, schedule.sqrt_abar_table, schedule.sigma_table)
    return {name: np.asarray(table).tolist() for name, table in zip(_TABLES, tables)}


def _check(tensor: TensorSpec) -> None:
    """Require integers [-1] for t and labels, and FP32 [-1, ...] otherwise."""
    integers = tensor.name in (T_STEP, LABEL)
    datatypes = ("INT32", "INT64") if integers else ("FP32",)
    if tensor.datatype not in datatypes:
        says = one_line(tensor.datatype)
        raise ValueError(f"{tensor.name} must be {' or '.join(datatypes)}, the server says {says}")
    if tensor.shape[:1] != (-1,) or (integers and tensor.shape not in ((-1,), (-1, 1))):
        wanted, says = "[-1]" if integers else "[-1, ...]", one_line(list(tensor.shape))
        raise ValueError(f"{tensor.name} must have the shape {wanted}, the server says {says}")


def _row_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one row of a batch, which must be fixed."""
    if len(shape) > 8 or any(size < 1 for size in shape[1:]) or math.prod(shape[1:]) > _LARGEST_IMAGE:
        raise ValueError(f"{name} must have a fixed shape, the server says {one_line(list(shape))}")
    return shape[1:]


def _read_tensors(metadata: JsonObject) -> tuple[dict[str, TensorSpec], TensorSpec]:
    """Return the inputs by name, and the output eps."""
    inputs, outputs = (
        {one.name: one for one in records.parse(list[TensorSpec], metadata.get(kind) or [], f"the server's {kind}")}
        for kind in ("inputs", "outputs")
    )
    missing = [name for name, kind in ((X, inputs), (T_STEP, inputs), (EPS, outputs)) if name not in kind]
    if missing:
        raise ValueError(
            f"the server must declare inputs {X} [-1, H, W, C] and {T_STEP} [-1] and the output {EPS}; "
            f"it declares {one_line(', '.join([*inputs, *outputs])) or 'none'}, but not {missing[0]}"
        )
    for name, tensor in inputs.items():
        if name not in (X, T_STEP, LABEL, CONDITION):
            raise ValueError(f"inputs must be {X}, {T_STEP}, {LABEL} or {CONDITION}, the server has {one_line(name)}")
        _check(tensor)
    if {LABEL, CONDITION} <= inputs.keys():
        raise ValueError(f"inputs must include at most one of {LABEL} and {CONDITION}, the server has both")
    _check(outputs[EPS])
    return inputs, outputs[EPS]


def _parameters(metadata: JsonObject, config: JsonObject) -> JsonObject:
    """Return the parameters of the metadata and of Triton's configuration, where each is {"string_value": TEXT}."""
    said: JsonObject = {}
    for place in (config, metadata):
        values = place.get("parameters")
        for name, value in values.items() if isinstance(values, dict) else ():
            said[name] = value.get("string_value", value) if isinstance(value, dict) else value
    return said


def _settle(name: str, declared: T | None, given: T | None) -> tuple[T, str]:
    """Return what the server declares or else the user gives, and which of the two it was. They must agree."""
    if declared is not None and given is not None and declared != given:
        raise ValueError(f"--{name}={given} contradicts the server, which says {declared}")
    if declared is not None:
        return declared, "the server says so"
    if given is not None:
        return given, "as given"
    what = {"schedule": "noise schedule", "num_classes": "number of classes"}.get(name, name)
    raise ValueError(f"the server does not say its {what}: add --{name}")


def _choice(value: str | None, name: str, choices: Sequence[str]) -> str | None:
    if value not in (None, *choices):
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {one_line(value)}")
    return value


def _integer(said: JsonObject, name: str) -> int | None:
    value = said.get(name)
    if value is not None and not re.fullmatch(r"\d{1,9}", str(value)):
        raise ValueError(f"the server's {name} must be a number, got {one_line(value)}")
    return None if value is None else int(str(value))


def _layout(x: TensorSpec, said: JsonObject, claims: UserClaims) -> tuple[str, str]:
    declared = _choice(said.get("layout"), "the server's layout", LAYOUTS)
    if len(x.shape) != 4:
        return "NHWC", "layout: as it is, because x has no height and width"
    first, last = x.shape[1] in _FEW_CHANNELS, x.shape[3] in _FEW_CHANNELS
    if declared is None and claims.layout is None and first != last:
        layout = "NCHW" if first else "NHWC"
        return layout, f"layout: {layout}, inferred from the shape {list(x.shape)}"
    layout, source = _settle("layout", declared, claims.layout)
    return layout, f"layout: {layout} ({source})"


def _shape(x: TensorSpec, layout: str, claims: UserClaims) -> tuple[tuple[int, ...], str]:
    row, given = x.shape[1:], claims.image_size
    if len(row) != 3:
        return _row_shape(X, x.shape), f"shape of x: {list(row)}"
    channels, *sides = row if layout == "NCHW" else (row[2], *row[:2])
    if given is not None and any(side not in (-1, given) for side in sides):
        raise ValueError(f"--image_size={given} contradicts the server, which says {sides[0]} x {sides[1]}")
    if -1 in sides and given is None:
        raise ValueError("the server takes images of any size: add --image_size")
    height, width = (given or 0 if side == -1 else side for side in sides)
    shape = _row_shape(X, (-1, height, width, channels))
    return shape, f"image size: {height} x {width} ({'as given' if -1 in sides else 'the server says so'})"


def _schedule(said: JsonObject, claims: UserClaims) -> tuple[NoiseSchedule, str]:
    spec = parse_schedule(claims.schedule)
    given = None if spec is None else spec.build()
    if said.get("schedule") is None:
        schedule, _ = _settle("schedule", None, given)
        return schedule, f"noise schedule: {claims.schedule} (as given)"
    declared = _declared_schedule(said["schedule"])
    if given is not None:
        ours, theirs = np.asarray(given.abar_table), np.asarray(declared.abar_table)
        if ours.shape != theirs.shape or np.max(np.abs(ours - theirs)) >= 1e-5:
            raise ValueError(f"--schedule={claims.schedule} contradicts the server, which says another noise schedule")
    return declared, f"noise schedule: {declared.num_steps} steps (the server says so)"


def _declared_schedule(value: object) -> NoiseSchedule:
    """Parse what a server declares: "linear:1000:0.0001:0.02", a list of betas, or tables; or these as JSON text."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("the server's noise schedule must be a name or JSON, got neither") from None
    if isinstance(value, list):
        return schedule_from_betas(_numbers(value, "betas").astype(np.float64))
    if isinstance(value, dict) and value.keys() >= set(_TABLES):
        return _checked_tables(*(_numbers(value[name], name).astype(np.float32) for name in _TABLES))
    spec = None
    if isinstance(value, str) and not value.endswith(".json"):  # that would be a file of ours
        spec = parse_schedule(one_line(value))
    if spec is None:
        got = one_line(value)
        raise ValueError(f"the server's noise schedule must be a name, a list of betas or tables, got {got}")
    return spec.build()


def _numbers(value: object, name: str) -> np.ndarray:
    try:
        numbers = np.asarray(value)
    except ValueError:  # lists of unequal lengths
        numbers = np.zeros(0)
    if numbers.dtype.kind not in "iuf" or numbers.ndim != 1 or not 0 < numbers.size <= MAX_STEPS:
        raise ValueError(f"the server's {name} must be a list of numbers")
    return numbers


def _checked_tables(abar: np.ndarray, root: np.ndarray, sigma: np.ndarray) -> NoiseSchedule:
    """Require non-increasing ᾱ in [0, 1], and √ᾱ and σ = √(1 - ᾱ) of the same length; NaN fails every comparison."""
    valid = len(abar) == len(root) == len(sigma) and np.all(np.diff(abar) <= 0) and np.all((abar >= 0) & (abar <= 1))
    with np.errstate(over="ignore"):
        if not valid or not np.all((np.abs(root**2 - abar) <= 1e-5) & (np.abs(sigma**2 + abar - 1) <= 1e-5)):
            raise ValueError(
                "the server's noise schedule is invalid: ᾱ must be non-increasing in [0, 1], with √ᾱ and σ = √(1 - ᾱ)"
            )
    return NoiseSchedule(abar, root, sigma)
