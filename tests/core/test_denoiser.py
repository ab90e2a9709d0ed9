import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dime_jax as dj


def halve(x, t):
    return np.asarray(x) / 2


def class_offset(x, t, label):
    return x + label[:, None, None, None].astype(x.dtype)


@pytest.fixture
def unconditional(schedule):
    return dj.Denoiser.from_function(halve, schedule, (4, 4, 3))


@pytest.fixture
def conditional(schedule):
    return dj.Denoiser.from_function(class_offset, schedule, (4, 4, 3), num_classes=10, traceable=True)


def test_a_numpy_function_becomes_a_denoiser_and_is_counted(unconditional):
    x = np.ones((5, 4, 4, 3), np.float32)
    eps = unconditional.eps(x, 3)
    assert isinstance(eps, jax.Array)
    np.testing.assert_array_equal(eps, x / 2)
    unconditional.eps_fn()(x[:2], np.array([3, 4]))
    assert unconditional.queries.count == 7


def test_labels_reach_the_model(conditional):
    x = np.zeros((3, 4, 4, 3), np.float32)
    np.testing.assert_array_equal(conditional.eps(x, 0, condition=[1, 2, 9])[:, 0, 0, 0], [1, 2, 9])
    np.testing.assert_array_equal(conditional.eps_fn(condition=7)(x, 0)[:, 0, 0, 0], [7, 7, 7])


def test_params_are_an_argument_and_nothing_retraces(schedule):
    traces = []

    def apply(params, x, t, label):
        traces.append(x.shape)
        return params * x + schedule.sigma(t)

    denoiser = dj.Denoiser(apply, jnp.float32(2), schedule, (3,))
    for t in (0, 5, 900):
        denoiser.eps(np.ones((4, 3), np.float32), t)
    assert len(traces) == 1


def test_matmuls_run_at_highest_precision(schedule):
    seen = []

    def apply(params, x, t, label):
        seen.append(jax.config.jax_default_matmul_precision)
        return x

    dj.Denoiser(apply, (), schedule, (3,)).eps(np.ones((1, 3), np.float32), 0)
    assert seen == ["highest"]


@pytest.mark.parametrize(
    ("kind", "kwargs", "message"),
    [
        (
            "unconditional",
            {"x": np.zeros((2, 4, 4, 1), np.float32)},
            r"x must have shape \[\*, 4, 4, 3\], got \[2, 4, 4, 1\]",
        ),
        ("unconditional", {"t": 1000}, "t must be >= 0 and < 1000, got 1000"),
        ("unconditional", {"t": np.array([1, 2, 3])}, r"t must have shape \[2\], got \[3\]"),
        ("unconditional", {"condition": [1, 2]}, "mine is unconditional: condition must be None"),
        ("conditional", {}, "mine is class-conditional: condition must be a class in 0..9 per image"),
        ("conditional", {"condition": [1, 10]}, "labels must be >= 0 and < 10, got 10"),
        ("conditional", {"condition": [0.5, 1.0]}, "labels must be integers"),
        ("conditional", {"condition": [1, 2, 3]}, r"condition must have shape \[2\], got \[3\]"),
    ],
)
def test_bad_calls_are_refused_in_one_line(request, kind, kwargs, message):
    denoiser = request.getfixturevalue(kind)
    kwargs = {"x": np.zeros((2, 4, 4, 3), np.float32), "t": 0, **kwargs}
    with pytest.raises(ValueError, match=message) as error:
        denoiser.eps(**kwargs)
    assert "\n" not in str(error.value)
    assert denoiser.queries.count == 0


def test_an_output_of_another_shape_is_refused(schedule):
    wrong = dj.Denoiser.from_function(lambda x, t: x[:1], schedule, (3,))
    with pytest.raises(ValueError, match=r"eps must return an array of shape \[2, 3\], got \[1, 3\] from mine"):
        wrong.eps(np.zeros((2, 3), np.float32), 0)


@pytest.mark.parametrize("kind", ["unconditional", "conditional"])
def test_the_old_name_of_conditions_is_refused_with_the_new_one(request, kind):
    denoiser = request.getfixturevalue(kind)
    with pytest.raises(TypeError, match=r"^eps takes condition=, not label=$"):
        denoiser.eps(np.zeros((2, 4, 4, 3), np.float32), 0, label=[1, 2])
    with pytest.raises(TypeError, match=r"^eps_fn takes condition=, not label=$"):
        denoiser.eps_fn(label=[1, 2])
    assert denoiser.queries.count == 0


TOKENS = {"tokens": jax.ShapeDtypeStruct((3,), jnp.float32), "mask": jax.ShapeDtypeStruct((), jnp.int32)}


def test_a_condition_may_be_a_tree_of_arrays(schedule):
    def apply(params, x, t, condition):
        return x + jnp.where(condition["mask"] > 0, condition["tokens"].sum(axis=1), 0)[:, None]

    denoiser = dj.Denoiser(apply, (), schedule, (2,), condition_shape=TOKENS)
    tokens = {"tokens": np.arange(6.0).reshape(2, 3), "mask": np.array([1, 0])}
    np.testing.assert_array_equal(denoiser.eps(np.zeros((2, 2), np.float32), 0, tokens), [[3, 3], [0, 0]])
    for wrong, message in [
        (None, r"denoiser is conditional: condition must have the structure .*mask.*tokens.*, got PyTreeDef\(None\)"),
        ({**tokens, "mask": np.array([1])}, r"condition\['mask'\] must have shape \[2\], got \[1\]"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            denoiser.eps(np.zeros((2, 2), np.float32), 0, wrong)
        assert "\n" not in str(error.value)


def test_a_model_without_text_embeds_no_captions(unconditional):
    with pytest.raises(ValueError, match="mine takes no text, so it cannot embed captions"):
        unconditional.embed(["a cat"])


def test_another_space_needs_an_encoder(schedule):
    with pytest.raises(ValueError, match=r"mine needs encode: its images are \(8, 8, 3\), its x is \(4, 4, 4\)"):
        dj.Denoiser(lambda params, x, t, condition: x, (), schedule, (8, 8, 3), shape=(4, 4, 4), name="mine")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_fewer_bits_than_float32_are_not_computed_in(dtype):
    """A difference of two answers over a small step would be lost."""
    model = dj.Denoiser.from_function(lambda x, t: x / 3, dj.linear_schedule(), (2, 2, 1), traceable=True)
    x = jnp.asarray(np.linspace(-1, 1, 8).reshape(2, 2, 2, 1), dtype)
    answer = model.eps(x, 5)
    assert answer.dtype == jnp.float32
    np.testing.assert_allclose(answer, x.astype(jnp.float32) / 3, rtol=1e-6)
    probes = np.ones((1, 2, 2, 2, 1), np.float32)
    terms, exact = (
        dj.dime_terms(model.eps_fn(), model.schedule, images, probes, 100, 0.1) for images in (x, x.astype(jnp.float32))
    )
    np.testing.assert_array_equal(terms.trace, exact.trace)


def test_pixels_that_were_not_scaled_are_refused():
    model = dj.Denoiser.from_function(lambda x, t: x, dj.linear_schedule(), (2, 2, 1))
    with pytest.raises(ValueError, match=r"x must be of a floating type, got uint8: scale pixels to \[-1, 1\] first"):
        model.eps(np.zeros((1, 2, 2, 1), np.uint8), 5)
