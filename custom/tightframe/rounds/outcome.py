"""What a run leaves behind: rows of metrics, the model card, one line a round, one last screen."""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tightframe import __version__
from tightframe.config.job import JobConfig
from tightframe.data.base import DatasetSpec
from tightframe.errors import REASONS
from tightframe.files import write_atomically, write_json
from tightframe.phases import Method, Tensors, Totals
from tightframe.report import writing
from tightframe.report.words import plural, shown
from tightframe.rounds import evaluation
from tightframe.rounds.checkpoint import save_tensors
from tightframe.rounds.classes import MIN_HOLDERS
from tightframe.rounds.declaration import Declaration, tellers
from tightframe.rounds.private import noisy_metrics
from tightframe.rounds.private.plan import PrivacyPlan, honest_silos
from tightframe.rounds.private.shown import Spent
from tightframe.rounds.status import Status
from tightframe.rounds.summation import Enrolled


@dataclass
class Row:
    """One exchange with the silos and the model that it made (``after_round``).

    ``evaluation`` belongs to that model, so it is counted by the *next* exchange, by the silos
    in ``evaluated_by``, which need not be those that trained it. ``shut``: counts and class sums of
    this exchange stayed masked, because a silo had dropped out. ``phase``: place among the ``phases``
    of its round. ``spent``: what silos tell of the epsilon that the job has cost them so far.
    """

    round: int
    kind: str
    silos: list[str]
    dropped: dict[str, str]
    seconds: float
    bytes_down: int
    bytes_up: int
    training: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, Any] | None = None
    evaluated_by: list[str] = field(default_factory=list)
    shut: bool = False
    phase: int = 0
    phases: int = 1
    spent: Spent | None = None

    @property
    def makes_model(self) -> bool:
        """Whether a model to be evaluated comes out of it: of a round's phases the last one."""
        return self.kind in ("start", "train") and self.phase == self.phases - 1

    def as_json(self) -> dict[str, Any]:
        """Plain values, metrics of the test fold on top where people look for them."""
        test = (self.evaluation or {}).get("test", {})
        return {
            "round": self.round,
            "kind": self.kind,
            "phase": self.phase,
            "accuracy": test.get("accuracy"),
            "balanced_accuracy": test.get("balanced_accuracy"),
            "auroc": test.get("auroc"),
            "average_precision": test.get("average_precision"),
            "recall": test.get("recall"),
            "noisy": bool(test.get("noisy")),
            "noise_deviation": test.get("noise_deviation"),
            "training": self.training,
            "privacy": None if self.spent is None else self.spent.as_json(),
            "silos": self.silos,
            "dropped": self.dropped,
            "seconds": round(self.seconds, 3),
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "evaluation": _without_confusion(self.evaluation),
            "evaluated_by": self.evaluated_by,
            "static_opened": not self.shut,
        }


