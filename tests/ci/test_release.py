"""``.ci/release`` and ``docs/release.md``: equal builds, a signature that holds, and what a hospital runs.

The whole command installs every dependency, which takes minutes and the internet: its parts are tried here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
from tests.support import ROOT
from tests.support.production.guides import Guide

DIGEST, OTHER = "ab" * 32, "cd" * 32
FOUND = {
    "install": [
        {
            "metadata": {"name": name, "version": version},
            "download_info": {"url": f"https://index/{url}", "archive_info": {"hashes": {"sha256": digest}}},
        }
        for name, version, digest, url in (
            ("tightframe", "0.1", DIGEST, "tightframe-0.1-py3-none-any.whl"),
            ("Flask_JWT", "4.6", OTHER, "flask_jwt-4.6.tar.gz"),
        )
    ]
}


@pytest.fixture(scope="module")
def release() -> Any:
    """The script, as a module."""
    loader = SourceFileLoader("ci_release", str(ROOT / ".ci" / "release"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as the page says, without a passphrase."""
    folder = tmp_path_factory.mktemp("maintainer")
    make, fingerprint = _commands("For the maintainer", slice(2))
    _bash(f"{make} -q -N ''", folder)
    assert "SHA256:" in _bash(fingerprint, folder)
    return folder / "release-key"


