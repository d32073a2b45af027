"""A site runs what a lead signed: no mixture, not for ever, not twice, and signed by nobody else."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.attacks.malicious_server import HEART
from tests.support.securesum.certificates import Issued, issue, make_root

from tightframe.config import job_manifest
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.job_manifest import PLACE
from tightframe.errors import JobError, ManifestError, TightframeError
from tightframe.flare import submitter
from tightframe.securesum.primitives import encode_fields
from tightframe_app.jobs import folders

NOW = datetime.now(UTC)
DATES = {"start": NOW - timedelta(days=30), "end": NOW + timedelta(days=300)}
PAST = {"start": NOW - timedelta(days=9), "end": NOW - timedelta(days=1)}
PROJECT, OTHER = make_root("project", **DATES), make_root("project", **DATES)
LEAD = issue(PROJECT, "lead@example.org", role="lead", key="rsa", **DATES)
SITES = ["hospital-1", "hospital-2", "hospital-3"]
CLIENT, SERVER = "config/config_fed_client.json", "config/config_fed_server.json"


def job(**changes: Any) -> JobConfig:
    return parse_job({**HEART, "sites": SITES, "min_sites": 3, **changes})


def exported(folder: Path, of: JobConfig, signer: Issued = LEAD, **options: Any) -> Path:
    """The silos' app of a signed job, as it is deployed: with what the engine adds."""
    folders.write_job(folders.job_files(of), folder)
    app = folder / "app"
    options.setdefault("now", NOW)
    job_manifest.sign(app, of, signer.signer(), **options)
    for place in (app, app / "config"):
        for name in job_manifest.ENGINE_FILES:
            (place / name).write_text("{}")
    return app


def verify(app: Path, of: JobConfig, site: str = "hospital-1", now: datetime = NOW) -> job_manifest.Manifest:
    return job_manifest.verify(app, of, site, PROJECT.anchor(not_sites=frozenset({"server"})), now=now)


def code_of(act: Callable[[], object]) -> str:
    with pytest.raises(TightframeError) as refused:
        act()
    assert isinstance(refused.value, ManifestError)
    return refused.value.code


def changed(app: Path, **values: Any) -> None:
    """Write other values into a manifest, without the key that signed it."""
    made = json.loads((app / PLACE).read_text())
    (app / PLACE).write_text(json.dumps({**made, **values}))


def test_what_was_signed_is_accepted(tmp_path: Path) -> None:
    made = verify(exported(tmp_path / "job", job()), job())
    assert made.signer == "lead@example.org" and made.sites == SITES
    store = tmp_path / "state" / "hospital-1.jsonl"
    for _ in range(2):  # tasks repeat, processes restart
        job_manifest.take_up(made, "id-1", store, now=NOW)
    job_manifest.take_up(made, "id-1", store, now=NOW + timedelta(days=100))  # and jobs last
    assert store.stat().st_mode & 0o077 == 0


def _mixed(app: Path, other: Path) -> None:
    shutil.copy(other / CLIENT, app / CLIENT)


def _mixed_with_manifest(app: Path, other: Path) -> None:
    shutil.copy(other / PLACE, app / PLACE)


def _dropped(app: Path, other: Path) -> None:
    (app / "config" / "config_fed_server.json").unlink()


def _added(app: Path, other: Path) -> None:
    (app / "config" / "more.json").write_text("{}")


def _added_code(app: Path, other: Path) -> None:
    (app / "custom").mkdir()
    (app / "custom" / "mine.py").write_text("")


def _hidden(app: Path, other: Path) -> None:
    (app / "config" / ".__nvfl_sig.json.py").write_text("")


def _renamed(app: Path, other: Path) -> None:
    (app / CLIENT).rename(app / "config" / "config_fed_client2.json")


def _case(app: Path, other: Path) -> None:
    (app / CLIENT).rename(app / "config" / "Config_fed_client.json")


def _lookalike(app: Path, other: Path) -> None:
    shutil.copy(app / CLIENT, app / "config" / "c\u043enfig_fed_client.json")  # a Cyrillic o


def _link(app: Path, other: Path) -> None:
    (app / CLIENT).rename(app.parent / "away.json")
    (app / CLIENT).symlink_to(app.parent / "away.json")


