"""CLIP's vocabulary as its makers publish it (bpe_simple_vocab_16e6.txt), as Stable Diffusion's folders have it."""

import json
import pathlib

MERGES = 49152 - 256 - 2


def byte_letters():
    """A printable letter for each of the 256 bytes, in the order in which CLIP numbers them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]


def write_folder(folder: pathlib.Path, published: str) -> None:
    """vocab.json and merges.txt from the text of bpe_simple_vocab_16e6.txt."""
    merges = published.split("\n")[1 : MERGES + 1]
    letters = byte_letters()
    words = [merge.replace(" ", "") for merge in merges]
    tokens = [*letters, *(letter + "</w>" for letter in letters), *words, "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")


def write_json(folder: pathlib.Path, **files) -> None:
    """name={...} becomes name.json."""
    for name, contents in files.items():
        (folder / f"{name}.json").write_text(json.dumps(contents), encoding="utf-8")
