"""Datasets of the Hugging Face Hub, asked of a Hub in miniature on this machine."""

import hashlib
import http.server
import io
import json
import re
import threading
import urllib.parse

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dime_jax import data
from dime_jax.data.hub import split_files

pytest.importorskip("huggingface_hub")

COMMIT, OLDER = "a" * 40, "b" * 40


def png(value):
    file = io.BytesIO()
    Image.fromarray(np.full((4, 5, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


def parquet_bytes(values):
    file = io.BytesIO()
    images = [{"bytes": png(value), "path": f"{value}.png"} for value in values]
    pq.write_table(pa.table({"image": images, "label": values, "text": [f"grey {value}" for value in values]}), file)
    return file.getvalue()


FILES = {
    "README.md": b"photos",
    "data/train-00000-of-00002.parquet": parquet_bytes([1, 2]),
    "data/train-00001-of-00002.parquet": parquet_bytes([3]),
    "data/test-00000-of-00001.parquet": parquet_bytes([7, 8]),
}


class Stub(http.server.BaseHTTPRequestHandler):
    """The calls of the Hub's protocol that fetching a dataset makes."""

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.server.log.append(path)
        if info := re.fullmatch(r"/api/datasets/me/photos(?:/revision/(\w+))?", path):
            commit = {None: COMMIT, "main": COMMIT, "old": OLDER}.get(info[1], info[1])
            siblings = [{"rfilename": name} for name in self.server.commits[commit]]
            return self.reply(json.dumps({"id": "me/photos", "sha": commit, "siblings": siblings}).encode())
        if tree := re.fullmatch(r"/api/datasets/me/photos/tree/(\w+)", path):
            files = self.server.commits[tree[1]].items()
            return self.reply(
                json.dumps(
                    [{"type": "file", "path": name, "size": len(body), "oid": etag(body)} for name, body in files]
                ).encode()
            )
        if file := re.fullmatch(r"/datasets/me/photos/resolve/(\w+)/(.*)", path):
            body = self.server.commits[file[1]][file[2]]
            return self.reply(body, {"ETag": f'"{etag(body)}"', "X-Repo-Commit": file[1]})
        return self.reply(b"", {"X-Error-Code": "RepoNotFound"}, status=404)

    do_HEAD = do_GET

    def reply(self, body, headers=None, status=200):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def etag(content):
    return hashlib.sha1(content).hexdigest()


@pytest.fixture(scope="module")
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.commits = {COMMIT: FILES, OLDER: {"old.parquet": parquet_bytes([9])}}
    server.log = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def place(server, tmp_path):
    """The options that lead to this Hub."""
    return {"endpoint": f"http://127.0.0.1:{server.server_port}", "cache_dir": tmp_path}


def test_a_split_is_fetched_and_opened_with_its_labels_and_captions(server, place):
    source = data.open_source("hf:me/photos", **place)
    assert (source.name, source.ids, source.labels.tolist()) == ("hf", ["1.png", "2.png", "3.png"], [1, 2, 3])
    assert source.captions == ["grey 1", "grey 2", "grey 3"]
    assert [item.image[0, 0, 0] for item in (source[i] for i in range(3))] == [1, 2, 3]
    assert not any("test-" in path for path in server.log)
    assert data.open_source("hf:me/photos?split=test", **place).ids == ["7.png", "8.png"]


def test_what_was_fetched_is_found_without_a_network(place):
    before = data.open_source("hf:me/photos", **place)
    away = {**place, "endpoint": "http://127.0.0.1:9"}
    assert data.open_source("hf:me/photos", **away).ids == before.ids
    with pytest.raises(ValueError, match="the Hub cannot be reached, and the dataset is not complete in the cache"):
        data.open_source("hf:me/photos?split=test", **away)


def test_revisions(place):
    assert data.open_source("hf:me/photos@old?split=old", **place).ids == ["9.png"]


def refused(uri, place):
    with pytest.raises(ValueError, match=r"^hf:me/|^Hub names must be hf:") as error:
        data.open_source(uri, **place)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_errors_are_one_line_and_list_what_there_is(place):
    assert refused("hf:me/photos?split=x", place) == "hf:me/photos: has no split 'x', only test, train"
    assert "no such repository" in refused("hf:me/absent", place)
    assert "must be hf:owner/name" in refused("hf:../photos", place)
    assert "has no configuration 'x', only default" in refused("hf:me/photos?config=x", place)


def test_names_of_files_say_configuration_split_and_order():
    shards = [f"plain_text/train-0000{number}-of-00003.parquet" for number in (2, 0, 1)]
    assert split_files(shards, "train") == sorted(shards)
    both = [*shards, "small/train-00000-of-00001-3fa2.parquet"]
    assert split_files(both, "train", "small") == both[-1:]
    with pytest.raises(ValueError, match=r"several configurations: name one with \?config=: plain_text, small"):
        split_files(both, "train")
    with pytest.raises(ValueError, match="has only 2 of the 3 files of the split 'train'"):
        split_files(shards[1:], "train")
    converted = ["default/test/0001.parquet", "default/test/0000.parquet", "default/train/0000.parquet"]
    assert split_files(converted, "test") == sorted(converted[:2])
    assert split_files(["train.parquet", "a.csv"], "train") == ["train.parquet"]
    for others in ([], ["a.csv", "x/../train.parquet", "train-*.parquet"]):
        with pytest.raises(ValueError, match="has no Parquet files"):
            split_files(others, "train")
