"""A relay on loopback between one hospital and the server: a network that can be cut and can corrupt."""

from __future__ import annotations

import contextlib
import socket
import threading

LARGE = 4096
"""Bytes in one piece that only a contribution has; what keeps a connection alive is smaller."""


class Network:
    """Carries bytes between whoever connects and one port of this machine.

    Args:
        port: of the server.

    Attributes:
        port: where the hospital connects instead.
        corrupted: pieces of which a byte was changed.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.corrupted = 0
        self._flowing = threading.Event()
        self._flowing.set()
        self._corrupting = threading.Event()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Nothing arrives any more in either direction, and nobody is told, as where a cable is pulled."""
        self._flowing.clear()

    def heal(self) -> None:
        """Bytes go on where they stopped, as TCP repeats them after an outage."""
        self._flowing.set()

    def corrupt(self) -> None:
        """Change one byte of the next contribution on its way to the server."""
        self._corrupting.set()

    def close(self) -> None:
        """End every connection."""
        self._flowing.set()
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                site, _ = self._listener.accept()
            except OSError:
                return
            self._flowing.wait()
            try:
                server = socket.create_connection(("localhost", self._target))
            except OSError:  # the server is down, which the hospital sees as a closed connection
                site.close()
                continue
            self._open += [site, server]
            for source, sink, up in ((site, server, True), (server, site, False)):
                threading.Thread(target=self._carry, args=(source, sink, up), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                self._flowing.wait()
                if up and len(data) >= LARGE and self._corrupting.is_set():
                    self._corrupting.clear()
                    self.corrupted += 1
                    middle = len(data) // 2
                    data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for one in (source, sink):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
