"""The executor answers whatever happens, and says no more than a code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from tightframe import __version__
from tightframe.config.job import parse_job
from tightframe.flare.executor import SiloExecutor
from tightframe.flare.wire import CODE, MESSAGE


class _Workspace:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get_site_config_dir(self) -> str:
        return str(self._folder / "local")

    def get_run_dir(self, job_id: str) -> str:
        return str(self._folder / job_id)


class _Context(FLContext):
    def __init__(self, folder: Path, site: str, secure: bool | None) -> None:
        super().__init__()
        self._folder, self._site = folder, site
        if secure is not None:
            self.set_prop(FLContextKey.SECURE_MODE, secure, private=True, sticky=True)

    def get_engine(self) -> Any:  # the executor asks it for the workspace only
        return self

    def get_workspace(self) -> _Workspace:
        return _Workspace(self._folder)

    def get_identity_name(self, default: str = "") -> str:
        return self._site

    def get_job_id(self, default: Any = None) -> str:
        return "job"


def _run(
    job: dict[str, Any],
    folder: Path,
    message: Any,
    *,
    site: str = "site-1",
    secure: bool | None = False,
    task: str = "enroll",
) -> Shareable:
    request = Shareable()
    request[MESSAGE] = message
    return SiloExecutor(**job).execute(task, request, _Context(folder, site, secure), Signal())


def _hello(job: dict[str, Any]) -> dict[str, Any]:
    return {"job_sha256": parse_job(job).sha256(), "version": __version__}


def test_enrolment_answers_the_weight_and_nothing_more(small: dict[str, Any], tmp_path: Path) -> None:
    reply = _run(small, tmp_path, _hello(small))
    assert reply.get_return_code() == ReturnCode.OK
    assert set(reply[MESSAGE]) == {"weight", "synthetic"} and reply[MESSAGE]["weight"] == 290.0


@pytest.mark.parametrize("secure", [True, None], ids=["secure", "unknown"])
def test_production_never_gets_the_twin(small: dict[str, Any], tmp_path: Path, secure: bool | None) -> None:
    reply = _run(small, tmp_path, _hello(small), secure=secure)
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION and reply[CODE] == "TF-201"
    assert MESSAGE not in reply


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"job": {"bogus": 1}}, "TF-101"),
        ({"site": "stranger"}, "TF-101"),
        ({"message": {"job_sha256": "other", "version": __version__}}, "TF-505"),
        ({"message": None}, "TF-503"),
        ({"task": "unknown"}, "TF-505"),
    ],
)
def test_every_failure_is_an_answer_with_a_code(
    small: dict[str, Any], tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    reply = _run(
        small | changes.get("job", {}),
        tmp_path,
        changes.get("message", _hello(small)),
        site=changes.get("site", "site-1"),
        task=changes.get("task", "enroll"),
    )
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert reply[CODE] == code
    assert MESSAGE not in reply


def test_what_a_failing_silo_says_is_in_no_part_of_its_answer(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tightframe.data.twin import TwinData

    def broken(*_: Any) -> None:
        raise OSError("/hospital/patient-4711.jpg is gone")

    monkeypatch.setattr(TwinData, "check", broken)
    reply = _run(small, tmp_path, _hello(small))
    assert reply[CODE] == "TF-503"
    assert "4711" not in repr(dict(reply))
