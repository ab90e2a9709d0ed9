"""`dime-jax serve`: host a model over the Open Inference Protocol (KServe v2), for tests and for teams.

    GET  /v2, /v2/health/live, /v2/health/ready     the server
    GET  /v2/models/NAME, /v2/models/NAME/ready     what `dime_jax.remote.metadata` reads
    POST /v2/models/NAME/infer                      x, t and label or condition -> eps, binary or JSON

It listens on this machine unless told otherwise, and speaks plain HTTP: leave encryption to a proxy or tunnel in front
of it. Requests are evaluated one after the other, in micro-batches of one size, so that the answer about an image does
not depend on what else is in its request. The log has a line for each request, with the number of images in it and the
number of queries so far; it never holds images, tokens, or paths that do not exist.
"""

import hmac
import http.server
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from dime_jax._util.typing import JsonObject
from dime_jax.core.denoiser import Denoiser
from dime_jax.remote import kserve
from dime_jax.remote.answering import Hosted, HttpAnswer, Refused
from dime_jax.remote.options import RemoteOptions
from dime_jax.remote.options import ServeOptions as ServeOptions
from dime_jax.remote.transport import ServerPlace, read_token

_Request: TypeAlias = socket.socket | tuple[bytes, socket.socket]

_CONNECTIONS = 64
_IDLE_SECONDS = 60.0
_SHUTDOWN_SECONDS = 30.0


class Server(http.server.ThreadingHTTPServer):
    """A model on a port, from `start` to `stop`; also a context manager. Each connection has a thread of its own.

    Args:
      denoiser: the model.
      options: how to host it.
      name: the model's name in its URL; its own if None.
      log: shows a line.
    """

    daemon_threads = True  # threads of idle connections must not keep the process alive
    request_queue_size = _CONNECTIONS

    def __init__(
        self,
        denoiser: Denoiser,
        options: ServeOptions = ServeOptions(),  # noqa: B008 (frozen)
        name: str | None = None,
        log: Callable[[str], object] = lambda line: None,
    ):
        self.hosted, self.log = Hosted(denoiser, options, name), log
        token = None if options.token_env is None else read_token(RemoteOptions(token_env=options.token_env))
        self.authorization = None if token is None else f"Bearer {token}".encode()
        self.answering = threading.BoundedSemaphore(_CONNECTIONS)  # a slot for each request that is being answered
        self._open = threading.BoundedSemaphore(_CONNECTIONS)
        model = f"/v2/models/{self.hosted.name}"
        self.infer = f"{model}/infer"
        self.pages: dict[str, JsonObject] = {
            "/v2": {"name": "dime_jax", "version": "1", "extensions": ["binary_tensor_data"]},
            "/v2/health/live": {"live": True},
            "/v2/health/ready": {"ready": True},
            model: self.hosted.metadata(),
            f"{model}/ready": {"name": self.hosted.name, "ready": True},
        }
        self.address_family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        try:
            super().__init__((options.host, options.port), _Handler)
        except OSError as error:
            raise ValueError(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from None

    @property
    def url(self) -> str:
        """The URL of the model."""
        host, port = self.server_address[:2]
        return f"{ServerPlace('http', str(host), port)}/v2/models/{self.hosted.name}"

    def start(self) -> "Server":
        """Start answering, in background threads."""
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Finish the answers that are under way, and give no others."""
        self.shutdown()
        self.server_close()
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        for _ in range(_CONNECTIONS):
            self.answering.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def process_request(self, request: _Request, client_address: object) -> None:
        """Accept a connection, unless too many are open."""
        if self._open.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: _Request, client_address: object) -> None:
        """Serve a connection until it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log nothing: clients may disconnect at any time."""


def serve_until_stopped(denoiser: Denoiser, options: ServeOptions, name: str | None = None) -> int:
    """Host a model until SIGINT or SIGTERM, with the log on standard error, and return the exit code."""

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
                log("no --token_env is given: anyone on this machine can query the model")
            while not stopped.wait(1.0):
                pass
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    log(f"stopped; {server.hosted.queries:,} queries were answered")
    return 0


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "dime_jax", ""
    timeout = _IDLE_SECONDS
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        """Answer questions about the server and the model."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Evaluate the model."""
        self._answer(self._post)

    def _answer(self, make: Callable[[], HttpAnswer]) -> None:
        if not self.server.answering.acquire(blocking=False):  # the server is stopping
            self.close_connection = True
            return
        try:
            self._send(self._answer_to(make))
        finally:
            self.server.answering.release()

    def _answer_to(self, make: Callable[[], HttpAnswer]) -> HttpAnswer:
        given, expected = self.headers.get("Authorization", "").encode("latin-1", "replace"), self.server.authorization
        try:
            if expected is not None and not hmac.compare_digest(given, expected):
                raise Refused(401, "a bearer token is required", {"WWW-Authenticate": "Bearer"})
            return make()
        except Refused as error:
            self.close_connection = True  # the body may not have been read
            return HttpAnswer(error.status, _json({"error": str(error)}), 0, error.headers)
        except Exception as error:  # raised by the model; its message may hold anything
            return HttpAnswer(500, _json({"error": f"the model failed: {type(error).__name__}"}))

    def _get(self) -> HttpAnswer:
        if self.path not in self.server.pages:
            raise Refused(404, f"the model is at /v2/models/{self.server.hosted.name}")
        return HttpAnswer(200, _json(self.server.pages[self.path]))

    def _post(self) -> HttpAnswer:
        hosted = self.server.hosted
        if self.path != self.server.infer:
            raise Refused(404, f"the model is at {self.server.infer}")
        try:
            length = kserve.parse_length(self.headers, "Content-Length")
            head_length = kserve.parse_length(self.headers, kserve.HEAD_LENGTH)
        except ValueError as error:
            raise Refused(400, str(error)) from None
        if length is None:
            raise Refused(411, "Content-Length is required")
        if length > hosted.most_bytes:
            raise Refused(413, f"a request must have at most {hosted.most_bytes} bytes, got {length}")
        body = self.rfile.read(length)
        if len(body) < length:
            raise Refused(400, "the request is truncated")
        return hosted.infer(kserve.Message(body, head_length))

    def _send(self, answer: HttpAnswer) -> None:
        # Log first, so that the log never shows fewer queries than the client knows of.
        path = self.path if self.path in (*self.server.pages, self.server.infer) else "?"
        what = f", {answer.images} images, {self.server.hosted.queries:,} queries in all" if answer.images else ""
        now = time.strftime("%H:%M:%S")
        self.server.log(f"{now} {self.client_address[0]} {self.command} {path} {answer.status}{what}")
        self.send_response(answer.status)
        for name, value in {**answer.message.headers, **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.message.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(answer.message.body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing here: `_send` writes its own line."""


def _json(contents: JsonObject) -> kserve.Message:
    return kserve.Message(json.dumps(contents).encode(), None)
