"""results.json and audit.json as files of other versions, or of strangers, have them."""

import json
import pathlib

import pytest

from dime_jax._util.records import plain_object
from dime_jax.findings import json_files
from dime_jax.findings.results import StudyFindings
from dime_jax.protocol.evaluation import Evaluation

ROOT = pathlib.Path(__file__).parents[2]
FINISHED = sorted(path.parent for path in (ROOT / "docs" / "results").rglob("results.json"))


@pytest.mark.parametrize("directory", FINISHED, ids=lambda path: path.relative_to(ROOT / "docs" / "results").as_posix())
def test_finished_runs_are_read_whole(directory):
    contents = json.loads((directory / "results.json").read_text())
    read = json_files.read_results(directory)
    assert type(read) is (StudyFindings if "duplicates" in contents else Evaluation)
    assert plain_object(read) == contents
    row = contents["results"][0]
    assert read.row(f"{row['attack']}@{row['queries_per_image']}").auc.value == row["auc"]["value"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged: not JSON"),
        ("[]", "is damaged: expected a JSON object, got list"),
        ("{}", "schema_version must be 1, got None"),
        ('{"schema_version": 2}', "schema_version must be 1, got 2"),
        ('{"schema_version": 1}', "must have 'results', got schema_version"),
        (
            '{"schema_version": 1, "results": [1]}',
            "results.json must have 'fingerprints', got schema_version, results",
        ),
    ],
)
def test_other_results_are_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        json_files.read_results(tmp_path)
    assert "\n" not in str(error.value)


def test_nothing_there_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"holds no audit: no audit\.json in it"):
        json_files.read_record(tmp_path)
    with pytest.raises(ValueError, match=r"holds no results: no results\.json in it"):
        json_files.read_results(tmp_path)
    with pytest.raises(ValueError, match=r"holds no comparison: no compare\.json in it"):
        json_files.read_comparison(tmp_path)


def test_a_row_of_another_type_is_named(tmp_path):
    kept = ROOT / "docs" / "results" / "digits" / "seed_0" / "results.json"
    contents = json.loads(kept.read_text(encoding="utf-8"))
    (tmp_path / "results.json").write_text(json.dumps({**contents, "results": [1]}))
    with pytest.raises(ValueError, match=r"results\.json\.results\[0\] must be an object, got '1'"):
        json_files.read_results(tmp_path)
