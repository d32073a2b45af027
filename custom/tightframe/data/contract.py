"""The data contract: what every silo's records of a job must be, whatever their files look like.

A contract is part of the *job* (``dataset_options``), the same at all silos; where the records lie, and what
columns and codes are called there, is the *site's* own (``data.table``). It is public: ranges, levels and
classes must not be taken from the records of a silo without thought. Torch-free.

No key of it may be called ``name``, ``path``, ``class_path`` or ``config_type``, from which the engine would
build an object, and no text may hold a brace, in whose place it would put variables of its environment.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

from tightframe.options import UNION_TAG, StrictModel

Kind = Literal["number", "category", "boolean"]
Missing = Literal["refuse", "fill", "indicator"]

MAX_COLUMNS = 4096
MAX_LEVELS = 256
SHARES = (0.7, 0.15, 0.15)
FOLD_CODES = ("train", "validation", "test")
_LARGEST = 1e30
_DATE = (
    "Expected number, category or boolean, but got 'date': a date is no measurement, and may show who the "
    "patient is; give an age or a number of days instead"
)
_MULTI_LABEL = (
    "Expected one `label`: of a record with several findings (multi-label) each is an entry of the label's "
    "`findings`, with its column"
)
MAX_FINDINGS = 100


def _text(value: str) -> str:
    if not value or value != value.strip() or len(value) > 200 or not value.isprintable():
        raise ValueError("Expected 1 to 200 printable characters, without spaces around them")
    if "{" in value or "}" in value:
        raise ValueError("Expected no braces, in whose place the engine would put its own variables")
    return value


Text = Annotated[str, AfterValidator(_text)]
Bound = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


class Column(StrictModel):
    """A measurement of every record.

    A number becomes ``2 (x - low) / (high - low) - 1``, in [-1, 1] at every silo; a boolean 0 or 1; a
    category one value for each level but the first, the reference: 1 where the record has that level.

    Attributes:
        column: its name in the contract.
        kind: ``number``, ``category`` or ``boolean``.
        unit: of a number; a site with another one converts it.
        low, high: range of a number, limits included; a value outside breaks the contract.
        vocabulary: levels of a category; the first is the reference.
        missing: ``refuse``: a record without a value breaks the contract; ``fill``: it counts as ``fill``;
            ``indicator``: the same, and a further column is 1 (for a category: a level of its own).
        fill: in place of a missing value; by default the middle of a number's range.
    """

    column: Text
    kind: Kind
    unit: Text | None = None
    low: Bound | None = None
    high: Bound | None = None
    vocabulary: Annotated[tuple[Text, ...], Field(strict=False, max_length=MAX_LEVELS)] = ()
    missing: Missing = "refuse"
    fill: bool | float | Text | None = None

    @field_validator("kind", mode="before")
    @classmethod
    def _is_no_date(cls, value: Any) -> Any:
        if value in ("date", "datetime", "time", "timestamp"):
            raise ValueError(_DATE)
        return value

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Column:
        allowed = {"number": ("unit", "low", "high"), "category": ("vocabulary",), "boolean": ()}[self.kind]
        own = {"unit": self.unit, "low": self.low, "high": self.high, "vocabulary": self.vocabulary or None}
        problems = [f"no {key}" for key, value in own.items() if value is not None and key not in allowed]
        if self.kind == "number":
            if self.low is None or self.high is None or not self.low < self.high:
                problems.append("a range: `low` below `high`, the limits of what is possible")
        elif self.kind == "category" and not 2 <= len(set(self.vocabulary)) == len(self.vocabulary):
            problems.append("a `vocabulary` of at least two levels, each once")
        if problem := self._fill_problem():
            problems.append(problem)
        if problems:
            raise ValueError(f"Expected the {self.kind} {self.column!r} to have {'; '.join(problems)}")
        return self

    def _fill_problem(self) -> str:
        if self.missing == "refuse" or (self.missing == "indicator" and self.kind != "number"):
            return "" if self.fill is None else f"no `fill` with missing {self.missing!r}"
        if self.kind == "number":
            if self.fill is None:
                return ""
            inside = isinstance(self.fill, float) and self.low is not None and self.high is not None
            good = inside and self.low <= self.fill <= self.high  # type: ignore[operator]
            return "" if good else "a number in its range as `fill`"
        if self.kind == "boolean":
            return "" if isinstance(self.fill, bool) else "true or false as `fill`"
        return "" if self.fill in self.vocabulary else "a level as `fill`"

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the values that a record gets from this column."""
        own = [self.column]
        if self.kind == "category":
            own = [f"{self.column} = {level}" for level in self.vocabulary[1:]]
        return (*own, *([f"{self.column} missing"] if self.missing == "indicator" else []))

    @property
    def formulas(self) -> tuple[str, ...]:
        """Formula of each of these values, in words."""
        without = ""
        if self.kind == "number":
            assert self.low is not None and self.high is not None  # noqa: S101 - checked above
            unit = f" in {self.unit}" if self.unit else ""
            scaled = f"2 * (x - {self.low!r}) / ({self.high!r} - {self.low!r}) - 1, x: {self.column}{unit}"
            if self.missing != "refuse":
                fill = (self.low + self.high) / 2 if self.fill is None else self.fill
                without = f"; without a value x = {fill!r}"
            own = [scaled + without]
        elif self.kind == "boolean":
            without = f"; without a value {int(bool(self.fill))}" if self.missing != "refuse" else ""
            own = [f"1 if true, 0 if false{without}"]
        else:
            if self.missing != "refuse":
                without = f"; without a value as {self.fill or self.vocabulary[0]}"
            own = [f"1 if {level}, else 0{without}" for level in self.vocabulary[1:]]
        return (*own, *(["1 without a value, else 0"] if self.missing == "indicator" else []))