def _linked_folder(app: Path, other: Path) -> None:
    (app / "custom").symlink_to(app.parent)


def _pipe(app: Path, other: Path) -> None:
    os.mkfifo(app / "config" / "pipe")


def _second_manifest(app: Path, other: Path) -> None:
    shutil.copy(app / PLACE, app / "tightframe_manifest.json")


@pytest.mark.parametrize(
    "attack",
    [
        *(_mixed, _mixed_with_manifest, _dropped, _added, _added_code, _hidden, _renamed, _case, _lookalike),
        *(_link, _linked_folder, _pipe, _second_manifest),
    ],
)
def test_another_set_of_files_is_refused(attack: Callable[[Path, Path], None], tmp_path: Path) -> None:
    private = job(privacy={"epsilon": 1.0}, weights="uniform")
    app, other = exported(tmp_path / "job", job()), exported(tmp_path / "other", private)
    attack(app, other)
    assert code_of(lambda: verify(app, job())) == "TF-635"


def test_other_values_or_sites_than_those_signed_are_refused(tmp_path: Path) -> None:
    app = exported(tmp_path / "job", job())
    assert code_of(lambda: verify(app, job(rounds=2))) == "TF-635"
    assert code_of(lambda: verify(app, job(), site="hospital-4")) == "TF-635"


@pytest.mark.parametrize(
    "values",
    [
        {"expires": "2099-01-01T00:00:00Z"},
        {"nonce": "0" * 32},
        {"sites": [*SITES, "hospital-4"]},
        {"job_sha256": "0" * 64},
        {"files": {}},
        {"signer": "another@example.org"},
        {"signature": ""},
        {"signature": base64.b64encode(b"x" * 256).decode()},
        {"signature": "not base64"},
        {"certificate": ""},
        {"certificate": "%%%"},
        {"format": 2},
        {"created": "2026-13-41T99:99:99Z"},
        {"nonce": "ABC"},
        {"more": 1},
        {"files": {"../../startup/client.key": "0" * 64}},
        {"files": {"/etc/passwd": "0" * 64}},
        {"files": {"config/../config/config_fed_client.json": "0" * 64}},
        {"files": {"config//config_fed_client.json": "0" * 64}},
        {"files": {"c\u043enfig/config_fed_client.json": "0" * 64}},
        {"files": {"config\\config_fed_client.json": "0" * 64}},
        {"files": {"\ud800": "0" * 64}},
        {"signer": "\ud800"},
    ],
)
def test_a_manifest_that_was_changed_or_is_malformed_is_refused(values: Any, tmp_path: Path) -> None:
    app = exported(tmp_path / "job", job())
    changed(app, **values)
    assert code_of(lambda: verify(app, job())) == "TF-634"


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b"null", b"{}", b" " * 2**21])
def test_bytes_that_are_no_manifest_are_refused(raw: bytes, tmp_path: Path) -> None:
    app = exported(tmp_path / "job", job())
    (app / PLACE).write_bytes(raw)
    assert code_of(lambda: verify(app, job())) == "TF-634"
    (app / PLACE).unlink()
    assert code_of(lambda: verify(app, job())) == "TF-633"
    (app / PLACE).symlink_to(tmp_path / "other")
    assert code_of(lambda: verify(app, job())) == "TF-634"


def test_a_key_twice_is_refused_although_json_would_take_the_last(tmp_path: Path) -> None:
    app = exported(tmp_path / "job", job())
    text = (app / PLACE).read_text()
    (app / PLACE).write_text(text.replace("{", '{"format": 1,', 1))
    assert code_of(lambda: verify(app, job())) == "TF-634"
    # Nor of the job's values, of which a hospital's person might read the first.
    for name, read in ((SERVER, lambda: folders.read_job(app.parent)), (CLIENT, lambda: submitter._job(app))):
        read()
        (app / name).write_text((app / name).read_text().replace('"seed":', '"seed": 9, "seed":', 1))
        with pytest.raises((JobError, ManifestError), match=r"(?s)TF-101.*'seed' stands twice|TF-635"):
            read()


