"""The identity of a site: its provisioned certificate, the checks on it, and signatures by its key.

A certificate is accepted if the project's root signed it directly, it is not a CA certificate, it is
within its validity, it has exactly the name in the roster and the role ``client``, and its public
key is pinned, if this site has pinned any for that name. The checks are our own and not a web PKI
path validation, because the question differs: not whether some CA vouches for a host name, but
whether *this* root issued *this* site's certificate. Provisioning has no revocation lists: a lost
key is answered by a new root or by pins.

A pin is the SHA-256 of the SubjectPublicKeyInfo (RFC 7469, section 2.4), so that a certificate can be
renewed for the same key; during a change of keys both pins are listed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn, Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tightframe.securesum.errors import IdentityError, SignatureError
from tightframe.securesum.identity.certificate import Certificate, PublicKey, accepted_key, spki
from tightframe.securesum.messages import AnyAdvertisement
from tightframe.securesum.primitives import PREFIX

ROLE = "client"
"""The role that provisioning gives a site (attribute ``unstructuredName``)."""

SIGNATURE_HASHES = ("sha256", "sha384", "sha512")
PSS_SALT_BYTES = 32
"""Salt of our signatures. The engine's login signs with the longest salt that fits, so even the padding of
its signatures differs from ours."""

# A verifier must refuse a critical extension that it does not understand (RFC 5280, section 4.2).
_UNDERSTOOD = (
    x509.AuthorityKeyIdentifier,
    x509.BasicConstraints,
    x509.ExtendedKeyUsage,
    x509.KeyUsage,
    x509.SubjectAlternativeName,
    x509.SubjectKeyIdentifier,
)


class Signer(Protocol):
    """A site's provisioned identity, wherever its key is kept."""

    @property
    def certificate(self) -> bytes:
        """The site's certificate, DER."""
        ...

    def sign(self, message: bytes) -> bytes:
        """Sign one of the protocol's strings with the provisioned key."""
        ...


class KeySigner:
    """A signer with a private key in memory: RSA (PSS, SHA-256, 32-byte salt) or ECDSA (SHA-256).

    It signs the protocol's own strings only, so that neither it nor the other uses of the same key can
    serve as a signing oracle for each other: the engine's login signs text, its encrypted cells begin
    with 01, a client's proof in TLS 1.3 with blanks, the protocol's strings with FF.

    Raises:
        IdentityError: TF-602, if the key is of another type, too weak or not the certificate's.
    """

    __slots__ = ("_certificate", "_key")

    def __init__(self, private_key: object, certificate: bytes) -> None:
        if not isinstance(private_key, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey):
            raise IdentityError("the provisioned key", expected="RSA or EC", found=type(private_key).__name__)
        public = accepted_key(private_key.public_key(), "the provisioned key")
        if spki(public) != spki(_certified_key(certificate)):
            raise IdentityError("the provisioned key", expected="the certificate's", found="a different key")
        self._key = private_key
        self._certificate = bytes(certificate)

    @classmethod
    def from_pem(cls, private: bytes, certificate: bytes) -> KeySigner:
        """Make a signer from an unencrypted PEM private key and a DER certificate.

        Raises:
            IdentityError: TF-602, also if ``private`` is not such a key.
        """
        try:
            key = load_pem_private_key(private, password=None)
        except Exception:  # also if it is encrypted or of an unknown algorithm; the text may quote the file
            raise IdentityError(
                "the provisioned key", expected="an unencrypted private key in PEM", found="something else"
            ) from None
        return cls(key, certificate)

    @property
    def certificate(self) -> bytes:
        """The site's certificate, DER."""
        return self._certificate

    def sign(self, message: bytes) -> bytes:
        """Sign one of the protocol's strings.

        Raises:
            ValueError: if ``message`` is not one of them, because the key has other uses as well.
        """
        _require_prefix(message)
        if isinstance(self._key, rsa.RSAPrivateKey):
            return self._key.sign(message, _pss(), SHA256())
        return self._key.sign(message, ec.ECDSA(SHA256()))

    def private_pem(self) -> bytes:
        """Return the private key, PKCS 8 in PEM, **not encrypted**; store it readable by its owner only."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def __repr__(self) -> str:
        return f"KeySigner(certificate sha256 {hashlib.sha256(self._certificate).hexdigest()[:16]})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a KeySigner is never pickled")


@dataclass(frozen=True)
class Anchor:
    """The trust anchor of certificates.

    Attributes:
        root: the project's root certificate, DER.
        missing_role: accept certificates without a role. Only central provisioning, which is for tests,
            issues them; there the certificates of server and sites differ in the name alone.
        not_sites: names that no site may have, whatever a roster says: the server's.
    """

    root: bytes
    missing_role: bool = False
    not_sites: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Verifier:
    """Verifies advertisements by the project's root and this site's pins.

    Attributes:
        anchor: the project's root.
        pins: peer -> SHA-256 of each public key that is accepted for it.
        pinned_only: refuse peers that have no pin.
        at: the time at which certificates must be valid, with a time zone.
    """

    anchor: Anchor
    pins: Mapping[str, frozenset[bytes]]
    pinned_only: bool
    at: datetime

    def check(self, advertisement: AnyAdvertisement, params_digest: bytes) -> None:
        """Check that the certificate is the named site's and that its key signed the advertisement.

        Raises:
            IdentityError: TF-602.
            SignatureError: TF-603.
        """
        name = advertisement.name
        verify_certificate(
            advertisement.certificate,
            name,
            self.anchor,
            pins=self.pins.get(name),
            pinned_only=self.pinned_only,
            at=self.at,
        )
        verify_signature(
            advertisement.certificate,
            advertisement.signed(params_digest),
            advertisement.signature,
            owner=name,
            what="an advertisement",
        )


BY_ROOT = "issued by the project's root itself"
"""Expectation of a certificate; an error with it says that the root is another project's."""


