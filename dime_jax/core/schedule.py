"""Noise schedules of the forward diffusion: x_t = √ᾱ_t x + σ_t ε, with σ_t = √(1 - ᾱ_t) and t = 0 … T-1.

Tables are computed in float64 on the host and served as float32. (1 - ᾱ in float32 would lose half of σ's digits at
t = 0, where ᾱ = 0.9999.)
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

from dime_jax._util import validate
from dime_jax._util.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class NoiseSchedule:
    """ᾱ_t, √ᾱ_t and σ_t for t = 0 … T-1, as float32 tables of length T.

    A pytree, so that it can be an argument of a jitted function: all schedules of one length share one compilation.
    """

    abar_table: Array
    sqrt_abar_table: Array
    sigma_table: Array

    @property
    def num_steps(self) -> int:
        """T, the number of timesteps."""
        return self.abar_table.shape[0]

    def abar(self, t: ArrayLike) -> jax.Array:
        """ᾱ_t = ∏_{s ≤ t} (1 - β_s), of the shape of t."""
        return self._look_up(self.abar_table, t)

    def sqrt_abar(self, t: ArrayLike) -> jax.Array:
        """√ᾱ_t, the scale of the image at t."""
        return self._look_up(self.sqrt_abar_table, t)

    def sigma(self, t: ArrayLike) -> jax.Array:
        """σ_t = √(1 - ᾱ_t), the noise level at t."""
        return self._look_up(self.sigma_table, t)

    def timestep_at(self, sigma: float) -> int:
        """The timestep whose noise level is nearest to σ; of two, the smaller."""
        return int(np.argmin(np.abs(np.asarray(self.sigma_table, np.float64) - sigma)))

    def scaled(self, x: jax.Array, t: ArrayLike) -> jax.Array:
        """g = √ᾱ_t x: the image where its noised versions are centred."""
        return per_image(self.sqrt_abar(t), x) * x

    def noised(self, x: jax.Array, noise: ArrayLike, t: ArrayLike) -> jax.Array:
        """x_t = √ᾱ_t x + σ_t · noise."""
        return self.scaled(x, t) + per_image(self.sigma(t), x) * noise

    def noise_of(self, output: jax.Array, prediction: str, x: jax.Array, t: ArrayLike) -> jax.Array:
        """ε by x_t = √ᾱ x₀ + σ ε, from what a network predicts about x_t.

        Args:
          output: ε itself ("epsilon"), x₀ ("sample") or v = √ᾱ ε - σ x₀ ("v_prediction").
          prediction: which of them.
          x: x_t.
          t: of x.
        """
        if prediction == "epsilon":
            return output
        sqrt_abar, sigma = per_image(self.sqrt_abar(t), x), per_image(self.sigma(t), x)
        if prediction == "sample":
            return (x - sqrt_abar * output) / sigma
        return sqrt_abar * output + sigma * x

    def _look_up(self, table: Array, t: ArrayLike) -> jax.Array:
        validate.check_timestep(t, self.num_steps)
        if isinstance(table, np.ndarray) and isinstance(t, int | np.integer | np.ndarray):
            return jnp.asarray(table[t])  # on the host, which is quicker than to send the table
        return jnp.asarray(table)[t]


def schedule_from_betas(betas: npt.ArrayLike) -> NoiseSchedule:
    """The schedule with the given β_0 … β_{T-1}, each in (0, 1]; β = 1 (zero terminal SNR) gives ᾱ = 0 from then on."""
    betas = np.asarray(betas, np.float64)
    if betas.ndim != 1 or betas.size == 0:
        raise ValueError(f"betas must have shape [T] with T > 0, got {list(betas.shape)}")
    if not (np.all(betas > 0) and np.all(betas <= 1)):
        bad = int(np.argmin((betas > 0) & (betas <= 1)))
        raise ValueError(f"betas must be > 0 and <= 1, got betas[{bad}]={betas[bad]}")
    abar = np.cumprod(1.0 - betas)
    # 1 - ᾱ by the log, since 1 - 0.9999 has only 12 right digits even in float64.
    with np.errstate(divide="ignore"):
        sigma = np.sqrt(-np.expm1(np.cumsum(np.log1p(-betas))))
    return NoiseSchedule(abar.astype(np.float32), np.sqrt(abar).astype(np.float32), sigma.astype(np.float32))


def linear_schedule(num_steps: int = 1000, beta_start: float = 1e-4, beta_end: float = 0.02) -> NoiseSchedule:
    """β linear in t (Ho et al. 2020): what DDPM and Guided Diffusion checkpoints were trained with, by default.

    Args:
      num_steps: T.
      beta_start: β_0.
      beta_end: β_{T-1}.
    """
    validate.check_at_least(num_steps, 1, "num_steps")
    return schedule_from_betas(np.linspace(beta_start, beta_end, num_steps, dtype=np.float64))


def cosine_schedule(num_steps: int = 1000, offset: float = 0.008, max_beta: float = 0.999) -> NoiseSchedule:
    """ᾱ_t ∝ cos²(((t/T + s)/(1 + s)) π/2), β clipped at `max_beta` (Nichol & Dhariwal 2021).

    Args:
      num_steps: T.
      offset: s, which keeps β_0 from being too small.
      max_beta: the largest β.
    """
    return schedule_from_betas(cosine_betas(num_steps, offset, max_beta))


def cosine_betas(num_steps: int = 1000, offset: float = 0.008, max_beta: float = 0.999) -> np.ndarray:
    """The βs of `cosine_schedule`, in float64."""
    validate.check_at_least(num_steps, 1, "num_steps")
    level = np.cos((np.arange(num_steps + 1) / num_steps + offset) / (1 + offset) * np.pi / 2) ** 2
    return np.minimum(1 - level[1:] / level[:-1], max_beta)


def per_image(coefficient: ArrayLike, x: jax.Array) -> jax.Array:
    """Give a scalar or [B] coefficient the rank and dtype of the batch x, ready to multiply it."""
    coefficient = jnp.asarray(coefficient, x.dtype)
    return coefficient.reshape(coefficient.shape + (1,) * (x.ndim - coefficient.ndim))
