"""Why a kit does not reach its server: against listeners of the standard library, with real certificates."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tests.support.securesum.certificates import Issued, issue, leaf_extensions, make_root

from tightframe.flare import reach

NOW = datetime.now(UTC)
DATES = {"start": NOW - timedelta(days=30), "end": NOW + timedelta(days=300)}
PROJECT, OTHER = make_root(**DATES), make_root(**DATES)
SAN = (x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)


def issued(root: Issued, name: str, **dates: datetime) -> Issued:
    return issue(root, name, extensions=[*leaf_extensions()[:-1], SAN], **(DATES | dates))


def files(folder: Path, root: Issued, own: Issued) -> tuple[str, str, str]:
    folder.mkdir(parents=True)
    key = own.key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    content = {
        "rootCA.pem": root.x509.public_bytes(Encoding.PEM),
        "client.crt": own.x509.public_bytes(Encoding.PEM),
        "client.key": key,
    }
    for name, data in content.items():
        (folder / name).write_bytes(data)
    root_file, certificate, private = (str(folder / name) for name in content)
    return root_file, certificate, private


def kit(folder: Path, port: int, own: Issued | None = None, *, host: str = "localhost") -> Path:
    files(folder, PROJECT, own or issued(PROJECT, "hospital-1"))
    client = {"ssl_private_key": "client.key", "ssl_cert": "client.crt", "ssl_root_cert": "rootCA.pem"}
    servers = [{"service": {"target": f"{host}:{port}"}}]
    (folder / "fed_client.json").write_text(json.dumps({"servers": servers, "client": client}))
    return folder


@contextmanager
def listening(folder: Path, root: Issued) -> Iterator[int]:
    """A federation's server as far as TLS goes: it asks for a certificate of its root, and speaks first."""
    own_root, certificate, key = files(folder, root, issued(root, "localhost"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=own_root)
    context.load_cert_chain(certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # as the engine
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(plain, server_side=True) as shut:
                    shut.sendall(b"settings")
                    shut.recv(1)
            except OSError:
                plain.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


def test_a_server_of_this_federation_is_reached_and_others_are_named(tmp_path: Path) -> None:
    expired = issued(PROJECT, "hospital-1", end=NOW - timedelta(days=1))
    with listening(tmp_path / "own", PROJECT) as port:
        assert reach.unreached(kit(tmp_path / "kit", port)) is None
        late = reach.unreached(kit(tmp_path / "late", port, expired))
        assert late is not None and "does not accept this kit's certificate" in late and "expired" in late
    with listening(tmp_path / "foreign", OTHER) as port:
        assert reach.unreached(kit(tmp_path / "kit-2", port)) == (
            f"the server localhost:{port} belongs to another federation: its root is not this kit's"
        )
    gone = reach.unreached(kit(tmp_path / "kit-3", port))
    assert gone == f"the server localhost:{port} does not answer (Connection refused)"


def test_a_name_that_cannot_be_one_is_said(tmp_path: Path) -> None:
    said = reach.unreached(kit(tmp_path / "kit", 8002, host="a..b"))
    assert said is not None and said.startswith("a..b:8002 is no address of a server (")


def test_a_reason_is_said_once_and_again_after_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[float, str]] = []
    now, connected = 0.0, False
    monkeypatch.setattr(reach, "unreached", lambda startup: "down" if now < 1300 else "foreign")

    class EndedError(Exception):
        pass

    def sleep(seconds: float) -> None:
        nonlocal now, connected
        now += seconds
        connected = 700 <= now < 800
        if now > 1500:
            raise EndedError

    clock: Callable[[], float] = lambda: now  # noqa: E731
    with pytest.raises(EndedError):
        reach.watch(
            Path(), lambda: connected, say=lambda text: said.append((now, text)), sleep=sleep, clock=clock
        )
    assert [(at, text.split(". ")[0]) for at, text in said] == [
        (10, "TF-759: down"),
        (610, "TF-759: down"),
        (800, "TF-759: down"),
        (1300, "TF-759: foreign"),
    ]
