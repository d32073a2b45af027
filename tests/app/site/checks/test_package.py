"""The installed package against its own list of files: what was changed, is missing, or was put beside it."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tightframe import __version__
from tightframe_app.site.checks.findings import Finding
from tightframe_app.site.checks.package import compared, package

FILES = ("tightframe/__init__.py", "tightframe/privacy/noise.py", "tightframe_app/cli.py")
INFO = "tightframe-1.2.3.dist-info"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An installed wheel, by the specification of RECORD."""
    lines = []
    for name in (*FILES, f"{INFO}/METADATA"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("Name: tightframe\nVersion: 1.2.3\n" if "METADATA" in name else f"# {name}\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")
        lines.append(f"{name},sha256={digest},{path.stat().st_size}\n")
    lines += ["tightframe/__pycache__/__init__.cpython-311.pyc,,\n", f"{INFO}/RECORD,,\n"]
    (tmp_path / INFO / "RECORD").write_text("".join(lines))
    return tmp_path


def found(root: Path, runs: Path | None = None) -> Finding:
    (one,) = compared(Distribution.at(root / INFO), runs or root.resolve() / "tightframe")
    assert one.area == "package"
    return one


def test_a_whole_package(root: Path) -> None:
    one = found(root)
    assert one.state == "ok" and "tightframe 1.2.3: 6 files in " in one.text


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_found_and_the_file_named(root: Path, name: str) -> None:
    path = root / name
    path.write_bytes(path.read_bytes().replace(b"#", b"%"))
    one = found(root)
    assert one.state == "problem" and f": {name} was changed: reinstall the signed wheel" in one.text


def test_what_is_missing_or_was_put_beside_it_is_named(root: Path) -> None:
    (root / FILES[1]).unlink()
    (root / "tightframe" / "privacy" / "noise.so").touch()  # Python would import it before noise.py
    cache = root / "tightframe_app" / "__pycache__"
    cache.mkdir()
    (cache / "cli.cpython-311.pyc").touch()
    assert "tightframe/privacy/noise.so does not belong to it" in found(root).text
    assert f"{FILES[1]} is missing" in found(root).text and ".pyc" not in found(root).text
    (cache / "other.cpython-311.pyc").touch()
    assert "__pycache__/other.cpython-311.pyc does not belong to it" in found(root).text
    for number in range(9):
        (root / "tightframe" / f"m{number}.py").touch()
    assert (
        found(root).text.count("does not belong to it") == 4 and ", and 7 more: reinstall" in found(root).text
    )


def test_a_list_that_is_missing_is_no_proof(root: Path) -> None:
    (root / INFO / "RECORD").unlink()
    assert found(root).state == "problem" and "its list of files is missing" in found(root).text


def test_a_checkout_is_told_and_proves_nothing(root: Path, tmp_path: Path) -> None:
    elsewhere = found(root, tmp_path / "checkout" / "tightframe")
    assert elsewhere.state == "problem" and "take that out of PYTHONPATH" in elsewhere.text
    (root / INFO / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}}))
    assert found(root).state == "note" and "a checkout" in found(root).text
    assert f"tightframe {__version__} runs from" in found(root).text, (
        "not the version that was installed once"
    )


def test_these_tests_run_from_a_checkout() -> None:
    (one,) = package()
    assert one.state == "note" and "docs/release.md" in one.text
