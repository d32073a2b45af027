"""What the hospitals of a federation keep to themselves, and all that its server and its lead can reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.fuel.flare_api.api_spec import AuthorizationError
from tests.support.production.federation import LEAD, SERVER, SITES, Federation
from tests.support.production.private import Search, every_file
from tests.support.production.spy.sitecustomize import noted

from tightframe import data
from tightframe.data.base import class_counts
from tightframe.rounds.state_files import SALT

DATASET = "fed_isic2019"


def private_values(federation: Federation) -> Search:
    """Vectors and secrets as the hospitals' processes had them, keys, counts, names and places of records."""
    search = Search()
    search.text("name of a record", "ISIC_")
    for name in SITES:
        kit, state = federation.kit(name), federation.state(name)
        search.key(f"{name}: key", kit / "startup" / "client.key")
        places = (federation.records(name), state, federation.temporary(name))
        search.text(f"{name}: place", *map(str, places), f"prod_00/{name}")
        salts = [path.read_text() for path in state.rglob(SALT)]
        assert salts, f"{name}: its random streams have a key in production"
        search.text(f"{name}: salt", *salts, *(bytes.fromhex(salt) for salt in salts))
        search.counts(f"{name}: counts", *_counts(kit / "local" / "tightframe.json"))
        windows: dict[str, int] = {}
        for what, value in noted(federation.spied(name)):
            kind = what.split()[0]
            windows[kind] = windows.get(kind, 0) + search.parts(f"{name}: {what}", value)
            if what.startswith("tensor update/"):
                numbers = search.numbers(f"{name}: {what}", np.frombuffer(value, np.float32))
                windows["decimal"] = windows.get("decimal", 0) + numbers
        assert min(windows[kind] for kind in ("tensor", "term", "secret", "decimal")) > 20, windows
    return search


def _counts(config: Path) -> tuple[list[int], list[str]]:
    """Training records of each class at a site, and the classes' names."""
    spec = data.get(DATASET)
    site = spec.site.model_validate(json.loads(config.read_text())["data"][DATASET])
    labels = spec.open(site, spec.options()).labels("train")
    return class_counts(labels, spec.num_classes).tolist(), list(spec.class_names)


def reachable(federation: Federation) -> list[Path]:
    """Every file of server and lead: kits, storage, downloads, what the server said or has open."""
    folder = federation.folder
    folders = [federation.kit(SERVER), federation.state(SERVER), federation.temporary(SERVER)]
    folders += [federation.kit(LEAD), folder / "results", folder / "job"]
    server = federation.engine_process(SERVER)
    opened = [
        Path(item.path) for one in (server, *server.children(recursive=True)) for item in one.open_files()
    ]
    files = {*every_file(*folders), *(path for path in opened if path.is_file()), folder / f"{SERVER}.log"}
    return sorted(files)


def told_to_the_lead(session: Any, job: str) -> tuple[list[str], set[str]]:
    """What the server answers the lead about a job and the hospitals, refusals too; what it refuses."""
    asked: list[tuple[Any, ...]] = [("get_job_meta", job), ("list_jobs", True), ("list_job_components", job)]
    asked += [("show_errors", job, "client"), ("show_stats", job, "all"), ("get_client_env",)]
    asked += [("report_resources", "client"), ("report_version", "client"), ("check_status", "client")]
    asked += [("get_job_logs", job, target) for target in ("server", "all", *SITES)]
    for name in SITES:
        asked += [("get_working_directory", name), ("ls_target", name), ("tail_target_log", name)]
        asked.append(("cat_target", name, None, "log.txt"))
    told, refused = [], set()
    for method, *arguments in asked:
        try:
            answer = getattr(session, method)(*arguments)
            told.append(f"{method}: {answer}")
            if answer == "refused":  # by the site's doors
                refused.add(method)
        except Exception as error:
            told.append(f"{method}: {type(error).__name__}: {error}")
            if isinstance(error, AuthorizationError):
                refused.add(method)
    return told, refused
