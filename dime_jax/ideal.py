"""The optimal denoiser of a finite training set, in closed form (paper, Lemma "Idealized Denoiser").

For training points x_1 … x_n and a query g at noise level (ᾱ, σ), write Y = √ᾱ x_I with I ~ r(g) and
r_i(g) ∝ exp(-‖g - √ᾱ x_i‖² / 2σ²). Then, exactly,

    ε*(g) = (g - E[Y]) / σ                    the optimal noise prediction,
    M = E‖Y - g‖² = σ²‖ε*(g)‖² + V            estimation error = bias + crowding,
    V = E‖Y - E[Y]‖²,   tr ∇ε*(g) = d/σ - V/σ³.

So everything follows from the mean and the spread of one weighted point cloud, which is streamed in blocks: each block
gives a partial `Mixture`, and partial mixtures merge by log-sum-exp and the parallel variance formula.

Numerics. At t = 0, 2σ² is 2e-4: logits need squared distances to 1e-7, while the usual ‖g‖² - 2g·x + ‖x‖² in float32
is off by 1e-4 at d = 3072. Two measures keep float32 right at every t:

* distances are expanded around the landmark c nearest to the query (a few points spread over the training set), with
  ‖x_i - c‖² tabled in advance: rounding then scales with the size of the cluster around the query, not of the images;
* in each block the few points nearest to the query are evaluated directly, difference by difference.
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from dime_jax import _validate
from dime_jax._distributed import replicated, split_rows
from dime_jax._typing import PyTree
from dime_jax.denoiser import PRECISION, ApplyFn, Denoiser
from dime_jax.schedule import NoiseSchedule, per_image

MAX_BLOCK = 4096  # training points streamed at a time
QUERY_CHUNK = 256  # queries evaluated at a time: memory is O(QUERY_CHUNK * (MAX_BLOCK + d)) for any n and any batch
MAX_LANDMARKS = 64
NEAREST = 4  # points per block that are evaluated directly
FAR_AWAY = 1e12  # coordinates of padding points: their weight underflows to 0

T = TypeVar("T")


class ErrorDecomposition(NamedTuple):
    """M = σ²B² + V per image [B]: `error` = `bias` + `crowding` (paper, Eq. M_decomposition)."""

    error: jax.Array
    bias: jax.Array
    crowding: jax.Array


class Points(NamedTuple, Generic[T]):
    """The training set in blocks, each point as its landmark (one of c_1 … c_K) plus a residual; or where it lies."""

    residual: T  # [blocks, size, d]: x_i - c_k(i)
    landmark_of: T  # [blocks, size]: k(i), the landmark nearest to x_i
    sq_dist: T  # [blocks, K, size]: ‖x_i - c_k‖²
    landmarks: T  # [K, d]


class Mixture(NamedTuple):
    """A weighted cloud of points Y_i seen from the query g, per query.

    The mass is Σ exp(-‖Y_i - g‖²/2σ²) = exp(log_mass - origin/2σ²): squared distances are kept as what exceeds a round
    number, since at low noise their differences matter below float32's resolution of the distances themselves.
    """

    origin: jax.Array  # [B]
    log_mass: jax.Array  # [B]
    shift: jax.Array  # E[Y] - g [B, d]
    spread: jax.Array  # E‖Y - E[Y]‖² [B]


class _Query(NamedTuple):
    """Queries and what they share over all blocks. U = g - √ᾱ c is the query seen from its nearest landmark c."""

    g: jax.Array  # [B, d]
    scale: jax.Array  # √ᾱ [B, 1]
    inv_two_var: jax.Array  # 1 / 2σ² [B]
    landmark: jax.Array  # index of c [B]
    offset: jax.Array  # U [B, d]
    offset_origin: jax.Array  # ‖U‖² = offset_origin + offset_excess [B]
    offset_excess: jax.Array
    along: jax.Array  # U·(c_k - c) [B, K]


def merge(a: Mixture, b: Mixture, inv_two_var: jax.Array) -> Mixture:
    """The union of two clouds; where one outweighs the other it is returned as it is (nothing is subtracted)."""
    lead = b.log_mass - a.log_mass + (a.origin - b.origin) * inv_two_var  # log mass_b - log mass_a
    p_a, p_b = jax.nn.sigmoid(-lead), jax.nn.sigmoid(lead)
    gap = jnp.sum((a.shift - b.shift) ** 2, axis=-1)
    return Mixture(
        origin=jnp.where(lead > 0, b.origin, a.origin),
        log_mass=jnp.where(lead > 0, b.log_mass, a.log_mass) + jax.nn.softplus(-jnp.abs(lead)),
        shift=p_a[:, None] * a.shift + p_b[:, None] * b.shift,
        spread=p_a * a.spread + p_b * b.spread + p_a * p_b * gap,
    )


def _round_mean_square(v: jax.Array) -> jax.Array:
    """About the mean of v² over the last axis, to 8 bits: d times it is exact in float32."""
    # Not a cast to bfloat16 and back, which XLA may leave out.
    return jax.lax.reduce_precision(jax.lax.stop_gradient(jnp.mean(v**2, axis=-1)), exponent_bits=8, mantissa_bits=7)


def _excess_square(v: jax.Array, mean_square: jax.Array) -> jax.Array:
    """‖v‖² - d·mean_square, summed in groups so that rounding does not pile up over d."""
    excess = v**2 - mean_square[..., None]
    pad = -v.shape[-1] % 64
    excess = jnp.pad(excess, ((0, 0),) * (v.ndim - 1) + ((0, pad),))
    return jnp.sum(jnp.sum(excess.reshape(*v.shape[:-1], 64, -1), axis=-1), axis=-1)


def choose_landmarks(points: np.ndarray, most: int = MAX_LANDMARKS, sample: int = 2048) -> np.ndarray:
    """Points that cover the set: farthest-first over an even subsample, as long as float32 tells points apart."""
    subset = points[np.linspace(0, len(points) - 1, min(sample, len(points))).astype(int)]
    norms = np.einsum("nd,nd->n", subset, subset)
    chosen = [0]
    dist = np.full(len(subset), np.inf)
    while True:
        last = chosen[-1]
        dist = np.minimum(dist, norms - 2 * (subset @ subset[last]) + norms[last])
        farthest = int(np.argmax(dist))
        if len(chosen) == min(most, len(subset)) or dist[farthest] <= 1e-5 * norms.max():
            return subset[chosen]
        chosen.append(farthest)


def index_points(train: np.ndarray, num_devices: int = 1) -> Points[np.ndarray]:
    """Cut [n, d] points into even blocks, a multiple of `num_devices`, and table their distances to the landmarks."""
    n, d = train.shape
    if n < num_devices:
        raise ValueError(f"expected at least one training point per device, got {n} points for {num_devices} devices")
    blocks = num_devices * max(1, -(-n // (MAX_BLOCK * num_devices)))
    size = -(-n // blocks)
    landmarks = choose_landmarks(train)
    center_sq = np.einsum("kd,kd->k", landmarks, landmarks)
    between = np.stack([np.sum((landmarks - center) ** 2, axis=1) for center in landmarks])
    residuals = np.full((blocks, size, d), FAR_AWAY, train.dtype)
    landmark_of = np.zeros((blocks, size), np.int32)
    sq_dist = np.full((blocks, len(landmarks), size), d * FAR_AWAY**2, train.dtype)
    for b, x in enumerate(np.array_split(train, blocks)):
        nearest = np.argmin(center_sq - 2 * (x @ landmarks.T), axis=1)
        residual = np.subtract(x, landmarks[nearest], out=residuals[b, : len(x)])
        inner = residual @ landmarks.T  # r_i·c_k
        own = np.take_along_axis(inner, nearest[:, None], axis=1)
        dist = np.einsum("nd,nd->n", residual, residual)[:, None] + 2 * (own - inner) + between[nearest]
        landmark_of[b, : len(x)] = nearest
        sq_dist[b, :, : len(x)] = np.maximum(dist.T, 0)
    return Points(residuals, landmark_of, sq_dist, landmarks)


def _without_padding(columns: jax.Array, n: int, blocks: int) -> jax.Array:
    """Drop the padding from [B, blocks * size] columns: blocks are cut as `np.array_split` cuts n rows."""
    size = columns.shape[1] // blocks
    lengths = [len(rows) for rows in np.array_split(np.arange(n), blocks)]
    return columns[:, np.concatenate([np.arange(length) + b * size for b, length in enumerate(lengths)])]


def _prepare(points: Points[jax.Array], schedule: NoiseSchedule, g: jax.Array, t: jax.Array) -> _Query:
    scale = jnp.broadcast_to(schedule.sqrt_abar(t).astype(g.dtype), g.shape[:1])[:, None]
    sigma = jnp.broadcast_to(schedule.sigma(t).astype(g.dtype), g.shape[:1])
    centers = points.landmarks
    landmark = jnp.argmin(scale * jnp.sum(centers**2, axis=-1)[None] - 2 * g @ centers.T, axis=1)
    offset = g - scale * centers[landmark]
    along = offset @ centers.T - jnp.sum(offset * centers[landmark], axis=1, keepdims=True)
    along = jnp.where(jax.nn.one_hot(landmark, len(centers), dtype=bool), 0, along)  # exactly 0 at c itself
    mean_square = _round_mean_square(offset)
    origin = g.shape[1] * mean_square
    return _Query(g, scale, 0.5 / sigma**2, landmark, offset, origin, _excess_square(offset, mean_square), along)


def _block_logits(points: Points[jax.Array], query: _Query) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For one block: (offset_origin - ‖g - √ᾱ x_i‖²)/2σ² [B, size], k(i) as one-hot rows, and ‖x_i - c‖²."""
    which = jax.nn.one_hot(points.landmark_of, len(points.landmarks), dtype=query.g.dtype)
    inner = query.offset @ points.residual.T + query.along @ which.T  # U·(x_i - c)
    from_c = points.sq_dist[query.landmark]
    excess = query.scale * (query.scale * from_c - 2 * inner) + query.offset_excess[:, None]
    return -excess * query.inv_two_var[:, None], which, from_c


