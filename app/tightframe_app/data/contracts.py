"""``tightframe data init`` and ``check``: propose a contract for a table or pictures, and check data by it.

All output is for the person at the site; nothing is sent anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.table import Table
from rich.text import Text

from tightframe.errors import DataError, SiteConfigError
from tightframe.files import new_file, quoted
from tightframe_app import formats
from tightframe_app.screens import console, lines, print_list, shown

if TYPE_CHECKING:
    from tightframe.config.policy import PolicyBlock
    from tightframe.config.site import SiteEntry
    from tightframe.data.contract import Contract
    from tightframe.data.table import TableSite
    from tightframe.data.table.silo import TableData
    from tightframe_app.site.checks.findings import State

WIDTH = 120
SHOWN_COLUMNS = 5
out = lines()
err = lines(stderr=True)

_Contract = Annotated[
    Path,
    typer.Option("--contract", help="The job's data contract (JSON), as `tightframe data init` writes it."),
]
_Config = Annotated[
    Path,
    typer.Option(
        "--site-config",
        "-s",
        help="The site's configuration, or the simulator's with an entry for each site.",
    ),
]
_Site = Annotated[str | None, typer.Option(help="Only this site of a file for several.")]


def init(
    file: Annotated[
        Path,
        typer.Argument(
            help="A table with a header: .csv, .tsv, .txt (also .gz), .parquet; or a folder of pictures "
            "with a folder for each class."
        ),
    ],
    label: Annotated[
        str | None, typer.Option(help="Column to learn; several findings separated by commas.")
    ] = None,
    record: Annotated[str | None, typer.Option(help="The column that names each record.")] = None,
    patient: Annotated[str | None, typer.Option(help="The column of the patient.")] = None,
    fold: Annotated[str | None, typer.Option(help="The column with train, validation, test.")] = None,
    picture: Annotated[str | None, typer.Option(help="The column with the paths of pictures.")] = None,
    size: Annotated[int | None, typer.Option(min=8, help="Side of the pictures for the model.")] = None,
    root: Annotated[
        Path | None, typer.Option(help="The folder that these paths start in; the table's by default.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Name of the data; the file's by default.")] = None,
    missing: Annotated[
        list[str] | None,
        typer.Option(help="A table's text that stands for no value, such as k.A.; may be repeated."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="A table's column to leave out, such as the hospital; may be repeated."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Contract to write; notes are written beside it.")
    ] = Path("contract.json"),
) -> None:
    """Propose a data contract from a table or a manifest of pictures: kinds, ranges, vocabularies, sizes.

    Writes the contract, and beside it NAME.notes.md with what a person must decide, before anybody else sees
    it: units, ranges, levels, classes. Prints the entry for the site's configuration. Without --label it
    lists the columns that could be one. Nothing is overwritten.

    Exit code 0: written. 2: the file cannot be read, or --label is missing or no class.
    """
    from tightframe.data.images import proposal as of_pictures
    from tightframe.data.table import proposal

    folder = file.is_dir()
    if missing and (folder or picture is not None):
        raise typer.BadParameter("it is for a table alone, not for pictures", param_hint="--missing")
    if ignore and (folder or picture is not None):
        raise typer.BadParameter("it is for a table alone, not for pictures", param_hint="--ignore")
    if folder and any((label, record, patient, fold, picture, root)):
        raise DataError(
            f"Expected a table at {file}, whose columns are named, but it is a folder: name none, if its "
            "folders are classes of pictures.",
            code="TF-206",
        )
    if label is None and not folder:
        candidates = ", ".join(proposal.candidates(file)) or "none"
        raise typer.BadParameter(
            f"expected the column to be learned; possible are: {candidates}", param_hint="--label"
        )
    roles = {"label": label, "record": record, "patient": patient, "fold": fold}
    if folder:
        draft = of_pictures.propose_folders(file, size=size, title=title)
    elif picture is not None:
        draft = of_pictures.propose(file, roles, picture, size=size, root=root, title=title)
    else:
        draft = proposal.propose(file, roles, title=title, missing=missing or (), ignored=ignore or ())
    notes = output.with_name(f"{output.name.removesuffix('.json')}.notes.md")
    if existing := [path for path in (output, notes) if path.exists()]:
        raise FileExistsError(f"{existing[0]} exists already: choose another --output, or move it away.")
    proposed = json.dumps(draft.contract, indent=2, ensure_ascii=False) + "\n"
    for path, text in ((output, proposed), (notes, proposal.notes_text(draft, file))):
        with new_file(path) as stream:  # until a person decides, it discloses the site's records
            stream.write(text)
    if "picture" in draft.contract:
        shape, key = draft.contract["picture"], "images"
        what = f"{shape['colour']} pictures of {' x '.join(map(str, shape['size']))} pixels (height first)"
    else:
        what, key = f"{len(draft.contract['columns'])} columns", "table"
    target = draft.contract["label"]
    columns = target.get("column") or ", ".join(item["column"] for item in target["findings"])
    out.print(f"{output}: {what}, label {shown(columns)}")
    print_list(out, f"To decide ({notes}):", [shown(note) for note in draft.notes])
    out.print()
    divided = ", unless `tightframe data split` has written sites.json" if ignore else ""
    out.print(f"For a site's configuration{divided}:")
    out.print(shown(json.dumps({"data": {key: draft.site}}, ensure_ascii=False)))
    out.print(f"then: tightframe data check --contract {quoted(output)} --site-config FILE")


def check(contract: _Contract, site_config: _Config, site: _Site = None, form: formats.Form = "text") -> None:
    """Check a site's table or pictures against a contract: all findings at once, with row numbers.

    Row numbers are lines of a text file, otherwise places from 1; all pictures are read. Codes that the
    contract does not have are shown, so that they can be mapped. `tightframe site check --job` includes
    this check, and shows no codes.

    Exit code 0: the site can take part, possibly without rows that it sets aside. 1: it cannot.
    2: there is no such contract, or no valid entry for each site; the others are checked before that is told.
    """
    bad = 0
    agreed = read_contract(contract)
    wrong = None
    try:
        tables = entries(site_config, site, agreed)
    except SiteConfigError as error:
        tables, wrong = [] if form == "json" else _valid_entries(site_config, site, agreed), error
    if wrong is not None and not tables:
        raise wrong
    if form == "json":
        _check_as_json(agreed, tables)
    by_site: dict[str, Sequence[int]] = {}
    for name, entry in tables:
        bad += not _checked(name, agreed, entry, by_site)
    if wrong is not None:
        raise wrong
    if bad:
        who = f"{bad} of {len(tables)} sites" if len(tables) > 1 else "the data"
        out.print(f"{who} cannot take part like this")
        raise typer.Exit(1)
    if len(tables) > 1 and (text := _left_out(agreed, site_config, by_site)):
        out.print(shown(text))
    out.print("no problem was found")
    if any(entry.contract is None for _, entry in tables):
        out.print(f'Agreed on? Then production needs in a site\'s entry: "contract": "{agreed.sha256()}"')


def _left_out(contract: Contract, config: Path, by_site: Mapping[str, Sequence[int]]) -> str:
    """Name the classes that a model of one sum over all sites of a file would never answer."""
    from tightframe.data.contract import MultiLabel
    from tightframe_app.site.checks.job import Held, never_answered

    if isinstance(contract.label, MultiLabel):
        return ""
    sites = {
        name: Held(by_site[name], policy.resolve(production=False).class_count(synthetic=False))
        for name, _, policy in with_policies(config, None, contract)
    }
    return never_answered("fed3r, fedcgs and fedncm", sites, contract.label.titles)


def _check_as_json(contract: Contract, tables: list[tuple[str, TableSite]]) -> NoReturn:
    """Check tables, print the result as JSON, and end the command."""
    from tightframe_app.outputs import DataCheck, DataChecked, Finding

    sites = []
    for name, entry in tables:
        findings = tuple(Finding(state=state, text=text) for state, text in _findings(contract, entry, []))
        sites.append(DataChecked(site=name or None, place=str(entry.place), findings=findings))
    valid = not any(item.state == "problem" for one in sites for item in one.findings)
    formats.show(DataCheck(valid=valid, sites=tuple(sites)))
    raise typer.Exit(0 if valid else 1)


def read_contract(path: Path) -> Contract:
    """Return the contract of a file.

    Raises:
        JobError: TF-101, listing all problems.
    """
    from tightframe_app.jobs import pairs

    values = pairs.read_contract(path)
    return pairs.form_of(values).model_validate(values)


def entries(config: Path, site: str | None, contract: Contract) -> list[tuple[str, TableSite]]:
    """Return the entries for a contract's data in a configuration of one or several sites.

    Raises:
        FileNotFoundError, SiteConfigError: if there is no file, no such site, or no such entry in it.
    """
    return [(name, entry) for name, entry, _ in with_policies(config, site, contract)]


def _valid_entries(config: Path, site: str | None, contract: Contract) -> list[tuple[str, TableSite]]:
    """Return the individually valid entries of a file for several sites."""
    from tightframe.config.site import parse_site_file, read_object

    sites, entries = read_object(config).get("sites"), []
    for name, entry in sites.items() if isinstance(sites, dict) else ():
        try:
            valid = parse_site_file({"sites": {name: entry}}, str(config)).sites
            entries += _of_kind(valid, site, contract)
        except SiteConfigError:
            continue  # the whole file's error names it
    return [(name, entry) for name, entry, _ in entries]


def with_policies(
    config: Path, site: str | None, contract: Contract
) -> list[tuple[str, TableSite, PolicyBlock]]:
    """Return ``entries``, each with its site's policy.

    Raises:
        FileNotFoundError, SiteConfigError: as ``entries``.
    """
    from tightframe.config.site import parse_single, parse_site_file, read_object
    from tightframe.data.images.contract import PictureContract

    if not config.is_file():
        raise FileNotFoundError(f"Expected the site's configuration at {config}, but there is no such file.")
    values = read_object(config)
    if "sites" in values:
        several = parse_site_file(values, str(config)).sites
    else:
        several = {site or "": parse_single(values, str(config))[0]}
    tables = _of_kind(several, site, contract)
    if not tables:
        key = "images" if isinstance(contract, PictureContract) else "table"
        raise SiteConfigError(
            f"Expected {config} to have an entry `{key}` in `data`{f' of {site}' if site else ''}, but has "
            "none.",
            code="TF-201",
        )
    return tables


def _of_kind(
    several: Mapping[str, SiteEntry], site: str | None, contract: Contract
) -> list[tuple[str, TableSite, PolicyBlock]]:
    """Return the entries of a contract's kind, of one site or of all."""
    from tightframe.data.images import ImagesSite
    from tightframe.data.images.contract import PictureContract
    from tightframe.data.table import TableSite

    pictures = isinstance(contract, PictureContract)
    key, model = ("images", ImagesSite) if pictures else ("table", TableSite)
    return [
        (name, model.model_validate(entry.data[key]), entry.policy)
        for name, entry in several.items()
        if site in (None, name) and key in entry.data
    ]


