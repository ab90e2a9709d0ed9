"""A server of the Open Inference Protocol that misbehaves on command: written without the code under test."""

import contextlib
import http.server
import json
import socket
import ssl
import struct
import threading
import time

import numpy as np

SHAPE = (4, 4, 1)
PARAMETERS = {"schedule": "linear:1000:0.0001:0.02", "prediction": "epsilon", "layout": "NHWC", "range": [-1, 1]}


def tanh_model(x, t):
    """Every pixel its own; the same whichever way the axes are."""
    gain = 1 + np.asarray(t, np.float32).reshape(-1, *[1] * (x.ndim - 1)) / np.float32(100)
    return np.tanh(np.asarray(x) * gain)


def metadata(shape=SHAPE, parameters=PARAMETERS, **changes):
    return {
        "name": "m",
        "platform": "stub",
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [-1, *shape]},
            {"name": "t", "datatype": "INT32", "shape": [-1]},
        ],
        "outputs": [{"name": "eps", "datatype": "FP32", "shape": [-1, *shape]}],
        "parameters": parameters,
        **changes,
    }


class FaultyServer:
    """Serves a function at `url`; `faults` says by the number of a POST, from 1, or "all", how to misbehave.

    A fault is a function of (handler, status, headers, body of the right answer). `received` has what was asked: the
    number of images and the Authorization header of every POST, whether or not it was answered.
    """

    def __init__(self, model=tanh_model, faults=None, said=None, binary=True, certificate=None, gets=None):
        self.model, self.faults, self.said, self.binary = model, faults or {}, said or metadata(), binary
        self.gets = gets or {}  # answers to GETs that misbehave
        self.received, self.authorizations, self.connections = [], [], 0
        self._lock = threading.Lock()
        stub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 10

            def setup(self):
                super().setup()
                stub.connections += 1

            def log_message(self, *args):
                pass

            def do_GET(self):
                stub.authorizations.append(self.headers.get("Authorization"))
                if self.path in stub.gets:
                    return stub.gets[self.path](self, 200, {}, b"{}")
                found = self.path == "/v2/models/m"
                reply(self, 200 if found else 404, {}, json.dumps(stub.said if found else {"error": "no"}).encode())

            def do_POST(self):
                stub._post(self)

        class Quiet(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args):
                pass

        self._server = Quiet(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if certificate is None else "https"
        self.place = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"
        self.url = f"{self.place}/v2/models/m"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()

    def _post(self, handler):
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        split = handler.headers.get("Inference-Header-Content-Length")
        head = json.loads(body[: int(split)] if split else body)
        tensors, start = {}, int(split or 0)
        for one in head["inputs"]:
            kind = {"FP32": "<f4", "INT32": "<i4", "INT64": "<i8"}[one["datatype"]]
            if split:
                size = one["parameters"]["binary_data_size"]
                tensors[one["name"]] = np.frombuffer(body[start : start + size], kind).reshape(one["shape"])
                start += size
            else:
                tensors[one["name"]] = np.array(one["data"], kind).reshape(one["shape"])
        with self._lock:
            self.received.append(len(tensors["x"]))
            self.authorizations.append(handler.headers.get("Authorization"))
            number = len(self.received)
        if split and not self.binary:
            return reply(handler, 422, {}, b'{"error": "no bytes, please"}')
        eps = np.asarray(self.model(tensors["x"], tensors["t"]), np.float32)
        fault = self.faults.get(number, self.faults.get("all"))
        if fault is not None:
            return fault(handler, *answer(eps, bool(split)))
        return reply(handler, *answer(eps, bool(split)))


def answer(eps, binary, datatype="FP32", shape=None):
    """Status, headers and body of an answer."""
    one = {"name": "eps", "datatype": datatype, "shape": list(eps.shape if shape is None else shape)}
    if not binary:
        one["data"] = [None if np.isnan(value) else float(value) for value in eps.ravel()]
        return 200, {}, json.dumps({"outputs": [one]}).encode()
    blob = eps.tobytes()
    head = json.dumps({"outputs": [{**one, "parameters": {"binary_data_size": len(blob)}}]}).encode()
    return 200, {"Inference-Header-Content-Length": str(len(head))}, head + blob


def reply(handler, status, headers, body, length=None):
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    with contextlib.suppress(OSError):
        handler.wfile.write(body)


def reset(handler, status, headers, body):
    """A connection reset in the middle of the answer."""
    reply(handler, status, headers, body[: len(body) // 2], len(body))
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    handler.connection.close()


def truncated(handler, status, headers, body):
    """An answer that ends too early."""
    reply(handler, status, headers, body[: len(body) // 2], len(body))
    handler.close_connection = True


def no_headers(handler, status, headers, body):
    """An answer that ends in the middle of its headers."""
    handler.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: appl")
    handler.close_connection = True


def short_tensor(handler, status, headers, body):
    """An answer that is whole, with a tensor that is not."""
    reply(handler, status, headers, body[:-4])


def oversized(handler, status, headers, body):
    """An answer that says it has a terabyte."""
    reply(handler, status, headers, body, 1 << 40)
    handler.close_connection = True


def endless(handler, status, headers, body):
    """An answer in pieces that do not end."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(10_000):
            handler.wfile.write(b"10000\r\n" + b"0" * 0x10000 + b"\r\n")
    handler.close_connection = True


def busy(status, headers=None, text=b"{}"):
    return lambda handler, *right: reply(handler, status, headers or {}, text)


def slow(seconds):
    def wait(handler, *right):
        time.sleep(seconds)
        reply(handler, *right)

    return wait


def dripping(handler, *right):
    """An answer whose headers come a byte at a time."""
    with contextlib.suppress(OSError):
        for byte in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"y" * 60:
            handler.connection.sendall(bytes([byte]))
            time.sleep(0.05)
    handler.close_connection = True


def instead(eps_of, **how):
    """Another answer, made from the right one."""

    def change(handler, status, headers, body):
        binary = "Inference-Header-Content-Length" in headers
        start = int(headers.get("Inference-Header-Content-Length", 0))
        one = json.loads(body[:start] if binary else body)["outputs"][0]
        eps = np.frombuffer(body[start:], "<f4").reshape(one["shape"])
        reply(handler, *answer(eps_of(eps), binary, **how))

    return change


def redirect(place, status=307):
    return lambda handler, *right: reply(handler, status, {"Location": place + handler.path}, b"")
