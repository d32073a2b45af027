"""What a lead signs of a job: its files by name, for whom, until when, and once.

The engine's own signature binds the contents of files one by one: files of two signed jobs can be mixed,
dropped, and run again for ever. A manifest of ours lies in the ``config`` folder of each app of a job, so
that it travels to the sites, and binds all of it together. Sites hold it against the project's root.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from cryptography import x509
from cryptography.x509.oid import NameOID
from pydantic import Field, ValidationError

from tightframe.config.job import JobConfig, SiteName
from tightframe.errors import ManifestError
from tightframe.files import append_durably, drop_torn_line, write_json
from tightframe.options import StrictModel
from tightframe.securesum.errors import ProtocolError
from tightframe.securesum.identity import Anchor, Signer, verify_certificate, verify_signature
from tightframe.securesum.primitives import encode_fields

PLACE = "config/tightframe_manifest.json"
"""Of the manifest, in an app's folder."""
ENGINE_FILES = frozenset((".__nvfl_sig.json", ".__nvfl_submitter.crt"))
"""What the engine adds to each folder of a job when it is submitted."""
ROLES = ("lead", "project_admin")
"""Who may submit jobs, by the role in the certificate."""
TAG = "job-manifest"
DAYS, MAX_DAYS = 14, 366
CLOCKS = timedelta(minutes=10)
"""By how much the clocks of a lead and a site may differ."""
MAX_BYTES = 2**20
SIGN = "ask the lead to sign it with `tightframe jobs sign FOLDER` and to submit it again"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Plain names below the app's folder: nothing absolute, hidden, `..`, or that only looks like another name.
RelativeName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$", max_length=200)
]
Time = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")]


class Manifest(StrictModel):
    """One app of a job, as it was signed.

    Attributes:
        format: of this file.
        job_sha256: hash of the job's values.
        sites: the silos that the job is for.
        files: each file of the app -> SHA-256, by its name below the app's folder.
        created, expires: UTC; a site takes the job up between the two.
        nonce: of this signing; a site takes it up for one job of the engine.
        signer: provisioned name of who signed.
        certificate: the signer's, DER in base64.
        signature: over ``signed``, in base64.
    """

    format: Literal[1]
    job_sha256: Sha256
    sites: list[SiteName] = Field(min_length=1, max_length=250)
    files: dict[RelativeName, Sha256] = Field(max_length=1000)
    created: Time
    expires: Time
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    signer: Annotated[str, Field(min_length=1, max_length=200)]
    certificate: Annotated[str, Field(max_length=20_000)]
    signature: Annotated[str, Field(max_length=4000)] = ""

    def signed(self) -> bytes:
        """All but the signature, in the one encoding that the protocol's keys sign."""
        values = self.model_dump(exclude={"signature", "certificate"})
        return encode_fields(TAG, values, hashlib.sha256(self.der).digest())

    @property
    def der(self) -> bytes:
        """The signer's certificate."""
        return base64.b64decode(self.certificate, validate=True)

    @property
    def until(self) -> datetime:
        """When it expires."""
        return _moment(self.expires)


def sign(
    app: Path, job: JobConfig, signer: Signer, *, days: int = DAYS, nonce: str | None = None, now: datetime
) -> Manifest:
    """Write the manifest of one app of a job folder.

    Args:
        app: the app's folder.
        job: what it is of.
        signer: the lead's identity.
        days: for how long sites may take it up.
        nonce: the same for all apps of a job; a new one by default.
        now: the time, with a time zone.

    Raises:
        ManifestError: TF-634 if ``days`` is out of range; TF-635 if the folder has links or odd names.
    """
    if not 1 <= days <= MAX_DAYS:
        raise ManifestError(f"Expected a manifest for 1 to {MAX_DAYS} days, but got {days}.")
    made = Manifest(
        format=1,
        job_sha256=job.sha256(),
        sites=list(job.roster),
        files=_files(app),
        created=_written(now),
        expires=_written(now + timedelta(days=days)),
        nonce=nonce or secrets.token_hex(16),
        signer=common_name(signer.certificate),
        certificate=base64.b64encode(signer.certificate).decode(),
    )
    signature = base64.b64encode(signer.sign(made.signed())).decode()
    made = made.model_copy(update={"signature": signature})
    write_json(app / PLACE, made.model_dump(mode="json"))
    return made


def read(app: Path) -> Manifest:
    """The manifest in an app's folder, as it says; nothing of it is verified.

    Raises:
        ManifestError: TF-633 if there is none, TF-634 if it is malformed.
    """
    path = app / PLACE
    try:
        kind = path.lstat()
    except FileNotFoundError:
        raise ManifestError(
            f"Expected the job to be signed by its lead, but it has no {PLACE}: {SIGN}.", code="TF-633"
        ) from None
    if not stat.S_ISREG(kind.st_mode) or kind.st_size > MAX_BYTES:
        raise _malformed("no plain file of a manifest's size")
    try:
        values = json.loads(path.read_bytes(), object_pairs_hook=_once)
        made = Manifest.model_validate(values)
        if made.der and _moment(made.created) < made.until:
            return made
    except (ValidationError, ValueError, RecursionError, binascii.Error):
        pass  # what a stranger wrote is not repeated
    raise _malformed("something else")


