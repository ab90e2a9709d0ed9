import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from clip_vocabulary import write_json

from dime_jax.models import clip_tokenizer
from dime_jax.models.clip_tokenizer import open_tokenizer

tokenizers = pytest.importorskip("tokenizers")

TINY = pathlib.Path(__file__).parent / "tiny_clip_tokenizer"
IDS = json.loads((TINY / "vocab.json").read_text(encoding="utf-8"))
SIZE = len(IDS)
START, END = IDS["<|startoftext|>"], IDS["<|endoftext|>"]


def tokens(*texts):
    return [IDS[text] for text in texts]


def row(caption, tokenizer=None, **options):
    """The numbers between the start and the first end, and the rest."""
    found = (tokenizer or open_tokenizer(TINY, SIZE, **options)).encode([caption])[0].tolist()
    assert found[0] == START
    return found[1:]


@pytest.fixture
def folder(tmp_path):
    return pathlib.Path(shutil.copytree(TINY, tmp_path / "tokenizer"))


def as_tokenizer_json(folder):
    """What the package writes for the same tokeniser, in place of vocab.json and merges.txt."""
    contents = json.loads(open_tokenizer(folder, SIZE).backend.to_str())
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    write_json(folder, tokenizer=contents)
    return contents


# --- what CLIP's tokeniser does, by hand ---


@pytest.mark.parametrize(
    ("caption", "pieces"),
    [
        ("", []),
        ("cat", ["cat</w>"]),
        ("The CAT  sat\n", ["the</w>", "cat</w>", "sat</w>"]),  # lower case, any white space
        ("bat", ["b", "at</w>"]),  # merges only
        ("theme", ["th", "e", "m", "e</w>"]),  # "the</w>" ends a word
        ("12", ["1</w>", "2</w>"]),  # digits stand alone
        ("cat's", ["cat</w>", "'", "s</w>"]),
        ("a!!b", ["a</w>", "!", "!</w>", "b</w>"]),
        ("\u00e9", ["Ã©</w>"]),  # é is two bytes,
        ("e\u0301", ["Ã©</w>"]),  # composed or not
        ("猫", ["ç", "Į", "«</w>"]),  # and a letter without a word three
    ],
)
def test_pieces_of_captions(caption, pieces):
    assert row(caption) == [*tokens(*pieces), END, *[END] * (75 - len(pieces))]


def test_long_captions_are_cut_before_the_end_token():
    found = row("cat " * 100)
    assert found == [*tokens(*["cat</w>"] * 75), END]
    assert row("cat " * 100, length=4) == [*tokens("cat</w>", "cat</w>"), END]


def test_batches_are_int32_of_one_shape():
    found = open_tokenizer(TINY, SIZE).encode(["cat", "the red cat sat", ""])
    assert (found.dtype, found.shape) == (np.int32, (3, 77))
    assert open_tokenizer(TINY, SIZE).encode([]).shape == (0, 77)


def test_pad_tokens(folder):
    bang = {"pad_token": "!"}
    assert row("cat", open_tokenizer(folder, SIZE))[-1] == END
    write_json(folder, tokenizer_config={"pad_token": "<|endoftext|>"}, special_tokens_map=bang)
    found = row("cat!", open_tokenizer(folder, SIZE))
    # As in the reference, a pad token is a pad token in a caption too: "!" and not "!</w>".
    assert found == [*tokens("cat</w>", "!"), END, *tokens(*["!"] * 73)]
    write_json(folder, tokenizer_config={"pad_token": "<|endoftext|>", "added_tokens_decoder": {}})
    assert row("cat!", open_tokenizer(folder, SIZE)) == [*tokens("cat</w>", "!</w>"), *[END] * 74]
    write_json(folder, tokenizer_config=bang)
    (folder / "special_tokens_map.json").unlink()
    assert row("cat", open_tokenizer(folder, SIZE))[-1] == IDS["!"]


def test_tokens_of_textual_inversion(folder):
    write_json(folder, added_tokens={"<toy>": SIZE})
    assert row("red <toy>cat", open_tokenizer(folder, SIZE + 1))[:4] == [
        *tokens("red</w>"),
        SIZE,
        *tokens("cat</w>"),
        END,
    ]
    with pytest.raises(ValueError, match=f"tokens must be numbered 0 to {SIZE - 1}, got '{SIZE}'"):
        open_tokenizer(folder, SIZE)


def test_tokenizer_json_and_older_files_are_the_same_tokeniser(folder):
    write_json(folder, special_tokens_map={"pad_token": "!"})
    old = open_tokenizer(folder, SIZE)
    as_tokenizer_json(folder)
    new = open_tokenizer(folder, SIZE)
    captions = ["The red cat!", "", "猫 é 12", "sat " * 100]
    np.testing.assert_array_equal(new.encode(captions), old.encode(captions))
    assert json.loads(new.backend.to_str()) == json.loads(old.backend.to_str())


# --- bad input ---


def test_captions_must_be_a_list_of_texts():
    tokenizer = open_tokenizer(TINY, SIZE)
    for wrong in ("cat", ["cat", None], [b"cat"]):
        with pytest.raises(ValueError, match="captions must be a list of strings"):
            tokenizer.encode(wrong)
    with pytest.raises(ValueError, match="half a surrogate pair"):
        tokenizer.encode(["\ud800"])


def vocab(**changes):
    return json.dumps({**IDS, **changes})