class _Nearest(NamedTuple):
    """The leading points of a block, evaluated directly."""

    rows: jax.Array  # [B, k]
    shift: jax.Array  # √ᾱ x_i - g [B, k, d]
    logits: jax.Array  # (origin - ‖√ᾱ x_i - g‖²)/2σ² [B, k]
    origin: jax.Array  # [B]


def _nearest(points: Points[jax.Array], query: _Query, logits: jax.Array) -> _Nearest:
    _, index = jax.lax.top_k(logits, min(NEAREST, logits.shape[1]))
    x = points.landmarks[points.landmark_of[index]] + points.residual[index]
    shift = query.scale[..., None] * x - query.g[:, None]
    mean_square = _round_mean_square(shift[:, 0])
    excess = _excess_square(shift, jnp.broadcast_to(mean_square[:, None], index.shape))
    return _Nearest(index, shift, -excess * query.inv_two_var[:, None], shift.shape[-1] * mean_square)


def _block_mixture(points: Points[jax.Array], query: _Query) -> Mixture:
    """One block: its nearest points, merged with all its others."""
    logits, which, from_c = _block_logits(points, query)
    nearest = _nearest(points, query, logits)
    p = jax.nn.softmax(nearest.logits, axis=1)
    mean = jnp.sum(p[..., None] * nearest.shift, axis=1)
    spread = jnp.sum(p * jnp.sum((nearest.shift - mean[:, None]) ** 2, axis=-1), axis=1)
    near = Mixture(nearest.origin, jax.nn.logsumexp(nearest.logits, axis=1), mean, spread)
    if logits.shape[1] <= NEAREST:
        return near

    logits = logits.at[jnp.arange(len(logits))[:, None], nearest.rows].set(-jnp.inf)
    top = jnp.max(logits, axis=1, keepdims=True)
    weights = jnp.exp(logits - top)
    mass = jnp.sum(weights, axis=1, keepdims=True)
    at_landmark = weights @ which
    elsewhere = jnp.where(jax.nn.one_hot(query.landmark, at_landmark.shape[1], dtype=bool), 0, at_landmark)
    center = points.landmarks[query.landmark]
    between = elsewhere @ points.landmarks - jnp.sum(elsewhere, axis=1, keepdims=True) * center
    from_landmark = query.scale * (weights @ points.residual + between) / mass  # E[Y] - √ᾱ c
    second = query.scale[:, 0] ** 2 * jnp.sum(weights * from_c, axis=1) / mass[:, 0]
    spread = jnp.maximum(second - jnp.sum(from_landmark**2, axis=1), 0)
    rest = Mixture(query.offset_origin, (top + jnp.log(mass))[:, 0], from_landmark - query.offset, spread)
    return merge(near, rest, query.inv_two_var)


