"""Errors that a user can meet: each has a stable code, explained by ``tightframe explain``.

The code may leave a site (it names a kind of failure, never a record, a path or a value);
the message stays in the log of the process that raised it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence


class TightframeError(Exception):
    """Base of every named error.

    Args:
        message: what was expected, what came, and what to do.
        code: overrides the class's code where one class serves several kinds.
    """

    code: str = "TF-500"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        """Return the code, then the message."""
        return f"{self.code}: {super().__str__()}"


class JobError(TightframeError):
    """A job's arguments are wrong (TF-101); every problem is listed."""

    code = "TF-101"

    def __init__(self, problems: Sequence[str], *, code: str | None = None) -> None:
        self.problems = tuple(problems)
        listed = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"the job cannot run as it is written:\n{listed}", code=code)


class TooLargeError(JobError):
    """A job's model or sums are larger than allowed (TF-632).

    Args:
        rule: the policy's name of the ceiling.
        asked: what the job asks for.
        most: what is allowed.
    """

    code = "TF-632"

    def __init__(self, rule: str, asked: str, most: int) -> None:
        self.rule, self.asked, self.most = rule, asked, most
        super().__init__([f"{rule}: the job asks for {asked}, at most {most} is allowed"])


class JobFolderError(TightframeError):
    """A job folder is not written over what somebody may still want (TF-102), or is not there (TF-106)."""

    code = "TF-102"


class WorkspaceError(TightframeError):
    """A simulation runs in the workspace already (TF-103)."""

    code = "TF-103"


class SiteConfigError(TightframeError):
    """A site's own ``local/tightframe.json`` is missing (TF-201) or wrong (TF-202)."""

    code = "TF-202"


class JoinError(TightframeError):
    """Joining or leaving a federation is refused.

    TF-751 not a file to join with, TF-752 the engine's provisioning refused, TF-753 another root, TF-754 no
    request here that the answer belongs to, TF-755 asked for already, TF-756 the site runs, TF-757 the kit is
    not ready, TF-758 the kit runs already.
    """

    code = "TF-751"


class PolicyError(TightframeError):
    """A job asks for less than a site's policy requires (TF-614); every rule is listed."""

    code = "TF-614"


class SecureSumError(TightframeError):
    """The secure sum refused something; the code is that of ``securesum.errors``."""

    code = "TF-600"

    def __init__(self, message: str, *, code: str | None = None, blamed: str | None = None) -> None:
        self.blamed = blamed
        super().__init__(message, code=code)


class ManifestError(TightframeError):
    """A job's signature is missing (TF-633), wrong (TF-634) or of something else (TF-635).

    TF-636 not for now, TF-637 taken up before.
    """

    code = "TF-634"


class DataError(TightframeError):
    """A site's records cannot be read as the site's configuration says.

    TF-203 no such folder, TF-204 no or malformed split file or table, TF-205 missing files,
    TF-206 unreadable files, TF-207 unknown class, TF-208 empty centre or fold, TF-209 another vocabulary,
    TF-210 patients unknown, TF-212 another shape than the model takes, TF-213 labels that are no classes,
    TF-214 withdrawn records that the site does not have, TF-215 records that break a contract,
    TF-216 a patient in two folds, TF-217 a database that cannot be asked, TF-218 a site's entry that does not
    fit a contract, TF-219 no package for this kind of table or picture.
    """

    code = "TF-203"


class TrainingError(TightframeError):
    """Local training failed.

    TF-301 not finite, TF-302 out of memory, TF-303 no device, TF-304 own loop, TF-305 features alike.
    """

    code = "TF-301"


class ContributionError(TightframeError):
    """A contribution does not fit its schema (TF-403) or its sum (TF-401, TF-402, TF-404, TF-631).

    Args:
        message: what was expected, and what came.
        field: which field it is about; None if it is no single one.
    """

    code = "TF-403"

    def __init__(self, message: str, *, code: str | None = None, field: str | None = None) -> None:
        self.field = field
        super().__init__(message, code=code)


class ModelError(TightframeError):
    """A trained model cannot be used.

    TF-821 no model to load, TF-822 another model than its card says, TF-823 input of another form than the
    model takes, TF-824 a record that cannot be read or judged, TF-825 no export in this form, TF-826 an
    export that differs from the model, TF-827 a model whose last total a silo never verified.
    """

    code = "TF-821"


class RunError(TightframeError):
    """A run cannot go on: TF-501 too few silos, TF-504 aborted, TF-505 configurations differ.

    TF-506 synthetic and real records, TF-507 a torn checkpoint, TF-508 no baseline, TF-509 refused.
    TF-104 the workspace replaced by another simulation, TF-105 interrupted.
    TF-518 the server's state of the run is another than the silo's own, TF-519 one that it cannot check.
    TF-521 another run than the job goes on with, TF-522 a silo's own state is lost.
    TF-523 a withdrawal that may not be opened, TF-524 one that a silo may not take part in.
    TF-525 an exchange out of the plan's order. TF-526 a total that the silos' flags cannot add up to.
    TF-527 pooled moments that contradict a silo's own.
    """


class TooFewError(RunError):
    """Too few silos in a sum, or too few that contributed to it.

    Attributes:
        cohort: silos that answered, sorted.
        failed: silo -> code for the others.
    """

    code = "TF-501"

    def __init__(
        self, message: str, cohort: Iterable[str], failed: Mapping[str, str], *, code: str | None = None
    ) -> None:
        self.cohort, self.failed = sorted(cohort), dict(failed)
        super().__init__(message, code=code)