@pytest.mark.parametrize(
    "signer",
    [
        issue(PROJECT, "member@example.org", role="member", **DATES),
        issue(PROJECT, "hospital-1", role="client", **DATES),
        issue(PROJECT, "lead@example.org", role=None, **DATES),
        issue(PROJECT, "lead@example.org", roles=("lead", "client"), **DATES),
        issue(PROJECT, "server", role="lead", **DATES),
        issue(PROJECT, "hospital-2", role="lead", **DATES),  # a site is no person
        issue(OTHER, "lead@example.org", role="lead", **DATES),
        issue(LEAD, "lead@example.org", role="lead", **DATES),  # a lead's own certificate issues nothing
        issue(PROJECT, "lead@example.org", role="lead", **PAST),
    ],
    ids=["member", "site", "no role", "two roles", "server", "a site", "other root", "by lead", "ended"],
)
def test_nobody_but_a_lead_of_this_project_signs(signer: Issued, tmp_path: Path) -> None:
    app = exported(tmp_path / "job", job(), signer)
    assert code_of(lambda: verify(app, job())) == "TF-634"


def test_a_signature_for_another_purpose_does_not_count(tmp_path: Path) -> None:
    app = exported(tmp_path / "job", job())
    made = job_manifest.read(app)
    assert made.signed().startswith(encode_fields(job_manifest.TAG))
    values = made.model_dump(exclude={"signature", "certificate"})
    other = LEAD.signer().sign(encode_fields("another-purpose", values, b"\0" * 32))
    changed(app, signature=base64.b64encode(other).decode())
    assert code_of(lambda: verify(app, job())) == "TF-634"


def test_it_is_taken_up_once_in_its_time(tmp_path: Path) -> None:
    store = tmp_path / "hospital-1.jsonl"
    first = verify(exported(tmp_path / "job", job(), days=7), job())
    late, early = NOW + timedelta(days=7, minutes=1), NOW - timedelta(hours=1)
    assert code_of(lambda: job_manifest.take_up(first, "id-1", store, now=late)) == "TF-636"
    assert code_of(lambda: job_manifest.take_up(first, "id-1", store, now=early)) == "TF-636"
    job_manifest.take_up(first, "id-1", store, now=NOW)
    assert code_of(lambda: job_manifest.take_up(first, "id-2", store, now=NOW)) == "TF-637"
    assert code_of(lambda: job_manifest.take_up(first, "id-2", store, now=late)) == "TF-637"
    again = verify(exported(tmp_path / "again", job(), days=7), job())
    job_manifest.take_up(again, "id-2", store, now=NOW)  # the same job, signed again
    with store.open("ab") as stream:
        stream.write(b'{"nonce": "torn')  # a crash: nobody was told that the line exists
    assert code_of(lambda: job_manifest.take_up(first, "id-3", store, now=NOW)) == "TF-637"
    store.write_text("something else\n")
    assert code_of(lambda: job_manifest.take_up(first, "id-1", store, now=NOW)) == "TF-637"


def _race(app: Path, job_id: str, store: Path, results: Any) -> None:
    honest = job_manifest._taken_up

    def slow(path: Path) -> dict[str, str]:
        known = honest(path)
        time.sleep(0.3)  # long enough for the others to look, too, if nothing keeps them
        return known

    job_manifest._taken_up = slow
    try:
        job_manifest.take_up(job_manifest.read(app), job_id, store, now=NOW)
        results.put(job_id)
    except ManifestError as error:
        results.put(error.code)


def test_of_two_processes_one_takes_it_up(tmp_path: Path) -> None:
    app, store = exported(tmp_path / "job", job()), tmp_path / "hospital-1.jsonl"
    made = multiprocessing.get_context("fork")
    results = made.Queue()
    racing = [made.Process(target=_race, args=(app, f"id-{i}", store, results)) for i in range(6)]
    for process in racing:
        process.start()
    told = [results.get(timeout=60) for _ in racing]
    for process in racing:
        process.join()
    assert told.count("TF-637") == 5


@pytest.mark.parametrize("days", [0, -1, 367])
def test_no_manifest_is_for_ever(days: int, tmp_path: Path) -> None:
    assert code_of(lambda: exported(tmp_path / "job", job(), days=days)) == "TF-634"
