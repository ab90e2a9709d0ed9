"""Changed innocents: a small run on digits and the closed form, whose audits are those of the findings."""

import json
import pathlib

import handmade
import numpy as np
import pytest
from absl import flags

from dime_jax.data import Split
from dime_jax.evidence import Verdict
from dime_jax.findings import withholding
from dime_jax.findings.candidates import find_candidates
from dime_jax.protocol import stages
from dime_jax.protocol.arrays import AuditArrays, PictureStatistics
from dime_jax.protocol.record import KnownImages, Record
from experiments import changed_innocents
from experiments.configs import digits

SIZES = {"FITTED": 40, "HELDOUT": 39, "CANDIDATES": 10, "FEW": 3, "LEVEL": 0.5, "_MOST": 120}


@pytest.fixture(scope="module", autouse=True)
def small():
    """Fewer images, and a level at which some of them are named."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SIZES.items():
            patch.setattr(changed_innocents, name, value)
        yield


@pytest.fixture(scope="module")
def config():
    made = digits.get_config().unlock()
    made.attack.model = "closed_form"
    return made


@pytest.fixture(scope="module")
def asked(config, tmp_path_factory):
    return changed_innocents.ask(config, tmp_path_factory.mktemp("digits"))


def of_findings(asked, candidates, heldout, seed):
    """What the findings of an audit say of the same candidates beside the same held-out images."""
    known = KnownImages(asked.table, Split(np.zeros(0, np.int64), heldout), asked.pictures)
    seen = PictureStatistics(asked.likeness[candidates], heldout, asked.likeness[heldout])
    arrays = AuditArrays(heldout, candidates, np.full(len(asked.likeness), -1), statistics=seen)
    settings = handmade.settings(level=SIZES["LEVEL"], seed=seed)
    facts = handmade.record([1, 2], [1], settings=settings, adjusted=True, fixed_setting=asked.frozen.setting).facts
    record = Record(pathlib.Path(), facts, arrays)
    record.__dict__.update(tables=[asked.table], known=known, pictures=asked.pictures)
    return find_candidates(record, None)


@pytest.mark.parametrize(("kind", "changed"), [("as it is", 10), ("mirrored", 3), ("JPEG 75", 2), ("blurred", 10)])
def test_an_audit_says_what_the_findings_say(asked, kind, changed):
    heldout, others = np.arange(SIZES["HELDOUT"]), 50 + np.arange(10 - changed)
    chosen = asked.places.of(kind)[20 : 20 + changed]
    said = changed_innocents.audit(asked, asked.pile, chosen, others, heldout, 3)
    rows, found = of_findings(asked, np.concatenate([chosen, others]), heldout, 3)
    assert said.withheld == (found.withheld == withholding.UNLIKE_SET)
    assert said.withheld or kind != "blurred"
    assert said.judged.tolist() == [row.p_value is not None for row in rows[:changed]]
    assert said.named.tolist() == [row.verdict is Verdict.EVIDENCE for row in rows[:changed]]


def test_some_are_named_and_some_are_not(asked):
    """So that the comparison above is one: candidates of the lowest and of the highest scores."""
    heldout = np.arange(SIZES["HELDOUT"])
    order = np.argsort(asked.pile.scores[0, :, 0])
    own = order[np.isin(order, asked.places.of("as it is"))]
    chosen = np.concatenate([own[:5], own[-5:]])
    said = changed_innocents.audit(asked, asked.pile, chosen, own[:0], heldout, 3)
    rows, _ = of_findings(asked, chosen, heldout, 3)
    assert said.named.tolist() == [row.verdict is Verdict.EVIDENCE for row in rows]
    assert 0 < said.named.sum() < 10


def test_shares_are_those_of_a_count(asked):
    found = changed_innocents.below_limits(asked)
    losses = np.exp(asked.table.terms(stages.frozen_job(asked.frozen))[:2]).mean(axis=0)
    place = {index: row for row, index in enumerate(asked.table.index.tolist())}
    loss = np.array([losses[place[index]] for index in range(len(place))])
    beside = loss[SIZES["FITTED"] : asked.places.unchanged]
    for kind in changed_innocents.CHANGES:
        p_values = [(1 + np.sum(beside <= one)) / (len(beside) + 1) for one in loss[asked.places.of(kind)]]
        assert found["loss"][kind] == [np.mean(np.array(p_values) <= limit) for limit in (0.05, 0.01)]


def test_versions_are_the_pictures_changed(asked, config, tmp_path):
    source = changed_innocents.open_study(config, tmp_path).source
    images = np.array([5, 3, 8])
    versions, places = changed_innocents.versions(source, images)
    assert (len(versions), places) == (2 + 8, (2, 1))
    np.testing.assert_array_equal(versions[0].image, source[3].image)
    np.testing.assert_array_equal(versions[places.of("mirrored")[0]].image, source[5].image[:, ::-1])
    dimmed = versions[places.of("dimmed")[0]].image.astype(float)
    np.testing.assert_allclose(dimmed, 0.8 * source[5].image, atol=1)
    names = [id.partition(" (")[2] for id in versions.ids]
    assert (
        names == ["as it is)", *(f"{name})" for name in changed_innocents.CHANGES)][:0] or len(set(versions.ids)) == 10
    )


def test_counts_by_kind_add_up(asked, config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(changed_innocents, "ask", lambda *_: asked)
    monkeypatch.setattr(flags, "FLAGS", type("Flags", (), {"audits": 9}))
    (tmp_path / "changed").mkdir()
    changed_innocents.main(config, str(tmp_path))
    found = json.loads((tmp_path / "changed" / "changed.json").read_text())
    assert json.loads(capsys.readouterr().out) == found
    for mix in found["audits"].values():
        everything, *kinds = mix.values()
        assert everything["audits"] == 9
        assert list(mix)[1:] == list(changed_innocents.KINDS)
        for count in ("audits", "withheld", "name_a_changed_image"):
            assert everything[count] == sum(kind[count] for kind in kinds)
        assert mix["blurred"]["share_of_changed_not_judged"] == 1
    assert found["audits"]["all are changed"]["blurred"]["withheld"] == 1
