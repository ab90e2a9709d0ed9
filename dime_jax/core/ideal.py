"""The optimal denoiser of a finite training set, in closed form (paper, Lemma "Idealized Denoiser").

For training points x_1 … x_n and a query g at noise level (ᾱ, σ), write Y = √ᾱ x_I with I ~ r(g) and
r_i(g) ∝ exp(-‖g - √ᾱ x_i‖² / 2σ²). Then, exactly,

    ε*(g) = (g - E[Y]) / σ                    the optimal noise prediction,
    M = E‖Y - g‖² = σ²‖ε*(g)‖² + V            estimation error = bias + crowding,
    V = E‖Y - E[Y]‖²,   tr ∇ε*(g) = d/σ - V/σ³.

So everything follows from the mean and the spread of one weighted point cloud.

Numerics. At t = 0, 2σ² is 2e-4: logits need squared distances to 1e-8, while the usual ‖g‖² - 2g·x + ‖x‖² in float32
is off by 1e-4 at d = 3072. Three measures keep float32 right at every t:

* distances are expanded around the landmark c nearest to the query, with ‖x_i - c‖² tabled in advance: rounding then
  scales with ‖g - √ᾱ c‖², and landmarks lie in the densest parts of the set, where points tie at low noise;
* the points that carry the weight are evaluated directly, difference by difference: a few always, and as many as
  matter where rounding would show, because no landmark is near;
* g - √ᾱ x is taken as (g - x) + (1 - √ᾱ) x, since √ᾱ x rounds and g - x does not where the two nearly agree.
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from dime_jax._util import validate
from dime_jax._util.distributed import replicated, split_rows
from dime_jax._util.typing import PyTree
from dime_jax.core.denoiser import PRECISION, ApplyFn, Denoiser
from dime_jax.core.schedule import NoiseSchedule, per_image

QUERY_CHUNK = 256  # queries evaluated at a time, and
CHUNK_ENTRIES = 2**24  # at most this many (query, point) pairs, but never fewer than
MIN_CHUNK = 16  # queries: memory beyond the training set is a few arrays of that many pairs
MAX_LANDMARKS = 128
DIRECT = (4, 32, 256, 1024)  # how many leading points are evaluated directly: the first of these that is enough
DIRECT_AT_ONCE = 16
NEGLIGIBLE = 2e-5  # error of a logit times the root of its weight that needs no better evaluation
FAR_AWAY = 1e12  # coordinates of padding points: their weight underflows to 0

T = TypeVar("T")


class ErrorDecomposition(NamedTuple):
    """M = σ²B² + V per image [B]: `error` = `bias` + `crowding` (paper, Eq. M_decomposition)."""

    error: Array
    bias: Array
    crowding: Array


class Points(NamedTuple, Generic[T]):
    """The training set, each point as its landmark (one of c_1 … c_K) plus a residual; or where these arrays lie."""

    residual: T  # [n, d + K + …]: x_i - c_k(i), k(i) as a one-hot row, zeros: one product serves both
    landmark_of: T  # [n]: k(i), the landmark nearest to x_i
    sq_dist: T  # [K, n]: ‖x_i - c_k‖²
    landmarks: T  # [K, d]


class Mixture(NamedTuple):
    """A weighted cloud of points Y_i seen from the query g, per query.

    The mass is Σ exp(-‖Y_i - g‖²/2σ²) = exp(log_mass - origin/2σ²): squared distances are kept as what exceeds a round
    number, since at low noise their differences matter below float32's resolution of the distances themselves.
    """

    origin: Array  # [B]
    log_mass: Array  # [B]
    shift: Array  # E[Y] - g [B, d]
    spread: Array  # E‖Y - E[Y]‖² [B]


class _Query(NamedTuple):
    """Queries, and U = g - √ᾱ c: the query seen from its nearest landmark c."""

    g: Array  # [B, d]
    scale: Array  # √ᾱ [B, 1]
    sigma: Array  # [B, 1]
    inv_two_var: Array  # 1 / 2σ² [B]
    landmark: Array  # index of c [B]
    offset: Array  # U [B, d]
    offset_origin: Array  # ‖U‖² = offset_origin + offset_excess [B]
    offset_excess: Array
    along: Array  # U·(c_k - c) [B, K]


def merge(a: Mixture, b: Mixture, inv_two_var: Array) -> Mixture:
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


def _round_mean_square(v: Array) -> Array:
    """About the mean of v² over the last axis, to 8 bits: d times it is exact in float32."""
    # Not a cast to bfloat16 and back, which XLA may leave out.
    return jax.lax.reduce_precision(jax.lax.stop_gradient(jnp.mean(v**2, axis=-1)), exponent_bits=8, mantissa_bits=7)


def _excess_square(v: Array, mean_square: Array) -> Array:
    """‖v‖² - d·mean_square, summed in groups so that rounding does not pile up over d."""
    excess = v**2 - mean_square[..., None]
    pad = -v.shape[-1] % 64
    excess = jnp.pad(excess, ((0, 0),) * (v.ndim - 1) + ((0, pad),))
    return jnp.sum(jnp.sum(excess.reshape(*v.shape[:-1], 64, -1), axis=-1), axis=-1)


def choose_landmarks(points: np.ndarray, most: int = MAX_LANDMARKS, sample: int = 2048) -> np.ndarray:
    """Choose the origin, and points so that, as far as `most` allows, each point has one near it at its own scale.

    Over an even subsample, densest first: a point becomes a landmark if no other lies within four times the distance
    to its own fourth neighbour. So every tight cluster gets one, and points without structure share one.
    """
    subset = points[np.linspace(0, len(points) - 1, min(sample, len(points))).astype(int)]
    centered = subset - subset.mean(axis=0)
    norms = np.einsum("nd,nd->n", centered, centered)
    sq_dist = np.maximum(norms + norms[:, None] - 2 * (centered @ centered.T), 1e-6 * norms.max())
    fourth = min(4, len(subset) - 1)
    neighbourhood = np.partition(sq_dist, fourth, axis=1)[:, fourth]
    densest, *others = np.argsort(neighbourhood)
    chosen = [densest]
    for i in others:
        if len(chosen) < most and sq_dist[i, chosen].min() > 16 * neighbourhood[i]:
            chosen.append(i)
    return np.concatenate([np.zeros_like(subset[:1]), subset[chosen]])


def index_points(train: np.ndarray, num_devices: int = 1) -> Points[np.ndarray]:
    """Deal [n, d] points to devices, padded to equal shares, and table their distances to the landmarks."""
    n, d = train.shape
    if n < num_devices:
        raise ValueError(f"there must be a training point for each device, got {n} points for {num_devices} devices")
    size = -(-n // num_devices) * num_devices
    landmarks = choose_landmarks(train)
    centers = landmarks.astype(np.float64)
    center_sq = np.einsum("kd,kd->k", centers, centers)
    width = -(-(d + len(landmarks)) // 32) * 32  # aligned, or products take a tenth longer
    residual = np.full((size, width), FAR_AWAY, train.dtype)
    landmark_of = np.zeros(size, np.int32)
    sq_dist = np.full((len(landmarks), size), d * FAR_AWAY**2, train.dtype)
    for first in range(0, n, 4096):
        rows = slice(first, min(first + 4096, n))
        x = train[rows].astype(np.float64)
        dist = center_sq[:, None] - 2 * (centers @ x.T) + np.einsum("nd,nd->n", x, x)
        sq_dist[:, rows] = np.maximum(dist, 0)
        dist[0] /= 4  # the residual from the origin is exact: prefer it unless another is much nearer
        landmark_of[rows] = np.argmin(dist, axis=0)
        np.subtract(train[rows], landmarks[landmark_of[rows]], out=residual[rows, :d])
        residual[rows, d:] = np.eye(width - d)[landmark_of[rows]]
    deal = functools.partial(_deal, num_devices=num_devices)
    return Points(deal(residual, axis=0), deal(landmark_of, axis=0), deal(sq_dist, axis=1), landmarks)


def _deal(array: np.ndarray, num_devices: int, axis: int) -> np.ndarray:
    """Reorder an axis so that its even parts hold entries 0, D, 2D …, then 1, D + 1 …: each has a real point."""
    split = array.reshape(*array.shape[:axis], -1, num_devices, *array.shape[axis + 1 :])
    return split.swapaxes(axis, axis + 1).reshape(array.shape)


def _difference(x: Array, g: Array, scale: Array, sigma: Array) -> Array:
    """√ᾱ x - g: in float32 at low noise as (x - g) - (1 - √ᾱ) x, where 1 - √ᾱ = σ²/(1 + √ᾱ) has all its digits."""
    if x.dtype == jnp.float64:  # the tables of σ and √ᾱ agree to float32
        return scale * x - g
    return jnp.where(scale > 0.5, (x - g) - sigma**2 / (1 + scale) * x, scale * x - g)


def _prepare(points: Points[Array], schedule: NoiseSchedule, g: Array, t: Array) -> _Query:
    scale = jnp.broadcast_to(schedule.sqrt_abar(t).astype(g.dtype), g.shape[:1])[:, None]
    sigma = jnp.broadcast_to(schedule.sigma(t).astype(g.dtype), g.shape[:1])
    centers = points.landmarks
    landmark = jnp.argmin(scale * jnp.sum(centers**2, axis=-1)[None] - 2 * g @ centers.T, axis=1)
    offset = -_difference(centers[landmark], g, scale, sigma[:, None])
    along = offset @ centers.T - jnp.sum(offset * centers[landmark], axis=1, keepdims=True)
    along = jnp.where(jax.nn.one_hot(landmark, len(centers), dtype=bool), 0, along)  # exactly 0 at c itself
    mean_square = _round_mean_square(offset)
    origin = g.shape[1] * mean_square
    excess = _excess_square(offset, mean_square)
    return _Query(g, scale, sigma[:, None], 0.5 / sigma**2, landmark, offset, origin, excess, along)


def _expanded_logits(points: Points[Array], query: _Query) -> tuple[Array, Array]:
    """(offset_origin - ‖g - √ᾱ x_i‖²)/2σ² and ‖x_i - c‖² for every point, each [B, n]."""
    left = jnp.concatenate([query.offset, query.along], axis=1)
    unused = points.residual.shape[1] - left.shape[1]
    inner = jnp.pad(left, ((0, 0), (0, unused))) @ points.residual.T  # U·(x_i - c)
    from_c = points.sq_dist[query.landmark]
    excess = query.scale * (query.scale * from_c - 2 * inner) + query.offset_excess[:, None]
    return -excess * query.inv_two_var[:, None], from_c


def _direct_count(query: _Query, weights: Array) -> Array:
    """Return how many points some query needs evaluated directly, given exp(expanded logits) [B, n] up to a factor.

    Expanded logits near the query are off by about `error`, independently of each other, so that a point of
    responsibility p moves the mean by error * √p of the cloud's size or less.
    """
    error = jnp.finfo(weights.dtype).eps * (query.offset_origin + query.offset_excess) * query.inv_two_var
    least = jnp.sum(weights, axis=1) * (NEGLIGIBLE / error) ** 2 * jnp.exp(-4 * error)
    return jnp.max(jnp.sum(weights > least[:, None], axis=1))


class _Nearest(NamedTuple):
    """Points evaluated directly."""

    shift: Array  # √ᾱ x_i - g [B, k, d]
    logits: Array  # (origin - ‖√ᾱ x_i - g‖²)/2σ² [B, k]
    origin: Array  # [B]


def _evaluate(points: Points[Array], query: _Query, rows: Array) -> _Nearest:
    """Some points [B, k] difference by difference; the first is the one to measure distances from."""
    x = points.landmarks[points.landmark_of[rows]] + points.residual[rows, : query.g.shape[1]]
    shift = _difference(x, query.g[:, None], query.scale[..., None], query.sigma[..., None])
    mean_square = _round_mean_square(shift[:, 0])
    excess = _excess_square(shift, jnp.broadcast_to(mean_square[:, None], rows.shape))
    return _Nearest(shift, -excess * query.inv_two_var[:, None], shift.shape[-1] * mean_square)


def _cloud_of(nearest: _Nearest) -> Mixture:
    p = jax.nn.softmax(nearest.logits, axis=1)
    mean = jnp.sum(p[..., None] * nearest.shift, axis=1)
    spread = jnp.sum(p * jnp.sum((nearest.shift - mean[:, None]) ** 2, axis=-1), axis=1)
    return Mixture(nearest.origin, jax.nn.logsumexp(nearest.logits, axis=1), mean, spread)


def _groups(rows: Array) -> Array:
    """[B, k] as [k / DIRECT_AT_ONCE, B, DIRECT_AT_ONCE], so that memory does not grow with k."""
    width = min(DIRECT_AT_ONCE, rows.shape[1])
    return jnp.moveaxis(rows.reshape(len(rows), -1, width), 1, 0)


def _leading(logits: Array, count: Array, use: Callable[[Array], PyTree]) -> PyTree:
    """use(rows) for the rows [B, k] of the largest logits: k is the first of DIRECT that is at least `count`."""
    n = logits.shape[1]
    sizes = [k for k in DIRECT if k < n] or [n]
    branches = [lambda logits, k=k: use(jax.lax.top_k(logits, k)[1]) for k in sizes]
    return jax.lax.switch(sum((count > k).astype(jnp.int32) for k in sizes[:-1]), branches, logits)


def _rest(points: Points[Array], query: _Query, logits: Array, from_c: Array) -> Mixture:
    """All points by their expanded logits, without those whose logit is -inf."""
    top = jnp.max(logits, axis=1, keepdims=True)
    weights = jnp.exp(logits - top)
    mass = jnp.sum(weights, axis=1, keepdims=True)
    d = query.g.shape[1]
    from_own, at_landmark, _ = jnp.split(weights @ points.residual, [d, d + len(points.landmarks)], axis=1)
    elsewhere = jnp.where(jax.nn.one_hot(query.landmark, at_landmark.shape[1], dtype=bool), 0, at_landmark)
    center = points.landmarks[query.landmark]
    between = elsewhere @ points.landmarks - jnp.sum(elsewhere, axis=1, keepdims=True) * center
    from_landmark = query.scale * (from_own + between) / mass  # E[Y] - √ᾱ c
    second = query.scale[:, 0] ** 2 * jnp.sum(weights * from_c, axis=1) / mass[:, 0]
    spread = jnp.maximum(second - jnp.sum(from_landmark**2, axis=1), 0)
    return Mixture(query.offset_origin, (top + jnp.log(mass))[:, 0], from_landmark - query.offset, spread)


def _mixture_of(points: Points[Array], query: _Query) -> Mixture:
    """The points of one device: the leading ones, evaluated directly, merged with all others."""
    logits, from_c = _expanded_logits(points, query)
    weights = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))

    def split(rows: Array) -> tuple[Mixture, Array]:
        first, *_ = groups = _groups(rows)

        def step(state: Mixture, rows: Array) -> tuple[Mixture, None]:
            return merge(state, _cloud_of(_evaluate(points, query, rows)), query.inv_two_var), None

        near, _ = jax.lax.scan(step, _cloud_of(_evaluate(points, query, first)), groups[1:])
        return near, logits.at[jnp.arange(len(logits))[:, None], rows].set(-jnp.inf)

    near, logits = _leading(logits, _direct_count(query, weights), split)
    if logits.shape[1] <= DIRECT[0]:
        return near
    return merge(near, _rest(points, query, logits, from_c), query.inv_two_var)


def _shards(mesh: Mesh) -> Points[NamedSharding]:
    """How the training set lies on a mesh: every device has some of the points and all landmarks."""
    rows, columns = split_rows(mesh), NamedSharding(mesh, PartitionSpec(None, mesh.axis_names[0]))
    return Points(rows, rows, columns, replicated(mesh))


def _cloud(points: Points[Array], schedule: NoiseSchedule, g: Array, t: Array, mesh: Mesh | None) -> Mixture:
    """The whole training set as one mixture seen from g [B, d]."""
    query = _prepare(points, schedule, g, t)
    if mesh is None:
        return _mixture_of(points, query)
    part = jax.shard_map(
        lambda points, query: jax.tree.map(lambda x: x[None], _mixture_of(points, query)),
        mesh=mesh,
        in_specs=(Points(*(sharding.spec for sharding in _shards(mesh))), replicated(mesh).spec),
        out_specs=split_rows(mesh).spec,
        check_vma=False,
    )
    parts = part(points, query)
    devices = [jax.tree.map(lambda x, i=i: x[i], parts) for i in range(mesh.size)]
    return functools.reduce(lambda a, b: merge(a, b, query.inv_two_var), devices)


def _in_chunks(fn: Callable[[Array, Array], PyTree], g: Array, t: Array, points: int) -> PyTree:
    """Map fn(g, t) over the batch, few enough rows at a time that memory stays bounded for any number of points."""
    batch, rows = len(g), min(QUERY_CHUNK, max(MIN_CHUNK, CHUNK_ENTRIES // points))
    if batch <= rows:
        return fn(g, t)
    chunks = -(-batch // rows)
    padding = chunks * rows - batch
    g = jnp.pad(g, ((0, padding), (0, 0)), mode="edge").reshape(chunks, rows, -1)
    t = jnp.pad(jnp.broadcast_to(t, (batch,)), (0, padding), mode="edge").reshape(chunks, rows)
    out = jax.lax.map(lambda args: fn(*args), (g, t))
    return jax.tree.map(lambda x: x.reshape(chunks * rows, *x.shape[2:])[:batch], out)


class IdealDenoiser(Denoiser):
    """The noise prediction of minimal training loss on a finite set, as a Denoiser.

    Args:
      train: [n, ...] training images (or [n, d] points), on the scale that queries will be on.
      schedule: the noise schedule.
      mesh: a one-axis device mesh to spread the training set over; None for one device.

    Guarantees: right to float32 rounding at every t in [0, T), for n = 1 and for repeated points too, up to 1,024
    points that tie at low noise without a landmark near them. One call costs two matrix products of the batch with
    the training set; memory beyond the training set is bounded.
    """

    def __init__(self, train: ArrayLike, schedule: NoiseSchedule, *, mesh: Mesh | None = None):
        validate.check_not_empty(train, "train")
        if np.ndim(train) < 2:
            raise ValueError(f"train must have shape [n, ...] with n > 0, got {list(np.shape(train))}")
        train = np.asarray(train)
        dtype = jax.dtypes.canonicalize_dtype(train.dtype if np.issubdtype(train.dtype, np.floating) else np.float32)
        flat = np.ascontiguousarray(train.reshape(len(train), -1), dtype)
        validate.check_finite(flat, "train")
        points = index_points(flat, 1 if mesh is None else mesh.size)
        points = jax.device_put(points, None if mesh is None else _shards(mesh))
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

    def responsibilities(self, g: ArrayLike, t: ArrayLike) -> Array:
        """r_i(g) [B, n]: the posterior probability that training point i gave g."""
        g = self._check(g, t)
        with jax.default_matmul_precision(PRECISION):
            logits = _logits(*self.params, g, jnp.asarray(t, jnp.int32))
        devices = 1 if self._mesh is None else self._mesh.size
        in_order = logits.reshape(len(g), devices, -1).swapaxes(1, 2).reshape(logits.shape)
        return jax.nn.softmax(in_order[:, : self.num_points], axis=1)

    def jacobian_trace(self, g: ArrayLike, t: ArrayLike) -> Array:
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

    def _check(self, g: ArrayLike, t: ArrayLike) -> Array:
        validate.check_shape(g, (None, *self.image_shape), "g")
        validate.check_timestep(t, self.schedule.num_steps)
        return jnp.asarray(g, self._dtype).reshape(np.shape(g)[0], -1)

    def _cloud(self, g: ArrayLike, t: ArrayLike) -> Mixture:
        g = self._check(g, t)
        with jax.default_matmul_precision(PRECISION):
            return _mixture(*self.params, g, jnp.asarray(t, jnp.int32), self._mesh)


@functools.partial(jax.jit, static_argnames="mesh")
def _mixture(points: Points[Array], schedule: NoiseSchedule, g: Array, t: Array, mesh: Mesh | None) -> Mixture:
    return _in_chunks(lambda g, t: _cloud(points, schedule, g, t, mesh), g, t, len(points.residual))


@functools.cache  # one function per mesh, so that all ideal denoisers of one shape share a compilation
def _apply_on(mesh: Mesh | None) -> ApplyFn:
    """ε*(g) = (g - E[Y])/σ as a Denoiser's apply function."""

    def apply(params: tuple[Points[Array], NoiseSchedule], x: Array, t: Array, condition: None) -> Array:
        del condition
        points, schedule = params
        g = x.astype(points.landmarks.dtype).reshape(len(x), -1)
        shift = _mixture(points, schedule, g, t, mesh).shift.reshape(x.shape)
        return -shift / per_image(schedule.sigma(t), shift)

    return apply


@jax.jit
def _logits(points: Points[Array], schedule: NoiseSchedule, g: Array, t: Array) -> Array:
    """-‖g - √ᾱ x_i‖²/2σ² for every training point [B, n], up to a constant per query."""

    def one_chunk(g: Array, t: Array) -> Array:
        query = _prepare(points, schedule, g, t)
        expanded = _expanded_logits(points, query)[0]
        weights = jnp.exp(expanded - jnp.max(expanded, axis=1, keepdims=True))

        def with_direct(rows: Array) -> Array:
            nearest = jax.lax.map(lambda rows: _evaluate(points, query, rows)._replace(shift=rows), _groups(rows))
            lowest = jnp.minimum(nearest.origin[0], query.offset_origin)
            logits = expanded - ((query.offset_origin - lowest) * query.inv_two_var)[:, None]
            direct = nearest.logits - ((nearest.origin - lowest[None]) * query.inv_two_var[None])[..., None]
            return logits.at[jnp.arange(len(g))[None, :, None], nearest.shift].set(direct)

        return _leading(expanded, _direct_count(query, weights), with_direct)

    return _in_chunks(one_chunk, g, t, len(points.residual))
