"""Live comparison with transformers' CLIPTokenizer, with CLIP's real vocabulary from a wheel that carries it.

Run with `make parity`; needs transformers, and the package registry for the vocabulary, which is kept in .cache.
"""

import gzip
import json
import pathlib
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from dime_jax.models import clip_tokenizer

sys.path.append(str(pathlib.Path(__file__).parents[1] / "models"))
from clip_vocabulary import write_folder, write_json

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity

CACHE = pathlib.Path(__file__).parents[2] / ".cache" / "clip_vocabulary"
VOCAB_SIZE = 49408

CAPTIONS = [
    "",
    " ",
    "a photo of a cat",
    "A PHOTO OF A CAT",
    "  many   spaces\tand\nlines \r\n here ",
    "it's the dog's, they're we've I'm you'll he'd don't",
    "IT'S THE DOG'S, THEY'RE",
    "curly it’s the dog’s",
    "2024 was 1,000,000.50 years ago; 3rd 4th 5e-7",
    "hello!",
    "hello! world!! wow!!!",
    "!",
    "!!!!",
    "a-b_c/d\\e@f#g$h%i^j&k*l(m)n+o=p[q]r{s}t|u;v:w<x>y?z~`\"'",
    "naïve café, jalapeño, über, Ångström",
    "cafe\u0301 decomposed A\u030angstro\u0308m",
    "İstanbul ISTANBUL ıstanbul",
    "ΣΊΣΥΦΟΣ σίσυφος Ελληνικά",
    "Привет, мир! Съешь ещё этих мягких французских булок",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "zażółć gęślą jaźń",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "வணக்கம் உலகம்",
    "გამარჯობა მსოფლიო",
    "ሰላም ልዑል",
    "日本の猫の写真です。",
    "一只红色的猫坐在垫子上",
    "안녕하세요 세계",
    "ｆｕｌｌ ｗｉｄｔｈ ＡＢＣ１２３",
    "emoji 🐈 👩‍👩‍👧‍👦 🇨🇿 👍🏽 ❤️",
    "math ∑∫√≠≤ ℝ ½ ² ₃ Ⅷ ①",
    "currency €£¥₹ © ® ™",
    "zero\u200bwidth\u200djoiner\ufeffbom",
    "non\u00a0breaking\u2003em\u3000ideographic space",
    "control \x00\x01\x07\x1b[31m characters",
    "private \ue000 and unassigned \U000e0001 and last \U0010ffff",
    "line\u2028separator\u0085next",
    "<|startoftext|> in a caption <|endoftext|> goes on",
    "<|ENDOFTEXT|> upper case",
    "<html><b>bold</b>&amp;</html>",
    "https://example.com/a?b=c&d=%20#x user@example.com",
    "snake_case camelCase PascalCase kebab-case",
    "word" * 200,
    "word " * 200,
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "a, b. c! d? e; f: g",
    "the quick brown fox jumps over the lazy dog " * 3 + "end",
    " ".join(str(i) for i in range(75)),
    " ".join("a" for _ in range(75)),
    " ".join("a" for _ in range(76)),
    "猫" * 100,
    "ß ẞ ŉ ǰ ﬁ ﬂ ﬀ",
    "tab\tseparated\tvalues",
    "a red <cat-toy> on a table",
    "a red <CAT-TOY> on a table, in the style of sks",
    "x\u0301\u0302\u0303 stacked accents",
    "ｶﾞ half width katakana",
    "a portrait, trending on artstation, 8k, f/1.8, --ar 16:9 (masterpiece:1.2), [low quality]",
]


@pytest.fixture(scope="module")
def vocabulary():
    """A folder with vocab.json and merges.txt of CLIP."""
    folder = CACHE / "tokenizer"
    if not (folder / "merges.txt").is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(CACHE),
            "open_clip_torch",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = sorted(CACHE.glob("open_clip_torch*.whl"))
        if not wheels:
            pytest.skip(f"CLIP's vocabulary cannot be had: {done.stderr.strip()[-200:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            write_folder(folder, gzip.decompress(wheel.read("open_clip/bpe_simple_vocab_16e6.txt.gz")).decode())
    return folder


def token(content, **flags):
    return {"content": content, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False, **flags}


START, END = token("<|startoftext|>"), token("<|endoftext|>")
SD1 = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": "<|endoftext|>"}
SD2 = {**SD1, "pad_token": "!"}
FOLDERS = {
    "bare": {},
    "sd1": {"tokenizer_config": {**SD1, "tokenizer_class": "CLIPTokenizer"}, "special_tokens_map": SD1},
    "sd2": {"tokenizer_config": {**SD1, "tokenizer_class": "CLIPTokenizer"}, "special_tokens_map": SD2},
    "newer": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                "0": token("!", special=True, normalized=False),
                "49406": token("<|startoftext|>", special=True),
                "49407": token("<|endoftext|>", special=True, normalized=False),
            },
            **{"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "!"},
            **{"unk_token": "<|endoftext|>", "tokenizer_class": "CLIPTokenizer"},
        },
        "special_tokens_map": SD1,
    },
    "inversion": {"tokenizer_config": SD1, "special_tokens_map": SD1, "added_tokens": {"<cat-toy>": 49408}},
}


def folder_of(case, vocabulary, tmp_path):
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((vocabulary / name).read_bytes())
    write_json(tmp_path, **FOLDERS[case])
    return tmp_path


def compare(folder, reference):
    ours = clip_tokenizer.open_tokenizer(folder, VOCAB_SIZE + 1)
    theirs = reference(CAPTIONS, padding="max_length", max_length=77, truncation=True)["input_ids"]
    for caption, found, expected in zip(CAPTIONS, ours.encode(CAPTIONS).tolist(), theirs):
        assert found == expected, caption
    return ours


@pytest.mark.parametrize("case", FOLDERS)
def test_agrees_with_transformers(case, vocabulary, tmp_path):
    assert len(set(CAPTIONS)) >= 50
    folder = folder_of(case, vocabulary, tmp_path)
    ours = compare(folder, transformers.CLIPTokenizer.from_pretrained(folder))
    pad = ours.encode([""])[0, -1]
    assert pad == (0 if case in ("sd2", "newer") else 49407)


@pytest.mark.parametrize("case", FOLDERS)
def test_agrees_on_folders_that_transformers_wrote(case, vocabulary, tmp_path):
    (tmp_path / "old").mkdir()
    reference = transformers.CLIPTokenizer.from_pretrained(folder_of(case, vocabulary, tmp_path / "old"))
    reference.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new" / "vocab.json").exists()
    before = clip_tokenizer.open_tokenizer(tmp_path / "old", VOCAB_SIZE + 1)
    after = compare(tmp_path / "new", reference)
    np.testing.assert_array_equal(after.encode(CAPTIONS), before.encode(CAPTIONS))


def test_the_real_vocabulary_has_its_known_numbers(vocabulary):
    """The numbers that every user of CLIP knows by heart."""
    ids = json.loads((vocabulary / "vocab.json").read_text())
    assert len(ids) == VOCAB_SIZE
    assert (ids["!"], ids["<|startoftext|>"], ids["<|endoftext|>"]) == (0, 49406, 49407)
    found = clip_tokenizer.open_tokenizer(vocabulary, VOCAB_SIZE).encode(["a photo of a cat"])[0]
    assert found[:7].tolist() == [49406, 320, 1125, 539, 320, 2368, 49407]