FILES = {
    "larger": ("vocab.json", vocab(zebra=SIZE), f"numbered 0 to {SIZE - 1}"),
    "negative": ("vocab.json", vocab(zebra=-1), "got '-1' for 'zebra'"),
    "float": ("vocab.json", vocab(zebra=1.5), "got '1.5' for 'zebra'"),
    "bool": ("vocab.json", vocab(zebra=True), "got 'True' for 'zebra'"),
    "text": ("vocab.json", vocab(zebra="7" * 999), "got '7777"),
    "twice": ("vocab.json", vocab(zebra=7), "tokens must have different numbers"),
    "long": ("vocab.json", json.dumps({**{k: v for k, v in IDS.items() if v != 7}, "z" * 257: 7}), "got 257"),
    "no end": ("vocab.json", json.dumps({k: v for k, v in IDS.items() if v != END}), "'<|endoftext|>'"),
    "surrogate": (
        "vocab.json",
        json.dumps({**{k: v for k, v in IDS.items() if v != 7}, "\ud800": 7}),
        "half a surrogate pair",
    ),
    "list": ("vocab.json", "[]", "vocab.json: must be a JSON object"),
    "deep": ("vocab.json", "[" * 100_000, "vocab.json: not JSON"),
    "keys": ("vocab.json", '{"a": 1, "a": 2}', "the key 'a' occurs twice"),
    "bytes": ("vocab.json", b"\xff\xfe", "vocab.json: not UTF-8"),
    "merge": ("merges.txt", "#version: 0.2\na b c\n", "a merge must join two tokens, got 'a b c'"),
    "unknown": ("merges.txt", "#version: 0.2\nzz yy\n", "merges must join tokens of the vocabulary"),
    "start": (
        "special_tokens_map.json",
        '{"bos_token": "<s>"}',
        "bos_token must be CLIP's '<|startoftext|>', got '<s>'",
    ),
    "pad": ("special_tokens_map.json", '{"pad_token": "[PAD]"}', "the vocabulary has no special token '[PAD]'"),
    "token": (
        "special_tokens_map.json",
        '{"pad_token": [1]}',
        "a token must be a string, or an object with content, got '[1]'",
    ),
    "decoder": ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}', "an object whose keys are numbers"),
    "added": ("added_tokens.json", '{"<toy>": "x"}', "got 'x' for '<toy>'"),
    "contradiction": ("added_tokens.json", '{"cat</w>": 3}', "token 'cat</w>' must have one number, got"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_lie_are_refused_in_one_line(case, folder):
    name, content, reason = FILES[case]
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"^tokeniser ") as error:
        open_tokenizer(folder, SIZE)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300 + len(str(folder))


def test_absurd_files_are_not_read(folder):
    with open(folder / "merges.txt", "ab") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"merges\.txt must have at most 16777216 bytes, got "):
        open_tokenizer(folder, SIZE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda contents: contents["model"].update(type="WordPiece"), "of the type BPE, as CLIP's is, got 'WordPiece'"),
        (lambda contents: contents.update(model=None), "of the type BPE, as CLIP's is, got 'None'"),
        (
            lambda contents: contents["model"].update(end_of_word_suffix=None),
            "end_of_word_suffix in tokenizer.json must be CLIP's '</w>'",
        ),
        (lambda contents: contents["model"].update(dropout=0.5), "dropout in tokenizer.json must be CLIP's None"),
        (
            lambda contents: contents.update(normalizer=None),
            "steps in tokenizer.json must be CLIP's NFC, Replace, Lowercase",
        ),
        (
            lambda contents: contents.update(normalizer={"type": "Precompiled"}),
            "steps in tokenizer.json must be CLIP's NFC, Replace, Lowercase",
        ),
        (
            lambda contents: contents.update(pre_tokenizer={"type": "ByteLevel"}),
            "steps in tokenizer.json must be CLIP's Split, ByteLevel",
        ),
        (
            lambda contents: contents["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "(a+)+$"}),
            "the pattern of words in tokenizer.json must be CLIP's",
        ),
        (lambda contents: contents["model"].update(vocab=[]), "tokenizer.json must have a vocabulary and merges"),
        (lambda contents: contents["model"].update(merges=[["a"]]), "a merge must join two tokens"),
        (lambda contents: contents.update(added_tokens={}), "added_tokens of tokenizer.json must be a list"),
        (
            lambda contents: contents.update(added_tokens=[{"id": 1}]),
            "a token must be a string, or an object with content, got",
        ),
        (lambda contents: contents["added_tokens"].append({"id": SIZE, "content": "x" * 9}), "numbered 0 to"),
    ],
)
def test_other_kinds_of_tokenizer_json_are_refused(change, reason, folder):
    contents = as_tokenizer_json(folder)
    open_tokenizer(folder, SIZE)
    change(contents)
    write_json(folder, tokenizer=contents)
    with pytest.raises(ValueError, match=r"^tokeniser ") as error:
        open_tokenizer(folder, SIZE)
    assert reason in str(error.value)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"must hold tokenizer\.json, or vocab\.json and merges\.txt"):
        open_tokenizer(tmp_path, SIZE)


def test_the_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"captions need the extra dime_jax\[latent\], which is not installed"):
        open_tokenizer(TINY, SIZE)


def test_importing_the_module_does_not_import_the_package():
    script = "import sys; from dime_jax.models import clip_tokenizer; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_names_of_files_for_model_directories():
    assert {"tokenizer.json", "vocab.json", "merges.txt"} < set(clip_tokenizer.TOKENIZER_FILES)
