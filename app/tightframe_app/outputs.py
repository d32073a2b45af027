"""Output of commands with ``--format json``: a model for each, which defines its schema."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from tightframe.config.profiles import GivenModels
from tightframe.results.status import Status


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]
"""A number; null if there is none, or no finite one."""


class Part(BaseModel):
    """Base of all printed values."""

    model_config = ConfigDict(frozen=True, extra="forbid", from_attributes=True)


class Output(Part):
    """Base of a command's whole output."""

    format: Literal[1] = 1


class Job(Part):
    """A named job."""

    name: str
    title: str
    presets: tuple[str, ...]
    sites: tuple[str, ...]


class Jobs(Output):
    """The jobs that can be exported."""

    jobs: tuple[Job, ...]


class JobFolder(Part):
    """A job folder; traffic of a silo and signature only if it is valid."""

    folder: str
    problems: tuple[str, ...]
    traffic: str | None = None
    signature: str | None = None


class JobFolders(Output):
    """Job folders compared with exports; without folders the committed ones, as one."""

    valid: bool
    folders: tuple[JobFolder, ...]


class MethodPreset(Part):
    """A method's published setting, and the values that ``jobs export --method`` takes from it."""

    printed: str
    source: str
    training: Mapping[str, Any]
    options: Mapping[str, Any]
    own_models: bool
    other: Mapping[str, str]


class MethodEffect(Part):
    """A measured comparison: paired differences over seeds with their 95 % interval, and its command."""

    options: str
    setting: str
    measure: str
    baseline: str
    mean: float
    low: float
    high: float
    seeds: int
    seen: bool
    command: str


class MethodSums(Part):
    """A method and its sums; ``private`` says why it has no form with differential privacy."""

    name: str
    title: str
    paper: str
    sums: int
    upload: int
    upload_once: int
    each_round: tuple[str, ...]
    once: tuple[str, ...]
    private: str | None
    shares_noise: bool
    rounded: bool
    opened: Mapping[str, int]
    follows: str
    own_training: bool
    logits_only: bool
    preset: MethodPreset
    effects: tuple[MethodEffect, ...]


class Methods(Output):
    """Methods with the numbers for one job's data and model."""

    like: str
    methods: tuple[MethodSums, ...]


class CodeExplained(Part):
    """An error code's meaning, what to do, and what leaves a site with it."""

    code: str
    title: str
    means: str
    do: str
    leaves: str


class ValueExplained(Part):
    """A value with its default, as text, and its meaning."""

    name: str
    default: str
    means: str


class TopicExplained(Part):
    """Related values."""

    name: str
    about: str
    values: tuple[ValueExplained, ...]


class Explained(Output):
    """Explanations of words; without words the known ones."""

    codes: tuple[CodeExplained, ...]
    topics: tuple[TopicExplained, ...]
    known: tuple[str, ...]


State = Literal["ok", "note", "problem"]


class Finding(Part):
    """One result of a check."""

    state: State
    text: str


class DataChecked(Part):
    """A site's records against a contract; the site is null in a file of one."""

    site: str | None
    place: str
    findings: tuple[Finding, ...]


class DataCheck(Output):
    """Sites' records against a contract."""

    valid: bool
    sites: tuple[DataChecked, ...]


class Column(Part):
    """A column of the records that fit the contract, or a measure of pictures."""

    name: str
    kind: str
    unit: str | None
    missing: int
    mean: Number
    deviation: Number
    quantiles: tuple[Number, ...]
    names: tuple[str, ...]
    counts: Mapping[str, tuple[int, ...]]


class DataDescribed(Part):
    """A site's records by a contract.

    ``withheld`` has for each column, by number of bins, how many of its cells exact statistics withhold, and
    how many there are; ``curves`` for each class, by number of bins of time, where its curve ends.
    """

    site: str | None
    place: str
    records: Mapping[str, int]
    broken: int
    present: Mapping[str, int]
    unknown: Mapping[str, int]
    findings: tuple[str, ...]
    columns: tuple[Column, ...]
    withheld: Mapping[str, Mapping[int, tuple[int, int]]]
    curves: Mapping[str, Mapping[int, float]]


class DataDescription(Output):
    """Summary of sites' records. Exact numbers: private to the sites.

    ``unreadable`` has the reasons why other sites cannot be shown, by site.
    """

    title: str
    sites: tuple[DataDescribed, ...]
    unreadable: Mapping[str, str]


