"""The files of ``provisioning/``: policies, a kit's own files, units of systemd, boards.

An installed wheel has them beside this module (`pyproject.toml` puts them there), a checkout at its root.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding

from tightframe_app import formats
from tightframe_app.screens import console, lines, shown

PLACES = (
    Path(__file__).parent / "provisioning_files",
    Path(__file__).parents[2] / "provisioning",
)
"""Folders of the files: in a wheel, in a checkout."""

WIDTH = 110

app = typer.Typer(no_args_is_help=True)
out = lines()


@app.callback()
def _group() -> None:
    """Keep ``show`` as a subcommand although it is the only one."""


def folder() -> Path:
    """Return the folder with the files.

    Raises:
        FileNotFoundError: if this installation has none.
    """
    for place in PLACES:
        if (place / "README.md").is_file():
            return place
    raise FileNotFoundError(
        f"Expected the files of provisioning/ in {PLACES[0]}, but they are not there: reinstall the wheel."
    )


def names() -> list[str]:
    """Return the names of all files below the folder, sorted."""
    root = folder()
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def _complete(incomplete: str) -> list[str]:
    """Return the files and folders whose name has this prefix, for the shell's completion."""
    folders = {f"{name.partition('/')[0]}/" for name in names() if "/" in name}
    return sorted(name for name in {*names(), *folders} if name.startswith(incomplete))


@app.command()
def show(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A file or folder, such as local/privacy.json; without it all are listed.",
            autocompletion=_complete,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write it into, under its own name."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Of a policy: each rule with what it means.")
    ] = False,
    form: formats.Form = "text",
) -> None:
    """List the files, print one as it is, or write it (or a folder of them) with -o FOLDER.

    Nothing that exists is replaced.
    """
    available = names()
    wanted = (
        available
        if name is None
        else [file for file in available if (file + "/").startswith(name.rstrip("/") + "/")]
    )
    if not wanted:
        from tightframe.options import unknown_name

        raise typer.BadParameter(unknown_name("file", str(name), available), param_hint="NAME")
    if explain:
        _explain(name, output, form)
    elif form == "json":
        from tightframe_app.outputs import File, Files

        if output is not None:
            raise typer.BadParameter("expected text where files are written", param_hint="--format")
        listed = [File(name=file, content=_content(file) if file == name else None) for file in wanted]
        formats.show(Files(files=tuple(listed)))
    elif output is not None:
        _write(wanted, output)
    elif name in available:
        typer.echo((folder() / name).read_bytes(), nl=False)
    else:
        for file in wanted:
            out.print(file)


def _explain(name: str | None, output: Path | None, form: formats.Form) -> None:
    """Print each rule in a policy's file, and its meaning."""
    from tightframe.config.policy import Policy
    from tightframe.options import meanings

    if name is None or Path(name).parent != Path("policies") or name not in names():
        raise typer.BadParameter("expected a policy, such as policies/strict.json", param_hint="--explain")
    if output is not None or form == "json":
        raise typer.BadParameter("expected neither --out nor --format json with it", param_hint="--explain")
    texts, page = meanings(Policy), console(WIDTH)
    for rule, value in json.loads(_content(name)).items():
        page.print(f"{rule}: {json.dumps(value)}", markup=False)
        page.print(Padding(shown(texts[rule]), (0, 0, 0, 4)))


def _content(name: str) -> str:
    return (folder() / name).read_text(encoding="utf-8")


def _write(wanted: list[str], output: Path) -> None:
    """Write files, refusing if any exists."""
    existing = [str(output / name) for name in wanted if (output / name).exists()]
    if existing:
        raise FileExistsError(
            f"Expected no such files, but found {', '.join(existing)}: nothing was written."
        )
    for name in wanted:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_bytes((folder() / name).read_bytes())
        out.print(str(output / name))
