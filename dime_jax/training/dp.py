"""DP-SGD (Abadi et al. 2016): training whose weights say little about any one image (needs the extra `dp`).

Each update draws every image with probability p = B/n on its own (a Poisson batch), and hands to the optimiser

    g = (Σ_{i drawn} g_i min(1, C/‖g_i‖) + N(0, (zC)² I)) / B,

where g_i is one image's gradient, C the clip norm and z the noise multiplier. T updates are the Poisson-sampled
Gaussian mechanism composed T times, whose (ε, δ) the privacy-loss-distribution accountant of dp_accounting gives. The
optimiser and the average of the weights come after the noise, so they cost nothing.

What is guaranteed: the distributions of all weights of the run, with and without any one image, are (ε, δ)-close. Two
photos of a person count as two images. The guarantee does not cover what else a run writes (its log shows losses of
drawn images), and it holds against those who do not know the seed, from which batches and noise follow: weights that
are released need a secret one.

`poisson_method` trains without privacy on the same batches, so that the two differ in clipping and noise only.
"""

import dataclasses
import functools
import json
import os
import pathlib
import warnings
from collections.abc import Mapping

import dp_accounting
import grain
import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import pld
from jax.tree_util import Partial
from jax.typing import ArrayLike
from jax_privacy import batch_selection, clipping, noise_addition

from dime_jax import data, models
from dime_jax._util import files, validate
from dime_jax._util.typing import JsonObject, PyTree
from dime_jax.training.loop import TrainingOptions, train
from dime_jax.training.method import Gradient, Method, adam, mean_gradient
from dime_jax.training.objective import ImageLosses, NoisedExamples
from dime_jax.training.recipe import TrainingRecipe
from dime_jax.training.records import PRIVACY_FILE

ROWS_MULTIPLE = 16  # batches are padded to a multiple of this, for up to so many devices
GRADIENT_BYTES = 2**31  # memory for the gradients of single images; see `microbatch_size`
LEAST_NOISE = 0.5  # no budget gets a smaller noise multiplier: accounting is slow there, and guarantees are empty

_BATCHES = 0x504F4953  # keeps the stream of batches apart from others that follow from the seed
_NOISE_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Privacy:
    """What is promised.

    Attributes:
      epsilon: the budget, at `delta`.
      steps: updates the budget is for. A run may make fewer, and spends less; it may not make more.
      delta: should be well below 1/n: a mechanism that publishes one image at random has δ = 1/n.
      clip_norm: C.
    """

    epsilon: float
    steps: int
    delta: float = 1e-5
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        validate.check_positive(self.epsilon, "epsilon")
        validate.check_at_least(self.steps, 1, "steps")
        validate.check_positive(self.clip_norm, "clip_norm")
        validate.check_unit(self.delta, "delta")


# ---------------------------------------------------------------------------------------------------------- accounting


def spent_epsilon(noise_multiplier: float, probability: float, steps: int, delta: float) -> float:
    """ε at δ of `steps` updates, for neighbours that differ by adding or removing one image; an upper bound.

    PLD accounting with dp_accounting's default discretisation.

    Args:
      noise_multiplier: standard deviation of the noise, in units of the clipping norm.
      probability: that an image is in a batch.
      steps: updates.
      delta: δ.
    """
    return pld.PLDAccountant().compose(_event(noise_multiplier, probability, steps)).get_epsilon(delta)


def _event(noise_multiplier: float, probability: float, steps: int) -> dp_accounting.DpEvent:
    update = dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(noise_multiplier))
    return dp_accounting.SelfComposedDpEvent(update, steps)


@functools.lru_cache(maxsize=32)
def calibrated_noise(privacy: Privacy, probability: float) -> float:
    """The smallest z, to three decimals and at least LEAST_NOISE, with which the budget lasts for its steps."""

    def suffices(z: float) -> bool:
        return spent_epsilon(z, probability, privacy.steps, privacy.delta) <= privacy.epsilon

    # Bracketed from above: accounting takes long where there is little noise.
    high = 8.0
    while not suffices(high):
        high *= 2
    while suffices(high / 2):
        high /= 2
        if high <= LEAST_NOISE:
            return LEAST_NOISE
    interval = dp_accounting.ExplicitBracketInterval(high / 2, high)
    event = functools.partial(_event, probability=probability, steps=privacy.steps)
    z = dp_accounting.calibrate_dp_mechanism(
        pld.PLDAccountant, event, privacy.epsilon, privacy.delta, interval, tol=_NOISE_TOLERANCE
    )
    return float(np.ceil(z / _NOISE_TOLERANCE) * _NOISE_TOLERANCE)  # up, so that rounding errs to the private side