def _possible_rows(contract: Contract, data: TableData) -> tuple[int, dict[str, float]] | None:
    """Return the bits that a row needs by ``standard``, and at most has here by column; None if they suffice.

    For a job's exact sums the site counts again, without values by which few patients stand out.
    """
    import torch

    from tightframe.config.profiles import PROFILES
    from tightframe.learning.few_records.record_values import column_bits

    inputs, least = torch.from_numpy(data.features("train")), PROFILES["standard"]["min_row_bits"]
    bits = column_bits([(inputs, torch.zeros(len(inputs)))], contract.widths)
    if not len(inputs) or sum(bits) >= least:
        return None
    return least, {column.column: number for column, number in zip(contract.columns, bits, strict=True)}


def _checked(name: str, contract: Contract, entry: TableSite, by_site: dict[str, Sequence[int]]) -> bool:
    """Print one site's findings; return whether it can take part.

    Args:
        by_site: filled with the patients of the site's training records by class.
    """
    out.print(Text(f"{name}: {entry.place}" if name else entry.place, style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    good = True
    patients: list[int] = []
    for state, text in _findings(contract, entry, patients):
        good = good and state != "problem"
        style = {"ok": "green", "note": "yellow", "problem": "bold red"}[state]
        table.add_row(Text(state, style=style), "\n".join(map(shown, text.splitlines())))
    by_site[name] = patients
    console(WIDTH).print(table)
    return good


def _findings(contract: Contract, entry: TableSite, patients: list[int]) -> Iterator[tuple[State, str]]:
    """Yield all findings; unreadable data is the last one."""
    try:
        yield from _readable_findings(contract, entry, patients)
    except DataError as error:
        yield "problem", str(error)


def _readable_findings(
    contract: Contract, entry: TableSite, patients: list[int]
) -> Iterator[tuple[State, str]]:
    """Yield the findings with states, last the number of records, if any.

    Args:
        patients: filled with the patients of training records by class, if the label has classes.
    """
    import numpy as np

    from tightframe.data.base import (
        FOLDS,
        class_counts,
        class_patients,
        count_table,
        finding_counts,
        unknown_counts,
    )
    from tightframe.data.contract import MultiLabel
    from tightframe.data.images import ImagesSite
    from tightframe.data.images.contract import PictureContract
    from tightframe.data.images.silo import divided_pictures, encoded_records
    from tightframe.data.table.encoding import (
        SHOWN_ROWS,
        advice,
        check_mapping,
        encode,
        narrow,
        no_numbers,
        other_mark,
        unknown_codes,
    )
    from tightframe.data.table.silo import divided, read

    try:
        check_mapping(contract, entry)
    except DataError as error:
        yield "problem", str(error)
    if isinstance(contract, PictureContract):
        assert isinstance(entry, ImagesSite)  # noqa: S101 - `entries` took the contract's kind
        rows, encoded, _ = encoded_records(contract, entry)
    else:
        rows = read(contract, entry)
        encoded = encode(rows, contract, entry)
    aside = entry.invalid == "set_aside"
    for finding in encoded.findings:
        yield ("note" if aside else "problem"), f"{finding}{'; set aside' if aside else ''}"
    if isinstance(entry, ImagesSite) and isinstance(contract, PictureContract) and entry.layout == "folders":
        paths = rows.cells[contract.picture.column]
        for row in sorted({row for finding in encoded.findings for row in finding.rows[:SHOWN_ROWS]}):
            yield "note", f"row {row} is {paths[row - 1]}"
    if (timed := contract.survival) is not None and any(
        item.column == timed.time and item.rule.startswith("outside") for item in encoded.findings
    ):
        yield "note", f"{timed.time}: longer than `high`? Raise it, or end curves there by `beyond`: `censor`"
    if marked := other_mark(rows, contract, entry):
        mark = "." if entry.decimal == "," else ","
        yield "note", f"most values of {', '.join(marked)} are numbers with {mark!r}: is that the `decimal`?"
    narrow_ones = {} if isinstance(contract, PictureContract) else narrow(encoded, contract)
    for column, part in narrow_ones.items():
        yield (
            "note",
            f"{column}: all values lie in {part:.2%} of the contract's range: another unit (`units`)?",
        )
    for column, texts in no_numbers(rows, contract, entry).items():
        for do in sorted(set(map(advice, texts))):
            similar = [text for text in texts if advice(text) == do]
            examples = ", ".join(map(repr, similar[:5])) + (", ..." if len(similar) > 5 else "")
            yield "note", f"{column}: no number: {examples}; {do}"
    for column, codes in unknown_codes(rows, contract, entry).items():
        if "" in codes:
            yield "note", f"{column}: no text at all: have '' in `missing`, too, if that means no value"
        if not (others := [code for code in codes if code]):
            continue
        examples = ", ".join(map(repr, others[:20])) + (", ..." if len(others) > 20 else "")
        yield (
            "note",
            f"{column}: not in the contract: {examples}; map them in `codes`, if they mean what it has",
        )
    if encoded.findings and not aside:
        yield "note", 'correct these rows, or leave them out: "invalid": "set_aside" in the site\'s entry'
        return
    if isinstance(contract, PictureContract):
        data = divided_pictures(encoded, contract)
    else:
        data = divided(encoded, contract)
        if (possible := _possible_rows(contract, data)) is not None:
            least, bits = possible
            largest = sorted(bits, key=lambda name: -bits[name])[:SHOWN_COLUMNS]
            most = ", ".join(f"{name} {bits[name]:.1f}" for name in largest)
            yield (
                "note",
                f"at most 2 to the {sum(bits.values()):.1f} rows are possible here, most by {most}; "
                f"a job without `privacy` needs 2 to the {least} (TF-628)",
            )
    sizes = ", ".join(f"{len(data.labels(fold))} {fold}" for fold in FOLDS)
    labels, titles = data.labels("train"), contract.label.titles
    everywhere = np.concatenate([data.labels(fold) for fold in FOLDS])
    if isinstance(contract.label, MultiLabel):
        lacking = np.flatnonzero(~(everywhere == 1).any(axis=0))
    else:
        lacking = np.setdiff1d(np.arange(len(titles)), everywhere)
    if len(lacking):
        yield "note", f"no record of {', '.join(repr(titles[place]) for place in lacking)} here"
    if isinstance(contract.label, MultiLabel):
        of_findings = zip(
            finding_counts(labels).tolist(), unknown_counts(labels, titles).items(), strict=True
        )
        classes = "; ".join(
            f"{title} {present} present, {absent} absent" + (f", {unknown} unknown" if unknown else "")
            for (present, absent), (title, unknown) in of_findings
        )
    else:
        patients += class_patients(data, labels, len(titles)).tolist()
        classes = count_table(dict(zip(titles, class_counts(labels, len(titles)).tolist(), strict=True)))
    yield "ok", f"{len(rows.numbers) + len(rows.ragged)} rows, {sizes} records (training: {classes})"
