"""A local S3 server, and a proxy in front of it that counts requests and makes faults.

    with ObjectStore() as store, Proxy(store) as proxy:
        proxy.add(answer(503), "PUT .*partNumber=", times=2)    # the first two parts
        proxy.add(instead(kill_sender), "PUT", skip=5, times=1) # the sixth PUT does not arrive
        with proxy.add(stall(), "PUT .*lock") as stalled:       # forever, until the block ends
            launch(..., env=proxy.environment)
        store.keys("run/")                                      # {"run/a": 3, ...}
        [request.path for request in proxy.requests]

The server is moto's, in a process of its own that ends with this one; it keeps objects in memory and checks no
signatures. The proxy runs in threads of this process, and takes a request in whole before it passes it on.
"""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

import psutil
import pytest

from tests.support.hosts import TIED
from tests.support.launching import PROGRAMS, clean_environment

BUCKET = "bucket"
REGION = "us-east-1"
KEY_ID = "AKIADDPKITTEST"
SECRET = "a-secret-that-no-output-may-show"  # what tests look for
CONDITIONS = ("if-match", "if-none-match")
_CODES = {
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    503: "SlowDown",
}


def environment(url: str) -> dict[str, str]:
    """Variables with which a process finds the server at `url`, and looks nowhere else."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": REGION,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        # Without a key, obstore asks the metadata service of the cloud: here nobody answers, and at once.
        "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture(scope="session")
def object_store() -> "Iterator[ObjectStore]":
    """A server for all tests: each needs a prefix of its own."""
    with ObjectStore() as store:
        yield store


@pytest.fixture
def url(object_store: "ObjectStore", monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a run that no other test has, and the environment with which it is found."""
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/run"


class ObjectStore:
    """A server with one empty bucket, while the block runs."""

    bucket = BUCKET

    def __enter__(self) -> Self:
        # setpriv is replaced by the server: the process is the server's own.
        words = [*TIED, sys.executable, str(PROGRAMS / "serves_objects.py")]
        self.process = subprocess.Popen(
            words, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        try:
            assert self.process.stdout
            port = self.process.stdout.readline()  # written once the port is bound
            assert port, f"the server has ended: {self.process.wait()}"
            self.url = f"http://127.0.0.1:{int(port)}"
            self.make_bucket(self.bucket)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.url)

    def make_bucket(self, name: str) -> None:
        self._ask("PUT", f"/{name}")

    def keys(self, prefix: str = "") -> dict[str, int]:
        """Names of objects with their sizes."""
        found: dict[str, int] = {}
        more: str | None = ""
        while more is not None:
            query = {"list-type": "2", "prefix": prefix}
            if more:
                query["continuation-token"] = more
            page = _xml(self._ask("GET", f"/{self.bucket}?{urlencode(query)}"))
            for entry in page.findall("Contents"):
                found[entry.findtext("Key", "")] = int(entry.findtext("Size", ""))
            more = page.findtext("NextContinuationToken")
        return found

    def uploads(self) -> list[str]:
        """Names of the objects of which a multipart upload was begun, and neither completed nor aborted."""
        page = _xml(self._ask("GET", f"/{self.bucket}?uploads"))
        return [entry.findtext("Key", "") for entry in page.findall("Upload")]

    def read(self, key: str) -> bytes:
        return self._ask("GET", self._path(key))

    def write(self, key: str, data: bytes) -> None:
        self._ask("PUT", self._path(key), data)

    def delete(self, key: str) -> None:
        self._ask("DELETE", self._path(key))

    def _path(self, key: str) -> str:
        return f"/{self.bucket}/{quote(key)}"

    def _ask(self, method: str, path: str, data: bytes = b"") -> bytes:
        connection = _connection(self.url)
        try:
            # Without a signature moto serves public objects only; it looks for one, and does not check it.
            connection.request(method, path, data, {"Authorization": f"AWS {KEY_ID}:unchecked"})
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        assert response.status < 300, f"{method} {path}: {response.status} {body.decode(errors='replace')}"
        return body

    def _end(self) -> None:
        with self.process:
            self.process.kill()


@dataclass
class Request:
    """A request at the proxy; what is not known yet is None."""

    number: int
    """From 0, in the order of arrival."""
    method: str
    path: str
    """With the query."""
    headers: Mapping[str, str]
    """By names in lower case."""
    pid: int | None
    """Process that sent it, if the proxy finds clients."""
    sent: int
    """Bytes from the client that have arrived."""
    received: int = 0
    """Bytes sent to the client."""
    status: int | None = None
    """Of the answer that was sent to the client."""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut_after: int | None = None
    """Bytes of the body after which the connection is closed."""


class ConnectionCutError(Exception):
    """The connection is to be closed without an answer."""


