"""Our files in the ``local/`` folder of a startup kit of a site or of the server.

They are generated here; ``provisioning/`` has copies to read, and a test compares the two. A kit is
identified by its ``startup`` folder, which is never changed, and the certificate in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tightframe.errors import SiteConfigError
from tightframe.files import link_over, quoted, write_json

BEFORE = ".before"
"""Suffix of a file that was replaced with --force."""

LEFT = "left.json"
"""File beside ``startup`` that leaving writes."""

PERSON_FILE = "fed_admin.json"
"""File in ``startup`` that only a person's kit has."""

# `operate` covers shutdown, restart, configuration and lock-out, also of the server for its organisation.
_NOBODY = {name: "none" for name in ("operate", "shell_commands", "byoc", "server-predeployed-flwr")}
# `app_command` is in none of the engine's categories: a role has it only by name.
_ALL_JOBS = ("submit_job", "clone_job", "manage_job", "download_job", "app_command")
AUTHORIZATION: Mapping[str, Any] = {
    "format_version": "1.0",
    "permissions": {
        "project_admin": {**dict.fromkeys(_ALL_JOBS, "any"), "view": "any", **_NOBODY},
        "org_admin": {
            "submit_job": "none",
            "clone_job": "none",
            "manage_job": "o:submitter",
            "download_job": "o:submitter",
            "app_command": "o:submitter",
            "view": "any",
            **_NOBODY,
        },
        "lead": {
            "submit_job": "any",
            "clone_job": "n:submitter",
            "manage_job": "n:submitter",
            "download_job": "n:submitter",
            "app_command": "n:submitter",
            "view": "any",
            **_NOBODY,
        },
        "member": {**dict.fromkeys(_ALL_JOBS, "none"), "view": "any", **_NOBODY},
    },
}
CONFIG_FILE = "tightframe.json"
LAUNCHER = "tightframe.flare.accounts.launcher.TrainingLauncher"
_GUARD = {"path": "tightframe.flare.guard.EgressGuard", "args": {}}
PRIVACY: Mapping[str, Any] = {
    "format_version": 2,
    "scopes": [
        {
            "name": "tightframe",
            "properties": {},
            "task_data_filters": [],
            "task_result_filters": [{**_GUARD, "direction": "out"}],
        }
    ],
    "default_scope": "tightframe",
    "components": [{"id": "egress_guard", **_GUARD}],
}


def _doors(name: str) -> dict[str, Any]:
    return {"id": "doors", "path": f"tightframe.flare.doors.{name}", "args": {}}


def _component(name: str, path: str, **arguments: Any) -> dict[str, Any]:
    return {"id": name, "path": f"nvflare.app_common.{path}", "args": arguments}


def _allowed() -> dict[str, Any]:
    from tightframe.flare.simulation.simulator import ALLOW_LIST

    return {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": list(ALLOW_LIST["class_allow_list"]),
    }


def site_resources(
    gpus: int = 0, gpu_memory: int = 0, training: tuple[str, Path] | None = None
) -> dict[str, Any]:
    """Return a site's ``resources.json``: only our classes, shut doors, no log streaming, the GPUs for jobs.

    Args:
        gpu_memory: of each, in GiB.
        training: name and service socket of another training account; both kits of such a site have it, so
            that neither can start a job in the engine's account.
    """
    manager = "resource_managers.gpu_resource_manager.GPUResourceManager"
    return {
        **_allowed(),
        "allow_log_streaming": False,
        "client": {"retry_timeout": 30, "compression": "Gzip"},
        "components": [
            _doors("SiteDoors"),
            _component(
                "resource_manager",
                manager,
                num_of_gpus=gpus,
                mem_per_gpu_in_GiB=gpu_memory,
                expiration_period=300,
            ),
            _component("resource_consumer", "resource_consumers.gpu_resource_consumer.GPUResourceConsumer"),
            _component("process_launcher", "job_launcher.client_process_launcher.ClientProcessJobLauncher")
            if training is None
            else _training_launcher(*training),
        ],
    }


