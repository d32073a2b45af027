"""Shared parts of commands with a live page: the option, and the lines about its link."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tightframe_app.screens import Terminal

if TYPE_CHECKING:
    from tightframe_app.live.server import Live

Port = Annotated[
    int | None,
    typer.Option(
        min=1024,
        max=65535,
        show_default=False,
        help="Port of the page, on this machine only; a free one by default.",
    ),
]


def check_port(port: int | None, *, web: bool) -> None:
    """Refuse a port without a page."""
    if port is not None and not web:
        raise typer.BadParameter("expected --web with it: without there is no page", param_hint="--port")


def lines_of(out: Console) -> Console:
    """Return the console for lines about the page: the terminal, else stderr, which no program reads.

    The stream is taken now, as other threads print while the engine's prints are redirected.
    """
    if out.is_terminal:
        return out
    return Terminal(file=sys.stderr, soft_wrap=True)


def announce(live: Live, out: Console) -> None:
    """Print the link for the person who started the command."""
    out.print(f"page: {live.link}", soft_wrap=True)
    out.print(
        "It opens once, in one browser on this machine. From another machine first: "
        f"ssh -L {live.port}:127.0.0.1:{live.port} THIS_MACHINE",
        soft_wrap=True,
    )


def tell(out: Console, text: str) -> None:
    """Print an event of the link; called by the page's threads."""
    out.print(f"page: {text}", soft_wrap=True)
