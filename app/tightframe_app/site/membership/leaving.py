"""``tightframe site leave``: remove from this machine what joining made.

Ledger and keys stay unless named; jobs' results, logs and the records always stay.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tightframe.errors import JoinError, TightframeError
from tightframe.files import quoted, write_json
from tightframe.securesum.rules import MIN_SITES
from tightframe_app.federation.kits import CONFIG_FILE, LEFT, Kit
from tightframe_app.site.membership.joining import NOTES

KEY = "client.key"
PROOFS = frozenset({KEY, "client.crt", "rootCA.pem"})
"""Files of ``startup`` needed to verify ledger and transcripts, and the key itself."""


@dataclass(frozen=True)
class Departure:
    """Files that leaving removes, and files that stay.

    Attributes:
        files: files and folders made by joining, or by the engine for it.
        keys: all copies of the private key.
        ledger: the privacy ledger, files that show its loss, and transcripts.
        project: the federation's name, from its root certificate.
        name: the site's.
        pin: the site's; empty if its certificate cannot be read.
        ends: end of the certificate's validity.
        state: folder for lasting state, if any.
        cohort: hospitals of its latest secure sums, this one included; empty if unknown.
    """

    files: tuple[Path, ...]
    keys: tuple[Path, ...]
    ledger: tuple[Path, ...]
    project: str
    name: str
    pin: str
    ends: datetime | None
    state: Path | None
    cohort: tuple[str, ...]


def departure(kit: Kit, request: Path | None) -> Departure:
    """List a site's files from joining, without changing any.

    Args:
        kit: of the site, which does not run.
        request: folder of its request, if it is not beside ``kits/`` or in the current folder.

    Raises:
        JoinError: TF-756, if a process of the kit runs.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from tightframe_app.site import stop
    from tightframe_app.site.membership import starting

    if running := stop.running(kit.folder):
        raise JoinError(
            f"Expected {kit.name} to be stopped, but {len(running)} of its processes run, first "
            f"{running[0].described()}. Nothing was removed. Run first: "
            f"tightframe site stop --kit {quoted(kit.folder)}",
            code="TF-756",
        )
    certificate = x509.load_pem_x509_certificates((kit.startup / "client.crt").read_bytes())[0]
    public = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    digest = hashes.Hash(hashes.SHA256())
    digest.update(public)
    state = starting.state_folder(kit)
    request_folder = _request(kit, request, public)
    files = [path for path in sorted(kit.startup.iterdir()) if path.name not in PROOFS]
    files += [path for path in sorted(kit.local.iterdir()) if path.name != CONFIG_FILE]
    files += [kit.folder / name for name in ("transfer", "readme.txt", *stop.NOTES)]
    files += starting.notes(kit)
    keys = [kit.startup / KEY]
    if request_folder is not None:
        names = [f"{kit.name}.csr", f"{kit.name}.request.zip", "request.json", "site.yaml", NOTES]
        # Packaging leaves the answer's files.
        names += [f"{kit.name}.crt", "signed.json", "signed.json.sig", "rootCA.pem"]
        files += [*_audit(request_folder), *(request_folder / name for name in names)]
        keys.append(request_folder / f"{kit.name}.key")
    issuer = certificate.issuer.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return Departure(
        tuple(path for path in files if path.is_symlink() or path.exists()),
        tuple(path for path in keys if path.is_file()),
        tuple(_ledger(kit, state)),
        str(issuer[0].value) if issuer else "",
        kit.name,
        digest.finalize().hex(),
        certificate.not_valid_after_utc.astimezone(UTC),
        state,
        _cohort(kit),
    )


def remove(paths: tuple[Path, ...], *roots: Path) -> None:
    """Remove files and folders, and then their empty parents below ``roots``."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for parent in sorted({path.parent for path in paths}, key=lambda one: -len(one.parts)):
        for folder in (parent, *parent.parents):
            if not any(folder == root or root in folder.parents for root in roots):
                break
            if not folder.is_dir() or any(folder.iterdir()):
                break
            folder.rmdir()


def note(kit: Kit) -> None:
    """Note in a kit's folder, if it still exists, when the site left."""
    if kit.folder.is_dir():
        write_json(kit.folder / LEFT, {"site": kit.name, "on": f"{datetime.now(UTC):%Y-%m-%d}"})


