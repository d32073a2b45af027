"""A site's identity in the engine, and the engine's own files that decide what may leave the site."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

from tightframe_app.site.findings import Asked, Finding, State

GUARD = "tightframe.flare.guard.EgressGuard"
DOORS = "tightframe.flare.doors.SiteDoors"
RENEW = timedelta(days=30)
"""A certificate that ends sooner is told."""


def identity(asked: Asked) -> tuple[str | None, list[Finding]]:
    """Return the site's name, from its certificate if it is not given, and the findings about its kit."""
    from tightframe.errors import SiteConfigError
    from tightframe.flare.identity import SITE_FILE, site_identity
    from tightframe.securesum.identity import public_key_hash

    area, startup = "identity", asked.startup
    if startup is None:
        state: State = "problem" if asked.production else "note"
        text = "no startup kit beside the configuration: say with --kit where it lies"
        return asked.site, [Finding(area, state, text)]
    found: list[Finding] = []
    name = asked.site or common_name(startup / SITE_FILE)
    central = _central(asked)
    try:
        signer, anchor = site_identity(startup, name or "", production=asked.production, missing_role=central)
    except SiteConfigError as error:
        return name, [Finding(area, "problem", str(error))]
    pin = public_key_hash(signer.certificate).hex()
    found.append(Finding(area, "ok", f"{name}: certificate, key and root of {startup} fit together"))
    found.append(Finding(area, "note", f"this site's pin, for the policies of its peers: {pin}"))
    found += _validity("certificate", signer.certificate)
    found += _validity("root certificate", anchor.root)
    return name, found


def _validity(what: str, der: bytes) -> list[Finding]:
    from cryptography import x509

    certificate = x509.load_der_x509_certificate(der)
    begins, ends, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, datetime.now(UTC)
    text = f"the {what} is valid from {begins:%Y-%m-%d} to {ends:%Y-%m-%d} (UTC)"
    if not begins <= now <= ends:
        return [Finding("identity", "problem", f"{text}, but this machine's clock says {now:%Y-%m-%d %H:%M}")]
    if ends - now < RENEW:
        return [Finding("identity", "note", f"{text}: ask for a new kit in time")]
    return [Finding("identity", "ok", text)]


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


def _central(asked: Asked) -> bool:
    """Return true if the policy accepts certificates without a role; not if the configuration is wrong."""
    try:
        return json.loads(asked.config.read_text(encoding="utf-8"))["policy"]["central_provisioning"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def files(asked: Asked, *, guarded: bool) -> Iterator[Finding]:
    """The engine's own files beside the configuration: what leaves a site by their leave."""
    area = "engine"
    found = {name: _object(asked.local / name) for name in ("privacy.json", "resources.json")}
    if not asked.production and not any(found.values()):
        yield Finding(area, "note", "not looked at: no privacy.json or resources.json beside it")
        return
    wanted: State = "problem" if asked.production and guarded else "note"
    yield from _guard_in(found["privacy.json"], wanted)
    resources = found["resources.json"]
    if resources is None:
        state: State = "problem" if asked.production else "note"
        yield Finding(area, state, "no readable local/resources.json: copy it from provisioning/local")
        return
    yield from _resources_in(resources, "problem" if asked.production else "note")
    yield from _doors_in(resources, "problem" if asked.production else "note")
    permissions = _object(asked.local / "authorization.json")
    if asked.production and _shell_allowed(permissions):
        text = (
            "local/authorization.json lets somebody run shell commands here from the console: set "
            "shell_commands to none, as provisioning/local/authorization.json does"
        )
        yield Finding(area, "problem", text)


def _guard_in(privacy: dict[str, Any] | None, wanted: State) -> Iterator[Finding]:
    scopes = _dicts(privacy, "scopes")
    bare = [
        str(scope.get("name"))
        for scope in scopes
        if GUARD not in [item.get("path") for item in _dicts(scope, "task_result_filters")]
    ]
    default = (privacy or {}).get("default_scope")
    if not scopes or bare or default not in [scope.get("name") for scope in scopes]:
        what = f"the scopes {', '.join(bare)} lack it" if bare else "there is no default scope with it"
        text = f"no egress guard in local/privacy.json ({what}): copy that file from provisioning/local"
        yield Finding("engine", wanted, text)
    elif GUARD not in [item.get("path") for item in _dicts(privacy, "components")]:
        text = (
            "the egress guard is no component of local/privacy.json: a job's filter would have the last word"
        )
        yield Finding("engine", wanted, text)
    else:
        yield Finding("engine", "ok", f"the egress guard filters results in {len(scopes)} scope(s)")


def _resources_in(resources: dict[str, Any], wanted: State) -> Iterator[Finding]:
    from tightframe.flare.simulator import ALLOW_LIST

    allowed, ours = resources.get("class_allow_list"), ALLOW_LIST["class_allow_list"]
    if resources.get("allow_log_streaming") is not False:
        text = 'local/resources.json lets the engine send this site\'s log: set "allow_log_streaming": false'
        yield Finding("engine", wanted, text)
    if not isinstance(allowed, list) or not set(map(str, allowed)) <= set(ours):
        text = (
            f"local/resources.json lets a job build other classes than ours: set class_allow_list to {ours}"
        )
        yield Finding("engine", wanted, text)
    elif resources.get("class_list_enforcement_mode", "enforce") != "enforce":
        text = (
            'local/resources.json only warns of other classes: set "class_list_enforcement_mode": "enforce"'
        )
        yield Finding("engine", wanted, text)
    elif resources.get("allow_log_streaming") is False:
        yield Finding("engine", "ok", "no log is streamed, and jobs can build our two classes only")


def _doors_in(resources: dict[str, Any], wanted: State) -> Iterator[Finding]:
    """Tell whether the engine's command channel is shut, in a version in which that was tried."""
    from tightframe.flare.doors.rules import TESTED

    if DOORS in [item.get("path") for item in _dicts(resources, "components")]:
        yield Finding(
            "engine", "ok", "the engine's doors are shut: a run's own commands, from the server only"
        )
    else:
        line = json.dumps({"id": "doors", "path": DOORS, "args": {}})
        text = (
            "the engine's doors are open, anybody with a kit reads this machine's files (TF-731): add "
            f'{line} to "components" in local/resources.json and start the client anew'
        )
        yield Finding("engine", wanted, text)
    installed = metadata.version("nvflare")
    if installed not in TESTED:
        text = f"NVFlare {installed} is installed, but its doors were tried in {TESTED} only (TF-732)"
        yield Finding("engine", wanted, text)


def components(local: Path) -> list[dict[str, Any]]:
    """The engine's own components at a site, as its ``local/resources.json`` names them."""
    return _dicts(_object(local / "resources.json"), "components")


def _shell_allowed(authorization: dict[str, Any] | None) -> bool:
    """Return true if any role may run shell commands; without a file the engine asks nobody."""
    permissions = (authorization or {}).get("permissions")
    if not isinstance(permissions, dict) or not permissions:
        return True
    for rights in permissions.values():
        right = rights.get("shell_commands", "none") if isinstance(rights, dict) else rights
        if right not in ("none", ["none"]):
            return True
    return False


def _object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file of the engine's, or in its default; None if there is none."""
    for one in (path, path.with_name(path.name + ".default")):
        try:
            values = json.loads(one.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return None
        return values if isinstance(values, dict) else None
    return None


def _dicts(values: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    found = (values or {}).get(key)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
