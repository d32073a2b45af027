"""Certificate authorities and certificates of all kinds, good and bad, for tests.

``issue(make_root("project"), "site-1").signer()`` is a site as distributed provisioning makes it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tightframe.securesum.identity import Anchor, KeySigner

AT = datetime(2030, 6, 1, 12, tzinfo=UTC)
"""A time at which everything here is in date, unless a test says otherwise."""

Kind = Literal["ec", "rsa", "rsa-1024", "p384", "p224", "ed25519"]


@dataclass(frozen=True)
class Issued:
    """A private key with its certificate (DER); a root's, a site's or anybody's."""

    key: Any
    certificate: bytes

    @property
    def x509(self) -> x509.Certificate:
        return x509.load_der_x509_certificate(self.certificate)

    def signer(self) -> KeySigner:
        """What a site signs with."""
        return KeySigner(self.key, self.certificate)

    def anchor(self, **options: Any) -> Anchor:
        """What certificates are held against, if this is a root."""
        return Anchor(self.certificate, **options)


@functools.cache  # RSA keys take long; who needs two of a kind names another `holder`
def make_key(kind: Kind = "ec", holder: str = "") -> Any:
    """A private key."""
    if kind in ("rsa", "rsa-1024"):
        return rsa.generate_private_key(65537, 2048 if kind == "rsa" else 1024)
    if kind == "ed25519":
        return ed25519.Ed25519PrivateKey.generate()
    return ec.generate_private_key(
        {"ec": ec.SECP256R1(), "p384": ec.SECP384R1(), "p224": ec.SECP224R1()}[kind]
    )


def fresh_key() -> Any:
    """An EC key that nobody else has."""
    return ec.generate_private_key(ec.SECP256R1())


def subject(*names: str, organisation: str | None = "hospital", roles: Sequence[str] = ()) -> x509.Name:
    """A subject as provisioning writes it: common name, organisation, role as unstructuredName."""
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names]
    if organisation is not None:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation))
    attributes += [x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role) for role in roles]
    return x509.Name(attributes)


def certify(
    public_key: Any,
    subject: x509.Name,
    issuer: x509.Name,
    issuer_key: Any,
    *,
    extensions: Sequence[tuple[x509.ExtensionType, bool]] = (),
    start: datetime = AT - timedelta(days=100),
    end: datetime = AT + timedelta(days=260),
    hash_algorithm: Any = hashes.SHA256(),  # noqa: B008 - has no state
    rsa_padding: Any = None,
) -> bytes:
    """Any certificate at all, DER."""
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public_key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(end)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(issuer_key, hash_algorithm, rsa_padding=rsa_padding).public_bytes(Encoding.DER)


def make_root(
    name: str = "project", *, key: Kind = "ec", organisation: str | None = None, **options: Any
) -> Issued:
    """A project's own root, self-signed, with a key of its own."""
    private = fresh_key() if key == "ec" else make_key(key, f"root {name}")
    who = subject(name, organisation=organisation)
    options.setdefault("extensions", ca_extensions())
    # As provisioning does: the issuer is the common name alone.
    made = certify(private.public_key(), who, subject(name, organisation=None), private, **options)
    return Issued(private, made)


def issue(
    root: Issued,
    *names: str,
    role: str | None = "client",
    roles: Sequence[str] | None = None,
    key: Kind | Any = "ec",
    **options: Any,
) -> Issued:
    """A certificate signed by ``root`` (or by whatever is passed as one), as distributed provisioning does.

    Args:
        root: the issuer, with its key.
        names: the common name; several for a certificate that has several.
        role: the role attribute; None for none.
        roles: instead of ``role``, any number of them.
        key: the kind of key, or a private key.
        options: see ``certify``.
    """
    if roles is None:
        roles = [] if role is None else [role]
    private = key if not isinstance(key, str) else fresh_key() if key == "ec" else make_key(key)
    issuer = root.x509.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    options.setdefault("extensions", leaf_extensions())
    who = subject(*names, roles=roles)
    return Issued(private, certify(private.public_key(), who, x509.Name(issuer), root.key, **options))


def leaf_extensions(
    *, ca: bool = False, signs: bool = True, certifies: bool = False, client: bool = True
) -> list[tuple[x509.ExtensionType, bool]]:
    """What distributed provisioning writes into a site's certificate, or deviations from it."""
    purpose = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.EMAIL_PROTECTION
    return [
        (x509.BasicConstraints(ca=ca, path_length=None), True),
        (_usage(signs=signs, certifies=certifies), True),
        (x509.ExtendedKeyUsage([purpose, ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([x509.DNSName("site")]), False),
    ]


def ca_extensions() -> list[tuple[x509.ExtensionType, bool]]:
    """What provisioning writes into a root."""
    return [
        (x509.BasicConstraints(ca=True, path_length=None), True),
        (_usage(signs=True, certifies=True), True),
    ]


def make_site_signers(root: Issued, names: Sequence[str]) -> dict[str, KeySigner]:
    """A signer for each name."""
    return {name: issue(root, name).signer() for name in names}


def _usage(*, signs: bool, certifies: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=signs,
        content_commitment=False,
        key_encipherment=True,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certifies,
        crl_sign=certifies,
        encipher_only=False,
        decipher_only=False,
    )
