"""What the rest of the library asks of a network's spec, whatever its architecture."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from dime_jax.models.checks import check_fields


class NetworkSpec:
    """A network but for its weights. Subclasses are frozen dataclasses; the annotations of their fields are checked."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        check_fields(self)

    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes and dtypes of the smallest inputs, a batch of one, that the network takes."""
        raise NotImplementedError


class DenoiserSpec(NetworkSpec):
    """A network that predicts from x [B, H, W, C], t and a condition. A subclass may declare these as fields.

    Attributes:
      resizable: whether H and W may be any multiples of the example's, or must be the example's.
      num_classes: how many classes condition it; None if none do.
      context_channels: width of the text embedding that conditions it; None if none does.
      time_table_steps: for how many timesteps it has an embedding; None if for all.
    """

    resizable: ClassVar[bool] = True
    num_classes: int | None = None
    context_channels: int | None = None
    time_table_steps: int | None = None

    @property
    def x_shape(self) -> tuple[int, int, int]:
        """(H, W, C) of the smallest x."""
        height, width, channels = self.example()[0].shape[1:]
        return height, width, channels


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """One float32 input [1, *shape]."""
    return jax.ShapeDtypeStruct((1, *shape), jnp.float32)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    """One int32 input [1, *shape]."""
    return jax.ShapeDtypeStruct((1, *shape), jnp.int32)