@dataclass
class Outcome:
    """The end of a run, as ``outcome.json`` and as the last screen tell it.

    ``test_shared``: all silos test on the same records, so that pooled counts have each of them once for
    every silo. ``temporary``: the files go with this value.
    """

    job_name: str
    method: str
    trained: bool
    rounds_done: int
    rounds: int
    roster: list[str]
    rows: list[Row]
    data: str
    summation: str
    rules: list[str]
    folder: Path
    best_round: int | None = None
    reason: str | None = None
    absent: dict[str, str] = field(default_factory=dict)
    personal: dict[str, Any] | None = None
    seconds: float = 0.0
    test_shared: bool = False
    private: bool = False
    temporary: bool = False

    def final(self) -> Row | None:
        """The row of the last model, if that was evaluated."""
        rows = [row for row in self.rows if row.evaluation is not None]
        return rows[-1] if rows and rows[-1].round == self.rounds_done else None

    def spent(self) -> Spent | None:
        """What silos told last of the epsilon that the job has cost them; None without privacy."""
        return last_spent(self.rows)

    def screen(self) -> str:
        """One screen: trained or not, which silos, the metrics, where the files are."""
        lines = ["", "=" * 78]
        verdict = "TRAINED" if self.trained else "NOT TRAINED"
        if self.trained and self.reason:
            verdict = "TRAINED, BUT NOT EVALUATED"
        lines.append(
            f" {verdict}: {self.job_name}, {self.method}, "
            f"{self.rounds_done} of {plural(self.rounds, 'round')} in {self.seconds:.0f} s"
        )
        if self.reason:
            lines += [
                f" Reason: {line}" if i == 0 else f"   {line}"
                for i, line in enumerate(self.reason.split("\n"))
            ]
        lines.append(f" Data: {self.data}")
        lines.append(f" Sums: {self.summation}")
        lines += [f" Rules: {line}" if i == 0 else f"   {line}" for i, line in enumerate(self.rules)]
        lines += self._silo_lines()
        if (spent := self.spent()) is not None:
            lines.append(f" After round {spent.round}: {spent}")
        lines += self._metric_lines()
        lines += self._file_lines()
        lines += ["=" * 78]
        return "\n".join(lines)

    def _silo_lines(self) -> list[str]:
        took_part = {name: 0 for name in self.roster}
        train = [row for row in self.rows if row.kind == "train"]
        for row in train:
            for name in row.silos:
                took_part[name] = took_part.get(name, 0) + 1
        always = [name for name, count in took_part.items() if train and count == len(train)]
        lines = [f" Silos: {len(always)} of {len(self.roster)} took part in every round"]
        if always:
            lines[0] += f" ({', '.join(always)})"
        for name, code in sorted(self.absent.items()):
            lines.append(f"   {name} was not enrolled: {code} ({REASONS.get(code, 'named')})")
        for row in self.rows:
            for name, code in sorted(row.dropped.items()):
                lines.append(
                    f"   {name} was left out of {_exchange_name(row)}: {code} ({REASONS.get(code, 'named')})"
                )
        return lines

    def _metric_lines(self) -> list[str]:
        final = self.final()
        if final is None or final.evaluation is None:
            shut = any(row.shut for row in self.rows if row.kind == "closing")
            why = "counts stay shut after a drop-out" if shut else "the last model was not evaluated"
            if self.private and self.trained:
                return [" Test metrics: at each silo, in its own local_report.json (differential privacy)"]
            return [f" Test metrics: missing ({why})"]
        test = final.evaluation["test"]
        everybody = sorted(final.evaluated_by) == sorted(self.roster)
        whose = "all silos" if everybody else f"{', '.join(final.evaluated_by)} only"
        if noisy_metrics.is_noisy(final.evaluation):
            told = [(row.round, row.evaluation) for row in self.rows if row.evaluation]
            return noisy_metrics.screen_lines(test, whose, told)
        lines = [
            f" Test records of {whose} ({self._counted(test['records'], final.evaluated_by)}): "
            f"balanced accuracy {shown(test.get('balanced_accuracy'))}, "
            f"accuracy {shown(test.get('accuracy'))}, AUROC {shown(test.get('auroc'))}, "
            f"AP {shown(test.get('average_precision'))}"
        ]
        course = [
            shown(row.evaluation["test"].get("balanced_accuracy")) if row.evaluation else "missing"
            for row in self.rows
            if row.makes_model
        ]
        lines.append(f" Balanced accuracy from round 0 on: {' -> '.join(course)}")
        recall = test.get("recall", {})
        lines.append(" Recall: " + ", ".join(f"{name} {shown(value, 2)}" for name, value in recall.items()))
        if self.personal is not None:
            lines += self._personal_lines(self.personal)
        if self.best_round is not None:
            lines.append(f" Best round by validation: {self.best_round} (best_model.safetensors)")
        return lines

    def _counted(self, records: int, silos: Sequence[str]) -> str:
        """How many test records were counted, and which of them are the same ones."""
        if not self.test_shared or len(silos) < 2:
            return str(records)
        return f"{records}: the same {records // len(silos)} at each of {len(silos)} silos"

    def _personal_lines(self, personal: Mapping[str, Any]) -> list[str]:
        whose = "the test records, which all share" if self.test_shared else "their own test records"
        lines = [
            f" Personal models, mean of {personal['silos']} silos on {whose}: "
            f"accuracy {shown(personal['accuracy'])}"
        ]
        if personal["valid_classes"] is not None:
            valid, share = shown(personal["valid_classes"]), shown(personal["label_share"])
            lines += [
                f"   PM(V) {valid}: accuracy on the classes that a silo trained on",
                f"   PM(L) {share}: the same, each class at its share of the silo's training records",
            ]
        return lines

    def _file_lines(self) -> list[str]:
        kept = " (temporary: folder=... keeps them)" if self.temporary else ""
        lines = [f" Files: {self.folder}{kept}"]
        present = [name for name in _FILES if (self.folder / name).is_file()]
        if present:
            lines.append("   " + "  ".join(present))
        return lines


