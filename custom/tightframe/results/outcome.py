"""The end of a run: ``outcome.json`` and the last screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from tightframe.errors import REASONS
from tightframe.results.files import (
    BEST,
    CARD,
    CHECKPOINT,
    EVENTS,
    LOCAL,
    METRICS,
    MODEL,
    OUTCOME,
    PAGE,
    TRANSCRIPT,
    ResultFile,
    Values,
)
from tightframe.results.parts.dropouts import NOT_MEASURED, Lost
from tightframe.results.parts.evaluation import Evaluation, FoldMetrics
from tightframe.results.parts.ranges import Spent
from tightframe.results.parts.withdrawal import WithdrawnRecords
from tightframe.results.rows import EVALUATED_MODELS, Row, evaluated_rounds, final_row, noise_words
from tightframe.results.statistics import STATISTICS, TableStatistics
from tightframe.results.words import (
    count_in_words,
    metric,
    one_answer,
    plural,
    shown,
    untested,
    with_interval,
)

_FILES = (MODEL, BEST, CARD, STATISTICS, METRICS, OUTCOME, PAGE, TRANSCRIPT, CHECKPOINT, EVENTS)
FEW = 3
"""Most exchanges named on the screen."""
TOO_FEW = "too few to show"
"""Recall of a class with fewer noisy records than the floor."""


class Personal(Values):
    """Mean accuracies of personal models over silos.

    Attributes:
        accuracy: mean over ``silos`` silos.
        valid_classes, label_share: PM(V) and PM(L), means over those that have both, at least three.
    """

    accuracy: float
    silos: int
    valid_classes: float | None = None
    label_share: float | None = None


class OpenedSum(Values):
    """The one sum that determines the model.

    Attributes:
        numbers: what was opened -> count of its numbers.
        noisy: whether they have the noise of differential privacy.
        follows: how the head follows from them, in one sentence.
    """

    numbers: dict[str, int]
    noisy: bool = False
    follows: str

    def __str__(self) -> str:
        """Name what was opened, with counts."""
        listed = ", ".join(f"{count:,} of {what}" for what, count in self.numbers.items())
        return f"{listed}{', all with noise' if self.noisy else ''}"


class LeftOut(Values):
    """Silos (with codes) that are not in an exchange."""

    round: int
    kind: str
    silos: dict[str, str]


class Outcome(ResultFile):
    """``outcome.json``.

    Attributes:
        status: how the run ended, as every surface words it; absent in older files.
        measured: whether the final model was measured on the silos' test records.
        reason: why the run stopped, or could not be measured; None if neither.
        not_enrolled: silo -> code of those not enrolled; ``not_enrolled_rules``: rules that they told.
        resumed: the run that the job resumes, if any.
        withdrawn: records that left the total of an ended run, if the job withdraws any.
        summation: ``secure`` or ``plain``; ``sums``: what the sums protect, in words.
        rules: privacy rules in force, and those that were off.
        privacy: the job's promise; ``privacy_spent``: epsilon that silos last reported as spent on it.
        best_round_by_validation: the round whose model ``best_model.safetensors`` is.
        dropped: exchanges from which silos were missing.
        lost: silo -> since when it is missing; ``notes``: the consequences, in sentences.
        evaluation, evaluated_by: of the last model, and the silos that evaluated it.
        test_shared: all silos test on the same records, so that pooled counts have each once per silo.
        one_sum: what the one sum opened, if the model is a function of it; else absent.
        own_models: each silo has a model of its own, and there is no global one.
        absent_classes: those that too few silos hold, so that the class rules kept them out of the one sum,
            or of class sums; absent if none.
        seconds: of the whole run.
        job, job_sha256: also in the model card, which a failed run lacks.
        effective: the job's values with all defaults, of its method, data set and models, too.
        versions: package -> version at the server.
    """

    NAME = OUTCOME

    status: str | None = None
    trained: bool
    measured: bool = False
    reason: str | None
    not_enrolled: dict[str, str] = {}
    not_enrolled_rules: dict[str, list[str]] = {}
    job_name: str
    method: str
    data: str | None = None
    rounds_done: int
    rounds: int
    roster: list[str]
    synthetic: bool
    resumed: dict[str, Any] | None = None
    withdrawn: WithdrawnRecords | None = None
    summation: str
    sums: str
    rules: list[str]
    privacy: dict[str, Any] | None = None
    privacy_spent: Spent | None = None
    best_round_by_validation: int | None = None
    dropped: list[LeftOut] = []
    lost: dict[str, Lost] = {}
    notes: list[str] = []
    evaluation: Evaluation | None = None
    evaluated_by: list[str] = []
    test_shared: bool = False
    one_sum: OpenedSum | None = None
    own_models: bool = False
    absent_classes: list[str] = []
    personal: Personal | None = None
    seconds: float
    job: dict[str, Any] = {}
    job_sha256: str | None = None
    effective: dict[str, Any] = {}
    versions: dict[str, str] = {}

    def as_json(self) -> dict[str, Any]:
        """Return plain values, leaving out an absent sum and empty absent classes."""
        values = super().as_json()
        if self.one_sum is None:
            del values["one_sum"]
        if not self.absent_classes:
            del values["absent_classes"]
        return values

    @property
    def evaluates_only(self) -> bool:
        """Check whether the job only evaluated a finished model."""
        return self.job.get("evaluate_only") is not None

    @property
    def statistics_only(self) -> bool:
        """Check whether the job only summed statistics of the sites' tables."""
        return self.job.get("statistics") is not None

    @property
    def exactly_evaluated(self) -> tuple[int, ...] | None:
        """The rounds whose models were to be evaluated without noise; None with privacy or own models."""
        if self.privacy is not None or self.own_models:
            return None
        models = self.job.get("evaluation", {}).get("models", EVALUATED_MODELS)
        return evaluated_rounds(self.rounds, models)

    @property
    def length(self) -> str:
        """Rounds done, in words."""
        if self.evaluates_only or self.statistics_only:
            return "no training"
        return f"{self.rounds_done} of {plural(self.rounds, 'round')}"

    @property
    def ended(self) -> str:
        """End of the run in words: ``trained``, ``trained, not measured``, ``not trained``.

        For a job that only evaluates: ``evaluated``, ``not evaluated``; for one of statistics ``counted``,
        ``not counted``.
        """
        if self.statistics_only:
            return "counted" if self.measured and self.reason is None else "not counted"
        if self.evaluates_only:
            return "evaluated" if self.measured and self.reason is None else "not evaluated"
        if not self.trained:
            return "not trained"
        return self.status or ("trained" if self.reason is None else NOT_MEASURED)


