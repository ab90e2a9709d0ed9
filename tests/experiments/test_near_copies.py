import numpy as np
import pytest
from PIL import Image

from dime_jax import data
from experiments import near_copies


def textures(n):
    """Different pictures with details of several sizes."""
    rng = np.random.default_rng(0)
    made = np.zeros((n, 32, 32, 3))
    for side in (4, 8, 16):
        coarse = rng.integers(0, 85, (n, side, side, 3), dtype=np.uint8)
        made += [np.asarray(Image.fromarray(one).resize((32, 32), Image.Resampling.BICUBIC)) for one in coarse]
    return made.astype(np.uint8)


@pytest.fixture(scope="module")
def images():
    """300 pictures, of which 200 is picture 3 mirrored, 201 picture 4 in other colours, and 150 picture 7 shifted."""
    made = textures(300)
    made[200], made[201] = made[3, :, ::-1], made[4, ..., ::-1] // 2
    made[150] = np.roll(made[7], (2, 2), (0, 1))
    return made


def test_the_nearest_member_is_that_of_a_naive_comparison(images):
    split = data.Split(np.arange(20), np.arange(195, 205))
    found = near_copies.nearest_members(images, split)
    high = near_copies.high_pass(images).reshape(-1, 32, 32)
    for row, index in enumerate(split.heldout):
        both = [max(np.sum(high[index] * one) for one in (high[m], high[m, :, ::-1])) for m in split.member]
        assert found.member[row] == split.member[np.argmax(both)]
        np.testing.assert_allclose(found.correlation[row], max(both), atol=1e-5)
    assert found.member[5:7].tolist() == [3, 4]


def test_the_command_prints_what_is_found(images, tmp_path, capsys):
    np.save(tmp_path / "images.npy", images)
    data.write_split(tmp_path / "split.npz", data.Split(np.arange(100), np.arange(200, 300)))
    near_copies.main(f"npz:{tmp_path / 'images.npy'}", str(tmp_path / "split.npz"), str(tmp_path / "found.png"))
    said = capsys.readouterr().out
    assert "generated copies among 296 images, found of 200:\n  mirrored 200\n" in said
    assert "pairs among the images themselves: 1, 0 of them above 0.8\n" in said
    assert said.endswith(
        "across the split, correlation above 0.9: found 2 of 2\nacross the split, correlation above 0.8: found 2 of 2\n"
    )
    assert (tmp_path / "found.png").exists()


def test_every_pair_is_drawn(images):
    sheet = near_copies.show_pairs(images, np.array([[3, 200], [4, 201]]), columns=1)
    drawn = np.asarray(sheet)
    assert np.array_equal(drawn[:32, :32], images[3])
    assert np.array_equal(drawn[36:68, 32:64], images[201])
