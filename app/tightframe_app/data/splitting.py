"""``tightframe data split``: a table with a column of hospitals becomes a table for each of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tightframe.files import quoted
from tightframe_app.screens import lines, shown

out = lines()


def split(
    file: Annotated[Path, typer.Argument(help="A text table with a header: .csv, .tsv, .txt (also .gz).")],
    by: Annotated[str, typer.Option("--by", help="The column that tells the hospital.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder.")],
) -> None:
    """Write a table for each value of a column, without that column, and a simulation's sites.json.

    Exit code 0: written. 2: the file cannot be read, or the column does not tell 2 to 100 sites.
    """
    from tightframe.data.table import splitting

    parts = splitting.split(file, by, output)
    for site, part in parts.items():
        out.print(shown(f"{site}: {part.value}, {part.rows} rows in {part.entry['file']}"))
    config = output / "sites.json"
    sites = {site: {"data": {"table": part.entry}} for site, part in parts.items()}
    config.write_text(json.dumps({"sites": sites}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    first = next(iter(parts.values())).entry["file"]
    out.print(f"{config}: where they lie, for --site-config")
    out.print(f"then: tightframe data init {quoted(Path(first))} --label COLUMN --title NAME")
