"""Why a kit does not reach its federation's server: nobody answers, or another federation's server does.

The engine only says that it tries again. Here a connection is made beside it, with the kit's own files.
"""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tightframe.flare.identity import PERSON_FILE, SITE_FILE

PATIENCE = 10.0
"""Seconds after which the engine is expected to have a connection."""
AGAIN = 600.0
"""Seconds after which the same reason is said again."""
TIMEOUT = 5.0
_ANOTHER_ROOT = frozenset({7, 18, 19, 20, 21})
"""OpenSSL's verification errors of a chain that does not end in the given root."""

log = logging.getLogger("tightframe.reach")


def unreached(startup: Path) -> str | None:
    """Say why the server does not take a kit's connection; None if it does.

    Args:
        startup: the ``startup`` folder of a site's or a person's kit.
    """
    kit = _Kit.read(startup)
    return None if kit is None else kit.unreached()


def watch(
    startup: Path,
    connected: Callable[[], bool],
    *,
    say: Callable[[str], None] = log.warning,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Say why there is no connection, once, and again every ten minutes; never return.

    Args:
        startup: the kit's folder ``startup``.
        connected: tells whether the engine is connected.
        clock: seconds.
    """
    reported, when = "", 0.0
    while True:
        sleep(PATIENCE)
        if connected():
            reported = ""
            continue
        reason = unreached(startup)
        if reason is not None and (reason != reported or clock() - when >= AGAIN) and not connected():
            reported, when = reason, clock()
            say(f"TF-759: {reason}. The engine goes on trying.")


def watching(startup: Path, connected: Callable[[], bool]) -> None:
    """Watch in a thread that ends with the process."""
    threading.Thread(target=watch, args=(startup, connected), daemon=True, name="reach").start()


class _Kit:
    def __init__(self, host: str, port: int, root: Path, certificate: Path, key: Path) -> None:
        self._host, self._port = host, port
        self._files = root, certificate, key

    @classmethod
    def read(cls, startup: Path) -> _Kit | None:
        """Return a kit's files and its server's address; None if they cannot be read, as the engine says."""
        try:
            if (startup / PERSON_FILE).is_file():
                own = _json(startup / PERSON_FILE)["admin"]
                names = own["ca_cert"], own["client_cert"], own["client_key"]
                host, port = own["host"], own["port"]
            else:
                values = _json(startup / SITE_FILE)
                own = values["client"]
                names = own["ssl_root_cert"], own["ssl_cert"], own["ssl_private_key"]
                host, _, port = values["servers"][0]["service"]["target"].rpartition(":")
            return cls(str(host), int(port), *(startup / name for name in names))
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None

    def unreached(self) -> str | None:
        where = f"{self._host}:{self._port}"
        try:
            plain = socket.create_connection((self._host, self._port), TIMEOUT)
        except OSError as error:
            why = error.strerror or str(error)
            return f"the server {where} does not answer ({why})"
        except UnicodeError as error:
            return f"{where} is no address of a server ({error})"
        root, certificate, key = self._files
        with plain:
            try:
                context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(root))
                context.load_cert_chain(certificate, key)
                context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Python 3.13's, not the engine's
                context.set_alpn_protocols(["h2"])
            except (OSError, ValueError):
                return None
            try:
                with context.wrap_socket(plain, server_hostname=self._host) as shut:
                    # A certificate is refused after the handshake; a server that accepts it speaks first.
                    if shut.recv(1):
                        return None
                return f"the server {where} closes the connection, as where it refuses a certificate"
            except ssl.SSLCertVerificationError as error:
                return f"the server {where} {_unverified(error)}"
            except ssl.SSLError as error:
                reason = str(error.reason or error).lower().replace("_", " ")
                if "alert" in reason:
                    return f"the server {where} does not accept this kit's certificate ({reason})"
                return f"at {where} answers no federation's server ({reason})"
            except TimeoutError:
                return f"the server {where} takes connections, but does not answer in {TIMEOUT:g} seconds"
            except OSError as error:
                return f"the server {where} ends the connection ({error.strerror or error})"


def _unverified(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _ANOTHER_ROOT:
        return "belongs to another federation: its root is not this kit's"
    return f"has a certificate that cannot be verified: {error.verify_message}"


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
