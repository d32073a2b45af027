"""Who a site is: its provisioned certificate, what that must be, and signatures by its key.

A certificate counts if the project's root itself signed it (one step: a site's own certificate
issues nothing), it is no CA's, it is in date, it names exactly the roster's name and the role
``client``, and its public key is one that this site has pinned, where it has pinned any. The checks
are our own and not a web PKI path validation, because the question is another one: not whether some
CA vouches for a host name, but whether *this* root issued *this* site's certificate directly.
Revocation lists are not part of provisioning: a lost key is answered by a new root or by pins.

A pin is SHA-256 of the SubjectPublicKeyInfo (RFC 7469, section 2.4), so that a certificate can be
renewed for the same key; for a new key both pins are kept for a while.
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

from tightframe.securesum.certificate import Certificate, PublicKey, accepted_key, spki
from tightframe.securesum.errors import IdentityError, SignatureError
from tightframe.securesum.messages import Advertisement
from tightframe.securesum.primitives import PREFIX

ROLE = "client"
"""What provisioning writes as the role of a site (attribute ``unstructuredName``)."""

SIGNATURE_HASHES = ("sha256", "sha384", "sha512")
PSS_SALT_BYTES = 32
"""The engine's login signs with the longest salt that fits, so that even the padding of its signatures
differs from ours."""

# What a verifier does not understand but the issuer calls critical, it must refuse (RFC 5280, 4.2).
_UNDERSTOOD = (
    x509.AuthorityKeyIdentifier,
    x509.BasicConstraints,
    x509.ExtendedKeyUsage,
    x509.KeyUsage,
    x509.SubjectAlternativeName,
    x509.SubjectKeyIdentifier,
)


class Signer(Protocol):
    """A site's provisioned identity, whatever holds the key."""

    @property
    def certificate(self) -> bytes:
        """The site's certificate, DER."""
        ...

    def sign(self, message: bytes) -> bytes:
        """The provisioned key's signature of one of the protocol's strings."""
        ...


class KeySigner:
    """A signer with a private key in memory: RSA (PSS, SHA-256, 32-byte salt) or ECDSA (SHA-256).

    It signs the protocol's own strings and nothing else, so that it cannot serve as an oracle for
    whatever else the same key does, nor can that for us: the engine's login signs text, its encrypted
    cells begin with 01, a client's proof in TLS 1.3 with blanks, ours with FF.

    Raises:
        IdentityError: TF-602, if the key is of another type, too weak or not the certificate's.
    """

    __slots__ = ("_certificate", "_key")

    def __init__(self, private_key: object, certificate: bytes) -> None:
        if not isinstance(private_key, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey):
            raise IdentityError("the provisioned key", expected="RSA or EC", found=type(private_key).__name__)
        public = accepted_key(private_key.public_key(), "the provisioned key")
        if spki(public) != spki(_certified_key(certificate)):
            raise IdentityError("the provisioned key", expected="the certificate's", found="another key")
        self._key = private_key
        self._certificate = bytes(certificate)

    @classmethod
    def from_pem(cls, private: bytes, certificate: bytes) -> KeySigner:
        """From an unencrypted PEM private key and a DER certificate.

        Raises:
            IdentityError: TF-602, also if ``private`` is no such key.
        """
        try:
            key = load_pem_private_key(private, password=None)
        except Exception:  # also "encrypted" and "no such algorithm"; its text may show parts of the file
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
            ValueError: if ``message`` is none, because the key answers for other things as well.
        """
        _require_prefix(message)
        if isinstance(self._key, rsa.RSAPrivateKey):
            return self._key.sign(message, _pss(), SHA256())
        return self._key.sign(message, ec.ECDSA(SHA256()))

    def private_pem(self) -> bytes:
        """The private key, PKCS 8 in PEM, **not encrypted**: for a file of the owner's alone."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def __repr__(self) -> str:
        return f"KeySigner(certificate sha256 {hashlib.sha256(self._certificate).hexdigest()[:16]})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a KeySigner is never pickled")


