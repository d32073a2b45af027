"""What result files say, as far as the report shows it: keys that it does not know are left alone."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Values(BaseModel):
    """Base of all: frozen, lenient with keys that other versions write, strict with values."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class OneAnswer(Values):
    """A model that gives one answer: the class, and the share of other classes' records that get it, too."""

    model_config = ConfigDict(populate_by_name=True)

    of_class: str = Field(alias="class")
    share: float | None = None
    interval: tuple[float, float] | None = None
    certain: bool = True


class FoldMetrics(Values):
    """One fold of an evaluation; without records there is nothing else. Rows of ``confusion`` are true.

    With ``noisy`` all numbers come from totals with noise of ``noise_deviation`` records in each cell of the
    confusion matrix, and a class with fewer noisy records than ``class_floor`` has no recall. Limits between
    which exact numbers lie, as far as the noise goes, are in what ends in ``_interval``, at ``level``.
    """

    records: int
    noisy: bool = False
    noise_deviation: float | None = None
    class_floor: float | None = None
    balanced_accuracy_deviation: float | None = None
    classes_told: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    balanced_accuracy: float | None = None
    auroc: float | None = None
    average_precision: float | None = None
    recall: dict[str, float | None] = {}
    class_records: dict[str, int] = {}
    level: float | None = None
    records_interval: tuple[int, int] | None = None
    accuracy_interval: tuple[float, float] | None = None
    balanced_accuracy_interval: tuple[float, float] | None = None
    auroc_interval: tuple[float, float] | None = None
    auroc_classes: int | None = None
    recall_interval: dict[str, tuple[float, float] | None] = {}
    class_records_interval: dict[str, tuple[int, int]] = {}
    one_answer: OneAnswer | None = None
    confusion: list[list[int]] | None = None

    @property
    def told(self) -> dict[str, Any]:
        """The same as plain values, for words."""
        return self.model_dump(by_alias=True)


class Evaluation(Values):
    """A model on the two folds that training does not see."""

    validation: FoldMetrics
    test: FoldMetrics


class Bin(Values):
    """``silos`` silos have spent at most ``up_to``, and more than the bin before."""

    up_to: float | None
    silos: int


class RoundPrivacy(Values):
    """What may be told of the privacy spent up to a round: a range over silos, counts, named silos."""

    promised: float | None = None
    delta: float | None = None
    range: tuple[float, float] | None = None
    histogram: list[Bin] = []
    untold: int = 0
    shown: dict[str, float] = {}


class Exchange(Values):
    """A line of ``metrics.jsonl``: one exchange with the silos, and the model that it made."""

    round: int
    kind: str
    phase: int = 0
    training: dict[str, float] = {}
    silos: list[str]
    dropped: dict[str, str]
    seconds: float
    bytes_down: int
    bytes_up: int
    evaluation: Evaluation | None = None
    evaluated_by: list[str] = []
    static_opened: bool = True
    privacy: RoundPrivacy | None = None

    @property
    def asked(self) -> bool:
        """Whether silos were asked at all: the start is a model and no exchange."""
        return bool(self.silos or self.dropped)


class Personal(Values):
    """Means over silos of how good their personal models are."""

    silos: int
    accuracy: float
    valid_classes: float | None = None
    label_share: float | None = None


class LostSilo(Values):
    """Since when a silo is missing, and why."""

    kind: str
    round: int
    at: str
    code: str


class Outcome(Values):
    """``outcome.json``; runs of before have no ``status``."""

    status: str | None = None
    trained: bool
    reason: str | None
    lost: dict[str, LostSilo] = {}
    notes: list[str] = []
    job_name: str
    method: str
    rounds_done: int
    rounds: int
    roster: list[str]
    not_enrolled: dict[str, str] = {}
    not_enrolled_rules: dict[str, list[str]] = {}
    synthetic: bool
    summation: str
    sums: str
    rules: list[str]
    seconds: float
    data: str | None = None
    privacy: dict[str, Any] | None = None
    best_round_by_validation: int | None = None
    evaluation: Evaluation | None = None
    evaluated_by: list[str] = []
    test_shared: bool = False
    own_models: bool = False
    personal: Personal | None = None
    job: dict[str, Any] = {}
    job_sha256: str | None = None
    effective: dict[str, Any] = {}
    versions: dict[str, str] = {}

    @property
    def ended(self) -> str:
        """How the run ended, in a few words: ``trained``, ``trained, not measured``, ``not trained``."""
        if self.status is not None and self.trained:
            return self.status
        return (
            ("trained" if self.reason is None else "trained, not measured") if self.trained else "not trained"
        )


class MethodCard(Values):
    """A method's name and paper."""

    name: str
    paper: str | None = None


class InitialModel(Values):
    """A pretrained start: its hash, and the tensors that it did not have."""

    sha256: str
    fresh: list[str] = []


class Card(Values):
    """``model.json``."""

    method: MethodCard
    model_sha256: str | None
    public_weights: dict[str, float] = {}
    initial_model: InitialModel | None = None


class SiloModel(Values):
    """What a silo trained: a backbone's name and its options."""

    model: str
    model_options: dict[str, Any] = {}


class SiloBaseline(Evaluation):
    """The model that a silo trained on its own records alone."""

    epochs: int


class SiloPersonal(Values):
    """A silo's personal model on its own test records."""

    model_sha256: str
    confusion: list[list[int]]
    accuracy: float
    valid_classes: float
    label_share: float
    silos: float
    judged: float
    one_answer: OneAnswer | None = None


class SiloPrivacy(Values):
    """What a job has cost a silo's records, exactly."""

    epsilon: float
    rdp: float | None = None
    prv: float | None = None
    exact: float | None = None
    delta: float
    promised: float


class SiloRecords(Values):
    """Records of each class in each fold."""

    train: dict[str, int]
    validation: dict[str, int]
    test: dict[str, int]
