"""Damages every file of finished and unfinished work in a process of its own, since a native reader may abort it.

python damaged_files.py DIRECTORY prints one JSON line for each case: what was done, the exit code and what was said.
"""

import contextlib
import functools
import io
import json
import pathlib
import random
import shutil
import sys

import numpy as np

import dime_jax as dj
from dime_jax import auditing, cli, scoring
from dime_jax.auditing import models
from dime_jax.guards import model_check
from dime_jax.loading import opening
from dime_jax.report import html

SHAPE = (4, 4, 1)
TABLE = ("manifest.json", "schedule.npz", "scores.parquet", "queries-0.bin")
RUN = ("run.json", "halves.npz", "calibration.json")
ATTACKS = ("--attacks", "sima_l4", "dime", "--queries", "3")
FLIPS = 2
INTRODUCTION = "model mine (a test)\n"


def table(name, files=TABLE):
    return [f"{name}/{file}" for file in files]


CASES = {  # what the command reads
    "report": ["audit.json", "audit.npz", *RUN, *table("calibration"), *table("test"), *table("candidates/sima_l4@1")],
    "comparison": ["compare.json", "compare.npz", *table("before"), *table("after")],
    "evaluate": [*RUN, *table("calibration"), *table("test")],
    "finished": [*RUN, "calibration/manifest.json", *table("test")],
    "unfinished": [
        *("run.json", "halves.npz"),
        *table("calibration", ("manifest.json", "schedule.npz", "queries-0.bin", "shards/0.json")),
        *table("calibration", ("shards/0-000000.parquet", "shards/0-000003.parquet")),
    ],
}


def model(seed, calls=None):
    """A plain function that fails after so many calls."""
    count = 0

    def eps(x, t):
        nonlocal count
        count += 1
        if calls is not None and count > calls:
            raise ValueError("the model was asked")
        return np.tanh(np.asarray(x) * (1 + seed + t / 100))

    return dj.Denoiser.from_function(eps, dj.linear_schedule(1000, 1e-4, 0.02 + 0.01 * seed), SHAPE, name="mine")


def use(denoiser):
    """What the command line opens from now on; `auditing.audit` opens what it is given."""
    models.open_models = lambda config: (opening.OpenedModel(denoiser, "a test"), None)


def run(*arguments):
    """The exit code of a command, and what it wrote to standard error and output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([str(argument) for argument in arguments])
    return code, err.getvalue().removeprefix(INTRODUCTION), out.getvalue()


def command(kind, directory, images, seed=0):
    roles = ("--members", images / "members.npz", "--heldout", images / "heldout.npz")
    score = ("score", directory, "--model", "any", *roles, *ATTACKS, "--seed", seed)
    return {
        "report": ("report", directory),
        "comparison": ("report", directory),
        "evaluate": ("evaluate", directory),
        "finished": (*score, "--half", "test"),
        "unfinished": score,
    }[kind]


def make(directory, images, seed):
    """An audit, a comparison, a finished run and one that failed after four of its shards."""
    images.mkdir()
    rng = np.random.default_rng(seed)
    for name in ("members", "heldout", "candidates"):
        np.savez(images / f"{name}.npz", images=rng.integers(0, 256, (24 + 2 * seed, *SHAPE), dtype=np.uint8))
    sources = {name: str(images / f"{name}.npz") for name in ("members", "heldout", "candidates")}
    settings = {"attacks": ("sima_l4", "dime"), "queries": (3,), "seed": seed}
    settings["options"] = scoring.ScoringOptions(silent=True)
    audit = auditing.AuditConfig(directory / "report", model(seed), **sources, decide_with="sima_l4@1", **settings)
    auditing.audit(audit)
    del sources["members"]
    after = dj.Denoiser.from_function(lambda x, t: np.asarray(x), model(seed).schedule, SHAPE, name="after")
    auditing.compare(auditing.AuditConfig(directory / "comparison", model(seed), **sources, **settings), after)
    use(model(seed))
    score = command("unfinished", directory / "finished", images, seed)
    for stage in (score, ("calibrate", directory / "finished"), (*score, "--half", "test")):
        code, error, _ = run(*stage)
        assert code == 0, error
    shutil.copytree(directory / "finished", directory / "evaluate")
    heldout = dj.data.open_source(sources["heldout"])
    (directory / "unfinished").mkdir()
    model_check.check_once(directory / "unfinished", model(seed), heldout, np.arange(len(heldout)), seed=seed)
    use(model(seed, calls=14))
    options, scoring.ScoringOptions = (
        scoring.ScoringOptions,
        functools.partial(scoring.ScoringOptions, shard_seconds=0.0),
    )
    code, error, _ = run(*command("unfinished", directory / "unfinished", images, seed), "--micro_batch", 4)
    scoring.ScoringOptions = options
    assert (code, "the model was asked" in error) == (2, True), error


def damages(path, other, rng):
    """Name and contents, None for no file, of everything that may happen to a file."""
    content = path.read_bytes()
    for position in {0, len(content) - 1, *(rng.randrange(len(content)) for _ in range(FLIPS))}:
        flipped = bytearray(content)
        flipped[position] ^= 1 << rng.randrange(8)
        yield f"bit flipped at {position}", bytes(flipped)
    for size in (0, len(content) // 2, len(content) - 1):
        yield f"cut to {size}", content[:size]
    yield "missing", None
    yield "of another run", other.read_bytes()


def unsealed(directory):
    """Take the digests out of all JSON files."""
    for path in directory.rglob("*.json"):
        contents = json.loads(path.read_text())
        path.write_text(json.dumps({name: contents[name] for name in contents.keys() - {"digests", "digest"}}))


def files_in(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"}


def main(directory):
    model_check.IMAGES = 2
    html.write_report = html.write_comparison = lambda *arguments: directory / "report.html"  # figures take seconds
    cli.build_parser = functools.cache(cli.build_parser)
    rng, images = random.Random(0), directory / "one images"
    for name in ("one", "other"):
        (directory / name).mkdir()
        make(directory / name, directory / f"{name} images", int(name == "other"))

    def try_it(kind, file, damage):
        code, error, out = run(*command(kind, directory / "one" / kind, images))
        print(json.dumps({"kind": kind, "file": file, "damage": damage, "code": code, "error": error, "out": out}))

    for kind, files in CASES.items():
        whole, other = directory / "one" / kind, directory / "other" / kind
        use(model(0, calls=0))
        before = files_in(whole)
        for file in files:
            for damage, content in damages(whole / file, other / file, rng):
                (whole / file).unlink() if content is None else (whole / file).write_bytes(content)
                try_it(kind, file, damage)
                (whole / file).write_bytes(before[whole / file])
        assert files_in(whole) == before, f"{kind} has written something"
        use(model(0))
        shutil.copytree(whole, directory / "kept")
        try_it(kind, "", "none")
        shutil.rmtree(whole)
        (directory / "kept").rename(whole)
        unsealed(whole)
        try_it(kind, "", "no digests")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
