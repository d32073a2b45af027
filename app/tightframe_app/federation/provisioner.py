"""The engine's provisioning commands, run as processes, and the zip files that they exchange.

The engine's answers are read as JSON; its ``next_step``, which ignores our files, is not shown.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from tightframe.errors import JoinError
from tightframe_app.screens import shown

LARGEST = 2**20
"""Most bytes of a file read from one of the zips; each has a few thousand."""
REQUESTED, SIGNED = "request.json", "signed.json"
ROOT = "rootCA.pem"
CODE_DIGITS = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._%+@-]*")


def provisioner(*words: str | Path) -> dict[str, Any]:
    """Run an ``nvflare`` command and return the values that it reports.

    Raises:
        JoinError: TF-752, with the engine's message, if it refused.
    """
    # -P: a module in the current folder must not shadow one of the engine's.
    command = [sys.executable, "-P", "-m", "nvflare.cli", *map(str, words), "--format", "json"]
    done = subprocess.run(  # noqa: S603 (our own words, and paths)
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    answer: Any = None
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            answer = json.loads(line)
    if isinstance(answer, dict) and answer.get("status") == "ok" and done.returncode == 0:
        values = answer.get("data")
        return values if isinstance(values, dict) else {}
    if isinstance(answer, dict):
        reason = f"{answer.get('error_code')}: {answer.get('message')} {answer.get('hint') or ''}"
    else:
        reason = (done.stderr or done.stdout).strip()[-2000:]
    what = " ".join(map(str, words[:2]))
    raise JoinError(
        f"Expected `nvflare {shown(what)}` to succeed, but the engine says: {shown(reason.strip())}",
        code="TF-752",
    )


def zipped(path: Path, *members: str) -> list[bytes] | None:
    """Return the content of some files in a zip; None if it is not a zip, or lacks one of them."""
    try:
        with zipfile.ZipFile(path) as packed:
            if any(packed.getinfo(member).file_size > LARGEST for member in members):
                return None
            return [packed.read(member) for member in members]
    except (OSError, KeyError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile):
        return None


def key_code(csr: bytes) -> str | None:
    """Return the code of a request's key; None if it is not a request signed by its key.

    It is the first 128 bits of the SHA-256 of the public key, the beginning of the pin, in groups of four
    digits. All else in the request, also its id, can be copied with another key under it.
    """
    from cryptography import x509

    try:
        request = x509.load_pem_x509_csr(csr)
        if not request.is_signature_valid:
            return None
    except ValueError:
        return None
    return _code(request.public_key())


def certified_code(pem: bytes) -> str:
    """Return the code of the key in a certificate."""
    from cryptography import x509

    return _code(x509.load_pem_x509_certificates(pem)[0].public_key())


def _code(key: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    digest = hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    return " ".join(re.findall("....", digest.hexdigest()[:CODE_DIGITS]))


def described(path: Path, member: str) -> dict[str, Any] | None:
    """Return the JSON object that describes a zip; None if there is none.

    Its names, which become folders' names, are checked; all else is the sender's claim.
    """
    content = zipped(path, member)
    if content is None:
        return None
    try:
        values = json.loads(content[0])
    except ValueError:
        return None
    texts = ("name", "project", "request_id", "kind", "org")
    if not isinstance(values, dict) or not all(isinstance(values.get(key), str) for key in texts):
        return None
    safe = all(_NAME.fullmatch(values[key]) for key in ("name", "project", "request_id"))
    return values if safe else None


def is_a(kind: str, role: object) -> str:
    """Describe a participant's kind: a site, the server, or a person's role."""
    return {"site": "hospital", "server": "server"}.get(kind, shown(str(role or "person")))
