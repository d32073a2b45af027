"""The simulator's processes load the silo's code early; those of hospitals are left alone."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from typing import Any

import pytest
from nvflare.apis.fl_constant import ConfigVarName, FLContextKey, SystemConfigs
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.utils.config_service import ConfigService

import tightframe.flare.simulation.warm
from tightframe.flare import controller


def _start(monkeypatch: pytest.MonkeyPatch, *, production: bool) -> Any:
    monkeypatch.setenv(controller.WARM[0], "")  # so that what the controller sets is taken back
    monkeypatch.delenv(controller.WARM[0])
    panics: list[str] = []
    started = controller.FederationController(job_name="not valid")
    monkeypatch.setattr(started, "system_panic", lambda reason, fl_ctx: panics.append(reason))
    context = FLContext()
    context.set_prop(FLContextKey.SECURE_MODE, production, private=True, sticky=True)
    started.start_controller(context)
    assert panics and "TF-101" in panics[0]
    ConfigService.reset()
    return ConfigService.get_str_var(ConfigVarName.DECOMPOSER_MODULE, conf=SystemConfigs.RESOURCES_CONF)


def test_the_engine_is_told_of_the_package_in_the_simulator_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller.doors, "require", lambda kind: None)  # this process has no engine above it
    try:
        assert _start(monkeypatch, production=False) == "tightframe.flare.simulation.warm"
        assert _start(monkeypatch, production=True) is None
    finally:
        ConfigService.reset()


@pytest.mark.whole
def test_the_engine_imports_it_and_finds_no_decomposer() -> None:
    assert not list(pkgutil.iter_modules(tightframe.flare.simulation.warm.__path__))
    code = (
        "import sys, threading, time\n"
        "from nvflare.private.fed.utils.fed_utils import register_ext_decomposers\n"
        "assert 'tightframe.flare.executor' not in sys.modules\n"
        "register_ext_decomposers('tightframe.flare.simulation.warm')\n"
        "for thread in threading.enumerate():\n"
        "    thread.name == 'tightframe-warm' and thread.join(60)\n"
        "print('tightframe.flare.executor' in sys.modules, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["True", "False"]
