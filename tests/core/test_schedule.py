import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dime_jax as dj


def test_linear_schedule_matches_reference_values(schedule):
    # abar and sigma of linspace(1e-4, 0.02, 1000), to the digits published with the baselines.
    reference = {
        10: (0.997807, 0.046834),
        50: (0.969951, 0.173345),
        100: (0.895142, 0.323818),
        300: (0.394011, 0.778453),
    }
    for t, (abar, sigma) in reference.items():
        assert schedule.abar(t).item() == pytest.approx(abar, abs=6e-7)
        assert schedule.sigma(t).item() == pytest.approx(sigma, abs=6e-7)
    assert schedule.abar(0).item() == pytest.approx(0.9999, abs=1e-7)
    assert schedule.num_steps == 1000


def test_sigma_at_t0_keeps_float32_precision(schedule):
    assert schedule.sigma(0).item() == pytest.approx(0.01, rel=1e-7)  # sqrt(1 - float32(0.9999)) is off by 2e-5


def test_tables_are_float32_and_follow_their_definition(schedule):
    betas = np.linspace(1e-4, 0.02, 1000)
    abar = np.array([np.prod(1 - betas[: t + 1]) for t in range(1000)])
    assert schedule.abar(0).dtype == jnp.float32
    t = np.arange(1000)
    np.testing.assert_allclose(schedule.abar(t), abar, rtol=1e-7)
    np.testing.assert_allclose(schedule.sqrt_abar(t), np.sqrt(abar), rtol=1e-7)
    np.testing.assert_allclose(schedule.sigma(t), np.sqrt(1 - abar), rtol=1e-6)


def test_cosine_schedule_follows_its_formula_and_is_clipped_at_the_end():
    s = dj.cosine_schedule(1000)

    def level(t):
        return np.cos((t / 1000 + 0.008) / 1.008 * np.pi / 2) ** 2

    for t in (0, 100, 500, 900):
        assert s.abar(t).item() == pytest.approx(level(t + 1) / level(0), rel=1e-5)
    assert s.abar(999).item() == pytest.approx(s.abar(998).item() * 0.001, rel=1e-5)


def test_zero_terminal_snr_is_allowed():
    s = dj.schedule_from_betas([0.1, 1.0])
    assert s.abar(1).item() == 0
    assert s.sigma(1).item() == 1


def test_schedules_of_one_length_share_a_compilation():
    traces = []

    @jax.jit
    def level(s, t):
        traces.append(t)
        return s.sigma(t)

    level(dj.linear_schedule(), 3)
    level(dj.cosine_schedule(), 5)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.abar(1000), "t must be >= 0 and < 1000, got 1000"),
        (lambda s: s.sigma(-1), "t must be >= 0 and < 1000, got -1"),
        (lambda s: s.sigma(np.array([5, 2000])), "t must be >= 0 and < 1000, got 2000"),
        (lambda s: s.sigma(0.5), "t must be an integer timestep, got 0.5"),
        (lambda s: dj.schedule_from_betas([0.1, -0.2]), r"betas must be > 0 and <= 1, got betas\[1\]=-0.2"),
        (lambda s: dj.schedule_from_betas([]), r"betas must have shape \[T\] with T > 0"),
        (lambda s: dj.linear_schedule(0), "num_steps must be >= 1, got 0"),
    ],
)
def test_bad_input_is_named(schedule, call, message):
    with pytest.raises(ValueError, match=message) as error:
        call(schedule)
    assert "\n" not in str(error.value)
