"""What the engine compiles: the network once for all calls, and for each kind of call what is done around it.

A call builds a query, asks the network and reduces the answer. Compiled as one piece, every kind of call would hold the
whole network again, and compiling networks takes most of a short audit's time on CPUs. So a call is cut in two where it
asks: `query` runs it up to there, `answer` runs it with the network's answer at hand. Both are small, and know nothing
of the model. Only a call that asks several times is still one piece (`whole`). Random numbers take long to compile as
well, so they are drawn beforehand by one program for all calls, if their index is one of the call's own numbers
(`drawn_by`).

Both halves are compiled for each kind of call (its template, mostly its class) and batch shape. The class is no
argument of them. As a registered dataclass it would be part of a pytree structure, and structures of different
dataclasses compare equal in jax 0.10, so that on equal hashes one class would run another's program.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, Never

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from dime_jax._util.typing import PyTree
from dime_jax.attacks.base import Answer, Call, Whole, keeping
from dime_jax.core.denoiser import ApplyFn, EpsFn
from dime_jax.core.draws import Draws, Randomness
from dime_jax.core.schedule import NoiseSchedule
from dime_jax.core.xla_options import network_options

Template = Callable[..., Call]


class Drawn(NamedTuple):
    """Something drawn for a call: of which kind, and where its index stands among the call's arguments."""

    kind: str
    position: int


class About(NamedTuple):
    """What a call is made about, besides the model.

    Attributes:
      schedule: of the model.
      key: of the run's draws.
      x: the images [B, ...].
      draw_ids: numbers of their ids.
      arguments: of the call's template.
      given: the state that the call starts from.
      drawn: what was drawn beforehand, each of x's shape.
      kept: which coordinates of x count in norms; None if all do.
    """

    schedule: NoiseSchedule
    key: jax.Array
    x: jax.Array
    draw_ids: jax.Array
    arguments: tuple[ArrayLike, ...]
    given: PyTree
    drawn: Mapping[Drawn, jax.Array]
    kept: jax.Array | None


class _Asked(BaseException):
    """Ends a call where it asks, whatever exceptions it expects there, and carries the query out of it."""

    def __init__(self, x: jax.Array, t: jax.Array):
        super().__init__(x, t)
        self.x, self.t = x, t


@functools.lru_cache(maxsize=128)
def network(apply: ApplyFn, sharding: NamedSharding | None) -> Callable[..., jax.Array]:
    """(params, x, t, condition) -> eps."""
    return jax.jit(apply, out_shardings=sharding, compiler_options=network_options())


@functools.lru_cache(maxsize=128)
def query(template: Template, sharding: NamedSharding | None) -> Callable[[About], tuple[jax.Array, jax.Array]]:
    """What a call of one query per image asks the network: x [B, ...] at t, a scalar or [B]."""

    def run(about: About) -> tuple[jax.Array, jax.Array]:
        def eps_fn(x: jax.Array, t: ArrayLike) -> Never:
            raise _Asked(x, jnp.asarray(t, jnp.int32))

        call = template(*about.arguments)
        try:
            _ask(call, eps_fn, about)
        except _Asked as asked:
            return asked.x, asked.t
        raise ValueError(f"expected {_name(call)} to ask the model, got an answer without")

    return jax.jit(run, out_shardings=(sharding, None))  # t is mostly one for all rows


@functools.lru_cache(maxsize=128)
def answer(template: Template, sharding: NamedSharding | None) -> Callable[[About, jax.Array | None], Answer]:
    """What a call of one query per image makes of the network's answer; or one of none, without."""

    def run(about: About, eps: jax.Array | None) -> Answer:
        call = template(*about.arguments)
        return _ask(call, at_most(call, lambda x, t: eps), about)

    return jax.jit(run, out_shardings=sharding)


@functools.lru_cache(maxsize=128)
def whole(
    apply: ApplyFn, template: Template, sharding: NamedSharding | None
) -> Callable[[About, PyTree, PyTree], Answer]:
    """A call in one piece, however often it asks: (about, params, condition) -> its answer."""

    def run(about: About, params: PyTree, condition: PyTree) -> Answer:
        call = template(*about.arguments)

        def eps_fn(x: jax.Array, t: ArrayLike) -> jax.Array:
            return apply(params, x, jnp.asarray(t, jnp.int32), condition)

        try:
            return _ask(call, at_most(call, eps_fn), about)
        except jax.errors.JAXTypeError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"attack {_name(call)!r} says that it is traceable, and cannot be compiled: {reason}"
            ) from error

    return jax.jit(run, out_shardings=sharding, compiler_options=network_options())


@functools.lru_cache(maxsize=128)
def drawn_by(template: Template) -> Callable[[About], frozenset[Drawn]]:
    """What a call of a kind draws, as far as it can be drawn beforehand; found by tracing it once for each shape."""
    known: dict[tuple[int, ...], frozenset[Drawn]] = {}

    def run(about: About) -> frozenset[Drawn]:
        if about.x.shape not in known:
            noted: set[Drawn] = set()

            def trace(about: About) -> Answer:
                draws = _BeforehandDraws(about, noted)
                return _ask(template(*about.arguments), lambda x, t: jnp.zeros_like(x), about, draws)

            jax.eval_shape(trace, about)
            known[about.x.shape] = frozenset(noted)
        return known[about.x.shape]

    return run


@dataclasses.dataclass(frozen=True)
class _BeforehandDraws:
    """The draws of a call: what was drawn beforehand, if it was, and else drawn now.

    Attributes:
      about: what the call is made about.
      noted: gets what might have been drawn beforehand.
    """

    about: About
    noted: set[Drawn] = dataclasses.field(default_factory=set)

    def rademacher(self, index: int, like: jax.Array) -> jax.Array:
        """Sign probe number `index`."""
        return self._find("rademacher", index, like)

    def gaussian(self, index: int, like: jax.Array) -> jax.Array:
        """Gaussian noise number `index`."""
        return self._find("gaussian", index, like)

    def _find(self, kind: str, index: int, like: jax.Array) -> jax.Array:
        about = self.about
        if (like.shape, like.dtype) == (about.x.shape, about.x.dtype):
            for position, argument in enumerate(about.arguments):
                if argument is index:
                    drawn = Drawn(kind, position)
                    self.noted.add(drawn)
                    if drawn in about.drawn:
                        return about.drawn[drawn]
        return getattr(Draws(about.key, about.draw_ids), kind)(index, like)


def _ask(
    call: Call,
    eps_fn: Callable[[jax.Array, ArrayLike], jax.Array],
    about: About,
    draws: Randomness | None = None,
) -> Answer:
    with keeping(about.kept):
        return call.ask(eps_fn, about.schedule, about.x, draws or _BeforehandDraws(about), about.given)


def at_most(call: Call, eps_fn: Callable[[jax.Array, ArrayLike], jax.Array | None]) -> EpsFn:
    """eps_fn for a call, which refuses to be asked more often than the call says it does."""
    asked = 0

    def counted(x: jax.Array, t: ArrayLike) -> jax.Array:
        nonlocal asked
        asked += 1
        if asked > call.queries:
            raise ValueError(
                f"expected {_name(call)} to ask {call.queries} times per image, as it says it does, got {asked}"
            )
        return jnp.asarray(eps_fn(x, t))

    return counted


def _name(call: Call) -> str:
    return call.attack if isinstance(call, Whole) else type(call).__name__
