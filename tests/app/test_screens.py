"""A terminal that nothing printed can control: servers, other hospitals and files have words in messages."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text
from tests.support import ROOT

from tightframe_app import cli, formats
from tightframe_app.outputs import Reported
from tightframe_app.screens import Terminal, print_list
from tightframe_app.watch.status import read_status

EVIL = "\x1b]0;title\x07\x1b[2J\x9b2J\u202e\rx"


def test_what_a_server_calls_a_silo_steers_no_terminal_by_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name of a wrong value stands in the message, and the message is printed as it is."""
    monkeypatch.setattr(cli, "err", Terminal(stderr=True))
    monkeypatch.setattr(
        cli, "app", lambda: read_status({"job_name": "x", "rounds": 1, "refused": {f"{EVIL}bad": 3}})
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and "bad" in told and told.replace("\n", "").isprintable()


def table(text: str) -> Table:
    made = Table(text)
    made.add_row(text)
    return made


def test_nor_does_a_cell_of_a_table() -> None:
    out = Terminal(file=io.StringIO(), width=400)
    out.print(table(EVIL))
    assert out.file.getvalue().replace("\n", "").isprintable()  # type: ignore[attr-defined]


@pytest.mark.parametrize("made", [str, Text, lambda text: Text.assemble(("a", "bold"), text)])
def test_it_shows_what_would_control_it(made: Callable[[str], Any]) -> None:
    out = Terminal(file=io.StringIO(), width=400)
    out.print(made(f"{EVIL}\nsecond line"))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert text.replace("\n", "").isprintable() and r"\x1b[2J\x9b2J\u202e" in text
    assert re.search(r"\n\W*second line", text)


def test_its_own_styles_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal(file=io.StringIO(), width=80, force_terminal=True)
    print_list(out, "title", [f"[b]{EVIL}"])
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1mtitle\x1b[0m" in text and "\x1b[2J" not in text and "[b]" in text


@pytest.mark.parametrize("line", [True, False])
def test_nor_does_json(capsys: pytest.CaptureFixture[str], line: bool) -> None:
    formats.show(Reported(page=EVIL, of="server", notes=("caf\u00e9",)), line=line)
    told = capsys.readouterr().out
    assert told.replace("\n", "").isprintable() and "caf\u00e9" in told
    assert json.loads(told)["page"] == EVIL


def test_every_command_prints_on_such_a_terminal() -> None:
    made = re.compile(r"(?<![\w.])Console\((?!\):)")
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "app").rglob("*.py")}
    assert not [name for name, text in files.items() if made.search(text)]
