"""What a job may say: plain values, validated as a whole, unknown keys refused.

Nothing here opens a path or imports a name that a job wrote: a job *names* a method, a data set
and a model from the registries, and the site decides where its records lie.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_serializer

from tightframe.errors import JobError
from tightframe.options import StrictModel, listed, unknown_name
from tightframe.phases import Neighbours
from tightframe.securesum.rules import MAX_SITES, MIN_SITES, Trust, default_colluders, threshold

# Of the engine; a silo finds its own state by it, so that it must be one plain name of a folder.
JobId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
SiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]

# The engine takes an argument that is a dictionary with one of these keys for an object to build.
BUILD_KEYS = frozenset({"path", "class_path", "name", "config_type"})


def _nothing_to_build(values: Any) -> Any:
    found = sorted(BUILD_KEYS.intersection(values)) if isinstance(values, dict) else []
    if found:
        raise ValueError(
            f"no key may be called {found}, because the engine would build an object from a "
            "dictionary with such a key"
        )
    return values


PlainValue = str | int | float | bool | None
Options = Annotated[dict[str, PlainValue | list[PlainValue]], BeforeValidator(_nothing_to_build)]


class Training(StrictModel):
    """Local training in one round.

    Attributes:
        epochs: passes over the silo's training fold in a round.
        batch_size: records a step; patients a step in a job that hides patients.
        optimizer: ``sgd`` or ``adam``; fresh every round, because silos keep no state.
        learning_rate: of the optimiser.
        momentum: of SGD.
        weight_decay: coupled L2.
        augment: random flips, crops, colour; as the data set defines them.
        amp: automatic mixed precision on a GPU; the methods' own terms stay in float32.
    """

    epochs: int = Field(default=1, ge=1, le=10_000)
    batch_size: int = Field(default=64, ge=1, le=65_536)
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = Field(default=0.01, gt=0, le=100)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=1e-5, ge=0, le=1)
    augment: bool = True
    amp: bool = False


class Evaluation(StrictModel):
    """What every silo counts on the model that it has just received.

    Attributes:
        batch_size: records at a time.
        score_bins: bins of the per-class score histograms from which AUROC and AP come.
    """

    batch_size: int = Field(default=256, ge=1, le=65_536)
    score_bins: int = Field(default=32, ge=2, le=1024)


class Privacy(StrictModel):
    """Differential privacy of the records, for each silo and over the whole job.

    Attributes:
        epsilon, delta: what all of a silo's releases of this job may cost together; a silo's own policy
            may allow less, and its ledger adds up all jobs.
        neighbours: what is hidden: one ``record``, or one ``patient`` with all records at a silo, where the
            data set knows whose each record is.
        clip_norm: L2 norm to which each record's gradient is clipped in a step of DP-SGD, or the mean
            gradient of each patient's records.
        noise_multiplier: of DP-SGD; None solves it at each silo from its number of records (or patients) and
            the budget.
        spare_rounds: rounds that may be repeated: noise is planned for so many more, because what is
            repeated is charged again and the promise is kept in any case.
        releases: rounds in which class sums are released, at most.
        feature_clip: L2 norm to which each record's features are clipped in class sums.
        class_noise_share: part of epsilon for class sums and class counts, where a method needs any.
        evaluation: ``local``: each silo evaluates for itself alone, because exact counts are an oracle;
            ``noisy``: beside that, totals over the silos are opened with noise, and charged.
        evaluations: models evaluated with noise: the last one, and others spread over the rounds.
        evaluation_noise_share: part of epsilon for these.
        normalisation: what replaces BatchNorm: ``group``, or ``frozen`` statistics of the start.
    """

    epsilon: float = Field(default=8.0, gt=0, le=100)
    delta: float = Field(default=1e-5, gt=0, le=1e-3)
    neighbours: Neighbours = "record"
    clip_norm: float = Field(default=1.0, gt=0, le=1e6)
    noise_multiplier: float | None = Field(default=None, ge=0.01, le=1e6)
    spare_rounds: int = Field(default=1, ge=0, le=1000)
    releases: int = Field(default=10, ge=1, le=100_000)
    feature_clip: float = Field(default=1.0, gt=0, le=1e6)
    class_noise_share: float = Field(default=0.2, gt=0, lt=1)
    evaluation: Literal["local", "noisy"] = "local"
    evaluations: int = Field(default=1, ge=1, le=100_000)
    evaluation_noise_share: float = Field(default=0.1, gt=0, lt=1)
    normalisation: Literal["group", "frozen"] = "group"


class SiteModel(StrictModel):
    """What one silo trains.

    Attributes:
        model, model_options: as the job's.
    """

    model: str
    model_options: Options = {}


class Resume(StrictModel):
    """Which stopped job this one goes on with; written by ``tightframe jobs export --resume``.

    Attributes:
        lineage: the engine's id of the first job of the chain, under which charges and cohorts are kept.
        previous: the engine's id of the job that is continued, whose state the silos take over.
        after_round: the last round that is done.
        checkpoint_sha256: of the checkpoint file, which lies beside the server's configuration.
    """

    lineage: JobId
    previous: JobId
    after_round: int = Field(ge=1, le=100_000)
    checkpoint_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class JobConfig(StrictModel):
    """One federated training job.

    Attributes:
        job_name: shown in outcomes.
        method, method_options: a name of ``tightframe.methods.METHODS`` and its options.
        dataset, dataset_options: a name of ``tightframe.data.DATASETS`` and what a job may ask.
        model, model_options: a name of ``tightframe.models.BACKBONES`` and its options.
        site_models: silos that train another model than this, where the method has no global one.
        sites: the silos, by their provisioned names.
        min_sites: fewer contributions than this end the run.
        sites_per_round: silos asked in each training round, drawn anew by the seed; None asks all. With
            plain sums only: a secure sum is of its whole roster, and others would be drop-outs.
        rounds: training rounds; a closing phase that evaluates the last model comes after.
        seed: of every random stream.
        training, evaluation: see there.
        summation: ``secure``, so that the server sees sums only, or ``plain``, in which it sees
            each silo's contribution; for research, and refused by sites that require secure sums.
        server_trust: what secure sums assume of the server: ``malicious``, or ``semi_honest``,
            which keeps to the protocol and needs fewer silos.
        colluders: silos that are assumed to collude; ``max(1, floor(n / 10))`` by default.
        class_rules: ``off`` uses class sums of any class, however few silos hold it; only where
            every site's policy allows it.
        weights: how exactly a silo's public weight tells its number of training records.
        max_weight_share: the most of all weights together that one silo's may be; larger ones are lowered to
            that. 1 lets a silo weigh what it declares.
        update_norm: L2 norm to which model updates are rescaled; None leaves them.
        update_bound: largest coordinate of an update while no norm is set.
        prototype_sites: the silos that submit prototypes; None means all (paper Table 5).
        site_timeout: seconds a silo may work on one task, from fetching it.
        fetch_timeout: seconds to wait for silos that have not fetched theirs, while nobody works.
        threads: intra-op threads of torch in every process.
        local_baseline_epochs: local-only baseline at each silo after the run; 0 skips it.
        privacy: differential privacy; None has none, and says so.
        personalise: let each silo make a personal model after the run, as the method does it, which
            stays there; only how good they are on average is summed.
        resume: the stopped job that this one goes on with; None begins anew.
    """

    job_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    method: str
    method_options: Options = {}
    dataset: str
    dataset_options: Options = {}
    model: str
    model_options: Options = {}
    site_models: Annotated[dict[SiteName, SiteModel], BeforeValidator(_nothing_to_build)] = {}
    sites: Annotated[list[SiteName], Field(min_length=1, max_length=250)]
    min_sites: int = Field(ge=1)
    sites_per_round: int | None = Field(default=None, ge=1, le=250)
    rounds: int = Field(ge=1, le=10_000)
    seed: int = Field(default=0, ge=0, lt=2**31)
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    summation: Literal["secure", "plain"] = "secure"
    server_trust: Trust = "malicious"
    colluders: int | None = Field(default=None, ge=1, le=MAX_SITES - 2)
    class_rules: Literal["on", "off"] = "on"
    weights: Literal["exact", "power_of_two", "uniform"] = "exact"
    max_weight_share: float = Field(default=0.6, gt=0, le=1)
    update_norm: float | None = Field(default=None, gt=0)
    update_bound: float = Field(default=8.0, gt=0, le=1e6)
    prototype_sites: list[SiteName] | None = None
    site_timeout: int = Field(default=600, ge=1, le=7 * 24 * 3600)
    fetch_timeout: int = Field(default=120, ge=1, le=24 * 3600)
    threads: int = Field(default=1, ge=1, le=256)
    local_baseline_epochs: int = Field(default=0, ge=0, le=100_000)
    personalise: bool = False
    privacy: Privacy | None = None
    resume: Resume | None = None

    @model_serializer(mode="wrap")
    def _unless_it_says_nothing(self, plain: Callable[[JobConfig], dict[str, Any]]) -> dict[str, Any]:
        """Without ``site_models`` where it is empty: files and hashes of jobs without it are as they were."""
        values = plain(self)
        if not self.site_models:
            values.pop("site_models", None)
        return values

    def model_at(self, site: str) -> SiteModel:
        """What a silo trains: its own model, or the job's."""
        return self.site_models.get(site) or SiteModel(model=self.model, model_options=self.model_options)

    @property
    def models(self) -> str:
        """The models in words: the job's, and which silos have others."""
        others = [
            f"{site}: {'another ' if own.model == self.model else ''}{own.model}"
            for site, own in sorted(self.site_models.items())
        ]
        return f"{self.model} ({', '.join(others)})" if others else self.model

    def assumed_colluders(self, sites: int) -> int:
        """Silos assumed to collude in a roster of so many."""
        return default_colluders(sites) if self.colluders is None else self.colluders

    @property
    def roster(self) -> tuple[str, ...]:
        """The silos in sorted order, which is the order of every sum."""
        return tuple(sorted(self.sites))

    @property
    def done(self) -> int:
        """Rounds that the jobs before this one have done."""
        return 0 if self.resume is None else self.resume.after_round

    @property
    def anew(self) -> JobConfig:
        """The same job without what it goes on with: all jobs of a chain have the same."""
        return self.model_copy(update={"resume": None})

    def lineage(self, job_id: str) -> str:
        """Id of the first job of the chain, given the engine's id of this one."""
        return job_id if self.resume is None else self.resume.lineage

    def sha256(self) -> str:
        """SHA-256 of the canonical JSON; server and silos compare it at enrolment."""
        return config_hash(self.model_dump(mode="json"))


