"""Check that the running package is the installed one, file by file.

The list of hashes that ``pip`` keeps of an installed wheel lies beside the files: it shows what was changed
by accident, an update, or somebody who did not think of it. Who can write there can also change the list,
and this code; ``docs/release.md`` compares the files with the signed list, without any of it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from tightframe_app.site.findings import Finding

PROJECT = "tightframe"
PACKAGES = (PROJECT, "tightframe_app")
AREA = "package"
MOST = 5
"""Files that are named; of more, how many."""


def package() -> Iterator[Finding]:
    """Yield the findings about the installed package."""
    import tightframe

    runs = Path(tightframe.__file__).resolve().parent
    try:
        installed = distribution(PROJECT)
    except PackageNotFoundError:
        yield Finding(AREA, "note", f"runs from {runs}, and is not installed: {_UNSIGNED}")
        return
    yield from compared(installed, runs)


_UNSIGNED = "nothing shows whether it is what was released; see docs/release.md"


def compared(installed: Distribution, runs: Path) -> Iterator[Finding]:
    """An installed distribution against its own list of files.

    Args:
        installed: the distribution.
        runs: the folder of the package that this process has imported.
    """
    what = f"{PROJECT} {installed.version}"
    root = Path(str(installed.locate_file(""))).resolve()
    if _editable(installed) or root / PROJECT != runs:
        yield Finding(AREA, "note", f"{what} runs from {runs}, a checkout: {_UNSIGNED}")
        return
    wrong, listed = [], set()
    for path in installed.files or []:
        place = Path(str(installed.locate_file(path))).resolve()
        listed.add(place)
        if path.hash is None:
            continue
        if not place.is_file():
            wrong.append(f"{path} is missing")
        elif _hash(place, path.hash.mode) != path.hash.value:
            wrong.append(f"{path} was changed")
    wrong += [f"{path.relative_to(root)} is no part of it" for path in _strangers(root, listed)]
    if not listed:
        yield Finding(AREA, "problem", f"{what}: its list of files is missing: install the signed wheel anew")
    elif wrong:
        more = f", and {len(wrong) - MOST} more" if len(wrong) > MOST else ""
        text = f"{what}: {', '.join(wrong[:MOST])}{more}: install the signed wheel anew (docs/release.md)"
        yield Finding(AREA, "problem", text)
    else:
        yield Finding(AREA, "ok", f"{what}: {len(listed)} files in {root} are as they were installed")


def _editable(installed: Distribution) -> bool:
    try:
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        return bool(origin.get("dir_info", {}).get("editable", False))
    except (ValueError, AttributeError):
        return False


def _hash(path: Path, mode: str) -> str:
    """As the list has it: base64 for addresses, without padding."""
    digest = hashlib.new(mode, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _strangers(root: Path, listed: set[Path]) -> Iterator[Path]:
    """Files in the packages' folders that are not listed: a module beside another can take its place.

    What Python keeps of a listed module's compiled form is none.
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
