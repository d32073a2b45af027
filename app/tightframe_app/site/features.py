"""``tightframe site features``: what a site keeps of its records on disk as features, and its deletion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tightframe.errors import SiteConfigError
from tightframe_app import formats
from tightframe_app.screens import lines

out = lines()


def features(
    config: Annotated[
        Path,
        typer.Option("--config", "-c", help="The site's own local/tightframe.json (with its `state_dir`)."),
    ],
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete them; the next job computes them again.")
    ] = False,
    form: formats.Form = "text",
) -> None:
    """Show the features of records that this site keeps on disk (`feature_cache`), or delete them all."""
    from tightframe.config.site import parse_single, read_object
    from tightframe.rounds import feature_folders

    entry, _ = parse_single(read_object(config), str(config))
    if entry.state_dir is None:
        raise SiteConfigError(
            f"Expected `state_dir` in {config}, which is where features are kept, but it is not set.",
            code="TF-201",
        )
    state = Path(entry.state_dir)
    kept = list(feature_folders.stored(state))
    size = sum(path.stat().st_size for path in kept)
    if delete:
        feature_folders.delete_all(state)
    if form == "json":
        from tightframe_app.outputs import Features

        kind = entry.feature_cache
        formats.show(Features(feature_cache=kind, files=len(kept), bytes=size, deleted=delete))
        return
    files = "1 file" if len(kept) == 1 else f"{len(kept)} files"
    told = f"{files} of features, {size / 2**20:.1f} MiB, in {state}"
    out.print(f"deleted: {told}" if delete else f"{told} (feature_cache: {entry.feature_cache})")
