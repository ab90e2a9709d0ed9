"""`dime-jax serve`: hosting a model over the Open Inference Protocol (KServe v2), for tests and for teams.

    GET  /v2, /v2/health/live, /v2/health/ready     the server
    GET  /v2/models/NAME, /v2/models/NAME/ready     what `dime_jax.remote.metadata` reads
    POST /v2/models/NAME/infer                      x, t and label or condition -> eps, binary or JSON

It listens on this machine unless told otherwise, and speaks plain HTTP: encryption is the work of the proxy or tunnel
in front of it. Requests are evaluated one after the other, in micro-batches of one size, so that an image's answer does
not depend on what else is in its request. The log has a line for each request, with how many images it held and how
many queries that makes in all: no images, no tokens, and of paths only those that exist.
"""

import contextlib
import hmac
import http.server
import json
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from dime_jax._util.typing import JsonObject
from dime_jax.core.denoiser import Denoiser
from dime_jax.remote import kserve
from dime_jax.remote.answering import Hosted, HttpAnswer, Refused, ServeOptions
from dime_jax.remote.options import RemoteOptions
from dime_jax.remote.transport import read_token

__all__ = ["ServeOptions", "Server", "serve_until_stopped"]

_Request: TypeAlias = socket.socket | tuple[bytes, socket.socket]

_CONNECTIONS = 64
_IDLE_SECONDS = 60.0
_SHUTDOWN_SECONDS = 30.0


class Server:
    """A model on a port, from `start` to `stop`; also as a context manager.

    Args:
      denoiser: the model.
      options: how it is hosted.
      name: in its address; the model's own if None.
      log: shows a line.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        options: ServeOptions = ServeOptions(),  # noqa: B008 (frozen)
        name: str | None = None,
        log: Callable[[str], object] = lambda line: None,
    ):
        self.hosted = Hosted(denoiser, options, name)
        token = None if options.token_env is None else read_token(RemoteOptions(token_env=options.token_env))
        self._server = _HttpServer((options.host, options.port), _handler(self.hosted, token, log))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)

    @property
    def url(self) -> str:
        """The address of the model."""
        host, port = self._server.server_address[:2]
        host = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{host}:{port}/v2/models/{self.hosted.name}"

    def start(self) -> "Server":
        """Answer from now on, in threads of its own."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Answer what is being evaluated, and nothing else."""
        self._server.shutdown()
        self._server.server_close()
        self._server.wait_until_idle(_SHUTDOWN_SECONDS)

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()


def serve_until_stopped(denoiser: Denoiser, options: ServeOptions, name: str | None = None) -> int:
    """Host a model until SIGINT or SIGTERM; returns the exit code. The log goes to standard error."""

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    stopped = threading.Event()
    server = Server(denoiser, options, name, log)
    handlers = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.hosted.warm_up()
        with server:
            print(f"serving {server.url}", flush=True)
            if options.token_env is None:
                log("anyone on this machine may ask: there is no --token-env")
            while not stopped.wait(1.0):
                pass
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    log(f"stopped; {server.hosted.queries:,} queries were answered")
    return 0


class _HttpServer(http.server.ThreadingHTTPServer):
    daemon_threads = True  # those of idle connections must not keep the process
    request_queue_size = _CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            super().__init__(address, handler)
        except OSError as error:
            raise ValueError(f"cannot listen on {address[0]}:{address[1]}: {error.strerror}") from None
        self._slots, self._idle = threading.BoundedSemaphore(_CONNECTIONS), threading.Condition()
        self._busy = 0

    def process_request(self, request: _Request, client_address: object) -> None:
        """Take a connection, unless there are too many."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: _Request, client_address: object) -> None:
        """Serve a connection until it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client that goes away is no news."""

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """While a request is answered."""
        with self._idle:
            self._busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def wait_until_idle(self, seconds: float) -> None:
        """Wait for what is being answered."""
        with self._idle:
            self._idle.wait_for(lambda: self._busy == 0, seconds)


def _handler(
    hosted: Hosted, token: str | None, log: Callable[[str], object]
) -> type[http.server.BaseHTTPRequestHandler]:
    """The class that answers one connection's requests."""
    expected = None if token is None else f"Bearer {token}".encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version, sys_version = "dime_jax", ""
        timeout = _IDLE_SECONDS
        disable_nagle_algorithm = True
        server: _HttpServer

        def do_GET(self) -> None:
            """Answer questions about the server and the model."""
            self._answer(self._get)

        def do_POST(self) -> None:
            """Evaluate a request."""
            self._answer(self._post)

        def _answer(self, make: Callable[[], HttpAnswer]) -> None:
            with self.server.busy():
                try:
                    self._authorise()
                    answer = make()
                except Refused as error:
                    answer = HttpAnswer(error.status, _json({"error": str(error)}), 0, error.headers)
                    self.close_connection = True  # its body may not have been read
                except Exception as error:  # the model's; its words may hold anything
                    answer = HttpAnswer(500, _json({"error": f"the model failed: {type(error).__name__}"}))
                self._send(answer)

        def _authorise(self) -> None:
            given = self.headers.get("Authorization", "").encode("latin-1", "replace")
            if expected is not None and not hmac.compare_digest(given, expected):
                raise Refused(401, "expected a bearer token", {"WWW-Authenticate": "Bearer"})

        def _get(self) -> HttpAnswer:
            if self.path not in pages:
                raise Refused(404, f"expected /v2/models/{hosted.name}")
            return HttpAnswer(200, _json(pages[self.path]))

        def _post(self) -> HttpAnswer:
            if self.path != infer:
                raise Refused(404, f"expected {infer}")
            length, head = self.headers.get("Content-Length"), self.headers.get(kserve.HEAD_LENGTH)
            if length is None or not re.fullmatch(r"\d{1,12}", length):
                raise Refused(411, "expected Content-Length")
            if int(length) > hosted.most_bytes:
                raise Refused(413, f"expected at most {hosted.most_bytes} bytes")
            if head is not None and not re.fullmatch(r"\d{1,12}", head):
                raise Refused(400, f"expected {kserve.HEAD_LENGTH} to be a number")
            body = self.rfile.read(int(length))
            if len(body) < int(length):
                raise Refused(400, "the request is cut short")
            return hosted.infer(kserve.Message(body, None if head is None else int(head)))

        def _send(self, answer: HttpAnswer) -> None:
            # Before the client hears of it: what the log says is then never less than what the client knows.
            path = self.path if self.path in pages or self.path == infer else "?"
            what = f", {answer.images} images, {hosted.queries:,} queries in all" if answer.images else ""
            log(f"{time.strftime('%H:%M:%S')} {self.client_address[0]} {self.command} {path} {answer.status}{what}")
            self.send_response(answer.status)
            for name, value in {**answer.message.headers, **answer.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.message.body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(answer.message.body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: `_send` has its own line."""

    model = f"/v2/models/{hosted.name}"
    infer = f"{model}/infer"
    ready = {"name": hosted.name, "ready": True}
    pages: dict[str, JsonObject] = {
        "/v2": {"name": "dime_jax", "version": "1", "extensions": ["binary_tensor_data"]},
        "/v2/health/live": {"live": True},
        "/v2/health/ready": {"ready": True},
        model: hosted.metadata(),
        f"{model}/ready": ready,
    }
    return Handler


def _json(contents: JsonObject) -> kserve.Message:
    return kserve.Message(json.dumps(contents).encode(), None)