REPLACED = "TF-104"
"""The folder of a simulation is another one's by now: nothing of the run is written there any more."""
LATE = "TF-502"
"""A silo did not answer in time."""

REASONS: Mapping[str, str] = {
    "TF-101": "job wrong",
    "TF-104": "another simulation replaced the workspace",
    "TF-201": "not configured",
    "TF-202": "site configuration wrong",
    "TF-203": "data folder missing",
    "TF-204": "split file or table missing or malformed",
    "TF-205": "files missing",
    "TF-206": "unreadable files",
    "TF-207": "unknown class",
    "TF-208": "empty centre or fold",
    "TF-209": "another drug vocabulary than the job's",
    "TF-210": "patients of the records not known",
    "TF-212": "records of another shape than the model takes",
    "TF-213": "labels that do not fit the classes or the records",
    "TF-214": "withdrawn records that it does not have",
    "TF-215": "records that break the job's contract",
    "TF-216": "a patient in two folds",
    "TF-217": "its database cannot be asked",
    "TF-218": "its entry does not fit the job's contract",
    "TF-219": "a package that its kind of table or picture takes is not installed",
    "TF-301": "training was not finite",
    "TF-302": "out of memory",
    "TF-303": "no such device",
    "TF-304": "its own training loop failed",
    "TF-305": "the network gives all its records one answer",
    "TF-401": "contribution was not finite",
    "TF-402": "contribution over its bound",
    "TF-403": "contribution does not fit its schema",
    "TF-502": "late",
    "TF-503": "failed with an error of its own",
    "TF-504": "aborted",
    "TF-505": "job or version differs from the server's",
    "TF-508": "nothing to compare a baseline with",
    "TF-509": "refused to enrol",
    "TF-511": "was not in the sum of the round's earlier phase",
    "TF-512": "could not write to its disk",
    "TF-513": "too few silos could contribute",
    "TF-518": "the server's state of the run is another than its own",
    "TF-519": "missed the run's state, and comes back behind the first total",
    "TF-521": "not the run that the job goes on with",
    "TF-522": "its own state of the rounds before is lost",
    "TF-523": "a withdrawal that may not be opened",
    "TF-524": "other records were withdrawn before",
    "TF-525": "the server requests an exchange out of order",
    "TF-526": "a silo sent a false number",
    "TF-527": "pooled moments of inputs contradict its own records",
    "TF-601": "the server's parameters are not accepted",
    "TF-602": "an identity is not proved",
    "TF-603": "a signature is wrong",
    "TF-604": "a message is malformed",
    "TF-605": "silos were shown different rosters",
    "TF-606": "a key is malformed, of low order or used twice",
    "TF-607": "a share is not the one that was signed",
    "TF-608": "used before",
    "TF-609": "out of order, or the session's secrets are gone",
    "TF-610": "silos were shown different models",
    "TF-611": "survivors not accepted",
    "TF-612": "counts were opened for another cohort before",
    "TF-613": "too few valid shares to open the sum",
    "TF-614": "below the site's policy",
    "TF-615": "no usable identity",
    "TF-617": "terms were formed in another way before",
    "TF-620": "what this site remembers is lost",
    "TF-622": "a total was withheld, replayed, or of other silos",
    "TF-623": "a total is not shown to be the sum of its terms",
    "TF-624": "too few silos computed the state by themselves",
    "TF-625": "too few records behind a sum of products",
    "TF-626": "a given model that nobody at the site accepted",
    "TF-627": "exact evaluations would disclose too much",
    "TF-628": "a table of few possible rows, without privacy",
    "TF-631": "a weight that is not believed",
    "TF-632": "the job is too large",
    "TF-633": "the job is not signed",
    "TF-634": "the job's signature is not a lead's",
    "TF-635": "the job is not the one that was signed",
    "TF-636": "the job's signature has expired",
    "TF-637": "the job's signature was used before",
    "TF-700": "a privacy value that cannot be",
    "TF-701": "the privacy budget does not suffice",
    "TF-702": "the privacy ledger was altered",
    "TF-703": "records known under another name",
    "TF-704": "the privacy ledger cannot be used",
    "TF-705": "charged before",
    "TF-706": "another neighbouring relation",
    "TF-711": "records of a batch are coupled",
    "TF-712": "a model without gradients of single records",
    "TF-720": "no random numbers",
    "TF-721": "a clipped value over its bound",
    "TF-730": "stopped by the site's egress guard",
    "TF-731": "the engine's doors are open",
    "TF-732": "a version of the engine that was not tested",
    "TF-742": "the site's two accounts are not apart",
}
"""Meaning of each code that may leave a site, in a few words; ``tightframe explain`` says what to do."""


def outside_code(code: object) -> str:
    """Return a code that may leave a silo: one of the documented ones, TF-503 for anything else.

    >>> outside_code("TF-301"), outside_code("patient 4711")
    ('TF-301', 'TF-503')
    """
    return code if isinstance(code, str) and code in REASONS else "TF-503"


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""System errors of a file that cannot grow: disk full, quota, size limit, or a read-only file system."""


def failure_code(error: BaseException) -> str:
    """Return all that may leave the silo of an error: its documented code; TF-503 for any other error."""
    if isinstance(error, OSError) and error.errno in FULL:
        return "TF-512"
    return outside_code(error.code if isinstance(error, TightframeError) else None)
