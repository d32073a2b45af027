"""Any table as a data set: the job has the contract, the site's entry the location of its rows.

A job defines the records (``data.contract``); a site maps its own columns, codes and units to them.
Torch-free; what reads rows is imported when it is needed.
"""

from __future__ import annotations

import codecs
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from tightframe.data.base import DatasetSpec, SitePath
from tightframe.data.contract import Contract, MultiLabel
from tightframe.options import StrictModel
from tightframe.registry import deferred

CSV_ENDINGS = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")
PARQUET_ENDINGS = (".parquet",)


class TableOptions(StrictModel):
    """A job's options for a table.

    Attributes:
        contract: what every silo's records are.
    """

    contract: Contract


def _encoding(value: str) -> str:
    try:
        known = codecs.lookup(value)
    except LookupError:
        known = None
    if known is None or not getattr(known, "_is_text_encoding", True):
        raise ValueError(f"Expected the name of an encoding, such as utf-8 or cp1252, but got {value!r}")
    return value


class Unit(StrictModel):
    """Conversion of a column from a site's unit: ``value * factor + offset`` is in the contract's.

    Attributes:
        unit: the site's own, for people.
        factor, offset: of the conversion.
    """

    unit: str = ""
    factor: float
    offset: float = 0.0

    @model_validator(mode="after")
    def _converts(self) -> Unit:
        if self.factor == 0:
            raise ValueError("Expected a factor other than 0, which makes every value the same")
        return self


class Database(StrictModel):
    """The site's own reading query.

    Attributes:
        url_env: environment variable with the database's address, ``postgresql://`` or ``sqlite://``.
        url_file: file with it in its place, closed to others.
        query: one SELECT.
    """

    url_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    url_file: SitePath | None = None
    query: str = Field(min_length=1)

    @model_validator(mode="after")
    def _has_one_address(self) -> Database:
        if (self.url_env is None) == (self.url_file is None):
            raise ValueError(
                "Expected `url_env` or `url_file`, where the database's address is, and not both"
            )
        return self


class TableSite(StrictModel):
    """A site's entry for its table, a file or a query.

    Attributes:
        file: absolute path: ``.csv``, ``.tsv`` or ``.txt`` with a header, also ``.gz``; or ``.parquet``
            (``tightframe[parquet]``).
        database: a query in its place.
        contract: SHA-256 of the one contract that this site takes part with; without it none in production
            (TF-614), but where `class_rules_off` is set, any.
        columns: the site's name of a column -> the contract's, where they differ.
        codes: the contract's column -> the site's code -> the contract's, where they differ; also of classes
            and folds.
        units: the contract's column -> conversion from the site's unit: value * ``factor`` + ``offset`` is in
            the contract's.
        delimiter, encoding, decimal: of a text file.
        missing: texts that mean a missing value; by default the empty one, which a list must repeat.
        invalid: ``refuse`` records that break the contract, and with them the job, or ``set_aside``: leave
            them out, counted and listed in the site's own log.
    """

    file: SitePath | None = None
    database: Database | None = None
    contract: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    columns: dict[str, str] = {}
    codes: dict[str, dict[str, str]] = {}
    units: dict[str, Unit] = {}
    delimiter: str = Field(default=",", min_length=1, max_length=1)
    encoding: Annotated[str, AfterValidator(_encoding)] = "utf-8"
    decimal: Literal[".", ","] = "."
    missing: list[str] = [""]
    invalid: Literal["refuse", "set_aside"] = "refuse"

    @property
    def place(self) -> str:
        """Where the table is, for messages."""
        return "the site's query" if self.file is None else str(self.file)

    @property
    def is_text(self) -> bool:
        """Return True if the table is a text file."""
        return self.file is not None and self.file.name.lower().endswith(CSV_ENDINGS)

    @model_validator(mode="after")
    def _can_be_read(self) -> TableSite:
        if (self.file is None) == (self.database is None):
            raise ValueError("Expected `file` or `database`, and not both")
        if self.file is not None and not self.file.name.lower().endswith(CSV_ENDINGS + PARQUET_ENDINGS):
            known = [*CSV_ENDINGS, *PARQUET_ENDINGS]
            raise ValueError(f"Expected `file` to end in one of {known}, but got {self.file.name!r}")
        if not self.is_text and {"delimiter", "encoding", "decimal"} & self.model_fields_set:
            raise ValueError("Expected no `delimiter`, `encoding` and `decimal` but with a text file")
        if self.delimiter == self.decimal or self.delimiter in '"\r\n':
            raise ValueError("Expected a `delimiter` that is no decimal point, quote or end of a line")
        twice = {name for name in self.columns.values() if list(self.columns.values()).count(name) > 1}
        if twice:
            raise ValueError(
                f"Expected one column of the site for each of the contract, but got two for {twice}"
            )
        return self


def of_contract(spec: DatasetSpec, options: Any) -> DatasetSpec:
    """Return the data set of a contract."""
    contract: Contract = options.contract
    return replace(
        spec,
        title=contract.title,
        class_names=contract.label.titles,
        multi_label=isinstance(contract.label, MultiLabel),
        no_patients="" if contract.patient else "its contract has no column of patients",
    )


SPECS = {
    "table": DatasetSpec(
        name="table",
        title="a table by contract",
        class_names=(),
        options=TableOptions,
        site=TableSite,
        input_shape=lambda options: (len(options.contract.features),),
        open=deferred("tightframe.data.table.silo", "open_site"),
        twin=deferred("tightframe.data.table.twin", "open_twin"),
        num_centers=0,
        columns=lambda options: options.contract.widths,
        form=deferred("tightframe.data.table.encoding", "form"),
        by_options=of_contract,
    ),
}
