"""What a server says about its model and what the user says: agreed on, asked for, or refused in one line."""

import copy
import json

import numpy as np
import pytest
from faulty_server import PARAMETERS, SHAPE, FaultyServer, metadata, tanh_model

import dime_jax as dj
from dime_jax.remote.kserve import Message, decode, encode
from dime_jax.remote.metadata import UserClaims, read_contract, schedule_tables
from dime_jax.remote.transport import parse_url, read_token

LINEAR = dj.linear_schedule()


def contract(shape=(4, 4, 1), claims=None, config=None, parameters=PARAMETERS, **changes):
    said = json.loads(json.dumps(metadata(shape, parameters, **changes)))
    return read_contract(said, config or {}, claims or UserClaims())


def without(name):
    return {key: value for key, value in PARAMETERS.items() if key != name}


def test_all_is_read():
    found = contract(parameters={**PARAMETERS, "fingerprint": "5f0c", "max_batch": 8})
    assert (found.shape, found.layout, found.prediction, found.max_batch) == ((4, 4, 1), "NHWC", "epsilon", 8)
    np.testing.assert_array_equal(found.schedule.sigma_table, LINEAR.sigma_table)
    assert found.facts == (
        "image size: 4 x 4 (the server says so)",
        "layout: NHWC (the server says so)",
        "noise schedule: 1000 steps (the server says so)",
        "prediction: epsilon (the server says so)",
        "fingerprint: 5f0c (the server says so)",
    )


@pytest.mark.parametrize(
    "schedule",
    [
        "linear",
        np.linspace(1e-4, 0.02, 1000).tolist(),
        json.dumps(np.linspace(1e-4, 0.02, 1000).tolist()),
        schedule_tables(LINEAR),
        json.dumps(schedule_tables(LINEAR)),
    ],
)
def test_a_schedule_in_every_form_is_the_same_to_the_bit(schedule):
    found = contract(parameters={**PARAMETERS, "schedule": schedule}).schedule
    for table in ("abar_table", "sqrt_abar_table", "sigma_table"):
        np.testing.assert_array_equal(getattr(found, table), getattr(LINEAR, table))


def test_triton_says_it_in_its_configuration():
    texts = {**PARAMETERS, "range": "[-1, 1]", "layout": "NCHW"}
    config = {"max_batch_size": 16, "parameters": {key: {"string_value": value} for key, value in texts.items()}}
    said = metadata((3, 8, 8), None)
    said["inputs"][1]["shape"] = [-1, 1]  # it has no tensors of rank 1
    found = read_contract(said, config, UserClaims())
    assert (found.shape, found.layout, found.max_batch, found.columns) == ((8, 8, 3), "NCHW", 16, {"t"})
    shapes = []

    def columns(x, t):
        shapes.append(t.shape)
        return tanh_model(x, t[:, 0])

    said = metadata()
    said["inputs"][1]["shape"] = [-1, 1]
    with FaultyServer(columns, said=said) as server:
        x = np.ones((2, *SHAPE), np.float32)
        np.testing.assert_array_equal(dj.RemoteDenoiser(server.url).eps(x, 70), tanh_model(x, 70))
    assert shapes == [(2, 1)]


