"""The protocol's errors: one class and code for each kind, with the expected and the found value.

``code`` may leave a site. The message names sites, slots, sizes and public hashes, but never a
secret, a share or a value of a record.
"""

from __future__ import annotations


class ProtocolError(Exception):
    """Base of the protocol's errors.

    Args:
        what: the subject of the check, for example ``the threshold``.
        expected: the value that it must have.
        found: the value that it has.
        blamed: the site that is proved to be at fault; otherwise None.
    """

    code = "TF-600"

    def __init__(self, what: str, *, expected: str, found: str, blamed: str | None = None) -> None:
        self.what, self.expected, self.found, self.blamed = what, expected, found, blamed
        super().__init__(_one_line(f"Expected {what} to be {expected}, but found {found}."))


class ParametersError(ProtocolError):
    """The server's parameters are not this job's, or below the site's own rules (TF-601)."""

    code = "TF-601"


class IdentityError(ProtocolError):
    """A certificate, key or pin does not prove a site's identity (TF-602)."""

    code = "TF-602"


class SignatureError(ProtocolError):
    """A signature is not the named site's signature of this message (TF-603)."""

    code = "TF-603"


class MessageError(ProtocolError):
    """A message is malformed: its size, a type, a key, trailing bytes (TF-604)."""

    code = "TF-604"


class RosterError(ProtocolError):
    """The relayed advertisements are not exactly the roster's, or differ between sites (TF-605)."""

    code = "TF-605"


class KeyAgreementError(ProtocolError):
    """A public key is malformed, of low order or used twice (TF-606)."""

    code = "TF-606"


class ShareError(ProtocolError):
    """A box cannot be opened, or a share is not the one that its dealer signed (TF-607)."""

    code = "TF-607"


class ReplayError(ProtocolError):
    """An epoch, slot or sum id was used before, or with other contents (TF-608)."""

    code = "TF-608"


class StateError(ProtocolError):
    """A message arrived in a state that does not accept it, or its secrets are erased (TF-609)."""

    code = "TF-609"


class InconsistencyError(ProtocolError):
    """Receipts of one sum differ: another broadcast, slot, sum or session at one site (TF-610)."""

    code = "TF-610"


class SurvivorsError(ProtocolError):
    """A survivor set is too small, lacks this site, or is not the one signed before (TF-611)."""

    code = "TF-611"


class StaticCohortError(ProtocolError):
    """The static group was requested for another cohort than the one it was opened for (TF-612)."""

    code = "TF-612"


class ReleaseProfileError(ProtocolError):
    """A sum over a data set would have another release profile than those before it (TF-617)."""

    code = "TF-617"


class EvaluationsError(ProtocolError):
    """Exact evaluations of a data set would tell too much of its records, over all jobs (TF-627)."""

    code = "TF-627"


class RecoveryError(ProtocolError):
    """A sum cannot be opened for lack of valid shares (TF-613); ``blamed`` is set if a site is at fault."""

    code = "TF-613"


class TotalError(ProtocolError):
    """A request rests on a total that is withheld, replayed, or of other silos or groups (TF-622)."""

    code = "TF-622"


class VerificationError(ProtocolError):
    """A total is false, or is not shown to be the sum of its terms (TF-623)."""

    code = "TF-623"


class FollowersError(ProtocolError):
    """Too few silos computed the state that a sum rests on by themselves (TF-624)."""

    code = "TF-624"


def _one_line(text: str) -> str:
    """Escape unprintable characters, because parts of the text come from peers and are written to logs."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )
