"""X.509 certificates: the parts that are read, and the public keys that are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import TypeAlias, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import HashAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from tightframe.securesum.errors import IdentityError

PublicKey: TypeAlias = rsa.RSAPublicKey | ec.EllipticCurvePublicKey
Kind = TypeVar("Kind", bound=x509.ExtensionType)

RSA_BITS = (2048, 8192)
"""Smallest and largest RSA key in bits: 2048 is what provisioning generates; a signature by 8192 bits fills
``messages.MAX_SIGNATURE``."""
CURVES = ("secp256r1", "secp384r1", "secp521r1")
MARK = "SIMULATED IDENTITY - PROVES NOTHING"
"""Common name of every simulated root and organisation of its sites; no root of a kit may have it."""


@dataclass(frozen=True)
class Certificate:
    """The parts of a certificate, all parsed at once, because the parser raises late for some of them.

    Attributes:
        public_key: of any type.
        subject: name of the holder.
        issuer: name of the stated issuer.
        not_before: start of its validity.
        signed: the bytes that the issuer signed.
        signed_how: the signature's padding or scheme.
        signed_hash: the signature's hash; None if the scheme has its own.
        signature: the issuer's.
    """

    public_key: object
    subject: x509.Name
    issuer: x509.Name
    not_before: datetime
    not_after: datetime
    extensions: x509.Extensions
    signed: bytes
    signed_how: object
    signed_hash: HashAlgorithm | None
    signature: bytes

    @classmethod
    def read(cls, der: bytes, what: str, blamed: str | None = None) -> Certificate:
        """Parse a certificate.

        Args:
            blamed: the site that sent it; None if no site did.

        Raises:
            IdentityError: TF-602, if any of these parts cannot be read.
        """
        try:
            return _read(der)
        except Exception:  # untrusted bytes: whatever the parser raises is the same refusal
            raise IdentityError(
                what, expected="a well-formed X.509 certificate", found="something else", blamed=blamed
            ) from None

    @property
    def is_ca(self) -> bool:
        """True if basic constraints or key usage allow its key to issue certificates."""
        basic, usage = self.extension(x509.BasicConstraints), self.extension(x509.KeyUsage)
        return (basic is not None and basic.ca) or (usage is not None and usage.key_cert_sign)

    def extension(self, kind: type[Kind]) -> Kind | None:
        """Return the extension of a kind; None if there is none."""
        return next((item.value for item in self.extensions if isinstance(item.value, kind)), None)

    def check_dates(self, at: datetime, what: str, blamed: str | None) -> None:
        """Check that the certificate is valid at a time.

        Raises:
            IdentityError: TF-602.
        """
        if not self.not_before <= at <= self.not_after:
            raise IdentityError(
                what,
                expected=f"valid at {at.astimezone(UTC).isoformat(timespec='seconds')}",
                found=f"valid from {self.not_before.isoformat()} to {self.not_after.isoformat()}",
                blamed=blamed,
            )


@lru_cache(maxsize=64)
def _read(der: bytes) -> Certificate:
    """Parse a certificate; a run reads the same few with every signature that it checks."""
    certificate = x509.load_der_x509_certificate(der)
    # The signature is the last part, a BIT STRING. A count of unused bits other than 0 would be a
    # second encoding of the same certificate, which the parser accepts.
    if not der.endswith(b"\x00" + certificate.signature):
        raise ValueError("the signature is not a whole number of bytes")
    return Certificate(
        public_key=certificate.public_key(),
        subject=certificate.subject,
        issuer=certificate.issuer,
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        extensions=certificate.extensions,
        signed=certificate.tbs_certificate_bytes,
        signed_how=certificate.signature_algorithm_parameters,
        signed_hash=certificate.signature_hash_algorithm,
        signature=certificate.signature,
    )


def is_simulated(root: x509.Certificate) -> bool:
    """Check whether a root is a simulated one, whose key everybody can compute, by its common name."""
    return any(item.value == MARK for item in root.subject.get_attributes_for_oid(NameOID.COMMON_NAME))


def accepted_key(key: object, what: str, blamed: str | None = None) -> PublicKey:
    """Return the key if it is RSA of 2048 to 8192 bits, or EC on a NIST prime curve.

    Raises:
        IdentityError: TF-602, if it is of another type, curve or size.
    """
    least, most = RSA_BITS
    if isinstance(key, rsa.RSAPublicKey):
        if not least <= key.key_size <= most:
            raise IdentityError(
                what,
                expected=f"RSA of {least} to {most} bits",
                found=f"{key.key_size} bits",
                blamed=blamed,
            )
        return key
    if isinstance(key, ec.EllipticCurvePublicKey):
        if key.curve.name not in CURVES:
            expected = f"on {' or '.join(CURVES)}"
            raise IdentityError(what, expected=expected, found=f"on {key.curve.name}", blamed=blamed)
        return key
    raise IdentityError(what, expected="RSA or EC", found=type(key).__name__, blamed=blamed)


def spki(key: PublicKey) -> bytes:
    """Return the SubjectPublicKeyInfo (DER), which identifies a public key."""
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
