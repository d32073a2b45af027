"""Signing a job folder: by whom, what of, and what `jobs check` and `site check` then say."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from tests.support.securesum.certificates import Issued, issue, make_root
from typer.testing import CliRunner

from tightframe.config import job_manifest
from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.errors import JobError, SiteConfigError
from tightframe.flare.identity import person_identity
from tightframe_app.cli import app
from tightframe_app.jobs import folders, recipes
from tightframe_app.site.checks import job as site_job
from tightframe_app.site.checks.findings import Scope
from tightframe_app.watch import monitoring

NOW = datetime.now(UTC)
DATES = {"start": NOW - timedelta(days=30), "end": NOW + timedelta(days=300)}
ROOT = make_root("project", **DATES)
SITES = ("hospital-1", "hospital-2", "hospital-3")


def kit(folder: Path, owner: Issued, *, person: bool = True) -> Path:
    """The ``startup`` folder of a person or a site."""
    folder.mkdir()
    names = {"ssl_cert": "client.crt", "ssl_private_key": "client.key", "ssl_root_cert": "rootCA.pem"}
    if person:
        admin = {"client_cert": "client.crt", "client_key": "client.key", "ca_cert": "rootCA.pem"}
        (folder / "fed_admin.json").write_text(json.dumps({"format_version": 1, "admin": admin}))
    else:
        (folder / "fed_client.json").write_text(json.dumps({"client": names}))
    (folder / "client.crt").write_bytes(owner.x509.public_bytes(Encoding.PEM))
    (folder / "rootCA.pem").write_bytes(ROOT.x509.public_bytes(Encoding.PEM))
    (folder / "client.key").write_bytes(owner.signer().private_pem())
    (folder / "client.key").chmod(0o600)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    job = recipes.get("fedetf_heart").job(sites=SITES)
    folders.write_job(folders.job_files(job), tmp_path / "job")
    return tmp_path / "job"


def test_a_signed_folder_is_valid_and_says_until_when(folder: Path, tmp_path: Path) -> None:
    assert folders.signature(folder).startswith("not signed")
    lead = issue(ROOT, "lead@example.org", role="lead", key="rsa", **DATES)
    signer, _ = person_identity(kit(tmp_path / "lead", lead))
    made = folders.sign(folder, signer, days=3)
    assert folders.check_folder(folder) == []
    told = CliRunner().invoke(app, ["jobs", "check", str(folder)]).output
    assert f"signed by lead@example.org, valid until {made.expires}" in " ".join(told.split())
    assert timedelta(days=3) == made.until - datetime.strptime(made.created, "%Y-%m-%dT%H:%M:%SZ").replace(
        tzinfo=UTC
    )
    assert folders.sign(folder, signer).nonce != made.nonce  # again, for another submission
    changed = folder / "app" / "config" / "config_fed_client.json"
    changed.write_text(changed.read_text().replace('"rounds": ', '"rounds": 1'))
    with pytest.raises(JobError, match="nothing was signed"):
        folders.sign(folder, signer)


@pytest.mark.parametrize("role", ["member", "org_admin", "client", None])
def test_who_may_not_submit_signs_nothing(role: str | None, tmp_path: Path) -> None:
    with pytest.raises(SiteConfigError, match=r"TF-615.*the role in the certificate"):
        person_identity(kit(tmp_path / "kit", issue(ROOT, "somebody@example.org", role=role, **DATES)))


def test_a_key_that_others_can_read_signs_nothing(tmp_path: Path) -> None:
    made = kit(tmp_path / "kit", issue(ROOT, "lead@example.org", role="lead", **DATES))
    (made / "client.key").chmod(0o644)
    with pytest.raises(SiteConfigError, match="mode 0644"):
        person_identity(made)


def test_a_site_is_told_whether_a_job_is_signed_for_it(folder: Path, tmp_path: Path) -> None:
    job, policy = parse_job(folders.read_job(folder)), PolicyBlock().resolve(production=True)
    lead = issue(ROOT, "lead@example.org", role="lead", **DATES)
    startup = kit(tmp_path / "site", issue(ROOT, "hospital-1", **DATES), person=False)
    scope = Scope(tmp_path / "tightframe.json", production=True, kit=startup, folder=folder)

    def told() -> tuple[str, str]:
        (finding,) = site_job.signature(job, "hospital-1", policy, scope)
        return finding.state, finding.text

    assert told()[0] == "note" and "not signed yet" in told()[1]
    folders.sign(folder, lead.signer())
    assert told()[0] == "ok" and "signed by lead@example.org" in told()[1]
    job_manifest.sign(folder / "app", job, lead.signer(), now=NOW - timedelta(days=20))
    assert told()[0] == "problem"  # over since six days
    (folder / "app" / "config" / "more.json").write_text("{}")
    assert told()[0] == "problem" and "TF-635" in told()[1] and "more.json" in told()[1]


@pytest.mark.parametrize(("evaluation", "stay"), [("local", True), ("noisy", False)])
def test_who_submits_a_private_job_is_told_where_its_metrics_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluation: str, stay: bool
) -> None:
    changes = {"privacy.epsilon": 4, "privacy.evaluation": evaluation}
    job = recipes.get("fedncm_heart").job(sites=SITES, changes=changes)
    folders.write_job(folders.job_files(job), tmp_path / "job")
    startup = kit(tmp_path / "startup", issue(ROOT, "lead@example.org", role="lead", **DATES))
    monkeypatch.setattr(monitoring.Server, "submit", lambda self, folder: "an-id")
    monkeypatch.setattr(monitoring.Server, "look", lambda self, job: SimpleNamespace(told=()))
    done = CliRunner().invoke(app, ["jobs", "submit", str(tmp_path / "job"), "--kit", str(startup)])
    assert done.exit_code == 0, done.output
    assert ("metrics stay at the silos" in done.output) == stay == ("local_report.json" in done.output)
