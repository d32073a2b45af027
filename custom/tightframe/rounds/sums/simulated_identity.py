"""Simulated identities for runs without a startup kit, which prove nothing and are marked as such.

A simulation has no provisioning. So that the same code runs there, each job has a root whose private key is
computed from a *public* string: every process of a run can compute it, and so can anybody else. Its
signatures prove nothing, so production refuses it, and no provisioned root accepts it.
"""

from __future__ import annotations

import functools
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from tightframe.errors import SiteConfigError
from tightframe.securesum.identity import ROLE, Anchor, KeySigner
from tightframe.securesum.identity.certificate import MARK
from tightframe.securesum.primitives import digest

# Valid at any time, because a date would suggest that the certificate is worth something.
_FROM, _TO = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of P-256 (FIPS 186-4, D.1.2.3)."""


def simulated_identity(job: str, name: str, *, production: bool) -> tuple[KeySigner, Anchor]:
    """Create a site's identity for one run: a fresh key, certified by the job's simulated root.

    Call it once per run and site: ``signer.private_pem()`` and ``signer.certificate`` can be stored
    (readable by the owner alone) and read back with ``KeySigner.from_pem``.

    Args:
        job: the job's id; each has a root of its own.
        name: the site's name, 1 to 64 characters.
        production: whether the engine runs in its secure mode.

    Raises:
        SiteConfigError: TF-615 in production, always.
    """
    anchor = simulated_anchor(job, production=production)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, name),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, MARK),
            x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, ROLE),
        ]
    )
    issued = _certificate(subject, key.public_key(), _root_key(job), ca=False)
    return KeySigner(key, issued.public_bytes(Encoding.DER)), anchor


def simulated_anchor(job: str, *, production: bool) -> Anchor:
    """Return the trust anchor for certificates of a simulated job.

    Its key is always the same; its bytes differ between processes, because the root's signature on itself,
    which nothing checks, is random.

    Raises:
        SiteConfigError: TF-615 in production, always.
    """
    if production:
        raise SiteConfigError(
            "Expected a provisioned identity (a startup kit) in production, but a simulated one was "
            "requested, which proves nothing: run the job on a provisioned site.",
            code="TF-615",
        )
    return Anchor(_root(job).public_bytes(Encoding.DER))


def simulated_root_pem(job: str) -> bytes:
    """Return the job's simulated root certificate in PEM, for verifying a transcript later."""
    return _root(job).public_bytes(Encoding.PEM)


@functools.lru_cache(maxsize=4)
def _root(job: str) -> x509.Certificate:
    key = _root_key(job)
    return _certificate(_root_name(), key.public_key(), key, ca=True)


@functools.lru_cache(maxsize=4)
def _root_key(job: str) -> ec.EllipticCurvePrivateKey:
    """Return the root's key: SHA-256 of a public string as a scalar of P-256, from 1 to the order less 1."""
    scalar = int.from_bytes(digest("simulated-root", job), "big") % (_ORDER - 1) + 1
    return ec.derive_private_key(scalar, ec.SECP256R1())


def _root_name() -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, MARK)])


def _certificate(
    subject: x509.Name, public: ec.EllipticCurvePublicKey, root: ec.EllipticCurvePrivateKey, *, ca: bool
) -> x509.Certificate:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(_root_name()).public_key(public)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(_FROM).not_valid_after(_TO)
    builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    return builder.sign(root, SHA256())
