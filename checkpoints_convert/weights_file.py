"""Open any weights file, and find one network's tensors in it under the names that its code gave them.

A file holds one set of weights or several: raw ones and their exponential moving average (EMA), under keys of a dict or
prefixes of names. `choose` takes one of them, and never guesses between two that nothing tells apart.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeGuard

import ml_dtypes
import numpy as np
import safetensors

from checkpoints_convert import torch_file
from checkpoints_convert.mapping import StateDict
from checkpoints_convert.torch_pickle import CheckpointError
from dime_jax._util.files import unique
from dime_jax._util.text import listed, printable, shorten

# Parts of names that only say what a network was wrapped in, if all names begin with one.
_WRAPPERS = ("_orig_mod", "module", "model", "net", "net_model", "network", "unet", "diffusion_model", "online_model")
_LIT_EMA_COUNTERS = {"decay", "num_updates"}
_LEVELS = 3  # of dicts around a state dict

_DTYPES = {"I64": np.int64, "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def read(file: Path) -> object:
    """Read a PyTorch or safetensors file, with NumPy arrays that are views on the file in place of tensors."""
    return _read_safetensors(file) if is_safetensors(file) else torch_file.load(file)


def is_safetensors(file: Path) -> bool:
    """Whether it is a safetensors file: unlike PyTorch files, it begins with a length of 8 bytes and a JSON header."""
    with file.open("rb") as stream:
        return file.suffix == ".safetensors" or stream.read(9)[8:] == b"{"


def _read_safetensors(file: Path) -> StateDict:
    """Read a safetensors file's tensors, as views on the mapped file; repeated names and other types are refused."""
    try:
        with safetensors.safe_open(file, framework="numpy"):
            pass  # checks the header: sizes, offsets, no overlap, no gap
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a safetensors file: {error}") from None
    data = np.memmap(file, mode="r", dtype=np.uint8)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    with about(file):
        header = json.loads(data[8:start].tobytes(), object_pairs_hook=unique)
    tensors = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        if info["dtype"] not in _DTYPES:
            expected = ", ".join(_DTYPES)
            raise CheckpointError(f"{file}: {shorten(name)} must be one of {expected}, got {info['dtype']}")
        first, last = info["data_offsets"]
        view = data[start + first : start + last].view(_DTYPES[info["dtype"]])
        tensors[name] = view.reshape(info["shape"])
    return tensors


