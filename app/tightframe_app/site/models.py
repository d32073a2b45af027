"""``tightframe site model``: decisions on given models from which jobs may start here."""

from __future__ import annotations

import getpass
import hashlib
import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from tightframe.errors import SiteConfigError
from tightframe.files import write_json
from tightframe_app import formats
from tightframe_app.screens import lines
from tightframe_app.site.checks.findings import CONFIG_HELP, file_of

app = typer.Typer(
    help="Given models (`initial_model_sha256`) that jobs may start from or evaluate at this site.",
    no_args_is_help=True,
)
out = lines()

REVEALS = """\
A model with SHA-256
  {sha256}
{whence}
Whoever makes a model's weights chooses what its features look at. Weights can be made so that a total
over any number of patients shows single patients' records, and no other rule of this site finds that out.
So accept only a model whose makers, not the job's author, publish its SHA-256: compare it. Or one that a
run ended with here: give this site's own file of it."""
COMPUTED = "It was computed here from {path}."
TYPED = "Nobody computed it here: with --file it is, from the file itself."
KEY = "accepted_models"

Config = Annotated[Path, typer.Option("--config", "-c", help=CONFIG_HELP, callback=file_of)]
Site = Annotated[
    str | None, typer.Option("--site", "-s", help="The site's name, in a simulation's file for several.")
]


@app.command("show")
def show(config: Config, site: Site = None, form: formats.Form = "text") -> None:
    """Show the given models that a person accepted at this site, and who."""
    from tightframe_app.outputs import AcceptedModel, AcceptedModels

    _, part = _entries(config, site)
    entry = _checked(part)
    rule = entry.policy.resolve(production=True).given_models
    if form == "json":
        models = tuple(AcceptedModel(sha256=key, note=note) for key, note in entry.accepted_models.items())
        formats.show(AcceptedModels(given_models=rule, models=models))
        return
    out.print(f"given_models {rule}; accepted: {len(entry.accepted_models) or 'none'}")
    for sha256, note in entry.accepted_models.items():
        out.print(f"{sha256}  {note}")


@app.command("accept")
def accept(
    config: Config,
    source: Annotated[
        str, typer.Option(help="Who made the weights, and where their SHA-256 is published; it is kept.")
    ],
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", exists=True, dir_okay=False, help="The model, whose SHA-256 is taken."),
    ] = None,
    sha256: Annotated[str | None, typer.Option("--sha256", help="Of the model, without its file.")] = None,
    by: Annotated[
        str | None, typer.Option(help="Who accepts it; by default the name of the account.")
    ] = None,
    site: Site = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Let jobs start from a given model, or evaluate it, at this site from now on.

    For a job that this site refuses with TF-626. It is kept in the site's own configuration.
    """
    values, part = _entries(config, site)
    entry = _checked(part)
    if (file is None) == (sha256 is None):
        raise typer.BadParameter("expected the model's file or its SHA-256", param_hint="--file, --sha256")
    if file is not None:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    else:
        digest = str(sha256).lower()
    if digest in entry.accepted_models:
        out.print(f"{digest} is accepted already: {entry.accepted_models[digest]}")
        return
    note = f"{source}; accepted by {by or getpass.getuser()} on {datetime.now(UTC):%Y-%m-%d}"
    part[KEY] = {**entry.accepted_models, digest: note}
    _checked(part)
    whence = TYPED if file is None else COMPUTED.format(path=file)
    out.print(REVEALS.format(sha256=digest, whence=whence))
    if not yes and not typer.confirm("Accept it at this site?"):
        out.print("nothing was changed")
        raise typer.Exit(1)
    place = config.resolve()
    write_json(place, values, mode=stat.S_IMODE(place.stat().st_mode))
    out.print(f"jobs may now start from it here: {note}")


def _entries(config: Path, site: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a configuration's content, and the site's part of it."""
    from tightframe.config.site import read_object

    values = read_object(config)
    if "sites" not in values:
        return values, values
    sites = values["sites"]
    if not isinstance(sites, dict) or site not in sites or not isinstance(sites[site], dict):
        raise SiteConfigError(f"Expected --site to name one of the sites in {config}, but got {site!r}.")
    return values, sites[site]


def _checked(part: Mapping[str, Any]) -> Any:
    """Return the site's entry, validated."""
    from tightframe.config.site import parse_single

    return parse_single(dict(part))[0]
