"""HTTP to a server that is not trusted: persistent connections, the token, redirects, pauses, and limits on everything.

- The token comes from an environment variable or a file. It appears in no error and no log. It is sent to the host that
  the user named and to no other, over plain HTTP only if that is this machine; redirects elsewhere are followed
  without it.
- Certificates are verified. The environment variable SSL_CERT_FILE names a file of trusted authorities.
- A request fails when its time is up, whatever the server is doing; an answer that is too long is not read.
- A request that makes queries is sent once: after a failure or a redirect, the caller decides whether to retry.
"""

import contextlib
import email.message
import email.utils
import functools
import http.client
import os
import pathlib
import re
import select
import socket
import ssl
import threading
import time
import urllib.parse
import weakref
from collections.abc import Mapping
from typing import NamedTuple

from dime_jax._util.text import one_line
from dime_jax.remote.options import RemoteOptions, is_loopback
from dime_jax.scoring.retry import LONGEST_PAUSE, TryLater

_IDLE_SECONDS = 4.0  # servers may close connections that are idle for longer; uvicorn after 5
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = 3
_BUSY = (408, 425, 429, 502, 503, 504)


class ServerPlace(NamedTuple):
    """Where a server is."""

    scheme: str
    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether the server is this machine."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}" + ("" if _PORTS[self.scheme] == self.port else f":{self.port}")


class Reply(NamedTuple):
    """A server's answer."""

    status: int
    headers: email.message.Message
    body: bytes


