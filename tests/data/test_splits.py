import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dime_jax import data
from dime_jax.data.groups import ALONE


def source_of(n, **columns):
    return data.Source("test", [f"id{i:06d}" for i in range(n)], lambda i: np.zeros((1, 1, 1), np.uint8), **columns)


def rows(split):
    return np.concatenate([split.member, split.heldout])


# --- files ---


@pytest.mark.parametrize("keys", [("mia_train_idxs", "mia_eval_idxs"), ("member", "heldout")])
def test_both_published_file_formats_are_read(keys, tmp_path):
    np.savez(tmp_path / "s.npz", **{keys[0]: [5, 1, 3], keys[1]: [0, 2]}, ratio=0.5)
    split = data.read_split(tmp_path / "s.npz", source_of(6))
    assert (split.member.tolist(), split.heldout.tolist()) == ([5, 1, 3], [0, 2])
    assert split.member.dtype == np.int64


def test_written_splits_are_read_back(tmp_path):
    data.write_split(tmp_path / "s.npz", data.Split([2, 0], [1]))
    split = data.read_split(tmp_path / "s.npz", source_of(3))
    assert (split.member.tolist(), split.heldout.tolist()) == ([2, 0], [1])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"member": [0, 1, 1], "heldout": [2]}, "indices in member must be unique, got 1 twice"),
        ({"member": [0, 1], "heldout": [1, 2]}, "disjoint, got index 1 in both"),
        ({"member": [0, 10], "heldout": [1]}, "indices must be < 10 in test, got 10"),
        ({"member": [-1, 0], "heldout": [1]}, "indices in member must be >= 0, got -1"),
        ({"member": [0.5], "heldout": [1]}, "member must be a list of integers, got float64"),
        ({"member": [[0], [1]], "heldout": [2]}, "member must be a list of integers"),
        ({"members": [0], "heldout": [1]}, "must hold mia_train_idxs and mia_eval_idxs"),
        ({"member": np.array([None]), "heldout": [1]}, "allow_pickle"),
    ],
)
def test_bad_split_files_are_refused_with_their_name(entries, message, tmp_path):
    np.savez(tmp_path / "s.npz", **entries)
    with pytest.raises(ValueError, match=message) as error:
        data.read_split(tmp_path / "s.npz", source_of(10))
    assert "s.npz" in str(error.value)


def test_files_that_are_no_archives_are_refused(tmp_path):
    (tmp_path / "s.npz").write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"s.npz"):
        data.read_split(tmp_path / "s.npz", source_of(10))
    with pytest.raises(ValueError, match=r"nothing.npz"):
        data.read_split(tmp_path / "nothing.npz", source_of(10))


def test_indices_are_refused_where_the_order_is_lost(tmp_path):
    data.write_split(tmp_path / "s.npz", data.Split([0], [1]))
    with pytest.raises(ValueError, match="cannot apply a split by index to test: shuffled"):
        data.read_split(tmp_path / "s.npz", source_of(10, index_problem="shuffled"))


# --- published draws ---


def test_random_split_is_numpys_permutation():
    split = data.random_split(source_of(100), 20)
    order = np.random.default_rng(0).permutation(100).tolist()
    assert split.member.tolist() == sorted(order[:20])
    assert split.heldout.tolist() == sorted(order[20:40])
    with pytest.raises(ValueError, match="test must have at least 102 images, got 100"):
        data.random_split(source_of(100), 51)


def test_sima_celeba_split():
    split = data.sima_celeba_split(source_of(100), size=30)
    order = np.arange(60)
    np.random.default_rng(42).shuffle(order)
    assert split.member.tolist() == order[:30].tolist()
    assert split.heldout.tolist() == order[30:].tolist()


def test_identity_split_is_the_published_draw():
    # Drawn by the published recipe, person after person, from 12 people.
    identities = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 10, 11, 12, 11])
    rng = np.random.default_rng(0)
    people = np.unique(identities)
    rng.shuffle(people)
    expected = [[], []]
    for person in people:
        photos = np.where(identities == person)[0]
        rng.shuffle(photos)
        side = 0 if len(expected[0]) < 7 else 1
        if len(expected[side]) < 7:
            expected[side] += photos[:2].tolist()
    split = data.identity_split(source_of(28, identities=identities), size=7)
    assert split.member.tolist() == sorted(expected[0][:7])
    assert split.heldout.tolist() == sorted(expected[1][:7])


