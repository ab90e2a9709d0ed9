"""Latent models as Denoisers: images become latents, captions become text embeddings, and the rest is as for any model.

A text-conditioned model offers the conditions "own" (the image's caption), "empty" (the empty one), and "part_1" to
"part_3" (the caption cut in three, see `data.captions.reduced_captions`).
"""

import functools
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dime_jax import models
from dime_jax._util.typing import PyTree
from dime_jax.core.denoiser import EMPTY, OWN, PARTS, PRECISION, TEXT_CONDITIONS, Denoiser, EncodeFn, MaskFn
from dime_jax.core.draws import Draws
from dime_jax.data.captions import reduced_captions
from dime_jax.loading.conversion import NO_USE_OPTIONS, UseOptions
from dime_jax.loading.model_directory import StoredModel
from dime_jax.models import ClipTextSpec, ModelSpec
from dime_jax.models.clip_tokenizer import ClipTokenizer, open_tokenizer
from dime_jax.models.pullback import most_visible, pullback_diagonal

_EMBEDDED_TOGETHER = 8
_CACHE_BYTES = 2**30


class LatentDenoiser(Denoiser):
    """A latent model; see the module. `decode` shows what a latent is. `reload` reads the model's variables again."""

    def __init__(
        self,
        model: StoredModel,
        options: UseOptions = NO_USE_OPTIONS,
        reload: Callable[[], PyTree] | None = None,
    ):
        spec = model.spec
        text = spec.text_encoder
        self._tokenizer = None if text is None else _open_tokenizer(model, text)
        self._spec, self._options = spec, options
        self._embedded: OrderedDict[str, np.ndarray] = OrderedDict()
        super().__init__(
            _on("denoiser", models.denoise(spec)),
            _held(model.variables, options.hold),
            spec.schedule.build(),
            spec.image_shape,
            shape=spec.shape,
            num_classes=spec.num_classes,
            condition_shape=None if text is None else jax.ShapeDtypeStruct((text.max_tokens, text.width), jnp.float32),
            conditions=(OWN,) if text is None else TEXT_CONDITIONS,
            encode=_encode(spec, options.latent),
            mask=_mask(spec) if options.latent_weighting == "pullback" else None,
            embed=None if text is None else self._embed_captions,
            fingerprint=_fingerprint(model.fingerprint, options),
            name=model.name,
            reload=None if reload is None else lambda: _held(reload(), options.hold),
        )

    def describe_use(self) -> str:
        """In words, how it is asked."""
        latents = {"mean": "the mean", "sample": "a sample"}[self._options.latent]
        most_visible = "the 60 % of them that the decoder shows most count"
        counted = {"none": "all their coordinates count", "pullback": most_visible}[self._options.latent_weighting]
        return f"latents: {latents} of the autoencoder's posterior; {counted}; no classifier-free guidance"

    @property
    def takes_text(self) -> bool:
        """Whether captions condition it, and not classes."""
        return self._tokenizer is not None

    def conditions_for(self, labels: np.ndarray | None, captions: Sequence[str] | None) -> Mapping[str, PyTree]:
        """Return as `Denoiser` does; captions are embedded when they are asked for, each text once.

        Raises:
          ValueError: if captions are needed and there are none.
        """
        if self._tokenizer is None:
            return super().conditions_for(labels, captions)
        if captions is None:
            raise ValueError(f"{self.name} takes captions: give one for each image, or --captions none")
        return _Lazy({name: functools.partial(self._condition, name, captions) for name in self.conditions})

    def decode(self, latents: jax.Array) -> jax.Array:
        """Images [B, *image_shape] of latents [B, *shape], about in [-1, 1]."""
        assert self._spec.autoencoder is not None
        return _jitted("autoencoder", models.decode(self._spec.autoencoder))(self.params, latents)

    def _condition(self, name: str, captions: Sequence[str]) -> PyTree:
        if name in PARTS:
            captions = [reduced_captions(caption)[PARTS.index(name)] for caption in captions]
        return self.embed([""] * len(captions) if name == EMPTY else captions)

    def _embed_captions(self, params: PyTree, captions: Sequence[str]) -> jax.Array:
        """[B, tokens, width]; texts that were embedded before are taken from memory, of which at most 1 GB is used."""
        found = {text: self._embedded[text] for text in dict.fromkeys(captions) if text in self._embedded}
        new = [text for text in dict.fromkeys(captions) if text not in found]
        for start in range(0, len(new), _EMBEDDED_TOGETHER):
            texts = new[start : start + _EMBEDDED_TOGETHER]
            found.update(zip(texts, self._embed_few(params, texts)))
        self._remember(found)
        return jnp.asarray(np.stack([found[text] for text in captions]))

    def _embed_few(self, params: PyTree, texts: Sequence[str]) -> np.ndarray:
        """In batches of one shape: one compilation, and nothing depends on which texts come together."""
        assert self._tokenizer is not None
        assert self._spec.text_encoder is not None
        tokens = self._tokenizer.encode([*texts, *[""] * (_EMBEDDED_TOGETHER - len(texts))])
        with jax.default_matmul_precision(PRECISION):
            embed = _jitted("text_encoder", models.embed_tokens(self._spec.text_encoder))
            return np.asarray(embed(params, tokens))[: len(texts)]

    def _remember(self, found: Mapping[str, np.ndarray]) -> None:
        for text, embedding in found.items():
            self._embedded[text] = embedding
            self._embedded.move_to_end(text)
        while sum(embedding.nbytes for embedding in self._embedded.values()) > _CACHE_BYTES:
            self._embedded.popitem(last=False)


