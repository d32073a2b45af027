"""The rows of ``metrics.jsonl``: one for each exchange, and a line for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightframe.files import write_atomically
from tightframe.report.words import exchange_name, one_answer, shown
from tightframe.rounds.riders import noisy_evaluation
from tightframe.rounds.riders.epsilon import Spent


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

    @property
    def name(self) -> str:
        """For people: ``round 3, phase 2``."""
        return exchange_name(self.kind, self.round, self.phase if self.phases > 1 else None)

    def as_json(self) -> dict[str, Any]:
        """Plain values, metrics of the test fold on top where people look for them."""
        test = (self.evaluation or {}).get("test", {})
        return {
            "round": self.round,
            "kind": self.kind,
            "phase": self.phase,
            "accuracy": test.get("accuracy"),
            "balanced_accuracy": test.get("balanced_accuracy"),
            "balanced_accuracy_interval": test.get("balanced_accuracy_interval"),
            "classes_told": test.get("classes_told"),
            "one_answer": test.get("one_answer"),
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
            f"test of the {which}: {noisy_evaluation.round_words(test)}"
            if noisy_evaluation.is_noisy(before.evaluation)
            else f"test of the {which}: balanced accuracy {shown(test.get('balanced_accuracy'))}, "
            f"accuracy {shown(test.get('accuracy'))}{_and(one_answer(test.get('one_answer')))}"
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


def _and(words: str | None) -> str:
    return "" if words is None else f"; {words}"


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
