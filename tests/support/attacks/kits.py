"""A hospital's startup kit and configuration on disk, for the commands of its people."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from tests.support.attacks.malicious_server import ROOT, Federation
from typer.testing import CliRunner, Result

from tightframe_app.cli import app
from tightframe_app.jobs import folders


def configuration(
    folder: Path, name: str, state: Path, identity: Callable[[str], Any], **values: Any
) -> Path:
    """Write the kit of a hospital of the federation; return its ``tightframe.json``."""
    kit = folder / name
    (kit / "startup").mkdir(parents=True, exist_ok=True)
    (kit / "local").mkdir(exist_ok=True)
    signer, _ = identity(name)
    client = {"ssl_private_key": "client.key", "ssl_cert": "client.crt", "ssl_root_cert": "rootCA.pem"}
    (kit / "startup" / "fed_client.json").write_text(json.dumps({"servers": [], "client": client}))
    certificate = x509.load_der_x509_certificate(signer.certificate)
    (kit / "startup" / "client.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    (kit / "startup" / "rootCA.pem").write_bytes(ROOT.x509.public_bytes(Encoding.PEM))
    (kit / "startup" / "client.key").write_bytes(signer.private_pem())
    (kit / "startup" / "client.key").chmod(0o600)
    path = kit / "local" / "tightframe.json"
    path.write_text(json.dumps({"state_dir": str(state), "dataset_id": "hearts", **values}))
    return path


def accept_release(
    federation: Federation, name: str, folder: Path, identity: Callable[[str], Any], *more: str
) -> Result:
    """Run ``tightframe site release accept`` for the federation's job at one hospital."""
    config = configuration(folder / "kits", name, federation.state / name, identity)
    job = folder / "exported" / name
    folders.write_job(folders.job_files(federation.job), job)
    line = ["site", "release", "accept", "-c", str(config), "-s", name, "-j", str(job), "--yes", *more]
    return CliRunner().invoke(app, line)
