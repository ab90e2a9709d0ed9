"""The files of an audit and of a comparison, written and read here and nowhere else.

audit.json, audit.npz        `Record`, before anything is found
results.json                 `AuditFindings`, or `Evaluation` for a run without an audit
compare.json, compare.npz    `DeletionFindings`, with the facts that it is made from
candidates.csv               `CandidateRow` or `DeletionRow`, one for each candidate
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Sequence

from dime_jax._util import digests
from dime_jax._util import files as _files
from dime_jax._util.csv import write_csv
from dime_jax._util.records import field_names, parse, plain_object
from dime_jax.findings.results import AuditFindings, CandidateRow, DeletionFindings, DeletionRow, StudyFindings
from dime_jax.guards import model_check
from dime_jax.protocol import stages, statistics
from dime_jax.protocol.arrays import AuditArrays, columns_of, compare_columns
from dime_jax.protocol.evaluation import Evaluation, check_version
from dime_jax.protocol.facts import AuditFacts, CompareFacts
from dime_jax.protocol.record import CompareRecord, Record
from dime_jax.scoring.query_ledger import REFERENCE

AUDIT, COMPARE, RESULTS = "audit.json", "compare.json", "results.json"
_AUDIT_ARRAYS, _COMPARE_ARRAYS = "audit.npz", "compare.npz"


def write_record(directory: pathlib.Path, facts: AuditFacts, arrays: AuditArrays) -> None:
    """Write audit.json and audit.npz."""
    (directory / AUDIT).unlink(missing_ok=True)  # a kill must not leave the one of before with new arrays
    _files.write_atomically(directory / _AUDIT_ARRAYS, digests.dump_arrays(columns_of(arrays), compress=True))
    run = []
    if facts.images.members:
        run = [*stages.CALIBRATION_FILES, "calibration.json", stages.MANIFESTS["test"]]
    tables = ["candidates", "variations"] if facts.settings.variations else ["candidates"]
    candidates = [f"{one}/{facts.decided_by}/manifest.json" for one in tables if len(arrays.candidates)]
    pictures = [f"{place}{statistics.FILE}" for place in ("", "variations/") if statistics.exist(directory / place)]
    files = [_AUDIT_ARRAYS, model_check.FILE, *run, *candidates, *pictures]
    if facts.reference is not None:
        asked = [*stages.MANIFESTS.values()] if facts.images.members else []
        files += [f"{REFERENCE}/{name}" for name in (model_check.FILE, *asked, *candidates)]
    digests.write(directory / AUDIT, plain_object(facts), files)


def read_record(directory: pathlib.Path) -> Record:
    """Open the record of an audit.

    Raises:
      ValueError: if there is none, or a file of it is damaged or missing, naming that.
    """
    sealed = _open(directory, AUDIT, "audit")
    facts = parse(AuditFacts, sealed.contents, str(sealed.path))
    with _naming(directory / _AUDIT_ARRAYS):
        arrays = AuditArrays.of(sealed.read_arrays(_AUDIT_ARRAYS))
    return Record(directory, facts, arrays)


def write_findings(directory: pathlib.Path, found: AuditFindings, candidates: Sequence[CandidateRow]) -> None:
    """Write results.json and, if there are candidates, candidates.csv."""
    if candidates:
        _write_rows(directory, candidates)
    _files.write_json(directory / RESULTS, plain_object(found))


def read_results(directory: str | os.PathLike[str]) -> Evaluation | StudyFindings | AuditFindings:
    """results.json of a finished run, of a finished experiment, or of a finished audit.

    Raises:
      ValueError: if there is none, or it is not what was written.
    """
    path = pathlib.Path(directory) / RESULTS
    if not path.is_file():
        raise ValueError(f"{directory} holds no results: no {RESULTS} in it")
    try:
        contents = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path} is damaged: not JSON") from None
    if not isinstance(contents, dict):
        raise ValueError(f"{path} is damaged: expected a JSON object, got {type(contents).__name__}")
    check_version(path, contents)
    kind = AuditFindings if "headline" in contents else StudyFindings if "duplicates" in contents else Evaluation
    return parse(kind, contents, str(path))


def write_compare_arrays(directory: pathlib.Path, arrays: AuditArrays) -> None:
    """Write compare.npz; compare.json of before goes, since a kill must not leave it with new arrays."""
    (directory / COMPARE).unlink(missing_ok=True)
    _files.write_atomically(directory / _COMPARE_ARRAYS, digests.dump_arrays(compare_columns(arrays), compress=True))


def read_comparison(directory: pathlib.Path) -> CompareRecord:
    """Open the record of a comparison.

    Raises:
      ValueError: if there is none, or a file of it is damaged or missing, naming that.
    """
    sealed = _open(directory, COMPARE, "comparison")
    facts = parse(CompareFacts, sealed.contents.get("facts"), f"{sealed.path}: facts")
    with _naming(directory / _COMPARE_ARRAYS):
        return CompareRecord(directory, facts, AuditArrays.of_comparison(sealed.read_arrays(_COMPARE_ARRAYS)))


def write_deletion(directory: pathlib.Path, found: DeletionFindings, candidates: Sequence[DeletionRow]) -> None:
    """Write candidates.csv and compare.json, with the digests of all that it was made from."""
    files = [_COMPARE_ARRAYS, *(f"{table}/manifest.json" for table in found.facts.tables), model_check.FILE]
    files += [statistics.FILE] if statistics.exist(directory) else []
    if found.facts.fixed_setting is None:
        files += [*stages.CALIBRATION_FILES, "calibration.json"]
    _write_rows(directory, candidates)
    digests.write(directory / COMPARE, plain_object(found), files)


def _open(directory: pathlib.Path, name: str, what: str) -> digests.Sealed:
    """Open a JSON file of a run, and check it and all files that it names."""
    if not (directory / name).is_file():
        raise ValueError(f"{directory} holds no {what}: no {name} in it")
    sealed = digests.read(directory / name).check()
    check_version(sealed.path, sealed.contents)
    return sealed


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Turn a missing array into an error that names the file."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path}: no array {error} in it, so it is not of this version; audit again") from None


def _write_rows(directory: pathlib.Path, rows: Sequence[CandidateRow] | Sequence[DeletionRow]) -> None:
    """Write candidates.csv, without columns that no candidate has."""
    lines = [plain_object(row) for row in rows]
    columns = [name for name in field_names(rows[0]) if any(name in line for line in lines)]
    write_csv(directory / "candidates.csv", [{name: line.get(name) for name in columns} for line in lines])
