"""The model card, ``model.json``: a model's job, method, records and software versions."""

from __future__ import annotations

from typing import Any

from tightframe.results.files import CARD, ResultFile, Values
from tightframe.results.parts.evaluation import Evaluation
from tightframe.results.parts.ranges import Spent
from tightframe.results.parts.withdrawal import WithdrawnRecords


class MethodCard(Values):
    """A method's name and paper."""

    name: str
    paper: str | None = None


class InitialModel(Values):
    """A pretrained start: its hash, and the tensors that it lacked."""

    sha256: str
    fresh: list[str] = []


class Card(ResultFile):
    """``model.json``.

    Attributes:
        job, job_sha256: the job's plain values, and their hash.
        classes: names, in the order of the model's outputs.
        absent_classes: held by too few silos, so that a model of one sum never answers them; absent if none.
        data: one line about the records; ``synthetic`` if they are generated.
        public_weights: silo -> weight in the sums.
        model_sha256: of ``model.safetensors``; None if each silo has its own model.
        initial_model: of a pretrained start.
        withdrawn: records that left the total of an ended run, and models that continue from it.
        best_round_by_validation: the round whose model ``best_model.safetensors`` is.
        privacy_spent: epsilon that silos last reported as spent on the job.
        evaluation, evaluated_by: of the last model, and the silos that evaluated it.
        versions: package -> version at the server.
    """

    NAME = CARD

    job: dict[str, Any] = {}
    job_sha256: str | None = None
    method: MethodCard
    classes: list[str] = []
    absent_classes: list[str] = []
    data: str | None = None
    synthetic: bool = False
    public_weights: dict[str, float] = {}
    model_sha256: str | None
    initial_model: InitialModel | None = None
    withdrawn: WithdrawnRecords | None = None
    best_round_by_validation: int | None = None
    privacy_spent: Spent | None = None
    evaluation: Evaluation | None = None
    evaluated_by: list[str] = []
    versions: dict[str, str] = {}

    def as_json(self) -> dict[str, Any]:
        """Return plain values, leaving out empty absent classes."""
        values = super().as_json()
        if not self.absent_classes:
            del values["absent_classes"]
        return values