@given(st.integers(0, 5), st.integers(1, 3))
def test_identity_split_is_disjoint_and_capped(seed, cap):
    identities = np.random.default_rng(seed).integers(0, 60, 300)
    split = data.identity_split(source_of(300, identities=identities), size=20, per_identity=cap, seed=seed)
    assert len(split.member) == len(split.heldout) == 20
    assert not set(identities[split.member]) & set(identities[split.heldout])
    assert max(np.bincount(identities[rows(split)])) <= cap


def test_identity_split_needs_identities_and_enough_people():
    with pytest.raises(ValueError, match="test has no identities"):
        data.identity_split(source_of(9))
    with pytest.raises(ValueError, match="test must have people for 2 x 3 images, got 4"):
        data.identity_split(source_of(9, identities=np.repeat([1, 2], [5, 4])), size=3)


def test_per_class_split_draws_three_of_every_class():
    labels = np.repeat(np.arange(10), 5).astype(np.int32)
    members, heldout = source_of(50, labels=labels), source_of(50, labels=np.roll(labels, 7))
    split = data.per_class_split(members, heldout)
    joined = data.join(members, heldout)
    for side in (split.member, split.heldout):
        assert np.bincount(joined.labels[side]).tolist() == [3] * 10
    assert split.member.max() < 50 <= split.heldout.min()
    assert split.member.tolist() == data.per_class_split(members, heldout).member.tolist()
    assert split.member.tolist() != data.per_class_split(members, heldout, seed=0).member.tolist()
    with pytest.raises(ValueError, match="class 0 of test must have 6 images, got 5"):
        data.per_class_split(members, heldout, per_class=6)


def test_per_class_split_selects_the_same_images_whatever_the_labels_are_called():
    labels = np.repeat(np.arange(10), 5).astype(np.int32)
    scrambled = (labels * 7 + 3) % 10
    first = data.per_class_split(source_of(50, labels=labels), source_of(50, labels=labels))
    second = data.per_class_split(source_of(50, labels=labels), source_of(50, labels=scrambled))
    assert first.heldout.tolist() == second.heldout.tolist()


# --- halves ---


def test_as_published_halves_are_the_authors_permutation():
    split = data.Split(np.arange(0, 21), np.arange(21, 40))
    halves = data.halves(split, source_of(40).ids, mode="as_published", seed=3)
    rng = np.random.default_rng(3)
    member, heldout = split.member[rng.permutation(21)], split.heldout[rng.permutation(19)]
    assert halves.calibration.member.tolist() == member[:10].tolist()
    assert halves.calibration.heldout.tolist() == heldout[:9].tolist()
    assert halves.test.member.tolist() == member[10:].tolist()
    assert halves.test.heldout.tolist() == heldout[9:].tolist()


def test_as_published_sizes_are_drawn_from_the_halves_in_the_authors_order():
    split = data.Split(np.arange(0, 20), np.arange(20, 40))
    halves = data.halves(split, source_of(40).ids, mode="as_published", calibration_size=4, test_size=7)
    rng = np.random.default_rng(0)
    member, heldout = split.member[rng.permutation(20)], split.heldout[rng.permutation(20)]
    draws = [rng.choice(h, size=n, replace=False) for h, n in [(member[:10], 4), (heldout[:10], 4), (member[10:], 7)]]
    assert halves.calibration.member.tolist() == draws[0].tolist()
    assert halves.calibration.heldout.tolist() == draws[1].tolist()
    assert halves.test.member.tolist() == draws[2].tolist()


def test_as_published_knows_no_groups():
    with pytest.raises(ValueError, match=r"groups must be None .* cannot keep groups together"):
        data.halves(data.Split([0], [1]), ["a", "b"], mode="as_published", groups=np.array([0, 0]))
    with pytest.raises(ValueError, match="unknown mode 'by_index'; expected one of by_id, as_published"):
        data.halves(data.Split([0], [1]), ["a", "b"], mode="by_index")


