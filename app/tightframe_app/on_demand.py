"""Parts of the command line, imported on demand, as a listing would spend most of its time on others."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

MARKUP: Final = "markdown"


class Group(TyperGroup):
    """A group that parses options without a command, such as ``--help``, only if one is typed.

    Typer loads pydantic even if none is, which is a third of the time of a command's help.
    """

    _named = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments before the command's name."""
        self._named = bool(args) and not args[0].startswith("-")
        try:
            return super().parse_args(ctx, args)
        finally:
            self._named = False

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the possible options."""
        params = super().get_params(ctx)
        return [one for one in params if one.expose_value] if self._named else params


@dataclass(frozen=True)
class Part:
    """A command, or a group of commands.

    Attributes:
        place: ``module:name`` of its function or its ``Typer``.
        help: its line in the list of commands; for a group also the text above its own list.
    """

    place: str
    help: str

    def load(self, name: str) -> Any:
        """Import it as a command of this name."""
        module, _, attribute = self.place.partition(":")
        target = getattr(importlib.import_module(module), attribute)
        holder = typer.Typer(rich_markup_mode=MARKUP, add_completion=False)
        if isinstance(target, typer.Typer):
            holder.add_typer(target, name=name, help=self.help, cls=Group)
        else:
            holder.command(name)(target)
        holder.callback()(_nothing)  # so that one command alone has its name, too
        return get_command(holder).commands[name]  # type: ignore[attr-defined]


def _nothing() -> None:
    """Do nothing before a command."""


class _Commands(Mapping[str, Any]):
    """Commands by name, each loaded once."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = parts
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self.parts[name].load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def group_of(parts: Mapping[str, Part]) -> type[TyperGroup]:
    """Return a class of group with these parts, in order."""

    class OnDemand(Group):
        def __init__(self, **values: Any) -> None:
            super().__init__(**{**values, "commands": _Commands(parts)})

        def list_commands(self, ctx: Any) -> list[str]:
            return list(parts)

        def format_help(self, ctx: Any, formatter: Any) -> None:
            """Show the list of commands without loading them."""
            commands = self.commands
            self.commands = {name: TyperCommand(name, help=part.help) for name, part in parts.items()}
            try:
                super().format_help(ctx, formatter)
            finally:
                self.commands = commands

    return OnDemand
