"""A PostgreSQL of the tests' own: a cluster in a temporary folder, on a Unix socket, ended by its id."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1:]
PASSWORD = "Pq7-of-the-database"  # noqa: S105 - of a cluster that lives for a test


def missing() -> str:
    """Say why there can be none here; empty if there can."""
    if not PROGRAMS or not (PROGRAMS[0] / "initdb").is_file():
        return "PostgreSQL's server is not installed here"
    if os.getuid() == 0 and (shutil.which("setpriv") is None or _account() is None):
        return "PostgreSQL does not run as root, and there is no other account for it"
    return ""


def _account() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return None


@contextmanager
def cluster() -> Iterator[str]:
    """Yield the address of a database, whose user's name and password are in it."""
    # Not pytest's folder: another account must be able to go through it, and sockets have short paths.
    folder = Path(tempfile.mkdtemp(prefix="tf-pg-"))
    before: list[str] = []
    account = _account() if os.getuid() == 0 else None
    if account is not None:
        os.chown(folder, account.pw_uid, account.pw_gid)
        ids = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        before = ["setpriv", *ids]
    secret = folder / "password"
    secret.write_text(PASSWORD)
    if account is not None:
        os.chown(secret, account.pw_uid, account.pw_gid)
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    data, log = folder / "data", folder / "log"
    auth = ["--auth=scram-sha-256", f"--pwfile={secret}", "--username=reader", "--encoding=UTF8"]
    made = subprocess.run(
        [*before, str(PROGRAMS[0] / "initdb"), "-D", str(data), "--no-sync", *auth],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    settings = ("listen_addresses=", f"unix_socket_directories={folder}", "fsync=off", "shared_buffers=16MB")
    options = [part for setting in settings for part in ("-c", setting)]
    with log.open("w") as stream:
        server = subprocess.Popen(
            [*before, str(PROGRAMS[0] / "postgres"), "-D", str(data), *options],
            stdout=stream,
            stderr=stream,
            cwd=folder,
            env=environment,
        )
    try:
        address = f"postgresql://reader:{PASSWORD}@/postgres?host={folder}"
        _wait(address, server, log)
        yield address
    finally:
        # A fast shutdown: at SIGTERM it waits for every client, and a pool keeps its connection.
        server.send_signal(signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    import psycopg

    for _ in range(300):
        assert server.poll() is None, log.read_text()
        try:
            psycopg.connect(address).close()
            return
        except psycopg.OperationalError:
            time.sleep(0.1)
    raise AssertionError(log.read_text())