@st.composite
def grouped_splits(draw):
    n = draw(st.integers(2, 60))
    order = np.random.default_rng(draw(st.integers(0, 99))).permutation(n)
    members = draw(st.integers(0, n))
    used = draw(st.integers(members, n))
    groups = np.array(draw(st.lists(st.integers(-1, 8), min_size=n, max_size=n)))
    return n, data.Split(order[:members], order[members:used]), groups


@given(grouped_splits(), st.integers(0, 9))
def test_by_id_halves_are_disjoint_cover_and_never_cut_a_group(case, seed):
    n, split, groups = case
    halves = data.halves(split, source_of(n).ids, seed=seed, groups=groups)
    for side in ("member", "heldout"):
        parts = [getattr(half, side) for half in halves]
        assert sorted(np.concatenate(parts)) == sorted(getattr(split, side))
    assert not len(data.shared_groups(groups, rows(halves.calibration), rows(halves.test)))


@given(grouped_splits(), st.integers(0, 9))
def test_by_id_halves_do_not_depend_on_the_order_of_the_source(case, seed):
    n, split, groups = case
    ids = np.array(source_of(n).ids)
    halves = data.halves(split, ids, seed=seed, groups=groups)
    # The same images in another order: new[place[i]] = old[i], and other numbers for the groups.
    place = np.random.default_rng(seed).permutation(n)
    moved_ids, moved_groups = np.empty_like(ids), np.empty_like(groups)
    moved_ids[place], moved_groups[place] = ids, np.where(groups == ALONE, ALONE, 100 - groups)
    shuffle = np.random.default_rng(seed + 1).permutation
    moved = data.Split(shuffle(place[split.member]), shuffle(place[split.heldout]))
    moved_halves = data.halves(moved, moved_ids, seed=seed, groups=moved_groups)
    for half, moved_half in zip(halves, moved_halves):
        assert set(ids[half.member]) == set(moved_ids[moved_half.member])
        assert set(ids[half.heldout]) == set(moved_ids[moved_half.heldout])