def _cross_problems(values: dict[str, Any]) -> list[str]:
    """What does not fit together, told also while other values are wrong."""
    sites, least = values.get("sites"), values.get("min_sites")
    if not (isinstance(sites, list) and all(isinstance(site, str) for site in sites)):
        return []
    problems = []
    if len(set(sites)) != len(sites):
        problems.append("sites: a site is named twice")
    if isinstance(least, int) and least > len(sites):
        problems.append(f"min_sites: Expected at most the number of sites ({len(sites)}), but got {least}")
    problems += _sampling_problems(values, len(sites))
    for key, kind in (("prototype_sites", list), ("site_models", dict)):
        asked = values.get(key)
        if isinstance(asked, kind):
            strangers = sorted({str(site) for site in asked} - set(sites))
            problems += [
                f"{key}: {site}: {unknown_name('site of `sites`', site, sites)}" for site in strangers
            ]
    if values.get("summation", "secure") == "secure":
        problems += _secure_problems(values, len(sites))
    if values.get("privacy") is not None:
        problems += _privacy_problems(values)
    resume, rounds = values.get("resume"), values.get("rounds")
    done = resume.get("after_round") if isinstance(resume, dict) else None
    if isinstance(done, int) and isinstance(rounds, int) and done > rounds:
        problems.append(f"resume.after_round: Expected at most `rounds` ({rounds}), but got {done}")
    return problems