@pytest.fixture(scope="module")
def made(release: Any, key: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed release of the files of this checkout; without the list of dependencies and the SBOM."""
    pytest.importorskip("hatchling", reason="the release is built by hatchling: extra `test`")
    work = tmp_path_factory.mktemp("work")
    root = _checkout(work / "checkout")
    folder = work / "release"
    folder.mkdir()
    release.build_twice(Path(sys.executable), root, work, folder)
    (wheel,) = folder.glob("*.whl")
    (folder / f"{release.stem(wheel)}.installed.sha256").write_text(release.installed_files(wheel))
    release.sign(folder, key)
    public = Path(f"{key}.pub").read_text().split()[:2]
    line = f'tightframe-release namespaces="tightframe-release" {" ".join(public)}\n'
    (folder / "allowed_signers").write_text(line)
    return folder


def test_it_holds_the_package_and_nothing_of_the_machine(made: Path) -> None:
    (wheel,) = made.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        everything = b"".join(archive.read(name) for name in names)
    ours = {
        str(path.relative_to(ROOT / folder))
        for folder, package in (("custom", "tightframe"), ("app", "tightframe_app"))
        for path in (ROOT / folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    ours |= {
        f"tightframe_app/provisioning_files/{path.relative_to(ROOT / 'provisioning')}"
        for path in (ROOT / "provisioning").rglob("*")
        if path.is_file()
    }
    assert {name for name in names if ".dist-info/" not in name} == ours
    assert b"Description-Content-Type: text/markdown" in everything
    assert str(made.parent).encode() not in everything
    (source,) = made.glob("*.tar.gz")
    shutil.unpack_archive(source, made.parent / "source", filter="data")
    (unpacked,) = (made.parent / "source").iterdir()
    assert {"custom", "app", "docs", "jobs", "provisioning"} <= {path.name for path in unpacked.iterdir()}
    assert not (unpacked / "tests").exists()


def test_a_build_that_does_not_repeat_itself_is_refused(
    release: Any, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = release.build

    def other(python: Path, source: Path, epoch: str, folder: Path) -> Any:
        return build(python, source, str(int(epoch) + 100 * (folder.name == "again")), folder)

    monkeypatch.setattr(release, "build", other)
    with pytest.raises(SystemExit, match="two builds of one commit to be equal"):
        release.build_twice(Path(sys.executable), made.parent / "checkout", tmp_path, tmp_path / "out")


def test_what_is_not_committed_is_no_release(release: Any, tmp_path: Path) -> None:
    root = _checkout(tmp_path / "checkout")
    (root / "custom" / "tightframe" / "mine.py").write_text("value = 1\n")  # no part of the commit
    epoch = release.committed(root, tmp_path / "one")
    assert int(epoch) > 0 and not (tmp_path / "one" / "custom" / "tightframe" / "mine.py").exists()
    (root / "README.md").write_text("changed\n")
    with pytest.raises(SystemExit, match=r"no uncommitted changes[^$]*README\.md"):
        release.committed(root, tmp_path / "two")


def test_a_hospital_verifies_it_by_the_pages_commands(made: Path, key: Path, tmp_path: Path) -> None:
    signature, sums = _commands("For a hospital: verify", slice(None))
    told = _bash(_commands("For the maintainer", slice(1, 2))[0], key.parent).split()[1]
    assert f'Good "tightframe-release" signature for tightframe-release with ED25519 key {told}\n' in _bash(
        signature, made
    )
    assert _bash(sums, made).count(": OK\n") == 3
    wrong = tmp_path / "wrong"
    shutil.copytree(made, wrong)
    (wheel,) = wrong.glob("*.whl")
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"x")
    assert f"{wheel.name}: FAILED" in _bash(sums, wrong, code=1)
    # Then whoever changed it writes the list anew; or signs it, with another key or for another purpose.
    lines = (wrong / "SHA256SUMS").read_text().splitlines()[1:]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (wrong / "SHA256SUMS").write_text("\n".join([f"{digest}  {wheel.name}", *lines]) + "\n")
    assert "OK" in _bash(sums, wrong) and "Could not verify signature" in _bash(signature, wrong, code=255)
    _bash("ssh-keygen -q -t ed25519 -N '' -f other", tmp_path)
    for signer, purpose in ((tmp_path / "other", "tightframe-release"), (key, "file")):
        (wrong / "SHA256SUMS.sig").unlink()
        _bash(f"ssh-keygen -q -Y sign -f {signer} -n {purpose} SHA256SUMS", wrong)
        assert "Could not verify signature" in _bash(signature, wrong, code=255)


def test_an_installed_file_that_was_changed_is_found(made: Path, tmp_path: Path) -> None:
    """By coreutils from the signed list, and by the package itself from pip's."""
    (wheel,) = made.glob("*.whl")
    python = tmp_path / ".venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, wheel], check=True, capture_output=True)
    shutil.copy(made / "tightframe-0.2.0.installed.sha256", tmp_path)
    (compare,) = _commands("For a hospital: is what", slice(None))
    assert _bash(compare, tmp_path) == ""
    ask = (
        "from tightframe_app.site.checks.package import package; [print(a.state, a.text) for a in package()]"
    )
    look = f"unset PYTHONPATH; {python} -c '{ask}'"
    assert " are unchanged since installation\n" in _bash(look, tmp_path)
    (changed,) = tmp_path.glob(".venv/lib/*/site-packages/tightframe/privacy/__init__.py")
    changed.write_bytes(changed.read_bytes() + b"\n")
    assert "tightframe/privacy/__init__.py: FAILED" in _bash(compare, tmp_path, code=1)
    assert "problem tightframe 0.2.0: tightframe/privacy/__init__.py was changed" in _bash(look, tmp_path)


def test_the_sbom_names_what_pip_installed_with_its_hash(release: Any) -> None:
    packages = release.resolved(FOUND)
    assert release.requirements(packages) == (
        f"tightframe==0.1 --hash=sha256:{DIGEST}\nflask-jwt==4.6 --hash=sha256:{OTHER}\n"
    )

    def bom(*components: dict[str, str]) -> Any:
        root = {"name": "tightframe"}  # its pyproject.toml has no version
        return {"metadata": {"component": root}, "components": [dict(one) for one in components]}

    flask = {"name": "Flask-JWT", "version": "4.6"}
    made = release.with_hashes(bom(flask), packages)
    assert made["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": DIGEST}]
    assert made["components"] == [{**flask, "hashes": [{"alg": "SHA-256", "content": OTHER}]}]
    for wrong in ([], [{**flask, "version": "4.7"}], [flask, {"name": "stranger", "version": "1"}]):
        with pytest.raises(SystemExit, match="the SBOM to list the installed packages, but they differ"):
            release.with_hashes(bom(*wrong), packages)


