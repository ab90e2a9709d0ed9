import csv
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from absl import logging
from miniatures import encoded

from dime_jax import data

CAPTIONS = ["a red cat", "", "žluťoučký kůň", "猫 🐈\nsecond line"]
NAMES = [f"{i}.png" for i in range(4)]


def flat(i):
    return np.full((5, 6, 3), 40 * i % 256, np.uint8)


def write_images(root, names=NAMES):
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encoded(flat(i)))
    return root


def write_jsonl(root, rows, name="metadata.jsonl"):
    (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_csv(root, rows, columns=("file_name", "text")):
    with open(root / "metadata.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])


def write_sidecars(root, names=NAMES, texts=CAPTIONS):
    for name, text in zip(names, texts):
        (root / name).with_suffix(".txt").write_text(text + "\n", encoding="utf-8")


def rows(names=NAMES, texts=CAPTIONS, column="text"):
    return [{"file_name": name, column: text} for name, text in zip(names, texts)]


@pytest.fixture
def warnings(monkeypatch):
    lines = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: lines.append(text % values))
    return lines


# --- folders ---


@pytest.mark.parametrize("column", ["text", "caption"])
def test_jsonl_metadata_gives_each_image_its_own_caption(column, tmp_path, warnings):
    write_jsonl(write_images(tmp_path), rows(column=column)[::-1])
    source = data.open_source(str(tmp_path))
    assert [source[i].caption for i in range(4)] == CAPTIONS
    assert [source[i].id for i in range(4)] == NAMES
    assert warnings == []  # the file that holds captions is not "skipped"


def test_csv_metadata_may_hold_line_breaks_and_commas(tmp_path):
    texts = ["a, b", 'say "cat"', "two\nlines", "x"]
    write_csv(write_images(tmp_path), zip(NAMES, texts))
    assert data.require_captions(data.open_source(str(tmp_path))) == texts


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    text = "file_name,text\r\n" + "".join(f"{name},c\r\n" for name in NAMES)
    (write_images(tmp_path) / "metadata.csv").write_text(text, encoding="utf-8-sig")
    assert data.open_source(str(tmp_path)).captions == ["c"] * 4


def test_sidecars_in_subfolders(tmp_path, warnings):
    names = ["cats/1.png", "cats/2.jpg.png", "dogs/1.PNG", "dogs/2.png"]
    write_sidecars(write_images(tmp_path, names), names)
    (tmp_path / "README.txt").write_text("no caption")
    source = data.open_source(f"folder:{tmp_path}")
    assert source.captions == CAPTIONS
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert len(warnings) == 1
    assert "skipped 1 files" in warnings[0]


def test_metadata_in_subfolders_names_files_beside_it(tmp_path):
    write_images(tmp_path, ["a/1.png", "a/b/2.png", "c/1.png"])
    write_jsonl(tmp_path / "a", [{"file_name": "1.png", "text": "A1"}, {"file_name": "./b/2.png", "text": "A2"}])
    write_jsonl(tmp_path / "c", [{"file_name": "1.png", "text": "C1"}])
    assert data.open_source(str(tmp_path)).captions == ["A1", "A2", "C1"]


def test_caption_column_by_name(tmp_path):
    both = [{"file_name": name, "text": "t", "caption": "c", "blip": "b"} for name in NAMES]
    write_jsonl(write_images(tmp_path), both)
    assert data.open_source(f"folder:{tmp_path}?caption_column=blip").captions == ["b"] * 4
    assert "which of text and caption" in data.open_source(str(tmp_path)).caption_problem


# --- what is missing or too much ---


def test_missing_captions_are_counted_and_the_first_is_named(tmp_path):
    write_jsonl(write_images(tmp_path), [*rows()[:2], {"file_name": "2.png", "text": None}])
    message = r"2 of 4 images .* have no caption, the first is '2\.png'; missing_captions=empty"
    with pytest.raises(ValueError, match=message):
        data.open_source(f"folder:{tmp_path}?captions=own")
    silent = data.open_source(str(tmp_path))
    assert silent.captions is None
    assert silent[0].caption is None
    with pytest.raises(ValueError, match=message):
        data.require_captions(silent)
    filled = data.open_source(f"folder:{tmp_path}?missing_captions=empty")
    assert filled.captions == [*CAPTIONS[:2], "", ""]


def test_an_empty_cell_of_a_csv_file_is_no_caption(tmp_path):
    write_csv(write_images(tmp_path), zip(NAMES, ["a", "b", "", "d"]))
    assert "have no caption, the first is '2.png'" in data.open_source(str(tmp_path)).caption_problem


def test_captions_of_files_that_are_not_there_are_one_line(tmp_path, warnings):
    gone = [{"file_name": f"gone{i}.png", "text": "x"} for i in range(3)]
    write_jsonl(write_images(tmp_path), [*gone, *rows()])
    assert data.open_source(str(tmp_path)).captions == CAPTIONS
    assert [line for line in warnings if "3 captions" in line and "'gone0.png'" in line] == warnings
    assert len(warnings) == 1


def test_folders_without_captions_say_so(tmp_path):
    source = data.open_source(str(write_images(tmp_path)))
    assert source.captions is None
    with pytest.raises(
        ValueError, match=r"has no captions, neither in metadata\.jsonl or metadata\.csv .* nor in .txt files"
    ):
        data.require_captions(source)
    write_jsonl(tmp_path, [{"file_name": name, "objects": [1]} for name in NAMES])  # metadata about something else
    assert "has no captions, neither in" in data.open_source(str(tmp_path)).caption_problem


def test_two_origins_are_not_guessed_between(tmp_path):
    write_jsonl(write_images(tmp_path), rows())
    write_sidecars(tmp_path)
    with pytest.raises(ValueError, match=r"both in metadata\.jsonl and in 4 \.txt files"):
        data.open_source(f"folder:{tmp_path}?captions=own")
    write_csv(tmp_path, zip(NAMES, CAPTIONS))
    with pytest.raises(ValueError, match=r"has two captions for '0\.png'"):
        data.open_source(f"folder:{tmp_path}?captions=own")


def test_none_is_the_empty_caption_for_any_source(tmp_path):
    write_sidecars(write_images(tmp_path))
    assert data.open_source(f"folder:{tmp_path}?captions=none").captions == [""] * 4
    digits = data.open_source("digits", captions="none")
    assert set(digits.captions) == {""}
    with pytest.raises(ValueError, match="the images of digits have no captions"):
        data.open_source("digits", captions="own")
    with pytest.raises(ValueError, match="unknown captions 'mine'; expected one of own, none"):
        data.open_source("digits", captions="mine")
    with pytest.raises(ValueError, match="unknown captions 'mine'; expected one of own, none"):
        data.open_source(f"folder:{tmp_path}?captions=mine")
    with pytest.raises(ValueError, match="unknown missing_captions 'no'"):
        data.open_source(f"folder:{tmp_path}?missing_captions=no")


# --- hostile files ---

DEEP = '{"file_name": "0.png", "text": ' + "[" * 100_000 + "]" * 100_000 + "}"
HOSTILE = {
    "absolute": (
        '{"file_name": "/etc/passwd", "text": "x"}',
        "line 1 names '/etc/passwd', which is not inside the folder",
    ),
    "parent": ('{"file_name": "a/../../0.png", "text": "x"}', "inside the folder"),
    "nul": ('{"file_name": "0.png\\u0000", "text": "x"}', "inside the folder"),
    "twice": (
        '{"file_name": "0.png", "text": "x"}\n{"file_name": "./0.png", "text": "y"}',
        "line 2 names '0.png' a second time",
    ),
    "keys": ('{"file_name": "0.png", "text": "x", "text": "y"}', "the key 'text' occurs twice"),
    "deep": (DEEP, "line 1 is not JSON"),
    "no json": ("file_name,text", "line 1 is not JSON"),
    "list": ("[1]", "line 1 must be a JSON object, got list"),
    "no name": ('{"text": "x"}', "line 1 has no file_name, only 'text'"),
    "number": ('{"file_name": 7, "text": "x"}', "file_name in line 1 must be a string"),
    "long": (
        json.dumps({"file_name": "0.png", "text": "x" * 10_001}),
        "the caption of line 1 must have at most 10000 characters, got 10001",
    ),
    "line": (json.dumps({"file_name": "0.png", "text": "x" * 2**20}), "line 1 has more than 1048576 bytes"),
    "several": (
        '{"file_name": "0.png", "text": ["x", "y"]}',
        "the caption of line 1 must be one string, got a list of 2",
    ),
    "type": ('{"file_name": "0.png", "text": 1}', "the caption of line 1 must be one string, got int"),
    "surrogate": ('{"file_name": "0.png", "text": "\\ud800"}', "half a surrogate pair"),
    "latin": (
        '{"file_name": "0.png", "text": "caf\xe9"}'.encode("latin-1"),
        "line 1 is not UTF-8: it has the byte 0xe9",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_jsonl_is_refused_in_one_line(case, tmp_path):
    content, reason = HOSTILE[case]
    file = write_images(tmp_path) / "metadata.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match="captions in ") as error:
        data.open_source(f"folder:{tmp_path}?captions=own")
    assert reason in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400 + len(str(file))
    # Models that take no captions see the images as ever.
    source = data.open_source(str(tmp_path))
    assert source.caption_problem == str(error.value)
    np.testing.assert_array_equal(source[3].image, flat(3))


HOSTILE_CSV = {
    "cells": ("file_name,text\n0.png,x,y\n", "line 2 must have 2 cells, got 3"),
    "columns": ("file_name,text,text\n0.png,x,y\n", "columns must have different names"),
    "quote": ('file_name,text\n0.png,"' + "x" * 200_000, "is not CSV: field larger"),
    "header": ("0.png,x\n1.png,y\n", "line 2 has no file_name"),
}


@pytest.mark.parametrize("case", HOSTILE_CSV)
def test_hostile_csv_is_refused_in_one_line(case, tmp_path):
    content, reason = HOSTILE_CSV[case]
    (write_images(tmp_path) / "metadata.csv").write_text(content)
    with pytest.raises(ValueError, match=reason):
        data.open_source(f"folder:{tmp_path}?captions=own")


def test_metadata_of_absurd_size_is_refused_unread(tmp_path):
    with open(write_images(tmp_path) / "metadata.jsonl", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"must have at most 1073741824 bytes, got 1099511627776"):
        data.open_source(f"folder:{tmp_path}?captions=own")


def test_sidecars_that_are_no_small_text_files(tmp_path):
    write_sidecars(write_images(tmp_path))
    bad = tmp_path / "1.txt"
    for content, reason in ((b"\xff\xfe", "it is not UTF-8: it has the byte 0xff"), (b"x" * 10_001, "got 10001")):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            data.open_source(f"folder:{tmp_path}?captions=own")
    with open(bad, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="got more than 40008 bytes"):
        data.open_source(f"folder:{tmp_path}?captions=own")
    bad.unlink()
    os.mkfifo(bad)
    with pytest.raises(ValueError, match=r"1\.txt: is a named pipe, not a text file"):
        data.open_source(f"folder:{tmp_path}?captions=own")


@pytest.mark.parametrize("name", ["0.txt", "metadata.jsonl"])
def test_links_that_leave_the_folder_are_not_followed(name, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("password")
    root = write_images(tmp_path / "images")
    (root / name).symlink_to(secret)
    with pytest.raises(ValueError, match="a link that leaves it"):
        data.open_source(f"folder:{root}?captions=own")


def test_the_longest_caption_is_allowed(tmp_path):
    longest = "猫" * 10_000
    write_sidecars(write_images(tmp_path), texts=[longest] * 4)
    assert data.open_source(str(tmp_path)).captions == [longest] * 4


# --- batches, joins and fingerprints ---


def captioned(n=4, texts=CAPTIONS, name="arrays"):
    return data.from_images(np.stack([flat(i) for i in range(n)]), name=name, captions=texts)


def test_batches_carry_captions_and_pad_with_empty_ones():
    source = captioned()
    transform = data.transform_for(source, (5, 6, 3))
    first, second = data.batches(source, 3, transform, num_threads=0)
    assert first.captions == CAPTIONS[:3]
    assert second.captions == [CAPTIONS[3], "", ""]
    (batch,) = data.batches(captioned(texts=None), 4, transform, num_threads=0)
    assert batch.captions is None


def test_a_bad_image_keeps_its_caption_in_its_row(tmp_path):
    names = [f"{i:02d}.png" for i in range(20)]
    write_sidecars(write_images(tmp_path, names), names, "x" * 20)
    (tmp_path / "03.png").write_bytes(b"no image")
    (tmp_path / "03.txt").write_text("of a bad image")
    source = data.open_source(str(tmp_path))
    (batch,) = data.batches(source, 20, data.transform_for(source, (5, 6, 3)))
    assert np.flatnonzero(~batch.mask).tolist() == [3]
    assert batch.captions[3] == "of a bad image"


def test_joined_sources_have_captions_if_both_have():
    joined = data.join(captioned(), captioned(texts=["e", "f", "g", "h"]))
    assert joined.captions == [*CAPTIONS, "e", "f", "g", "h"]
    half = data.join(captioned(), captioned(texts=None, name="uncaptioned"))
    assert half.captions is None
    with pytest.raises(ValueError, match="images of uncaptioned"):
        data.require_captions(half)


def test_sources_check_their_captions():
    with pytest.raises(ValueError, match="captions of arrays must be a list of 4, got 3"):
        captioned(texts=["a", "b", "c"])
    with pytest.raises(ValueError, match="'arrays-00001' of arrays must be one string, got int"):
        captioned(texts=["a", 1, "c", "d"])
    with pytest.raises(ValueError, match="got 10001"):
        captioned(texts=["a", "b", "c", "d" * 10_001])


def test_fingerprints_without_captions_are_what_they_always_were(tmp_path):
    assert data.fingerprint(data.open_source("digits"), range(100)) == "316a54e2f3f15182ed73a114737058c9"
    write_sidecars(write_images(tmp_path))
    assert data.fingerprint(data.open_source(str(tmp_path))) == "53c016706679893f6d307f75fd50bc32"
    assert data.fingerprint(data.open_source(f"folder:{tmp_path}?captions=none")) == "53c016706679893f6d307f75fd50bc32"


def test_fingerprints_with_captions_change_with_any_of_them():
    prints = {
        data.fingerprint(captioned(), captions=True),
        data.fingerprint(captioned(texts=[*CAPTIONS[:3], "other"]), captions=True),
        data.fingerprint(captioned(texts=[CAPTIONS[1], CAPTIONS[0], *CAPTIONS[2:]]), captions=True),
        data.fingerprint(captioned(texts=[""] * 4), captions=True),
        data.fingerprint(captioned()),
    }
    assert len(prints) == 5
    part = data.fingerprint(captioned(), [0, 1], captions=True)
    assert part == data.fingerprint(captioned(texts=[*CAPTIONS[:3], "other"]), [1, 0], captions=True)
    with pytest.raises(ValueError, match="the images of arrays have no captions"):
        data.fingerprint(captioned(texts=None), captions=True)


# --- Parquet ---

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def structs(n=4, paths=NAMES):
    return pa.array([{"bytes": encoded(flat(i)), "path": path} for i, path in zip(range(n), paths)], IMAGE)


def write_parquet(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_parquet_with_structs(tmp_path):
    columns = {"image": structs(), "text": CAPTIONS, "label": [3, 1, 2, 0]}
    source = data.open_source(str(write_parquet(tmp_path / "a.parquet", columns, row_group_size=3)))
    assert list(source.ids) == NAMES
    for i in (3, 0, 2, 1):
        item = source[i]
        np.testing.assert_array_equal(item.image, flat(i))
        assert (item.caption, item.label) == (CAPTIONS[i], columns["label"][i])


def test_parquet_with_plain_bytes_and_other_columns(tmp_path):
    images = [encoded(flat(i)) for i in range(4)]
    file = write_parquet(tmp_path / "a.parquet", {"jpg": pa.array(images, pa.large_binary()), "prompt": CAPTIONS})
    source = data.open_source(f"parquet:{file}?images=jpg&caption_column=prompt")
    assert list(source.ids) == [f"row_{i:05d}" for i in range(4)]
    assert source.captions == CAPTIONS
    assert source.labels is None
    silent = data.open_source(f"parquet:{file}?images=jpg")
    assert "has no column text or caption of captions" in silent.caption_problem
    with pytest.raises(ValueError, match="must have a column 'kind' of labels"):
        data.open_source(f"parquet:{file}?images=jpg&labels=kind")


def test_a_folder_of_parquet_files_is_one_source(tmp_path):
    for part in range(2):
        columns = {
            "image": structs(paths=[f"{part}_{i}.png" for i in range(4)]),
            "text": [f"{part}{c}" for c in CAPTIONS],
        }
        write_parquet(tmp_path / f"train-{part}.parquet", columns, row_group_size=2)
    source = data.open_source(f"parquet:{tmp_path}")
    assert source.ids[5] == "1_1.png"
    assert source.captions == [f"{part}{c}" for part in range(2) for c in CAPTIONS]
    np.testing.assert_array_equal(source[7].image, flat(3))


def test_paths_that_do_not_tell_images_apart_are_no_ids(tmp_path):
    for paths in (["a.png", "a.png", "b", "c"], ["a", None, "b", "c"], ["a", "b", "c", "d" * 1001]):
        source = data.open_source(str(write_parquet(tmp_path / "a.parquet", {"image": structs(paths=paths)})))
        assert list(source.ids) == [f"row_{i:05d}" for i in range(4)]


def test_all_threads_may_read_a_parquet_file(tmp_path):
    n, names = 40, [f"{i}.png" for i in range(40)]
    images = pa.array([{"bytes": encoded(flat(i % 6)), "path": name} for i, name in enumerate(names)], IMAGE)
    source = data.open_source(str(write_parquet(tmp_path / "a.parquet", {"image": images}, row_group_size=3)))
    (batch,) = data.batches(source, n, data.transform_for(source, (5, 6, 3)), num_threads=4)
    np.testing.assert_allclose(batch.images[:, 0, 0, 0], [(i % 6) * 40 / 127.5 - 1 for i in range(n)], atol=1e-6)


def test_images_without_bytes_are_bad_images(tmp_path):
    images = pa.array([None, {"bytes": None, "path": "/etc/passwd"}, {"bytes": b"x", "path": "c"}, None], IMAGE)
    source = data.open_source(str(write_parquet(tmp_path / "a.parquet", {"image": images, "text": CAPTIONS})))
    for i, reason in enumerate(["has no bytes", "has no bytes", "not one of PNG", "has no bytes"]):
        with pytest.raises(data.BadImage, match=reason):
            source[i]


def test_null_captions_of_a_parquet_file(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"image": structs(), "text": ["a", None, "c", None]})
    with pytest.raises(ValueError, match=r"2 of 4 images .* have no caption, the first is '1\.png'"):
        data.open_source(f"parquet:{file}?captions=own")
    assert data.open_source(f"parquet:{file}?missing_captions=empty").captions == ["a", "", "c", ""]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"text": CAPTIONS}, "has no column 'image' of images, only 'text'"),
        ({"image": [1, 2, 3, 4]}, "must be binary or a struct of bytes and path, got int64"),
        ({"image": [["a"]] * 4}, "got list"),
        ({"image": pa.array([{"path": "a"}] * 4)}, "got struct<path: string>"),
        ({"image": structs(), "text": [1, 2, 3, 4]}, "column 'text' of the Parquet file must be text, got int64"),
        ({"image": structs(), "text": [["a", "b"]] * 4}, "must be text, got list"),
        (
            {"image": structs(), "text": ["x" * 10_001] * 4},
            r"the caption of '0\.png' must have at most 10000 characters, got 10001",
        ),
        ({"image": structs(), "text": CAPTIONS, "caption": CAPTIONS}, "which of text and caption"),
    ],
)
def test_wrong_parquet_columns_are_refused(columns, reason, tmp_path):
    file = write_parquet(tmp_path / "a.parquet", columns)
    with pytest.raises(ValueError, match=reason):
        data.open_source(f"parquet:{file}?captions=own")