class SiteFinding(Finding):
    """One result of a site's check; ``of_job`` marks problems for the lead to correct."""

    area: str
    of_job: bool


class SiteCheck(Output):
    """All results of a site's check."""

    valid: bool
    findings: tuple[SiteFinding, ...]


class Cohort(Part):
    """Silos for which counts may be opened; ``job`` is null if a person accepted them."""

    dataset: str
    silos: tuple[str, ...]
    how: Literal["accepted", "opened", "requested"]
    job: str | None


class Cohorts(Output):
    """A site's cohorts."""

    site: str
    cohorts: tuple[Cohort, ...]


class Formed(Part):
    """One way in which sums were formed; ``job`` is null if a person accepted it."""

    dataset: str
    settings: Mapping[str, str]
    job: str | None


class Evaluations(Part):
    """Exact evaluations: number of models, and shares of the folds' content; null without a limit."""

    models: int | None
    validation: float | None
    test: float | None

    @classmethod
    def of(cls, numbers: Sequence[int | None], total: int) -> Evaluations:
        """Return the evaluations of a number of models and of parts, out of ``total`` per fold."""
        models, *folds = numbers
        validation, test = (None if parts is None else parts / total for parts in folds)
        return cls(models=models, validation=validation, test=test)


class EvaluatedSoFar(Part):
    """Exact evaluations of a data set, with the site's limits over all jobs, and what is left."""

    dataset: str
    models: int
    validation: float
    test: float
    allowed: Evaluations
    left: Evaluations


class TrainedSoFar(Part):
    """Exact sums in training on a data set, the share of what records allow that they used, and the rest.

    ``sums_left`` counts sums like the last one. Values without a limit are null.
    """

    dataset: str
    sums: int
    taken: float | None
    left: float | None
    sums_left: int | None

    @classmethod
    def of(cls, dataset: str, sums: int, taken: Fraction | None, sums_left: int | None) -> TrainedSoFar:
        """Return the sums with the used share, and what is left."""
        part, left = (None, None) if taken is None else (float(taken), float(max(Fraction(0), 1 - taken)))
        return cls(dataset=dataset, sums=sums, taken=part, left=left, sums_left=sums_left)


class Releases(Output):
    """Ways in which sums over a site's records may be formed, and what all jobs disclosed of the records."""

    site: str
    formed: tuple[Formed, ...]
    evaluated: tuple[EvaluatedSoFar, ...]
    trained: tuple[TrainedSoFar, ...]


class AcceptedModel(Part):
    """A given model that jobs may start from or evaluate; ``note`` says who accepted it, and its origin."""

    sha256: str
    note: str


class AcceptedModels(Output):
    """The given models that a person accepted at a site."""

    given_models: GivenModels
    models: tuple[AcceptedModel, ...]


class Features(Output):
    """Features of records on a site's disk, or the deleted ones."""

    feature_cache: Literal["memory", "run", "kept"]
    files: int
    bytes: int
    deleted: bool


class Spent(Part):
    """Epsilon by each analysis; ``guaranteed`` is what counts."""

    guaranteed: Number
    exact: Number
    pld: Number
    rdp: Number
    prv: Number


class ChargeLine(Part):
    """A charge, with the epsilon of all charges up to it."""

    entry: int
    time: datetime
    job: str
    job_id: str
    purpose: str
    retry: int
    event: str
    epsilon: Number


class DatasetSpending(Part):
    """Spending on one data set; ``left`` is of the cap, null without one."""

    dataset: str
    neighbours: str | None
    charges: tuple[ChargeLine, ...]
    spent: Spent
    alone: Number
    fingerprints: tuple[str, ...]
    left: Number


class LedgerShown(Output):
    """Spent privacy budget, by data set."""

    ledger: str
    entries: int
    signatures_checked: bool
    delta: float
    epsilon_cap: Number
    data_sets: tuple[DatasetSpending, ...]


class DatasetExplained(Part):
    """Spending on one data set in words, and what would still fit."""

    dataset: str
    paragraphs: tuple[str, ...]
    fits: tuple[str, ...]


class LedgerExplained(Output):
    """Spent privacy budget, in words; ``exact_jobs`` released exact totals, which no epsilon counts."""

    ledger: str
    signatures_checked: bool
    data_sets: tuple[DatasetExplained, ...]
    exact_jobs: tuple[str, ...]


class Signer(Part):
    """Number of entries that a key signed."""

    name: str
    certificate: str
    entries: int