def verify_certificate(
    der: bytes,
    name: str,
    anchor: Anchor,
    *,
    pins: frozenset[bytes] | None,
    pinned_only: bool,
    at: datetime,
    roles: Sequence[str] = (ROLE,),
) -> PublicKey:
    """Verify the certificate of a site, or of a holder of another role, and return its public key.

    Args:
        name: the site's name in the roster.
        anchor: the project's root.
        pins: accepted SHA-256 of its public key; None if this site has none for it. An empty set
            accepts no key.
        pinned_only: refuse if ``pins`` is None.
        at: the time at which the certificate and the root must be valid.
        roles: the accepted roles; the certificate must have one of them.

    Raises:
        IdentityError: TF-602, naming the first check that failed; ``blamed`` is ``name`` unless the
            root itself is at fault.
        ValueError: if ``at`` has no time zone.
    """
    if at.utcoffset() is None:
        raise ValueError("Expected argument `at` to have a time zone, but got a naive datetime.")
    what, root_what = f"the certificate of {name}", "the project's root certificate"
    root = Certificate.read(anchor.root, root_what)
    if not root.is_ca:
        raise IdentityError(root_what, expected="a CA certificate", found="one that may not issue others")
    root_key = accepted_key(root.public_key, f"the key of {root_what}")

    leaf = Certificate.read(der, what, name)
    # First of all: of another project's root neither dates nor anything else matter.
    _check_issued(leaf, root, root_key, what, name)
    root.check_dates(at, root_what, None)
    if leaf.is_ca:
        raise IdentityError(what, expected="a site's", found="a CA certificate", blamed=name)
    leaf.check_dates(at, what, name)
    _check_name(leaf, name, anchor, what)
    _check_role(leaf, name, roles, anchor.missing_role)
    _check_usage(leaf, what, name)
    public = accepted_key(leaf.public_key, f"the key of {name}", name)
    if pins is None and pinned_only:
        raise IdentityError(f"the key of {name}", expected="pinned at this site", found="no pin", blamed=name)
    pin = hashlib.sha256(spki(public)).digest()
    if pins is not None and pin not in pins:
        accepted = " or ".join(sorted(item.hex() for item in pins)) or "none (the list of pins is empty)"
        raise IdentityError(
            f"the SHA-256 of the public key of {name}", expected=accepted, found=pin.hex(), blamed=name
        )
    return public


def verify_signature(
    certificate_der: bytes, message: bytes, signature: bytes, *, owner: str, what: str
) -> None:
    """Check a signature by a certificate's key over one of the protocol's strings.

    Only the key is used; ``verify_certificate`` checks whose certificate it is.

    Raises:
        SignatureError: TF-603, naming the owner of the key and the signed message.
        IdentityError: TF-602, if the certificate has no acceptable key.
        ValueError: if ``message`` is not one of the protocol's strings.
    """
    _require_prefix(message)
    public = _certified_key(certificate_der, owner)
    try:
        if isinstance(public, rsa.RSAPublicKey):
            public.verify(signature, message, _pss(), SHA256())
        else:
            public.verify(signature, message, ec.ECDSA(SHA256()))
    except InvalidSignature:
        raise SignatureError(
            f"the signature of {what}", expected=f"that of {owner}", found="another or none"
        ) from None