def test_what_the_server_does_not_say_the_user_states():
    claims = UserClaims("linear", "v_prediction", 16, "NCHW", None)
    found = contract((3, -1, -1), claims, parameters={})
    assert (found.shape, found.layout, found.prediction) == ((16, 16, 3), "NCHW", "v_prediction")
    assert all("as given" in fact for fact in found.facts[:4])
    assert contract((8, 8, 3), parameters=without("layout")).facts[1] == (
        "layout: NHWC, inferred from the shape [-1, 8, 8, 3]"
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"parameters": without("schedule")}, "does not say its noise schedule: add --schedule"),
        ({"parameters": without("prediction")}, "does not say its prediction: add --prediction"),
        (
            {"shape": (3, 5, 3), "parameters": without("layout")},
            "does not say its layout: add --layout",
        ),
        ({"shape": (-1, -1, 3)}, "images of any size: add --image_size"),
        ({"claims": UserClaims(schedule="cosine")}, "--schedule=cosine contradicts the server"),
        ({"claims": UserClaims(schedule="linear:500:0.0001:0.02")}, "contradicts the server"),
        ({"claims": UserClaims(prediction="sample")}, "--prediction=sample contradicts the server, which says epsilon"),
        ({"claims": UserClaims(layout="NCHW")}, "--layout=NCHW contradicts the server, which says NHWC"),
        ({"claims": UserClaims(image_size=8)}, "--image_size=8 contradicts the server, which says 4 x 4"),
        ({"claims": UserClaims(num_classes=8)}, "--num_classes=8 contradicts the server, which takes no label"),
        (
            {"claims": UserClaims(prediction="noise")},
            "--prediction must be one of epsilon, sample, v_prediction, got noise",
        ),
        ({"parameters": {**PARAMETERS, "range": [0, 1]}}, r"must take images in \[-1, 1\], the server says \[0, 1\]"),
        ({"parameters": {**PARAMETERS, "layout": "CHWN"}}, "the server's layout must be one of NHWC, NCHW, got CHWN"),
        (
            {"parameters": {**PARAMETERS, "schedule": "/etc/betas.json"}},
            "must be a name, a list of betas or tables, got /etc/betas.json",
        ),
        ({"parameters": {**PARAMETERS, "schedule": [2.0]}}, "betas must be > 0 and <= 1"),
        (
            {"parameters": {**PARAMETERS, "schedule": {"abar": [1], "sqrt_abar": [1], "sigma": [1]}}},
            "schedule is invalid: ᾱ must be non-increasing",
        ),
        ({"parameters": {**PARAMETERS, "schedule": [float("nan")]}}, "betas must be > 0 and <= 1"),
        ({"parameters": {**PARAMETERS, "schedule": [10**400]}}, "the server's betas must be a list of numbers"),
        ({"parameters": {**PARAMETERS, "schedule": [[0.1], []]}}, "the server's betas must be a list of numbers"),
        (
            {"parameters": {**PARAMETERS, "schedule": {"abar": [1], "sqrt_abar": [1], "sigma": [float("nan")]}}},
            "schedule is invalid",
        ),
        (
            {"parameters": {**PARAMETERS, "schedule": {"abar": [1, 1], "sqrt_abar": [1], "sigma": [0]}}},
            "schedule is invalid",
        ),
        (
            {"parameters": {**PARAMETERS, "schedule": {"abar": ["1"], "sqrt_abar": [1], "sigma": [0]}}},
            "list of numbers",
        ),
        (
            {"parameters": {**PARAMETERS, "max_batch": "many"}},
            "the server's max_batch must be a number, got many",
        ),
        ({"inputs": []}, "it declares eps, but not x"),
        ({"outputs": []}, "it declares x, t, but not eps"),
        ({"shape": (1 << 14, 1 << 14, 3)}, "x must have a fixed shape"),
        ({"shape": (1,) * 1000}, "x must have a fixed shape"),
        ({"shape": ("4", 4, 1)}, r"the server's inputs\[0\].shape\[1\]"),
    ],
)
def test_gaps_and_contradictions_are_one_line(how, message):
    with pytest.raises(ValueError, match=message) as caught:
        contract(**how)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (("inputs", 0), {"datatype": "FP16"}, "x must be FP32, the server says FP16"),
        (("inputs", 0), {"shape": [8, 4, 4, 1]}, r"x must have the shape \[-1, ...\]"),
        (("inputs", 1), {"datatype": "FP32"}, "t must be INT32 or INT64"),
        (("inputs", 1), {"shape": [-1, 2]}, r"t must have the shape \[-1\]"),
        (("outputs", 0), {"datatype": "FP64"}, "eps must be FP32"),
        (("outputs", 0), {"shape": [-1, 4, 4, 2]}, "eps must have the shape of x"),
        (("inputs", 1), {"name": "sigma"}, "it declares x, sigma, eps, but not t"),
    ],
)
def test_tensors_are_checked(place, change, message):
    said = copy.deepcopy(metadata())
    said[place[0]][place[1]].update(change)
    with pytest.raises(ValueError, match=message):
        read_contract(said, {}, UserClaims())


def test_labels():
    said = metadata()
    said["inputs"].append({"name": "label", "datatype": "INT64", "shape": [-1]})
    with pytest.raises(ValueError, match="does not say its number of classes: add --num_classes"):
        read_contract(said, {}, UserClaims())
    found = read_contract(said, {}, UserClaims(num_classes=7))
    assert (found.num_classes, found.label) == (7, "INT64")
    said["inputs"].append({"name": "mask", "datatype": "FP32", "shape": [-1]})
    with pytest.raises(ValueError, match="inputs must be x, t, label or condition, the server has mask"):
        read_contract(said, {}, UserClaims(num_classes=7))


