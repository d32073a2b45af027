"""Lines of ``metrics.jsonl``: one per exchange with the silos, with the model that it made."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tightframe.files import write_atomically
from tightframe.results.files import METRICS, ResultFile, parsed, read_bytes
from tightframe.results.parts.evaluation import Evaluation, FoldMetrics
from tightframe.results.parts.ranges import Spent, UpdateNorms
from tightframe.results.words import exchange_name, metric, one_answer, shown

_HEADLINE = (
    "accuracy",
    "balanced_accuracy",
    "balanced_accuracy_interval",
    "classes_told",
    "one_answer",
    "auroc",
    "average_precision",
    "recall",
)
FAILED_SILOS = "failed_silos"
"""Key of ``Row.counts``: number of silos whose term is neutral, because they could not contribute."""
EVALUATED_MODELS = 11
"""Default number of a job's models that are evaluated exactly."""
_SHORT = {"statistics": "stat", "before": "pre", "after": "post", "closing": "close", "personal": "own"}


class Row(ResultFile):
    """One exchange with the silos and the model that it made.

    Attributes:
        round, kind: of the exchange.
        phase, phases: its index from 0, and the number of phases in its round.
        training: mean loss of local training and its terms, by name.
        privacy: epsilon that silos report as spent on the job so far.
        silos: in the sum.
        dropped: silo -> code of those not in the sum.
        seconds, bytes_down, bytes_up: duration of the exchange, size of requests and answers.
        evaluation: of the model that the exchange made, measured in the *next* exchange.
        evaluated_by: silos that evaluated it, which need not be those that trained it.
        static_opened: whether counts and class sums were opened; they stay masked after a drop-out.
        update_norms: norms of the silos' updates, if the job has an ``update_norm``; else absent.
        counts: numbers of riders without a key of their own, by rider; absent if there are none.
    """

    NAME = METRICS

    round: int
    kind: str
    phase: int = 0
    phases: int = 1
    training: dict[str, float] = {}
    privacy: Spent | None = None
    silos: list[str]
    dropped: dict[str, str]
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    evaluation: Evaluation | None = None
    evaluated_by: list[str] = []
    static_opened: bool = True
    update_norms: UpdateNorms | None = None
    counts: dict[str, float] = {}

    @property
    def asked(self) -> bool:
        """Check whether it is an exchange with silos, not the start's model."""
        return bool(self.silos or self.dropped)

    @property
    def failed(self) -> int:
        """Number of silos that answered but could not contribute; their names stay hidden."""
        return round(self.counts.get(FAILED_SILOS, 0))

    @property
    def makes_model(self) -> bool:
        """Check whether it makes a model to evaluate: the start, or the last phase of a round."""
        return self.kind in ("start", "train") and self.phase == self.phases - 1

    @property
    def name(self) -> str:
        """Readable name of the exchange: ``round 3, phase 2``."""
        return exchange_name(self.kind, self.round, self.phase if self.phases > 1 else None)

    @property
    def test(self) -> FoldMetrics | None:
        """Metrics of its model on the test records, if it was evaluated."""
        return None if self.evaluation is None else self.evaluation.test

    def as_json(self, *, reading: bool = False) -> dict[str, Any]:
        """Return plain values: the main test metrics first, and no table of counts.

        All lines are rewritten after each exchange, and a matrix of 100 classes has 10 000 cells.

        Args:
            reading: include the clinical reading of the scores, by class.
        """
        left_out = {"confusion", "scores", *(() if reading else ("scores_deviation", "read_at", "reading"))}
        values = self.model_dump(
            mode="json",
            by_alias=True,
            exclude={"evaluation": {"validation": left_out, "test": left_out}},
        )
        test: dict[str, Any] = (values["evaluation"] or {}).get("test", {})
        headline = {name: test.get(name) for name in _HEADLINE}
        noise = {"noisy": bool(test.get("noisy")), "noise_deviation": test.get("noise_deviation")}
        place = {name: values.pop(name) for name in ("format", "round", "kind", "phase", "phases")}
        if not self.counts:
            del values["counts"]
        if self.update_norms is None:
            del values["update_norms"]
        return {**place, **headline, **noise, **values}


def read_rows(folder: Path) -> tuple[Row, ...]:
    """Read the ``metrics.jsonl`` of a folder; empty without one.

    Raises:
        ResultsError: TF-802, naming the line.
    """
    path = folder / METRICS
    if not path.is_file():
        return ()
    rows = []
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        place = f"{path}, line {number}"
        rows.append(Row.checked(parsed(line, place), place))
    return tuple(_counted(rows))


def _counted(rows: Sequence[Row]) -> list[Row]:
    """Set the number of phases in rows of older files, which lack it."""
    last: dict[tuple[str, int], int] = {}
    for row in rows:
        place = (row.kind, row.round)
        last[place] = max(row.phase, last.get(place, 0))
    return [
        row
        if "phases" in row.model_fields_set
        else row.model_copy(update={"phases": last[row.kind, row.round] + 1})
        for row in rows
    ]


