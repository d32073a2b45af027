"""Check that the running package is the installed one, file by file.

``pip`` keeps a list of hashes beside an installed wheel's files. It detects changes by accident, by an
update, or by somebody who did not think of the list. Whoever can write there can also change the list and
this code; ``docs/release.md`` compares the files with the signed list, independently of both.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from tightframe import __version__
from tightframe_app.site.checks.findings import Finding

PROJECT = "tightframe"
PACKAGES = (PROJECT, "tightframe_app")
AREA = "package"
MOST = 5
"""Most files listed by name; more are counted."""


def package() -> Iterator[Finding]:
    """Check the installed package."""
    import tightframe

    runs = Path(tightframe.__file__).resolve().parent
    try:
        installed = distribution(PROJECT)
    except PackageNotFoundError:
        yield Finding(AREA, "note", f"runs from {runs} and is not installed: {_UNSIGNED}")
        return
    yield from compared(installed, runs)


_UNSIGNED = "so it cannot be compared with the release; see docs/release.md"


def compared(installed: Distribution, runs: Path) -> Iterator[Finding]:
    """Compare an installed distribution with its own list of files.

    Args:
        runs: folder of the package that this process imported.
    """
    what = f"{PROJECT} {installed.version}"
    root = Path(str(installed.locate_file(""))).resolve()
    if not _editable(installed) and root / PROJECT != runs:
        text = (
            f"{what} is installed in {root}, but what runs is {runs}: take that out of PYTHONPATH, or start "
            "with the installed package's own python"
        )
        yield Finding(AREA, "problem", text)
        return
    if _editable(installed):
        what = f"{PROJECT} {__version__}"  # the installed version may be of an earlier checkout
        yield Finding(AREA, "note", f"{what} runs from {runs}, a checkout: {_UNSIGNED}")
        return
    wrong, listed = [], set()
    # Not `installed.files`, which omits missing files from Python 3.12 on.
    for path, digest, _ in csv.reader((installed.read_text("RECORD") or "").splitlines()):
        place = Path(str(installed.locate_file(path))).resolve()
        listed.add(place)
        mode, _, value = digest.partition("=")
        if not digest:
            continue
        if not place.is_file():
            wrong.append(f"{path} is missing")
        elif _hash(place, mode) != value:
            wrong.append(f"{path} was changed")
    wrong += [f"{path.relative_to(root)} does not belong to it" for path in _unlisted(root, listed)]
    if not listed:
        yield Finding(AREA, "problem", f"{what}: its list of files is missing: reinstall the signed wheel")
    elif wrong:
        more = f", and {len(wrong) - MOST} more" if len(wrong) > MOST else ""
        text = f"{what}: {', '.join(wrong[:MOST])}{more}: reinstall the signed wheel (docs/release.md)"
        yield Finding(AREA, "problem", text)
    else:
        yield Finding(AREA, "ok", f"{what}: {len(listed)} files in {root} are unchanged since installation")


def _editable(installed: Distribution) -> bool:
    try:
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        return bool(origin.get("dir_info", {}).get("editable", False))
    except (ValueError, AttributeError):
        return False


def _hash(path: Path, mode: str) -> str:
    """Return a file's hash in the list's form: URL-safe base64 without padding."""
    digest = hashlib.new(mode, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _unlisted(root: Path, listed: set[Path]) -> Iterator[Path]:
    """Yield unlisted files in the packages' folders, which could shadow a module.

    Compiled files of listed modules are left out.
    """
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            place = path.resolve()
            if not path.is_file() or place in listed:
                continue
            source = path.parent.parent / f"{path.name.split('.')[0]}.py"
            if path.parent.name == "__pycache__" and path.suffix == ".pyc" and source.resolve() in listed:
                continue
            yield path
