"""Checks of a site's identity in the engine, and of the engine's files that control what leaves the site."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

from tightframe.errors import SiteConfigError
from tightframe.results.words import plural
from tightframe_app.federation.kits import common_name
from tightframe_app.site.checks.findings import Finding, Scope, State

GUARD = "tightframe.flare.guard.EgressGuard"
DOORS = "tightframe.flare.doors.SiteDoors"
RENEW = timedelta(days=30)
"""Least remaining validity of a certificate without a note."""


def identity(scope: Scope) -> tuple[str | None, list[Finding]]:
    """Return the site's name, by default the one in its certificate, and the findings about its kit."""
    from tightframe.flare.identity import SITE_FILE, site_identity
    from tightframe.securesum.identity import public_key_hash

    area, startup = "identity", scope.startup
    if startup is None:
        state: State = "problem" if scope.production else "note"
        text = "no startup kit beside the configuration: give its folder with --kit"
        return scope.site, [Finding(area, state, text)]
    findings: list[Finding] = []
    name = scope.site or common_name(startup / SITE_FILE)
    central = _central(scope)
    try:
        signer, anchor = site_identity(startup, name or "", production=scope.production, missing_role=central)
    except SiteConfigError as error:
        return name, [Finding(area, "problem", str(error))]
    pin = public_key_hash(signer.certificate).hex()
    findings.append(Finding(area, "ok", f"{name}: certificate, key and root of {startup} match"))
    findings.append(Finding(area, "note", f"this site's pin, for the policies of its peers: {pin}"))
    findings += _validity("certificate", signer.certificate)
    findings += _validity("root certificate", anchor.root)
    return name, findings


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


def _central(scope: Scope) -> bool:
    """Check whether the policy accepts certificates without a role; false if the configuration is wrong."""
    try:
        return json.loads(scope.config.read_text(encoding="utf-8"))["policy"]["central_provisioning"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def files(scope: Scope, *, guarded: bool) -> Iterator[Finding]:
    """Check the engine's own files beside the configuration, which control what may leave the site."""
    area = "engine"
    privacy, resources = (_object(scope.local / name) for name in ("privacy.json", "resources.json"))
    if not scope.production and not (privacy or resources):
        yield Finding(area, "note", "not checked: no privacy.json or resources.json beside it")
        return
    wanted: State = "problem" if scope.production and guarded else "note"
    yield from _guard_in(privacy, wanted)
    if resources is None:
        state: State = "problem" if scope.production else "note"
        yield Finding(area, state, f"no readable local/resources.json{_take('resources')}")
        return
    yield from _resources_in(resources, "problem" if scope.production else "note")
    yield from _doors_in(resources, "problem" if scope.production else "note")
    permissions = _object(scope.local / "authorization.json")
    if scope.production and _shell_allowed(permissions):
        text = (
            "local/authorization.json allows shell commands here from the console: set shell_commands to "
            f"none{_take('authorization')}"
        )
        yield Finding(area, "problem", text)


def _take(name: str) -> str:
    return f": the file is what `tightframe provisioning show local/{name}.json` prints"


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
        text = f"no egress guard in local/privacy.json ({what}){_take('privacy')}"
        yield Finding("engine", wanted, text)
    elif GUARD not in [item.get("path") for item in _dicts(privacy, "components")]:
        text = "the egress guard is not a component in local/privacy.json: a job's filter would run after it"
        yield Finding("engine", wanted, text)
    else:
        yield Finding("engine", "ok", f"the egress guard filters results ({plural(len(scopes), 'scope')})")


def _resources_in(resources: dict[str, Any], wanted: State) -> Iterator[Finding]:
    from tightframe.flare.simulation.simulator import ALLOW_LIST

    allowed, ours = resources.get("class_allow_list"), ALLOW_LIST["class_allow_list"]
    if resources.get("allow_log_streaming") is not False:
        text = 'local/resources.json lets the engine send this site\'s log: set "allow_log_streaming": false'
        yield Finding("engine", wanted, text)
    if not isinstance(allowed, list) or not set(map(str, allowed)) <= set(ours):
        text = (
            f"local/resources.json lets a job build classes other than ours: set class_allow_list to {ours}"
        )
        yield Finding("engine", wanted, text)
    elif resources.get("class_list_enforcement_mode", "enforce") != "enforce":
        text = (
            "local/resources.json only warns about other classes: set "
            '"class_list_enforcement_mode": "enforce"'
        )
        yield Finding("engine", wanted, text)
    elif resources.get("allow_log_streaming") is False:
        yield Finding("engine", "ok", "no log is streamed, and jobs can only build our two classes")


def _doors_in(resources: dict[str, Any], wanted: State) -> Iterator[Finding]:
    """Check that the engine's command channel is shut, and that its version was tested."""
    from tightframe.flare.doors.rules import TESTED

    if DOORS in [item.get("path") for item in _dicts(resources, "components")]:
        yield Finding(
            "engine", "ok", "the engine's doors are shut: only a run's own commands, from the server alone"
        )
    else:
        line = json.dumps({"id": "doors", "path": DOORS, "args": {}})
        text = (
            "the engine's doors are open, so anybody with a kit can read this machine's files (TF-731): add "
            f'{line} to "components" in local/resources.json and restart the client'
        )
        yield Finding("engine", wanted, text)
    installed = metadata.version("nvflare")
    if installed not in TESTED:
        text = f"NVFlare {installed} is installed, but the doors were tested with {TESTED} only (TF-732)"
        yield Finding("engine", wanted, text)


def components(local: Path) -> list[dict[str, Any]]:
    """Return the engine's components at a site, from its ``local/resources.json``."""
    return _dicts(_object(local / "resources.json"), "components")


def _shell_allowed(authorization: dict[str, Any] | None) -> bool:
    """Check whether any role may run shell commands, as without a file, when the engine checks no rights."""
    permissions = (authorization or {}).get("permissions")
    if not isinstance(permissions, dict) or not permissions:
        return True
    for rights in permissions.values():
        right = rights.get("shell_commands", "none") if isinstance(rights, dict) else rights
        if right not in ("none", ["none"]):
            return True
    return False


def _object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in an engine's file, or in its default; None if neither has one."""
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
    items = (values or {}).get(key)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