def test_other_layouts_and_predictions_become_noise():
    x = np.random.default_rng(0).normal(size=(5, 4, 6, 3)).astype(np.float32)
    said = metadata((3, 4, 6), {**PARAMETERS, "layout": "NCHW", "prediction": "v_prediction"})
    shapes = []

    def v(given, t):
        shapes.append(given.shape)
        return tanh_model(given, t)

    with FaultyServer(v, said=said) as server:
        denoiser = dj.RemoteDenoiser(server.url, say=lambda line: None)
        t = np.array([0, 10, 300, 700, 999])
        eps = denoiser.eps(x, t)
    assert shapes == [(5, 3, 4, 6)]
    rows = np.asarray(t)
    sqrt_abar, sigma = (np.asarray(table(rows))[:, None, None, None] for table in (LINEAR.sqrt_abar, LINEAR.sigma))
    np.testing.assert_allclose(eps, sqrt_abar * tanh_model(x, t) + sigma * x, rtol=1e-5, atol=1e-6)
    assert denoiser.fingerprint.endswith("NCHW v_prediction")


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@host/v2/models/m",
        "https://host/v2/models/m?token=secret",
        "ftp://host/secret",
        "https:///secret",
        "http://host:secret/v2",
    ],
)
def test_an_address_with_a_secret_is_refused_without_repeating_it(url):
    with pytest.raises(ValueError, match="the URL must") as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("path", ["", "/v2", "/v2/models/", "/v2/models/a/infer", "/v2/models/../x", "/v2/models/a b"])
def test_the_path_names_a_model(path):
    with pytest.raises(ValueError, match="the URL must"):
        dj.RemoteDenoiser(f"http://127.0.0.1:1{path}")


def test_the_token_is_not_sent_in_the_clear_and_not_repeated(monkeypatch, tmp_path):
    monkeypatch.setenv("A_TOKEN", "secret-4711")
    with pytest.raises(ValueError, match=r"a token requires https, got http://example.org") as caught:
        dj.RemoteDenoiser("http://example.org/v2/models/m", options=dj.RemoteOptions(token_env="A_TOKEN"))
    assert "4711" not in str(caught.value)
    monkeypatch.setenv("A_TOKEN", "secret\n4711")
    (tmp_path / "token").write_text("  secret-4711\n")
    assert read_token(dj.RemoteOptions(token_file=tmp_path / "token")) == "secret-4711"
    for options in ({"token_env": "A_TOKEN"}, {"token_env": "secret-4711"}, {"token_file": "secret-4711"}):
        with pytest.raises(ValueError, match="token") as caught:
            read_token(dj.RemoteOptions(**options))
        assert "4711" not in str(caught.value)
    with pytest.raises(ValueError, match="not both"):
        dj.RemoteOptions(token_env="A", token_file="B")
    assert dj.RemoteOptions(token_env="A_TOKEN", max_rate=3).given() == {"max_rate": 3}


@pytest.mark.parametrize("binary", [True, False])
def test_messages_come_back_as_they_were_sent(binary):
    rng = np.random.default_rng(0)
    sent = {"x": rng.normal(size=(2, 3)).astype(np.float32), "t": np.array([7, 9], np.int32)}
    found = decode("inputs", encode("inputs", sent, binary=binary, id="a"))
    assert found.head["id"] == "a"
    for name, array in sent.items():
        assert found.tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(found.tensors[name], array)


def test_numbers_that_are_not_finite_are_not_json():
    with pytest.raises(ValueError, match="not finite"):
        encode("outputs", {"eps": np.array([np.nan], np.float32)}, binary=False)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        ({"shape": [1 << 40]}, "must have 1099511627776 numbers, got 2"),
        ({"shape": [-2]}, "shape of x must be >= 0"),
        ({"shape": [True, 2]}, r"inputs\[0\].shape\[0\]"),
        ({"data": "aGVsbG8="}, "must have a list of data"),
        ({"data": ["1", "2"]}, "must be numbers of its datatype"),
        ({"data": [[1, 2], [3]]}, "must be numbers of its datatype"),
        ({"parameters": [1]}, r"inputs\[0\].parameters"),
        ({"datatype": "BYTES"}, "x must be one of FP32"),
        ({"datatype": "INT32", "data": [1.5, 2]}, "numbers of its datatype"),
    ],
)
def test_hostile_messages_are_one_line(one, message):
    tensor = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2], **one}
    with pytest.raises(ValueError, match=message):
        decode("inputs", Message(json.dumps({"inputs": [tensor]}).encode(), None))
    for length in (0, 10_000):
        with pytest.raises(ValueError, match="the JSON header must have 1 to 2 bytes"):
            decode("inputs", Message(b"{}", length))
