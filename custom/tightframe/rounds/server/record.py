"""The server's record of a run, and its result files: metrics, model card, outcome, report."""

from __future__ import annotations

import functools
import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tightframe import __version__, models
from tightframe.data.table.disclosure import UNITS
from tightframe.learning.few_records.products import Sizes
from tightframe.learning.one_sum.temperature import KNOWN
from tightframe.metrics import noise_intervals
from tightframe.phases import ServerState, Tensors, Totals
from tightframe.results import engine_files, words
from tightframe.results.files import BEST, WritePage
from tightframe.results.model_card import Card, InitialModel, MethodCard
from tightframe.results.outcome import Ended, LeftOut, OpenedSum, Personal, ending, is_measured
from tightframe.results.parts import dropouts
from tightframe.results.parts.evaluation import Evaluation
from tightframe.results.parts.withdrawal import WithdrawnRecords
from tightframe.results.rows import Row, final_row, last_spent, round_line, write_rows
from tightframe.results.statistics import TableStatistics
from tightframe.results.status import Status
from tightframe.rounds.checkpoint import save_tensors
from tightframe.rounds.declaration import OWN, Declaration, applied_weights, tellers, tells
from tightframe.rounds.few_records.layers import behind, units_planned
from tightframe.rounds.few_records.planned import class_sums_planned, products_planned
from tightframe.rounds.few_records.rule import warned
from tightframe.rounds.job_checks import HEAD_OPTIONS, brings_head
from tightframe.rounds.phases import personal, table_statistics, table_summary
from tightframe.rounds.privacy_plan import honest_silos
from tightframe.rounds.riders import (
    class_rules,
    epsilon,
    evaluation,
    noisy_evaluation,
    update_norms,
)
from tightframe.rounds.riders.class_rules import MIN_HOLDERS
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.sums.common import Enrolled