class RunRecord:
    """What a run leaves behind, kept on disk and up to date while it runs.

    Args:
        folder: where the files go.
        job: of the run.
        method: name, title and paper.
        dataset: title and class names.
        log: for the line a round and the last screen.
    """

    def __init__(
        self, folder: Path, job: JobConfig, method: Method, dataset: DatasetSpec, log: logging.Logger
    ) -> None:
        self.folder = folder
        self.job = job
        self.rows: list[Row] = []
        self.weights: dict[str, float] = {}
        self.synthetic = False
        self.initial_model: dict[str, Any] | None = None
        self.rounds_done = 0
        self.absent: dict[str, str] = {}
        self.trained = False
        self.sums: str = job.summation
        self.declared: dict[str, Declaration] = {}
        self.privacy: PrivacyPlan | None = None
        self.personal: dict[str, Any] | None = None  # means over silos of their personal models
        promised = None if job.privacy is None else (job.privacy.epsilon, job.privacy.delta)
        self.status = Status(job.job_name, job.rounds, promised)
        self.temporary = False  # whether the caller removes the folder with the outcome
        self.best: tuple[float, int] | None = None
        self._judges: frozenset[str] = frozenset()  # who counted the best model
        self._others: frozenset[str] | None = None  # who counted the latest model, where that differs
        self._method = method
        self._dataset = dataset
        self._log = log
        self._started = time.monotonic()

    @property
    def data_line(self) -> str:
        """One line about the records."""
        title = self._dataset.title
        if not self.weights:
            return f"{title}; no silo was enrolled"
        if self.synthetic:
            return f"SYNTHETIC TWIN of {title}, generated records; no claim about a method is made on it"
        divided = getattr(self._asked, "described", None)
        return f"{title}, real records ({divided})" if divided else f"{title}, the sites' own records"

    @property
    def _asked(self) -> Any:
        """What the job asks of the data set."""
        return self._dataset.options.model_validate(self.job.dataset_options)

    def enrolled(self, enrolled: Enrolled) -> None:
        """Put on record who takes part, and what each says of itself."""
        self.declared, self.absent = dict(enrolled.declared), dict(enrolled.absent)
        self.weights = {site: item.weight for site, item in sorted(enrolled.declared.items())}
        self.synthetic = any(item.synthetic for item in enrolled.declared.values())
        self.status = self.status.enrolled(self.weights, self.absent)

    def rules(self) -> list[str]:
        """Which privacy rules held, and which were off; one line each."""
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
            shown = "" if off else f"{of_records} and with {MIN_HOLDERS} holders"
            lines.append(f"silos' policies: {', '.join(profiles)}{shown}")
        if loose := sorted(site for site, item in self.declared.items() if item.any_static_cohort):
            lines.append(f"COUNTS OPENED FOR ANY COHORT at {', '.join(loose)}: differences tell one silo's")
        if self.declared and self.job.summation == "secure" and self.job.privacy is None:
            lines.append(
                "the evaluation is exact: of a class that one silo alone has, it shows that silo's result"
            )
        for fold in ("test", "validation"):
            if fold in self._told_by_few():
                lines.append(f"{fold} records of fewer than {MIN_HOLDERS} silos could be counted: none are")
            if few := sorted(site for site in self.declared if fold in self.declared[site].untold):
                lines.append(f"too few {fold} records to be counted (min_test_count): {', '.join(few)}")
        if self.privacy is None:
            lines.append("no differential privacy: a total itself is exact")
        else:
            lines.append(self.privacy.describe())
        return lines

    def add(self, row: Row, counted: Totals | None, received: Tensors) -> None:
        """Put an exchange on record, and its evaluation to the model that it is of.

        Args:
            row: of the exchange.
            counted: totals of the evaluation, if it was part of the exchange.
            received: the model that was evaluated: the one before this exchange.
        """
        before: Row | None = None
        if counted is not None:
            if not any(item.kind in ("start", "train") for item in self.rows):
                self.rows.append(Row(0, "start", [], {}, 0.0, 0, 0))
            before = next(item for item in reversed(self.rows) if item.makes_model)
            before.evaluation = self._summarised(counted, row)
            before.evaluated_by = [site for site in row.silos if not self._untold(site, "test")]
            self._remember_best(before, received)
            self.status = self.status.evaluated(before)
        self.rows.append(row)
        self.status = self.status.summed(row)
        write_rows(self.folder, self.rows)
        self._log.info("%s", round_line(row, self.job.rounds, self.job.roster, before))

    def _summarised(self, counted: Totals, row: Row) -> dict[str, Any]:
        """Metrics of an exchange's totals, which may be noisy."""
        names = self._dataset.class_names
        if self.privacy is None or self.privacy.evaluation is None:
            return evaluation.summarise(counted, names)
        honest = honest_silos(self.job, len(self.weights))
        config = self.privacy.evaluation.config
        return noisy_metrics.summarise(counted, config, names, silos=len(row.silos), honest=honest)

    def _untold(self, site: str, fold: str) -> bool:
        """Whether a silo leaves a fold out of exact evaluations, as it has said or as the others do."""
        left_out = site in self.declared and fold in self.declared[site].untold
        return left_out or fold in self._told_by_few()

    def _told_by_few(self) -> tuple[str, ...]:
        """The folds that no silo tells of, because only one or two would."""
        told = tellers(self.declared.values()) if self.declared and self.job.summation == "secure" else None
        return evaluation.told_by_few(self.job, told)

    def dropped(self, kind: str, number: int, silos: list[str], failed: Mapping[str, str]) -> None:
        """Put on record an exchange that had too few silos and was not opened."""
        self.rows.append(Row(number, kind, silos, dict(failed), 0.0, 0, 0))
        self.status = self.status.summed(self.rows[-1])
        write_rows(self.folder, self.rows)

    def write_card(self, sha256: str) -> None:
        """``model.json``: what the model is, from what, its metrics, and the versions used."""
        last = [row for row in self.rows if row.round == self.job.rounds and row.evaluation]
        spent = last_spent(self.rows)
        card = {
            "format": 1,
            "job": self.job.model_dump(mode="json"),
            "job_sha256": self.job.sha256(),
            "method": {"name": self._method.name, "paper": self._method.paper},
            "classes": list(self._dataset.class_names),
            "data": self.data_line,
            "synthetic": self.synthetic,
            "public_weights": dict(sorted(self.weights.items())),
            "model_sha256": sha256,
            "initial_model": self.initial_model,
            "best_round_by_validation": self.best[1] if self.best else None,
            "privacy_spent": None if spent is None else spent.as_json(),
            "evaluation": last[-1].evaluation if last else None,
            "evaluated_by": last[-1].evaluated_by if last else [],
            "versions": _versions(),
        }
        write_json(self.folder / "model.json", card)

    def finish(self, reason: str | None) -> Outcome:
        """Write ``outcome.json``, show the last screen, return both as a value."""
        job = self.job
        self.status = self.status.ended(trained=self.trained, reason=reason)
        result = Outcome(
            job_name=job.job_name,
            method=self._method.title,
            trained=self.trained,
            rounds_done=self.rounds_done,
            rounds=job.rounds,
            roster=list(job.roster),
            rows=self.rows,
            data=self.data_line,
            summation=self.sums,
            rules=self.rules(),
            folder=self.folder,
            best_round=self.best[1] if self.best else None,
            reason=reason,
            absent=self.absent,
            personal=self.personal,
            seconds=time.monotonic() - self._started,
            test_shared=getattr(self._asked, "test", None) == "global",
            private=self.privacy is not None,
            temporary=self.temporary,
        )
        dropped = [
            {"round": row.round, "kind": row.kind, "silos": row.dropped} for row in self.rows if row.dropped
        ]
        final, spent = result.final(), result.spent()
        values = {
            "trained": result.trained,
            "reason": reason,
            "not_enrolled": self.absent,
            "job_name": job.job_name,
            "method": self._method.name,
            "data": result.data,
            "rounds_done": result.rounds_done,
            "rounds": job.rounds,
            "roster": result.roster,
            "synthetic": self.synthetic,
            "summation": job.summation,
            "sums": self.sums,
            "rules": result.rules,
            "privacy": None if self.job.privacy is None else self.job.privacy.model_dump(mode="json"),
            "privacy_spent": None if spent is None else spent.as_json(),
            "best_round_by_validation": result.best_round,
            "dropped": dropped,
            "evaluation": final.evaluation if final else None,
            "evaluated_by": final.evaluated_by if final else [],
            "test_shared": result.test_shared,
            "personal": self.personal,
            "seconds": round(result.seconds, 1),
            # Also in the model's card, which a run that failed has not.
            "job": job.model_dump(mode="json"),
            "job_sha256": job.sha256(),
            "versions": _versions(),
        }
        write_json(self.folder / "outcome.json", values)
        writing.leave(self.folder, self._log)
        (self._log.error if reason else self._log.info)("%s", result.screen())
        return result

    def _remember_best(self, row: Row, received: Tensors) -> None:
        """Keep the model with the best balanced accuracy on the validation folds.

        Only models counted by the same silos are compared: without a hard silo's records any model
        looks better. After two models in a row counted by other silos (one is gone for good, or is
        back) the comparison starts anew with those.
        """
        if row.round == 0 or row.evaluation is None or noisy_metrics.is_noisy(row.evaluation):
            return  # of a few noisy models the best one is the luckiest
        judges = frozenset(row.evaluated_by)
        value = row.evaluation["validation"].get("balanced_accuracy")
        if value is None:
            return
        if judges == self._judges:
            self._others = None
            better = self.best is None or value > self.best[0]
        else:
            better = self.best is None or len(judges) > len(self._judges) or judges == self._others
            self._others = judges
        if better:
            self.best, self._judges, self._others = (value, row.round), judges, None
            save_tensors(self.folder / "best_model.safetensors", received)