def _training_launcher(account: str, path: Path) -> dict[str, Any]:
    arguments = {"account": account, "socket_path": str(path)}
    return {"id": "training_launcher", "path": LAUNCHER, "args": arguments}


def server_resources(storage: Path) -> dict[str, Any]:
    """Return the server's ``resources.json``: only our classes, and its own folder for jobs and snapshots.

    The engine's default is a folder under the temporary directory, which all servers of a machine share.
    There is no receiver of logs, because no site sends any. ``job_ending`` ends a job even if a client is
    dead. A job's process checks twice a second whether its run is over; by default every three seconds.
    """
    files = "nvflare.app_common.storages.filesystem_storage.FilesystemStorage"
    return {
        **_allowed(),
        "servers": [
            {
                "admin_storage": "transfer",
                "max_num_clients": 250,
                "heart_beat_timeout": 600,
                "download_job_url": "http://download.server.com/",
                "admin_timeout": 10.0,
                "check_engine_frequency": 0.5,
            }
        ],
        "snapshot_persistor": {
            "path": "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {
                "uri_root": "/",
                "storage": {
                    "path": files,
                    "args": {"root_dir": str(storage / "snapshots"), "uri_root": "/"},
                },
            },
        },
        "components": [
            _doors("ServerDoors"),
            _component("job_scheduler", "job_schedulers.job_scheduler.DefaultJobScheduler", max_jobs=4),
            {
                "id": "job_manager",
                "path": "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
                "args": {"uri_root": str(storage / "jobs"), "job_store_id": "job_store"},
            },
            {"id": "job_store", "path": files},
            _component("process_launcher", "job_launcher.server_process_launcher.ServerProcessJobLauncher"),
            {"id": "job_ending", "path": "tightframe.flare.job_ending.JobEnding", "args": {}},
        ],
    }


def site_configuration(
    policy: str, state: Path, data: dict[str, Any], more: Mapping[str, str | None], device: str
) -> dict[str, Any]:
    """Return a site's ``tightframe.json``, with every rule of the policy written out.

    Raises:
        SiteConfigError: TF-202, listing all problems.
    """
    from tightframe.config.profiles import PROFILES as RULES
    from tightframe.config.site import parse_single

    rules = json.loads(json.dumps(RULES[policy]))  # type: ignore[index]
    values: dict[str, Any] = {"state_dir": str(state), "data": data}
    values |= {name: value for name, value in more.items() if value is not None}
    values |= {"device": device, "policy": {"profile": policy, **rules}}
    parse_single(values, CONFIG_FILE)
    return values


