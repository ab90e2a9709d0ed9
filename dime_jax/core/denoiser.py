"""Denoiser: the one contract through which every attack sees a model, eps(x, t, condition) -> predicted noise.

Three kinds of model keep it: converted networks, the closed-form ideal denoiser, and any Python function. A model may
have a space of its own (latents), to which it encodes pixels, and may be conditioned on classes or on text.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dime_jax._util import validate
from dime_jax._util.allocator import returnable
from dime_jax._util.typing import PyTree
from dime_jax.core.draws import Draws, id_numbers
from dime_jax.core.schedule import NoiseSchedule

# Trace terms are differences of two network outputs. Accelerators round matmuls and convolutions to fewer bits unless
# told otherwise, and in bfloat16 the rank correlation of the trace at gamma = 0.1 falls to 0.82.
PRECISION = "highest"

OWN = "own"  # the name of an image's own condition
EMPTY = "empty"  # of text-conditioned models: the empty caption
PARTS = ("part_1", "part_2", "part_3")  # and the image's own, cut in three
TEXT_CONDITIONS = (OWN, *PARTS, EMPTY)
BESIDE = "beside a reference"  # offered by a run that has a second model, not by a model

# (x, t) -> eps
EpsFn = Callable[[jax.Array, ArrayLike], jax.Array]
# (params, x, t, condition) -> eps
ApplyFn = Callable[[PyTree, jax.Array, jax.Array, PyTree], jax.Array]
# (params, pixels, draws) -> x
EncodeFn = Callable[[PyTree, jax.Array, Draws], jax.Array]
# (params, x, draws) -> bool, of x's shape
MaskFn = Callable[[PyTree, jax.Array, Draws], jax.Array]
# (params, captions) -> condition
EmbedFn = Callable[[PyTree, Sequence[str]], PyTree]


class QueryCounter:
    """Counts queries: one evaluation of one image is one query."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()  # several requests may be under way

    def add(self, images: int) -> None:
        """Count one evaluation of `images` images."""
        with self._lock:
            self.count += images


class Requests(NamedTuple):
    """How a hosted model takes its queries: the most images in a request, and the most requests in flight."""

    images: int
    in_flight: int