def _privacy_problems(values: dict[str, Any]) -> list[str]:
    """What differential privacy does not go with: each would tell something exact of the records."""
    problems = []
    if (weights := values.get("weights", "exact")) != "uniform":
        problems.append(
            f"weights: Expected 'uniform' with `privacy`, but got {weights!r}: a weight that follows the "
            "number of records tells of each of them"
        )
    if values.get("local_baseline_epochs"):
        problems.append(
            "local_baseline_epochs: whether a training without noise comes to its end tells of the records, "
            "so not with `privacy`"
        )
    if values.get("personalise"):
        problems.append("personalise: its means are exact counts of records, so not with `privacy`")
    training = values.get("training")
    if isinstance(training, dict) and training.get("amp"):
        problems.append("training.amp: gradients are clipped in full precision, so not with `privacy`")
    asked = values["privacy"]
    if isinstance(asked, dict) and asked.get("evaluation") == "noisy":
        problems += _noisy_evaluation_problems(asked)
    return problems


def _noisy_evaluation_problems(asked: dict[str, Any]) -> list[str]:
    """What an evaluation with noise does not go with."""
    problems = []
    if (neighbours := asked.get("neighbours", "record")) != "record":
        problems.append(
            "privacy.evaluation: Expected 'local' unless `neighbours` is 'record', but got 'noisy' with "
            f"{neighbours!r}: what a patient's records add to an evaluation is not clipped"
        )
    names = ("class_noise_share", "evaluation_noise_share")
    shares = [asked.get(name, Privacy.model_fields[name].default) for name in names]
    if all(isinstance(share, float) for share in shares) and sum(shares) >= 1:
        problems.append(
            f"privacy.evaluation_noise_share: Expected less than 1 with `class_noise_share`, but got "
            f"{sum(shares):g}: training needs the rest"
        )
    return problems


