"""A job's submitter: the signer of a signed job, and in production nobody else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from nvflare.apis.executor import Executor
from nvflare.lighter.utils import sign_folders
from tests.flare.client import JOB_ID, Site
from tests.securesum.certificates import issue, make_root

from tightframe.flare.submitter import job_submitter

NOW = datetime.now(UTC)
DATES = {"start": NOW - timedelta(days=9), "end": NOW + timedelta(days=9)}
PROJECT, OTHER = make_root(**DATES), make_root("other", **DATES)


class _Nothing(Executor):
    def execute(self, *_: Any) -> Any:
        raise AssertionError


@pytest.fixture
def site(tmp_path: Path) -> Callable[..., Any]:
    """A deployed job, signed by ``signer`` with the engine's own tool; its context."""

    def make(signer: Any = None, root: Any = PROJECT, meta: Any = None) -> Any:
        shutil.rmtree(tmp_path / "site", ignore_errors=True)
        made = Site(tmp_path / "site", "site-1", _Nothing(), meta=meta)
        app = Path(made.manager.get_workspace().get_app_dir(JOB_ID))
        (app / "config").mkdir(parents=True)
        (app / "config" / "config_fed_client.json").write_text("{}")
        (tmp_path / "site" / "startup" / "rootCA.pem").write_bytes(root.x509.public_bytes(Encoding.PEM))
        if signer is not None:
            certificate = tmp_path / "signer.crt"
            certificate.write_bytes(signer.x509.public_bytes(Encoding.PEM))
            sign_folders(str(app), signer.key, str(certificate))
        return made.manager.new_context(), app

    return make


@pytest.mark.parametrize("production", [True, False])
def test_a_signed_job_names_its_signer_whatever_the_server_says(site: Any, production: bool) -> None:
    context, _ = site(_lead(), meta={"submitter_name": "mallory"})
    assert job_submitter(context, production=production) == "lead@hospital"


def test_the_servers_word_counts_in_the_simulator_alone(site: Any) -> None:
    context, _ = site(meta={"submitter_name": "mallory"})
    assert job_submitter(context, production=False) == "mallory"
    assert job_submitter(context, production=True) is None
    assert job_submitter(site()[0], production=False) is None
    assert job_submitter(site(meta={"submitter_name": 7})[0], production=False) is None


def test_a_job_that_was_changed_or_signed_by_a_stranger_has_no_submitter(site: Any) -> None:
    context, app = site(_lead())
    (app / "config" / "config_fed_client.json").write_text('{"changed": 1}')
    assert job_submitter(context, production=True) is None
    assert job_submitter(context, production=False) is None
    assert job_submitter(site(_lead(), root=OTHER)[0], production=True) is None


def _lead() -> Any:
    return issue(PROJECT, "lead@hospital", role="lead", key="rsa", **DATES)
