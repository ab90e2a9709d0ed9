"""Talking to a stranger's server: connections that are kept, the token, redirects, pauses, and limits on everything.

- The token comes from an environment variable or a file. It is in no error and no log, is sent over plain HTTP to this
  machine only, and to no other host than the one that was named: a redirect elsewhere is followed without it.
- Certificates are verified. Names of trusted authorities can be added by the environment variable SSL_CERT_FILE.
- A request has failed when its time is up, whatever the server is doing; an answer that is too long is not read.
- What sends queries is sent once: after a failure or a redirect the caller hears of it and decides to send again.
"""

import contextlib
import email.utils
import functools
import http.client
import ipaddress
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
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dime_jax.remote.options import RemoteOptions
from dime_jax.scoring.retry import LONGEST_PAUSE, TryLater

_IDLE_SECONDS = 4.0  # after which servers may close a connection that they were to keep; uvicorn after 5
_REDIRECTS = 3
_BUSY = (408, 425, 429, 502, 503, 504)


class ServerPlace(NamedTuple):
    """Where a server is."""

    scheme: str
    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether it is this machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = {"http": 80, "https": 443}[self.scheme] == self.port
        return f"{self.scheme}://{host}" + ("" if usual else f":{self.port}")


class Reply(NamedTuple):
    """A server's answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def parse_url(url: str) -> tuple[ServerPlace, str]:
    """The place of an address, and its path.

    Raises:
      ValueError: without repeating the address, which may hold a password.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError("expected an address such as https://HOST/v2/models/NAME") from None
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError(
            "expected an address without user, password, ? and #: a token is read from --token-env or --token-file"
        )
    if parts.scheme not in ("http", "https") or not host or not re.fullmatch(r"[\x21-\x7e]*", url):
        raise ValueError("expected an address such as https://HOST/v2/models/NAME")
    return ServerPlace(parts.scheme, host, port or (80 if parts.scheme == "http" else 443)), parts.path


