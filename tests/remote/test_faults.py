"""Every fault of a hosted model ends in the right answer or in one line, and every attempt is in the ledger."""

import contextlib
import re
import shutil
import subprocess
import threading
import time

import faulty_server as stub
import numpy as np
import pytest
from faulty_server import SHAPE, FaultyServer, tanh_model

import dime_jax as dj
from dime_jax import scoring
from dime_jax.remote.transport import Transport, parse_url
from dime_jax.scoring.query_ledger import Budget, BudgetExceeded, Ledger, queries_made

X = np.random.default_rng(0).normal(size=(12, *SHAPE)).astype(np.float32)
T = 70
QUICK = scoring.Retry(attempts=4, first_wait=0.01, longest_wait=0.02)
QUIET = {"retry": QUICK, "say": lambda line: None}
OPTIONS = dj.RemoteOptions(max_batch=4, in_flight=3, timeout=5)


def ask(server, directory, x=X, options=OPTIONS, allowance=None, retry=QUICK):
    """eps of x, with every attempt in a ledger, as a run asks; and what the run said meanwhile."""
    denoiser, said, rows = dj.RemoteDenoiser(server.url, options=options, **QUIET), [], np.arange(len(x))
    with contextlib.closing(Ledger(directory, 0, len(x), allowance, Budget(allowance))) as ledger:
        answer = scoring.ask_in_requests(
            denoiser, x, T, None, debit=lambda part: ledger.debit(rows[part]), retry=retry, say=said.append
        )
    return np.asarray(answer), said


def check_right(server, directory, extra, **how):
    """The answer is right, and so many more queries were made than needed, all of them known to the ledger."""
    answer, said = ask(server, directory, **how)
    np.testing.assert_array_equal(answer, tanh_model(X, T))
    assert queries_made(directory) == sum(server.received) == len(X) + extra
    return said


def test_without_faults_requests_are_cut_and_connections_kept(tmp_path):
    with FaultyServer() as server:
        check_right(server, tmp_path, extra=0)
        assert sorted(server.received) == [4, 4, 4]
        assert server.connections <= 3


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (stub.reset, "closed before|ended after|reset"),
        (stub.truncated, "ended after"),
        (stub.no_headers, "does not say how long it is"),
        (stub.busy(503), r"is busy \(HTTP 503\)"),
        (stub.busy(502), "is busy"),
        (stub.busy(500, text=b'{"error": "out of memory"}'), "HTTP 500: out of memory"),
        (stub.slow(2.5), "did not answer within 1.5 s"),
        (stub.dripping, "did not answer within 1.5 s"),
    ],
)
def test_what_passes_is_asked_again(tmp_path, fault, reason):
    faults = {2: fault} if "500" not in reason else {4: fault}  # the first 500 may be a refusal of binary tensors
    x = X if "500" not in reason else np.concatenate([X, X])
    options = dj.RemoteOptions(max_batch=4, in_flight=1, timeout=1.5 if "1.5" in reason else 30)
    with FaultyServer(faults=faults) as server:
        answer, said = ask(server, tmp_path, x, options)
        np.testing.assert_array_equal(answer, tanh_model(x, T))
        assert queries_made(tmp_path) == sum(server.received) == len(x) + 4
    assert len(said) == 1
    assert re.search(reason, said[0])


def test_an_outage_is_waited_for(tmp_path):
    until = time.monotonic() + 0.5

    def down(handler, *right):
        stub.reply(handler, *((503, {}, b"") if time.monotonic() < until else right))

    retry = scoring.Retry(attempts=8, first_wait=0.1, longest_wait=1)
    with FaultyServer(faults={"all": down}) as server:
        answer, _ = ask(server, tmp_path, retry=retry)
        np.testing.assert_array_equal(answer, tanh_model(X, T))
        assert queries_made(tmp_path) == sum(server.received) > len(X)


def test_default_retries_outlast_ten_seconds():
    waits = [min(scoring.Retry().longest_wait, scoring.Retry().first_wait * 2**n) / 2 for n in range(5)]
    assert sum(waits) > 10


def test_retry_after_is_obeyed_by_all_requests(tmp_path):
    with FaultyServer(faults={1: stub.busy(429, {"Retry-After": "1"})}) as server:
        start = time.monotonic()
        said = check_right(server, tmp_path, extra=4, options=dj.RemoteOptions(max_batch=4, in_flight=1))
        assert time.monotonic() - start >= 1
    assert "retrying in 1.0 s" in said[0]


