"""A site's identity and the project's root certificate, from the startup kit that provisioning made.

Nothing here imports the engine: a kit is a folder of files that ``fed_client.json`` (a site's) or
``fed_server.json`` (the server's) names.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from tightframe.config.job_manifest import ROLES, common_name
from tightframe.errors import SiteConfigError
from tightframe.files import quoted
from tightframe.securesum.errors import IdentityError
from tightframe.securesum.identity import Anchor, KeySigner, verify_certificate
from tightframe.securesum.identity.certificate import MARK, is_simulated

SITE_FILE, SERVER_FILE = "fed_client.json", "fed_server.json"
_CERTIFICATE, _KEY, _ROOT = "ssl_cert", "ssl_private_key", "ssl_root_cert"
PERSON_FILE = "fed_admin.json"
_PERSON_CERTIFICATE, _PERSON_KEY, _PERSON_ROOT = "client_cert", "client_key", "ca_cert"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def site_identity(
    startup: Path,
    name: str,
    *,
    production: bool,
    missing_role: bool = False,
    at: datetime | None = None,
) -> tuple[KeySigner, Anchor]:
    """Return a site's signer and the anchor for verifying other sites' certificates.

    The site's own certificate is checked by the same rules that its peers will apply, so that an error
    in it is reported here and not by all the others.

    Args:
        startup: the kit's ``startup`` folder.
        name: this site's name.
        production: whether the engine runs in its secure mode. The key file must then be readable
            by its owner alone, and the root must not be a simulated one.
        missing_role: accept certificates without a role, this site's and its peers'.
        at: time at which certificates must be valid; now, if not given.

    Raises:
        SiteConfigError: TF-615, if a file is missing or unreadable, the key is not the certificate's,
            or the certificate does not prove this site's name.
    """
    config = _json(startup / SITE_FILE)
    names = _names(config.get("client"), startup / SITE_FILE, "client", (_CERTIFICATE, _KEY, _ROOT))
    anchor = _anchor(startup / names[_ROOT], missing_role, _server_identities(config), production)
    certificate = _certificates(startup / names[_CERTIFICATE])[0]
    key_path = startup / names[_KEY]
    key = _read(key_path, private=production)
    try:
        signer = _signer(key, certificate.public_bytes(Encoding.DER))
        verify_certificate(
            signer.certificate, name, anchor, pins=None, pinned_only=False, at=at or datetime.now(UTC)
        )
    except IdentityError as error:
        raise SiteConfigError(
            f"{error} This concerns the startup kit in {startup}: ask whoever provisions the project for a "
            "new one; if the dates do not fit, check this machine's clock first.",
            code="TF-615",
        ) from None
    return signer, anchor


@lru_cache(maxsize=1)
def _signer(key: bytes, certificate: bytes) -> KeySigner:
    """Return a site's signer; a job asks for it at each of its steps, and a key of RSA takes long to read."""
    return KeySigner.from_pem(key, certificate)


def person_identity(startup: Path) -> tuple[KeySigner, Anchor]:
    """Return the signer for a person's jobs and the project's anchor, from the person's startup kit.

    Args:
        startup: the kit's ``startup`` folder.

    Raises:
        SiteConfigError: TF-615, if a file is missing or unreadable, the key is not the certificate's, or the
            certificate does not belong to a person who may submit jobs.
    """
    config = _json(startup / PERSON_FILE)
    admin = config.get("admin")
    names = _names(admin, startup / PERSON_FILE, "admin", (_PERSON_CERTIFICATE, _PERSON_KEY, _PERSON_ROOT))
    anchor = _anchor(startup / names[_PERSON_ROOT], False, (), production=True)
    certificate = _certificates(startup / names[_PERSON_CERTIFICATE])[0]
    try:
        key = _read(startup / names[_PERSON_KEY], private=True)
        signer = KeySigner.from_pem(key, certificate.public_bytes(Encoding.DER))
        verify_certificate(
            signer.certificate,
            common_name(signer.certificate),
            anchor,
            pins=None,
            pinned_only=False,
            at=datetime.now(UTC),
            roles=ROLES,
        )
    except IdentityError as error:
        raise SiteConfigError(
            f"{error} This concerns the startup kit in {startup}: jobs are signed with the kit of a person "
            f"with the role {' or '.join(ROLES)}.",
            code="TF-615",
        ) from None
    return signer, anchor


