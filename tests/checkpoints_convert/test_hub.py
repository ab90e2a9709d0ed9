import contextlib
import hashlib
import http.server
import json
import re
import sys
import threading
import urllib.parse

import pytest

from checkpoints_convert import hub
from dime_jax._util.downloads import DownloadError, is_hub_name

pytest.importorskip("huggingface_hub")

COMMIT, OLDER = "c" * 40, "0" * 40
PIPELINE = {
    "model_index.json": b'{"_class_name": "StableDiffusionPipeline"}',
    "README.md": b"readme",
    "v1-5-pruned.ckpt": b"all in one",
    "scheduler/scheduler_config.json": b"{}",
    "unet/config.json": b"{}",
    "unet/diffusion_pytorch_model.safetensors": b"unet",
    "unet/diffusion_pytorch_model.bin": b"unet pickle",
    "unet/diffusion_pytorch_model.fp16.safetensors": b"unet half",
    "unet/diffusion_pytorch_model.non_ema.safetensors": b"unet raw",
    "vae/config.json": b"{}",
    "vae/diffusion_pytorch_model.bin": b"vae pickle",
    "text_encoder/config.json": b"{}",
    "text_encoder/model.safetensors": b"text",
    "text_encoder/flax_model.msgpack": b"flax",
    "tokenizer/vocab.json": b"{}",
    "tokenizer/merges.txt": b"",
    "tokenizer/tokenizer_config.json": b"{}",
    "safety_checker/config.json": b"{}",
    "safety_checker/model.safetensors": b"a gigabyte",
}
WANTED = {
    "model_index.json",
    "scheduler/scheduler_config.json",
    *("unet/config.json", "unet/diffusion_pytorch_model.safetensors"),
    *("vae/config.json", "vae/diffusion_pytorch_model.bin"),
    *("text_encoder/config.json", "text_encoder/model.safetensors"),
    *("tokenizer/vocab.json", "tokenizer/merges.txt", "tokenizer/tokenizer_config.json"),
}


# --- which files ---


def chosen(names):
    return set(hub.needed_files(names))


def test_a_pipeline_gets_one_set_of_weights_for_each_part():
    assert chosen(PIPELINE) == WANTED


def test_variants():
    """Full precision, or half where there is nothing else; no others can be converted."""
    only_half = ["config.json", "diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.fp16.bin"]
    assert chosen(only_half) == set(only_half[:2])
    assert chosen(["diffusion_pytorch_model.fp16.bin", "diffusion_pytorch_model.bf16.safetensors"]) == {
        "diffusion_pytorch_model.fp16.bin"
    }
    with pytest.raises(DownloadError, match="has no weights of a known form"):
        hub.needed_files(["unet/config.json", "unet/diffusion_pytorch_model.bf16.safetensors"])


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["config.json", "diffusion_pytorch_model.bin", "notes.txt"], {"config.json", "diffusion_pytorch_model.bin"}),
        (["my.ckpt", "my.safetensors", "README.md"], {"my.safetensors"}),
        (["cin256.ckpt", "config.yaml"], {"cin256.ckpt"}),
    ],
)
def test_networks_and_single_files(files, wanted):
    assert chosen(files) == wanted


def test_weights_in_several_files_come_with_their_index():
    shards = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = "diffusion_pytorch_model.safetensors.index.json"
    half = ["diffusion_pytorch_model.fp16-00001-of-00001.safetensors"]
    half_index = "diffusion_pytorch_model.safetensors.index.fp16.json"
    pickle = ["diffusion_pytorch_model-00001-of-00001.bin", "diffusion_pytorch_model.bin.index.json"]
    names = [f"unet/{name}" for name in (*shards, index, *half, half_index, *pickle)]
    assert chosen(names) == {f"unet/{name}" for name in (*shards, index)}
    assert chosen(names[3:5]) == {f"unet/{name}" for name in (*half, half_index)}
    older = ["unet/diffusion_pytorch_model-00001-of-00001.fp16.safetensors", f"unet/{half_index}"]
    assert chosen(older) == set(older)


def test_repositories_without_weights():
    for files in ([], ["README.md"], ["model_index.json", "a.ckpt"], ["../model.safetensors", "/model.bin"]):
        with pytest.raises(DownloadError, match="has no weights of a known form"):
            hub.needed_files(files)
    with pytest.raises(DownloadError, match=r"it is not clear which to take: a\.ckpt, b\.ckpt"):
        hub.needed_files(["a.ckpt", "b.ckpt"])


# --- a Hub in miniature ---


class Stub(http.server.BaseHTTPRequestHandler):
    """The four calls of the Hub's protocol that a download makes."""

    def do_GET(self):
        path = urllib.parse.urlsplit(self.path).path
        self.server.log.append((self.command, path))
        if self.server.broken:
            return self.reply(503, b"busy")
        if info := re.fullmatch(r"/api/models/([\w-]+/[\w-]+)(?:/revision/([\w.-]+))?", path):
            return self.info(info[1], info[2] or "main")
        if tree := re.fullmatch(r"/api/models/me/sd/tree/(\w+)", path):
            return self.reply(200, self.tree(self.server.commits[tree[1]]))
        if file := re.fullmatch(r"/me/sd/resolve/(\w+)/(.*)", path):
            return self.file(file[1], urllib.parse.unquote(file[2]))
        return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def info(self, repository, revision):
        if repository == "me/gated":
            return self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        if repository != "me/sd":
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        commit = self.server.revisions.get(revision)
        if commit is None:
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": name} for name in self.server.commits[commit]]
        return self.reply(200, json.dumps({"id": repository, "sha": commit, "siblings": siblings}).encode())

    def tree(self, files):
        entries = [{"type": "file", "path": name, "size": len(files[name]), "oid": etag(files[name])} for name in files]
        return json.dumps(entries).encode()

    def file(self, commit, name):
        if self.server.gated_files:
            return self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        content = self.server.commits[commit][name]
        return self.reply(200, content, {"ETag": f'"{etag(content)}"', "X-Repo-Commit": commit})

    def reply(self, status, body, headers=None):
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