class Class(StrictModel):
    """A class of the label.

    Attributes:
        code: in the records.
        title: in reports; the code by default.
    """

    code: Text
    title: Text | None = None


class Label(StrictModel):
    """Label with one class for each record.

    Attributes:
        column: of the codes.
        classes: in label order; of two, the second is the positive one. A list: the order of a mapping is in
            no hash of a job.
    """

    column: Text
    classes: Annotated[tuple[Class, ...], Field(strict=False, min_length=2, max_length=1000)]

    @model_validator(mode="after")
    def _each_once(self) -> Label:
        for what, values in (
            ("code", [item.code for item in self.classes]),
            ("title", list(self.titles)),
        ):
            if len(set(values)) != len(values):
                raise ValueError(f"Expected classes with a {what} each of its own")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The one column."""
        return (self.column,)

    @property
    def titles(self) -> tuple[str, ...]:
        """Names of the classes in reports."""
        return tuple(item.title or item.code for item in self.classes)


class FindingColumn(StrictModel):
    """One finding of a multi-label: a column of booleans, true where a record has it.

    Attributes:
        column: of true and false (also yes, no, 1, 0).
        title: in reports; the column by default.
        missing: ``refuse``: a record without a value breaks the contract; ``absent``: it counts as false,
            which is right only where nobody writes down what is not there; ``unknown``: the record takes no
            part in what is learned and measured of this finding.
    """

    column: Text
    title: Text | None = None
    missing: Literal["refuse", "absent", "unknown"] = "refuse"


class MultiLabel(StrictModel):
    """Label with findings, each present or absent independently of the others.

    Attributes:
        findings: in label order.
    """

    findings: Annotated[tuple[FindingColumn, ...], Field(strict=False, min_length=2, max_length=MAX_FINDINGS)]

    @model_validator(mode="after")
    def _each_once(self) -> MultiLabel:
        for what, values in (("column", list(self.columns)), ("title", list(self.titles))):
            if len(set(values)) != len(values):
                raise ValueError(f"Expected findings with a {what} each of its own")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the findings."""
        return tuple(item.column for item in self.findings)

    @property
    def titles(self) -> tuple[str, ...]:
        """Names of the findings in reports."""
        return tuple(item.title or item.column for item in self.findings)


