"""The manifest that a lead signs for a job: its files, sites, validity and a nonce for single use.

The engine's own signature covers the files one by one: files of two signed jobs can be mixed or removed,
and a signed job can be run again at any time. This manifest covers the whole job. It reaches the sites in
the ``config`` folder of each app of a job, and they verify it by the project's root.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import secrets
import stat
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from cryptography import x509
from cryptography.x509.oid import NameOID
from pydantic import Field, ValidationError

from tightframe.config.job import JobConfig, SiteName
from tightframe.errors import ManifestError
from tightframe.files import append_durably, drop_torn_line, each_once, file_sha256, locked_file, write_json
from tightframe.options import StrictModel
from tightframe.securesum.errors import ProtocolError
from tightframe.securesum.identity import Anchor, Signer, verify_certificate, verify_signature
from tightframe.securesum.primitives import encode_fields

PLACE = "config/tightframe_manifest.json"
"""Path of the manifest in an app's folder."""
ENGINE_FILES = frozenset((".__nvfl_sig.json", ".__nvfl_submitter.crt"))
"""Files that the engine adds to each folder of a job on submission."""
_CONFIGURATION = ("config_fed_client.json", "config_fed_server.json")
APP_FILES = frozenset(
    {PLACE, *ENGINE_FILES, *(f"config/{name}" for name in (*ENGINE_FILES, *_CONFIGURATION))}
)
"""Files of a deployed app without code: configuration, the lead's manifest, the engine's signatures."""
ROLES = ("lead", "project_admin")
"""Roles in the certificates of users who may submit jobs."""
TAG = "job-manifest"
DAYS, MAX_DAYS = 14, 366
CLOCKS = timedelta(minutes=10)
"""Largest accepted difference between the clocks of a lead and a site."""
MAX_BYTES = 2**20
SIGN = "ask the lead to sign it with `tightframe jobs sign FOLDER` and to submit it again"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Plain names below the app's folder: no absolute path, hidden file, `..`, or look-alike of another name.
RelativeName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$", max_length=200)
]
Time = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")]


class Manifest(StrictModel):
    """The signed description of one app of a job.

    Attributes:
        format: version of the file format.
        job_sha256: hash of the job's values.
        sites: the silos of the job.
        files: name of each file below the app's folder -> its SHA-256.
        created, expires: UTC; a site accepts the job between them.
        nonce: of this signature; a site accepts it for only one job of the engine.
        signer: provisioned name of the signer.
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
        """Return the bytes that the signature covers: all other values, encoded by ``encode_fields``."""
        values = self.model_dump(exclude={"signature", "certificate"})
        return encode_fields(TAG, values, hashlib.sha256(self.der).digest())

    @property
    def der(self) -> bytes:
        """The signer's certificate, DER."""
        return base64.b64decode(self.certificate, validate=True)

    @property
    def until(self) -> datetime:
        """Time of expiry."""
        return _moment(self.expires)


