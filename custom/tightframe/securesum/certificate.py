"""What is read of an X.509 certificate, and the keys that are strong enough."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeAlias, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import HashAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tightframe.securesum.errors import IdentityError

PublicKey: TypeAlias = rsa.RSAPublicKey | ec.EllipticCurvePublicKey
Kind = TypeVar("Kind", bound=x509.ExtensionType)

RSA_BITS = (2048, 8192)
"""Provisioning makes 2048; the upper bound is what ``MAX_SIGNATURE`` of the messages holds."""
CURVES = ("secp256r1", "secp384r1", "secp521r1")


@dataclass(frozen=True)
class Certificate:
    """All that is read of a certificate, read at once, because parsers fail late as well as early.

    Attributes:
        public_key: of whatever type.
        subject: whose it is.
        issuer: who says that it issued it.
        not_before: first moment at which it is valid.
        not_after: last one.
        extensions: all of them.
        signed: the bytes that the issuer signed.
        signed_how: the signature's padding or scheme.
        signed_hash: the signature's hash; None where the scheme has its own.
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
        """Read DER.

        Args:
            der: the certificate.
            what: what to call it.
            blamed: the site that showed it, if one did.

        Raises:
            IdentityError: TF-602, if any of these parts cannot be read.
        """
        try:
            certificate = x509.load_der_x509_certificate(der)
            # The signature is the last part, a BIT STRING. A count of unused bits other than 0 would be
            # one more encoding of the same certificate, which the parser lets pass.
            if not der.endswith(b"\x00" + certificate.signature):
                raise ValueError("the signature is no whole number of bytes")
            return cls(
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
        except Exception:  # a stranger's bytes: whatever the parser makes of them, it is one refusal
            raise IdentityError(
                what, expected="a well-formed X.509 certificate", found="something else", blamed=blamed
            ) from None

    @property
    def is_ca(self) -> bool:
        """Whether it says that its key may issue certificates, in either of the two places for it."""
        basic, usage = self.extension(x509.BasicConstraints), self.extension(x509.KeyUsage)
        return (basic is not None and basic.ca) or (usage is not None and usage.key_cert_sign)

    def extension(self, kind: type[Kind]) -> Kind | None:
        """The extension of a kind, if there is one."""
        return next((item.value for item in self.extensions if isinstance(item.value, kind)), None)

    def check_dates(self, at: datetime, what: str, blamed: str | None) -> None:
        """Return if it is valid at a time.

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


def accepted_key(key: object, what: str, blamed: str | None = None) -> PublicKey:
    """The key, if it is RSA of 2048 to 8192 bits, or EC on one of NIST's prime curves.

    Raises:
        IdentityError: TF-602, if it is of another type or too weak.
    """
    least, most = RSA_BITS
    if isinstance(key, rsa.RSAPublicKey):
        if not least <= key.key_size <= most:
            expected, found = f"RSA of {least} to {most} bits", f"{key.key_size} bits"
            raise IdentityError(what, expected=expected, found=found, blamed=blamed)
        return key
    if isinstance(key, ec.EllipticCurvePublicKey):
        if key.curve.name not in CURVES:
            expected = f"on {' or '.join(CURVES)}"
            raise IdentityError(what, expected=expected, found=f"on {key.curve.name}", blamed=blamed)
        return key
    raise IdentityError(what, expected="RSA or EC", found=type(key).__name__, blamed=blamed)


def spki(key: PublicKey) -> bytes:
    """SubjectPublicKeyInfo, DER: what identifies a public key."""
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
