"""A model of an ended run, loaded from its results, as the function that its evaluation used.

The card (``model.json``) of a server's results, or a silo's own report, has the whole job, from which the
network is built as in the run: the method's head, the frozen encoder, the normalisation of a job with
privacy. The tensors have all the rest: an ETF's temperature, the scale of a closed form, pooled moments.
No record of the job is needed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from tightframe.errors import JobError, ModelError
from tightframe.learning import outputs
from tightframe.learning.batches import merge_single_tail
from tightframe.learning.model_update import build_template
from tightframe.learning.one_sum.closed_form import ABSENT
from tightframe.learning.one_sum.temperature import BIAS, WEIGHT
from tightframe.results.files import BEST, CARD, LOCAL, MODEL, OUTCOME, PERSONAL, not_proven, read_bytes
from tightframe.results.local_report import SiloReport
from tightframe.results.model_card import Card
from tightframe.results.parts.evaluation import OneAnswer
from tightframe.rounds.setup import JobSetup, assemble

if TYPE_CHECKING:
    from tightframe.inference.inputs import Problem
    from tightframe.inference.predictions import Predicted

PLACES = (".", "workspace", "server", "server/simulate_job")
"""Folders of results: the folder itself, a downloaded job, a run in process, a simulation's workspace."""


@dataclass(frozen=True)
class TrainedModel:
    """A model that computes the same as its run's evaluation.

    Attributes:
        hash: SHA-256 (hex) of the file.
        card: of the run, or the silo's own report for a model in a silo's folder.
        setup: of the run's job.
        module: the network, in evaluation mode, on ``device``.
    """

    path: Path
    hash: str
    card: Card | SiloReport
    setup: JobSetup = field(repr=False)
    module: nn.Module = field(repr=False)
    device: torch.device = field(repr=False)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the probabilities."""
        return self.setup.dataset.class_names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one record."""
        return tuple(self.setup.setting.input_shape)

    @cached_property
    def synthetic(self) -> bool:
        """True if it was trained on generated records, so that its answers mean nothing for real ones."""
        return self.card.synthetic

    @cached_property
    def absent_classes(self) -> tuple[str, ...]:
        """Names of the classes that it never answers, because its one sum lacked them."""
        if self.setup.method.one_sum is None:
            return ()
        tensors = self.module.state_dict()
        weight, bias = tensors[WEIGHT].cpu(), tensors[BIAS].cpu()
        if len(weight) != len(self.class_names):  # one logit for two classes, both present
            return ()
        absent = ((weight == 0).all(1) & (bias == ABSENT)).tolist()
        return tuple(name for name, lacks in zip(self.class_names, absent, strict=True) if lacks)

    @property
    def best_round(self) -> int | None:
        """The round of the best model by validation; None if none was kept."""
        return self.card.best_round_by_validation if isinstance(self.card, Card) else None

    @property
    def one_answer(self) -> OneAnswer | None:
        """The only answer that a run's last model gave on the test records; None of any other model."""
        if not isinstance(self.card, Card) or self.card.evaluation is None or self.path.name != MODEL:
            return None
        return self.card.evaluation.test.one_answer

    @property
    def origin(self) -> str:
        """Describe the model's round, or that it is personal."""
        if self.path.name == BEST and self.best_round is not None:
            return f"round {self.best_round}'s, the best by validation"
        return {BEST: "the best by validation", PERSONAL: "a silo's personal one"}.get(
            self.path.name, "the last round's"
        )

    @property
    def findings(self) -> bool:
        """True if the classes are findings, any number of which a record may have."""
        return self.setup.dataset.multi_label

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, C) of one batch, without gradients."""
        with torch.no_grad():
            tensor = x.to(self.device)
            if tensor.dim() == 4:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            return self.setup.method.predict(self.module, tensor).float()

    def predict_proba(self, x: ArrayLike | torch.Tensor) -> NDArray[np.float64]:
        """Return the probability of each class, (n, C), rows summing to 1; for findings of each by itself.

        Args:
            x: records (n, *input_shape) after the evaluation's transforms; ``inference.inputs`` makes them
                from files.

        Raises:
            ModelError: TF-823 for another shape, or values that are not finite numbers; TF-824 if a
                probability is not finite.
        """
        records = self._checked(x)
        batches = merge_single_tail(records, self.setup.job.evaluation.batch_size)
        logits = (self.logits(batch).double() for batch in batches)
        parts = [outputs.probabilities(item, findings=self.findings).cpu() for item in logits]
        probabilities = (
            torch.cat(parts) if parts else torch.zeros(0, len(self.class_names), dtype=torch.float64)
        )
        if not bool(torch.isfinite(probabilities).all()):
            first = int((~torch.isfinite(probabilities)).any(1).nonzero()[0])
            raise ModelError(
                f"Expected finite probabilities, but record {first} has none: the record is far outside of "
                "what the model was trained on, or its training diverged.",
                code="TF-824",
            )
        return probabilities.numpy()

    def predict(self, x: ArrayLike | torch.Tensor) -> NDArray[np.int64]:
        """Return the most probable class of each record, (n,), as an index of ``class_names``.

        For findings: 1 for each with a probability of 0.5 or more, else 0, (n, K).

        Raises:
            ModelError: see ``predict_proba``.
        """
        if self.findings:
            return (self.predict_proba(x) >= outputs.LEAST).astype(np.int64)
        return self.predict_proba(x).argmax(1).astype(np.int64)

    def predict_table(
        self, path: str | Path, *, name: str | None = None
    ) -> tuple[list[Predicted], list[Problem]]:
        """Return the predictions for the rows of a CSV file, and the rows with problems.

        Args:
            path: of the file, with the model's columns in any order.
            name: column that names a row.

        Raises:
            ModelError: TF-823 for another header, or a model of other data.
        """
        from tightframe.inference.inputs import find
        from tightframe.inference.predictions import predictions

        rows = find(self, [Path(path)], name_column=name)
        return list(predictions(self, rows)), rows.problems

    def _checked(self, x: Any) -> torch.Tensor:
        """Return the records as float32 (n, *input_shape)."""
        try:
            tensor = x if isinstance(x, torch.Tensor) else torch.from_numpy(np.asarray(x, dtype=np.float32))
        except (TypeError, ValueError) as error:
            raise ModelError(f"Expected records as numbers, but got: {error}.", code="TF-823") from None
        wanted = self.input_shape
        if tensor.dim() != 1 + len(wanted) or tuple(tensor.shape[1:]) != wanted:
            shown = ", ".join(map(str, wanted))
            raise ModelError(
                f"Expected records of shape (n, {shown}), but got {tuple(tensor.shape)}: a single record "
                "needs an axis in front.",
                code="TF-823",
            )
        records = tensor.detach().to("cpu", torch.float32)
        finite = torch.isfinite(records).reshape(len(records), -1).all(1) if len(records) else None
        if finite is not None and not bool(finite.all()):
            first = int((~finite).nonzero()[0])
            raise ModelError(
                f"Expected finite numbers, but record {first} has others ({int((~finite).sum())} records).",
                code="TF-823",
            )
        return records


def load_model(place: str | Path, *, device: str | torch.device = "cpu") -> TrainedModel:
    """Load a model of an ended run.

    ::

        model = tightframe.load_model("simulator_workspace")              # the global model
        model = tightframe.load_model("site-1/personal_model.safetensors")  # a silo's personal one
        model.predict_proba(x)                                            # (n, C)

    Args:
        place: results of a run's server or of a silo, or the folder above them of a run in process, a
            simulation or a download; or one of the model files in such a folder.

    Raises:
        ModelError: TF-821 if there is no model, or too little to load it; TF-822 if the file is not the one
            that the run wrote, or does not fit; TF-827 if a silo never verified its last total.
        ResultsError: TF-802 if a card or report cannot be read.
        JobError: TF-101 if its job names anything not installed here, or values unknown to this version.
    """
    path = _model_file(Path(place))
    folder = path.parent
    if (why := not_proven(path)) is not None:
        raise ModelError(why, code="TF-827")
    card = Card.read(folder) if (folder / CARD).is_file() else None
    report = SiloReport.read(folder) if (folder / LOCAL).is_file() else None
    described: Card | SiloReport | None = report or card
    if described is None:
        raise ModelError(
            f"Expected {CARD} of a server's results, or {LOCAL} of a silo's, beside {path}, but there is "
            "neither: copy it from the run. The weights alone do not say what they are."
        )
    job = described.job or (card.job if card is not None else {})
    if not job:
        raise ModelError(
            f"Expected {folder / LOCAL} to have the job of the run, but it has none: a version that did not "
            f"write it there made it. Copy {CARD} of the same run's server beside it."
        )
    content = read_bytes(path)
    digest = hashlib.sha256(content).hexdigest()
    _check_hash(path, digest, card if report is None else report)
    try:
        setup = assemble(job)
    except JobError as error:
        raise ModelError(
            f"Expected a job in {folder} that this version can build, with all that it names installed, but "
            + "; ".join(error.problems),
        ) from None
    _check_classes(described if described.classes else card, setup, folder)
    setting = setup.setting if report is None else setup.setting_at(report.silo)
    module = build_template(setting)
    if path.name == PERSONAL and setup.method.personal_form is not None:
        module = setup.method.personal_form(setting, module)
    _load(module, content, path)
    if len(setting.input_shape) == 3:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    target = torch.device(device)
    return TrainedModel(path, digest, described, setup, module.to(target).eval(), target)


def _model_file(place: Path) -> Path:
    """Return the model's file.

    Raises:
        ModelError: TF-821, describing what is there instead.
    """
    if place.is_file():
        if place.name in (MODEL, BEST, PERSONAL):
            return place
        raise ModelError(
            f"Expected one of {MODEL}, {BEST} and {PERSONAL}, as runs call them, but got {place}: what a "
            "model is stands in the files beside it. One from elsewhere is evaluated by a job that names its "
            "network: save its state_dict with safetensors.torch.save_file (no pickle, no TorchScript), then "
            "`tightframe jobs export --method fedavg --contract contract.json --evaluate FILE`."
        )
    if (why := not_proven(place)) is not None and not (place / MODEL).is_file():
        raise ModelError(why, code="TF-827")
    if not place.is_dir():
        raise ModelError(f"Expected a folder with a run's results at {place}, but there is none.")
    folders = [place / part for part in PLACES]
    for folder in folders:
        if (folder / MODEL).is_file():
            return folder / MODEL
    for folder in folders:
        if (folder / CARD).is_file() and Card.read(folder).model_sha256 is None:
            raise ModelError(
                f"Expected a global model in {folder}, but the method has none: each silo keeps its own. "
                "Name a silo's folder."
            )
        if (folder / OUTCOME).is_file():
            raise ModelError(
                f"Expected {MODEL} in {folder}, but the run has left none: it has not trained to its end "
                "(see outcome.json)."
            )
    raise ModelError(
        f"Expected {MODEL} in {place} or in {', '.join(PLACES[1:])} there, but there is none: name a folder "
        "of a run's results, at the server or at a silo."
    )


def _check_hash(path: Path, digest: str, described: Card | SiloReport | None) -> None:
    """Refuse a file whose hash is not the one that its run recorded."""
    wanted = None
    if path.name == MODEL and described is not None:
        wanted = described.model_sha256
    elif path.name == PERSONAL and isinstance(described, SiloReport) and described.personal is not None:
        wanted = described.personal.model_sha256
    if wanted is not None and wanted != digest:
        raise ModelError(
            f"Expected {path} with SHA-256 {wanted}, as the files beside it say, but it has {digest}: it was "
            "changed, or is of another run. Copy the folder again from the run.",
            code="TF-822",
        )


def _check_classes(described: Card | SiloReport | None, setup: JobSetup, folder: Path) -> None:
    """Refuse a model whose classes differ in names or order from the installed data set's."""
    names = setup.dataset.class_names
    if described is not None and described.classes and tuple(described.classes) != names:
        raise ModelError(
            f"Expected the classes {list(names)} of {setup.dataset.title}, but the model in {folder} has "
            f"{described.classes}: another version of the data set is installed here.",
            code="TF-822",
        )


def _load(module: nn.Module, content: bytes, path: Path) -> None:
    """Load a file's tensors into a module, which they must fit."""
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ModelError(f"Expected {path} in safetensors format, but got: {error}.", code="TF-822") from None
    wanted = module.state_dict()
    other = sorted(set(wanted) ^ set(tensors))
    other += [
        name for name in sorted(set(wanted) & set(tensors)) if wanted[name].shape != tensors[name].shape
    ]
    if other:
        raise ModelError(
            f"Expected the tensors of the network that the job describes in {path}, but {other[:5]} are "
            "missing, unknown or of another shape: another version of the network is installed here, or the "
            "file is of another run.",
            code="TF-822",
        )
    module.load_state_dict(tensors)