_FILES = (
    "model.safetensors",
    "best_model.safetensors",
    "model.json",
    "metrics.jsonl",
    "outcome.json",
    "report.html",
    "transcript.jsonl",
)


def last_spent(rows: Sequence[Row]) -> Spent | None:
    """What silos told last of the epsilon that a job has cost them."""
    return next((row.spent for row in reversed(rows) if row.spent is not None), None)


def round_line(row: Row, rounds: int, roster: Sequence[str], before: Row | None) -> str:
    """One focused line for one exchange."""
    parts = []
    if row.training:
        loss = row.training.get("loss")
        terms = ", ".join(f"{name} {value:.4g}" for name, value in row.training.items() if name != "loss")
        parts.append(
            f"training loss {shown(loss)}" + (f" (terms before their weights: {terms})" if terms else "")
        )
    if before is not None and before.evaluation is not None:
        test = before.evaluation["test"]
        which = "initial model" if before.round == 0 else f"model after round {before.round}"
        parts.append(
            f"test of the {which}: {noisy_metrics.round_words(test)}"
            if noisy_metrics.is_noisy(before.evaluation)
            else f"test of the {which}: balanced accuracy {shown(test.get('balanced_accuracy'))}, "
            f"accuracy {shown(test.get('accuracy'))}"
        )
    if row.spent is not None:
        parts.append(str(row.spent))
    dropped = ""
    if row.dropped:
        dropped = "; without " + ", ".join(f"{name} ({code})" for name, code in sorted(row.dropped.items()))
    parts.append(f"{len(row.silos)} of {len(roster)} silos{dropped}")
    if row.shut:
        parts.append("counts and class sums stay shut, so the evaluation is missing")
    parts.append(f"{row.seconds:.0f} s, {(row.bytes_down + row.bytes_up) / 1e6:.1f} MB")
    head = f"round {row.round} of {rounds}" if row.kind == "train" else row.kind
    if row.phases > 1:
        head += f", phase {row.phase + 1} of {row.phases}"
    return f"{head}: " + " | ".join(parts)


def write_rows(folder: Path, rows: Sequence[Row]) -> None:
    """``metrics.jsonl``, whole at every moment."""
    text = "".join(json.dumps(row.as_json(), allow_nan=False) + "\n" for row in rows)
    write_atomically(folder / "metrics.jsonl", text.encode())


def _without_confusion(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """An evaluation for a line a round, which is written anew each round; 100 classes have 10 000 cells."""
    if found is None:
        return None
    return {
        fold: {key: value for key, value in metrics.items() if key != "confusion"}
        for fold, metrics in found.items()
    }


def _versions() -> dict[str, str]:
    packages = ("torch", "numpy", "nvflare", "monai", "safetensors")
    own = {"tightframe": __version__, "python": platform.python_version()}
    return own | {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _exchange_name(row: Row) -> str:
    name = f"round {row.round}" if row.kind == "train" else row.kind
    return f"{name}, phase {row.phase + 1}" if row.phases > 1 else name