class RunRecord:
    """Record of a run, kept up to date on disk while it runs.

    Args:
        setup: the job, and what it names.
        log: for one line per round and the last screen.
        write_page: writes the page of the folder at the end; without it there is none.
    """

    def __init__(
        self, folder: Path, setup: JobSetup, log: logging.Logger, write_page: WritePage | None = None
    ) -> None:
        job = setup.job
        self.folder = folder
        self.job = job
        self.rows: list[Row] = []
        self.weights: dict[str, float] = {}
        self.synthetic = False
        self.initial_model: InitialModel | None = None
        self.withdrawn: WithdrawnRecords | None = None
        self.withheld: tuple[str, ...] = ()  # folds that are not evaluated because of a withdrawal
        self.rounds_done = 0
        self.absent: dict[str, str] = {}
        self.refused_rules: dict[str, list[str]] = {}  # of silos that refuse, as they report them
        self.lost: dict[str, dropouts.Lost] = {}  # enrolled silos that are missing now
        self.closing_failed: str | None = None  # why the last model could not be evaluated
        self.trained = False
        self.absent_classes: list[str] = []  # left out of the model's sums by the class rules
        self.sums: str = job.summation
        self.declared: dict[str, Declaration] = {}
        self.privacy = setup.privacy
        self._products = None if job.privacy is not None else products_planned(setup)
        self._units, self._behind = units_planned(setup), behind(setup)
        self._class_sums = None if job.privacy is not None else class_sums_planned(setup)
        self.statistics: TableStatistics | None = None  # of a job that sums them
        self.personal: Personal | None = None  # means over silos of their personal models
        self.watcher: Callable[[], None] | None = (
            None  # called on every new status, on the thread that sets it
        )
        self.status = Status(
            job_name=job.job_name,
            rounds=job.rounds,
            epsilon_promised=None if job.privacy is None else job.privacy.epsilon,
            delta=None if job.privacy is None else job.privacy.delta,
        )
        self.temporary = False  # whether the caller removes the folder with the outcome
        self.best: tuple[float, int] | None = None
        self.judges: frozenset[str] = frozenset()  # silos that evaluated the best model
        self.others: frozenset[str] | None = None  # silos that evaluated the latest model, where they differ
        self._setup = setup
        self._method = setup.method
        self._dataset = setup.dataset
        self._log = log
        self._write_page = write_page
        self._started = time.monotonic()

    @property
    def status(self) -> Status:
        """Status of the run."""
        return self._status

    @status.setter
    def status(self, now: Status) -> None:
        self._status = now
        if self.watcher is not None:
            self.watcher()

    @property
    def data_line(self) -> str:
        """Line that describes the records."""
        title = self._dataset.title
        if not self.weights:
            return f"{title}; no silo was enrolled"
        if self.synthetic:
            return f"SYNTHETIC TWIN of {title}, generated records; no claim about a method is made on it"
        divided = getattr(self._asked, "described", None)
        return f"{title}, real records ({divided})" if divided else f"{title}, the sites' own records"

    @property
    def _asked(self) -> Any:
        """Options of the data set in the job."""
        return self._dataset.options.model_validate(self.job.dataset_options)

    def enrolled(self, enrolled: Enrolled) -> None:
        """Record the enrolled silos and their declarations."""
        self.declared, self.absent = dict(enrolled.declared), dict(enrolled.absent)
        self.weights = applied_weights(self.declared, self.job.max_weight_share)
        self.synthetic = any(item.synthetic for item in enrolled.declared.values())
        self.status = self.status.enrolled(self.weights, self.absent)

    def failed(self, site: str, code: str, rules: Sequence[str]) -> None:
        """Record a silo without a usable answer, as soon as the transport knows."""
        if rules:
            self.refused_rules[site] = list(rules)
        if self.status.state == "enrolling":
            self.status = self.status.heard(site, code)
        elif self.status.state == "summing" and self._miss(site, code):
            self._tell_lost()

    def answered(self, site: str) -> None:
        """Record that a silo's term has arrived."""
        self.status = self.status.answer(site)
        if self.lost.pop(site, None) is not None:
            self._tell_lost()

    def _miss(self, site: str, code: str) -> bool:
        """Note since when a silo is missing; return whether that is new."""
        if site in self.lost or site not in self.declared:
            return False
        place = self.status
        self.lost[site] = dropouts.Lost(
            kind=place.kind or "train", round=place.round, at=dropouts.now(), code=code
        )
        return True

    def _tell_lost(self) -> None:
        self.status = self.status.without(self.lost, self.notes(), self._unmeasured())

    def notes(self) -> list[str]:
        """Describe lost silos, and what cannot be measured without them."""
        closing = next((row for row in reversed(self.rows) if row.kind == "closing"), None)
        evaluated = [row for row in self.rows if row.evaluation is not None]
        final = self._final()
        asked = closing is not None and not closing.static_opened and self._setup.evaluates
        lines = dropouts.notes(
            self.lost,
            enrolled=len(self.declared),
            since=self._unmeasured(),
            closing_shut=asked and final is None and self.closing_failed is None,
            measured=None if final is None else final.evaluated_by,
            last_measured=evaluated[-1].round if evaluated else None,
        )
        if self.closing_failed is not None:
            lines.append(f"The final model was not measured: {self.closing_failed}")
        if self.absent_classes:
            ruled = self.job.class_rules == "on" and self.privacy is None
            lines.append(
                words.absent_classes(
                    self.absent_classes,
                    in_sums_only=self._method.one_sum is None,
                    least=[item.min_class_count for item in self.declared.values()] if ruled else [],
                    holders=MIN_HOLDERS,
                    noisy=self.privacy is not None,
                )
            )
        return lines

    def set_absent_classes(self, state: ServerState) -> None:
        """Record the classes missing from a run's sums, by the state at its end."""
        holders, known = class_rules.holders_in(state), state.extra.get(KNOWN)
        if self._method.one_sum is not None and known is not None:
            lacks = (known == 0).tolist()
        else:
            lacks = [] if holders is None else (holders < MIN_HOLDERS - 0.5).tolist()
        names = self._dataset.class_names
        self.absent_classes = [name for name, lack in zip(names, lacks, strict=False) if lack]

    def _unmeasured(self) -> int | None:
        return dropouts.unmeasured_since((row.kind, row.round, not row.static_opened) for row in self.rows)

    def _final(self) -> Row | None:
        """Return the row of the last round's model, if that was evaluated."""
        return final_row(self.rows, self.rounds_done) if self.trained else None

    def not_enrolled(self, absent: Mapping[str, str]) -> None:
        """Record the silos that did not enrol, where that ended the run."""
        self.absent |= absent
        self.status = self.status.enrolled((), self.absent)

    def lowered(self) -> str | None:
        """Name the silos whose weight is lower than declared; None if there are none."""
        lowered = {site: self.declared[site].weight for site, weight in self.weights.items()}
        lowered = {site: value for site, value in lowered.items() if value != self.weights[site]}
        if not lowered:
            return None
        text = ", ".join(f"{site} {value:g} as {self.weights[site]:g}" for site, value in lowered.items())
        return f"a weight is at most {self.job.max_weight_share:g} of their sum (`max_weight_share`): {text}"

    @property
    def left_out_by(self) -> dict[str, list[str]]:
        """Return the silos that their policy keeps out of the run, with the rules that they name."""
        return {site: rules for site, rules in sorted(self.refused_rules.items()) if site in self.absent}

    def rules(self) -> list[str]:
        """List the privacy rules that held and those that were off, one line each."""
        lines = []
        if self.job.class_rules == "off":
            lines.append("CLASS RULES OFF, as the job asks: a class sum may be one silo's")
        profiles = sorted({item.profile for item in self.declared.values()})
        counts = sorted({item.min_class_count for item in self.declared.values()})
        if self.declared:
            of_records = (
                f"; a class counts from {counts[0]} local records on"
                if len(counts) == 1
                else (f"; a class counts from {counts[0]} to {counts[-1]} local records on")
            )
            off = self.job.class_rules == "off" or self.privacy is not None
            off = off or self.job.statistics is not None
            shown = "" if off else f"{of_records} and with {MIN_HOLDERS} holders"
            lines.append(f"silos' policies: {', '.join(profiles)}{shown}")
        if loose := sorted(site for site, item in self.declared.items() if item.any_static_cohort):
            lines.append(
                f"COUNTS OPENED FOR ANY COHORT at {', '.join(loose)}: differences disclose one silo's"
            )
        if self.job.statistics is not None:
            return lines + self._statistics_rules()
        records = {site: item.weight for site, item in self.declared.items()}
        untold = self.job.weights == "uniform"
        sizes = Sizes.of(records, self.job.assumed_colluders(len(records)))
        for planned, sure in ((self._products, sizes.sure()), (self._units, sizes.behind(self._behind))):
            if planned is not None and records:
                lines += warned(planned, None if untold else sure)
        if self._class_sums is not None and records:
            declared = None if untold else sizes.declared
            lines += warned(self._class_sums, declared, classes=len(self._dataset.class_names))
        if own := sorted(site for site, item in self.declared.items() if OWN in item.untold):
            lines.append(
                f"exact evaluations of silos' own models stay at silos (class_rules_off): {', '.join(own)}"
            )
        elif self.declared and self.job.summation == "secure" and self.job.privacy is None:
            one = "of a class that one silo alone has, it shows that silo's result"
            if self._dataset.multi_label and self.job.class_rules == "on":
                one = f"of a finding that fewer than {MIN_HOLDERS} silos know enough of, it shows nothing"
            lines.append(f"the evaluation's counts are exact: {one}")
        for part in self._parts():
            fold, _, place = part.partition("/")
            finding = f" with {self._dataset.class_names[int(place)]} known" if place else ""
            if part in self.withheld:
                lines.append(f"{fold} records are not evaluated: too few of them were withdrawn")
            elif part in self._told_by_few():
                lines.append(
                    f"{fold} records{finding} of fewer than {MIN_HOLDERS} silos could be counted: none are"
                )
            if sites := sorted(site for site, item in self.declared.items() if part in item.untold):
                lines.append(
                    f"too few {fold} records{finding} to be counted (min_test_count): {', '.join(sites)}"
                )
        if self.privacy is None:
            lines.append("no differential privacy: a total itself is exact")
        else:
            lines.append(self.privacy.describe())
        return lines

    def _statistics_rules(self) -> list[str]:
        """List the privacy rules of a job with statistics."""
        if self.privacy is not None:
            return [self.privacy.describe()]
        counts = sorted({item.min_class_count for item in self.declared.values()})
        least = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else "".join(map(str, counts))
        layout = self._setup.layout
        whom = "patients" if layout is not None and layout.contract.patient is not None else "records"
        return [
            f"cells of fewer than {least} {whom} at a silo are withheld there, before the sum; totals that "
            f"fewer than {MIN_HOLDERS} silos disclose are not opened",
            "no differential privacy: a total itself is exact",
        ]

    def add(self, row: Row, notes: Mapping[str, Any], received: Tensors) -> Row:
        """Record an exchange, and its evaluation in the row of the evaluated model.

        Args:
            notes: of the riders of the exchange, by name.
            received: the model that was evaluated: the one before this exchange.

        Returns:
            The row as recorded.
        """
        before: Row | None = None
        counts = {name: note for name, note in notes.items() if isinstance(note, (int, float))}
        own = {"privacy": notes.get(epsilon.NOTE), "update_norms": notes.get(update_norms.NOTE)}
        row = row.model_copy(update={**own, "counts": counts})
        self.personal = notes.get(personal.NOTE, self.personal)
        if (totals := notes.get(table_statistics.NOTE)) is not None:
            self.statistics = self._table(totals, row)
            self.statistics.write(self.folder)
        if (counted := notes.get(evaluation.NOTE)) is not None:
            if not any(item.kind in ("start", "train") for item in self.rows):
                self.rows.append(Row(round=0, kind="start", silos=[], dropped={}))
            place = max(i for i, item in enumerate(self.rows) if item.makes_model)
            by = [site for site in row.silos if not self._untold(site, "test")]
            before = self.rows[place].model_copy(
                update={"evaluation": self._summarised(counted, row, by), "evaluated_by": by}
            )
            self.rows[place] = before
            self._remember_best(before, received)
            self.status = self.status.evaluated(before)
        self._append(row)
        write_rows(self.folder, self.rows)
        summed = self._method.one_sum is not None and self.privacy is None and self._setup.trains
        start = "head of the sum, before its temperature" if summed else "initial model"
        self._log.info("%s", round_line(row, self.job.rounds, self.job.roster, before, start=start))
        return row

    def _table(self, totals: Totals, row: Row) -> TableStatistics:
        """Return the statistics of a job with ``statistics``; ``row`` is of its last exchange."""
        layout, plan = self._setup.layout, self.privacy
        assert layout is not None  # noqa: S101 - only such a job has this note
        privacy: dict[str, Any] = {}
        deviation = None
        if plan is None or plan.statistics is None:
            records, columns = table_summary.exact(totals, layout)
            survival = table_summary.survival(layout, records, columns)
        else:
            honest = honest_silos(self.job, len(self.weights))
            deviation = plan.statistics.config.deviation(silos=len(row.silos), honest=honest)
            records, columns = table_summary.noisy(totals, layout, deviation)
            survival = table_summary.noisy_survival_of(totals, layout, deviation)
            privacy = {
                "noisy": True,
                "epsilon": plan.privacy.epsilon,
                "delta": plan.privacy.delta,
                "neighbours": plan.privacy.neighbours,
                "noise_deviation": deviation,
                "level": noise_intervals.LEVEL,
            }
        counts = [item.min_class_count for item in self.declared.values()]
        return TableStatistics(
            title=layout.contract.title,
            contract=layout.contract.sha256(),
            records=records,
            all_records=table_summary.of_all(records, deviation),
            shares=table_summary.shares(records),
            columns=columns,
            silos=row.silos,
            least=(min(counts), max(counts)),
            named=layout.contract.patient is not None,
            holders=MIN_HOLDERS,
            grid=1 / UNITS,
            synthetic=self.synthetic,
            survival=survival,
            **privacy,
        )

    @property
    def _test_shared(self) -> bool:
        """Check whether all silos test on the same records."""
        return getattr(self._asked, "test", None) == "global"

    def _summarised(self, counted: Totals, row: Row, by: Sequence[str]) -> Evaluation:
        """Return metrics of an exchange's totals, which may be noisy; ``by`` are the silos that evaluated."""
        names = self._dataset.class_names
        if self.privacy is None or self.privacy.evaluation is None:
            copies = max(1, len(by)) if self._test_shared else 1
            return evaluation.summarise(counted, names, copies=copies)
        honest = honest_silos(self.job, len(self.weights))
        config = self.privacy.evaluation.config
        return noisy_evaluation.summarise(counted, config, names, silos=len(row.silos), honest=honest)

    def _parts(self) -> list[str]:
        """List the parts of an evaluation: folds, and the findings of each that a silo leaves out."""
        out = {part for item in self.declared.values() for part in item.untold}
        findings = len(self._dataset.class_names) if self._dataset.multi_label else 0
        parts = ((fold, *(f"{fold}/{place}" for place in range(findings))) for fold in ("test", "validation"))
        return [part for of_fold in parts for part in of_fold if part in out or "/" not in part]

    def _untold(self, site: str, fold: str) -> bool:
        """Check whether a silo leaves a fold out of exact evaluations, by its own declaration or others'."""
        left_out = site in self.declared and not all(tells(self.declared[site], part) for part in (fold, OWN))
        by_few = self._told_by_few()
        return left_out or OWN in by_few or fold in (*by_few, *self.withheld)

    def _told_by_few(self) -> tuple[str, ...]:
        """Return the parts that no silo evaluates, because only one or two could."""
        silos = tellers(self.declared.values()) if self.declared and self.job.summation == "secure" else None
        return evaluation.told_by_few(self.job, silos)

    def dropped(self, kind: str, number: int, silos: list[str], failed: Mapping[str, str]) -> None:
        """Record an exchange that had too few silos and was not opened."""
        self._append(Row(round=number, kind=kind, silos=silos, dropped=dict(failed)))
        write_rows(self.folder, self.rows)

    def _append(self, row: Row) -> None:
        """Append the row of a sum, with its cohort and the missing silos."""
        self.rows.append(row)
        self.status = self.status.summed(row)
        back = [self.lost.pop(site, None) for site in row.silos]
        news = [self._miss(site, code) for site, code in row.dropped.items()]
        if self.lost or any(back) or any(news):
            self._tell_lost()

    def write_card(self, sha256: str | None) -> None:
        """Write ``model.json``: the model, its job and records, its metrics, and the versions used.

        Args:
            sha256: of the model's file; None where each silo has a model of its own and the server none.
        """
        last = [row for row in self.rows if row.round == self.job.rounds and row.evaluation]
        Card(
            job=self.job.model_dump(mode="json"),
            job_sha256=self.job.sha256(),
            method=MethodCard(name=self._method.name, paper=self._method.paper),
            classes=list(self._dataset.class_names),
            absent_classes=self.absent_classes,
            data=self.data_line,
            synthetic=self.synthetic,
            public_weights=dict(sorted(self.weights.items())),
            model_sha256=sha256,
            initial_model=self.initial_model,
            withdrawn=self.withdrawn,
            best_round_by_validation=self.best[1] if self.best else None,
            privacy_spent=last_spent(self.rows),
            evaluation=last[-1].evaluation if last else None,
            evaluated_by=last[-1].evaluated_by if last else [],
            versions=_versions(),
        ).write(self.folder)

    def finish(self, reason: str | None) -> Ended:
        """Write ``outcome.json`` and the page, log the last screen, return the outcome."""
        self.status = self.status.ended(trained=self.trained, reason=reason)
        result = self._ended(reason)
        result.write(self.folder)
        engine_files.write(self.folder, self.job.job_name, self.rows, self.best)
        if self._write_page is not None:
            self._write_page(self.folder, self._log)
        (self._log.error if reason else self._log.info)("%s", result.screen())
        return result

    def _ended(self, reason: str | None) -> Ended:
        """Return how the run ended."""
        job = self.job
        final = final_row(self.rows, self.rounds_done)
        measured = is_measured(final) or self.statistics is not None
        return Ended(
            status=ending(trained=self.trained, measured=measured, evaluates=self._setup.evaluates),
            trained=self.trained,
            measured=measured,
            reason=reason,
            not_enrolled=self.absent,
            not_enrolled_rules=self.left_out_by,
            job_name=job.job_name,
            method=self._method.name,
            data=self.data_line,
            rounds_done=self.rounds_done,
            rounds=job.rounds,
            roster=list(job.roster),
            synthetic=self.synthetic,
            resumed=None if job.resume is None else job.resume.model_dump(mode="json"),
            withdrawn=self.withdrawn,
            summation=job.summation,
            sums=self.sums,
            rules=self.rules(),
            privacy=None if job.privacy is None else job.privacy.model_dump(mode="json"),
            privacy_spent=last_spent(self.rows),
            best_round_by_validation=self.best[1] if self.best else None,
            dropped=[
                LeftOut(round=row.round, kind=row.kind, silos=row.dropped) for row in self.rows if row.dropped
            ],
            lost=dict(sorted(self.lost.items())),
            notes=self.notes(),
            evaluation=final.evaluation if final else None,
            evaluated_by=final.evaluated_by if final else [],
            test_shared=self._test_shared,
            one_sum=self._one_sum(),
            own_models=self._method.own_model is not None,
            absent_classes=self.absent_classes,
            personal=self.personal,
            seconds=round(time.monotonic() - self._started, 1),
            job=job.model_dump(mode="json"),
            job_sha256=job.sha256(),
            effective=values(self._setup),
            versions=_versions(),
            title=self._method.title,
            rows=self.rows,
            folder=self.folder,
            temporary=self.temporary,
            statistics=self.statistics,
        )

    def _one_sum(self) -> OpenedSum | None:
        one_sum = self._method.one_sum
        if one_sum is None or not self._setup.trains:
            return None
        numbers = dict(one_sum.opened(self._setup.setting))
        return OpenedSum(numbers=numbers, noisy=self.job.privacy is not None, follows=one_sum.follows)

    def _remember_best(self, row: Row, received: Tensors) -> None:
        """Keep the model with the best balanced accuracy on the validation folds.

        Only models evaluated by the same silos are compared: without a hard silo's records any model looks
        better. After two models in a row evaluated by other silos (one was lost, or came back) the comparison
        restarts with those.
        """
        if not received:
            return  # each silo has a model of its own
        if row.round == 0 or row.evaluation is None or row.evaluation.test.noisy:
            return  # the best of a few noisy models is mostly lucky
        judges = frozenset(row.evaluated_by)
        value = row.evaluation.validation.balanced_accuracy
        if value is None:
            return
        if judges == self.judges:
            self.others = None
            better = self.best is None or value > self.best[0]
        else:
            better = self.best is None or len(judges) > len(self.judges) or judges == self.others
            self.others = judges
        if better:
            self.best, self.judges, self.others = (value, row.round), judges, None
            save_tensors(self.folder / BEST, received)