def test_text_that_is_not_utf8_is_refused(tmp_path):
    latin = pa.Array.from_buffers(pa.string(), 4, pa.array([b"a", b"\xe9", b"c", b"d"], pa.binary()).buffers())
    file = write_parquet(tmp_path / "a.parquet", {"image": structs(), "text": latin})
    with pytest.raises(ValueError, match="column 'text' of the Parquet file cannot be read"):
        data.open_source(f"parquet:{file}?captions=own")


def test_files_that_are_no_parquet(tmp_path):
    good = write_parquet(tmp_path / "good.parquet", {"image": structs(), "text": CAPTIONS}).read_bytes()
    bad = tmp_path / "bad.parquet"
    for content in (
        b"",
        b"PAR1",
        b"PAR1" + bytes(100) + b"PAR1",
        good[:-20],
        good[: len(good) // 2],
        good[:-8] + b"\xff" * 8,
    ):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.parquet is not a Parquet file"):
            data.open_source(str(bad))
    with pytest.raises(ValueError, match="is not a Parquet file or a folder"):
        data.open_source(f"parquet:{tmp_path / 'absent.parquet'}")


def test_damage_inside_a_parquet_file_never_gets_far(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", {"image": structs(), "text": CAPTIONS}, row_group_size=2)
    good, rng, messages = file.read_bytes(), np.random.default_rng(0), []
    for _ in range(200):
        bad = bytearray(good)
        bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
        file.write_bytes(bytes(bad))
        try:
            source = data.open_source(str(file))
            for i in range(len(source)):
                source[i]
        except ValueError as error:  # BadImage is one
            messages.append(str(error))
    assert messages
    assert not any("\n" in message for message in messages)


def test_a_parquet_bomb_stays_small(tmp_path):
    """One image of 16 MB, stored once, stands in a thousand rows: 16 GB, if all were unpacked."""
    image = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1000, np.int32)), pa.array([bytes(16 * 2**20)]))
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1000, np.int32)), pa.array(["x" * 4 * 2**20]))
    table = pa.table({"image": image, "text": text})
    pq.write_table(
        table, tmp_path / "bomb.parquet", compression="zstd", dictionary_pagesize_limit=2**30, store_schema=False
    )
    assert (tmp_path / "bomb.parquet").stat().st_size < 2**20
    script = (
        "import re, sys; from dime_jax import data\n"
        "data.parquet._MAX_ROW_GROUP = 2**28\n"
        "source = data.open_source(sys.argv[1]); print(source.caption_problem)\n"
        "try: source[0]\n"
        "except data.BadImage as error: print(error)\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "bomb.parquet"], capture_output=True, text=True)
    caption, image_line, memory = done.stdout.splitlines()
    assert "at most 10000 characters" in caption
    assert "more than 268435456 bytes" in image_line
    assert int(memory) < 2**20  # kilobytes


def test_large_row_groups_are_refused_by_the_footer(tmp_path, monkeypatch):
    monkeypatch.setattr(data.parquet, "_MAX_ROW_GROUP", 200)
    file = write_parquet(tmp_path / "a.parquet", {"image": structs()})
    with pytest.raises(ValueError, match="write it with smaller ones, such as row_group_size=100"):
        data.open_source(str(file))
    monkeypatch.setattr(data.parquet, "_MAX_ROWS", 3)
    monkeypatch.setattr(data.parquet, "_MAX_ROW_GROUP", 2**20)
    with pytest.raises(ValueError, match="at most 3 rows"):
        data.open_source(str(file))


# --- reduced captions ---


@pytest.mark.parametrize(
    ("caption", "reduced"),
    [
        ("abcdefghi", ("abc", "def", "ghi", "")),
        ("abcdefgh", ("ab", "cde", "fgh", "")),
        ("abcdefg", ("ab", "cd", "efg", "")),
        ("a red cat", ("a r", "ed ", "cat", "")),
        ("猫🐈é", ("猫", "🐈", "é", "")),
        ("ab", ("", "a", "b", "")),
        ("", ("", "", "", "")),
    ],
)
def test_reduced_captions_are_thirds_and_the_empty_one(caption, reduced):
    assert data.reduced_captions(caption) == reduced


def test_reduced_captions_are_those_of_the_published_attack():
    for n in range(200):
        caption = "".join(chr(97 + i % 26) for i in range(n))
        first, second = int(n / 3), int(2 * n / 3)
        assert data.reduced_captions(caption) == (caption[:first], caption[first:second], caption[second:], "")
        assert "".join(data.reduced_captions(caption, 5)) == caption
    with pytest.raises(ValueError, match="parts must be >= 1, got 0"):
        data.reduced_captions("cat", 0)