def server_anchor(startup: Path, *, production: bool, missing_role: bool = False) -> Anchor:
    """Return the anchor by which the server verifies sites' certificates: the root in its own kit.

    Args:
        startup: the kit's ``startup`` folder.
        production: whether the engine runs in its secure mode; the root must then not be a simulated one.
        missing_role: accept certificates without a role.

    Raises:
        SiteConfigError: TF-615, if a file is missing or unreadable.
    """
    path = startup / SERVER_FILE
    servers = _json(path).get("servers")
    first = servers[0] if isinstance(servers, list) and servers else None
    names = _names(first, path, "servers[0]", (_CERTIFICATE, _ROOT))
    own = _certificates(startup / names[_CERTIFICATE])[0]
    common = [str(item.value) for item in own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return _anchor(startup / names[_ROOT], missing_role, common, production)


def _anchor(path: Path, missing_role: bool, not_sites: Iterable[str], production: bool) -> Anchor:
    certificates = _certificates(path)
    if len(certificates) != 1:
        raise _wrong(path, "one root certificate", f"{len(certificates)} certificates")
    if production and is_simulated(certificates[0]):
        raise _wrong(path, "the project's root certificate", f"one that says {MARK!r}")
    return Anchor(certificates[0].public_bytes(Encoding.DER), missing_role, frozenset(not_sites))


def _server_identities(config: Mapping[str, Any]) -> list[str]:
    """Return the names in the server's certificate, which no site may have."""
    servers = config.get("servers")
    entries = [entry for entry in servers if isinstance(entry, dict)] if isinstance(servers, list) else []
    return [entry["identity"] for entry in entries if isinstance(entry.get("identity"), str)]


def _names(section: object, path: Path, where: str, keys: tuple[str, ...]) -> dict[str, str]:
    """Return the files' names under a section's keys, relative to the kit as in the engine.

    Raises:
        SiteConfigError: TF-615, if one is missing.
    """
    names = section if isinstance(section, dict) else {}
    missing = [key for key in keys if not (isinstance(names.get(key), str) and names[key])]
    if missing:
        raise _wrong(path, f"the names of files under `{where}`", f"none for {', '.join(missing)}")
    return {key: names[key] for key in keys}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except ValueError:
        raise _wrong(path, "JSON", "something else") from None
    if not isinstance(value, dict):
        raise _wrong(path, "a JSON object", type(value).__name__)
    return value


def _certificates(path: Path) -> list[x509.Certificate]:
    raw = _read(path)
    try:
        return x509.load_pem_x509_certificates(raw)
    except ValueError:
        raise _wrong(path, "a certificate in PEM", "something else") from None


def _read(path: Path, *, private: bool = False) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(
                os.fstat(file.fileno()).st_mode
            )  # of the file that is read, even if the path was replaced meanwhile
            if private and mode & _OTHERS:
                raise SiteConfigError(
                    f"Expected the key file {path} to be readable by its owner alone (mode 0600), but got "
                    f"mode {mode:04o}: run `chmod 600 {quoted(path)}`, and ask for a new kit if others may "
                    "have read it.",
                    code="TF-615",
                )
            return file.read()
    except OSError as error:
        raise SiteConfigError(
            f"Expected the startup kit to hold a readable file {path}, but got: {error.strerror}. Install "
            "the whole kit, or run the site's engine as the kit's owner.",
            code="TF-615",
        ) from None


def _wrong(path: Path, expected: str, got: str) -> SiteConfigError:
    return SiteConfigError(
        f"Expected {path} to hold {expected}, but got {got}: install the kit's own file.", code="TF-615"
    )