@dataclass(frozen=True)
class Kit:
    """A packaged startup kit.

    Attributes:
        folder: created by ``nvflare package``.
        name: the owner's, from the certificate.
        kind: of owner.
    """

    folder: Path
    name: str
    kind: Literal["site", "server"]

    @classmethod
    def open(cls, folder: Path) -> Kit:
        """Return the kit in a folder, by the files in its ``startup``.

        Raises:
            SiteConfigError: TF-615, if it is not a kit of a site or of the server.
        """
        from tightframe.flare.identity import SERVER_FILE, SITE_FILE

        startup = folder / "startup"
        for file, kind in ((SITE_FILE, "site"), (SERVER_FILE, "server")):
            if not (startup / file).is_file():
                continue
            name = common_name(startup / file)
            if name is None:
                raise SiteConfigError(
                    f"Expected {startup} to hold a certificate that names its owner, but it cannot be "
                    "read: package the kit again.",
                    code="TF-615",
                )
            return cls(folder.resolve(), name, "server" if kind == "server" else "site")
        if (startup / PERSON_FILE).is_file():
            raise SiteConfigError(
                f"Expected a startup kit of a site or of the server, but {folder} is {persons_kit(startup)}.",
                code="TF-615",
            )
        if (on := left_on(folder)) is not None:
            raise SiteConfigError(
                f"Expected a startup kit of a site or of the server in {folder}, but this site has left its "
                f"federation on {on} (tightframe site leave). To take part again, ask for a new certificate "
                "in another folder.",
                code="TF-615",
            )
        raise SiteConfigError(
            f"Expected a startup kit of a site or of the server in {folder}, but there is neither "
            f"startup/{SITE_FILE} nor startup/{SERVER_FILE}: give the "
            "folder that `tightframe site join` (or `nvflare package`) printed.",
            code="TF-615",
        )

    @property
    def startup(self) -> Path:
        """Folder with the files from provisioning."""
        return self.folder / "startup"

    @property
    def local(self) -> Path:
        """Folder with the owner's own configuration."""
        return self.folder / "local"

    def pin(self) -> str:
        """Return the SHA-256 of the site's public key.

        Raises:
            SiteConfigError: TF-615, if its peers will not accept the certificate.
        """
        from tightframe.flare.identity import site_identity
        from tightframe.securesum.identity import public_key_hash

        # A certificate without a role also has a pin; the peers' policies decide whether they accept it.
        signer, _ = site_identity(self.startup, self.name, production=True, missing_role=True)
        return public_key_hash(signer.certificate).hex()

    def add(self, files: Mapping[str, Any], *, force: bool = False) -> tuple[list[str], list[str]]:
        """Write files into ``local``; leave those with the same content untouched.

        Args:
            files: name -> JSON values.
            force: replace files with other content, and keep a copy of each beside it.

        Returns:
            The names of the written files, and of those that existed already.

        Raises:
            FileExistsError: if a file exists with other content, without ``force``. Nothing is written.
        """
        existing = [name for name in files if (self.local / name).exists()]
        differing = [name for name in existing if _values(self.local / name) != files[name]]
        if differing and not force:
            listed = ", ".join(str(self.local / name) for name in differing)
            raise FileExistsError(
                f"Expected to write this site's files, but some exist with other content: {listed}. "
                f"Nothing was written. Edit them by hand, or give --force, which keeps each as *{BEFORE}."
            )
        written = [name for name in files if name not in existing or name in differing]
        for name in written:
            path = self.local / name
            if name in differing:
                link_over(path, path.with_name(name + BEFORE))
            write_json(path, files[name], mode=0o600 if name == "tightframe.json" else 0o644)
        return written, [name for name in existing if name not in differing]


def left_on(folder: Path) -> str | None:
    """Return the day on which the site of a kit's folder left; None if it has not."""
    values = _values(folder / LEFT)
    on = values.get("on") if isinstance(values, dict) else None
    return on if isinstance(on, str) and re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", on) else None


def persons_kit(startup: Path) -> str:
    """Describe a person's kit (a lead's, an admin's, a member's), with the person's name if known."""
    values = _values(startup / PERSON_FILE)
    admin = values.get("admin") if isinstance(values, dict) else None
    name = admin.get("username") if isinstance(admin, dict) else None
    return "the kit of a person" + (f", {name}" if isinstance(name, str) and name else "")


def _values(path: Path) -> Any:
    """Return a file's JSON value; None, which no file of ours holds, if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def own_folder(folder: Path) -> None:
    """Create a folder with access only for its owner, unless it exists.

    Raises:
        SiteConfigError: TF-202, if it cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SiteConfigError(
            f"Expected to create the folder {folder}, but got: {error.strerror}. Create it for the account "
            f"that runs the engine (install -d -m 0700 -o ACCOUNT {quoted(folder)}), or choose another with "
            "--state-dir."
        ) from None


def common_name(path: Path) -> str | None:
    """Return the name in a kit's certificate; None if it cannot be read (see ``site_identity``).

    Args:
        path: the kit's ``fed_client.json`` or ``fed_server.json``, which names the certificate beside it.
    """
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        owner = values["client"] if "client" in values else values["servers"][0]
        certificates = x509.load_pem_x509_certificates((path.parent / owner["ssl_cert"]).read_bytes())
        return str(certificates[0].subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