def ending(*, trained: bool, measured: bool, evaluates: bool) -> str:
    """Name how a run ended.

    Args:
        trained: whether there is a model.
        measured: whether the model was measured on test records.
        evaluates: whether the server is to measure models.
    """
    if not trained:
        return "not trained"
    return "trained" if measured or not evaluates else NOT_MEASURED


def is_measured(final: Row | None) -> bool:
    """Check whether the final model was measured on test records of the silos."""
    test = None if final is None else final.test
    return test is not None and bool(test.noisy or test.records)


class Ended(Outcome):
    """The outcome in the process that ran the job, with the other result files.

    Attributes:
        title: of the method.
        rows: of ``metrics.jsonl``.
        folder: of the files.
        temporary: whether the files are deleted with this value.
        statistics: of ``statistics.json``, in a job that sums them.
    """

    title: str = Field(exclude=True)
    rows: list[Row] = Field(exclude=True)
    folder: Path = Field(exclude=True)
    temporary: bool = Field(default=False, exclude=True)
    statistics: TableStatistics | None = Field(default=None, exclude=True)

    def final(self) -> Row | None:
        """Return the row of the last model, if that was evaluated."""
        return final_row(self.rows, self.rounds_done)

    def screen(self) -> str:
        """Describe the run on one screen: its end, silos, metrics and files."""
        lines = ["", "=" * 78]
        lines.append(
            f" {self.ended.upper()}: {self.job_name}, {self.title}, "
            f"{'no training, one sum' if self.one_sum and self.trained else self.length} "
            f"in {self.seconds:.0f} s"
        )
        if self.reason:
            lines += [
                f" Reason: {line}" if i == 0 else f"   {line}"
                for i, line in enumerate(self.reason.split("\n"))
            ]
        lines += [f" Note: {line}" for line in self.notes]
        withdrawn = [] if self.withdrawn is None else self.withdrawn.lines()
        lines += [f" Withdrawn: {line}" if i == 0 else f"   {line}" for i, line in enumerate(withdrawn)]
        lines.append(f" Data: {self.data}")
        lines.append(f" Sums: {self.sums}")
        if self.one_sum is not None and self.trained:
            lines += [f" Opened, once: {self.one_sum}", f"   {self.one_sum.follows}"]
        lines += [f" Rules: {line}" if i == 0 else f"   {line}" for i, line in enumerate(self.rules)]
        lines += self._silo_lines()
        if (spent := self.privacy_spent) is not None:
            lines.append(f" After round {spent.round}: {spent}")
        lines += self._metric_lines()
        lines += self._file_lines()
        lines += ["=" * 78]
        return "\n".join(lines)

    def _silo_lines(self) -> list[str]:
        took_part = {name: 0 for name in self.roster}
        kind = "closing" if self.evaluates_only else "statistics" if self.statistics_only else "train"
        train = [row for row in self.rows if row.kind == kind]
        for row in train:
            for name in row.silos:
                took_part[name] = took_part.get(name, 0) + 1
        always = [name for name, count in took_part.items() if train and count == len(train)]
        where = "the evaluation" if self.evaluates_only else "every round"
        where = "the statistics" if self.statistics_only else where
        failed = [row for row in self.rows if row.failed]
        did = "answered" if any(row in failed for row in train) else "took part"
        lines = [f" Silos: {len(always)} of {len(self.roster)} {did} in {where}"]
        if always:
            lines[0] += f" ({', '.join(always)})"
        listed_above = (self.reason or "").startswith("TF-509")  # this reason already names each silo's
        for name, code in () if listed_above else sorted(self.not_enrolled.items()):
            why = "; ".join([REASONS.get(code, "named"), *self.not_enrolled_rules.get(name, ())])
            lines.append(f"   {name} was not enrolled: {code} ({why})")
        if failed:
            exchanges = [f"{row.failed} in {row.name}" for row in failed[:FEW]]
            exchanges += [f"and so on, {len(failed)} times in all"] if len(failed) > FEW else []
            lines.append(
                f"   silos answered but contributed nothing: {', '.join(exchanges)}; which, and why, is in "
                "their own logs"
            )
        gone: set[str] = set()
        for row in self.rows:
            for name, code in sorted(row.dropped.items()):
                since = self.lost.get(name)
                if name in gone:
                    continue
                line = f"   {name} was left out of {row.name}: {code} ({REASONS.get(code, 'named')})"
                if since is not None and (since.kind, since.round) == (row.kind, row.round):
                    gone.add(name)
                    line += " and of all that followed"
                lines.append(line)
        return lines

    def _metric_lines(self) -> list[str]:
        if self.statistics_only:
            return _counted_lines(self.statistics)
        final = self.final()
        if final is None or final.test is None:
            shut = any(not row.static_opened for row in self.rows if row.kind == "closing")
            why = "counts stay shut after a drop-out" if shut else "the last model was not evaluated"
            if self.privacy is not None and self.trained:
                return [f" Test metrics: at each silo, in its own {LOCAL} (differential privacy)"]
            return [f" Test metrics: missing ({why})"]
        test = final.test
        everybody = sorted(final.evaluated_by) == sorted(self.roster)
        whose = "all silos" if everybody else f"{', '.join(final.evaluated_by)} only"
        if test.noisy:
            return noisy_lines(test, whose, [(row.round, row.test) for row in self.rows if row.test])
        if not test.records:
            why = "not measured, because too few test records could be counted"
            lines = [f" Test metrics: {f'at each silo, in its own {LOCAL}' if self.own_models else why}"]
            return lines + (self._personal_lines(self.personal, alone=True) if self.personal else [])
        lines = [
            f" Test records of {whose} ({self._counted(test.records, final.evaluated_by)}): "
            f"balanced accuracy {shown(test.balanced_accuracy)}, accuracy {shown(test.accuracy)}, "
            f"AUROC {shown(test.auroc)}, AP {shown(test.average_precision)}"
        ]
        if (answer := one_answer(test.one_answer)) is not None:
            lines.append(f"   NOTE: {answer}")
        if test.findings is None and (missing := untested(test.recall)) is not None:
            lines.append(f"   NOTE: {missing}")
        if self.own_models:
            lines[0] += "; each silo's records by its own model"
            lines.append(" There is no global model: each silo keeps its own")
            lines.append(" They were evaluated after the last round only")
        else:
            planned = self.exactly_evaluated
            course = {
                row.round: shown(row.test.balanced_accuracy) if row.test else "missing"
                for row in self.rows
                if row.makes_model and (row.test or planned is None or row.round in planned)
            }
            if not self.evaluates_only:
                summed = self.one_sum is not None and not self.one_sum.noisy
                which = "before and after the temperature" if summed else "from round 0 on"
                if len(course) <= max(course):
                    which = f"after {'round' if len(course) == 1 else 'rounds'} {', '.join(map(str, course))}"
                lines.append(f" Balanced accuracy {which}: {' -> '.join(course.values())}")
        recall = (f"{name} {shown(value, 2)}" for name, value in test.recall.items())
        lines.append(" Recall: " + ", ".join(recall))
        if self.personal is not None:
            lines += self._personal_lines(self.personal)
        several = sum(row.evaluation is not None for row in self.rows) > 1
        if several and self.best_round_by_validation is not None:
            lines.append(f" Best round by validation: {self.best_round_by_validation} ({BEST})")
        return lines

    def _counted(self, records: int, silos: Sequence[str]) -> str:
        """Return the number of test records, and how many of them silos share."""
        if not self.test_shared or len(silos) < 2:
            return str(records)
        return f"{records}: the same {records // len(silos)} at each of {len(silos)} silos"

    def _personal_lines(self, personal: Personal, *, alone: bool = False) -> list[str]:
        whose = "the test records, which all share" if self.test_shared else "their own test records"
        lines = [
            f" Personal models, mean of {personal.silos} silos on {whose}: "
            f"accuracy {shown(personal.accuracy)}"
        ]
        if self.own_models and not alone:
            lines.append("   the same models as above; here each silo counts once, there each record")
        if personal.valid_classes is not None:
            valid, share = shown(personal.valid_classes), shown(personal.label_share)
            lines += [
                f"   PM(V) {valid}: accuracy on the classes that a silo trained on",
                f"   PM(L) {share}: the same, each class at its share of the silo's training records",
            ]
        return lines

    def _file_lines(self) -> list[str]:
        note = " (temporary: folder=... keeps them)" if self.temporary else ""
        lines = [f" Files: {self.folder}{note}"]
        present = [name for name in _FILES if (self.folder / name).exists()]
        if present:
            lines.append("   " + "  ".join(present))
        return lines


