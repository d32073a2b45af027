"""``tightframe site join``: from the lead's request file to a key and a request, from the answer to a kit.

The first call makes the key, and notes this machine's settings beside it (``join.json``). The second takes
the keeper's answer, whose root must have the fingerprint that the keeper gave by telephone.
"""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tightframe.errors import JoinError
from tightframe.files import write_json
from tightframe.options import StrictModel
from tightframe_app.federation import kits
from tightframe_app.federation.provisioner import ROOT, SIGNED, described, is_a, key_code, provisioner, zipped

NOTES = "join.json"
"""File beside the key with the settings from the request, for the later kit."""
KITS, STATE = "kits", "state"
"""Folders beside the request's own."""
_FINGERPRINT = re.compile(r"(?:sha-?256)?\s*(?:fingerprint)?\s*[:=]?\s*([0-9a-f]{64})", re.IGNORECASE)
_KINDS = {"client": "site", "server": "server", "admin": "user"}


class Settings(StrictModel):
    """This machine's settings; None where not yet set.

    Attributes:
        data: data set name -> location of its records; empty if set later.
        dataset_id: the site's own name for its records.
        policy: profile to start from.
        state_dir: absolute path of the folder for lasting state.
        device: where it trains.
        gpus: GPUs that jobs may use.
        gpu_memory: GiB on each.
    """

    data: dict[str, Any] | None = None
    dataset_id: str | None = None
    policy: str | None = None
    state_dir: str | None = None
    device: str | None = None
    gpus: int | None = None
    gpu_memory: int | None = None

    def updated(self, later: Settings) -> Settings:
        """Return these settings, overridden by later ones."""
        return self.model_copy(update=later.model_dump(exclude_none=True))

    @property
    def said(self) -> bool:
        """True if anything is set."""
        return bool(self.model_dump(exclude_none=True))


@dataclass(frozen=True)
class Participant:
    """Participant in a request file or an answer.

    Attributes:
        project: the federation's name.
        name: the participant's.
        kind: ``site``, ``server`` or ``user``.
        role: of a person.
    """

    project: str
    name: str
    org: str
    kind: str
    role: str | None = None

    def described(self) -> str:
        """Return a description to print."""
        return f"{self.name} ({is_a(self.kind, self.role)}, {self.org}) of {self.project}"


@dataclass(frozen=True)
class Asked:
    """A key with its request.

    Attributes:
        zipped: file to send.
        code: of the key, to read out by telephone.
    """

    folder: Path
    zipped: Path
    code: str


@dataclass(frozen=True)
class Answer:
    """A keeper's answer to a request.

    Attributes:
        participant: that it certifies.
        version: of the federation's root, part of the kit's path.
        root: fingerprint of the root in it, 64 hexadecimal digits.
    """

    path: Path
    participant: Participant
    number: str
    version: str
    root: str

    @classmethod
    def read(cls, path: Path) -> Answer:
        """Read an answer, untrusted until ``check_root``.

        Raises:
            JoinError: TF-751, if it is not one.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        values, root = described(path, SIGNED), zipped(path, ROOT)
        if values is None or root is None:
            raise JoinError(_no_answer(path))
        try:
            (certificate,) = x509.load_pem_x509_certificates(root[0])
        except ValueError:
            raise JoinError(_no_answer(path)) from None
        info = values.get("ca_info")
        version = info.get("provision_version") if isinstance(info, dict) else None
        if not isinstance(version, str) or not re.fullmatch(r"[0-9]{2,8}", version):
            raise JoinError(_no_answer(path))
        who = Participant(
            values["project"], values["name"], values["org"], values["kind"], values.get("cert_role")
        )
        fingerprint = certificate.fingerprint(hashes.SHA256()).hex()
        return cls(path.resolve(), who, values["request_id"], version, fingerprint)

    def check_root(self, heard: str) -> None:
        """Refuse a root whose fingerprint is not the keeper's.

        Raises:
            JoinError: TF-753.
        """
        match = _FINGERPRINT.fullmatch(re.sub(r"(?<=[0-9a-fA-F])[:\s](?=[0-9a-fA-F])", "", heard.strip()))
        if match is None:
            raise JoinError(
                f"Expected the root's fingerprint, 64 digits 0-9A-F, got {heard!r}. Nothing was made. Ask "
                "the keeper of the root key by telephone.",
                code="TF-753",
            )
        if match.group(1).lower() != self.root:
            raise JoinError(
                f"Expected {self.path.name} to hold the root with the fingerprint {heard.strip()}, but it "
                "holds another. Nothing was made. Compare what you heard; if it is right, somebody has put "
                "another root in between: call the keeper of the root key.",
                code="TF-753",
            )


def _no_answer(path: Path) -> str:
    if zipped(path, "request.json") is not None:
        return (
            f"Expected the keeper's answer, but {path} is the request itself: send it to the keeper of the "
            "root key, and give NAME.signed.zip, which comes back."
        )
    return (
        f"Expected the lead's request file (NAME.yml) or the keeper's answer (NAME.signed.zip), but {path} "
        "is neither."
    )


def is_answer(path: Path) -> bool:
    """Return whether a file is a zip, as the keeper's answer is."""
    return zipfile.is_zipfile(path)


