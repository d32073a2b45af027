"""Every command of the guides exists, with its options; every Python cell imports what is there."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.support import ROOT
from typer.testing import CliRunner

from tightframe_app.cli import app

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "provisioning/README.md", *ROOT.glob("*.md")], key=str)
COMMAND = typer.main.get_command(app)
PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]


BEFORE = ("sudo", "-u", "nice", "env")


def cells(page: Path, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [re.sub(rf"^{indent}", "", text, flags=re.M) for indent, text in found]


def typed(page: Path) -> Iterator[list[str]]:
    """Each line that starts with our command, word by word, without what the shell does with it."""
    for cell in cells(page, "sh"):
        text = cell.replace("\\\n", " ").replace("\n", "\n; ")
        lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for token in [*lexer, ";"]:
            if not set(token) <= set("();<>|&"):
                words.append(token)
                continue
            while words and (words[0] in BEFORE or "=" in words[0].partition("/")[0]):
                words = words[2:] if words[0] == "-u" else words[1:]
            if words and words[0].rpartition("/")[2] == "tightframe":
                yield words[1:]
            words = []


def check(words: list[str]) -> None:
    """Follow the words to a command, and look each option up."""
    command: Any = COMMAND
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    known = {option: item for item in command.params for option in (*item.opts, *item.secondary_opts)}
    for word in words:
        name = word.partition("=")[0]
        if re.match(r"--?[a-z]", word) and name not in ("--help", "--install-completion"):
            assert name in known, (words, sorted(known))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_commands_and_cells_name_what_is_there(page: Path) -> None:
    for words in typed(page):
        if "..." not in words:
            check(words)
    for cell in cells(page, "python"):
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tightframe"):
                if importlib.util.find_spec(node.module.partition(".")[0]) is None:
                    continue  # the package that a guide makes
                module = importlib.import_module(node.module)
                for item in node.names:
                    place = f"{node.module}.{item.name}"
                    assert hasattr(module, item.name) or importlib.util.find_spec(place), place


def test_what_a_data_protection_officer_types_every_month_is_whole() -> None:
    """Each line names the site's file or its kit; without it the command asks for something else."""
    text = (ROOT / "docs/doors/data-protection.md").read_text(encoding="utf-8").partition("Every month:")[2]
    lines = [shlex.split(line) for line in re.findall(r"^\d\. `tightframe ([^`]+)`", text, re.M)]
    assert len(lines) == 4
    for words in lines:
        check(words)
        assert words[-1] == "KIT" or words[words.index("-c") + 1] == "KIT/local/tightframe.json", words


def test_the_engines_script_finds_our_python_as_another_account() -> None:
    """``sudo`` leaves its caller's PATH out, and the script runs whichever ``python3`` comes first."""
    shown = "".join(cells(ROOT / "docs/site-guide.md", "sh")).replace("\\\n", " ")
    (line,) = [line for line in shown.splitlines() if "sub_start.sh" in line]
    assert line.split()[:5] == [
        "sudo",
        "-u",
        "tightframe-engine",
        "env",
        "PATH=/opt/tightframe/.venv/bin:/usr/bin:/bin",
    ]


FREE = (["jobs", "export"], ["jobs", "list"], ["methods"], ["explain"], ["schema"], ["provisioning", "show"])
"""Commands that need no files of others; what they are given must have none either."""
OTHERS = {"--contract", "--resume", "--evaluate", "--withdraw-from", "--statistics"}


def free(words: list[str]) -> bool:
    given = any(words[: len(one)] == one for one in FREE) and not OTHERS & set(words)
    return given and not any(re.fullmatch(r"[A-Z]+(_[A-Z]+)*|.*[$].*", word) for word in words)


@pytest.mark.whole
def test_those_that_need_no_files_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [page for page in PAGES if page.name != "extension.md"]  # whose package it makes: test_extension.py
    lines = {tuple(words) for page in own for words in typed(page) if free(words)}
    assert len(lines) > 15
    for number, words in enumerate(sorted(lines)):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        done = CliRunner().invoke(app, [*words])
        assert done.exit_code == 0, (words, done.output, done.exception)


def test_the_check_finds_what_is_not_there() -> None:
    for wrong in (["jobs", "lst"], ["jobs", "check", "--fold", "x"], ["watch", "JOB", "--web", "--none"]):
        with pytest.raises(AssertionError):
            check(wrong)
    assert sum(len(list(typed(page))) for page in PAGES) > 80
