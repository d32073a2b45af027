"""A trained model's answers for many inputs, as rows of a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tightframe.errors import ModelError
from tightframe.inference.inputs import Inputs, Problem
from tightframe.learning import outputs
from tightframe.results.words import in_their_case

if TYPE_CHECKING:
    from tightframe.inference.model import TrainedModel

_FORMULA = frozenset("=+-@\t\r")
"""First characters of a cell that a spreadsheet evaluates."""


@dataclass(frozen=True)
class OperatingPoint:
    """The probability from which on one class is the answer; below it the most probable other class is.

    For findings it replaces 0.5 for that one only.

    Attributes:
        least: the probability, above 0 and at most 1.
    """

    of_class: str
    least: float

    @classmethod
    def parsed(
        cls, text: str, class_names: tuple[str, ...], codes: Mapping[str, str] | None = None
    ) -> OperatingPoint:
        """Parse ``CLASS=PROBABILITY``.

        Args:
            text: as typed.
            codes: a contract's code of each class -> its name; either may be typed.

        Raises:
            ModelError: TF-823 for another form, an unknown class, or no probability.
        """
        name, _, value = text.rpartition("=")
        if name not in class_names:
            name = in_their_case((codes or {}).get(name, name), class_names)
        try:
            least = float(value)
        except ValueError:
            least = float("nan")
        if name not in class_names or not 0 < least <= 1:
            raise ModelError(
                f"Expected an operating point CLASS=PROBABILITY with a class of {list(class_names)} and a "
                f"probability above 0 and at most 1, but got {text!r}.",
                code="TF-823",
            )
        return cls(name, least)

    def __str__(self) -> str:
        return f"{self.of_class}>={self.least:g}"

    def answer(self, probabilities: np.ndarray, class_names: tuple[str, ...]) -> int:
        """Return the class, as an index, for probabilities (C,)."""
        place = class_names.index(self.of_class)
        if probabilities[place] >= self.least:
            return place
        others = probabilities.copy()
        others[place] = -1
        return int(others.argmax())


def class_codes(model: TrainedModel) -> dict[str, str]:
    """Return code in the contract -> name of each class or finding; empty without a contract."""
    label = model.setup.job.dataset_options.get("contract", {}).get("label", {})
    if "classes" in label:
        return {item["code"]: item.get("title") or item["code"] for item in label["classes"]}
    return {item["column"]: item.get("title") or item["column"] for item in label.get("findings", ())}


def answers(model: TrainedModel, probabilities: np.ndarray, point: OperatingPoint | None) -> tuple[str, ...]:
    """Return the name of the class, or of all findings, for probabilities (C,)."""
    names = model.class_names
    if not model.findings:
        return (names[int(probabilities.argmax()) if point is None else point.answer(probabilities, names)],)
    least = [point.least if point and name == point.of_class else outputs.LEAST for name in names]
    return tuple(name for name, p, at in zip(names, probabilities, least, strict=True) if p >= at)


@dataclass(frozen=True)
class Predicted:
    """The prediction for one input.

    Attributes:
        probabilities: (C,).
        answers: the class, or all findings.
    """

    name: str
    probabilities: np.ndarray
    answers: tuple[str, ...]

    @property
    def answer(self) -> str:
        """Return the answers, joined by semicolons."""
        return ";".join(self.answers)


def predictions(
    model: TrainedModel,
    inputs: Inputs,
    point: OperatingPoint | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Iterator[Predicted]:
    """Yield the model's prediction for each readable input, in order.

    Args:
        inputs: whose ``problems`` then list the others.
        point: selects the answer; None takes the most probable class.
        progress: called after each batch with the number of inputs done, and of all.
    """
    size, waiting, done = model.setup.job.evaluation.batch_size, [], 0
    for item in inputs.records():
        waiting.append(item)
        if len(waiting) == size:
            yield from _predicted(model, waiting, point, inputs.problems)
            done, waiting = done + len(waiting), []
            progress(done, len(inputs))
    yield from _predicted(model, waiting, point, inputs.problems)
    progress(done + len(waiting), len(inputs))


def _predicted(
    model: TrainedModel,
    items: list[tuple[str, torch.Tensor]],
    point: OperatingPoint | None,
    problems: list[Problem],
) -> Iterator[Predicted]:
    if not items:
        return
    try:
        probabilities = model.predict_proba(torch.stack([record for _, record in items]))
    except ModelError as error:
        if len(items) == 1:
            problems.append(Problem(items[0][0], error.code, str(error.args[0])))
            return
        for item in items:  # one bad record must not spoil the others
            yield from _predicted(model, [item], point, problems)
        return
    for (name, _), row in zip(items, probabilities, strict=True):
        yield Predicted(name, row, answers(model, row, point))


def header(model: TrainedModel, point: OperatingPoint | None) -> str:
    """Return the header: input, one probability per class, the answer, the operating point, the model.

    If a contract's codes differ from its titles, the answer's code follows the answer.
    """
    columns = [f"p_{name}" for name in model.class_names]
    coded = ["answer_code"] * bool(_other_codes(model))
    point_at = [] if point is None else ["operating_point"]
    return _line(["input", *columns, "answer", *coded, *point_at, "model_sha256"])


def line(model: TrainedModel, predicted: Predicted, point: OperatingPoint | None) -> str:
    """Return the line of an input, with exact probabilities."""
    values = [repr(float(value)) for value in predicted.probabilities]
    shown = [] if point is None else [str(point)]
    codes = _other_codes(model)
    coded = [";".join(codes[name] for name in predicted.answers)] if codes else []
    return _line([predicted.name, *values, predicted.answer, *coded, *shown, model.hash])


def _other_codes(model: TrainedModel) -> dict[str, str]:
    """Return name -> code in the contract of each class or finding; empty if all are the same."""
    codes = {name: code for code, name in class_codes(model).items()}
    return {} if all(name == code for name, code in codes.items()) else codes


def _line(cells: list[str]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerow(map(_inert, cells))
    return stream.getvalue()


def _inert(cell: str) -> str:
    """Prefix a cell with an apostrophe if a spreadsheet would evaluate it as a formula.

    Names of classes come from the job's author, those of files and rows with the records.

    >>> [_inert(cell) for cell in ("=1+1", "@SUM(1)", "-2.5e-07", "-", "NV")]
    ["'=1+1", "'@SUM(1)", '-2.5e-07', '-', 'NV']
    """
    if cell[:1] not in _FORMULA or len(cell) < 2:
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell
