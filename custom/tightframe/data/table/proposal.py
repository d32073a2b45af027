"""Propose a contract from a file, with the decisions left to a person. Torch-free, pandas-free.

Ranges are rounded outwards, because a contract is public, and the smallest and the largest value belong to
records.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tightframe.data.contract import MAX_COLUMNS, Contract
from tightframe.data.table import CSV_ENDINGS, PARQUET_ENDINGS, TableSite
from tightframe.data.table.encoding import BOOLEANS, DATE, is_number, rows_in_words
from tightframe.data.table.sources.rows import Cells, in_utf16, read_all, text_header
from tightframe.errors import DataError
from tightframe.options import listed

MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")
MOST_LEVELS = 20
FEW_NUMBERS = 5
MOST_CLASSES = 20
FEW_OF_CLASS = 5
"""Least records of a class without a note on its code."""
_TIME = re.compile(
    r"(^|[\W_])(time|days|weeks|months|years|follow[\W_]?up|survival|os|pfs|dfs|efs)([\W_]|$)", re.I
)
_EVENT = re.compile(
    r"(^|[\W_])(event|died|dead|death|deceased|relapsed?|recurrence|progressed|progression)([\W_]|$)", re.I
)
_PATIENT = re.compile(
    r"(^|[\W_])(patient|patients|subject|person|mrn|pat|pid)([\W_]?(id|no|nr|key|number))?$", re.I
)
_ROLES = ("label", "record", "patient", "fold")


@dataclass(frozen=True)
class Proposal:
    """A contract and an entry for the file that they come from.

    Attributes:
        contract: values of the contract, which is valid.
        site: values of the site's entry.
        notes: decisions left to a person, one sentence each.
    """

    contract: dict[str, Any]
    site: dict[str, Any]
    notes: tuple[str, ...]


def propose(
    path: Path,
    roles: Mapping[str, str | None],
    *,
    title: str | None = None,
    missing: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> Proposal:
    """Propose a contract from a file.

    Args:
        roles: ``label``, a column of classes, or several of findings, with commas; and where there are such
            columns ``record``, ``patient``, ``fold``.
        title: of the data; the file's stem by default.
        missing: texts for a missing value here, besides ``MISSING``.
        ignored: columns that the contract leaves out.

    Raises:
        DataError: TF-204 to TF-208 if the file cannot be read, has no such columns, more columns than a
            contract may have, or none to learn from.
    """
    entry = guessed(path)
    marks = [*MISSING, *missing]
    site = TableSite.model_validate({**entry, "missing": marks})
    header, cells, ragged = read_all(site, MAX_COLUMNS + len(_ROLES))
    chosen = {role: column for role, column in roles.items() if column is not None and role != "label"}
    labels = label_columns(roles["label"] or "", header)
    require_columns(path, header, (*labels, *chosen.values(), *ignored))
    notes: list[str] = []
    made_label, about_label = label_of(labels, cells)
    columns = []
    for column in header:
        if column in labels or column in chosen.values() or column in ignored:
            continue
        described, remarks = _column(column, cells[column], site.decimal)
        columns += [described] if described else []
        notes += remarks
    notes += _survival(columns)
    if not columns:
        raise DataError(f"Expected {path} to have columns to learn from, but it has none.", code="TF-208")
    contract: dict[str, Any] = {
        "title": title or path.name.partition(".")[0],
        "columns": columns,
        "label": made_label,
        **{role: chosen[role] for role in ("record", "patient") if role in chosen},
        **({"fold": {"column": chosen["fold"]}} if "fold" in chosen else {}),
    }
    try:
        Contract.model_validate(contract)
    except ValidationError as error:
        listed_problems = "".join(f"\n  - {line}" for line in listed(error, "contract.", Contract))
        raise DataError(
            f"Expected names and codes in {path} that a contract can have, but{listed_problems}",
            code="TF-204",
        ) from None
    used = sorted({cell for cell in _raw(site) if cell in marks} - {""})
    first = [
        *([] if title else [about_title(contract["title"])]),
        *about_label,
        "Ranges are this file's, rounded outwards, and vocabularies are this file's levels: a contract is "
        "public, so put in their place what is possible, and what the other sites have.",
    ]
    if ragged:
        first.append(
            "Another number of cells than the header, which breaks the contract, and is left out here: "
            f"{rows_in_words(ragged)}. Correct them, or let the entry set them aside (`invalid`)."
        )
    if {"patient", "fold"} <= chosen.keys():
        first += _in_two_folds(cells[chosen["patient"]], cells[chosen["fold"]])
    if "patient" not in chosen:
        named = may_tell_patients(header, labels)
        first.append(
            f"No column names the patient (--patient{named}): records of one patient may then lie in "
            "different folds, and no job can hide patients."
        )
    return Proposal(contract, {**entry, "missing": ["", *used]}, (*first, *notes))


def may_tell_patients(header: Sequence[str], labels: Sequence[str]) -> str:
    """Name columns that may identify the patient, by their names; empty if there are none.

    >>> may_tell_patients(["patient_id", "age", "patient_died"], ["patient_died"])
    '; by its name `patient_id` may'
    """
    named = [name for name in header if name not in labels and _PATIENT.search(name)]
    which = " or ".join(f"`{name}`" for name in named[:3])
    return f"; by {'its name' if len(named) == 1 else 'their names'} {which} may" if named else ""


def _in_two_folds(patients: Cells, folds: Cells) -> list[str]:
    """Return the note on patients with records in several folds, if there are any."""
    of: dict[str, set[str | None]] = {}
    for patient, fold in zip(patients, folds, strict=True):
        if patient is not None:
            of.setdefault(patient, set()).add(fold)
    count = sum(len(folds) > 1 for folds in of.values())
    return [f"In several folds, which no job takes (TF-216): {count} of {len(of)} patients."] * bool(count)


def about_title(title: str) -> str:
    """Return the note on a title that is a file's or folder's name."""
    return f"title: {title!r}, the file's name, will stand in the job and in every report. Name the data."


def require_columns(path: Path, header: Sequence[str], wanted: Iterable[str]) -> None:
    """Refuse columns that a file does not have.

    Raises:
        DataError: TF-204.
    """
    if unknown := sorted(set(wanted) - set(header)):
        raise DataError(
            f"Expected {path} to have the columns {unknown}, but it has {', '.join(header[:40])}"
            f"{', ...' if len(header) > 40 else ''}."
            f"{' Is its first line a record, not names?' if any(map(is_number, header)) else ''}",
            code="TF-204",
        )


def label_columns(label: str, header: Sequence[str]) -> list[str]:
    """Return the columns of a label; a column may have a comma in its own name."""
    return [label] if label in header else [name.strip() for name in label.split(",")]


def label_of(labels: Sequence[str], cells: Mapping[str, Cells]) -> tuple[dict[str, Any], list[str]]:
    """Return a label of the classes in one column, or of findings in several, and the open decisions.

    Raises:
        DataError: TF-207.
    """
    return _findings(labels, cells) if len(labels) > 1 else _classes(labels[0], cells[labels[0]])


def _classes(label: str, cells: Cells) -> tuple[dict[str, Any], list[str]]:
    """Return a label of classes, and the open decisions."""
    classes = label_classes(label, cells)
    second = f"; {classes[1]} is the positive one" if len(classes) == 2 else ""
    note = (
        f"{label}: the classes are {', '.join(classes)}, in this order{second}. Give them titles, and see "
        "that no column discloses the label or comes after it in time."
    )
    notes, counts = [note], Counter(cells)
    few = [f"{code} ({counts[code]})" for code in classes if counts[code] < FEW_OF_CLASS]
    if 0 < len(few) < len(classes):
        notes.append(
            f"{label}: {', '.join(few)} of {len(cells)} records: misspelt? Then take it out of the contract, "
            "and map it by `codes` in the site's entry."
        )
    return {"column": label, "classes": [{"code": code, "title": code} for code in classes]}, notes


def label_classes(label: str, cells: Cells) -> list[str]:
    """Return the classes in a column, sorted.

    Raises:
        DataError: TF-207 for fewer than 2 or more than 20.
    """
    classes = _levels(cells)
    if not 2 <= len(classes) <= MOST_CLASSES:
        raise DataError(
            f"Expected {label!r} to hold 2 to {MOST_CLASSES} classes, but it holds {len(classes)} different "
            "values: name another column as the label, or one with its classes in it.",
            code="TF-207",
        )
    return classes


def _findings(labels: Sequence[str], cells: Mapping[str, Cells]) -> tuple[dict[str, Any], list[str]]:
    """Return a label of findings, and the open decisions.

    Raises:
        DataError: TF-207 for a column of other values than booleans.
    """
    notes = [
        f"{', '.join(labels)}: each is present or absent, whatever the others are (multi-label). Give them "
        "titles, and make sure that no column gives one of them away or comes after it in time."
    ]
    for label in labels:
        levels = _levels(cells[label])
        if not levels or not {level.lower() for level in levels} <= BOOLEANS.keys():
            raise DataError(
                f"Expected {label!r}, as one of several findings, to hold {', '.join(BOOLEANS)} only, but it "
                f"holds {', '.join(map(repr, levels[:5])) or 'nothing'}: make it booleans, or name one "
                "column with classes as the label.",
                code="TF-207",
            )
        if gone := sum(cell is None for cell in cells[label]):
            notes.append(
                f"{label}: {gone} of {len(cells[label])} records have no value, and break the contract. Take "
                "`missing`: `unknown`, or `absent` only where what is not there is not written down."
            )
    return {"findings": [{"column": label, "title": label} for label in labels]}, notes


def candidates(path: Path) -> list[str]:
    """Return the columns of a file that could be a label: 2 to 20 different values."""
    site = TableSite.model_validate({**guessed(path), "missing": list(MISSING)})
    header, cells, _ = read_all(site, MAX_COLUMNS + len(_ROLES))
    return [column for column in header if 2 <= len(_levels(cells[column])) <= MOST_CLASSES]


def guessed(path: Path) -> dict[str, Any]:
    """Return a site's entry for a file: its delimiter, decimal mark and encoding, as far as detected."""
    entry: dict[str, Any] = {"file": str(path.absolute())}
    if not path.name.lower().endswith(CSV_ENDINGS + PARQUET_ENDINGS):
        known = ", ".join(CSV_ENDINGS + PARQUET_ENDINGS)
        what = "it is a folder" if path.is_dir() else "its name has another ending"
        raise DataError(
            f"Expected a table ({known}) at {path}, but {what}: save an Excel file, or some "
            "rows of a database, as CSV.",
            code="TF-206",
        )
    if not TableSite.model_validate(entry).is_text:
        return entry
    for encoding in ("utf-16",) if in_utf16(path) else ("utf-8", "cp1252"):
        entry |= {} if encoding == "utf-8" else {"encoding": encoding}
        try:
            header = text_header(TableSite.model_validate({**entry, "delimiter": "\x1f"}))
            break
        except DataError:
            if encoding != "utf-8":
                raise
    delimiter = max(",;\t|", key=header.count)
    if header.count(delimiter) and delimiter != ",":
        entry["delimiter"] = delimiter
    if delimiter == ";":
        site = TableSite.model_validate({**entry, "missing": list(MISSING)})
        cells = [cell for cell in _raw(site) if re.fullmatch(r"[+-]?\d+[.,]\d+", cell)]
        if sum("," in cell for cell in cells) > len(cells) / 2:
            entry["decimal"] = ","
    return entry


def _raw(site: TableSite) -> Iterable[str]:
    """Yield every cell of a file unchanged."""
    _, cells, _ = read_all(site.model_copy(update={"missing": ["\0"]}), MAX_COLUMNS + len(_ROLES))
    return (cell or "" for column in cells.values() for cell in column)


def _levels(cells: Cells) -> list[str]:
    """Return the different values of a column, sorted, at most one more than a label's or a category's."""
    levels: set[str] = set()
    for cell in cells:
        if cell is not None:
            levels.add(cell)
        if len(levels) > MOST_LEVELS:
            break
    return sorted(levels, key=lambda text: (not text.isdecimal(), len(text) if text.isdecimal() else 0, text))


def _column(name: str, cells: Cells, decimal: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the proposal for one column, None if it is left out, and the open decisions."""
    texts = [cell for cell in cells if cell is not None]
    left_out = f"{name}: left out: "
    if not texts:
        return None, [left_out + "it has no values."]
    levels, gone = _levels(cells), len(cells) - len(texts)
    missing: dict[str, Any] = {"missing": "indicator"} if gone else {}
    notes = [
        f"{name}: {gone} of {len(cells)} values are missing; the model gets a column for that (`indicator`). "
        "Take `refuse` or `fill` if that is wrong."
    ] * bool(gone)
    if {level.lower() for level in levels} <= BOOLEANS.keys() and len(levels) == 2:
        return {"column": name, "kind": "boolean", **missing}, notes
    if all(is_number(cell, decimal) for cell in texts):
        values = [float(cell.replace(decimal, ".")) for cell in texts]
        if len(set(values)) == 1:
            return None, [left_out + "all its values are the same."]
        low, high = outwards(min(values), max(values))
        if len(set(values)) <= FEW_NUMBERS and all(value.is_integer() for value in values):
            notes.append(
                f"{name}: only {len(set(values))} whole numbers occur. If they are codes, make it a category "
                f"with the vocabulary {levels}."
            )
        notes.append(f"{name}: which `unit`, and what is possible at all? Proposed: {low:g} to {high:g}.")
        return {"column": name, "kind": "number", "low": low, "high": high, **missing}, notes
    if all(DATE.fullmatch(cell) for cell in texts):
        return None, [left_out + "dates; give an age or a number of days."]
    others = sorted({cell for cell in texts if not is_number(cell, decimal)})
    number = sum(is_number(cell, decimal) for cell in texts)
    some = ", ".join(map(repr, others[:3])) + (", ..." if len(others) > 3 else "")
    if len(levels) <= MOST_LEVELS and len(levels) < max(len(texts) / 2, 3):
        if len(levels) == 1:
            return None, [left_out + "all its values are the same."]
        if number > len(texts) / 2:
            notes.append(
                f"{name}: {number} of {len(texts)} values are numbers; does {some} stand for no value? Then "
                "name it in the entry's `missing`, and make the column a number."
            )
        notes.append(
            f"{name}: {levels[0]!r} is the reference, because it is the first level; is it the usual one?"
        )
        return {"column": name, "kind": "category", "vocabulary": levels, **missing}, notes
    if number > len(texts) / 2:
        reason = (
            f"{len(texts) - number} of {len(texts)} values are no numbers ({some}); correct them, or, where "
            "they stand for no value, name them (--missing) and propose again."
        )
    elif len(set(texts)) == len(texts):
        reason = (
            "every value is another one; if it names the record, give --record, if the patient, --patient."
        )
    else:
        reason = f"text with more than {MOST_LEVELS} different values."
    return None, [left_out + reason]


def _survival(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the note on a time to an event, if exactly one number and one boolean have such names."""
    times = [item for item in columns if item["kind"] == "number" and _TIME.search(item["column"])]
    events = [item for item in columns if item["kind"] == "boolean" and _EVENT.search(item["column"])]
    if len(times) != 1 or len(events) != 1 or times[0]["low"] < 0:
        return []
    time, event = times[0]["column"], events[0]["column"]
    value = {"survival": {"time": time, "event": event, "high": times[0]["high"]}}
    return [
        f"{time}, {event}: if the first is the time to the second, take both out of `columns`, because they "
        f"are known afterwards only, and add {json.dumps(value, ensure_ascii=False)[1:-1]} for Kaplan-Meier "
        "curves."
    ]


def outwards(low: float, high: float) -> tuple[float, float]:
    """Return a range around two values with limits of one or two digits, a quarter of their distance away.

    >>> outwards(29, 77), outwards(-0.4, 6.2), outwards(136.0, 145.0)
    ((10.0, 90.0), (-3.0, 8.0), (133.0, 148.0))
    """
    margin = (high - low) / 4
    step = 10.0 ** math.floor(math.log10(high - low + 2 * margin) - 0.3)
    step = step if step < margin * 4 else step / 10
    first = math.floor((low - margin) / step) * step
    last = math.ceil((high + margin) / step) * step
    digits = max(0, -math.floor(math.log10(step)))
    return (max(0.0, round(first, digits)) if low >= 0 else round(first, digits)), round(last, digits)


def notes_text(proposal: Proposal, file: Path) -> str:
    """Return the notes as a text file."""
    lines: Sequence[str] = [f"- {note}" for note in proposal.notes]
    return f"# To decide about the contract proposed from {file.name}\n\n" + "\n".join(lines) + "\n"
