"""Denoiser: the one contract through which every attack sees a model, eps(x, t) -> predicted noise.

Three kinds of model keep it: converted networks, the closed-form ideal denoiser, and any Python function.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dime_jax import _validate
from dime_jax.schedule import NoiseSchedule

# Trace terms are differences of two network outputs. Accelerators round matmuls and convolutions to fewer bits unless
# told otherwise, and in bfloat16 the rank correlation of the trace at gamma = 0.1 falls to 0.82.
PRECISION = "highest"

EpsFn = Callable[[jax.Array, Any], jax.Array]
ApplyFn = Callable[[Any, jax.Array, jax.Array, jax.Array | None], jax.Array]


class QueryCounter:
    """Counts queries: one evaluation of one image is one query."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, images: int) -> None:
        """Count one evaluation of `images` images."""
        self.count += images


class Denoiser:
    """A noise-prediction model: `apply(params, x, t, label)` and what is needed to call it safely.

    Attributes:
      apply: pure function of (params, x, t, label) that returns the eps prediction of x's shape. `t` is an int32 scalar
        or [B] array, `label` an int32 [B] array, or None for unconditional models.
      params: pytree of arrays, passed to `apply` as an argument so that nothing retraces.
      schedule: the noise schedule the model was trained with.
      image_shape: shape of one image, (H, W, C) or any other.
      num_classes: number of classes of a class-conditional model, else None.
      fingerprint: identifies the weights and architecture in score tables.
      name: for people.
      traceable: whether `apply` may be jitted; False for plain Python functions.
      queries: exact count of the queries asked through `eps` and `eps_fn`.
    """

    def __init__(
        self,
        apply: ApplyFn,
        params: Any,
        schedule: NoiseSchedule,
        image_shape: tuple[int, ...],
        *,
        num_classes: int | None = None,
        fingerprint: str = "",
        name: str = "denoiser",
        traceable: bool = True,
    ):
        self.apply = apply
        self.params = params
        self.schedule = schedule
        self.image_shape = tuple(image_shape)
        self.num_classes = num_classes
        self.fingerprint = fingerprint or f"function:{name}"
        self.name = name
        self.traceable = traceable
        self.queries = QueryCounter()
        self._call = jax.jit(apply) if traceable else apply

    @classmethod
    def from_function(
        cls,
        fn: Callable[..., Any],
        schedule: NoiseSchedule,
        image_shape: tuple[int, ...],
        num_classes: int | None = None,
        name: str = "mine",
        traceable: bool = False,
    ) -> "Denoiser":
        """Wrap any callable eps(x, t[, label]); set `traceable` if it is pure JAX and may be jitted."""

        def apply(params: Any, x: jax.Array, t: jax.Array, label: jax.Array | None) -> Any:
            del params
            return fn(x, t) if num_classes is None else fn(x, t, label)

        return cls(apply, (), schedule, image_shape, num_classes=num_classes, name=name, traceable=traceable)

    def eps(self, x: Any, t: Any, label: Any = None) -> jax.Array:
        """Predicted noise for the batch x [B, *image_shape] at t (scalar or [B]); float32, counted as B queries."""
        x = jnp.asarray(x)
        _validate.check_shape(x, (None, *self.image_shape), "x")
        _validate.check_timestep(t, self.schedule.num_steps)
        if np.ndim(t):
            _validate.check_shape(t, (x.shape[0],), "t")
        label = self._check_label(label, x.shape[0])
        self.queries.add(x.shape[0])
        with jax.default_matmul_precision(PRECISION):
            answer = self._call(self.params, x, jnp.asarray(t, jnp.int32), label)
        return self._check_answer(answer, x.shape).astype(x.dtype)

    def eps_fn(self, label: Any = None) -> EpsFn:
        """The function eps_fn(x, t) that attacks take, with the class labels of the batch bound to it."""
        return lambda x, t: self.eps(x, t, label)

    def _check_answer(self, answer: Any, shape: tuple[int, ...]) -> jax.Array:
        try:
            eps = None if answer is None or isinstance(answer, dict | tuple) else jnp.asarray(answer)
        except TypeError:  # an object around the array, such as diffusers' outputs
            eps = None
        if eps is None or eps.shape != shape:
            got = list(eps.shape) if eps is not None else None if answer is None else type(answer).__name__
            raise ValueError(f"expected eps to return an array of shape {list(shape)}, got {got} from {self.name}")
        return eps

    def _check_label(self, label: Any, batch: int) -> jax.Array | None:
        if self.num_classes is None:
            if label is not None:
                raise ValueError(f"{self.name} is unconditional: expected label=None")
            return None
        if label is None:
            raise ValueError(
                f"{self.name} is class-conditional: expected label, one of 0..{self.num_classes - 1} per image"
            )
        label = jnp.broadcast_to(jnp.asarray(label), (batch,)) if np.ndim(label) == 0 else jnp.asarray(label)
        _validate.check_shape(label, (batch,), "label")
        if not jnp.issubdtype(label.dtype, jnp.integer):
            raise ValueError(f"expected integer labels, got {label.dtype}")
        if _validate.is_concrete(label):
            bad = np.asarray(label)[(np.asarray(label) < 0) | (np.asarray(label) >= self.num_classes)]
            if bad.size:
                raise ValueError(f"expected 0 <= label < {self.num_classes}, got label={bad[0]}")
        return label.astype(jnp.int32)
