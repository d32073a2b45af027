"""The names that ``import tightframe`` offers."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

import tightframe


def test_every_name_is_the_one_that_its_module_defines() -> None:
    assert set(tightframe.__all__) == {"__version__", *tightframe._HOMES}
    for name, home in tightframe._HOMES.items():
        value = getattr(tightframe, name)
        assert value is getattr(import_module(home), name)
        assert value.__module__ == home, "taken from where it is defined"
    assert set(tightframe.__all__) <= set(dir(tightframe))


def test_no_name_hides_a_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules(tightframe.__path__)}
    assert modules >= {"federation", "methods"}
    assert not modules & set(tightframe.__all__)


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="'tightframe' has no attribute 'train'"):
        tightframe.train  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.whole
def test_the_package_is_imported_without_its_parts() -> None:
    code = (
        "import sys, tightframe\n"
        "assert tightframe.__version__\n"
        "parts = [name for name in sys.modules if name.startswith('tightframe.')]\n"
        "assert not parts and not {'torch', 'numpy', 'pydantic'} & set(sys.modules), parts\n"
        "tightframe.TightframeError\n"
        "assert 'torch' not in sys.modules\n"
        "assert callable(tightframe.run) and 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