def public_key_hash(certificate_der: bytes) -> bytes:
    """Return the pin of a certificate's key: SHA-256 of its SubjectPublicKeyInfo (DER), 32 bytes.

    Raises:
        IdentityError: TF-602, if this is not a certificate or its key is not acceptable.
    """
    return hashlib.sha256(spki(_certified_key(certificate_der))).digest()


def _check_issued(leaf: Certificate, root: Certificate, root_key: PublicKey, what: str, name: str) -> None:
    """Check that the issuer is the root by name, and that the root signed the certificate."""
    # Common names are compared and not whole names: provisioning writes only the root's common name as
    # the issuer, even if the root's subject has an organisation as well. The name proves nothing in any
    # case; the signature does.
    issuer, expected = _attributes(leaf.issuer, NameOID.COMMON_NAME), BY_ROOT
    if issuer != _attributes(root.subject, NameOID.COMMON_NAME):
        raise IdentityError(what, expected=expected, found=f"issuer {_listed(issuer)}", blamed=name)
    how, hashed = leaf.signed_how, leaf.signed_hash
    if hashed is None or hashed.name not in SIGNATURE_HASHES:
        raise IdentityError(
            what,
            expected=f"signed with {' or '.join(SIGNATURE_HASHES)}",
            found="no hash" if hashed is None else hashed.name,
            blamed=name,
        )
    try:
        if isinstance(root_key, rsa.RSAPublicKey) and isinstance(how, padding.PKCS1v15 | padding.PSS):
            root_key.verify(leaf.signature, leaf.signed, how, hashed)
        elif isinstance(root_key, ec.EllipticCurvePublicKey) and isinstance(how, ec.ECDSA):
            root_key.verify(leaf.signature, leaf.signed, how)
        else:
            raise InvalidSignature
    except InvalidSignature:
        raise IdentityError(
            what, expected=expected, found="a signature by another key", blamed=name
        ) from None


def _check_name(leaf: Certificate, name: str, anchor: Anchor, what: str) -> None:
    common = _attributes(leaf.subject, NameOID.COMMON_NAME)
    if common != [name]:
        raise IdentityError(
            f"the common name in {what}", expected=f"{name!r}, once", found=_listed(common), blamed=name
        )
    if name in anchor.not_sites:
        raise IdentityError(what, expected="a site's", found=f"that of {name!r}, the server", blamed=name)


def _check_role(leaf: Certificate, name: str, accepted: Sequence[str], missing_role: bool) -> None:
    roles = _attributes(leaf.subject, NameOID.UNSTRUCTURED_NAME)
    if roles not in [[role] for role in accepted] and not (missing_role and not roles):
        raise IdentityError(
            f"the role in the certificate of {name}",
            expected=f"{' or '.join(map(repr, accepted))}, once" + (", or none" if missing_role else ""),
            found=_listed(roles),
            blamed=name,
        )


def _check_usage(leaf: Certificate, what: str, name: str) -> None:
    """Check the allowed key uses, as the engine does, and refuse unknown critical extensions."""
    usage, extended = leaf.extension(x509.KeyUsage), leaf.extension(x509.ExtendedKeyUsage)
    if usage is not None and not usage.digital_signature:
        raise IdentityError(what, expected="valid for signatures", found="another key usage", blamed=name)
    if extended is not None and ExtendedKeyUsageOID.CLIENT_AUTH not in extended:
        raise IdentityError(
            what, expected="valid for clients", found="another extended key usage", blamed=name
        )
    unknown = [
        item.oid.dotted_string
        for item in leaf.extensions
        if item.critical and not isinstance(item.value, _UNDERSTOOD)
    ]
    if unknown:
        raise IdentityError(
            f"the critical extensions of {what}",
            expected="known ones only",
            found=", ".join(unknown),
            blamed=name,
        )


def _certified_key(der: bytes, owner: str | None = None) -> PublicKey:
    of = f" of {owner}" if owner else ""
    return accepted_key(
        Certificate.read(der, f"the certificate{of}", owner).public_key, f"the key{of}", owner
    )


def _attributes(name: x509.Name, oid: x509.ObjectIdentifier) -> list[str | bytes]:
    return [attribute.value for attribute in name.get_attributes_for_oid(oid)]


def _listed(values: list[str | bytes]) -> str:
    return " and ".join(map(repr, values)) or "none"


def _pss() -> padding.PSS:
    return padding.PSS(padding.MGF1(SHA256()), PSS_SALT_BYTES)


def _require_prefix(message: bytes) -> None:
    if not message.startswith(PREFIX):
        raise ValueError("Expected one of the protocol's strings (see `encode_fields`), but got other bytes.")
