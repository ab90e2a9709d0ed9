"""What the shared drawings put on their axes, from hand-made numbers."""

import numpy as np
import pytest

from dime_jax.evidence import metrics
from dime_jax.report import figures


@pytest.fixture
def axes():
    return figures.new_figure(1, 1, 3)[1][0, 0]


def test_a_roc_curve_starts_at_the_left_edge_with_what_no_false_alarm_costs(axes):
    curve = metrics.roc_curve([1.0, 2.0, 4.0, 9.0], [3.0, 5.0])
    figures.roc(axes, [figures.Line(curve.fpr, curve.tpr, {"label": "one"})], least_fpr=1 / 2)
    x, y = axes.get_lines()[0].get_data()
    np.testing.assert_array_equal(x, [0.25, 0.5, 0.5, 1.0, 1.0])
    np.testing.assert_array_equal(y, [0.5, 0.5, 0.75, 0.75, 1.0])
    assert axes.get_xlim() == (0.25, 1)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    np.testing.assert_array_equal(axes.get_lines()[1].get_data(), [[0.25, 1], [0.25, 1]])


def test_a_histogram_shows_shares_of_each_side(axes):
    member, heldout = np.linspace(0, 1, 50), np.append(np.linspace(1, 2, 999), 1e6)
    low, high = figures.histogram(axes, member, heldout, others=[-1.0])
    assert low == -1
    assert high < 3  # one far score does not squeeze the rest
    shares = {}
    for patch in axes.patches:
        if patch.get_label() in ("members", "held-out"):
            outline = patch.get_xy()
            corners = outline[np.append(True, np.diff(outline[:, 0]) != 0) & (outline[:, 1] > 0)]
            shares[patch.get_label()] = corners[:, 1].sum()
    assert shares == pytest.approx({"members": 100, "held-out": 100})


def test_a_histogram_of_held_out_images_alone(axes):
    figures.histogram(axes, np.array([]), np.arange(10.0))
    assert axes.get_legend_handles_labels()[1] == ["held-out"]


@pytest.mark.parametrize(("tau", "drawn"), [(0.3, 1), (-np.inf, 0)])
def test_an_infinite_threshold_is_not_drawn(axes, tau, drawn):
    figures.threshold(axes, tau, "black")
    assert len(axes.get_lines()) == drawn


def test_aucs_over_timesteps_are_in_per_cent(axes):
    figures.by_timestep(axes, [figures.Line([10, 30], [0.5, 0.875], {})])
    np.testing.assert_array_equal(axes.get_lines()[0].get_data(), [[10, 30], [50, 87.5]])