def _sampling_problems(values: dict[str, Any], sites: int) -> list[str]:
    drawn, least = values.get("sites_per_round"), values.get("min_sites")
    if not isinstance(drawn, int):
        return []
    problems = []
    if drawn > sites:
        problems.append(f"sites_per_round: Expected at most the number of sites ({sites}), but got {drawn}")
    if isinstance(least, int) and least > drawn:
        problems.append(f"min_sites: Expected at most `sites_per_round` ({drawn}), but got {least}")
    if values.get("summation", "secure") == "secure":
        problems.append(
            "sites_per_round: a secure sum is over its whole roster, so that silos that are not asked would "
            'be drop-outs; draw silos with "summation": "plain" only, or leave it out'
        )
    return problems


def _secure_problems(values: dict[str, Any], sites: int) -> list[str]:
    if sites < MIN_SITES:
        return [
            f"sites: secure sums need at least {MIN_SITES} silos, but got {sites}: with two, a sum minus "
            'one\'s own term is the other\'s. Ask for "summation": "plain" by name if the server may see '
            "every term"
        ]
    colluders, trust = values.get("colluders"), values.get("server_trust", "malicious")
    if isinstance(colluders, int) and trust in ("malicious", "semi_honest"):
        most = max(c for c in range(sites - 1) if c + 2 <= sites and threshold(sites, c, trust) <= sites)
        if colluders > most:
            return [f"colluders: Expected at most {most} with {sites} silos, but got {colluders}"]
    return []


def config_hash(values: Any) -> str:
    """SHA-256 (hex) of plain values as canonical JSON."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def parse_job(values: dict[str, Any]) -> JobConfig:
    """Validate what a job says; the names and options of registries are checked by ``setup``.

    Raises:
        JobError: listing every problem.
    """
    job, problems = check_job(values)
    if job is None:
        raise JobError(problems)
    return job


def check_job(values: Any) -> tuple[JobConfig | None, list[str]]:
    """The job, or None and every problem of its values."""
    if not isinstance(values, dict):
        return None, [f"job: Expected a block of keys, but got {type(values).__name__}"]
    problems = _cross_problems(values)
    try:
        job = JobConfig.model_validate(values)
    except ValidationError as error:
        return None, listed(error, model=JobConfig) + problems
    return (None, problems) if problems else (job, [])