@dataclass
class Exchange:
    """What a fault sees and changes: a request that is not answered yet."""

    request: Request
    headers: dict[str, str]
    """Those passed on."""
    length: int
    """Of the body."""
    rules: "list[Rule]"
    """Those still to come."""
    _read: Callable[[int], bytes]
    _ask: "Callable[[Exchange], Answer]"

    @cached_property
    def body(self) -> bytes:
        return self.receive(self.length)

    def receive(self, length: int) -> bytes:
        """The next bytes of the body."""
        data = self._read(length)
        self.request.sent += len(data)
        if len(data) < length:
            raise ConnectionCutError  # by the client
        return data

    def forward(self) -> Answer:
        """The server's answer, or that of the next fault."""
        if self.rules:
            return self.rules.pop(0).fault(self)
        return self._ask(self)


Fault = Callable[[Exchange], Answer]
Where = str | Callable[[Request], bool]


@dataclass(eq=False)
class Rule:
    """A fault, and the requests that meet it; as a context manager, it is removed at the end of the block."""

    fault: Fault
    where: Callable[[Request], bool]
    times: float
    """The fault is met so often at most."""
    skip: int
    """So many matching requests come through first."""
    _remove: "Callable[[Rule], None]"
    met: list[Request] = field(default_factory=list)

    def takes(self, request: Request) -> bool:
        if len(self.met) >= self.times or not self.where(request):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.met.append(request)
        return True

    def remove(self) -> None:
        """Let requests pass from now on; those that are stalled by it continue."""
        self._remove(self)
        if isinstance(self.fault, _Stall):
            self.fault.released.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class Proxy:
    """A proxy in front of a server, while the block runs. With `finds_clients` requests have the pid of their sender.

    Rules are met in the order in which they were added, each around the next: the first one sees the request first
    and the answer last.
    """

    def __init__(self, store: ObjectStore, *, finds_clients: bool = False) -> None:
        self.store = store
        self.finds_clients = finds_clients
        self.requests: list[Request] = []
        """All that have arrived."""
        self.errors: list[Exception] = []
        """What functions of the test have raised; the first one is raised again at the end of the block."""
        self.closed = False
        """Nothing is passed on any more, not even what was stalled."""
        self._rules: list[Rule] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._server = _ProxyServer(self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True
        self.clear()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        if self.errors and error is None:
            raise self.errors[0]

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.url)

    @property
    def bytes_sent(self) -> int:
        """Bytes from the clients, with the heads of requests."""
        return sum(request.sent for request in self.requests)

    @property
    def bytes_received(self) -> int:
        """Bytes to the clients, with the heads of answers."""
        return sum(request.received for request in self.requests)

    def seen(self, where: Where) -> list[Request]:
        """Requests that have arrived and match."""
        matches = _matcher(where)
        return [request for request in list(self.requests) if matches(request)]

    def add(self, fault: Fault, where: Where = "", *, times: float = float("inf"), skip: int = 0) -> Rule:
        """Let requests meet a fault: all, or those `where` the pattern is found in "METHOD path" or that it accepts."""
        rule = Rule(fault, _matcher(where), times, skip, self._remove)
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Remove all rules."""
        for rule in list(self._rules):
            rule.remove()

    def arrived(self, method: str, path: str, headers: Mapping[str, str], pid: int | None, sent: int) -> Request:
        """Record a request."""
        with self._lock:
            request = Request(len(self.requests), method, path, headers, pid, sent)
            self.requests.append(request)
            return request

    def rules_for(self, request: Request) -> list[Rule]:
        with self._lock:
            return [rule for rule in self._rules if rule.takes(request)]

    def _remove(self, rule: Rule) -> None:
        with self._lock, suppress(ValueError):
            self._rules.remove(rule)


def answer(status: int) -> Fault:
    """Instead of the server: 503 asks for slower requests, 403 says that the client may not do this, ..."""
    code = _CODES[status]
    xml = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>From the test.</Message></Error>'
    return lambda exchange: Answer(status, {"Content-Type": "application/xml"}, xml.encode())


def cut_request(exchange: Exchange) -> Answer:
    """The connection breaks when half of the request's body has arrived: the server sees nothing of it."""
    exchange.receive(exchange.length // 2)
    raise ConnectionCutError


def cut_answer(exchange: Exchange) -> Answer:
    """The connection breaks in the middle of the answer's body."""
    given = exchange.forward()
    return replace(given, cut_after=len(given.body) // 2)


def lose_answer(exchange: Exchange) -> Answer:
    """The server does what is asked, and the connection breaks before the client hears of it."""
    exchange.forward()
    raise ConnectionCutError


class _Stall:
    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.released = threading.Event()

    def __call__(self, exchange: Exchange) -> Answer:
        _ = exchange.body
        self.released.wait(self.seconds)
        return exchange.forward()


def stall(seconds: float | None = None) -> Fault:
    """The request waits before it is passed on: for `seconds`, or until the rule is removed.

    Then the server does what is asked, even if the client has not waited: so a late write can arrive in a real network.
    """
    return _Stall(seconds)


def change_answer(exchange: Exchange) -> Answer:
    """A byte of the answer's body is another one."""
    given = exchange.forward()
    return replace(given, body=_changed(given.body))


def change_request(exchange: Exchange) -> Answer:
    """A byte of the request's body is another one."""
    exchange.body = _changed(exchange.body)
    return exchange.forward()


def drop_conditions(exchange: Exchange) -> Answer:
    """A store that knows no conditional requests, and ignores them."""
    for name in CONDITIONS:
        exchange.headers.pop(name, None)
    return exchange.forward()


def conditional(request: Request) -> bool:
    """Whether a request is conditional."""
    return any(name in request.headers for name in CONDITIONS)


def before(action: Callable[[Request], Any]) -> Fault:
    """Call a function when the request has arrived, before it is passed on."""

    def fault(exchange: Exchange) -> Answer:
        _ = exchange.body
        action(exchange.request)
        return exchange.forward()

    return fault


def instead(action: Callable[[Request], Any]) -> Fault:
    """Call a function when the request has arrived, and close the connection: the server never sees the request."""

    def fault(exchange: Exchange) -> Answer:
        _ = exchange.body
        action(exchange.request)
        raise ConnectionCutError

    return fault


def after(action: Callable[[Request], Any]) -> Fault:
    """Call a function when the server has done what is asked, before the client hears of it."""

    def fault(exchange: Exchange) -> Answer:
        given = exchange.forward()
        action(exchange.request)
        return given

    return fault


def kill_sender(request: Request) -> None:
    """SIGKILL the process that sent the request; for `instead` and `after`."""
    assert request.pid, f"no process has been found that sent {request}"
    os.kill(request.pid, signal.SIGKILL)


class _ProxyServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _ProxyHandler)

    def server_close(self) -> None:
        super().server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # its thread ends


class _ProxyHandler(BaseHTTPRequestHandler):
    """A client's connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _ProxyServer

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)
        self.upstream = _connection(self.server.proxy.store.url)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        self.upstream.close()
        with suppress(OSError):
            super().finish()

    @cached_property
    def client(self) -> int | None:
        ends = self.client_address, self.connection.getsockname()
        for each in psutil.net_connections("tcp4"):
            if (each.laddr, each.raddr) == ends:
                return each.pid
        return None

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionCutError, OSError, http.client.HTTPException):
            self.close_connection = True  # the client has gone, or the server, or it is meant to look so
        except Exception as error:
            self.close_connection = True
            self.server.proxy.errors.append(error)

    def pass_on(self) -> None:
        proxy = self.server.proxy
        headers = {name.lower(): value for name, value in self.headers.items()}
        head = len(self.raw_requestline) + sum(len(name) + len(value) + 4 for name, value in self.headers.items()) + 2
        pid = self.client if proxy.finds_clients else None
        request = proxy.arrived(self.command, self.path, headers, pid, head)
        length = int(headers.get("content-length", 0))
        kept = {name: value for name, value in headers.items() if name not in ("host", "connection", "expect")}
        exchange = Exchange(request, kept, length, proxy.rules_for(request), self.rfile.read, self.ask)
        given = exchange.forward()
        _ = exchange.body  # the next request comes after it
        self.send(request, given)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

    def ask(self, exchange: Exchange) -> Answer:
        """The server's answer."""
        request = exchange.request
        body = exchange.body
        if self.server.proxy.closed:
            raise ConnectionCutError
        self.upstream.request(request.method, request.path, body, exchange.headers)
        response = self.upstream.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())

    def send(self, request: Request, given: Answer) -> None:
        # The answer to HEAD has the length of what GET would send; what came in chunks now has a length.
        dropped = {"transfer-encoding", "connection"}
        if request.method != "HEAD":
            dropped.add("content-length")
        lines = [f"HTTP/1.1 {given.status} {http.client.responses.get(given.status, '')}"]
        lines += [f"{name}: {value}" for name, value in given.headers.items() if name.lower() not in dropped]
        if request.method != "HEAD":
            lines.append(f"Content-Length: {len(given.body)}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        request.status = given.status
        for data in (head, given.body[: given.cut_after]):
            request.received += len(data)  # before the client can continue
            self.wfile.write(data)
        if given.cut_after is not None:
            raise ConnectionCutError

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _matcher(where: Where) -> Callable[[Request], bool]:
    if isinstance(where, str):
        pattern = re.compile(where)
        return lambda request: pattern.search(str(request)) is not None
    return where


def _changed(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


def _connection(url: str) -> http.client.HTTPConnection:
    address = urlsplit(url)
    assert address.hostname
    return http.client.HTTPConnection(address.hostname, address.port)


def _xml(text: bytes) -> ElementTree.Element:
    """Its names without the namespace."""
    root = ElementTree.fromstring(text)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root