def sign(
    app: Path, job: JobConfig, signer: Signer, *, days: int = DAYS, nonce: str | None = None, now: datetime
) -> Manifest:
    """Write the manifest of one app of a job folder.

    Args:
        app: the app's folder.
        signer: the lead's identity.
        days: of validity.
        nonce: common to all apps of a job; a new one by default.
        now: the time, with a time zone.

    Raises:
        ManifestError: TF-634 if ``days`` is out of range; TF-635 if the folder has links or invalid names.
    """
    if not 1 <= days <= MAX_DAYS:
        raise ManifestError(f"Expected a manifest for 1 to {MAX_DAYS} days, but got {days}.")
    manifest = Manifest(
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
    signature = base64.b64encode(signer.sign(manifest.signed())).decode()
    manifest = manifest.model_copy(update={"signature": signature})
    write_json(app / PLACE, manifest.model_dump(mode="json"))
    return manifest


def read(app: Path) -> Manifest:
    """Read the manifest in an app's folder without verifying it.

    Raises:
        ManifestError: TF-633 if there is none, TF-634 if it is malformed.
    """
    path = app / PLACE
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise ManifestError(
            f"Expected the job to be signed by its lead, but it has no {PLACE}: {SIGN}.", code="TF-633"
        ) from None
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
        raise _malformed(f"something that is not a regular file of at most {MAX_BYTES} bytes")
    try:
        values = json.loads(path.read_bytes(), object_pairs_hook=each_once)
        manifest = Manifest.model_validate(values)
        if manifest.der and _moment(manifest.created) < manifest.until:
            return manifest
    except (ValidationError, ValueError, RecursionError, binascii.Error):
        pass  # the error below does not quote untrusted text
    raise _malformed("something else")


def verify(app: Path, job: JobConfig, site: str, anchor: Anchor, *, now: datetime) -> Manifest:
    """Verify that a lead of this project signed exactly this deployed app, and return its manifest.

    ``take_up`` checks the time and the single use.

    Args:
        app: the app's folder at this site.
        job: the job that this site received.
        site: this site's name.
        anchor: the project's root.
        now: the time, with a time zone.

    Raises:
        ManifestError: TF-633, TF-634; TF-635 if files, values or sites are not as signed.
    """
    manifest = read(app)
    try:
        verify_certificate(
            manifest.der, manifest.signer, anchor, pins=None, pinned_only=False, at=now, roles=ROLES
        )
        verify_signature(
            manifest.der,
            manifest.signed(),
            _signature(manifest),
            owner=manifest.signer,
            what="the job's manifest",
        )
    except (ProtocolError, UnicodeError) as error:
        raise ManifestError(
            f"Expected the manifest to be signed by a {' or '.join(ROLES)} of this project, but: {error} "
            f"If the job is genuine, {SIGN}."
        ) from None
    if manifest.signer in manifest.sites:
        raise ManifestError(
            f"Expected a person to sign the job, but {manifest.signer} is one of its sites: {SIGN}."
        )
    _check_files(manifest, _files(app))
    if manifest.job_sha256 != job.sha256():
        raise _other("the job's values", f"SHA-256 {manifest.job_sha256}", job.sha256())
    if sorted(manifest.sites) != list(job.roster) or site not in manifest.sites:
        raise _other("the sites", f"{', '.join(job.roster)} with {site}", ", ".join(manifest.sites))
    return manifest


def take_up(manifest: Manifest, job_id: str, store: Path, *, now: datetime) -> None:
    """Record that this site accepts a signed job, as it does only once.

    Every process and task of the same engine job calls this again and passes, even after the manifest has
    expired. The record is on disk before this returns.

    Args:
        manifest: verified.
        job_id: the engine's id of the job.
        store: this site's file of nonces.
        now: the time, with a time zone.

    Raises:
        ManifestError: TF-636 if it has expired or is not valid yet; TF-637 if another job of the engine used
            its nonce, or the file cannot be read.
    """
    with locked_file(store.with_name(f".{store.name}.lock")):
        recorded = _taken_up(store).get(manifest.nonce)
        if recorded == job_id:
            return
        if recorded is not None:
            raise ManifestError(
                f"Expected a signed job to be submitted once, but the engine's job {recorded} used the "
                f"signature of job {job_id} before: {SIGN}.",
                code="TF-637",
            )
        check_time(manifest, now=now)
        line = {
            "nonce": manifest.nonce,
            "job_id": job_id,
            "signer": manifest.signer,
            "expires": manifest.expires,
        }
        append_durably(store, json.dumps(line).encode() + b"\n")


def check_time(manifest: Manifest, *, now: datetime) -> None:
    """Refuse a manifest outside its validity.

    Args:
        manifest: verified.
        now: the time, with a time zone.

    Raises:
        ManifestError: TF-636 if it has expired or is not valid yet.
    """
    if now >= manifest.until or now < _moment(manifest.created) - CLOCKS:
        raise ManifestError(
            f"Expected a signature that is valid now ({_written(now)}), but it is valid from "
            f"{manifest.created} to {manifest.expires}: check this machine's clock; if it is right, {SIGN}.",
            code="TF-636",
        )


def common_name(der: bytes) -> str:
    """Return the common name in a certificate (DER); empty if it has none."""
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
            f"Expected {store} to list the signed jobs that this site has accepted, but got something else: "
            "restore it from a backup; without it a signed job could be run twice.",
            code="TF-637",
        ) from None


def _files(app: Path) -> dict[str, str]:
    """Hash an app's files: name -> SHA-256, without the manifest and the engine's own files.

    Raises:
        ManifestError: TF-635 for a link, or anything else that is neither file nor folder.
    """
    hashes = {}
    for path in sorted(app.rglob("*")):
        name = path.relative_to(app).as_posix()
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):
            raise _other("the job's files", "regular files", f"{name!r}, which is not one")
        if name == PLACE or path.name in ENGINE_FILES:
            continue
        hashes[name] = file_sha256(path)
    return hashes


def _check_files(manifest: Manifest, present: Mapping[str, str]) -> None:
    signed = manifest.files
    missing, added = sorted(set(signed) - set(present)), sorted(set(present) - set(signed))
    changed = sorted(name for name in present if name in signed and present[name] != signed[name])
    if missing or added or changed:
        differences = [
            f"{kind} {', '.join(map(repr, names[:3]))}"
            for kind, names in (("missing", missing), ("added", added), ("changed", changed))
            if names
        ]
        raise _other("the job's files", "as they were signed", "; ".join(differences))


def _signature(manifest: Manifest) -> bytes:
    try:
        return base64.b64decode(manifest.signature, validate=True)
    except binascii.Error:
        raise _malformed("no signature") from None


def _moment(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def _written(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _malformed(problem: str) -> ManifestError:
    return ManifestError(f"Expected {PLACE} to be a manifest of this version, but got {problem}: {SIGN}.")


def _other(part: str, expected: str, actual: str) -> ManifestError:
    return ManifestError(
        f"Expected {part} to be {expected}, but got {actual}: the job is not the one that was signed; "
        f"{SIGN}.",
        code="TF-635",
    )
