"""The connection between two ranks of the learner: JSON objects, one a line; the kernel notices when the other end is gone."""

from __future__ import annotations

import json
import logging
import socket
import threading
from typing import Any

KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 40_000),
)
"""A host that vanished without a word is noticed after 40 s."""

Message = dict[str, Any]

log = logging.getLogger("miles")


class Line:
    """One connection: JSON objects, one a line. Several threads may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._lock = connection, threading.Lock()
        self._reader = connection.makefile("rb")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def own_address(self) -> str:
        """This end's address: by it the other end reaches this node."""
        return str(self._socket.getsockname()[0])

    @property
    def peer_address(self) -> str:
        """The other end's address."""
        return str(self._socket.getpeername()[0])

    def send(self, **message: Any) -> bool:
        """False if the other end is gone; whoever receives will notice that."""
        try:
            with self._lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> Message | None:
        """The next message; None when the other end is gone, or silent for longer than a set timeout."""
        try:
            line = self._reader.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def receive_within(self, seconds: float) -> Message | None:
        """As receive, but the whole message comes within this time, also from one who sends byte by byte."""
        closing = threading.Timer(seconds, self.close)
        closing.start()
        message = self.receive()
        closing.cancel()
        return message

    def set_timeout(self, seconds: float | None) -> None:
        """For both directions; None waits for ever."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Both ends notice."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("a connection between ranks was closed already")
        self._socket.close()