def _stream(points: Points[jax.Array], query: _Query) -> Mixture:
    """Fold the blocks of one device into one mixture."""

    def mixture(index: ArrayLike) -> Mixture:
        block = Points(points.residual[index], points.landmark_of[index], points.sq_dist[index], points.landmarks)
        return _block_mixture(block, query)

    def step(state: Mixture, index: jax.Array) -> tuple[Mixture, None]:
        return merge(state, mixture(index), query.inv_two_var), None

    return jax.lax.scan(step, mixture(0), jnp.arange(1, len(points.residual)))[0]


def _cloud(
    points: Points[jax.Array], schedule: NoiseSchedule, g: jax.Array, t: jax.Array, mesh: Mesh | None
) -> Mixture:
    """The whole training set as one mixture seen from g [B, d]."""
    query = _prepare(points, schedule, g, t)
    if mesh is None:
        return _stream(points, query)
    shard, whole = split_rows(mesh).spec, replicated(mesh).spec
    stream = jax.shard_map(
        lambda points, query: jax.tree.map(lambda x: x[None], _stream(points, query)),
        mesh=mesh,
        in_specs=(Points(shard, shard, shard, whole), whole),
        out_specs=shard,
        check_vma=False,
    )
    parts = stream(points, query)
    devices = [jax.tree.map(lambda x, i=i: x[i], parts) for i in range(mesh.size)]
    return functools.reduce(lambda a, b: merge(a, b, query.inv_two_var), devices)


