"""A silo's own report, ``local_report.json``: exact results on its own records, which never leave it."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from tightframe.results.files import LOCAL, ResultFile, Values
from tightframe.results.parts.dropouts import Lost
from tightframe.results.parts.evaluation import Evaluation, OneAnswer


class SiloRecords(Values):
    """Records of each class in each fold.

    Attributes:
        train, validation, test: by class, or by finding, of which a record may have several.
        folds: number of all records, if they have findings.
        unknown: fold -> finding -> number of records in which it is unknown, if any.
    """

    train: dict[str, int]
    validation: dict[str, int]
    test: dict[str, int]
    folds: dict[str, int] | None = None
    unknown: dict[str, dict[str, int]] | None = None

    @model_serializer(mode="wrap")
    def _omit_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the keys that only records with findings have."""
        return {key: value for key, value in handler(self).items() if value is not None}

    def together(self, fold: str) -> int:
        """Return the number of records of a fold."""
        of_class: dict[str, int] = getattr(self, fold)
        return sum(of_class.values()) if self.folds is None else self.folds[fold]


class SiloModel(Values):
    """The model that a silo trained: a backbone's name and its options."""

    model: str
    model_options: dict[str, Any] = {}


class Baseline(Evaluation):
    """The model that a silo trained on its own records alone."""

    epochs: int


class SiloPersonal(Values):
    """A silo's personal model on its own test records.

    Attributes:
        model_sha256: of its file.
        confusion: (C, C), rows are true classes; None if records have findings.
        findings: (2, 2) of each finding, rows absent and present; None if records have one class.
        one_answer: set if the model always gives one answer.
        accuracy: 0 if ``silos`` is 0, as the silo has no test records.
        valid_classes, label_share: PM(V) and PM(L); 0 if ``judged`` is 0.
        silos, judged: 1 if the silo counts in the means over silos.
    """

    model_sha256: str
    confusion: list[list[int]] | None = None
    findings: list[list[list[int]]] | None = None
    one_answer: OneAnswer | None = None
    accuracy: float
    silos: float
    valid_classes: float
    label_share: float
    judged: float

    @property
    def recalls(self) -> list[float | None]:
        """Recall of each class, or sensitivity of each finding; None without such records."""
        if self.findings is not None:
            return [_share(table[1], 1) for table in self.findings]
        return [_share(row, place) for place, row in enumerate(self.confusion or [])]

    @property
    def balanced_accuracy(self) -> float | None:
        """Mean recall over classes with records; for findings the mean of sensitivity and specificity."""
        shares = self.recalls
        if self.findings is not None:
            rows = [(table[0], table[1]) for table in self.findings if any(table[0]) and any(table[1])]
            shares = [_share(row, place) for pair in rows for place, row in enumerate(pair)]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if known else None


def _share(row: list[int], place: int) -> float | None:
    return row[place] / sum(row) if place < len(row) and any(row) else None


class SiloPrivacy(Values):
    """Exact privacy cost of a job for a silo's records, by accountant.

    Attributes:
        epsilon: guaranteed.
        rdp, pld, prv, exact: by one accountant.
        delta, promised: of the job.
        alone: guaranteed epsilon if no other silo adds noise; None if it does not rely on others' noise.
        exact_jobs: number of jobs at this silo that released exact totals, which no epsilon counts; None in
            older files.
    """

    epsilon: float
    rdp: float | None = None
    pld: float | None = None
    prv: float | None = None
    exact: float | None = None
    delta: float
    promised: float
    alone: float | None = None
    exact_jobs: int | None = None


class SentTerms(Values):
    """Terms that a silo made for the sums of one kind of exchange.

    Attributes:
        kind: of the exchange, ``train`` for instance.
        times: number of terms, repeated ones included.
        numbers: count of numbers in each term, by field name up to its slash.
        bytes: of all these terms, encoded.
        terms_with: number of terms with such numbers, by the same names; empty in older files.
    """

    kind: str
    times: int
    numbers: dict[str, int]
    bytes: int
    terms_with: dict[str, int] = Field(default_factory=dict)


class Disclosure(Values):
    """Terms that left a silo in a job and in those that it resumes, with the silos summed and the policy.

    Attributes:
        masked: whether its terms were masked, so that the server could open only totals.
        silos: in the sums.
        policy: the site's, in one line.
        weights: rule of the public weight that the silo declared.
        sent: its terms.
        evaluated: what the job's exact evaluations disclose of its records, in words, with the site's limits
            over all jobs.
    """

    masked: bool
    silos: tuple[str, ...]
    policy: str
    weights: str
    sent: tuple[SentTerms, ...] = ()
    evaluated: tuple[str, ...] = ()


class SiloReport(ResultFile):
    """``local_report.json``.

    Attributes:
        silo: its name.
        data: its records in one line; ``synthetic`` if they are generated.
        records: numbers by class and fold.
        model_sha256: of ``model.safetensors``: the final model.
        final: metrics of the final model on the silo's own records (``global`` in the file).
        own_model: whether the final model is the silo's own, as there is no global one.
        model: the backbone that the silo trained.
        lost: silos missing at the end, as the server reported; ``notes``: the consequences.
        local_only: metrics of the model trained on the silo's own records alone.
        personal: results of the personal model.
        privacy: the job's privacy cost for the silo's records.
        disclosed: what left the silo; None in older files.
        job: the job's plain values, to load the silo's models with; empty in older files.
        classes: names, in the order of the models' outputs.
    """

    NAME = LOCAL

    silo: str
    data: str
    synthetic: bool
    records: SiloRecords
    model_sha256: str
    final: Evaluation = Field(validation_alias="global", serialization_alias="global")
    own_model: bool = False
    model: SiloModel | None = None
    lost: dict[str, Lost] = {}
    notes: tuple[str, ...] = ()
    local_only: Baseline | None = None
    personal: SiloPersonal | None = None
    privacy: SiloPrivacy | None = None
    disclosed: Disclosure | None = None
    job: dict[str, Any] = {}
    classes: list[str] = []
