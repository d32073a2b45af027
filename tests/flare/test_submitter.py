"""A job's submitter: the signer of its manifest, and in production nobody else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from nvflare.apis.executor import Executor
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE
from nvflare.lighter.utils import sign_folders, verify_folder_signature_and_get_signers
from tests.support.attacks.malicious_server import HEART
from tests.support.flare.client import JOB_ID, Site
from tests.support.securesum.certificates import issue, make_root

from tightframe.config import job_manifest
from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.errors import ManifestError
from tightframe.flare.submitter import job_submitter, signed_submitter

NOW = datetime.now(UTC)
DATES = {"start": NOW - timedelta(days=9), "end": NOW + timedelta(days=9)}
PROJECT = make_root(**DATES)


class _Nothing(Executor):
    def execute(self, *_: Any) -> Any:
        raise AssertionError


@pytest.fixture
def site(tmp_path: Path) -> Callable[..., Any]:
    """A deployed job, signed by ``signer`` with the engine's own tool; its context."""

    def make(signer: Any = None, root: Any = PROJECT, meta: Any = None, text: str = "{}") -> Any:
        shutil.rmtree(tmp_path / "site", ignore_errors=True)
        made = Site(tmp_path / "site", "site-1", _Nothing(), meta=meta)
        app = Path(made.manager.get_workspace().get_app_dir(JOB_ID))
        (app / "config").mkdir(parents=True)
        (app / "config" / "config_fed_client.json").write_text(text)
        (tmp_path / "site" / "startup" / "rootCA.pem").write_bytes(root.x509.public_bytes(Encoding.PEM))
        if signer is not None:
            certificate = tmp_path / "signer.crt"
            certificate.write_bytes(signer.x509.public_bytes(Encoding.PEM))
            sign_folders(str(app), signer.key, str(certificate))
        return made.manager.new_context(), app

    return make


def test_the_servers_word_counts_in_the_simulator_alone(site: Any) -> None:
    context, _ = site(meta={"submitter_name": "mallory"})
    assert job_submitter(context, production=False) == "mallory"
    assert job_submitter(context, production=True) is None
    assert job_submitter(site()[0], production=False) is None
    assert job_submitter(site(meta={"submitter_name": 7})[0], production=False) is None


def test_the_engines_own_signature_says_nothing(site: Any) -> None:
    """It is of each file alone: a server mixes files of two signed jobs, and the engine finds them signed."""
    context, app = site(_lead())
    first = json.loads((app / "config" / NVFLARE_SIG_FILE).read_text())["config_fed_client.json"]
    _, app = site(_lead(), text='{"another": "job"}')
    signed = json.loads((app / "config" / NVFLARE_SIG_FILE).read_text())
    (app / "config" / "config_fed_client.json").write_text("{}")
    (app / "config" / NVFLARE_SIG_FILE).write_text(json.dumps({**signed, "config_fed_client.json": first}))
    root = str(app.parents[1] / "startup" / "rootCA.pem")
    assert verify_folder_signature_and_get_signers(str(app), root)[0], "the attack itself is broken"
    assert job_submitter(context, production=True) is None


@pytest.mark.parametrize("profile", ["standard", "strict", "research"])
def test_in_production_the_manifest_says_who_submitted(site: Any, tmp_path: Path, profile: Any) -> None:
    policy = PolicyBlock(profile=profile).resolve(production=True)
    job = parse_job({**HEART, "sites": ["site-1", "site-2", "site-3"], "min_sites": 3})
    context, app = site(_lead())  # by the engine's own signature alone

    def submitter() -> str | None:
        return signed_submitter(context, job, policy, PROJECT.anchor, tmp_path / "state")

    if profile == "research":
        assert submitter() is None
    else:
        with pytest.raises(ManifestError, match=r"TF-633.*tightframe jobs sign"):
            submitter()
    other = issue(PROJECT, "chief@hospital", role="lead", **DATES).signer()
    job_manifest.sign(app, job, other, now=NOW)
    assert submitter() == submitter() == "chief@hospital"
    (app / "config" / "config_fed_client.json").write_text('{"changed": 1}')
    with pytest.raises(ManifestError, match="TF-635"):  # one that is there must hold, whatever the policy
        submitter()


def _lead() -> Any:
    return issue(PROJECT, "lead@hospital", role="lead", key="rsa", **DATES)