@dataclass(frozen=True)
class Anchor:
    """What certificates are held against.

    Attributes:
        root: the project's root certificate, DER.
        missing_role: accept certificates without a role; only central provisioning, which is for
            tests, makes such, and it makes a server's and a site's alike but for the name.
        not_sites: names that are no site's whatever a roster says: the server's.
    """

    root: bytes
    missing_role: bool = False
    not_sites: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Verifier:
    """Holds advertisements against the project's root and this site's pins.

    Attributes:
        anchor: the project's root.
        pins: peer -> SHA-256 of each public key that is accepted for it.
        pinned_only: refuse peers that have no pin.
        at: the time at which certificates must be in date; with a time zone.
    """

    anchor: Anchor
    pins: Mapping[str, frozenset[bytes]]
    pinned_only: bool
    at: datetime

    def check(self, advertisement: Advertisement, params_digest: bytes) -> None:
        """Return if the certificate is the named site's and the signature its provisioned key's.

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
    """The public key of ``name``, a site unless ``roles`` say otherwise, if the certificate proves it.

    Args:
        der: the certificate, DER.
        name: the roster's name of the site.
        anchor: the project's root.
        pins: accepted SHA-256 of its public key; None if this site has none for it. An empty set
            accepts no key.
        pinned_only: refuse if ``pins`` is None.
        at: the time at which the certificate and the root must be in date.
        roles: of which it must have one.

    Raises:
        IdentityError: TF-602, naming the first thing that does not hold; ``blamed`` is ``name``
            unless the root itself is at fault.
        ValueError: if ``at`` has no time zone.
    """
    if at.utcoffset() is None:
        raise ValueError("Expected argument `at` to have a time zone, but got a naive datetime.")
    what, root_what = f"the certificate of {name}", "the project's root certificate"
    root = Certificate.read(anchor.root, root_what)
    if not root.is_ca:
        raise IdentityError(root_what, expected="a CA's", found="a certificate that issues nothing")
    root.check_dates(at, root_what, None)
    root_key = accepted_key(root.public_key, f"the key of {root_what}")

    leaf = Certificate.read(der, what, name)
    _check_issued(leaf, root, root_key, what, name)
    if leaf.is_ca:
        raise IdentityError(what, expected="a site's", found="a CA's", blamed=name)
    leaf.check_dates(at, what, name)
    _check_name(leaf, name, anchor, what)
    _check_role(leaf, name, roles, anchor.missing_role)
    _check_usage(leaf, what, name)
    public = accepted_key(leaf.public_key, f"the key of {name}", name)
    if pins is None and pinned_only:
        raise IdentityError(f"the key of {name}", expected="pinned at this site", found="no pin", blamed=name)
    found = hashlib.sha256(spki(public)).digest()
    if pins is not None and found not in pins:
        wanted = " or ".join(sorted(pin.hex() for pin in pins)) or "none (the list of pins is empty)"
        raise IdentityError(
            f"the SHA-256 of the public key of {name}", expected=wanted, found=found.hex(), blamed=name
        )
    return public


def verify_signature(
    certificate_der: bytes, message: bytes, signature: bytes, *, owner: str, what: str
) -> None:
    """Return if ``signature`` is that of the certificate's key over one of the protocol's strings.

    This looks at the key only: whose the certificate is, ``verify_certificate`` says.

    Raises:
        SignatureError: TF-603, naming whose signature of what.
        IdentityError: TF-602, if the certificate holds no acceptable key.
        ValueError: if ``message`` is none of the protocol's strings.
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
    """What a pin is: SHA-256 of the certificate's SubjectPublicKeyInfo (DER), 32 bytes.

    Raises:
        IdentityError: TF-602, if this is no certificate or its key is not acceptable.
    """
    return hashlib.sha256(spki(_certified_key(certificate_der))).digest()


def _check_issued(leaf: Certificate, root: Certificate, root_key: PublicKey, what: str, name: str) -> None:
    """The root's name as the issuer, and its own signature."""
    # Common names are compared and not whole names: provisioning writes a root's common name alone
    # as the issuer, also where the root's subject has an organisation besides. The name proves
    # nothing in any case; the signature does.
    issuer, expected = _attributes(leaf.issuer, NameOID.COMMON_NAME), "issued by the project's root itself"
    if issuer != _attributes(root.subject, NameOID.COMMON_NAME):
        raise IdentityError(what, expected=expected, found=f"issuer {_listed(issuer)}", blamed=name)
    how, hashed = leaf.signed_how, leaf.signed_hash
    if hashed is None or hashed.name not in SIGNATURE_HASHES:
        found = "no hash" if hashed is None else hashed.name
        expected = f"signed with {' or '.join(SIGNATURE_HASHES)}"
        raise IdentityError(what, expected=expected, found=found, blamed=name)
    try:
        if isinstance(root_key, rsa.RSAPublicKey) and isinstance(how, padding.PKCS1v15 | padding.PSS):
            root_key.verify(leaf.signature, leaf.signed, how, hashed)
        elif isinstance(root_key, ec.EllipticCurvePublicKey) and isinstance(how, ec.ECDSA):
            root_key.verify(leaf.signature, leaf.signed, how)
        else:
            raise InvalidSignature
    except InvalidSignature:
        found = "a signature by another key"
        raise IdentityError(what, expected=expected, found=found, blamed=name) from None


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
    """Uses, where the issuer limits them, as the engine itself checks them, and nothing critical unknown."""
    usage, extended = leaf.extension(x509.KeyUsage), leaf.extension(x509.ExtendedKeyUsage)
    if usage is not None and not usage.digital_signature:
        raise IdentityError(what, expected="for signatures", found="another key usage", blamed=name)
    if extended is not None and ExtendedKeyUsageOID.CLIENT_AUTH not in extended:
        raise IdentityError(what, expected="for clients", found="another extended key usage", blamed=name)
    unknown = [
        item.oid.dotted_string
        for item in leaf.extensions
        if item.critical and not isinstance(item.value, _UNDERSTOOD)
    ]
    if unknown:
        raise IdentityError(
            f"the critical extensions of {what}",
            expected="those that are understood here",
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
