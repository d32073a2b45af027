"""Shared by the tests of jobs: the command as it is typed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tightframe_app import cli

Typed = Callable[..., tuple[object, str, str]]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """``tightframe`` from the test's own folder: exit code, output, errors."""

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["tightframe", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (ended.value.code or 0, *capsys.readouterr())

    return run
