"""Pauses of the engine's simulator are short; those of hospitals' processes are as long as ever."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tightframe.flare import controller
from tightframe.flare.simulation import quickened

WORKER = "nvflare.private.fed.app.simulator.simulator_worker"


def _modules(names: Mapping[str, float], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return modules of the engine that pause by ``time.sleep``; their changes are taken back."""
    modules = [import_module(WORKER if name == "__main__" else name) for name in names]
    for module in modules:
        source = Path(module.__file__ or "").read_text(encoding="utf-8")
        assert re.search(r"^import time$", source, re.MULTILINE) and "time.sleep(" in source, module
        monkeypatch.setattr(module, "time", time)
    return modules


def _slept(module: Any, seconds: float, monkeypatch: pytest.MonkeyPatch) -> float:
    with monkeypatch.context() as patch:
        slept: list[float] = []
        patch.setattr(time, "sleep", slept.append)
        module.time.sleep(seconds)
    return slept[0]


def test_the_controller_shortens_those_of_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = _modules(quickened.SIMULATOR_PAUSES, monkeypatch)
    controller.FederationController(job_name="any")  # as the engine builds it, before silos start
    for module, longest in zip(modules, quickened.SIMULATOR_PAUSES.values(), strict=True):
        assert _slept(module, 3, monkeypatch) == longest and _slept(module, 0.05, monkeypatch) == 0.05
        assert module.time.time() > 0


def test_in_a_process_without_the_simulator_none_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = _modules(quickened.SIMULATOR_PAUSES, monkeypatch)
    monkeypatch.delitem(sys.modules, next(iter(quickened.SIMULATOR_PAUSES)))
    controller.FederationController(job_name="any")
    assert [_slept(module, 3, monkeypatch) for module in modules] == [3] * len(modules)


def test_a_silos_program_asks_for_work_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    (worker,) = _modules(quickened.SILO_PAUSES, monkeypatch)
    monkeypatch.setitem(sys.modules, "__main__", worker)
    assert (
        quickened.shorten(quickened.SILO_PAUSES)
        and _slept(worker, 0.5, monkeypatch) == quickened.SILO_PAUSES["__main__"]
    )
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # of another program
    assert not quickened.shorten(quickened.SILO_PAUSES)