@contextlib.contextmanager
def running(commits=None):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.log, server.broken, server.gated_files = [], False, False
    server.commits = commits or {COMMIT: PIPELINE, OLDER: {**PIPELINE, "unet/config.json": b'{"older": true}'}}
    server.revisions = {"main": COMMIT, "v1": OLDER, COMMIT: COMMIT, OLDER: OLDER}
    server.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def server():
    with running() as server:
        yield server


def fetch(server, cache, name="hf:me/sd"):
    return hub.fetch(name, cache_dir=cache, endpoint=server.endpoint)


def test_fetches_what_is_needed_and_records_the_commit(server, tmp_path):
    model = fetch(server, tmp_path)
    assert model.commit == COMMIT
    assert set(model.files) == WANTED
    there = {path.relative_to(model.directory).as_posix() for path in model.directory.rglob("*") if path.is_file()}
    assert there == WANTED
    for name in WANTED:
        assert (model.directory / name).read_bytes() == PIPELINE[name]
    asked = {path for _, path in server.log}
    assert not any("safety_checker" in path or path.endswith((".ckpt", ".msgpack")) for path in asked)


def test_revisions_are_branches_tags_or_commits(server, tmp_path):
    for revision in ("v1", OLDER):
        model = fetch(server, tmp_path, f"hf:me/sd@{revision}")
        assert model.commit == OLDER
        assert (model.directory / "unet/config.json").read_bytes() == b'{"older": true}'


def test_what_was_fetched_is_found_without_a_network(server, tmp_path):
    before = fetch(server, tmp_path)
    server.broken = True
    assert fetch(server, tmp_path) == before
    server.shutdown()
    server.server_close()
    assert fetch(server, tmp_path) == before
    assert fetch(server, tmp_path, f"hf:me/sd@{COMMIT}") == before


def test_a_half_finished_download_is_not_taken_for_a_model(server, tmp_path):
    (fetch(server, tmp_path).directory / "vae" / "diffusion_pytorch_model.bin").unlink()
    server.broken = True
    with pytest.raises(DownloadError, match="cannot be reached, and the model is not complete in the cache"):
        fetch(server, tmp_path)


def one_line(server, cache, name="hf:me/sd"):
    with pytest.raises(DownloadError) as error:
        fetch(server, cache, name)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert error.value.__suppress_context__ or error.value.__context__ is None
    return str(error.value)


def test_errors_are_one_line_each(server, tmp_path):
    assert one_line(server, tmp_path, "hf:me/absent").startswith("hf:me/absent: no such repository, or a private one")
    assert one_line(server, tmp_path, "hf:me/sd@v9") == "hf:me/sd@v9: has no revision v9"
    assert one_line(server, tmp_path, "hf:me/gated").startswith("hf:me/gated: is gated: accept its terms")
    server.gated_files = True
    assert one_line(server, tmp_path).startswith("hf:me/sd: is gated: accept its terms")


def test_no_network_is_one_line(server, tmp_path):
    server.broken = True
    assert "hf:me/sd: the Hub cannot be reached, and" in one_line(server, tmp_path)
    server.shutdown()
    server.server_close()
    assert "hf:me/sd: the Hub cannot be reached, and" in one_line(server, tmp_path)


def test_a_server_that_answers_nonsense_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(Stub, "info", lambda self, *_: self.reply(200, b"<html>please log in\nto the hotel</html>"))
    with running() as server:
        assert "the Hub cannot be reached" in one_line(server, tmp_path)


def test_a_commit_that_is_none_is_refused(tmp_path):
    with running({"main": PIPELINE}) as server:
        server.revisions = {"main": "main"}
        assert "main" in one_line(server, tmp_path)


@pytest.mark.parametrize(
    "name",
    ["hf:", "hf:sd", "hf:a/b/c", "hf:a/b@", "hf:../b", "hf:a/..", "hf:a/b@../x", "hf:a b/c", "hf:a/b\n", "me/sd"],
)
def test_names_of_another_form(name):
    with pytest.raises(DownloadError, match="Hub names must be hf:owner/name or hf:owner/name@revision") as error:
        hub.fetch(name)
    assert "\n" not in str(error.value)


def test_which_names_ask_for_the_hub(tmp_path):
    assert is_hub_name("hf:me/sd")
    assert not is_hub_name(tmp_path)
    assert not is_hub_name("me/sd")


def test_the_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    with pytest.raises(DownloadError, match=r"hf: names need the extra dime_jax\[latent\], which is not installed"):
        hub.fetch("hf:me/sd")
