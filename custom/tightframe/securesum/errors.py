"""What the protocol refuses: one class for each kind, saying what was found and what was expected.

``code`` may leave a site. The message names sites, slots, sizes and public hashes, and never a
secret, a share or a value of a record.
"""

from __future__ import annotations


class ProtocolError(Exception):
    """Base of the protocol's refusals.

    Args:
        what: the thing that was looked at, for example ``threshold``.
        expected: what it must be.
        found: what it was.
        blamed: the site that is to blame, where that is proved; else None.
    """

    code = "TF-600"

    def __init__(self, what: str, *, expected: str, found: str, blamed: str | None = None) -> None:
        self.what, self.expected, self.found, self.blamed = what, expected, found, blamed
        super().__init__(_one_line(f"Expected {what} to be {expected}, but found {found}."))


class ParametersError(ProtocolError):
    """The server's parameters are not this job's, or below the site's own rules (TF-601)."""

    code = "TF-601"


class IdentityError(ProtocolError):
    """A certificate, key or pin does not prove that a site is who it says (TF-602)."""

    code = "TF-602"


class SignatureError(ProtocolError):
    """A signature is not that of the named site over what was shown (TF-603)."""

    code = "TF-603"


class MessageError(ProtocolError):
    """A message is malformed: its size, a type, a key, trailing bytes (TF-604)."""

    code = "TF-604"


class RosterError(ProtocolError):
    """The advertisements shown are not exactly the roster's, or differ between sites (TF-605)."""

    code = "TF-605"


class KeyAgreementError(ProtocolError):
    """A public key is of low order or used twice (TF-606)."""

    code = "TF-606"


class ShareError(ProtocolError):
    """A box cannot be opened, or a share is not the one that its dealer signed (TF-607)."""

    code = "TF-607"


class ReplayError(ProtocolError):
    """An epoch, slot or sum id was used before, or answered otherwise (TF-608)."""

    code = "TF-608"


class StateError(ProtocolError):
    """A message came in a state in which it has no place, or its secrets are gone (TF-609)."""

    code = "TF-609"


class InconsistencyError(ProtocolError):
    """Receipts of one sum differ: another broadcast, slot, sum or session at one site (TF-610)."""

    code = "TF-610"


class SurvivorsError(ProtocolError):
    """A survivor set is too small, lacks this site, or is not the one signed before (TF-611)."""

    code = "TF-611"


class StaticCohortError(ProtocolError):
    """The static group was asked for another cohort than the one it was opened for (TF-612)."""

    code = "TF-612"


class ReleaseProfileError(ProtocolError):
    """A sum over a data set would be formed in another way than those before it (TF-617)."""

    code = "TF-617"


class RecoveryError(ProtocolError):
    """A sum cannot be opened for want of valid shares (TF-613); ``blamed`` where that is proved."""

    code = "TF-613"


def _one_line(text: str) -> str:
    """The text with what is not printable escaped: parts of it are a stranger's, and it goes into logs."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )
