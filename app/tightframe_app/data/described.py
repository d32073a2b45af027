"""``tightframe data describe``: a site's records as a job would use them, in the terminal and as a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tightframe.errors import TightframeError
from tightframe.results.words import plural
from tightframe_app import formats
from tightframe_app.data import contracts as tables
from tightframe_app.screens import console, shown

if TYPE_CHECKING:
    from tightframe.data.contract import Contract
    from tightframe.data.table import TableSite
    from tightframe.data.table.summary import Description, Summary

MOST_SERIES = 4
HEAD = ("column", "missing", "mean (deviation)", "least", "median", "largest", "counts")


def describe(
    contract: tables._Contract,
    site_config: tables._Config,
    site: tables._Site = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", dir_okay=False, help="Page to write, with plots (HTML).")
    ] = None,
    bins: Annotated[
        int | None, typer.Option(min=2, max=64, help="Of a number: show what would be withheld with so many.")
    ] = None,
    time_ends: Annotated[
        str | None,
        typer.Option(help="Of bins of time, as 90,365,730: show where curves would end with them."),
    ] = None,
    form: formats.Form = "text",
) -> None:
    """Show what a site would bring: its table's columns, or its pictures' sizes and light, by class.

    Rows that break the contract are counted and left out. With --output a page with plots by class is
    written, one file that opens offline, readable by its owner only: it has exact numbers about the site's
    own records, so do not pass it on.

    Exit code 0: shown. 2: a table cannot be read, or does not fit the contract; of several sites all others
    are shown.
    """
    agreed = tables.read_contract(contract)
    ends = _numbers(time_ends) if time_ends else ()
    described: list[tuple[str, Description]] = []
    unreadable: dict[str, str] = {}
    configured = tables.with_policies(site_config, site, agreed)
    for name, entry, policy in configured:
        least = policy.resolve(production=True).class_count(synthetic=False)
        try:
            described.append((name, _of(agreed, entry, least, bins, ends)))
        except (TightframeError, FileNotFoundError) as error:
            if len(configured) == 1:
                raise
            unreadable[name] = str(error)
    if output is not None and described:
        output.touch(mode=0o600)
        output.chmod(0o600)
        output.write_text(_page(agreed.title, described), encoding="utf-8")
    if form == "json":
        _show_json(agreed.title, described, unreadable)
    else:
        _show(described)
        if output is not None and described:
            tables.out.print(f"page: {output}")
    for name, why in unreadable.items():
        tables.err.print(f"error: {shown(name)}: {why}")
    if unreadable:
        tables.err.print(f"{len(unreadable)} of {len(configured)} sites cannot be shown")
        raise typer.Exit(2)


def _show(described: list[tuple[str, Description]]) -> None:
    """Print each site's table, and the cells that it would withhold."""
    for name, description in described:
        counts = ", ".join(f"{shown(title)} {count}" for title, count in description.records.items())
        tables.out.print(f"{name}: {description.where}" if name else description.where, style="bold")
        broken = plural(description.broken, "row")
        tables.out.print(f"{sum(description.records.values())} records ({counts}); {broken} broken")
        if description.present:
            present = ", ".join(
                f"{shown(title)} {count}" + (f" ({unknown} unknown)" if unknown else "")
                for (title, count), unknown in zip(
                    description.present.items(), description.unknown.values(), strict=True
                )
            )
            tables.out.print(f"records with a finding, of which they may have several: {present}")
        table = Table(*HEAD, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for summary in description.columns:
            table.add_row(*(shown(cell) for cell in _cells(summary)))
        console(tables.WIDTH).print(table)
        for caption, rows in _withheld(description):
            tables.out.print(shown(caption))
            table = Table(*rows[0], box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for row in rows[1:]:
                table.add_row(*map(shown, row))
            console(tables.WIDTH).print(table)
        if advised := _fewer_bins(description):
            tables.out.print(advised)


def _show_json(title: str, described: list[tuple[str, Description]], unreadable: dict[str, str]) -> None:
    from tightframe_app.outputs import Column, DataDescribed, DataDescription

    sites = []
    for name, description in described:
        columns = [
            Column(
                name=item.column.column,
                kind=item.column.kind,
                unit=item.column.unit,
                missing=item.missing,
                mean=item.mean,
                deviation=item.deviation,
                quantiles=item.quantiles,
                names=item.names,
                counts={key: tuple(map(int, values)) for key, values in item.counts.items()},
            )
            for item in description.columns
        ]
        entry = DataDescribed(
            site=name or None,
            place=str(description.where),
            records=description.records,
            broken=description.broken,
            present=description.present,
            unknown=description.unknown,
            findings=tuple(map(str, description.findings)),
            withheld={} if description.preview is None else description.preview.cells,
            curves={} if description.preview is None else description.preview.curves,
            columns=tuple(columns),
        )
        sites.append(entry)
    formats.show(DataDescription(title=title, sites=tuple(sites), unreadable=unreadable))


def _withheld(description: Description) -> list[tuple[str, list[list[str]]]]:
    """Return tables of cells that exact statistics would withhold, each with a caption and head first."""
    if (preview := description.preview) is None:
        return []
    sections = []
    affected = {
        column: of for column, of in preview.cells.items() if any(hidden for hidden, _ in of.values())
    }
    rule = f"a cell is withheld below {preview.least} {'patients' if preview.patients else 'records'}"
    cells = "of all cells: each class's bins or levels, and its missing values"
    if affected:
        head = ["column", *map(str, next(iter(affected.values())))]
        rows = [
            [column, *(f"{hidden} of {most}" if hidden else "-" for hidden, most in of.values())]
            for column, of in affected.items()
        ]
        caption = f"cells that this site withholds of exact statistics, {cells}, by bins ({rule}):"
        sections.append((caption, [head, *rows]))
    if preview.curves:
        head = ["class", *map(str, next(iter(preview.curves.values())))]
        rows = [
            [title, *(f"{end:.4g}" if end else "-" for end in of.values())]
            for title, of in preview.curves.items()
        ]
        by = "time_bins"
        if preview.ends:
            by = f"time_ends {','.join(format(end, 'g') for end in preview.ends)}, and one more bin"
        sections.append((f"curves of this site end at, by {by} ({rule}):", [head, *rows]))
    return sections


def _fewer_bins(description: Description) -> str:
    """Advise fewer bins if on average more than half of the numbers' cells are withheld; else empty."""
    if description.preview is None:
        return ""
    numbers = {item.column.column for item in description.columns if item.column.kind == "number"}
    shares = [
        {bins: hidden / most for bins, (hidden, most) in of.items()}
        for column, of in description.preview.cells.items()
        if column in numbers
    ]
    if not shares:
        return ""
    means = {bins: sum(share[bins] for share in shares) / len(shares) for bins in shares[0]}
    first, *fewer = means
    if means[first] <= 0.5 or not fewer:
        return ""
    best = next((bins for bins in fewer if means[bins] <= 0.25), min(fewer, key=lambda bins: means[bins]))
    return (
        f"With {first} bins {means[first]:.0%} of the numbers' cells are withheld here, with {best} "
        f"{means[best]:.0%}: propose --set statistics.bins={best}."
    )


def _numbers(typed: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, typed.split(",")))
    except ValueError:
        raise typer.BadParameter(
            f"expected numbers divided by commas, got {typed!r}", param_hint="--time-ends"
        ) from None


def _of(
    contract: Contract, entry: TableSite, least: int, bins: int | None, ends: tuple[float, ...]
) -> Description:
    from tightframe.data.images import ImagesSite
    from tightframe.data.images.contract import PictureContract
    from tightframe.data.images.summary import describe as of_pictures
    from tightframe.data.table.summary import describe as of_table

    if isinstance(contract, PictureContract) and isinstance(entry, ImagesSite):
        if bins is not None or ends:
            raise typer.BadParameter("expected a table's contract: pictures have neither bins nor times")
        return of_pictures(contract, entry)
    return of_table(contract, entry, least, bins=bins, ends=ends)


def _cells(summary: Summary) -> list[str]:
    """Return a column's cells in the table."""
    unit = f" ({summary.column.unit})" if summary.column.unit else ""
    name = [summary.column.column + unit, str(summary.missing)]
    if summary.column.kind != "number":
        totals = [sum(counts) for counts in zip(*summary.counts.values(), strict=True)]
        counted = ", ".join(f"{level} {total}" for level, total in zip(summary.names, totals, strict=True))
        return [*name, "", "", "", "", counted]
    spread = "" if summary.deviation is None else f" ({summary.deviation:.4g})"
    mean = "" if summary.mean is None else f"{summary.mean:.4g}{spread}"
    low, _, median, _, high = [f"{value:.4g}" for value in summary.quantiles] or [""] * 5
    return [*name, mean, low, median, high, ""]


def _page(title: str, described: list[tuple[str, Description]]) -> str:
    """Return the page."""
    from tightframe.report.drawing import layout, plots
    from tightframe.report.drawing.markup import Part, figure, listed, section, table, tag

    parts: list[Part] = [
        layout.notice(
            "bad",
            tag("b", "Private to this site."),
            "This page has exact numbers about this site's own records. Nothing of it is sent anywhere; do "
            "not pass it on.",
        )
    ]
    for name, description in described:
        tiles = [(str(count), name_of_class) for name_of_class, count in description.records.items()]
        inner: list[Part] = [
            tag("p", description.where),
            layout.tiles([*tiles, (str(description.broken), "rows broken")]),
        ]
        if description.present:
            total = sum(description.records.values())
            of_findings = [
                (title, str(count), str(total - count - unknown), str(unknown))
                for (title, count), unknown in zip(
                    description.present.items(), description.unknown.values(), strict=True
                )
            ]
            inner.append(table(("finding", "present", "absent", "unknown"), of_findings))
        if description.findings:
            inner.append(listed([str(finding) for finding in description.findings]))
        inner.append(table(HEAD, [_cells(summary) for summary in description.columns]))
        for caption, (head, *body) in _withheld(description):
            inner += [tag("p", caption), table(head, body)]
        for summary in description.columns:
            unit = f", {summary.column.unit}" if summary.column.unit else ""
            series = _series(summary)
            picture = partial(
                plots.columns,
                summary.column.column,
                summary.names,
                series,
                x_name=f"{summary.column.column}{unit}",
            )
            inner.append(figure(picture, f"{summary.column.column}: records by class"))
        parts.append(section(name or "Records", *inner))
    return layout.page(title, "Tightframe: a site's own records, private to it", *parts)


def _series(summary: Summary) -> dict[str, tuple[int, ...]]:
    """Return the counts by class; with more classes than colours, their total."""
    if len(summary.counts) <= MOST_SERIES:
        return summary.counts
    return {"all classes": tuple(map(sum, zip(*summary.counts.values(), strict=True)))}