def _counted_lines(statistics: TableStatistics | None) -> list[str]:
    """Return the last screen's lines about statistics."""
    if statistics is None:
        return [" Statistics: none were opened"]
    noise = ", noisy" if statistics.noisy else ""
    counts = ", ".join(f"{name} {count_in_words(count)}" for name, count in statistics.records.items())
    lines = [f" Records of {plural(len(statistics.silos), 'silo')}{noise}: {counts}"]
    if statistics.failed:
        lines.append(f"   {plural(statistics.failed, 'silo')} could not count, and is in no number")
    if statistics.withheld:
        lines.append(
            f"   some numbers are withheld: fewer than {statistics.least[1]} {statistics.whom} at a silo, or "
            f"fewer than {statistics.holders} silos"
        )
    if statistics.survival is not None:
        lines += [f"   {lack}" for lack in statistics.survival.lacks]
    lines.append(f" Table 1 and histograms: {PAGE}; all numbers: {STATISTICS}")
    return lines


def noisy_lines(test: FoldMetrics, whose: str, course: Sequence[tuple[int, FoldMetrics]]) -> list[str]:
    """Return the last screen's lines about noisy metrics.

    Args:
        test: metrics of the last model on the test fold.
        whose: silos with these records, in words.
        course: round and test metrics of each evaluated model.
    """
    low, high = test.records_interval or (test.records, test.records)
    lines = [
        f" Test records of {whose} (about {test.records} [{low}, {high}], noisy):",
        f"   noisy balanced accuracy {metric(test, 'balanced_accuracy')}",
        f"   noisy accuracy {metric(test, 'accuracy')}",
        f"   noisy AUROC {metric(test, 'auroc')}",
    ]
    if (answer := one_answer(test.one_answer)) is not None:
        lines.append(f"   NOTE: {answer}")
    lines.append(f"   {noise_words(test)}")
    lines.append(f"   below {shown(test.class_floor, 0)} noisy records a class has {TOO_FEW}")
    if test.balanced_accuracy is None:
        lines.append("   a larger privacy.evaluation_noise_share or privacy.epsilon has less noise")
    if len(course) > 1:
        lines.append(" Noisy balanced accuracy by round:")
        lines += [f"   {number}: {metric(fold, 'balanced_accuracy')}" for number, fold in course]
    lines.append(" Noisy recall:")
    for name, value in test.recall.items():
        text = TOO_FEW if value is None else with_interval(value, test.recall_interval.get(name), digits=2)
        lines.append(f"   {name} {text}")
    return [*lines, f" Exact test metrics: at each silo, in its own {LOCAL}"]
