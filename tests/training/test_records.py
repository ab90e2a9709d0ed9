"""The log: means, what is dropped when a run continues, and losses that are not finite."""

import json

import jax.numpy as jnp
import pytest

from dime_jax.training import records


def written(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_line_is_the_mean_since_the_last(tmp_path):
    with records.Log(tmp_path, first=0, steps=4, batch_size=8, silent=True) as log:
        for step, loss in enumerate([1.0, 3.0, 5.0, 9.0], start=1):
            log.add(jnp.float32(loss))
            if step % 2 == 0:
                log.write(step)
    lines = written(tmp_path)
    assert [(line["step"], line["loss"]) for line in lines] == [(2, 2.0), (4, 7.0)]
    assert all(line["images_per_second"] > 0 for line in lines)


def test_lines_after_the_restored_update_are_dropped(tmp_path):
    lines = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (5, 10, 15))
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 20, "lo')  # cut short by a kill
    with records.Log(tmp_path, first=10, steps=20, batch_size=8, silent=True) as log:
        log.add(jnp.float32(2.0))
        log.write(11)
    assert [(line["step"], line["loss"]) for line in written(tmp_path)] == [(5, 1.0), (10, 1.0), (11, 2.0)]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    with records.Log(tmp_path, first=3, steps=9, batch_size=8, silent=True) as log:
        for loss in (1.0, float("nan"), float("inf")):
            log.add(jnp.float32(loss))
        with pytest.raises(ValueError, match="the loss must be finite, got nan in update 5"):
            log.write(6)
    assert written(tmp_path) == []


def test_the_loss_curve_is_drawn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n')
    records.draw_loss(tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