def verify(app: Path, job: JobConfig, site: str, anchor: Anchor, *, now: datetime) -> Manifest:
    """The manifest of a deployed app, if a lead of this project signed exactly what lies there.

    When it may be taken up, and how often, ``take_up`` says.

    Args:
        app: the app's folder at this site.
        job: whose values this site was given to run.
        site: this site's name.
        anchor: the project's root.
        now: the time, with a time zone.

    Raises:
        ManifestError: TF-633, TF-634; TF-635 if files, values or sites are not as signed.
    """
    made = read(app)
    try:
        verify_certificate(made.der, made.signer, anchor, pins=None, pinned_only=False, at=now, roles=ROLES)
        verify_signature(
            made.der,
            made.signed(),
            _signature(made),
            owner=made.signer,
            what="the job's manifest",
        )
    except (ProtocolError, UnicodeError) as error:
        raise ManifestError(
            f"Expected the manifest to be signed by a {' or '.join(ROLES)} of this project, but: {error} "
            f"If the job is meant, {SIGN}."
        ) from None
    if made.signer in made.sites:
        raise ManifestError(
            f"Expected a person to sign the job, but {made.signer} is one of its sites: {SIGN}."
        )
    _hold_files(made, _files(app))
    if made.job_sha256 != job.sha256():
        raise _other("the job's values", f"SHA-256 {made.job_sha256}", job.sha256())
    if sorted(made.sites) != list(job.roster) or site not in made.sites:
        raise _other("the sites", f"{', '.join(job.roster)} with {site}", ", ".join(made.sites))
    return made


def take_up(made: Manifest, job_id: str, store: Path, *, now: datetime) -> None:
    """Put on record that this site takes a signed job up, once for ever.

    The same job of the engine is asked for again by every process and task of it, also after the manifest
    has expired. A line is on the disk before this returns.

    Args:
        made: verified.
        job_id: the engine's id of the job.
        store: this site's file of nonces.
        now: the time, with a time zone.

    Raises:
        ManifestError: TF-636 if it is expired or of the future; TF-637 if another job of the engine has its
            nonce, or the file cannot be read.
    """
    store.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(store.with_name(f".{store.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = _taken_up(store)
        other = known.get(made.nonce)
        if other == job_id:
            return
        if other is not None:
            raise ManifestError(
                f"Expected a signed job to be submitted once, but {other} had this signature before the "
                f"engine's job {job_id}: {SIGN}.",
                code="TF-637",
            )
        check_time(made, now=now)
        line = {"nonce": made.nonce, "job_id": job_id, "signer": made.signer, "expires": made.expires}
        append_durably(store, json.dumps(line).encode() + b"\n")
    finally:
        os.close(lock)


def check_time(made: Manifest, *, now: datetime) -> None:
    """Refuse a manifest outside its time.

    Args:
        made: verified.
        now: the time, with a time zone.

    Raises:
        ManifestError: TF-636 if it is expired or of the future.
    """
    if now >= made.until or now < _moment(made.created) - CLOCKS:
        raise ManifestError(
            f"Expected a job signed for now ({_written(now)}), but it is signed from {made.created} to "
            f"{made.expires}: see that this machine's clock is right; if it is, {SIGN}.",
            code="TF-636",
        )


def common_name(der: bytes) -> str:
    """The name in a certificate (DER)."""
    names = x509.load_der_x509_certificate(der).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _taken_up(store: Path) -> dict[str, str]:
    if not store.exists():
        return {}
    try:
        drop_torn_line(store)
        lines = [json.loads(line) for line in store.read_text(encoding="utf-8").splitlines()]
        return {str(line["nonce"]): str(line["job_id"]) for line in lines}
    except (ValueError, KeyError, TypeError):
        raise ManifestError(
            f"Expected {store} to hold the signed jobs that this site has taken up, but got something else: "
            "restore it from a backup; without it a job could be run twice.",
            code="TF-637",
        ) from None


def _files(app: Path) -> dict[str, str]:
    """Name -> SHA-256 of each file of an app, but the manifest and what the engine adds.

    Raises:
        ManifestError: TF-635 at a link, or what is neither file nor folder.
    """
    hashes = {}
    for path in sorted(app.rglob("*")):
        name = path.relative_to(app).as_posix()
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):
            raise _other("the job's files", "plain files", f"something else as {name!r}")
        if name == PLACE or path.name in ENGINE_FILES:
            continue
        with path.open("rb") as stream:
            hashes[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes


def _hold_files(made: Manifest, here: Mapping[str, str]) -> None:
    missing, added = sorted(set(made.files) - set(here)), sorted(set(here) - set(made.files))
    changed = sorted(name for name in here if name in made.files and here[name] != made.files[name])
    if missing or added or changed:
        differences = [
            f"{what} {', '.join(map(repr, names[:3]))}"
            for what, names in (("missing", missing), ("added", added), ("changed", changed))
            if names
        ]
        raise _other("the job's files", "as they were signed", "; ".join(differences))


def _signature(made: Manifest) -> bytes:
    try:
        return base64.b64decode(made.signature, validate=True)
    except binascii.Error:
        raise _malformed("no signature") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def _moment(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def _written(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _malformed(got: str) -> ManifestError:
    return ManifestError(f"Expected {PLACE} to be a manifest of this version, but got {got}: {SIGN}.")


def _other(what: str, expected: str, got: str) -> ManifestError:
    return ManifestError(
        f"Expected {what} to be {expected}, but got {got}: the job is not the one that was signed; {SIGN}.",
        code="TF-635",
    )