# ------------------------------------------------------------------------------------------------------------ batches


def poisson_batches(count: int, batch_size: int, steps: int, seed: int) -> np.ndarray:
    """Poisson batches of positions 0 … count - 1 for each update [steps, rows], padded with -1.

    Every position is in every batch with probability batch_size/count, independently. `rows` is the size of the largest
    of these batches, rounded up to ROWS_MULTIPLE: nothing is cut off, and every update has the same shape.

    Args:
      count: of the images.
      batch_size: the expected size of a batch.
      steps: updates.
      seed: of the draws.
    """
    if batch_size > count:
        raise ValueError(f"batch_size must be <= {count}, the images that it is drawn from, got {batch_size}")
    sampling = batch_selection.CyclicPoissonSampling(sampling_prob=batch_size / count, iterations=steps)
    drawn = list(sampling.batch_iterator(count, np.random.default_rng((seed, _BATCHES))))
    rows = max(1, *map(len, drawn))
    batches = np.full((steps, -(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE), -1, np.int32)
    for batch, positions in zip(batches, drawn):
        batch[: len(positions)] = positions
    return batches


def poisson_method(recipe: TrainingRecipe, count: int, steps: int) -> Method:
    """Training on `count` images without privacy, but on the batches of a `dp_method` whose budget is for `steps`."""
    batches = _batches_for(recipe, count, steps)

    def gradient(losses: ImageLosses, params: PyTree, noised: NoisedExamples, key: jax.Array) -> Gradient:
        """The sum over the batch divided by its expected size, as under DP-SGD."""
        loss, mean = mean_gradient(losses, params, noised, key)
        share = noised.mask.sum().astype(jnp.float32) / recipe.batch_size
        return Gradient(loss, jax.tree.map(lambda leaf: share * leaf, mean))

    return Method(f"poisson, rows={batches.shape[1]}", grain.MapDataset.source(batches), gradient, adam(recipe))


# ---------------------------------------------------------------------------------------------------------- gradients


def clipped_gradient(
    losses: ImageLosses,
    params: PyTree,
    noised: NoisedExamples,
    key: jax.Array,
    *,
    clip_norm: float,
    batch_size: int,
    microbatch: int | None = None,
) -> Gradient:
    """Σ g_i min(1, C/‖g_i‖) / batch_size over the rows that count, and the mean loss, which is not private.

    No row moves the sum by more than `clip_norm`, whatever its gradient: one that is not finite counts as 0. With
    clip_norm = inf this is the plain gradient.

    Args:
      losses: the loss of each image.
      params: at which.
      noised: the batch.
      key: for dropout.
      clip_norm: C.
      batch_size: the expected number of rows that count. (The actual one is not public.)
      microbatch: rows whose gradients are in memory at once; by default as many as `microbatch_size` says.
    """

    def loss_of_one(params: PyTree, noised: NoisedExamples, key: jax.Array) -> jax.Array:
        return losses(params, noised, key)[0]

    rows = noised.mask.shape[0]
    micro = microbatch or microbatch_size(params, rows)
    gradient = clipping.clipped_grad(
        loss_of_one,
        l2_clip_norm=clip_norm,
        normalize_by=batch_size,
        batch_argnums=1,
        prng_argnum=2,
        return_values=True,
        microbatch_size=None if micro == rows else micro,  # a loop, even of one pass, is slow on CPUs
    )
    with jax.numpy_dtype_promotion("standard"):  # the library mixes dtypes, which strict callers forbid
        total, aux = gradient(params, noised, key, is_padding_example=~noised.mask)
    kept = jnp.where(noised.mask, aux.values, 0.0)
    return Gradient(kept.sum() / jnp.maximum(noised.mask.sum(), 1).astype(kept.dtype), total)


def microbatch_size(params: PyTree, rows: int) -> int:
    """Rows whose gradients fit into GRADIENT_BYTES: all of them, or else a power of two that divides ROWS_MULTIPLE."""
    bytes_per_row = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    fitting = max(1, GRADIENT_BYTES // bytes_per_row)
    return rows if fitting >= rows else min(ROWS_MULTIPLE, 2 ** (fitting.bit_length() - 1))


def add_noise(gradient: PyTree, stddev: ArrayLike, key: jax.Array) -> PyTree:
    """Independent N(0, stddev²) added to every number of a tree."""
    privatizer = noise_addition.gaussian_privatizer(stddev=stddev, prng_key=key)
    with jax.numpy_dtype_promotion("standard"):
        noisy, _ = privatizer.update(gradient, privatizer.init(gradient))
    return noisy


def dp_method(recipe: TrainingRecipe, count: int, privacy: Privacy, *, microbatch: int | None = None) -> Method:
    """DP-SGD on `count` images, with Adam.

    Batches and noise are functions of the seed and the number of the update: what is computed again after a kill is the
    same release, not a second one.

    Args:
      recipe: `batch_size` is the expected size of a batch; `clip_norm` applies to the noised gradient.
      count: n, the number of training images.
      privacy: the budget.
      microbatch: see `clipped_gradient`.

    Raises:
      ValueError: if the recipe makes more updates than the budget is for.
    """
    batches = _batches_for(recipe, count, privacy.steps)
    if privacy.delta >= 1 / count:
        reason = "publishing one of them would be allowed"
        warnings.warn(f"delta={privacy.delta:g} is not below 1/n for n={count} images: {reason}", stacklevel=2)
    z = calibrated_noise(privacy, recipe.batch_size / count)
    if recipe.steps > privacy.steps:
        spent = spent_epsilon(z, recipe.batch_size / count, recipe.steps, privacy.delta)
        budget = f"{privacy.steps} for epsilon={privacy.epsilon:g}"
        raise ValueError(f"steps must be <= {budget}, got {recipe.steps}, which would spend {spent:.3g}")
    stddev = z * privacy.clip_norm / recipe.batch_size
    clip = functools.partial(clipped_gradient, clip_norm=privacy.clip_norm, batch_size=recipe.batch_size)

    def gradient(
        stddev: jax.Array, losses: ImageLosses, params: PyTree, noised: NoisedExamples, key: jax.Array
    ) -> Gradient:
        dropout, noise = jax.random.split(key)
        loss, total = clip(losses, params, noised, dropout, microbatch=microbatch)
        return Gradient(loss, add_noise(total, stddev, noise))

    promise = ", ".join(f"{name}={value:g}" for name, value in dataclasses.asdict(privacy).items())
    name = f"dp-sgd, {promise}, noise_multiplier={z:g}, rows={batches.shape[1]}"
    return Method(name, grain.MapDataset.source(batches), Partial(gradient, stddev), adam(recipe))


def _batches_for(recipe: TrainingRecipe, count: int, steps: int) -> np.ndarray:
    return poisson_batches(count, recipe.batch_size, max(steps, recipe.steps), recipe.seed)


# ----------------------------------------------------------------------------------------------------------- training


def train_privately(
    workdir: str | os.PathLike[str],
    spec: models.ModelSpec,
    source: data.Source,
    members: np.ndarray,
    recipe: TrainingRecipe,
    privacy: Privacy,
    *,
    microbatch: int | None = None,
    options: TrainingOptions | None = None,
) -> pathlib.Path:
    """`training.train` with DP-SGD, or its continuation; what was spent is in WORKDIR/model/privacy.json.

    Raises:
      ValueError: as `train`; if the network keeps statistics of batches, which mix images beyond what clipping bounds;
        or if the run would go past its budget.
    """
    check_no_batch_statistics(models.param_shapes(spec.denoiser))
    method = dp_method(recipe, len(members), privacy, microbatch=microbatch)
    model = train(workdir, spec, source, members, recipe, method=method, options=options)
    if jax.process_index() == 0:
        record = spent_budget(privacy, recipe, len(members))
        files.write_atomically(model / PRIVACY_FILE, (json.dumps(record, indent=1) + "\n").encode())
    return model


def check_no_batch_statistics(variables: Mapping[str, PyTree]) -> None:
    """Refuse networks with batch normalisation; group and layer normalisation see one image at a time."""
    if "batch_stats" in variables:
        raise ValueError("DP-SGD needs a network without batch statistics, got batch_stats: use GroupNorm")


def spent_budget(privacy: Privacy, recipe: TrainingRecipe, count: int) -> JsonObject:
    """What a finished run spent, and all it takes to compute that again."""
    probability = recipe.batch_size / count
    z = calibrated_noise(privacy, probability)
    return {
        "epsilon": spent_epsilon(z, probability, recipe.steps, privacy.delta),
        "delta": privacy.delta,
        "budget_epsilon": privacy.epsilon,
        "budget_steps": privacy.steps,
        "steps": recipe.steps,
        "noise_multiplier": z,
        "clip_norm": privacy.clip_norm,
        "sampling": "Poisson",
        "sampling_probability": probability,
        "images": count,
        "neighbours": "one image added or removed",
        "accountant": "dp_accounting PLD, discretisation 1e-4",
        "covers": "weights and optimiser states of the run; not its log of losses; only while the seed is secret",
    }
