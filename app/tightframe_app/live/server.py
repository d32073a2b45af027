"""A live page's server: this machine only, one browser, read-only.

Its protections, each of which a test removes:

- It listens only on loopback, without an option for another address. From another machine: ``ssh -L``.
- The printed link has a token, which opens the page once. The browser gets a cookie for it that scripts
  cannot read and other sites' requests do not carry, for a path that only this page has, as cookies do not
  distinguish ports.
- A request must name this address as its host, against DNS rebinding, and must not come from another
  origin's page.
- Only GET is answered, by comparison with four fixed paths; no request opens a file.
- A page runs one script, by its hash, loads nothing, and cannot be framed by another page.

The command makes the content in its own time and hands it over complete: no request causes a read.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from socketserver import ThreadingTCPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from tightframe.errors import TightframeError
from tightframe.report.drawing import layout
from tightframe.report.drawing.markup import Markup, tag

EVERY = 2.0
"""Seconds between two requests of a browser."""
SCRIPT = (
    (files(__package__) / "script.js").read_text(encoding="utf-8").replace("EVERY", f"{EVERY * 1000:.0f}")
)
LOOPBACK = "127.0.0.1"
COOKIE = "tightframe"
SECRET_BYTES = 32
MOST_CONNECTIONS = 16
"""Most simultaneous connections; a further one is closed."""
PATIENCE = 10.0
"""Seconds in which a browser must send its request."""
LEAVE = 3 * EVERY
"""Seconds for which the last content waits for an active browser."""
HEADERS = {
    "Content-Security-Policy": f"{layout.policy(SCRIPT)}; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""
_OWN = (None, "none", "same-origin")
"""Accepted values of ``Sec-Fetch-Site``: typed, or from this page."""
_USED = "This link was used before: it opens the page once. Start the command again for a new one."
_LINK = "This page opens with the link that its command printed."
_TYPED = "Another page led here. Copy the link that the command printed into the address bar."
_PLACES = {"": "text/html", "state": "application/json"}
"""Place below the page's own path -> content type."""


class LiveError(TightframeError):
    """A live page cannot be served: TF-816."""

    code = "TF-816"


@dataclass(frozen=True)
class Content:
    """Content of a live page at one moment.

    Attributes:
        said: one sentence, which screen readers announce when it changes.
        parts: of the page, each an element with an id.
        over: whether it is final.
    """

    title: str
    said: str
    parts: Markup
    over: bool = False