@contextlib.contextmanager
def about(file: Path) -> Iterator[None]:
    """Name the file in the errors of the block, in one printable line, unless they name one already."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        named = str(error).startswith((f"{file}", f"no file {file}"))
        raise CheckpointError(printable(str(error) if named else f"{file}: {error}")) from None


class WeightSet(NamedTuple):
    """One set of weights in a file.

    Attributes:
      key: where it is in the file; "" if it is all of the file.
      is_ema: whether its key or its names' prefix says that it is an EMA.
      state: the tensors, under names without wrappers' prefixes.
      buffers: tensors beside the network, such as the betas that a training module stores.
    """

    key: str
    is_ema: bool
    state: StateDict
    buffers: StateDict


class ChosenWeights(NamedTuple):
    """The weights that were chosen.

    Attributes:
      file: the weights file.
      contents: all that it holds.
      state: the tensors by name.
      which: "ema", "raw" (beside an EMA, or one of several), or "only" (the file's only set, and it does not say).
      buffers: tensors beside the network.
      facts: a line on the choice, and one on what was left out, where there was a choice.
    """

    file: Path
    contents: object
    state: StateDict
    which: str
    buffers: StateDict
    facts: tuple[str, ...]


def choose(file: Path, contents: object, wanted: str | None) -> ChosenWeights:
    """Choose one set of weights in a file: the one wanted (see `ConversionOptions`), else the EMA, else the only one.

    Args:
      file: the weights file, for the record.
      contents: what `read` found in it.
      wanted: "ema", "raw", a key of the file, or None.

    Raises:
      ValueError: if there is none, or more than one that it could be; the keys that were found are named.
    """
    sets = find_sets(contents)
    if not sets:
        raise ValueError(f"no weights: must hold tensors by name, or a dict of these, got {_held(contents)}")
    chosen = _chosen(sets, wanted, _unreadable_ema(contents, sets))
    which = "ema" if chosen.is_ema else "only" if len(sets) == 1 else "raw"
    others = [other.key for other in sets if other is not chosen]
    facts = []
    if others:
        facts.append(f"weights: {chosen.key}{' (EMA)' if chosen.is_ema else ''}; the file also holds {_listed(others)}")
    if chosen.buffers:
        facts.append(f"not the network's, and left out: {_listed(list(chosen.buffers))}")
    return ChosenWeights(file, contents, chosen.state, which, chosen.buffers, tuple(map(printable, facts)))


def _chosen(sets: list[WeightSet], wanted: str | None, unreadable: str | None) -> WeightSet:
    ema = [one for one in sets if one.is_ema]
    raw = [one for one in sets if not one.is_ema]
    named = [one for one in sets if wanted is not None and one.key == wanted]
    keys = _listed([one.key for one in sets])
    if named:
        return named[0]
    if wanted not in (None, "ema", "raw"):
        raise ValueError(f"has no weights {wanted}: --weights must be ema, raw or a key of the file: {keys}")
    if unreadable is not None and not ema:
        instead = f"give --weights={raw[0].key} to take the others instead"
        raise ValueError(f"the EMA weights under {unreadable} have no names and cannot be read: {instead}")
    if wanted is not None and len(sets) == 1 and not ema:
        raise ValueError(f"holds one set of weights, not marked as EMA or raw: omit --weights={wanted}")
    candidates = {"ema": ema, "raw": raw, None: ema or raw}[wanted]
    if not candidates:
        raise ValueError(f"has no {wanted} weights, only {keys}")
    if len(candidates) > 1:
        marked = "marked as EMA" if candidates is ema else "not marked as EMA"
        names = _listed([one.key for one in candidates])
        raise ValueError(f"holds {len(candidates)} sets of weights {marked}: --weights must be one of {names}")
    return candidates[0]


def find_sets(contents: object) -> list[WeightSet]:
    """Find all sets of weights in a file."""
    if isinstance(contents, (list, tuple)):  # ddim: [model, optimiser, epoch, step] and, if it was kept, the EMA
        contents = {"model": contents[0] if contents else None, "ema": contents[4] if len(contents) == 5 else None}
    return list(_walk("", contents, _LEVELS))


def _walk(key: str, contents: object, levels: int) -> Iterator[WeightSet]:
    if not isinstance(contents, Mapping):
        return
    if is_state_dict(contents):
        yield from _split(key, contents)
    elif levels:
        for name, part in contents.items():
            if isinstance(name, str):  # an optimiser numbers its parameters, and holds tensors by name for each
                yield from _walk(_joined(key, name), part, levels - 1)


def is_state_dict(contents: object) -> TypeGuard[StateDict]:
    """Whether these are tensors by name, at least one, and nothing else."""
    if not isinstance(contents, Mapping) or not contents:
        return False
    return all(isinstance(name, str) and isinstance(tensor, np.ndarray) for name, tensor in contents.items())


def _split(key: str, state: StateDict) -> Iterator[WeightSet]:
    """Return the set of a state dict, or the two of one that holds an EMA beside the network it averages."""
    *_, (state, buffers) = _unwrapped(state)
    prefixes = {name.partition(".")[0] for name in state}
    averages = sorted(prefix for prefix in prefixes if _says_ema(prefix))
    if not averages:
        yield WeightSet(key, _says_ema(key), state, buffers)
        return
    rest = {name: tensor for name, tensor in state.items() if name.partition(".")[0] not in averages}
    for prefix in averages:
        own = [name for name in state if name.startswith(f"{prefix}.")]
        ema: StateDict = {name.partition(".")[2]: state[name] for name in own}
        if not any("." in name for name in ema):
            ema = _with_dots(prefix, ema, rest)
        *_, (ema, ema_buffers) = _unwrapped(ema)
        yield WeightSet(_joined(key, prefix), True, ema, ema_buffers)
    if rest:
        *_, (network, more) = _unwrapped(rest)
        others = prefixes - set(averages)
        yield WeightSet(_joined(key, "raw" if len(others) > 1 else others.pop()), False, network, {**buffers, **more})


def _joined(key: str, prefix: str) -> str:
    return f"{key}.{prefix}" if key else prefix


def _unwrapped(state: StateDict) -> Iterator[tuple[StateDict, StateDict]]:
    """Strip the prefixes that all names of a state dict share, one by one; return it and the buffers beside it.

    The networks here have a dot in every name: what has none belongs to a module around them.
    """
    buffers: dict[str, np.ndarray] = {}
    while True:
        bare = {name for name in state if "." not in name}
        if len(bare) < len(state):
            buffers |= {name: state[name] for name in bare}
            state = {name: tensor for name, tensor in state.items() if name not in bare}
        yield state, buffers
        wrapper = next(iter(state)).partition(".")[0]
        if wrapper not in _WRAPPERS or not all(name.startswith(f"{wrapper}.") for name in state):
            return
        state = {name.removeprefix(f"{wrapper}."): tensor for name, tensor in state.items()}


def _with_dots(prefix: str, ema: StateDict, network: StateDict) -> StateDict:
    """Name an EMA whose names lost their dots (as LitEma stores it) by the network beside it."""
    ema = {name: tensor for name, tensor in ema.items() if name not in _LIT_EMA_COUNTERS}
    for state, _ in _unwrapped(network) if network else ():
        names = {name.replace(".", ""): name for name in state}
        if len(names) == len(state) and ema.keys() <= names.keys():
            return {names[name]: tensor for name, tensor in ema.items()}
    raise ValueError(f"the EMA weights {prefix}.* have names without dots, which no other weights explain one to one")


def _says_ema(key: str) -> bool:
    return "ema" in re.split(r"[^a-z]+", key.lower())


def _unreadable_ema(contents: object, sets: list[WeightSet]) -> str | None:
    """Find a key of the file that says EMA and holds tensors, but not by name."""
    if not isinstance(contents, Mapping) or any(one.is_ema for one in sets):
        return None
    marked = (str(key) for key, value in contents.items() if _says_ema(str(key)) and _has_tensors(value, _LEVELS))
    return next(marked, None)


def _has_tensors(value: object, levels: int) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return levels > 0 and any(_has_tensors(part, levels - 1) for part in parts)


def tensor_names(contents: object) -> Iterator[str]:
    """Return the names of the tensors in a file, as they are."""
    if isinstance(contents, Mapping):
        for part in (contents, *contents.values()):
            if isinstance(part, Mapping):
                yield from (name for name, tensor in part.items() if isinstance(tensor, np.ndarray))


def _held(contents: object) -> str:
    if isinstance(contents, Mapping):
        return f"a dict of {_listed([str(key) for key in contents])}" if contents else "an empty dict"
    return f"a {type(contents).__name__}"


def _listed(names: list[str]) -> str:
    return shorten(listed(sorted(names)), 120)