def test_a_run_that_fails_does_not_sleep_out_a_pause(tmp_path):
    """One request is told to wait for half an hour, another fails for good: nobody waits, and nothing is entered."""
    first, second = threading.Event(), threading.Event()

    def pause(handler, *right):
        second.wait(10)  # else it would be sent after the pause
        stub.reply(handler, 429, {"Retry-After": "1800"}, b"")
        first.set()

    def refuse(handler, *right):
        second.set()
        first.wait(10)
        time.sleep(0.3)
        stub.reply(handler, 404, {}, b"{}")

    start = time.monotonic()
    with FaultyServer(faults={1: pause, 2: refuse}) as server:
        with pytest.raises((ValueError, scoring.TryLater)):
            ask(server, tmp_path, options=dj.RemoteOptions(max_batch=4, in_flight=2))
        assert queries_made(tmp_path) == sum(server.received) == 8
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("after", ["99999", "Wed, 21 Oct 2105 07:28:00 GMT"])
def test_a_day_is_not_waited_for(tmp_path, after):
    with FaultyServer(faults={"all": stub.busy(429, {"Retry-After": after})}) as server:
        with pytest.raises(scoring.TryLater, match=r"is busy \(HTTP 429\)"):
            ask(server, tmp_path, X[:4])
        assert server.received == [4]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (stub.short_tensor, "eps is truncated: it declares 256 bytes, 252 are left"),
        (stub.oversized, "sends 1,099,511,627,776 bytes, at most"),
        (stub.endless, "sends more than"),
        (
            stub.instead(lambda eps: eps.astype(np.int32), datatype="INT32"),
            r"must be eps of float32 \[4, 4, 4, 1\], got int32",
        ),
        (stub.instead(lambda eps: eps, datatype="FP64"), "eps must be one of FP32, INT32, INT64, got FP64"),
        (stub.instead(lambda eps: eps[:2]), r"float32 \[4, 4, 4, 1\], got float32 \[2, 4, 4, 1\]"),
        (
            stub.instead(lambda eps: eps[:2], shape=[4, 4, 4, 1]),
            r"eps of shape \[4, 4, 4, 1\] must have 64 numbers, got 32",
        ),
        (stub.busy(200, text=b"hello"), "the answer of m is invalid: not JSON"),
        (stub.busy(200, text=b'{"outputs": []}'), r"must be eps of float32 \[4, 4, 4, 1\], got nothing"),
        (stub.busy(200, text=b"[" * 100_000), "not JSON|sends 100,000 bytes"),
        (stub.busy(401), "requires a token: give it by --token_env or --token_file"),
        (stub.busy(413, text=b'{"error": "too\\nlarge \\u001b[31m"}'), r"HTTP 413: too large \\x1b\[31m"),
        (stub.busy(302, {"Location": "http://127.0.0.1:1/"}), "redirects in a way that queries cannot follow"),
    ],
)
def test_what_does_not_pass_is_one_line(tmp_path, fault, message):
    with FaultyServer(faults={"all": fault}) as server:
        with pytest.raises(ValueError, match=message) as caught:
            ask(server, tmp_path, X[:4])
        assert "\n" not in str(caught.value)
        assert queries_made(tmp_path) == sum(server.received) == 4


def test_nan_is_the_image_s_affair(tmp_path):
    def third_is_nan(eps):
        eps = eps.copy()
        eps[2] = np.nan
        return eps

    with FaultyServer(faults={1: stub.instead(third_is_nan)}, binary=True) as server:
        answer, _ = ask(server, tmp_path, options=dj.RemoteOptions(max_batch=12))
        np.testing.assert_array_equal(np.isnan(answer).any(axis=(1, 2, 3)), np.arange(12) == 2)


def test_a_server_without_binary_tensors_gets_json(tmp_path):
    with FaultyServer(binary=False) as server:
        answer, said = ask(server, tmp_path)
        np.testing.assert_array_equal(answer, tanh_model(X, T))  # float32 survives JSON
        assert queries_made(tmp_path) == sum(server.received) <= 2 * len(X)
        assert "trying JSON instead of binary tensors" in said[0]
        before = sum(server.received)
        denoiser = dj.RemoteDenoiser(server.url, options=OPTIONS, **QUIET)
        for _ in range(2):
            np.testing.assert_array_equal(denoiser.eps(X[:4], T), tanh_model(X[:4], T))
        assert sum(server.received) - before == denoiser.queries.count == 12  # it is asked in bytes only once


