"""Whose signatures a site's ledger may bear: the site's own, under the roots that the site trusts for it."""

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
from tightframe.rounds.sums.simulated_identity import is_simulated
from tightframe.securesum.errors import IdentityError
from tightframe.securesum.identity import Anchor, verify_certificate, verify_signature


def trusted_roots(entry: SiteEntry, own: Anchor) -> list[Anchor]:
    """The roots under which entries of a site's ledger may be signed.

    Args:
        entry: of the site; its ``ledger_roots`` are those of its other projects, earlier ones or at the
            same time.
        own: what the project that runs holds certificates against.

    Raises:
        SiteConfigError: TF-202 if one of the files holds no root certificate.
    """
    return [own, *(replace(own, root=_root_of(Path(path))) for path in entry.ledger_roots)]


def signature_check(anchors: Sequence[Anchor], *, name: str | None = None) -> Check:
    """Holds a ledger's signatures against roots, at the time of each entry.

    Args:
        anchors: one of which must certify who signed.
        name: of the site; without it each signer's own, for whoever only reads the ledger.
    """
    accepted: dict[bytes, tuple[str, datetime, datetime]] = {}  # whose, and between which times

    def check(certificate: bytes, message: bytes, signature: bytes, time: datetime) -> None:
        signer, begin, end = accepted.get(certificate, ("", time, time))
        if not signer or not begin <= time <= end:
            signer = signer_name(certificate) if name is None else name
            anchor = _anchor_of(certificate, signer, time)
            # Nothing but the dates depends on the time: a ledger has thousands of entries of one certificate.
            dated = [x509.load_der_x509_certificate(item) for item in (certificate, anchor.root)]
            begin = max(item.not_valid_before_utc for item in dated)
            accepted[certificate] = signer, begin, min(item.not_valid_after_utc for item in dated)
        verify_signature(certificate, message, signature, owner=signer, what="a ledger's line")

    def _anchor_of(certificate: bytes, signer: str, time: datetime) -> Anchor:
        refused: IdentityError | None = None
        for anchor in anchors:
            try:
                verify_certificate(certificate, signer, anchor, pins=None, pinned_only=False, at=time)
                return anchor
            except IdentityError as error:
                refused = refused or error  # the first root is that of the project itself
        raise refused or ValueError("no root was given")

    return check


def signer_name(certificate: bytes) -> str:
    """Whom a certificate (DER) names."""
    subject = x509.load_der_x509_certificate(certificate).subject
    return " and ".join(str(item.value) for item in subject.get_attributes_for_oid(NameOID.COMMON_NAME))


def read_root(path: Path) -> x509.Certificate:
    """The one certificate in a PEM file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it holds anything but one CA's certificate, lest a site's be taken by mistake.
    """
    found = x509.load_pem_x509_certificates(path.read_bytes())
    if len(found) != 1 or not _issues(found):
        raise ValueError("something else")
    return found[0]


def _issues(certificates: Iterable[x509.Certificate]) -> bool:
    try:
        return all(
            item.extensions.get_extension_for_class(x509.BasicConstraints).value.ca for item in certificates
        )
    except x509.ExtensionNotFound:
        return False


def _root_of(path: Path) -> bytes:
    try:
        root = read_root(path)
        found = "a simulated one, which everybody can sign with" if is_simulated(root) else None
    except (OSError, ValueError) as error:
        found = str(error.strerror if isinstance(error, OSError) else "something else")
    if found is not None:
        raise SiteConfigError(
            "Expected each of `ledger_roots` to hold one root certificate in PEM (rootCA.pem of a startup "
            f"kit), but {path} gave {found}."
        )
    return root.public_bytes(Encoding.DER)
