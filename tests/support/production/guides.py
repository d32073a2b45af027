"""The commands of the guides, to be run as they stand there, with a reader's own names put in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,3} (.+)$", re.MULTILINE)
ONE_MACHINE = "To try everything on one machine"
"""Its commands are tried in tests/app, without the engine."""


class Guide:
    """One page, and which of its commands were run.

    Args:
        path: of the page.
        elsewhere: headings of which other tests run the commands.
    """

    def __init__(self, path: Path, elsewhere: Sequence[str] = ()) -> None:
        text = path.read_text(encoding="utf-8")
        self._commands: dict[str, list[str]] = {}
        for block in _BLOCK.finditer(text):
            heading = _HEADING.findall(text, 0, block.start())[-1]
            lines = block.group(1).replace("\\\n", " ").splitlines()
            self._commands.setdefault(heading, []).extend(re.sub(r" +", " ", line) for line in lines)
        self._run: set[str] = set()
        self._elsewhere = tuple(elsewhere)

    def commands(self, heading: str, changes: Mapping[str, str], only: slice = slice(None)) -> list[str]:
        """The commands under a heading, or some of them, each pattern of ``changes`` replaced."""
        (whole,) = [name for name in self._commands if name.startswith(heading)]
        found = []
        for command in self._commands[whole][only]:
            self._run.add(command)
            for pattern, value in changes.items():
                command = re.sub(pattern, value.replace("\\", r"\\"), command)
            found.append(command)
        return found

    @property
    def not_run(self) -> set[str]:
        """Commands that nobody has asked for."""
        return {
            command
            for heading, commands in self._commands.items()
            for command in commands
            if heading not in self._elsewhere
        } - self._run

    def not_run_under(self, heading: str) -> set[str]:
        """Those under one heading."""
        return set(self._commands[heading]) - self._run
