"""Check of the signatures in a site's ledger: the site's own, under the roots that it trusts for this."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from tightframe.config.site import SiteEntry
from tightframe.errors import SiteConfigError
from tightframe.privacy.ledger.rows import Check
from tightframe.securesum.errors import IdentityError
from tightframe.securesum.identity import Anchor, verify_certificate, verify_signature
from tightframe.securesum.identity.certificate import is_simulated


def trusted_roots(entry: SiteEntry, own: Anchor) -> list[Anchor]:
    """Return the trust anchors under which entries of a site's ledger may be signed.

    Args:
        entry: the site's configuration; its ``ledger_roots`` are the roots of its other projects, earlier
            or concurrent ones.
        own: trust anchor of the running project.

    Raises:
        SiteConfigError: TF-202 if a file does not contain one root certificate.
    """
    return [own, *(replace(own, root=_root_of(Path(path))) for path in entry.ledger_roots)]


def signature_check(anchors: Sequence[Anchor], *, name: str | None = None) -> Check:
    """Return a check of a ledger's signatures, each with certificates valid at the time of its entry.

    Args:
        anchors: trust anchors, one of which must certify the signer.
        name: of the site that must have signed; None accepts any name, for readers of a ledger.

    Returns:
        A function of (certificate, message, signature, time) that raises ``IdentityError`` on a mismatch.
    """
    accepted: dict[bytes, tuple[str, datetime, datetime]] = {}  # certificate -> signer, valid from, until

    def check(certificate: bytes, message: bytes, signature: bytes, time: datetime) -> None:
        signer, begin, end = accepted.get(certificate, ("", time, time))
        if not signer or not begin <= time <= end:
            signer = signer_name(certificate) if name is None else name
            anchor = _anchor_of(certificate, signer, time)
            # Only the dates depend on the time, and a ledger has thousands of entries of one certificate.
            dated = [x509.load_der_x509_certificate(item) for item in (certificate, anchor.root)]
            begin = max(item.not_valid_before_utc for item in dated)
            accepted[certificate] = signer, begin, min(item.not_valid_after_utc for item in dated)
        verify_signature(certificate, message, signature, owner=signer, what="a ledger's line")

    def _anchor_of(certificate: bytes, signer: str, time: datetime) -> Anchor:
        first_error: IdentityError | None = None  # of the first root, which is the project's own
        for anchor in anchors:
            try:
                verify_certificate(certificate, signer, anchor, pins=None, pinned_only=False, at=time)
                return anchor
            except IdentityError as error:
                first_error = first_error or error
        raise first_error or ValueError("Expected at least one trust anchor, but got none.")

    return check


def signer_name(certificate: bytes) -> str:
    """Return the common name in a certificate (DER)."""
    subject = x509.load_der_x509_certificate(certificate).subject
    return " and ".join(str(item.value) for item in subject.get_attributes_for_oid(NameOID.COMMON_NAME))


def read_root(path: Path) -> x509.Certificate:
    """Read the root certificate in a PEM file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it contains anything but one CA certificate; a site's own certificate is refused.
    """
    certificates = x509.load_pem_x509_certificates(path.read_bytes())
    if len(certificates) != 1 or not _are_authorities(certificates):
        raise ValueError("something else")
    return certificates[0]


def _are_authorities(certificates: Iterable[x509.Certificate]) -> bool:
    try:
        return all(
            item.extensions.get_extension_for_class(x509.BasicConstraints).value.ca for item in certificates
        )
    except x509.ExtensionNotFound:
        return False


def _root_of(path: Path) -> bytes:
    try:
        root = read_root(path)
        problem = "a simulated one, which everybody can sign with" if is_simulated(root) else None
    except (OSError, ValueError) as error:
        problem = str(error.strerror if isinstance(error, OSError) else "something else")
    if problem is not None:
        raise SiteConfigError(
            "Expected each of `ledger_roots` to hold one root certificate in PEM (rootCA.pem of a startup "
            f"kit), but {path} gave {problem}."
        )
    return root.public_bytes(Encoding.DER)