def test_what_has_no_wheel_is_built_by_the_maintainer_and_never_by_a_hospital(release: Any) -> None:
    assert release.sources(FOUND) == ["Flask_JWT==4.6"]
    install = _commands("For a hospital: install", slice(1, None))
    assert len(install) == 3 and all("--require-hashes --only-binary :all:" in command for command in install)


def test_what_boards_take_has_a_list_of_its_own_and_no_part_in_the_sbom(
    release: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip and the SBOM's maker are played; the order of what is asked of them is what is tried."""
    wheel = tmp_path / "tightframe-0.1-py3-none-any.whl"
    installed: dict[str, str] = {}

    def archive(name: str, version: str, ending: str = "-py3-none-any.whl") -> dict[str, Any]:
        hashes = {"sha256": hashlib.sha256(name.encode()).hexdigest()}
        found = {"url": f"https://index/{name}-{version}{ending}", "archive_info": {"hashes": hashes}}
        return {"metadata": {"name": name, "version": version}, "download_info": found}

    def run(*command: Any, **_: Any) -> str:
        words = [str(word) for word in command]
        if "install" in words:
            names = ["tightframe", "msgpack"] + (["Datadog"] if words[-1].endswith("[monitoring]") else [])
            ending = ".tar.gz" if "--dry-run" in words else "-py3-none-any.whl"
            asked = [archive(name, "0.1", ending) for name in names if name not in installed]
            Path(words[words.index("--report") + 1]).write_text(json.dumps({"install": asked}))
            if "--dry-run" not in words:
                assert "--only-binary" in words and words[words.index("--find-links") + 1] == str(tmp_path)
                installed.update(dict.fromkeys(names, "0.1"))
        elif "wheel" in words:
            assert words[-1].split("==")[0] not in installed and "--no-deps" in words
        elif "environment" in words:
            others = [{"name": name, "version": at} for name, at in installed.items() if name != "tightframe"]
            root = {"name": "tightframe", "version": "0.1"}
            return json.dumps({"metadata": {"component": root}, "components": others})
        return "py3.11-Linux-x86_64\n" if words[-1] == release.WHERE else ""

    monkeypatch.setattr(release, "run", run)
    release.describe(wheel, Path("python"), tmp_path / "tools", tmp_path, tmp_path, "0")
    where = "py3.11-linux-x86_64.txt"
    first = (tmp_path / f"requirements-{where}").read_text().split()[::2]
    assert first == ["tightframe==0.1", "msgpack==0.1"]
    digest = hashlib.sha256(b"Datadog").hexdigest()
    listed = (tmp_path / f"requirements-monitoring-{where}").read_text()
    assert listed == f"datadog==0.1 --hash=sha256:{digest}\n"
    assert "datadog" not in (tmp_path / "tightframe-0.1-py3.11-linux-x86_64.cdx.json").read_text().lower()
    (command,) = Guide(ROOT / "docs" / "release.md").commands("Boards at a server", {}, slice(None))
    assert command.endswith(f"-r requirements-monitoring-{where}") and "--require-hashes" in command


def test_a_release_is_not_written_over_another(release: Any, key: Path, tmp_path: Path) -> None:
    for arguments in (["--key", str(key), "-o", str(tmp_path)], ["--key", str(tmp_path / "none")]):
        with pytest.raises(SystemExit) as stopped:
            release.main(arguments)
        assert stopped.value.code == 2


def _commands(heading: str, which: slice) -> list[str]:
    python = {r"python3\.11": f"python3.{sys.version_info.minor}"}
    return Guide(ROOT / "docs" / "release.md").commands(heading, python, which)


def _bash(command: str, folder: Path, *, code: int = 0) -> str:
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def _checkout(folder: Path) -> Path:
    """The files of this checkout that git would have, committed, so that any state of it can be tried."""
    names = ["custom", "app", "jobs", "docs", "provisioning", "pyproject.toml", "README.md", "CHANGELOG.md"]
    names += ["LICENSE", "CITATION.cff", "constraints.txt"]
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    who = {f"GIT_{role}_{what}": "t" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "All"]):
        subprocess.run(["git", *command], cwd=folder, env=os.environ | who, check=True)
    return folder
