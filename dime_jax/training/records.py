"""The log of a run as JSON lines, and its pictures: loss curve and sample sheets."""

import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from dime_jax import models
from dime_jax._util import files
from dime_jax._util.progress import Progress
from dime_jax._util.typing import JsonObject, PyTree
from dime_jax.guards import samples
from dime_jax.report import figures

METRICS = "metrics.jsonl"
PRIVACY_FILE = "privacy.json"  # beside a model of DP-SGD: what it spent
DDIM_STEPS = 20
SHEET_PIXELS = 512
MAX_IN_FLIGHT = 2  # updates handed to the devices beyond the one that is done


class Log:
    """Lines {"step", "loss", "images_per_second"} in DIRECTORY/metrics.jsonl, and progress shown; a context manager.

    The loss of a line is the mean over the updates since the line before, and so is the speed (null for one update).

    Args:
      directory: where.
      first: the update that the run continues after; lines of later ones, written before a kill, are dropped.
      steps: the run's last update.
      batch_size: images in an update.
      silent: show no progress.
    """

    def __init__(self, directory: pathlib.Path, first: int, steps: int, batch_size: int, silent: bool):
        self._path, self._batch_size = directory / METRICS, batch_size
        self._is_main = jax.process_index() == 0
        if self._is_main:
            kept = [line for line in read_records(directory) if line["step"] <= first]
            files.write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._progress = Progress((steps - first) * batch_size, silent or not self._is_main, unit="images")
        self._losses: list[jax.Array] = []
        self._start, self._timed_from, self._compiled = 0.0, 0, False

    def __enter__(self) -> "Log":
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)

    def add(self, loss: jax.Array) -> None:
        """Take the loss of an update, which may still be on its way."""
        self._losses.append(loss)
        if not self._compiled:  # what took time so far is compilation
            loss.block_until_ready()
            self._start, self._timed_from, self._compiled = time.monotonic(), 1, True
            self._progress.compiled()
        if len(self._losses) > MAX_IN_FLIGHT:
            self._losses[-1 - MAX_IN_FLIGHT].block_until_ready()

    def write(self, step: int) -> None:
        """Write the line of the updates since the last one; a loss that is not finite is a ValueError."""
        losses = np.array(jax.device_get(self._losses))
        if not np.all(np.isfinite(losses)):
            bad = step - len(losses) + 1 + int(np.argmin(np.isfinite(losses)))
            raise ValueError(f"the loss must be finite, got {losses[~np.isfinite(losses)][0]} in update {bad}")
        timed, now = len(losses) - self._timed_from, time.monotonic()
        rate = round(timed * self._batch_size / (now - self._start), 1) if timed else None
        line = {"step": step, "loss": float(losses.mean()), "images_per_second": rate}
        if self._is_main:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self._progress.advance(len(losses) * self._batch_size, f"update {step}, loss {line['loss']:.4f}")
        self._losses, self._start, self._timed_from = [], now, 0


def read_records(directory: pathlib.Path) -> list[JsonObject]:
    """The complete lines of metrics.jsonl; none if there is no file."""
    path = directory / METRICS
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def draw_loss(directory: pathlib.Path) -> None:
    """Write loss.png: the mean loss over updates."""
    lines = read_records(directory)
    with figures.style():
        figure, axes = figures.new_figure(1, 1, height=2.4, width=figures.DOUBLE_COLUMN / 2)
        steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
        axes[0, 0].plot(steps, losses, color=figures.SERIES[0].color)
        axes[0, 0].set(xlabel="updates", ylabel="mean squared error", yscale="log")
        figure.savefig(directory / "loss.png")


def draw_samples(path: pathlib.Path, spec: models.ModelSpec, variables: PyTree, count: int) -> None:
    """Write a sheet of DDIM samples, from the same noise each time, so that sheets show one image ripening.

    Args:
      path: of the sheet.
      spec: of the model.
      variables: on the host, not spread over devices: one device samples.
      count: how many.
    """
    denoiser = models.image_denoiser(spec, variables)
    condition = None if denoiser.num_classes is None else [row % denoiser.num_classes for row in range(count)]
    start = jnp.asarray(np.random.default_rng(0).standard_normal((count, *spec.image_shape), np.float32))
    sheet = samples.sample_sheet(samples.ddim_sample(denoiser, start, DDIM_STEPS, condition))
    scale = max(1, SHEET_PIXELS // max(sheet.size))  # whole pixels, so that small images stay sharp
    sheet.resize((scale * sheet.width, scale * sheet.height), Image.Resampling.NEAREST).save(path)