def duties(going: Departure) -> list[str]:
    """List for the lead what the others have to do, none of which can be done here."""
    until = "its end" if going.ends is None else f"{going.ends:%Y-%m-%d}"
    name = going.name
    return [
        f"Export the next jobs without {name} (`--sites` names the others alone). {_left(going)}",
        f"The other hospitals refuse such a job (TF-612) until each has accepted the cohort without {name}: "
        "the difference to earlier totals can be its own counts. They run `tightframe site cohort accept`.",
        f"The certificate is valid until {until}, and there are no revocation lists. So that nobody accepts "
        f"its key any more, each hospital keeps an empty list of pins for it: `tightframe federation pins "
        f"--kit KIT --add {name}=PIN` with the pin above, then the same with `--remove`.",
        f"The keeper of the root key notes that {name} has left, and certifies no key of this name any more.",
        "The server needs nothing: it forgets a client that is silent for ten minutes.",
        "Models that its records have trained remain. To take records out of them is a withdrawal, which "
        "this site has to take part in: before it leaves.",
    ]


def _left(going: Departure) -> str:
    """Say whether the last cohort without this hospital is enough for secure sums."""
    need = f"Secure sums need {MIN_SITES} hospitals"
    others = [name for name in going.cohort if name != going.name]
    if not others:
        return f"{need}: how many remain is not known here."
    missing = "; a third has to join first" if len(others) == MIN_SITES - 1 else "; others have to join first"
    remain = f"of the last cohort remain {len(others)}, {', '.join(others)}"
    return f"{need}: {remain}{missing if len(others) < MIN_SITES else ''}."


def _cohort(kit: Kit) -> tuple[str, ...]:
    """Return the hospitals of this site's latest secure sums; empty if its ledger has none."""
    from tightframe.securesum.site.journal import CohortAccepted, StaticMasked, StaticOpened
    from tightframe_app.site.memory import memory_of

    try:
        entries = memory_of(kit.local / CONFIG_FILE, kit.name, kit.startup).read()
    except (TightframeError, OSError):
        return ()
    kinds = StaticMasked | StaticOpened | CohortAccepted
    rosters = [tuple(entry.roster) for entry in entries if isinstance(entry, kinds)]
    return rosters[-1] if rosters else ()


def _ledger(kit: Kit, state: Path | None) -> Iterator[Path]:
    """Yield this site's files in its state folder, which other sites may share, and the copy in the kit."""
    from tightframe.flare.submitter import TAKEN_UP
    from tightframe.privacy.ledger.ledger import ledger_path
    from tightframe.rounds.site_ledger import KIT_HEAD, journal_folder

    candidates = [kit.folder / KIT_HEAD]
    if state is not None and state.is_dir():
        candidates += [ledger_path(state, kit.name).parent, journal_folder(state, kit.name)]
        candidates.append(state / TAKEN_UP / f"{kit.name}.jsonl")
        candidates += [path / kit.name for path in sorted(state.iterdir()) if _is_job(path.name)]
    yield from (path for path in candidates if path.exists() and not path.is_symlink())


def _is_job(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False


def _request(kit: Kit, output: Path | None, public: bytes) -> Path | None:
    """Find the folder of the request for this kit's key; None if it is gone."""
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_private_key,
    )

    beside = kit.folder.parents[3] / kit.name if len(kit.folder.parents) > 3 else Path(kit.name)
    for folder in [output] if output is not None else [beside, Path(kit.name)]:
        try:
            key = load_pem_private_key((folder / f"{kit.name}.key").read_bytes(), None)
        except (OSError, ValueError, TypeError):
            continue
        if key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) == public:
            return folder.resolve()
    return None


def _audit(request: Path) -> Iterator[Path]:
    """Yield the engine's note of a request, in this account's home folder."""
    try:
        number = str(json.loads((request / "request.json").read_text(encoding="utf-8"))["request_id"])
        path = Path.home() / ".nvflare" / "cert_requests" / uuid.UUID(number).hex
    except (OSError, ValueError, KeyError, TypeError):
        return
    if path.is_dir():
        yield path
