"""``--format json``, and ``tightframe schema``: the JSON schema of a command's output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from tightframe_app.outputs import Output

Form = Annotated[
    Literal["text", "json"],
    typer.Option("--format", help="text, or json by the schema of `tightframe schema COMMAND`."),
]


def show(output: Output, *, line: bool = False) -> None:
    """Print an output as JSON, in one line if more follow, with control characters escaped."""
    text = output.model_dump_json(by_alias=True, indent=None if line else 2)
    if not text.replace("\n", "").isprintable():  # only within strings
        text = "".join(one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1] for one in text)
    typer.echo(text)


def schema(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="A command, such as `ledger show`; without it those with a schema are listed."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All schemas, by command.")] = False,
) -> None:
    """Print the JSON schema (draft 2020-12) of what a command prints with `--format json`.

    A later version may add keys; it raises `format` if one goes or changes its meaning.
    """
    from tightframe.options import unknown_name
    from tightframe_app.outputs import OUTPUTS

    if every:
        typer.echo(json.dumps({name: schema_of(name) for name in OUTPUTS}, indent=1))
        return
    if not command:
        for name in OUTPUTS:
            typer.echo(name)
        return
    name = " ".join(command)
    if name not in OUTPUTS:
        raise typer.BadParameter(unknown_name("command", name, list(OUTPUTS)), param_hint="COMMAND")
    typer.echo(json.dumps(schema_of(name), indent=2))


def schema_of(name: str) -> dict[str, object]:
    """Return the JSON schema of a command's output."""
    from tightframe_app.outputs import OUTPUTS

    body = _portable(OUTPUTS[name].model_json_schema(mode="serialization"))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **body, "title": f"tightframe {name}"}


def _portable(value: Any) -> Any:
    r"""Return a schema with patterns of JSON Schema, which lacks ``\A`` and ``\z``."""
    if isinstance(value, list):
        return [_portable(item) for item in value]
    if not isinstance(value, dict):
        return value
    copied = {key: _portable(item) for key, item in value.items()}
    if isinstance(pattern := copied.get("pattern"), str):
        copied["pattern"] = pattern.replace(r"\A", "^").replace(r"\z", "$")
    return copied