class Live:
    """A page that is served during the ``with`` block.

    Args:
        kind: of the page, above its title.
        first: content at the start.
        port: to listen on; 0 for a free one.
        say: called with a line when the link was used, and when somebody tried it again.

    Raises:
        LiveError: TF-816 if the port cannot be used.
    """

    def __init__(
        self,
        title: str,
        kind: str,
        first: Content,
        *,
        port: int = 0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._title, self._kind, self._say = title, kind, say
        self._token, self._session = (secrets.token_urlsafe(SECRET_BYTES) for _ in range(2))
        self._path = f"/{secrets.token_urlsafe(SECRET_BYTES)}/"
        self._unused = True
        self._lock = threading.Lock()
        self._fetched = threading.Event()  # set when a browser has the final content
        self._looked = 0.0  # time of a browser's last request
        self.show(first)
        try:
            self._server = _Server(self, port)
        except OSError as error:
            raise LiveError(
                f"Expected to serve the page on port {port} of this machine, but got: "
                f"{error.strerror or error}. Choose another one with --port, or leave it out."
            ) from None
        self.port = int(self._server.server_address[1])
        self.hosts = frozenset(f"{name}:{self.port}" for name in (LOOPBACK, "localhost"))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)

    @property
    def link(self) -> str:
        """The link that opens the page once; keep it off command lines and logs, which others read."""
        return f"http://{LOOPBACK}:{self.port}/?token={self._token}"

    def __enter__(self) -> Self:
        """Start serving."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait briefly until an active browser has the final content, and stop."""
        if kind is None and self._over and time.monotonic() - self._looked < LEAVE:
            self._fetched.wait(LEAVE)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def show(self, content: Content) -> None:
        """Replace the page's content."""
        state = {"title": content.title, "said": content.said, "content": content.parts, "over": content.over}
        raw = json.dumps(state).encode()
        page = layout.page(
            self._title,
            self._kind,
            tag("p", content.said, id="said", role="status", aria_live="polite"),
            tag("p", id="lost", role="alert", class_="said warn", hidden="hidden"),
            tag("div", content.parts, id="content"),
            tag("footer", tag("p", "Not renewed: without its script this page stays as it is.", id="when")),
            script=SCRIPT,
        )
        bodies = {"": page.encode(), "state": raw}
        self._shown = bodies, f'"{hashlib.sha256(raw).hexdigest()[:32]}"'
        self._over = content.over

    def answer(
        self, target: str, cookies: str, known: str | None
    ) -> tuple[HTTPStatus, dict[str, str], bytes]:
        """Return status, headers and body for a GET from this machine.

        Args:
            target: the request's path and query; compared, never resolved.
            known: the browser's version of the content.
        """
        path, query = _parted(target)
        if path == "/" and (token := dict(query).get("token")) is not None:
            return self._opened(token)
        if not self._is_ours(cookies):
            return _text(HTTPStatus.FORBIDDEN, _LINK)
        place = path.removeprefix(self._path) if path.startswith(self._path) else None
        if place not in _PLACES or query:
            return _text(HTTPStatus.NOT_FOUND, "Nothing is here.")
        bodies, version = self._shown
        self._looked = time.monotonic()
        if self._over:
            self._fetched.set()
        headers = {"Content-Type": f"{_PLACES[place]}; charset=utf-8", "ETag": version}
        if place and known == version:
            return HTTPStatus.NOT_MODIFIED, headers, b""
        return HTTPStatus.OK, headers, bodies[place]

    def _opened(self, token: str) -> tuple[HTTPStatus, dict[str, str], bytes]:
        """Exchange the token for a cookie, once."""
        if not _same(token, self._token):
            return _text(HTTPStatus.FORBIDDEN, _LINK)
        with self._lock:
            first, self._unused = self._unused, False
        if not first:
            self._say("somebody tried the page's link again; it was refused")
            return _text(HTTPStatus.FORBIDDEN, _USED)
        self._say("the page was opened; its link is used up")
        cookie = f"{COOKIE}={self._session}; Path={self._path}; HttpOnly; SameSite=Strict"
        status, headers, body = _text(HTTPStatus.SEE_OTHER, "")
        return status, {**headers, "Location": self._path, "Set-Cookie": cookie}, body

    def _is_ours(self, cookies: str) -> bool:
        pairs = (part.strip().partition("=") for part in cookies.split(";"))
        return any([name == COOKIE and _same(value, self._session) for name, _, value in pairs])


def _parted(target: str) -> tuple[str, list[tuple[str, str]]]:
    """Split a target into path and query; the path is empty for a form that this server does not use."""
    try:
        parts = urlsplit(target)
        query = parse_qsl(parts.query, keep_blank_values=True, max_num_fields=4)
    except ValueError:
        return "", []
    return ("" if parts.scheme or parts.netloc else parts.path), query


def _same(value: str, secret: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(value.encode("utf-8", "surrogatepass"), secret.encode())


def _text(status: HTTPStatus, text: str) -> tuple[HTTPStatus, dict[str, str], bytes]:
    return status, {"Content-Type": "text/plain; charset=utf-8"}, f"{text}\n".encode()


class _Handler(BaseHTTPRequestHandler):
    """One request; it decides only about the request's form."""

    server: _Server
    timeout = PATIENCE
    server_version, sys_version = "tightframe", ""

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].lower() not in self.server.live.hosts:
            return self._send(
                *_text(HTTPStatus.FORBIDDEN, "Expected this machine's own address as the host.")
            )
        if self.headers.get("Sec-Fetch-Site") not in _OWN:
            return self._send(*_text(HTTPStatus.FORBIDDEN, _TYPED))
        cookies = "; ".join(self.headers.get_all("Cookie") or [])
        return self._send(*self.server.live.answer(self.path, cookies, self.headers.get("If-None-Match")))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer anything but a GET without echoing it."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        status, headers, body = _text(status, "Expected a GET request.")
        self._send(status, {**headers, "Allow": "GET"}, body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, as the first request's line has the token."""

    def _send(self, status: HTTPStatus, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in (HEADERS | headers).items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingTCPServer):
    """Server on loopback with a limited number of connections."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True  # at once after the previous server

    def __init__(self, live: Live, port: int) -> None:
        self.live = live
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((LOOPBACK, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing about a browser that disconnected."""