def write_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Write ``metrics.jsonl`` atomically; the last model's line has the clinical reading of its scores."""
    last = max((place for place, row in enumerate(rows) if row.evaluation is not None), default=None)
    text = "".join(
        json.dumps(row.as_json(reading=place == last), allow_nan=False) + "\n"
        for place, row in enumerate(rows)
    )
    write_atomically(folder / METRICS, text.encode())


def evaluated_rounds(rounds: int, models: int = EVALUATED_MODELS) -> tuple[int, ...]:
    """Return the rounds whose models are evaluated exactly: the last, the start (0), and others between.

    >>> evaluated_rounds(100, 6), evaluated_rounds(3), evaluated_rounds(3, 1)
    ((0, 20, 40, 60, 80, 100), (0, 1, 2, 3), (3,))
    """
    count = min(models, rounds + 1)
    return tuple(rounds - rounds * i // max(1, count - 1) for i in reversed(range(count)))


def last_spent(rows: Sequence[Row]) -> Spent | None:
    """Return the epsilon that silos last reported as spent on a job."""
    return next((row.privacy for row in reversed(rows) if row.privacy is not None), None)


def final_row(rows: Sequence[Row], rounds: int) -> Row | None:
    """Return the row that made the last of a run's models, if that model was evaluated."""
    evaluated = [row for row in rows if row.evaluation is not None]
    return evaluated[-1] if evaluated and evaluated[-1].round == rounds else None


def round_line(
    row: Row, rounds: int, roster: Sequence[str], before: Row | None, *, start: str = "initial model"
) -> str:
    """Describe an exchange in one line.

    Args:
        before: the row whose model this exchange evaluated, if any.
        start: name of the model that the rounds begin with.
    """
    parts = []
    if row.training:
        loss = row.training.get("loss")
        terms = ", ".join(f"{name} {value:.4g}" for name, value in row.training.items() if name != "loss")
        parts.append(
            f"training loss {shown(loss)}" + (f" (terms before their weights: {terms})" if terms else "")
        )
    if before is not None and before.test is not None:
        # A closed form's sum before the first round also makes a model.
        first = start if before.kind == "start" else "model before round 1"
        which = first if before.round == 0 else f"model after round {before.round}"
        parts.append(f"test of the {which}: {in_words(before.test)}")
    if row.privacy is not None:
        parts.append(str(row.privacy))
    if row.update_norms is not None:
        parts.append(str(row.update_norms))
    parts += [f"{name} {value:g}" for name, value in row.counts.items()]
    dropped = ""
    if row.dropped:
        dropped = "; without " + ", ".join(f"{name} ({code})" for name, code in sorted(row.dropped.items()))
    parts.append(f"{len(row.silos)} of {len(roster)} silos{dropped}")
    if not row.static_opened:
        parts.append("counts and class sums stay shut, so the evaluation is missing")
    parts.append(f"{row.seconds:.0f} s, {(row.bytes_down + row.bytes_up) / 1e6:.1f} MB")
    head = f"round {row.round} of {rounds}" if row.kind == "train" else row.kind
    if row.phases > 1:
        head += f", phase {row.phase + 1} of {row.phases}"
    return f"{head}: " + " | ".join(parts)


def in_words(test: FoldMetrics) -> str:
    """Describe a model's test metrics in one line."""
    noisy = "noisy " if test.noisy else ""
    parts = [
        ", ".join(
            f"{noisy}{name.replace('_', ' ')} {metric(test, name)}"
            for name in ("balanced_accuracy", "accuracy")
        )
    ]
    if (answer := one_answer(test.one_answer)) is not None:
        parts.append(answer)
    if test.noisy:
        parts.append(noise_words(test))
    return "; ".join(parts)


def noise_words(test: FoldMetrics) -> str:
    """Describe the noise and the brackets."""
    interval = "an interval" if test.level is None else f"the {test.level:.0%} interval"
    return (
        f"noise of {shown(test.noise_deviation, 1)} records (standard deviation) in each confusion cell; in "
        f"brackets {interval} of the exact value, for the noise alone"
    )


def names(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Return a full and a short name of each exchange: round, phase, number of the try."""
    tries: Counter[tuple[str, int, int]] = Counter()
    result = []
    for row in rows:
        brief = str(row.round) if row.kind == "train" else _SHORT.get(row.kind, row.kind)
        brief += f".{row.phase + 1}" if row.phases > 1 else ""
        place = (row.kind, row.round, row.phase)
        tries[place] += 1
        name = row.name if tries[place] == 1 else f"{row.name}, try {tries[place]}"
        result.append((name, brief))
    return result
