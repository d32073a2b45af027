"""How a run ended: a value, and the last screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightframe.errors import REASONS
from tightframe.report.words import one_answer, plural, shown
from tightframe.rounds.checkpoint import BEST
from tightframe.rounds.context import CHECKPOINT
from tightframe.rounds.dropouts import NOT_MEASURED, Lost
from tightframe.rounds.riders import noisy_evaluation
from tightframe.rounds.riders.epsilon import Spent
from tightframe.rounds.rows import Row, last_spent

_FILES = (
    "model.safetensors",
    BEST,
    "model.json",
    "metrics.jsonl",
    "outcome.json",
    "report.html",
    "transcript.jsonl",
    CHECKPOINT,
    "tb_events",
)


def final_row(rows: Sequence[Row], rounds: int) -> Row | None:
    """The row that made the last of a run's models, if that model was evaluated."""
    evaluated = [row for row in rows if row.evaluation is not None]
    return evaluated[-1] if evaluated and evaluated[-1].round == rounds else None


@dataclass
class Outcome:
    """The end of a run, as ``outcome.json`` and as the last screen tell it.

    ``absent``: silo -> code of those that were not enrolled; ``absent_rules``: the rules that they told.

    ``test_shared``: all silos test on the same records, so that pooled counts have each of them once for
    every silo. ``own_models``: each silo has a model of its own, and there is no global one.
    ``temporary``: the files go with this value. ``evaluates``: whether the job has the server measure models.
    ``lost``: silo -> since when it is missing; ``notes``: what that means, in sentences.
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
    absent_rules: dict[str, list[str]] = field(default_factory=dict)
    personal: dict[str, Any] | None = None
    seconds: float = 0.0
    test_shared: bool = False
    own_models: bool = False
    private: bool = False
    temporary: bool = False
    evaluates: bool = True
    lost: dict[str, Lost] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        """Whether test records of the silos say how good the final model is."""
        final = self.final()
        test = {} if final is None or final.evaluation is None else final.evaluation["test"]
        return bool(test.get("noisy") or test.get("records"))

    @property
    def status(self) -> str:
        """How the run ended, in the words that every surface has."""
        if not self.trained:
            return "not trained"
        # Where the job keeps its evaluation at the silos, nothing is missing here.
        return "trained" if self.measured or not self.evaluates else NOT_MEASURED

    def final(self) -> Row | None:
        """The row of the last model, if that was evaluated."""
        return final_row(self.rows, self.rounds_done)

    def spent(self) -> Spent | None:
        """What silos told last of the epsilon that the job has cost them; None without privacy."""
        return last_spent(self.rows)

    def screen(self) -> str:
        """One screen: trained or not, which silos, the metrics, where the files are."""
        lines = ["", "=" * 78]
        lines.append(
            f" {self.status.upper()}: {self.job_name}, {self.method}, "
            f"{self.rounds_done} of {plural(self.rounds, 'round')} in {self.seconds:.0f} s"
        )
        if self.reason:
            lines += [
                f" Reason: {line}" if i == 0 else f"   {line}"
                for i, line in enumerate(self.reason.split("\n"))
            ]
        lines += [f" Note: {line}" for line in self.notes]
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
            why = "; ".join([REASONS.get(code, "named"), *self.absent_rules.get(name, ())])
            lines.append(f"   {name} was not enrolled: {code} ({why})")
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
        if noisy_evaluation.is_noisy(final.evaluation):
            told = [(row.round, row.evaluation) for row in self.rows if row.evaluation]
            return noisy_evaluation.screen_lines(test, whose, told)
        lines = [
            f" Test records of {whose} ({self._counted(test['records'], final.evaluated_by)}): "
            f"balanced accuracy {shown(test.get('balanced_accuracy'))}, "
            f"accuracy {shown(test.get('accuracy'))}, AUROC {shown(test.get('auroc'))}, "
            f"AP {shown(test.get('average_precision'))}"
        ]
        if (answer := one_answer(test.get("one_answer"))) is not None:
            lines.append(f"   NOTE: {answer}")
        if self.own_models:
            lines[0] += "; each silo's records by its own model"
            lines.append(" There is no global model: each silo keeps its own")
            lines.append(" They were evaluated after the last round only")
        else:
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
            lines.append(f" Best round by validation: {self.best_round} ({BEST})")
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
        if self.own_models:
            lines.append("   the same models as above; here each silo counts once, there each record")
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
        present = [name for name in _FILES if (self.folder / name).exists()]
        if present:
            lines.append("   " + "  ".join(present))
        return lines
