"""What a run leaves behind: rows of metrics, the model card, one line a round, one last screen."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightframe import __version__
from tightframe.rounds.checkpoint import write_atomically, write_json


@dataclass
class Row:
    """One exchange with the silos and the model that it made (``after_round``).

    ``evaluation`` belongs to that model, so it is counted by the *next* exchange.
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

    def as_json(self) -> dict[str, Any]:
        """Plain values, metrics of the test fold on top where people look for them."""
        test = (self.evaluation or {}).get("test", {})
        return {
            "round": self.round,
            "kind": self.kind,
            "accuracy": test.get("accuracy"),
            "balanced_accuracy": test.get("balanced_accuracy"),
            "auroc": test.get("auroc"),
            "average_precision": test.get("average_precision"),
            "recall": test.get("recall"),
            "training": self.training,
            "silos": self.silos,
            "dropped": self.dropped,
            "seconds": round(self.seconds, 3),
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "evaluation": self.evaluation,
        }


@dataclass
class Outcome:
    """The end of a run, as ``outcome.json`` and as the last screen tell it."""

    job_name: str
    method: str
    trained: bool
    rounds_done: int
    rounds: int
    roster: list[str]
    rows: list[Row]
    data: str
    summation: str
    folder: Path
    best_round: int | None = None
    reason: str | None = None
    seconds: float = 0.0

    def final(self) -> dict[str, Any] | None:
        """The evaluation of the last model, if it was made."""
        rows = [row for row in self.rows if row.evaluation is not None]
        return rows[-1].evaluation if rows and rows[-1].round == self.rounds_done else None

    def screen(self) -> str:
        """One screen: trained or not, which silos, the metrics, where the files are."""
        lines = ["", "=" * 78]
        verdict = "TRAINED" if self.trained else "NOT TRAINED"
        lines.append(
            f" {verdict}: {self.job_name}, {self.method}, {self.rounds_done} of {self.rounds} rounds "
            f"in {self.seconds:.0f} s"
        )
        if self.reason:
            lines += [
                f" Reason: {line}" if i == 0 else f"   {line}"
                for i, line in enumerate(self.reason.split("\n"))
            ]
        lines.append(f" Data: {self.data}")
        lines.append(f" Sums: {self.summation}")
        lines += self._silo_lines()
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
        for row in self.rows:
            for name, code in sorted(row.dropped.items()):
                lines.append(
                    f"   {name} was left out of {_exchange_name(row)}: {code} ({REASONS.get(code, 'named')})"
                )
        return lines

    def _metric_lines(self) -> list[str]:
        evaluation = self.final()
        if evaluation is None:
            return [" Test metrics: missing (the last model was not evaluated)"]
        test = evaluation["test"]
        lines = [
            f" Test records of all silos ({test['records']}): "
            f"balanced accuracy {shown(test.get('balanced_accuracy'))}, "
            f"accuracy {shown(test.get('accuracy'))}, AUROC {shown(test.get('auroc'))}, "
            f"AP {shown(test.get('average_precision'))}"
        ]
        course = [
            shown(row.evaluation["test"].get("balanced_accuracy")) if row.evaluation else "missing"
            for row in self.rows
            if row.kind in ("start", "train")
        ]
        lines.append(f" Balanced accuracy from round 0 on: {' -> '.join(course)}")
        recall = test.get("recall", {})
        lines.append(" Recall: " + ", ".join(f"{name} {shown(value, 2)}" for name, value in recall.items()))
        if self.best_round is not None:
            lines.append(f" Best round by validation: {self.best_round}")
        return lines

    def _file_lines(self) -> list[str]:
        lines = [f" Files: {self.folder}"]
        present = [name for name in _FILES if (self.folder / name).is_file()]
        if present:
            lines.append("   " + "  ".join(present))
        return lines


_FILES = ("model.safetensors", "best_model.safetensors", "model.json", "metrics.jsonl", "outcome.json")

REASONS: Mapping[str, str] = {
    "TF-201": "not configured",
    "TF-202": "site configuration wrong",
    "TF-203": "data folder missing",
    "TF-204": "split file missing or malformed",
    "TF-205": "image files missing",
    "TF-206": "unreadable images",
    "TF-207": "unknown class",
    "TF-208": "empty centre or fold",
    "TF-301": "training was not finite",
    "TF-302": "out of memory",
    "TF-303": "no such device",
    "TF-401": "contribution was not finite",
    "TF-402": "contribution over its bound",
    "TF-403": "contribution does not fit its schema",
    "TF-502": "late",
    "TF-503": "failed with an error of its own",
    "TF-504": "aborted",
    "TF-505": "job or version differs from the server's",
}
"""What a code means, in a few words; ``docs/errors.md`` says what to do."""


def shown(value: float | None, digits: int = 3) -> str:
    """A number for people; ``-`` where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def round_line(row: Row, rounds: int, roster: Sequence[str], before: Row | None) -> str:
    """One focused line for one exchange."""
    parts = []
    if row.training:
        loss = row.training.get("loss")
        terms = ", ".join(f"{name} {value:.4g}" for name, value in row.training.items() if name != "loss")
        parts.append(f"loss {shown(loss)}" + (f" ({terms})" if terms else ""))
    if before is not None and before.evaluation is not None:
        test = before.evaluation["test"]
        which = "initial model" if before.round == 0 else f"model after round {before.round}"
        parts.append(
            f"{which}: balanced accuracy {shown(test.get('balanced_accuracy'))}, "
            f"accuracy {shown(test.get('accuracy'))}"
        )
    dropped = ""
    if row.dropped:
        dropped = "; without " + ", ".join(f"{name} ({code})" for name, code in sorted(row.dropped.items()))
    parts.append(f"{len(row.silos)} of {len(roster)} silos{dropped}")
    parts.append(f"{row.seconds:.0f} s, {(row.bytes_down + row.bytes_up) / 1e6:.1f} MB")
    head = f"round {row.round} of {rounds}" if row.kind == "train" else _exchange_name(row)
    return f"{head}: " + " | ".join(parts)


def write_rows(folder: Path, rows: Sequence[Row]) -> None:
    """``metrics.jsonl``, whole at every moment."""
    text = "".join(json.dumps(row.as_json(), allow_nan=False) + "\n" for row in rows)
    write_atomically(folder / "metrics.jsonl", text.encode())


def write_card(folder: Path, card: Mapping[str, Any]) -> None:
    """``model.json``: what the model is, from what, and its metrics."""
    versions = {"tightframe": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "nvflare", "monai", "safetensors"):
        versions[package] = _version(package)
    write_json(folder / "model.json", {"format": 1, **card, "versions": versions})


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _exchange_name(row: Row) -> str:
    return f"round {row.round}" if row.kind == "train" else row.kind