@given(st.integers(1, 41), st.integers(0, 41), st.integers(0, 5))
def test_by_id_halves_without_groups_are_exact(members, heldout, seed):
    split = data.Split(np.arange(members), np.arange(members, members + heldout))
    halves = data.halves(split, source_of(members + heldout).ids, seed=seed)
    assert (len(halves.calibration.member), len(halves.calibration.heldout)) == (members // 2, heldout // 2)


@given(grouped_splits(), st.sampled_from([0.1, 0.4, 0.5, 0.75]), st.integers(0, 9))
def test_shares_are_kept_as_far_as_groups_allow(case, share, seed):
    n, split, groups = case
    halves = data.halves(split, source_of(n).ids, seed=seed, groups=groups, calibration_share=share)
    assert not len(data.shared_groups(groups, rows(halves.calibration), rows(halves.test)))
    free = data.halves(split, source_of(n).ids, seed=seed, calibration_share=share)
    for side in ("member", "heldout"):
        whole = len(getattr(split, side))
        assert len(getattr(halves.calibration, side)) + len(getattr(halves.test, side)) == whole
        assert 0 <= share * whole - len(getattr(free.calibration, side)) < 1
        if not np.any(groups != ALONE):
            np.testing.assert_array_equal(getattr(free.test, side), getattr(halves.test, side))


def test_groups_go_to_the_side_that_lacks_more_of_its_share():
    groups = np.repeat(np.arange(10), 4)
    for seed in range(20):
        halves = data.halves(
            data.Split(np.arange(40), []), source_of(40).ids, groups=groups, seed=seed, calibration_share=0.3
        )
        assert (len(halves.calibration.member), len(halves.test.member)) == (12, 28)


@pytest.mark.parametrize("share", [0, 1, -0.1, float("nan")])
def test_a_share_is_between_nothing_and_all(share):
    with pytest.raises(ValueError, match=r"calibration_share must be in \(0, 1\), got"):
        data.halves(data.Split([0], [1]), ["a", "b"], calibration_share=share)


def test_the_authors_halves_are_halves():
    with pytest.raises(ValueError, match=r"calibration_share must be 0\.5 with mode as_published, got 0\.4"):
        data.halves(data.Split([0], [1]), ["a", "b"], mode="as_published", calibration_share=0.4)


@given(st.lists(st.integers(2, 9), min_size=1, max_size=9), st.integers(0, 9))
def test_groups_are_placed_largest_first_each_where_it_evens_out_most(sizes, seed):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    split = data.Split(np.arange(len(groups)), [])
    halves = data.halves(split, source_of(len(groups)).ids, groups=groups, seed=seed)
    difference = 0
    for size in sorted(sizes, reverse=True):
        difference = abs(difference - size)
    assert difference <= max(sizes)
    assert abs(len(halves.calibration.member) - len(halves.test.member)) == difference


def test_single_images_even_out_the_groups():
    groups = np.concatenate([np.repeat([0, 1, 2], [10, 4, 3]), np.full(20, ALONE)])
    split = data.Split(np.arange(37), [])
    halves = data.halves(split, source_of(37).ids, groups=groups)
    assert (len(halves.calibration.member), len(halves.test.member)) == (18, 19)


def test_a_duplicate_of_a_member_follows_it_from_the_heldout_side():
    groups = np.full(40, ALONE)
    groups[[0, 20]] = 5
    for seed in range(20):
        halves = data.halves(data.Split(np.arange(20), np.arange(20, 40)), source_of(40).ids, groups=groups, seed=seed)
        assert (0 in halves.calibration.member) == (20 in halves.calibration.heldout)


def test_seeds_give_other_halves_and_sides_are_fair():
    split = data.Split(np.arange(50), np.arange(50, 100))
    chosen = np.array(
        [np.isin(np.arange(50), data.halves(split, source_of(100).ids, seed=s).calibration.member) for s in range(200)]
    )
    # Each image calibrates in half of the seeds: 200 fair draws are within 4 standard deviations (28).
    assert np.all(np.abs(chosen.sum(0) - 100) < 29)
    assert np.all(chosen.sum(1) == 25)


def test_groups_take_turns_on_both_sides():
    groups = np.repeat(np.arange(10), 4)
    split = data.Split(np.arange(40), [])
    chosen = np.zeros(10)
    for seed in range(200):
        calibration = data.halves(split, source_of(40).ids, groups=groups, seed=seed).calibration.member
        assert len(calibration) == 20
        chosen += np.isin(np.arange(0, 40, 4), calibration)
    assert np.all(np.abs(chosen - 100) < 29)


def test_sizes_cap_the_halves_without_mixing_them():
    split = data.Split(np.arange(50), np.arange(50, 100))
    whole = data.halves(split, source_of(100).ids)
    capped = data.halves(split, source_of(100).ids, calibration_size=5, test_size=7)
    for half, small, size in zip(whole, capped, (5, 7)):
        assert len(small.member) == len(small.heldout) == size
        assert set(small.member) <= set(half.member)


# --- groups ---


def test_groups_file(tmp_path):
    ids = ["a,b", "c", "d", "e"]
    (tmp_path / "g.csv").write_text('id,group\n"a,b",x\nd,x\ne,y\n')
    groups = data.read_groups(tmp_path / "g.csv", ids)
    assert groups[0] == groups[2] != groups[3]
    assert groups[1] == ALONE
    (tmp_path / "g.csv").write_text("c,x\nnobody,y\n")
    with pytest.raises(ValueError, match=r"g.csv line 2 must be a known id and a group, got 'nobody,y'"):
        data.read_groups(tmp_path / "g.csv", ids)
    (tmp_path / "g.csv").write_text("c,x\nc,y\n")
    with pytest.raises(ValueError, match=r"line 2 gives 'c' a second group"):
        data.read_groups(tmp_path / "g.csv", ids)


@given(st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 5)), min_size=1, max_size=12))
def test_merged_groups_are_the_transitive_closure(pairs):
    first, second = np.array(pairs).T
    merged = data.merge_groups(first, second, None)
    n = len(first)
    together = np.eye(n, dtype=bool)
    for grouping in (first, second):
        together |= (grouping[:, None] == grouping[None]) & (grouping[:, None] != ALONE)
    for _ in range(n):
        together = together @ together
    for i, j in itertools.combinations(range(n), 2):
        assert together[i, j] == (merged[i] == merged[j] != ALONE)


def test_no_groups_at_all():
    assert data.merge_groups(None, None) is None