class Denoiser:
    """A noise-prediction model: `apply(params, x, t, condition)` and what is needed to call it safely.

    A condition is None for unconditional models, integer labels [B] for class-conditional ones, and else a pytree of
    arrays with a leading batch axis, such as embedded captions.

    Attributes:
      apply: pure function of (params, x, t, condition) that returns the eps prediction of x's shape. `t` is an int32
        scalar or [B] array.
      params: pytree of arrays, passed to `apply`, `encode` and `embed` as an argument so that nothing retraces. Where
        `reload` is given, which returns the same arrays again, they are freed by `release` and come back when needed.
      schedule: the noise schedule the model was trained with.
      image_shape: shape of one image in pixels, (H, W, C) or any other.
      shape: shape of one x in the model's own space; `image_shape` for models that do not encode.
      num_classes: number of classes of a class-conditional model, else None.
      condition_shape: one image's condition as a pytree of `jax.ShapeDtypeStruct`; None for unconditional models.
      conditions: the names of the conditions that a model can be asked under; "own" is the image's own.
      encode_fn: pure JAX function of (params, pixels, draws) that returns x; None for models of pixels. An encoder that
        samples takes its noise from `draws.latent`. What it does must be part of the fingerprint.
      mask_fn: pure JAX function of (params, x, draws) that says which coordinates of each x count in the norms of the
        attacks (the mask of `attacks.calls.Call.reduce`); None if all do. It too must be part of the fingerprint.
      fingerprint: identifies the weights and architecture in score tables.
      name: for people.
      traceable: whether `apply` may be jitted; False for plain Python functions.
      requests: of a hosted model: how it takes its queries; None for models that take any batch.
      queries: exact count of the queries asked through `eps` and `eps_fn`.
    """

    def __init__(
        self,
        apply: ApplyFn,
        params: PyTree,
        schedule: NoiseSchedule,
        image_shape: tuple[int, ...],
        *,
        shape: tuple[int, ...] | None = None,
        num_classes: int | None = None,
        condition_shape: PyTree = None,
        conditions: tuple[str, ...] = (OWN,),
        encode: EncodeFn | None = None,
        mask: MaskFn | None = None,
        embed: EmbedFn | None = None,
        fingerprint: str = "",
        name: str = "denoiser",
        traceable: bool = True,
        requests: Requests | None = None,
        reload: Callable[[], PyTree] | None = None,
    ):
        self.apply, self._params, self.schedule, self.name = apply, params, schedule, name
        self.image_shape = tuple(image_shape)
        self.shape = self.image_shape if shape is None else tuple(shape)
        if encode is None and self.shape != self.image_shape:
            raise ValueError(f"{name} needs encode: its images are {self.image_shape}, its x is {self.shape}")
        self.num_classes = num_classes
        self.condition_shape = condition_shape if num_classes is None else jax.ShapeDtypeStruct((), jnp.int32)
        self.conditions = tuple(conditions)
        self.encode_fn, self.mask_fn, self._embed = encode, mask, embed
        self.fingerprint = fingerprint or _fingerprint_of_name(name)
        self.traceable, self.requests, self.queries, self._reload = traceable, requests, QueryCounter(), reload
        self._call = jax.jit(apply) if traceable else apply

    @property
    def params(self) -> PyTree:
        """The weights, read again if they were released; hold them no longer than they are needed."""
        if self._params is None and self._reload is not None:
            with returnable():
                self._params = self._reload()
        return self._params

    def release(self) -> None:
        """Free the memory of the weights, if they can be read again when they are needed."""
        if self._reload is not None:
            self._params = None

    @property
    def known_by_name_only(self) -> bool:
        """Whether the fingerprint says nothing about what the model computes."""
        return self.fingerprint == _fingerprint_of_name(self.name)

    @property
    def takes_text(self) -> bool:
        """Whether the model is asked with the captions of the images, which are then part of the data."""
        return False

    @classmethod
    def from_function(
        cls,
        fn: Callable[..., ArrayLike],
        schedule: NoiseSchedule,
        image_shape: tuple[int, ...],
        num_classes: int | None = None,
        name: str = "mine",
        traceable: bool = False,
    ) -> "Denoiser":
        """Wrap any callable.

        Args:
          fn: eps(x, t), or eps(x, t, label) for class-conditional models.
          schedule: the noise schedule that it was trained with.
          image_shape: of one image.
          num_classes: of a class-conditional model.
          name: by which it is known.
          traceable: whether it is pure JAX and may be jitted.
        """

        def apply(params: PyTree, x: jax.Array, t: jax.Array, condition: PyTree) -> Any:
            del params
            return fn(x, t) if num_classes is None else fn(x, t, condition)

        return cls(apply, (), schedule, image_shape, num_classes=num_classes, name=name, traceable=traceable)

    def eps(self, x: ArrayLike, t: ArrayLike, condition: PyTree = None, **unknown: Never) -> jax.Array:
        """Predict the noise in the batch x [B, *shape] at t (scalar or [B]); float32, counted as B queries."""
        _refuse_keywords("eps", unknown)
        return self.ask_once(x, t, condition)

    def ask_once(self, x: ArrayLike, t: ArrayLike, condition: PyTree = None) -> jax.Array:
        """Do what `eps` does, but try only once where a hosted model's `eps` would retry; the attempt is counted.

        For callers that keep a ledger: nothing is asked beyond what they enter before the call.
        """
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"x must be of a floating type, got {x.dtype}: scale pixels to [-1, 1] first")
        x = at_least_float32(x)
        validate.check_shape(x, (None, *self.shape), "x")
        validate.check_timestep(t, self.schedule.num_steps)
        if np.ndim(t):
            validate.check_shape(t, (x.shape[0],), "t")
        condition = self.check_condition(condition, x.shape[0])
        self.queries.add(x.shape[0])
        with jax.default_matmul_precision(PRECISION):
            answer = self._call(self.params, x, jnp.asarray(t, jnp.int32), condition)
        return self._check_answer(answer, x.shape).astype(x.dtype)

    def wait_turn(self, images: int, stop: threading.Event) -> None:
        """Wait until `images` images may be asked about, or until `stop` is set; for hosted models only.

        Callers of `ask_once` call it first, before they enter the queries anywhere.
        """

    def eps_fn(self, condition: PyTree = None, **unknown: Never) -> EpsFn:
        """Return the function eps_fn(x, t) that attacks take, with the conditions of the batch bound to it."""
        _refuse_keywords("eps_fn", unknown)
        return lambda x, t: self.eps(x, t, condition)

    def encode(self, pixels: ArrayLike, *, ids: Sequence[str | int] | None = None, seed: int = 0) -> jax.Array:
        """Map images [B, *image_shape] into the model's own space [B, *shape]; no query, the identity for pixel models.

        Args:
          pixels: on the [-1, 1] scale.
          ids: of the images, for encoders that sample; their positions if None.
          seed: of that sample.
        """
        pixels = jnp.asarray(pixels)
        validate.check_shape(pixels, (None, *self.image_shape), "pixels")
        if self.encode_fn is None:
            return pixels
        numbers = id_numbers(range(len(pixels)) if ids is None else ids)
        with jax.default_matmul_precision(PRECISION):
            x = encoder(self.encode_fn)(self.params, pixels, jax.random.key(seed), numbers)
        validate.check_shape(x, (len(pixels), *self.shape), f"the latents of {self.name}")
        return x

    def mask(self, x: ArrayLike, *, ids: Sequence[str | int] | None = None, seed: int = 0) -> jax.Array | None:
        """Return which coordinates of each x count in the norms of the attacks, bool [B, *shape]; None if all do.

        Args:
          x: [B, *shape], as `encode` gives them.
          ids: of the images, on which the estimate's random signs depend; their positions if None.
          seed: of these signs.
        """
        if self.mask_fn is None:
            return None
        x = jnp.asarray(x)
        validate.check_shape(x, (None, *self.shape), "x")
        numbers = id_numbers(range(len(x)) if ids is None else ids)
        with jax.default_matmul_precision(PRECISION):
            return masker(self.mask_fn)(self.params, x, jax.random.key(seed), numbers)

    def embed(self, captions: Sequence[str]) -> PyTree:
        """Return the condition of text-conditioned models, a pytree of arrays [B, ...], from B captions; no query."""
        if self._embed is None:
            raise ValueError(f"{self.name} takes no text, so it cannot embed captions")
        return self._embed(self.params, captions)

    def conditions_for(self, labels: np.ndarray | None, captions: Sequence[str] | None) -> Mapping[str, PyTree]:
        """Return what the model is told about some images, under each of `conditions`.

        Here: the class labels, for class-conditional models. Models that know other conditions replace this method.

        Args:
          labels: of the images, int [B]; None if they have none.
          captions: of the images; None if they have none.
        """
        del captions
        return {OWN: None if self.num_classes is None else labels}

    def check_condition(self, condition: PyTree, batch: int) -> PyTree:
        """Return the condition of `batch` images as arrays; a single label stands for all of them.

        Raises:
          ValueError: in one line, if it is not of the kind that the model takes.
        """
        if self.condition_shape is None:
            if condition is not None:
                raise ValueError(f"{self.name} is unconditional: condition must be None")
            return None
        if self.num_classes is not None:
            return _check_labels(condition, batch, self.num_classes, self.name)
        given, wanted = jax.tree.structure(condition), jax.tree.structure(self.condition_shape)
        if given != wanted:  # type: ignore[operator]
            raise ValueError(f"{self.name} is conditional: condition must have the structure {wanted}, got {given}")

        def check(path: tuple[object, ...], one: jax.ShapeDtypeStruct, leaf: ArrayLike) -> jax.Array:
            validate.check_shape(leaf, (batch, *one.shape), f"condition{jax.tree_util.keystr(path)}")
            return jnp.asarray(leaf, one.dtype)

        return jax.tree_util.tree_map_with_path(check, self.condition_shape, condition)

    def _check_answer(self, answer: object, shape: tuple[int, ...]) -> jax.Array:
        try:
            eps = None if answer is None or isinstance(answer, dict | tuple) else jnp.asarray(answer)
        except TypeError:  # an object around the array, such as diffusers' outputs
            eps = None
        if eps is None or eps.shape != shape:
            got = list(eps.shape) if eps is not None else None if answer is None else type(answer).__name__
            raise ValueError(f"eps must return an array of shape {list(shape)}, got {got} from {self.name}")
        return eps