def read_request(path: Path) -> Participant:
    """Read the lead's request file.

    Raises:
        JoinError: TF-751, if it is not one.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        (one,) = values["participants"]
        texts = [values["name"], one["name"], one["org"], one["type"]]
        if not all(isinstance(text, str) and text for text in texts) or one["type"] not in _KINDS:
            raise ValueError
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._%+@-]*", one["name"]):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        raise JoinError(_no_answer(path)) from None
    role = one.get("role")
    project, name, org, kind = texts
    return Participant(project, name, org, _KINDS[kind], None if role is None else str(role))


def request_folder(who: Participant, output: Path | None) -> Path:
    """Return the folder for a request, which must be unused.

    Raises:
        JoinError: TF-755, if there is a request already.
    """
    folder = (output or Path(who.name)).resolve()
    if any((folder / file).exists() for file in (f"{who.name}.key", f"{who.name}.request.zip")):
        raise JoinError(
            f"Expected no key yet, but {folder} has one of {who.name}; nothing was changed. Send its "
            f"{who.name}.request.zip, and join with the {who.name}.signed.zip that comes back. For a new key "
            "name another folder with --output.",
            code="TF-755",
        )
    return folder


def ask(request: Path, who: Participant, folder: Path, settings: Settings) -> Asked:
    """Make a key and a request for its certificate, and note the settings beside them.

    Raises:
        JoinError: TF-752, if the engine refused.
        SiteConfigError: TF-202, if the settings are wrong; then nothing is made.
    """
    if who.kind == "site":
        configuration(who, folder, settings)
    values = provisioner("cert", "request", "-p", request.resolve(), "--out", folder)
    if values.get("name") != who.name:
        raise JoinError(
            f"Expected a request of {who.name}, but the engine made one of {values.get('name')!r} in "
            f"{folder}.",
            code="TF-752",
        )
    write_json(folder / NOTES, settings.model_dump(exclude_none=True), mode=0o600)
    code = key_code((folder / f"{who.name}.csr").read_bytes())
    if code is None:
        raise JoinError(
            f"Expected a request signed by its key in {folder}, but the engine made none.", code="TF-752"
        )
    return Asked(folder, Path(str(values["request_zip"])), code)


def find_request(answer: Answer, output: Path | None) -> Path:
    """Find the folder with the key that an answer belongs to.

    Args:
        output: the folder, if it is neither beside the answer nor in the current folder.

    Raises:
        JoinError: TF-754, if there is none.
    """
    name = answer.participant.name
    usual = [answer.path.parent / name, Path(name), answer.path.parent]
    for folder in [output] if output is not None else usual:
        try:
            values = json.loads((folder / "request.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        matches = isinstance(values, dict) and values.get("request_id") == answer.number
        if matches and (folder / f"{name}.key").is_file():
            return folder.resolve()
    for folder in [output] if output is not None else usual:
        who, kit = answer.participant, folder.absolute().parent / KITS
        if (on := kits.left_on(kit / who.project / f"prod_{answer.version}" / name)) is not None:
            raise JoinError(
                f"Expected the request that {answer.path.name} answers, but {name} has left its federation "
                f"on {on} (tightframe site leave). To take part again, ask for a new certificate in another "
                "folder.",
                code="TF-754",
            )
    searched = ", ".join(str(folder) for folder in ([output] if output is not None else usual))
    raise JoinError(
        f"Expected the folder of request {answer.number}, with the key {name}.key, in one of: {searched}. It "
        "is none of them. Join on the machine that has asked, in the same folder, or name it with --output.",
        code="TF-754",
    )


def noted(folder: Path) -> Settings:
    """Return the settings noted with a request; none if the engine's own command made it.

    Raises:
        JoinError: TF-754, if they cannot be read.
    """
    path = folder / NOTES
    if not path.is_file():
        return Settings()
    try:
        return Settings.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise JoinError(
            f"Expected this site's settings in {path}, but they cannot be read: {error}. Remove the file, "
            "and give them as options.",
            code="TF-754",
        ) from None


def package(answer: Answer, folder: Path, heard: str) -> Path:
    """Make the startup kit, or find that of an interrupted call; return its folder.

    Args:
        heard: the root's fingerprint, given by telephone.

    Raises:
        JoinError: TF-752 if the engine refused, TF-753 for another root, TF-755 if there is another kit.
    """
    answer.check_root(heard)
    who, workspace = answer.participant, folder.parent / KITS
    kit = workspace / who.project / f"prod_{answer.version}" / who.name
    if kit.exists():
        certificate = zipped(answer.path, f"{who.name}.crt")
        if certificate is None or not any(
            path.read_bytes().strip() == certificate[0].strip() for path in (kit / "startup").glob("*.crt")
        ):
            raise JoinError(
                f"Expected no other kit of {who.name}, but there is one in {kit}. Nothing was changed. Leave "
                "with it first (tightframe site leave), or ask and join in another folder.",
                code="TF-755",
            )
        return kit
    fingerprint = "SHA256:" + ":".join(re.findall("..", answer.root.upper()))
    words: list[str | Path] = ["--request-dir", folder, "--fingerprint", fingerprint, "-w", workspace]
    created = Path(str(provisioner("package", answer.path, *words)["output_dir"]))
    if created.resolve() != kit.resolve():
        raise JoinError(f"Expected the engine to make {kit}, but it made {created}.", code="TF-752")
    kit.chmod(0o700)  # it will hold the jobs' results beside the key
    return kit


def configuration(who: Participant, folder: Path, settings: Settings) -> dict[str, Any]:
    """Return a hospital's ``tightframe.json``.

    Raises:
        SiteConfigError: TF-202, listing all problems.
    """
    data = settings.data or {}
    # An explicit name survives a change of folder; of several data sets each has a derived one.
    dataset_id = settings.dataset_id or (None if len(data) > 1 else next(iter(data), who.name))
    return kits.site_configuration(
        settings.policy or "standard",
        state_folder(who, folder, settings),
        data,
        {"dataset_id": dataset_id},
        settings.device or "auto",
    )


def state_folder(who: Participant, folder: Path, settings: Settings) -> Path:
    """Return the folder for lasting state: as set, else ``state/NAME`` beside the request's folder."""
    return Path(settings.state_dir) if settings.state_dir else folder.parent / STATE / who.name


def configure(kit: kits.Kit, who: Participant, folder: Path, settings: Settings) -> None:
    """Fill a kit's ``local/``, and make the folder for lasting state.

    Raises:
        FileExistsError: if there are other files already; then nothing is written.
        SiteConfigError: TF-202, listing all problems.
    """
    state = state_folder(who, folder, settings)
    if kit.kind == "server":
        files = {"resources.json": kits.server_resources(state), "authorization.json": kits.AUTHORIZATION}
    else:
        files = {
            "resources.json": kits.site_resources(settings.gpus or 0, settings.gpu_memory or 0),
            "privacy.json": kits.PRIVACY,
            "authorization.json": kits.AUTHORIZATION,
            kits.CONFIG_FILE: configuration(who, folder, settings),
        }
    if settings.state_dir is None:
        state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kits.own_folder(state)
    kit.add(files)
