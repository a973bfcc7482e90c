"""A small HTTP server for a few pages: one thread for all connections, each with a deadline, and a limit on how many there are.

Made for an endpoint that must answer whatever else connects to it: who is slow or silent holds a socket for some seconds and nothing
else, and where there are too many the oldest goes. It knows GET and HEAD, no TLS, and closes after each answer.
"""

from __future__ import annotations

import errno
import os
import re
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

#: How long one exchange may take, from the connection to its end.
EXCHANGE_SECONDS = 5.0
#: How many connections there may be at once; beyond that the oldest is closed.
MOST_CONNECTIONS = 64
_MOST_REQUEST_BYTES = 8192
_READ_BYTES = 4096
_NO_DESCRIPTOR_SECONDS = 0.1
_REQUEST_LINE = re.compile(rb"([A-Z]+) ([!-~]+) HTTP/1\.[0-9]")

TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True)
class Answer:
    """What a page answers."""

    status: HTTPStatus
    body: bytes
    kind: str = TEXT


Pages = Mapping[str, Callable[[], Answer]]


def listen(address: str, *, port: int) -> socket.socket:
    """Open a listening socket, which no program that this process starts inherits; "" is every address, of IPv6 and IPv4.

    Raises:
        OSError: the port is taken, or the address is none of this host's.
    """
    if address:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=socket.SOMAXCONN, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            # IPv6 is there, but this container has no address of it.
    return socket.create_server(("", port), backlog=socket.SOMAXCONN)


class Server:
    """Serve pages from a thread until `close`.

    A process that this one forks gives the sockets up, so that none is held open when this one has ended.

    Args:
        listener: closed by `close`.
        pages: by path. They are called in the thread, one at a time, and must be quick.
    """

    def __init__(self, listener: socket.socket, pages: Pages) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener, self._pages = listener, pages
        self._waker, self._wakes = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._connections: dict[_Connection, None] = {}  # the oldest first
        for each in (listener, self._wakes):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(this()))
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        # A signal is for the main thread, which may wait for it with all of them blocked.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def close(self) -> None:
        """End the thread and close all sockets."""
        self._waker.close()
        self._thread.join()
        for connection in list(self._connections):
            self._drop(connection)
        self.release()

    def release(self) -> None:
        """Close the sockets of this process alone; one of another process that shares them goes on."""
        for connection in self._connections:
            connection.socket.close()
        self._listener.close()
        self._wakes.close()
        self._waker.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            oldest = next(iter(self._connections), None)
            wait = None if oldest is None else max(0.0, oldest.deadline - time.monotonic())
            for key, _ in self._selector.select(wait):
                if key.fileobj is self._wakes:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._connections:  # it may just have been dropped to make room
                    self._advance(key.data)
            now = time.monotonic()
            for connection in list(self._connections):
                if connection.deadline > now:
                    break
                self._drop(connection)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # above all: this process has no descriptor left
            if self._connections:
                self._drop(next(iter(self._connections)))
            else:
                time.sleep(_NO_DESCRIPTOR_SECONDS)
            return
        if len(self._connections) >= MOST_CONNECTIONS:
            self._drop(next(iter(self._connections)))
        connection = _Connection(accepted, self._pages)
        self._connections[connection] = None
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._advance(connection)  # the request is often there already

    def _advance(self, connection: _Connection) -> None:
        try:
            wanted = connection.advance()
        except BlockingIOError:
            return
        except OSError:
            wanted = 0
        if wanted:
            self._selector.modify(connection.socket, wanted, connection)
        else:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection]
        self._selector.unregister(connection.socket)
        connection.socket.close()


def _forget(server: Server | None) -> None:
    if server is not None:
        server.release()


class _Connection:
    """One exchange: read the request, write the answer, and wait for the other side to close."""

    def __init__(self, accepted: socket.socket, pages: Pages) -> None:
        accepted.setblocking(False)
        self.socket, self._pages = accepted, pages
        self.deadline = time.monotonic() + EXCHANGE_SECONDS
        self._request, self._answer = bytearray(), memoryview(b"")
        self._is_answered = False

    def advance(self) -> int:
        """Do what can be done without waiting; return the events to wait for, 0 at the end.

        Raises:
            OSError: the connection is broken; BlockingIOError: wait for the same as before.
        """
        if not self._is_answered:
            received = self.socket.recv(_READ_BYTES)
            if not received:
                return 0
            self._request += received
            is_whole = b"\r\n\r\n" in self._request or b"\n\n" in self._request
            if not is_whole and len(self._request) <= _MOST_REQUEST_BYTES:
                return selectors.EVENT_READ
            self._answer = memoryview(respond(bytes(self._request) if is_whole else b"", pages=self._pages))
            self._is_answered = True
        while self._answer:
            try:
                self._answer = self._answer[self.socket.send(self._answer) :]
            except BlockingIOError:
                return selectors.EVENT_WRITE
            if not self._answer:
                self.socket.shutdown(socket.SHUT_WR)
                return selectors.EVENT_READ
        # What is still coming is read and thrown away: closing before that would take the answer back (a reset).
        return selectors.EVENT_READ if self.socket.recv(_READ_BYTES) else 0


def respond(request: bytes, *, pages: Pages) -> bytes:
    """Return the whole response to a request's head."""
    match = _REQUEST_LINE.fullmatch(request.split(b"\n", 1)[0].rstrip(b"\r"))
    if match is None:
        return _response(Answer(HTTPStatus.BAD_REQUEST, b"this is no HTTP request\n"))
    method, path = match[1].decode(), match[2].decode().partition("?")[0]
    if path not in pages:
        return _response(Answer(HTTPStatus.NOT_FOUND, f"here are {', '.join(pages)}\n".encode()), method=method)
    if method not in ("GET", "HEAD"):
        return _response(Answer(HTTPStatus.METHOD_NOT_ALLOWED, b"GET or HEAD\n"), method=method)
    try:
        answer = pages[path]()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other pages must go on
        answer = Answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}\n".encode())
    return _response(answer, method=method)


def _response(answer: Answer, *, method: str = "GET") -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Date: {formatdate(usegmt=True)}",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {len(answer.body)}",
        *(["Allow: GET, HEAD"] if answer.status == HTTPStatus.METHOD_NOT_ALLOWED else []),
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + (b"" if method == "HEAD" else answer.body)
