"""Startup kits: those of the engine's own provisioning, and everything that can be wrong with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from tests.support.securesum.certificates import AT, Issued, issue, make_root

from tightframe.errors import SiteConfigError
from tightframe.flare.identity import server_anchor, site_identity
from tightframe.rounds.sums.simulated_identity import simulated_identity, simulated_root_pem
from tightframe.securesum.errors import IdentityError
from tightframe.securesum.identity import Anchor, verify_certificate, verify_signature
from tightframe.securesum.primitives import encode_fields

MESSAGE = encode_fields("test", "message")
ROOT = make_root("project")
SITE, SERVER = issue(ROOT, "site-1"), issue(ROOT, "localhost", role="server")


def pem(issued: Issued) -> bytes:
    return issued.x509.public_bytes(Encoding.PEM)


def key_pem(issued: Issued, encryption: Any = None) -> bytes:
    encoded = issued.key.private_bytes(
        Encoding.PEM, PrivateFormat.TraditionalOpenSSL, encryption or NoEncryption()
    )
    assert isinstance(encoded, bytes)
    return encoded


@pytest.fixture
def startup(tmp_path: Path) -> Path:
    """A site's kit and, in the same folder, the server's."""
    shared = {"ssl_root_cert": "rootCA.pem", "connection_security": "mtls"}
    client = {"ssl_private_key": "client.key", "ssl_cert": "client.crt", **shared}
    server = {"name": "project", "ssl_private_key": "server.key", "ssl_cert": "server.crt", **shared}
    servers = [{"name": "project", "identity": "localhost"}]
    (tmp_path / "fed_client.json").write_text(json.dumps({"servers": servers, "client": client}))
    (tmp_path / "fed_server.json").write_text(json.dumps({"servers": [server]}))
    for name, content in {
        "client.crt": pem(SITE),
        "client.key": key_pem(SITE),
        "server.crt": pem(SERVER),
        "rootCA.pem": pem(ROOT),
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "client.key").chmod(0o600)
    return tmp_path


def load(startup: Path, name: str = "site-1", **options: Any) -> Any:
    return site_identity(startup, name, **{"production": True, "at": AT} | options)


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(SiteConfigError) as caught:
        act()
    assert caught.value.code == "TF-615"
    assert caught.value.__cause__ is None
    assert "PRIVATE KEY" not in str(caught.value)
    return str(caught.value)


def test_a_kit_gives_a_signer_and_the_projects_root(startup: Path) -> None:
    signer, anchor = load(startup)
    assert signer.certificate == SITE.certificate
    assert anchor == Anchor(ROOT.certificate, False, frozenset({"localhost"}))
    verify_signature(SITE.certificate, MESSAGE, signer.sign(MESSAGE), owner="site-1", what="a test")
    assert server_anchor(startup, production=True) == anchor


def test_tolerating_a_missing_role_is_passed_on(startup: Path) -> None:
    site = issue(ROOT, "site-1", role=None)
    (startup / "client.crt").write_bytes(pem(site))
    (startup / "client.key").write_bytes(key_pem(site))
    assert "the role in the certificate of site-1" in refused(lambda: load(startup))
    _, anchor = load(startup, missing_role=True)
    assert anchor.missing_role
    assert server_anchor(startup, production=True, missing_role=True).missing_role


def test_files_may_lie_elsewhere_as_the_configuration_says(startup: Path, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("keys") / "site.key"
    (startup / "client.key").rename(elsewhere)
    config = json.loads((startup / "fed_client.json").read_text())
    config["client"]["ssl_private_key"] = str(elsewhere)
    (startup / "fed_client.json").write_text(json.dumps(config))
    assert load(startup)[0].certificate == SITE.certificate


def test_a_chain_in_the_certificate_file_begins_with_the_sites_own(startup: Path) -> None:
    (startup / "client.crt").write_bytes(pem(SITE) + pem(ROOT))
    assert load(startup)[0].certificate == SITE.certificate
    (startup / "client.crt").write_bytes(pem(ROOT) + pem(SITE))
    assert "the certificate's, but found a different key" in refused(lambda: load(startup))


@pytest.mark.parametrize("file", ["fed_client.json", "client.crt", "client.key", "rootCA.pem"])
def test_a_missing_or_unreadable_file_is_named(startup: Path, file: str) -> None:
    (startup / file).unlink()
    message = refused(lambda: load(startup))
    assert str(startup / file) in message and "No such file" in message
    (startup / file).mkdir()  # a folder is unreadable for everybody, for root as well
    message = refused(lambda: load(startup))
    assert str(startup / file) in message and "Is a directory" in message


@pytest.mark.parametrize("file", ["fed_server.json", "server.crt", "rootCA.pem"])
def test_a_file_missing_from_the_servers_kit_is_named(startup: Path, file: str) -> None:
    (startup / file).unlink()
    assert str(startup / file) in refused(lambda: server_anchor(startup, production=True))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff\xfe{", "JSON, but got something else"),
        (b"{", "JSON, but got something else"),
        (b"[]", "a JSON object, but got list"),
        (b"{}", "none for ssl_cert, ssl_private_key, ssl_root_cert"),
        (b'{"client": []}', "none for ssl_cert"),
        (
            b'{"client": {"ssl_cert": "a", "ssl_private_key": 1, "ssl_root_cert": ""}}',
            "none for ssl_private_key, ssl_root_cert",
        ),
    ],
)
def test_a_configuration_that_names_no_files_is_refused(startup: Path, content: bytes, expected: str) -> None:
    (startup / "fed_client.json").write_bytes(content)
    assert expected in refused(lambda: load(startup))


@pytest.mark.parametrize("servers", [None, [], [[]], {"name": "project"}, [{"ssl_cert": "server.crt"}]])
def test_a_servers_configuration_that_names_no_files_is_refused(startup: Path, servers: Any) -> None:
    (startup / "fed_server.json").write_text(json.dumps({"servers": servers}))
    assert "the names of files under `servers[0]`" in refused(lambda: server_anchor(startup, production=True))


@pytest.mark.parametrize("servers", [None, "localhost", ["localhost"], [{"identity": 1}], [{}]])
def test_a_sites_configuration_need_not_name_the_server(startup: Path, servers: Any) -> None:
    config = json.loads((startup / "fed_client.json").read_text())
    (startup / "fed_client.json").write_text(json.dumps(config | {"servers": servers}))
    assert load(startup)[1].not_sites == frozenset()


@pytest.mark.parametrize("file", ["client.crt", "rootCA.pem"])
@pytest.mark.parametrize("content", [b"", b"certificate", SITE.certificate], ids=["empty", "words", "DER"])
def test_a_file_without_a_pem_certificate_is_named(startup: Path, file: str, content: bytes) -> None:
    (startup / file).write_bytes(content)
    message = refused(lambda: load(startup))
    assert str(startup / file) in message and "a certificate in PEM" in message


def test_several_roots_are_refused(startup: Path) -> None:
    (startup / "rootCA.pem").write_bytes(pem(ROOT) + pem(make_root("other")))
    assert "one root certificate, but got 2 certificates" in refused(lambda: load(startup))
    assert "2 certificates" in refused(lambda: server_anchor(startup, production=True))


def test_a_key_that_is_not_the_certificates_is_refused(startup: Path) -> None:
    (startup / "client.key").write_bytes(key_pem(issue(ROOT, "site-1")))
    message = refused(lambda: load(startup))
    assert "the certificate's, but found a different key" in message and str(startup) in message


def test_an_encrypted_key_and_a_file_that_is_no_key_are_refused(startup: Path) -> None:
    for content in (b"", b"key", key_pem(SITE, BestAvailableEncryption(b"secret"))):
        (startup / "client.key").write_bytes(content)
        assert "an unencrypted private key in PEM" in refused(lambda: load(startup))


def test_a_key_that_others_may_read_is_refused_in_production_with_the_remedy(startup: Path) -> None:
    key = startup / "client.key"
    for mode in (0o640, 0o604, 0o644, 0o610, 0o602):
        key.chmod(mode)
        message = refused(lambda: load(startup))
        assert f"got mode {mode:04o}" in message and f"chmod 600 {key}" in message
        load(startup, production=False)
    for mode in (0o600, 0o400):
        key.chmod(mode)
        load(startup)


def test_a_link_to_a_key_is_judged_by_the_key(startup: Path) -> None:
    key, link = startup / "site.key", startup / "client.key"
    link.rename(key)
    link.symlink_to(key)
    load(startup)
    key.chmod(0o644)
    assert "mode 0644" in refused(lambda: load(startup))


@pytest.mark.parametrize(
    ("made", "name", "expected"),
    [
        (lambda: SITE, "site-2", "'site-2', once, but found 'site-1'"),
        (lambda: SITE, "SITE-1", "'SITE-1', once, but found 'site-1'"),
        (lambda: issue(ROOT, "site-1", end=AT - timedelta(days=1)), "site-1", "valid at 2030-06-01"),
        (lambda: issue(ROOT, "site-1", start=AT + timedelta(days=1)), "site-1", "valid at 2030-06-01"),
        (lambda: issue(make_root("project"), "site-1"), "site-1", "a signature by another key"),
        (lambda: issue(ROOT, "site-1", role="lead"), "site-1", "but found 'lead'"),
        (lambda: SERVER, "localhost", "that of 'localhost', the server"),
    ],
)
def test_a_certificate_that_peers_would_refuse_is_refused_at_home(
    startup: Path, made: Callable[[], Issued], name: str, expected: str
) -> None:
    site = made()
    (startup / "client.crt").write_bytes(pem(site))
    (startup / "client.key").write_bytes(key_pem(site))
    message = refused(lambda: load(startup, name))
    assert expected in message and "ask whoever provisions the project" in message


def test_the_time_is_now_unless_given(startup: Path) -> None:
    site = issue(ROOT, "site-1", start=AT - timedelta(days=4000), end=AT - timedelta(days=3900))
    (startup / "client.crt").write_bytes(pem(site))
    (startup / "client.key").write_bytes(key_pem(site))
    assert "valid at 20" in refused(lambda: site_identity(startup, "site-1", production=True))


def test_a_kit_with_a_simulated_root_is_refused_in_production_even_if_all_else_fits(startup: Path) -> None:
    signer, _ = simulated_identity("job", "site-1", production=False)
    (startup / "rootCA.pem").write_bytes(simulated_root_pem("job"))
    certificate = x509.load_der_x509_certificate(signer.certificate)
    (startup / "client.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    (startup / "client.key").write_bytes(signer.private_pem())
    for act in (lambda: load(startup), lambda: server_anchor(startup, production=True)):
        assert "PROVES NOTHING" in refused(act)
    load(startup, production=False)
    server_anchor(startup, production=False)


# The engine's own provisioning

_CLI = """
import sys
from nvflare.cli import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["nvflare", *line.split()]
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    if code:
        raise SystemExit(f"{line}: {code}")