@functools.lru_cache(maxsize=32)
def encoder(encode: EncodeFn, sharding: jax.sharding.NamedSharding | None = None) -> Callable[..., jax.Array]:
    """Compile (params, pixels, key of the run, numbers of the ids) -> x."""

    def run(params: PyTree, pixels: jax.Array, key: jax.Array, ids: jax.Array) -> jax.Array:
        return encode(params, pixels, Draws(key, ids)).astype(jnp.float32)

    return jax.jit(run, out_shardings=sharding)


@functools.lru_cache(maxsize=32)
def masker(mask: MaskFn, sharding: jax.sharding.NamedSharding | None = None) -> Callable[..., jax.Array]:
    """Compile (params, x, key of the run, numbers of the ids) -> bool of x's shape."""

    def run(params: PyTree, x: jax.Array, key: jax.Array, ids: jax.Array) -> jax.Array:
        return mask(params, x, Draws(key, ids))

    if sharding is None:
        return jax.jit(run)
    rows, whole = sharding.spec, jax.sharding.PartitionSpec()
    inputs = (whole, rows, whole, rows)
    # It may go through the images one by one; each device does so with its own.
    return jax.jit(jax.shard_map(run, mesh=sharding.mesh, in_specs=inputs, out_specs=rows, check_vma=False))


def at_least_float32(x: jax.Array) -> jax.Array:
    """Return x in floating point, in float32 if it had fewer bits: differences between answers need them."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def _fingerprint_of_name(name: str) -> str:
    return f"function:{name}"


def _refuse_keywords(function: str, unknown: Mapping[str, object]) -> None:
    if unknown:
        raise TypeError(f"{function} takes condition=, not {next(iter(unknown))}=")


def _check_labels(labels: ArrayLike | None, batch: int, num_classes: int, name: str) -> jax.Array:
    """Require labels in 0..num_classes-1, and return them as integers [B]."""
    if labels is None:
        raise ValueError(f"{name} is class-conditional: condition must be a class in 0..{num_classes - 1} per image")
    labels = jnp.broadcast_to(jnp.asarray(labels), (batch,)) if np.ndim(labels) == 0 else jnp.asarray(labels)
    validate.check_shape(labels, (batch,), "condition")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    if validate.is_concrete(labels):
        bad = np.asarray(labels)[(np.asarray(labels) < 0) | (np.asarray(labels) >= num_classes)]
        if bad.size:
            raise ValueError(f"labels must be >= 0 and < {num_classes}, got {bad[0]}")
    return labels.astype(jnp.int32)