def _versions() -> dict[str, str]:
    packages = ("torch", "numpy", "nvflare", "monai", "safetensors")
    own = {"tightframe": __version__, "python": platform.python_version()}
    return own | {package: _version(package) for package in packages}


@functools.cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def values(setup: JobSetup) -> dict[str, Any]:
    """Return the job's plain values with every option of its method, data set and models, defaults included.

    For people to read: hashes are of the job's own values. Options of a backbone's head are left out where
    the method replaces the head.
    """
    job = setup.job
    plain = job.model_dump(mode="json")
    plain["method_options"] = _plain(setup.method.config, job.method_options)
    plain["dataset_options"] = _plain(setup.dataset.options, job.dataset_options)
    plain["model_options"] = _of_model(setup, job.model, job.model_options)
    for site, own in job.site_models.items():
        plain["site_models"][site]["model_options"] = _of_model(setup, own.model, own.model_options)
    return plain


def _of_model(setup: JobSetup, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    options = _plain(models.get(name).options, asked)
    unused = HEAD_OPTIONS if brings_head(setup.method, setup.setting) else ()
    return {key: value for key, value in options.items() if key not in unused}


def _plain(options: type[BaseModel], asked: dict[str, Any]) -> dict[str, Any]:
    return options.model_validate(asked).model_dump(mode="json")