class Survival(StrictModel):
    """Time to an event, for statistics alone: no model learns from these columns.

    Attributes:
        time: column of the time from the beginning to the event or to the end of observation.
        event: column of booleans: whether the event happened at that time.
        high: the longest time that is possible; 0 is the shortest.
        unit: of the time; a site with another unit converts it.
        beyond: ``refuse``: a longer time breaks the contract; ``censor``: it counts as ``high`` without the
            event, so that curves end there.
    """

    time: Text
    event: Text
    high: Annotated[float, Field(gt=0, le=_LARGEST)]
    unit: Text | None = None
    beyond: Literal["refuse", "censor"] = "refuse"

    @model_serializer(mode="wrap")
    def _as_made(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the default of ``beyond``, so that contracts keep their hash."""
        return {key: item for key, item in handler(self).items() if key != "beyond" or item != "refuse"}

    @property
    def columns(self) -> tuple[Column, Column]:
        """Both as columns, without missing values."""
        time = Column(column=self.time, kind="number", unit=self.unit, low=0.0, high=self.high)
        return time, Column(column=self.event, kind="boolean")

    def ends(self, bins: int) -> tuple[float, ...]:
        """Return the ends of bins of one width."""
        return tuple(self.high * (place + 1) / bins for place in range(bins))


def _kind_of_label(value: Any) -> str:
    several = "findings" in value if isinstance(value, dict) else isinstance(value, MultiLabel)
    return f"{UNION_TAG}findings" if several else f"{UNION_TAG}classes"


AnyLabel = Annotated[
    Annotated[Label, Tag(f"{UNION_TAG}classes")] | Annotated[MultiLabel, Tag(f"{UNION_TAG}findings")],
    Discriminator(_kind_of_label),
]


class Folds(StrictModel):
    """The column that says in which fold a record is: ``train``, ``validation`` or ``test``.

    Attributes:
        column: of the folds.
        validation: part of the training fold that becomes validation, stratified, by a fixed hash; None if
            the column has that fold.
    """

    column: Text
    validation: float | None = Field(default=None, gt=0, le=0.5)


class Contract(StrictModel):
    """Contract of a table's records.

    Attributes:
        title: of the data, for reports.
        columns: in the order of the record's values.
        label: what is learned, a class or several findings.
        record: column with a unique name for each record, by which a site can withdraw it.
        patient: column of each record's patient; all records of a patient are in one fold.
        fold: column of the folds; by default a fixed hash of patient, record or content decides.
        shares: of train, validation and test, where the hash decides.
        survival: time to an event, for statistics.
    """

    title: Text
    columns: Annotated[tuple[Column, ...], Field(strict=False, min_length=1, max_length=MAX_COLUMNS)]
    label: AnyLabel
    record: Text | None = None
    patient: Text | None = None
    fold: Folds | None = None
    shares: Annotated[tuple[float, float, float], Field(strict=False)] = SHARES
    survival: Survival | None = None

    @model_serializer(mode="wrap")
    def _as_made(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out a missing ``survival``, so that contracts keep the hash that sites have pinned."""
        return {key: item for key, item in handler(self).items() if key != "survival" or item is not None}

    @model_validator(mode="before")
    @classmethod
    def _has_one_label(cls, values: Any) -> Any:
        if isinstance(values, dict) and ("labels" in values or isinstance(values.get("label"), list)):
            raise ValueError(_MULTI_LABEL)
        return values

    @model_validator(mode="after")
    def _is_consistent(self) -> Contract:
        measured = [item.column for item in self.columns]
        problems = [f"column {twice!r} once" for twice in sorted(_repeated(measured))]
        roles = {"record": self.record, "patient": self.patient}
        roles["fold"] = None if self.fold is None else self.fold.column
        if self.survival is not None:
            roles |= {"time": self.survival.time, "event": self.survival.event}
        labels = self.label.columns
        for role, column in [*(("label", name) for name in labels), *roles.items()]:
            if column in measured:
                problems.append(f"{column!r} as {role} and not among `columns`, from which the model learns")
        # A record may be a patient; no other column has two roles.
        once = {role: column for role, column in roles.items() if column is not None}
        if self.record == self.patient:
            once.pop("record", None)
        all_roles = [*labels, *once.values()]
        problems += [f"one role for the column {twice!r}" for twice in sorted(_repeated(all_roles))]
        if min(self.shares) <= 0 or not math.isclose(sum(self.shares), 1.0, abs_tol=1e-9):
            problems.append("`shares` above 0 that add up to 1")
        if self.fold is not None and self.shares != SHARES:
            problems.append("no `shares` where a column has the fold")
        if problems:
            raise ValueError(f"Expected {'; '.join(problems)}")
        return self

    @property
    def features(self) -> tuple[str, ...]:
        """Names of a record's values, in order."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of a record's values from each column."""
        return tuple(len(column.features) for column in self.columns)

    @property
    def formulas(self) -> tuple[str, ...]:
        """Formula of each of a record's values, in the same order."""
        return tuple(formula for column in self.columns for formula in column.formulas)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Every column that a site must have, by its name in the contract."""
        fold = None if self.fold is None else self.fold.column
        timed = () if self.survival is None else (self.survival.time, self.survival.event)
        others = (*self.label.columns, self.record, self.patient, fold, *timed)
        named = [item.column for item in self.columns] + [item for item in others if item is not None]
        return tuple(dict.fromkeys(named))

    def sha256(self) -> str:
        """Return the SHA-256 of the canonical JSON, by which a site can pin a contract."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _repeated(names: list[str]) -> set[str]:
    return {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