class LedgerVerified(Output):
    """Result for a ledger; fields after ``reason`` only if it is intact."""

    valid: bool
    ledger: str
    code: str | None = None
    reason: str | None = None
    id: str | None = None
    entries: int | None = None
    secure_sum_entries: int | None = None
    first: datetime | None = None
    last: datetime | None = None
    signers: tuple[Signer, ...] = ()
    head: str | None = None
    proves: tuple[str, ...] = ()
    does_not_prove: tuple[str, ...] = ()


class TranscriptSum(Part):
    """A secure sum; ``failure`` is null if it was opened."""

    round: int
    phase: str
    attempt: int
    epoch: int
    slot: int
    groups: tuple[str, ...]
    missing: tuple[str, ...]
    failure: str | None
    blamed: Mapping[str, str]


class TranscriptVerified(Output):
    """Result for a transcript; fields after ``reason`` only if it is valid."""

    valid: bool
    file: str
    code: str | None = None
    reason: str | None = None
    job: str | None = None
    written_by: str | None = None
    version: str | None = None
    started: datetime | None = None
    simulated: bool | None = None
    complete: bool | None = None
    ended_early: str | None = None
    keys: Mapping[str, tuple[str, ...]] = {}
    sums: tuple[TranscriptSum, ...] = ()
    totals_verified: int | None = None
    totals_unverified: int | None = None
    head: str | None = None
    proves: tuple[str, ...] = ()
    does_not_prove: tuple[str, ...] = ()


class File(Part):
    """A file of ``provisioning/``; with its content if asked for by name."""

    name: str
    content: str | None = None


class Files(Output):
    """Files of ``provisioning/``."""

    files: tuple[File, ...]


class Pins(Output):
    """A site's pin, and its peers'; null before it has a configuration."""

    site: str
    pin: str
    peers: Mapping[str, tuple[str, ...]] | None


class Reported(Output):
    """A written page, and for a server's results how the run ended."""

    page: str
    of: Literal["server", "silo"]
    ended: str | None = None
    trained: bool | None = None
    measured: bool | None = None
    notes: tuple[str, ...] = ()
    noisy: bool | None = None
    balanced_accuracy: Number = None
    accuracy: Number = None
    auroc: Number = None


Interval = tuple[Number, Number] | None


class ComparedRun(Part):
    """The last values of one run."""

    name: str
    folder: str
    ended: str
    rounds_done: int
    noisy: bool
    epsilon: str
    absent_classes: list[str]
    balanced_accuracy: Number
    accuracy: Number
    auroc: Number
    average_precision: Number
    balanced_accuracy_interval: Interval
    accuracy_interval: Interval
    auroc_interval: Interval
    average_precision_interval: Interval


class Difference(Part):
    """Paired differences of two settings, seed by seed."""

    runs: tuple[str, ...]
    against: tuple[str, ...]
    seeds: tuple[Any, ...]
    differences: tuple[float, ...]
    mean: float
    interval: tuple[float, float]


class Compared(Output):
    """A comparison of runs; ``differing`` has a value for each run."""

    runs: tuple[ComparedRun, ...]
    differing: Mapping[str, tuple[Any, ...]]
    paired_differences: tuple[Difference, ...]


class End(Part):
    """End of a watched run; ``code`` is the command's exit code."""

    code: int
    title: str
    lines: tuple[str, ...]


class Watched(Output):
    """One line of a watch: the current state, and on the last line the end.

    ``silent`` has the silos that the server does not hear from, and since when by its clock; ``lost`` the
    seconds since the server itself answered.
    """

    job_id: str
    seconds: float
    standing: str
    engine: str | None = None
    told: tuple[str, ...] = ()
    silent: Mapping[str, Number] = {}
    lost: Number = None
    status: Status | None = None
    end: End | None = None


OUTPUTS: Mapping[str, type[Output]] = {
    "jobs list": Jobs,
    "jobs check": JobFolders,
    "methods": Methods,
    "explain": Explained,
    "data check": DataCheck,
    "data describe": DataDescription,
    "site check": SiteCheck,
    "site cohort show": Cohorts,
    "site release show": Releases,
    "site model show": AcceptedModels,
    "site features": Features,
    "ledger show": LedgerShown,
    "ledger explain": LedgerExplained,
    "ledger verify": LedgerVerified,
    "transcript verify": TranscriptVerified,
    "provisioning show": Files,
    "federation pins": Pins,
    "report": Reported,
    "compare": Compared,
    "watch": Watched,
}
"""Command -> model of its output."""