def _in_chunks(fn: Callable[[jax.Array, jax.Array], PyTree], g: jax.Array, t: jax.Array) -> PyTree:
    """Map fn(g, t) over the batch, QUERY_CHUNK rows at a time."""
    batch = len(g)
    if batch <= QUERY_CHUNK:
        return fn(g, t)
    chunks = -(-batch // QUERY_CHUNK)
    padding = chunks * QUERY_CHUNK - batch
    g = jnp.pad(g, ((0, padding), (0, 0)), mode="edge").reshape(chunks, QUERY_CHUNK, -1)
    t = jnp.pad(jnp.broadcast_to(t, (batch,)), (0, padding), mode="edge").reshape(chunks, QUERY_CHUNK)
    out = jax.lax.map(lambda args: fn(*args), (g, t))
    return jax.tree.map(lambda x: x.reshape(chunks * QUERY_CHUNK, *x.shape[2:])[:batch], out)


class IdealDenoiser(Denoiser):
    """The noise prediction of minimal training loss on a finite set, as a Denoiser.

    Args:
      train: [n, ...] training images (or [n, d] points), on the scale that queries will be on.
      schedule: the noise schedule.
      mesh: a one-axis device mesh to spread the training set over; None for one device.

    Guarantees: right to float32 rounding at every t in [0, T), for n = 1 and for repeated points too. One call costs
    two matrix products of the batch with the training set; memory beyond the training set is bounded by a block.
    """

    def __init__(self, train: ArrayLike, schedule: NoiseSchedule, *, mesh: Mesh | None = None):
        _validate.check_not_empty(train, "train")
        if np.ndim(train) < 2:
            raise ValueError(f"expected train of shape [n, ...] with n > 0, got {list(np.shape(train))}")
        train = np.asarray(train)
        dtype = jax.dtypes.canonicalize_dtype(train.dtype if np.issubdtype(train.dtype, np.floating) else np.float32)
        flat = np.ascontiguousarray(train.reshape(len(train), -1), dtype)
        _validate.check_finite(flat, "train")
        points = index_points(flat, 1 if mesh is None else mesh.size)
        if mesh is None:
            points = jax.device_put(points)
        else:
            shard, whole = split_rows(mesh), replicated(mesh)
            points = jax.device_put(points, Points(shard, shard, shard, whole))
        self.num_points = len(flat)
        self._mesh = mesh
        super().__init__(
            _apply_on(mesh),
            (points, schedule),
            schedule,
            train.shape[1:],
            fingerprint="ideal:" + hashlib.sha256(flat.data).hexdigest(),
            name=f"the ideal denoiser of {len(flat)} points",
        )

    def responsibilities(self, g: ArrayLike, t: ArrayLike) -> jax.Array:
        """r_i(g) [B, n]: the posterior probability that training point i gave g."""
        g = self._check(g, t)
        with jax.default_matmul_precision(PRECISION):
            logits = _logits(*self.params, g, jnp.asarray(t, jnp.int32))
        return jax.nn.softmax(_without_padding(logits, self.num_points, len(self.params[0].residual)), axis=1)

    def jacobian_trace(self, g: ArrayLike, t: ArrayLike) -> jax.Array:
        """tr ∇ε*(g) = d/σ - V/σ³, per query [B]."""
        spread = self._cloud(g, t).spread
        sigma = per_image(self.schedule.sigma(t), spread)
        return (float(np.prod(self.image_shape)) - spread / sigma**2) / sigma

    def decompose(self, x: ArrayLike, t: ArrayLike) -> ErrorDecomposition:
        """Estimation error of the clean images x at t, split into bias σ²B² and crowding V, each [B]."""
        x = jnp.asarray(x, self._dtype)
        cloud = self._cloud(self.schedule.scaled(x, t), t)
        bias = jnp.sum(cloud.shift**2, axis=1)
        return ErrorDecomposition(bias + cloud.spread, bias, cloud.spread)

    @property
    def _dtype(self) -> np.dtype:
        return self.params[0].landmarks.dtype

    def _check(self, g: ArrayLike, t: ArrayLike) -> jax.Array:
        _validate.check_shape(g, (None, *self.image_shape), "g")
        _validate.check_timestep(t, self.schedule.num_steps)
        return jnp.asarray(g, self._dtype).reshape(np.shape(g)[0], -1)

    def _cloud(self, g: ArrayLike, t: ArrayLike) -> Mixture:
        g = self._check(g, t)
        with jax.default_matmul_precision(PRECISION):
            return _mixture(*self.params, g, jnp.asarray(t, jnp.int32), self._mesh)


@functools.partial(jax.jit, static_argnames="mesh")
def _mixture(
    points: Points[jax.Array], schedule: NoiseSchedule, g: jax.Array, t: jax.Array, mesh: Mesh | None
) -> Mixture:
    return _in_chunks(lambda g, t: _cloud(points, schedule, g, t, mesh), g, t)


@functools.cache  # one function per mesh, so that all ideal denoisers of one shape share a compilation
def _apply_on(mesh: Mesh | None) -> ApplyFn:
    """ε*(g) = (g - E[Y])/σ as a Denoiser's apply function."""

    def apply(
        params: tuple[Points[jax.Array], NoiseSchedule], x: jax.Array, t: jax.Array, condition: None
    ) -> jax.Array:
        del condition
        points, schedule = params
        g = x.astype(points.landmarks.dtype).reshape(len(x), -1)
        shift = _mixture(points, schedule, g, t, mesh).shift.reshape(x.shape)
        return -shift / per_image(schedule.sigma(t), shift)

    return apply


@jax.jit
def _logits(points: Points[jax.Array], schedule: NoiseSchedule, g: jax.Array, t: jax.Array) -> jax.Array:
    """-‖g - √ᾱ x_i‖²/2σ² for every training point [B, n], up to a constant per query."""

    def one_chunk(g: jax.Array, t: jax.Array) -> jax.Array:
        query = _prepare(points, schedule, g, t)

        def one_block(args: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, _Nearest]:
            block = Points(*args, points.landmarks)
            logits = _block_logits(block, query)[0]
            return logits, _nearest(block, query, logits)._replace(shift=jnp.zeros(()))

        logits, nearest = jax.lax.map(one_block, (points.residual, points.landmark_of, points.sq_dist))
        lowest = jnp.minimum(jnp.min(nearest.origin, axis=0), query.offset_origin)
        logits = logits - ((query.offset_origin - lowest) * query.inv_two_var)[None, :, None]
        direct = nearest.logits - ((nearest.origin - lowest[None]) * query.inv_two_var[None])[..., None]
        block, row = jnp.arange(len(logits))[:, None, None], jnp.arange(len(g))[None, :, None]
        logits = logits.at[block, row, nearest.rows].set(direct)
        return jnp.moveaxis(logits, 0, 1).reshape(len(g), -1)

    return _in_chunks(one_chunk, g, t)
