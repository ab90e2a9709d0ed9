"""Copy finished runs to docs/results: without weights, and with the number of queries in place of their ledgers.

    python -m experiments.publish --run=W/seed_1/attack --to=docs/results/digits/seed_1
    python -m experiments.publish --run=W/seed_1 --to=docs/results/dp_digits/seed_1 --trim_calibration

The copy is read, and its digests are checked, as the run itself, and every number of the pages is the same. With
`--trim_calibration` its calibration tables keep only the witness of direction: enough for the pages of a DP study, but
not to calibrate again.
"""

import pathlib
import shutil

import numpy as np
import pyarrow as pa
from absl import flags

from dime_jax._util import digests, files
from dime_jax.protocol import stages
from dime_jax.scoring import planning, score_table, shards
from experiments.launch import run_app

Units = list[tuple[str, list[str]]]  # of a manifest: each with its readings
_LEFT_OUT = shutil.ignore_patterns("state", "snapshots", "variables", "generated", "queries-*.bin", "lock", ".*")


def publish(run: pathlib.Path, to: pathlib.Path, trim_calibration: bool = False) -> None:
    """Copy a run, or a folder of runs.

    Args:
      run: a run, or a folder with runs in it.
      to: the copy, which must not exist.
      trim_calibration: whether to keep only the witness of the calibration tables.

    Raises:
      ValueError: if a file of the run is damaged or missing.
    """
    shutil.copytree(run, to, ignore=_LEFT_OUT)
    for frozen in sorted(to.rglob("calibration.json")):
        original = run / frozen.parent.relative_to(to)
        sealed = digests.read(original / frozen.name).check()
        for half in stages.HALVES:
            wanted = None
            if trim_calibration and half == "calibration":
                jobs = planning.witness_jobs(stages.read_jobs(original))
                wanted = {str(reading) for job in jobs for reading in job.recipe.readings}
            _publish_table(original / half, frozen.parent / half, wanted)
        digests.write(frozen, sealed.contents, sealed.digests or ())


def _publish_table(original: pathlib.Path, copy: pathlib.Path, wanted: set[str] | None) -> None:
    """Write the table again, with these readings only or with all of them."""
    table = score_table.read_table(original)
    sealed = digests.read(original / "manifest.json")
    rows = shards.decode(original / "scores.parquet", sealed.read("scores.parquet"))
    identity = sealed.contents["identity"]
    if wanted is not None:
        identity["settings"], rows = _only(wanted, identity["settings"], rows)
    files.write_atomically(copy / "scores.parquet", shards.encode(rows))
    names = [name for name in sealed.digests or () if not name.startswith("queries-")]
    digests.write(copy / "manifest.json", {**sealed.contents, "queries_made": table.queries_made}, names)


def _only(wanted: set[str], units: Units, rows: pa.Table) -> tuple[Units, pa.Table]:
    """Some readings of a table: the units that have any, with these alone, and their rows."""
    images, kept, parts = len(rows) // len(units), Units(), []
    for place, (unit, names) in enumerate(units):
        columns = [number for number, name in enumerate(names) if name in wanted]
        if columns:
            part = rows.slice(place * images, images)
            readings = np.asarray(part.column("readings").combine_chunks().flatten()).reshape(images, -1)[:, columns]
            part = part.set_column(0, "unit", pa.array(np.full(images, len(kept), np.int32)))
            parts.append(part.set_column(4, "readings", pa.array(readings.tolist(), pa.list_(pa.float32()))))
            kept.append((unit, [names[column] for column in columns]))
    return kept, pa.concat_tables(parts)


if __name__ == "__main__":
    _RUN = flags.DEFINE_string("run", None, "a run, W/attack, or a folder of runs", required=True)
    _TO = flags.DEFINE_string("to", None, "the copy, such as docs/results/STUDY/seed_1", required=True)
    _TRIM = flags.DEFINE_bool("trim_calibration", False, "keep only the witness of the calibration tables")

    run_app(lambda: publish(pathlib.Path(_RUN.value), pathlib.Path(_TO.value), _TRIM.value))