"""
_PARTICIPANTS = {
    "localhost": "{name: localhost, type: server, org: hospital, fed_learn_port: 8002, admin_port: 8003}",
    "site-1": "{name: site-1, type: client, org: hospital}",
    "lead@hospital.org": "{name: lead@hospital.org, type: admin, org: hospital, role: lead}",
}
_BUILDERS = """builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {config_folder: config, scheme: grpc}
  - path: nvflare.lighter.impl.cert.CertBuilder
"""


@dataclass
class Kits:
    folder: Path

    def startup(self, name: str) -> Path:
        return self.folder / name / "startup"

    def certificate(self, name: str) -> bytes:
        (path,) = self.startup(name).glob("*.crt")
        return x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(Encoding.DER)


def nvflare(folder: Path, *lines: str) -> None:
    """Run commands of the engine's own command line, in one process, at home in ``folder``."""
    done = subprocess.run(
        [sys.executable, "-c", _CLI],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def central(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    folder = tmp_path_factory.mktemp("central")
    listed = "".join(f"  - {participant}\n" for participant in _PARTICIPANTS.values())
    (folder / "project.yml").write_text(
        f"api_version: 3\nname: project\ndescription: test\nparticipants:\n{listed}{_BUILDERS}"
    )
    nvflare(folder, "provision -p project.yml -w kits")
    return Kits(folder / "kits" / "project" / "prod_00")


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "profile.yaml").write_text(
        "name: project\nscheme: grpc\nconnection_security: mtls\n"
        "server: {host: localhost, fed_learn_port: 8002, admin_port: 8003}\n"
    )
    lines = ["cert init --profile profile.yaml -o ca --org consortium"]
    for name, participant in _PARTICIPANTS.items():
        plain = participant.replace(", fed_learn_port: 8002, admin_port: 8003", "")
        (folder / f"{name}.yaml").write_text(f"name: project\nparticipants:\n  - {plain}\n")
        lines += [
            f"cert request -p {name}.yaml --out requests/{name}",
            f"cert approve requests/{name}/{name}.request.zip -c ca --profile profile.yaml "
            f"--out {name}.signed.zip",
        ]
    nvflare(folder, *lines)
    root = x509.load_pem_x509_certificate((folder / "ca" / "rootCA.pem").read_bytes())
    seen = "SHA256:" + root.fingerprint(SHA256()).hex(":").upper()
    nvflare(
        folder,
        *(
            f"package {name}.signed.zip --request-dir requests/{name} --fingerprint {seen} -w kits"
            for name in _PARTICIPANTS
        ),
    )
    return Kits(folder / "kits" / "project" / "prod_00")


@pytest.mark.whole
def test_kits_of_distributed_provisioning_work_as_they_are(distributed: Kits) -> None:
    signer, anchor = site_identity(distributed.startup("site-1"), "site-1", production=True)
    assert signer.certificate == distributed.certificate("site-1")
    assert anchor.not_sites == {"localhost"}
    assert server_anchor(distributed.startup("localhost"), production=True) == anchor
    verify_signature(signer.certificate, MESSAGE, signer.sign(MESSAGE), owner="site-1", what="a test")
    # The root has an organisation, its name as an issuer has none: whole names do not match.
    root, site = (x509.load_der_x509_certificate(der) for der in (anchor.root, signer.certificate))
    assert root.subject != site.issuer


@pytest.mark.whole
@pytest.mark.parametrize(("name", "role"), [("localhost", "server"), ("lead@hospital.org", "lead")])
def test_distributed_provisionings_server_and_admins_are_no_sites(
    distributed: Kits, name: str, role: str
) -> None:
    _, anchor = site_identity(distributed.startup("site-1"), "site-1", production=True)
    for tolerant in (False, True):
        held = Anchor(anchor.root, missing_role=tolerant)
        with pytest.raises(IdentityError, match=f"but found '{role}'"):
            _check_now(distributed.certificate(name), name, held)


@pytest.mark.whole
def test_kits_of_central_provisioning_need_a_missing_role_to_be_tolerated(central: Kits) -> None:
    startup = central.startup("site-1")
    message = refused(lambda: site_identity(startup, "site-1", production=True))
    assert "the role in the certificate of site-1 to be 'client', once, but found none" in message
    signer, anchor = site_identity(startup, "site-1", production=True, missing_role=True)
    assert signer.certificate == central.certificate("site-1")
    assert server_anchor(central.startup("localhost"), production=True, missing_role=True) == anchor
    verify_signature(signer.certificate, MESSAGE, signer.sign(MESSAGE), owner="site-1", what="a test")


@pytest.mark.whole
def test_central_provisionings_server_and_admins_are_no_sites(central: Kits) -> None:
    _, anchor = site_identity(central.startup("site-1"), "site-1", production=True, missing_role=True)
    with pytest.raises(IdentityError, match="but found 'lead'"):
        _check_now(central.certificate("lead@hospital.org"), "lead@hospital.org", anchor)
    # Without a role a server's certificate is like a site's but for the name, which the kit tells us.
    with pytest.raises(IdentityError, match="that of 'localhost', the server"):
        _check_now(central.certificate("localhost"), "localhost", anchor)


@pytest.mark.whole
def test_projects_do_not_accept_each_others_sites(central: Kits, distributed: Kits) -> None:
    _, anchor = site_identity(distributed.startup("site-1"), "site-1", production=True)
    with pytest.raises(IdentityError, match="a signature by another key"):
        _check_now(central.certificate("site-1"), "site-1", Anchor(anchor.root, missing_role=True))


def _check_now(der: bytes, name: str, anchor: Anchor) -> None:
    verify_certificate(der, name, anchor, pins=None, pinned_only=False, at=datetime.now(UTC))