def parse_url(url: str) -> tuple[ServerPlace, str]:
    """Return the place of a URL, and its path.

    Raises:
      ValueError: without repeating the URL, which may hold a password.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host, port, valid = parts.hostname, parts.port, parts.scheme in _PORTS and re.fullmatch(r"[\x21-\x7e]*", url)
    except ValueError:
        host, valid = None, None
    if not host or not valid:
        raise ValueError("the URL must have the form https://HOST/v2/models/NAME")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("the URL must have no user, password, ? or #: give a token by --token_env or --token_file")
    return ServerPlace(parts.scheme, host, port or _PORTS[parts.scheme]), parts.path


def read_token(options: RemoteOptions) -> str | None:
    """Return the token, or None if the options name none. No error repeats the token, or the name given for it."""
    if options.token_env is not None:
        token = os.environ.get(options.token_env)
        if not token:
            raise ValueError("the environment variable that --token_env names is not set")
    elif options.token_file is not None:
        try:
            token = pathlib.Path(options.token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            raise ValueError("the file that --token_file names cannot be read as text") from None
    else:
        return None
    if not re.fullmatch(r"[\x21-\x7e]{1,8192}", token):
        raise ValueError("the token must consist of printable ASCII characters without spaces")
    return token


class Pace:
    """Limits the queries per second, and lets none pass during a pause.

    Args:
      rate: the most queries per second; None for no limit.
    """

    def __init__(self, rate: float | None):
        self._rate, self._free, self._lock = rate, time.monotonic(), threading.Lock()

    def wait(self, queries: int, stop: threading.Event) -> None:
        """Wait until these queries may be made, or raise TryLater as soon as `stop` is set."""
        with self._lock:
            start = max(time.monotonic(), self._free)
            self._free = start + (queries / self._rate if self._rate else 0.0)
        if start > time.monotonic() and stop.wait(start - time.monotonic()):
            raise TryLater("stopped before it was sent")

    def pause(self, seconds: float) -> None:
        """Let nothing pass for this long."""
        with self._lock:
            self._free = max(self._free, time.monotonic() + seconds)


class Transport:
    """Requests to one server, from any thread.

    Args:
      place: where the server is.
      options: how to ask it.
    """

    def __init__(self, place: ServerPlace, options: RemoteOptions):
        self.place, self._token, self._moved = place, read_token(options), False
        if self._token is not None and place.scheme == "http" and not place.loopback:
            raise ValueError(f"a token requires https, got {place}: others could read it on the way")
        self._timeout, self.pace = options.timeout, Pace(options.max_rate)
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._idle)

    def get(self, path: str, most: int) -> Reply:
        """GET a path of at most this many bytes; redirects are followed."""
        for _ in range(_REDIRECTS + 1):
            reply = self._exchange("GET", path, b"", {}, most)
            if reply.status not in (301, 302, 303, 307, 308):
                return reply
            path = self._follow(reply, path)
        raise ValueError(f"{self.place} redirects more than {_REDIRECTS} times")

    def post(self, path: str, body: bytes, headers: Mapping[str, str], most: int) -> Reply:
        """POST a body, once.

        Args:
          path: where to.
          body: what to send.
          headers: its HTTP headers.
          most: the most bytes that the answer may have.

        Raises:
          TryLater: if the server is busy, or has moved: then the same path is right the next time.
          ConnectionError: if it did not answer, or not completely.
        """
        reply = self._exchange("POST", path, body, headers, most)
        if reply.status in (307, 308):
            moved = self._follow(reply, path)
            if moved != path:
                raise ValueError(f"{self.place} redirects {path} to another path, {one_line(moved)}")
            raise TryLater(f"the server has moved to {self.place}", 0.0)
        return self.check(reply)

    def scrub(self, text: str) -> str:
        """Return a server's text as one short line, without the token, which the server may repeat."""
        return one_line(text if self._token is None else text.replace(self._token, "***"))

    def check(self, reply: Reply) -> Reply:
        """Require an answer about the request rather than about the server.

        Raises:
          TryLater: if the server is busy; until it says it is ready, nothing else is sent either.
          ValueError: if it refuses us.
        """
        if reply.status in (401, 403):
            refusal = "requires a token: give it by --token_env or --token_file"
            if self._moved:
                refusal = "requires a token, but the URL's server redirects to it, and another server gets no token"
            if self._token is not None:
                refusal = "rejects the token"
            raise ValueError(f"{self.place} {refusal} (HTTP {reply.status})")
        if reply.status in _BUSY:
            seconds = _retry_after(reply.headers.get("Retry-After"))
            if seconds is not None and seconds <= LONGEST_PAUSE:
                self.pace.pause(seconds)
            raise TryLater(f"{self.place} is busy (HTTP {reply.status})", seconds)
        if 300 <= reply.status < 400:
            raise ValueError(f"{self.place} redirects in a way that queries cannot follow (HTTP {reply.status})")
        return reply

    def _follow(self, reply: Reply, path: str) -> str:
        """Go where a redirect points, without the token if that is another server, and return the path there."""
        target = urllib.parse.urljoin(f"{self.place}{path}", reply.headers.get("Location", ""))
        try:
            place, path = parse_url(target)
        except ValueError:
            raise ValueError(f"{self.place} redirects to an invalid URL (HTTP {reply.status})") from None
        if self.place.scheme == "https" and place.scheme != "https":
            raise ValueError(f"{self.place} redirects to {place}, which is not encrypted")
        with self._lock:
            if place != self.place:
                self.place, self._token, self._moved = place, None, True
                _close(self._idle)
        return path

    def _exchange(self, method: str, path: str, body: bytes, headers: Mapping[str, str], most: int) -> Reply:
        """Send one request and read its answer, within the timeout; keep the connection if all went well."""
        with self._lock:
            place, token = self.place, self._token
        whole = {"Accept": "*/*", **headers} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        connection, late = self._connect(place), threading.Event()

        def cut_off() -> None:
            late.set()
            with contextlib.suppress(OSError, TypeError):  # there may be no socket yet
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)  # of the connection below TLS

        timer = threading.Timer(self._timeout, cut_off)
        timer.daemon = True
        keep = False
        try:
            timer.start()
            connection.request(method, path, body or None, whole)
            with connection.getresponse() as response:  # it may hold the socket after the connection is closed
                received = _read(response, most, place)
            if late.is_set():  # what was read until then may look like an answer
                raise TimeoutError
            # Servers close connections after errors, whether they say so or not.
            keep = connection.sock is not None and response.status < 400
            return Reply(response.status, response.headers, received)
        except ssl.SSLCertVerificationError as error:
            raise ValueError(f"{place}: its certificate is not valid: {one_line(error.verify_message)}") from None
        except (OSError, http.client.HTTPException) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise ConnectionError(f"{place} did not answer within {self._timeout:g} s") from None
            raise ConnectionError(f"{place}: {self.scrub(_reason(error))}") from None
        finally:
            timer.cancel()
            with self._lock:
                if keep and place == self.place:
                    self._idle.append((connection, time.monotonic()))
                else:
                    connection.close()

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def _connect(self, place: ServerPlace) -> http.client.HTTPConnection:
        """Return an idle connection that is still open, or a new one."""
        with self._lock:
            while self._idle and place == self.place:
                connection, since = self._idle.pop()
                poll = select.poll()
                poll.register(connection.sock, select.POLLIN)
                # Where there is something to read before anything is asked, the other side has closed it.
                if time.monotonic() - since < _IDLE_SECONDS and not poll.poll(0):
                    return connection
                connection.close()
        if place.scheme == "https":
            return http.client.HTTPSConnection(place.host, place.port, timeout=self._timeout, context=self._tls)
        return http.client.HTTPConnection(place.host, place.port, timeout=self._timeout)


def _close(connections: list[tuple[http.client.HTTPConnection, float]]) -> None:
    while connections:
        connections.pop()[0].close()


def _read(response: http.client.HTTPResponse, most: int, place: ServerPlace) -> bytes:
    """Return the body, which must declare its length, be complete and not be too long."""
    if response.length is None and not response.chunked:
        raise http.client.HTTPException("the answer does not say how long it is, so it may be truncated")
    if (response.length or 0) > most:
        raise ValueError(f"{place} sends {response.length:,} bytes, at most {most:,} are accepted")
    body = response.read(most + 1)
    if len(body) > most:
        raise ValueError(f"{place} sends more than {most:,} bytes")
    if response.length:
        raise http.client.IncompleteRead(body, response.length)
    response.read()  # the end of a chunked body, so that the connection can be reused
    return body


def _reason(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return f"the answer ended after {len(error.partial):,} bytes, before it was complete"
    if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError):
        return "the connection was closed before there was an answer"
    return str(error) or type(error).__name__


def _retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header, which holds a number or a date; None if it cannot be read."""
    if value is not None and re.fullmatch(r"\s*\d{1,9}\s*", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value or "").timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