def read_token(options: RemoteOptions) -> str | None:
    """The token, if one was named. No message repeats it, or the name, in place of which it may have been given."""
    if options.token_env is not None:
        token = os.environ.get(options.token_env)
        if not token:
            raise ValueError("the environment variable that --token-env names is not set")
    elif options.token_file is not None:
        try:
            token = pathlib.Path(options.token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            raise ValueError("the file that --token-file names cannot be read as text") from None
    else:
        return None
    if not re.fullmatch(r"[\x21-\x7e]{1,8192}", token):
        raise ValueError("expected a token of printable ASCII characters without spaces")
    return token


class Pace:
    """Lets so many queries pass per second, and none during a pause.

    Args:
      rate: queries per second; None for no bound.
    """

    def __init__(self, rate: float | None):
        self._rate, self._free, self._lock = rate, time.monotonic(), threading.Lock()

    def wait(self, queries: int, stop: threading.Event) -> None:
        """Wait until so many may be made, or raise TryLater as soon as `stop` is set."""
        with self._lock:
            start = max(time.monotonic(), self._free)
            self._free = start + (queries / self._rate if self._rate else 0.0)
        if start > time.monotonic() and stop.wait(start - time.monotonic()):
            raise TryLater("stopped before it was sent")

    def pause(self, seconds: float) -> None:
        """Let nothing pass for a while."""
        with self._lock:
            self._free = max(self._free, time.monotonic() + seconds)


class Transport:
    """Requests to one server, from any thread.

    Args:
      place: where it is.
      options: how it is asked.
    """

    def __init__(self, place: ServerPlace, options: RemoteOptions):
        self.place, self._token = place, read_token(options)
        self._moved = False
        if self._token is not None and place.scheme == "http" and not place.loopback:
            raise ValueError(f"expected https for a request with a token, got {place}: anyone on the way could read it")
        self._timeout, self.pace = options.timeout, Pace(options.max_rate)
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._idle)

    def get(self, path: str, most: int) -> Reply:
        """GET a path; redirects are followed."""
        for _ in range(_REDIRECTS + 1):
            reply = self._exchange("GET", path, b"", {}, most)
            if reply.status not in (301, 302, 303, 307, 308):
                return reply
            path = self._follow(reply, path)
        raise ValueError(f"{self.place} redirects more than {_REDIRECTS} times")

    def post(self, path: str, body: bytes, headers: Mapping[str, str], most: int) -> Reply:
        """POST something, once.

        Raises:
          TryLater: if the server is busy, or has moved: then the same path is right the next time.
          ConnectionError: if it did not answer, or not completely.
        """
        reply = self._exchange("POST", path, body, headers, most)
        if reply.status in (307, 308):
            moved = self._follow(reply, path)
            if moved != path:
                raise ValueError(f"{self.place} redirects {path} to another path, {printable(moved)}")
            raise TryLater(f"the server has moved to {self.place}", 0.0)
        return self.check(reply)

    def scrub(self, text: str) -> str:
        """A server's own words, for a message: one short line, without the token, which it may repeat."""
        if self._token is not None:
            text = text.replace(self._token, "***")
        return printable(text)

    def check(self, reply: Reply) -> Reply:
        """Require an answer that says something about the request, and not about the server.

        Raises:
          TryLater: if it is busy; nothing else is sent either before it may be.
          ValueError: if it refuses us.
        """
        if reply.status in (401, 403):
            raise ValueError(f"{self.place} {self._refusal()} (HTTP {reply.status})")
        if reply.status in _BUSY:
            seconds = _retry_after(reply.headers.get("retry-after"))
            if seconds is not None and seconds <= LONGEST_PAUSE:
                self.pace.pause(seconds)
            raise TryLater(f"{self.place} is busy (HTTP {reply.status})", seconds)
        if 300 <= reply.status < 400:
            raise ValueError(f"{self.place} redirects in a way that queries cannot follow (HTTP {reply.status})")
        return reply

    def _refusal(self) -> str:
        if self._token is not None:
            return "refuses the token"
        if self._moved:
            return "asks for a token, and gets none: the address that was named redirected here"
        return "asks for a token: name it by --token-env or --token-file"

    def _follow(self, reply: Reply, path: str) -> str:
        """Go where a redirect points, and return the path there."""
        target = urllib.parse.urljoin(f"{self.place}{path}", reply.headers.get("location", ""))
        try:
            place, path = parse_url(target)
        except ValueError:
            raise ValueError(f"{self.place} redirects to an address that is none (HTTP {reply.status})") from None
        if self.place.scheme == "https" and place.scheme != "https":
            raise ValueError(f"{self.place} redirects to {place}, which is not encrypted")
        with self._lock:
            if place != self.place:
                self.place, self._token, self._moved = place, None, True
                _close(self._idle)
        return path

    def _exchange(self, method: str, path: str, body: bytes, headers: Mapping[str, str], most: int) -> Reply:
        """Send one request and read its answer."""
        with self._lock:
            place, token = self.place, self._token
        whole = {"Accept": "*/*", **headers} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        with self._connection(place) as connection:
            connection.request(method, path, body or None, whole)
            with connection.getresponse() as response:  # it may hold the socket after the connection is closed
                received = _read(response, most, place)
                lower = {name.lower(): value for name, value in response.getheaders()}
            if response.will_close or response.status >= 400:  # servers close connections after errors, said or not
                connection.close()
            return Reply(response.status, lower, received)

    @contextlib.contextmanager
    def _connection(self, place: ServerPlace) -> Iterator[http.client.HTTPConnection]:
        """A connection for one exchange, cut off when its time is up; kept for the next one if all went well."""
        connection = self._kept() or self._new(place)
        late = threading.Event()

        def cut_off() -> None:
            late.set()
            with contextlib.suppress(OSError, TypeError):  # there may be no socket yet
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)  # of the connection below TLS

        timer = threading.Timer(self._timeout, cut_off)
        timer.daemon = True
        try:
            timer.start()
            yield connection
            if late.is_set():  # what was read until then may look like an answer
                raise TimeoutError
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise ValueError(f"{place}: its certificate is not valid: {printable(error.verify_message)}") from None
        except ValueError:
            connection.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if late.is_set() or isinstance(error, TimeoutError):
                raise ConnectionError(f"{place} did not answer within {self._timeout:g} s") from None
            raise ConnectionError(f"{place}: {self.scrub(_reason(error))}") from None
        except BaseException:
            connection.close()
            raise
        finally:
            timer.cancel()
        with self._lock:
            if connection.sock is not None and place == self.place:
                self._idle.append((connection, time.monotonic()))

    def _kept(self) -> http.client.HTTPConnection | None:
        with self._lock:
            while self._idle:
                connection, since = self._idle.pop()
                if time.monotonic() - since < _IDLE_SECONDS and not _ended(connection):
                    return connection
                connection.close()
        return None

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def _new(self, place: ServerPlace) -> http.client.HTTPConnection:
        if place.scheme == "https":
            return http.client.HTTPSConnection(place.host, place.port, timeout=self._timeout, context=self._tls)
        return http.client.HTTPConnection(place.host, place.port, timeout=self._timeout)


def _ended(connection: http.client.HTTPConnection) -> bool:
    """Whether the other side has closed it: there is something to read where nothing was asked."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _close(connections: list[tuple[http.client.HTTPConnection, float]]) -> None:
    while connections:
        connections.pop()[0].close()


def _read(response: http.client.HTTPResponse, most: int, place: ServerPlace) -> bytes:
    """The body, which must say its length, be whole and not too long."""
    if response.length is None and not response.chunked:
        raise http.client.HTTPException("the answer does not say how long it is, so it may be cut short")
    if response.length is not None and response.length > most:
        raise ValueError(f"{place} sends {response.length:,} bytes: expected at most {most:,}")
    body = response.read(most + 1)
    if len(body) > most:
        raise ValueError(f"{place} sends more than {most:,} bytes: expected at most as many")
    if response.length:
        raise http.client.IncompleteRead(body, response.length)
    response.read()  # the end of a chunked body, so that the connection can be kept
    return body


def _reason(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return f"the answer ended after {len(error.partial):,} bytes, before it was complete"
    if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError):
        return "the connection was closed before there was an answer"
    return str(error) or type(error).__name__


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if value is None:
        return None
    if re.fullmatch(r"\s*\d{1,9}\s*", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def printable(text: str, most: int = 200) -> str:
    """A stranger's text in one short line, without control characters."""
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "?" for c in text).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."
