"""Commands that are printed can be copied as they stand: a path in one is quoted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

COMMAND = re.compile(
    r"\b(tightframe [a-z]+|nvflare [a-z]+|chmod|chown|install -d)\b[^.:;,(`\n]*(\s|=)$|\s--?[a-z][a-z-]*\s$"
)
QUOTED = ("quoted", "_quoted", "shlex.quote")
NO_PATHS = {  # names of jobs, methods, participants, values of options, and what was quoted before
    "name", "job_id", "item.name", "who.name", "opened.name", "error.code", "method", "like", "key", "mode",
    "outcome.job_name", "engine.name", "owner", "quoted", "place", "previous", "profile", "where", "root",
    "TRANSCRIPT", "made", "folder", "code", "source",
}  # fmt: skip
ONLY_IN = {
    "folder": "app/tightframe_app/watch/status.py",
    "place": "app/tightframe_app/jobs/simulation.py",
    "key": "app/tightframe_app/jobs/commands.py",
    "code": "app/tightframe_app/jobs/simulation.py",
    "source": "app/tightframe_app/data/commands.py",
}
"""Names that are of a path elsewhere."""


def unquoted(file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    if not re.search(r"tightframe |nvflare |chmod|chown|install -d", text):
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.JoinedStr):
            continue
        before = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                before += str(part.value)
            elif isinstance(part, ast.FormattedValue):
                value = ast.unparse(part.value)
                called = ast.unparse(part.value.func) if isinstance(part.value, ast.Call) else ""
                allowed = value in NO_PATHS and ONLY_IN.get(value, str(file)) in str(file)
                if COMMAND.search(before) and called not in QUOTED and not allowed:
                    yield f"{file.relative_to(ROOT)}:{node.lineno}: {before[-40:]!r} {value}"
                before += "X"


def test_a_path_in_a_printed_command_is_quoted() -> None:
    files = [path for folder in ("app", "custom") for path in (ROOT / folder).rglob("*.py")]
    assert [line for file in files for line in unquoted(file)] == []