class _Lazy(Mapping[str, PyTree]):
    """Values that are computed when they are asked for."""

    def __init__(self, values: Mapping[str, Callable[[], PyTree]]):
        self._values = values

    def __getitem__(self, name: str) -> PyTree:
        return self._values[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def describe_memory(spec: ModelSpec, hold: str = "float32") -> str:
    """A line on the memory that a model's weights take, from their shapes alone."""
    values = models.count_values(models.model_shapes(spec))
    held, read = values * jnp.dtype(hold).itemsize, values * 4
    reading = "" if held == read else f", and {describe_size(read)} more while they are read"
    return f"{values:,} weights take {describe_size(held)} of memory in {hold}{reading}; a call's images come on top"


def describe_size(count: int) -> str:
    """Return a number of bytes in words."""
    return f"{count / 1e9:.1f} GB" if count >= 5e7 else f"{count / 1e6:.1f} MB"


def _open_tokenizer(model: StoredModel, text: ClipTextSpec) -> ClipTokenizer:
    if not model.tokenizer_files:
        raise ValueError(f"{model.name} has a text encoder, but no files of a tokenizer beside it")
    return open_tokenizer(model.tokenizer_files[0].parent, text.vocabulary, text.max_tokens)


def _held(variables: PyTree, hold: str) -> PyTree:
    dtype = jnp.dtype(hold)
    held = jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else jnp.asarray(leaf, dtype), variables)
    if hold == "float16" and not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(held)):
        raise ValueError("some weights are too large for float16: hold them in bfloat16 or float32")
    return held


def _float32(variables: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), variables)


def _fingerprint(model: str, options: UseOptions) -> str:
    """The model's own at the usual options; another one for each other way to use it. (Weights have LoRAs merged.)"""
    chosen, usual = ([one.latent, one.latent_weighting, one.hold] for one in (options, NO_USE_OPTIONS))
    return model if chosen == usual else hashlib.sha256(json.dumps([model, *chosen]).encode()).hexdigest()


@functools.lru_cache(maxsize=32)
def _on(part: str, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of one network's variables as one of all variables, held in whatever type."""
    return lambda params, *arguments: function(_float32(params[part]), *arguments)


@functools.lru_cache(maxsize=32)
def _jitted(part: str, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return jax.jit(_on(part, function))


@functools.lru_cache(maxsize=32)
def _encode(spec: ModelSpec, kind: str) -> EncodeFn:
    assert spec.autoencoder is not None
    encode = models.encode(spec.autoencoder)

    def run(params: PyTree, pixels: jax.Array, draws: Draws) -> jax.Array:
        shape = (len(pixels), *spec.shape)
        noise = draws.latent(jnp.zeros(shape, jnp.float32)) if kind == "sample" else None
        return encode(_float32(params["autoencoder"]), pixels, noise)

    return run


@functools.lru_cache(maxsize=32)
def _mask(spec: ModelSpec) -> MaskFn:
    assert spec.autoencoder is not None
    decode = models.decode(spec.autoencoder)

    def run(params: PyTree, x: jax.Array, draws: Draws) -> jax.Array:
        variables = _float32(params["autoencoder"])

        def mask_one(one: tuple[jax.Array, jax.Array]) -> jax.Array:
            x, id = one
            own = Draws(draws.key, id[None])
            diagonal = pullback_diagonal(
                functools.partial(decode, variables), x[None], lambda index: own.pullback(index, spec.image_shape)
            )
            return most_visible(diagonal[0])

        return jax.lax.map(mask_one, (x, draws.ids))  # one by one: what a decoder keeps to be differentiated is large

    return run