def test_redirects_go_to_the_new_place_without_the_token(tmp_path, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "secret-4711")
    options = dj.RemoteOptions(max_batch=4, in_flight=1, token_env="A_TOKEN")
    with FaultyServer() as new, FaultyServer(faults={"all": stub.redirect(new.place)}) as old:
        answer, _ = ask(old, tmp_path, options=options)
        np.testing.assert_array_equal(answer, tanh_model(X, T))
        assert old.received == [4]
        assert new.received == [4, 4, 4]
        assert queries_made(tmp_path) == 16
        assert set(old.authorizations) == {"Bearer secret-4711"}
        assert set(new.authorizations) == {None}


def test_the_metadata_may_be_redirected_and_a_circle_is_left(tmp_path):
    with FaultyServer() as new:
        with FaultyServer(gets={"/v2/models/m": stub.redirect(new.place, 301)}) as old:
            np.testing.assert_array_equal(dj.RemoteDenoiser(old.url, **QUIET).eps(X[:2], T), tanh_model(X[:2], T))
        assert old.received == []
    circle = FaultyServer(gets={"/v2/models/m": stub.redirect("")})
    with circle, pytest.raises(ValueError, match="redirects more than 3 times"):
        dj.RemoteDenoiser(circle.url, **QUIET)


def test_an_idle_connection_serves_its_own_server_only():
    """A request with the token, prepared before a redirect, must not be sent over a connection to the new place."""
    with FaultyServer() as server:
        place, path = parse_url(server.url)
        transport = Transport(place, OPTIONS)
        for _ in range(2):
            assert transport.get(path, 1 << 20).status == 200
        assert server.connections == 1
        assert transport._connect(place._replace(port=1)).port == 1


def certificate(directory, days):
    """A certificate of 127.0.0.1 that signs itself, by `openssl x509 -req`, and its key."""
    key, request, file, extra = (directory / name for name in ("key.pem", "request.pem", "cert.pem", "extensions"))
    lines = ["subjectAltName=IP:127.0.0.1", "basicConstraints=critical,CA:TRUE", "subjectKeyIdentifier=hash"]
    extra.write_text("\n".join([*lines, "keyUsage=critical,digitalSignature,keyCertSign", ""]))
    make = ["openssl", "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*make, "-keyout", key, "-out", request, "-subj", "/CN=here"], check=True, capture_output=True)
    sign = ["openssl", "x509", "-req", "-in", request, "-signkey", key, "-extfile", extra, "-out", file]
    since = ["-days", str(days)]
    if days < 0 and subprocess.run([*sign, *since], capture_output=True).returncode:
        since = ["-not_before", "20200101000000Z", "-not_after", "20200102000000Z"]  # newer versions of openssl
    subprocess.run([*sign, *since], check=True, capture_output=True)
    return file, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
@pytest.mark.parametrize(
    ("days", "trusted", "message"),
    [(2, True, None), (-1, True, "its certificate is not valid: certificate has expired"), (2, False, "self-signed")],
)
def test_certificates_are_verified(tmp_path, monkeypatch, days, trusted, message):
    made = certificate(tmp_path, days)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(made[0]))
    else:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with FaultyServer(certificate=made) as server:
        if message is None:
            check_right(server, tmp_path, extra=0)
            return
        with pytest.raises(ValueError, match=message):
            dj.RemoteDenoiser(server.url, **QUIET)
        assert not server.authorizations


def test_nobody_there_is_one_line():
    with FaultyServer() as server:
        url = server.url
    with pytest.raises(ConnectionError, match=r"http://127.0.0.1:\d+: .*refused"):
        dj.RemoteDenoiser(url, **QUIET)


@pytest.mark.parametrize("seed", range(4))
def test_the_budget_is_not_exceeded_by_a_single_query(tmp_path, seed):
    """Random faults, several requests in flight, budgets over restarts: the ledger knows of all, and stops in time."""
    rng = np.random.default_rng(seed)
    kinds = [stub.reset, stub.truncated, stub.busy(503), stub.busy(429, {"Retry-After": "0"})]
    faults = {n: kinds[rng.integers(4)] for n in range(1, 60) if rng.random() < 0.5}
    allowed = int(rng.integers(12, 30))
    with FaultyServer(faults=faults) as server:
        for _ in range(5):
            left = allowed - queries_made(tmp_path)
            with contextlib.suppress(BudgetExceeded, ConnectionError):
                answer, _ = ask(server, tmp_path, allowance=left)
                np.testing.assert_array_equal(answer, tanh_model(X, T))
            assert queries_made(tmp_path) == sum(server.received) <= allowed


def test_a_rate_is_kept(tmp_path):
    with FaultyServer() as server:
        start = time.monotonic()
        check_right(server, tmp_path, extra=0, options=dj.RemoteOptions(max_batch=4, in_flight=3, max_rate=20))
        assert time.monotonic() - start >= 8 / 20  # the third request may leave after the first two
