"""CLIP's tokeniser: captions to the token numbers that the text encoders of latent models take.

Every dialect of tokeniser files is read into the same few things (vocabulary, merges, added tokens, pad token), which
are checked; the pipeline around them is always built here. So a file can name other words, and never other code.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dime_jax._util import validate
from dime_jax._util.files import read_json, read_text
from dime_jax._util.text import one_line
from dime_jax._util.typing import JsonObject
from dime_jax.models.checks import short

if TYPE_CHECKING:
    import tokenizers

START, END = "<|startoftext|>", "<|endoftext|>"
LENGTH = 77
# What a model directory needs of a tokeniser's folder; `open_tokenizer` takes those that are there.
TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.json", "merges.txt"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)

_MAX_BYTES = 2**24  # CLIP's tokenizer.json has 4 MB
_MAX_TOKEN = 256  # characters
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_SPLIT = r"<\|startoftext\|>|<\|endoftext\|>|" + _WORDS
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


class AddedToken(NamedTuple):
    """A token that is found in a caption as it stands, before words are cut into pieces.

    Attributes:
      id: its number; None: the vocabulary's.
      normalized: whether it is looked for after lower-casing.
      special: whether it has a meaning for the model, such as the end of a text.
      lstrip, rstrip: whether it absorbs the spaces before or after it.
      single_word: whether it is found only as a word of its own.
    """

    id: int | None = None
    normalized: bool = False
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class Vocabulary(NamedTuple):
    """What a tokeniser's files say.

    Attributes:
      ids: the number of each token.
      merges: pairs of tokens to join, the most urgent first.
      added: tokens that are never cut, by text; among them the start, the end, `pad` and `unknown`.
      pad: the token that fills a short caption up.
      unknown: the token for letters that the vocabulary does not have.
    """

    ids: Mapping[str, int]
    merges: Sequence[tuple[str, str]]
    added: Mapping[str, AddedToken]
    pad: str = END
    unknown: str = END


class ClipTokenizer(NamedTuple):
    """A tokeniser that is ready to use.

    Attributes:
      backend: the `tokenizers.Tokenizer` that does the work.
      length: tokens per caption.
    """

    backend: "tokenizers.Tokenizer"
    length: int

    def encode(self, captions: Sequence[str]) -> np.ndarray:
        """Token numbers, int32 [B, length]: start, the caption cut to what fits, end, padding.

        Raises:
          ValueError: if captions is not a list of texts.
        """
        if isinstance(captions, str) or not all(isinstance(caption, str) for caption in captions):
            raise ValueError(f"captions must be a list of strings, got {type(captions).__name__}")
        for caption in captions:
            _check_unicode(caption, "captions")
        encodings = self.backend.encode_batch(list(captions))
        return np.array([encoding.ids for encoding in encodings], np.int32).reshape(len(captions), self.length)


def open_tokenizer(folder: pathlib.Path, vocab_size: int, length: int = LENGTH) -> ClipTokenizer:
    """Open the tokeniser of a folder with tokenizer.json, or with vocab.json and merges.txt.

    Args:
      folder: such as the `tokenizer` folder of a Stable Diffusion pipeline.
      vocab_size: how many tokens the text encoder knows; no number may reach it.
      length: tokens per caption.

    Raises:
      ValueError: one line, if a file is damaged, too large, of another kind of tokeniser, without CLIP's special
        tokens, or has numbers that the text encoder does not know; or if the `tokenizers` package is missing.
    """
    try:
        return build_tokenizer(read_vocabulary(folder), vocab_size, length)
    except (ValueError, OSError) as error:
        raise ValueError(one_line(f"tokeniser {folder}: {error}", None)) from None


def read_vocabulary(folder: pathlib.Path) -> Vocabulary:
    """Read what the files of a folder say, checked for form only."""
    if (folder / "tokenizer.json").is_file():
        vocabulary = _from_tokenizer_json(read_json(folder / "tokenizer.json", _MAX_BYTES))
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        merges = _parse_merges(read_text(folder / "merges.txt", _MAX_BYTES))
        vocabulary = Vocabulary(read_json(folder / "vocab.json", _MAX_BYTES), merges, {})
    else:
        raise ValueError("must hold tokenizer.json, or vocab.json and merges.txt")
    return _with_special_tokens(vocabulary, _read_added(folder), _read_special(folder))


def build_tokenizer(vocabulary: Vocabulary, vocab_size: int, length: int = LENGTH) -> ClipTokenizer:
    """Build the tokeniser of a vocabulary, for a text encoder of `vocab_size` tokens; see `open_tokenizer` for errors.

    Args:
      vocabulary: its tokens and merges.
      vocab_size: how many tokens the text encoder knows.
      length: of every encoded text, padded or cut.
    """
    validate.check_at_least(length, 3, "length")
    ids = _checked_ids(vocabulary, vocab_size)
    try:
        import tokenizers
        from tokenizers import models, normalizers, pre_tokenizers, processors
    except ImportError as error:
        raise ValueError(f"captions need the extra dime_jax[latent], which is not installed: {error}") from None
    try:
        merges, unknown = list(vocabulary.merges), vocabulary.unknown
        words = models.BPE(vocab=ids, merges=merges, end_of_word_suffix="</w>", unk_token=unknown)
    except Exception as error:  # the package raises no narrower type
        raise ValueError(f"merges must join tokens of the vocabulary: {error}") from None
    backend = tokenizers.Tokenizer(words)
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(tokenizers.Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_SPLIT), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(START, ids[START]), (END, ids[END])]
    )
    for text, token in vocabulary.added.items():
        add = backend.add_special_tokens if token.special else backend.add_tokens
        flags = {name: value for name, value in token._asdict().items() if name != "id"}
        add([tokenizers.AddedToken(text, **flags)])
    backend.enable_truncation(length)
    backend.enable_padding(length=length, pad_id=ids[vocabulary.pad], pad_token=vocabulary.pad)
    return ClipTokenizer(backend, length)


def _checked_ids(vocabulary: Vocabulary, vocab_size: int) -> dict[str, int]:
    """Return the numbers of all tokens, added ones too: each used once, and known to the text encoder."""
    ids = dict(vocabulary.ids)
    for text, token in vocabulary.added.items():
        number = ids.get(text) if token.id is None else token.id
        if number is not None and ids.setdefault(text, number) != number:
            raise ValueError(f"token {short(text)} must have one number, got {ids.get(text)} and {token.id}")
    for text, number in ids.items():
        if type(number) is not int or not 0 <= number < vocab_size:
            shown = f"{short(str(number))} for {short(text)}"
            raise ValueError(f"tokens must be numbered 0 to {vocab_size - 1}, got {shown}")
        if not 0 < len(text) <= _MAX_TOKEN:
            raise ValueError(f"tokens must have 1 to {_MAX_TOKEN} characters, got {len(text)}")
        _check_unicode(text, "tokens")
    if len(set(ids.values())) < len(ids):
        raise ValueError("tokens must have different numbers, got one twice")
    for text in vocabulary.added:
        if text not in ids:
            raise ValueError(f"the vocabulary has no special token {short(text)}")
    return ids


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} must be valid Unicode, got half a surrogate pair") from None


def _from_tokenizer_json(contents: JsonObject) -> Vocabulary:
    """Read a tokenizer.json, which must describe the pipeline that is built here."""
    model = contents.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise ValueError(f"tokenizer.json must be of the type BPE, as CLIP's is, got {short(str(kind))}")
    wanted: dict[str, tuple[object, ...]] = {
        "end_of_word_suffix": ("</w>",),
        "continuing_subword_prefix": ("", None),
        "dropout": (None, 0),
        "byte_fallback": (False, None),
        "ignore_merges": (False, None),
    }
    for key, values in wanted.items():
        if model.get(key) not in values:
            raise ValueError(f"{key} in tokenizer.json must be CLIP's {values[0]!r}, got {short(str(model.get(key)))}")
    normalizers, splitters = _steps(contents.get("normalizer")), _steps(contents.get("pre_tokenizer"))
    for steps, kinds in ((normalizers, ["NFC", "Replace", "Lowercase"]), (splitters, ["Split", "ByteLevel"])):
        got = [step.get("type") for step in steps]
        if got != kinds:
            raise ValueError(f"steps in tokenizer.json must be CLIP's {', '.join(kinds)}, got {short(str(got))}")
    pattern = splitters[0].get("pattern")
    if pattern not in ({"Regex": _SPLIT}, {"Regex": _WORDS}):
        raise ValueError(f"the pattern of words in tokenizer.json must be CLIP's, got {short(str(pattern))}")
    if not isinstance(model.get("vocab"), dict) or not isinstance(model.get("merges"), list):
        raise ValueError("tokenizer.json must have a vocabulary and merges")
    added = contents.get("added_tokens", [])
    if not isinstance(added, list):
        raise ValueError("added_tokens of tokenizer.json must be a list")
    tokens = dict(_added_token(entry, entry.get("id") if isinstance(entry, dict) else None) for entry in added)
    return Vocabulary(model["vocab"], [_pair(merge) for merge in model["merges"]], tokens)


def _steps(part: object) -> list[JsonObject]:
    """The steps of a sequence in a tokenizer.json."""
    if not isinstance(part, dict):
        return []
    steps = part.get("normalizers", part.get("pretokenizers", [part]))
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _parse_merges(text: str) -> list[tuple[str, str]]:
    lines = text.split("\n")  # not splitlines, which also cuts at letters
    return [_pair(line) for line in (lines[1:] if lines[0].startswith("#version") else lines) if line.strip()]


def _pair(merge: object) -> tuple[str, str]:
    parts = merge.rstrip("\r").split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"a merge must join two tokens, got {short(str(merge))}")
    return parts[0], parts[1]


def _added_token(entry: object, number: int | None) -> tuple[str, AddedToken]:
    """Read a token as JSON files write it: its text alone, or an object with flags."""
    if isinstance(entry, str):
        return entry, AddedToken(number)
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise ValueError(f"a token must be a string, or an object with content, got {short(str(entry))}")
    flags = {name: bool(entry[name]) for name in AddedToken._fields if name != "id" and name in entry}
    return entry["content"], AddedToken(number, **flags)


def _read_added(folder: pathlib.Path) -> dict[str, AddedToken]:
    """Read the tokens that were added to a vocabulary after it was made, such as those of textual inversion."""
    decoder = _read_optional(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    numbers = _read_optional(folder / "added_tokens.json")
    if not isinstance(decoder, dict) or not all(isinstance(number, str) and number.isdecimal() for number in decoder):
        raise ValueError("added_tokens_decoder of tokenizer_config.json must be an object whose keys are numbers")
    found = dict(_added_token(entry, int(number)) for number, entry in decoder.items())
    later = {text: AddedToken(number, normalized=True, special=False) for text, number in numbers.items()}
    return {**later, **found}


def _read_special(folder: pathlib.Path) -> dict[str, tuple[str, AddedToken]]:
    """Read the tokens with a role, by its name, such as "pad_token".

    special_tokens_map.json wins over tokenizer_config.json, unless that is of the newer kind that holds all.
    """
    config = _read_optional(folder / "tokenizer_config.json")
    named = {} if "added_tokens_decoder" in config else _read_optional(folder / "special_tokens_map.json")
    roles = {**config, **named}
    return {role: _added_token(roles[role], None) for role in _NAMED if roles.get(role) is not None}


def _with_special_tokens(
    vocabulary: Vocabulary, added: Mapping[str, AddedToken], special: Mapping[str, tuple[str, AddedToken]]
) -> Vocabulary:
    for role, text in (("bos_token", START), ("eos_token", END)):
        if role in special and special[role][0] != text:
            raise ValueError(f"{role} must be CLIP's {text!r}, got {short(special[role][0])}")
    pad = special["pad_token"][0] if "pad_token" in special else END
    unknown = special["unk_token"][0] if "unk_token" in special else END
    tokens = {START: AddedToken(), END: AddedToken(), **{text: AddedToken() for text in (pad, unknown)}}
    for more in (dict(special.values()), vocabulary.added, added):
        tokens |= more
    return vocabulary._replace(added=tokens, pad=pad, unknown=unknown)


def _read_optional(file: pathlib.Path) -> JsonObject:
    return read_json(file, _MAX_BYTES) if file.is_file() else {}
