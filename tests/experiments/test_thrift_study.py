"""The replay of thrifty calibration: beside the calibration of whole rows, and where nothing is dropped."""

import pathlib

import numpy as np
import pytest

from dime_jax import thrift
from dime_jax.evidence import metrics
from dime_jax.protocol import calibration, pipeline
from experiments import thrift_study

RUN = pathlib.Path(__file__).parents[2] / "docs" / "results" / "digits" / "seed_0"


@pytest.fixture(scope="module")
def terms():
    found = thrift_study.read_terms(RUN)
    rows = [row for row in found.rows if row[0].job.label in ("loss@1", "pia_l2@2", "dime@2")]
    return found._replace(rows=rows)


def test_the_images_that_judge_choose_nothing(terms):
    chooses, judges = thrift_study.cut(terms.half, 0)
    assert (len(chooses.member), len(judges.member)) == (150, 50)
    both = np.concatenate([chooses.member, judges.member, chooses.heldout, judges.heldout])
    assert np.array_equal(np.sort(both), np.sort(np.concatenate([terms.half.member, terms.half.heldout])))


def test_losses_are_those_of_calibrating_whole_rows(terms):
    found, (chooses, judges) = thrift_study.replay(terms, 1), thrift_study.cut(terms.half, 1)
    pilot, kept = thrift.pilot(chooses, 1), []
    jobs = [one.job for row in terms.rows for one in row]
    most = thrift.costs(jobs, terms.witness, 300, 36).most
    ranked = thrift.rank(terms.rows, terms.table.schedule, lambda job: pipeline.term_pair(terms.table, job, pilot))
    kept = thrift.keep(ranked, terms.rows, terms.witness, most)
    assert (found.kept, found.share <= 0.5) == (len(kept), True)
    for number, row in enumerate(terms.rows):
        aucs, settings = [], []
        for among in ([one.job for one in row], [one.job for one in row if one.job in kept]):
            pairs = [pipeline.term_pair(terms.table, job, chooses) for job in among]
            frozen = calibration.calibrate(
                row[0].job.attack, terms.table.schedule, [job.setting for job in among], pairs
            )
            settings.append(frozen.setting)
            (job,) = [job for job in among if job.setting == frozen.setting]
            aucs.append(metrics.auc(*(frozen.score(side) for side in pipeline.term_pair(terms.table, job, judges))))
        assert found.loss[number] == pytest.approx(aucs[0] - aucs[1])
        assert found.differs[number] == (settings[0] != settings[1])
    assert found.kept < len(jobs)


def test_nothing_is_lost_where_everything_is_kept(terms, monkeypatch):
    monkeypatch.setattr(thrift, "keep", lambda ranked, rows, *rest: [one.job for row in rows for one in row])
    found = thrift_study.replay(terms, 0)
    assert not found.differs.any()
    assert not found.decider_differs
    assert found.loss.tolist() == [0, 0, 0]
    assert found.share > 1  # the pilot comes on top
    text = thrift_study.describe(terms, [found, found])
    assert text.startswith("2 repetitions, 3 rows, ")
    assert "another setting in 0.0%; AUC lower by 0.00 points on average" in text
