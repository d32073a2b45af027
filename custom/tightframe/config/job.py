"""The configuration of a job: plain values, validated together, unknown keys refused.

Nothing here opens a path or imports a module on behalf of a job: a job *names* a method, a data set and
a model from the registries, and the site decides which records it uses.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_serializer, model_validator

from tightframe.errors import JobError
from tightframe.options import StrictModel, listed, unknown_name
from tightframe.phases import Neighbours
from tightframe.results.rows import EVALUATED_MODELS, evaluated_rounds
from tightframe.securesum.rules import MAX_SITES, MIN_SITES, Trust, default_colluders, smallest_set, threshold

# The engine's id. A silo's state is in a folder of that name, so it must be a plain file name.
JobId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
"""Pattern of a job's and of a silo's name."""
SiteName = Annotated[str, Field(pattern=f"^{NAME}$")]

# The engine builds an object from a dictionary argument that has one of these keys.
BUILD_KEYS = frozenset({"path", "class_path", "name", "config_type"})

LATER = "later"
"""Marks options of later versions: left out of files and hashes of jobs at their defaults."""

ONE_RELEASE = frozenset({"fed3r", "fedcgs", "fedncm"})
"""Names of methods that release one sum under privacy and train nothing; a process that only answers the
protocol imports no method."""

OWN_MODELS = frozenset({"fedproto", "local_only"})
"""Names of methods without a global model, in which each silo has its own."""


def _nothing_to_build(values: Any) -> Any:
    reserved = sorted(BUILD_KEYS.intersection(values)) if isinstance(values, dict) else []
    if reserved:
        raise ValueError(
            f"no key may be called {reserved}, because the engine would build an object from a "
            "dictionary with such a key"
        )
    return values


class Lasting(StrictModel):
    """Values whose files and hashes stay when options are added."""

    @model_serializer(mode="wrap")
    def _without_later_options(self, plain: Callable[[Lasting], dict[str, Any]]) -> dict[str, Any]:
        """Leave out options of later versions at their defaults."""
        values = plain(self)
        later = {name: item for name, item in type(self).model_fields.items() if LATER in item.metadata}
        return {
            name: value for name, value in values.items() if name not in later or value != later[name].default
        }


def _plain_tree(values: Any, place: str = "", depth: int = 0) -> Any:
    """Refuse values that are not JSON, nested too deep, or with a key that makes the engine build objects."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{place}: Expected at most {MAX_DEPTH} levels of nesting")
    _nothing_to_build(values)
    if isinstance(values, dict):
        for key, value in values.items():
            if not isinstance(key, str):
                raise ValueError(f"{place}: Expected text as a key, but got {type(key).__name__}")
            _plain_tree(value, f"{place}.{key}".lstrip("."), depth + 1)
    elif isinstance(values, list):
        for number, value in enumerate(values):
            _plain_tree(value, f"{place}.{number}", depth + 1)
    elif not (
        values is None
        or isinstance(values, str | int)
        or (isinstance(values, float) and math.isfinite(values))
    ):
        raise ValueError(f"{place}: Expected plain values as in JSON, but got {values!r}")
    return values


MAX_DEPTH = 8
PlainValue = str | int | float | bool | None
Options = Annotated[dict[str, PlainValue | list[PlainValue]], BeforeValidator(_nothing_to_build)]
NestedOptions = Annotated[dict[str, Any], BeforeValidator(_plain_tree)]
"""Options with blocks in them, such as a data contract."""


class Training(Lasting):
    """Local training in one round.

    Attributes:
        epochs: passes over the silo's training fold in a round.
        batch_size: records in a step; patients in a step if the job protects patients.
        optimizer: ``sgd`` or ``adam``; reset every round, because silos keep no state.
        learning_rate: of the optimiser.
        momentum: of SGD.
        weight_decay: coupled L2.
        augment: random flips, crops, colour; as the data set defines them.
        amp: automatic mixed precision on a GPU; the methods' own terms stay in float32.
        loop: name of a training loop installed at the sites, which each site must allow (``training_loops``);
            None takes ours.
    """

    epochs: int = Field(default=1, ge=1, le=10_000)
    batch_size: int = Field(default=64, ge=1, le=65_536)
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = Field(default=0.01, gt=0, le=100)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=1e-5, ge=0, le=1)
    augment: bool = True
    amp: bool = False
    loop: Annotated[str | None, LATER] = Field(default=None, min_length=1, max_length=200)

    def by_halves(self, records: int, drawn: int) -> Training:
        """Return these values with batches of at most half of a silo's records.

        Args:
            records: by which the silo weighs, each counted once; at least 2.
            drawn: records of an epoch, repeated ones counted each time. A single last one joins the batch
                before it (``learning.batches.merge_single_tail``).

        >>> [Training().by_halves(records, records).batch_size for records in (100, 1000, 9)]
        [50, 64, 3]
        """
        most = records // 2
        size = min(self.batch_size, most)
        if 1 < size == most and drawn % size == 1:
            size -= 1
        return self.model_copy(update={"batch_size": max(size, 1)})


class Evaluation(Lasting):
    """Evaluation, at every silo, of the model that it has just received.

    Attributes:
        batch_size: records at a time.
        score_bins: bins of the per-class score histograms from which AUROC and AP are computed.
        models: number of models that are evaluated exactly: the last one, the first one and others spread
            over the rounds; all where there are fewer. With ``privacy`` its ``evaluations`` is that number.
    """

    batch_size: int = Field(default=256, ge=1, le=65_536)
    score_bins: int = Field(default=32, ge=2, le=1024)
    models: Annotated[int, LATER] = Field(default=EVALUATED_MODELS, ge=1, le=100_001)

    def after(self, rounds: int) -> tuple[int, ...]:
        """Return the rounds whose models are evaluated exactly, 0 for the start's."""
        return evaluated_rounds(rounds, self.models)


class Privacy(Lasting):
    """Differential privacy of the records, for each silo and over the whole job.

    Attributes:
        epsilon, delta: the budget of all releases of a silo in this job; a silo's own policy may allow less,
            and its ledger adds up all jobs.
        noise: ``own``: each silo adds all of the noise of its training; ``shared``: the silos' shares make it
            together inside the secure sum, for methods whose round is one sum of records' gradients
            (``fedsgd``). With plain sums all of it is a silo's own in any case.
        neighbours: the unit that is protected: one ``record``, or one ``patient`` with all records at a silo,
            if the data set knows the patient of each record.
        clip_norm: L2 norm to which each record's gradient is clipped in a step of DP-SGD, or the mean
            gradient of each patient's records.
        views: augmented views of each record in a step, whose mean gradient is clipped; for data sets that
            augment (``fed_isic2019``, ``cifar10``, ``cifar100``, own ones). More cost time, not epsilon.
        noise_multiplier: of DP-SGD, or of the one release of a method that trains nothing; None computes it
            from the budget, for DP-SGD at each silo from its number of records (or patients).
        spare_rounds: rounds that may be repeated. Noise is planned for this many more rounds, because a
            repeated round is charged again and the guarantee holds in any case. A job of a method of one
            release that says nothing has 0.
        releases: the most rounds in which class sums are released.
        feature_clip: L2 norm to which each record's features are clipped in class sums, in FedMR's terms and
            for a ``start``.
        class_noise_share: part of epsilon for class sums and class counts, if a method needs any, and for the
            release of a ``start``.
        product_weight, count_weight: weights of the products and of the class counts, beside 1 for the class
            sums of features, in the one release of ``fed3r``, ``fedcgs`` and ``fedncm``: a larger weight
            means less noise there, and more in the other parts.
        evaluation: ``local``: each silo evaluates for itself only, because exact counts are an oracle;
            ``noisy``: in addition, totals over the silos are opened with noise, and charged.
        evaluations: number of models evaluated with noise: the last one, and others spread over the rounds.
        evaluation_noise_share: part of epsilon for noisy evaluations.
        normalisation: the replacement of BatchNorm: ``group``, or ``frozen`` statistics of the initial model.
    """

    epsilon: float = Field(default=8.0, gt=0, le=100)
    delta: float = Field(default=1e-5, gt=0, le=1e-3)
    noise: Annotated[Literal["own", "shared"], LATER] = "own"
    neighbours: Neighbours = "record"
    clip_norm: float = Field(default=1.0, gt=0, le=1e6)
    views: Annotated[int, LATER] = Field(default=1, ge=1, le=64)
    noise_multiplier: float | None = Field(default=None, ge=0.01, le=1e6)
    spare_rounds: int = Field(default=1, ge=0, le=1000)
    releases: int = Field(default=10, ge=1, le=100_000)
    feature_clip: float = Field(default=1.0, gt=0, le=1e6)
    class_noise_share: float = Field(default=0.2, gt=0, lt=1)
    product_weight: Annotated[float, LATER] = Field(default=0.5, ge=1e-3, le=1e3)
    count_weight: Annotated[float, LATER] = Field(default=0.15, ge=1e-3, le=1e3)
    evaluation: Literal["local", "noisy"] = "local"
    evaluations: int = Field(default=1, ge=1, le=100_000)
    evaluation_noise_share: float = Field(default=0.1, gt=0, lt=1)
    normalisation: Literal["group", "frozen"] = "group"


class SiteModel(StrictModel):
    """The model of one silo.

    Attributes:
        model, model_options: as in the job.
    """

    model: str
    model_options: Options = {}


class Resume(StrictModel):
    """The stopped job that a job resumes; written by ``tightframe jobs export --resume``.

    Attributes:
        lineage: the engine's id of the first job of the chain, under which charges and cohorts are recorded.
        previous: the engine's id of the resumed job, whose state the silos take over.
        after_round: the last completed round.
        checkpoint_sha256: of the checkpoint file, which is next to the server's configuration.
    """

    lineage: JobId
    previous: JobId
    after_round: int = Field(ge=1, le=100_000)
    checkpoint_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Withdraw(StrictModel):
    """The ended run of one sum out of whose total a job takes records; written by ``jobs export``.

    Each site names the records in its own file (``withdrawn`` in its configuration); a job names none.

    Attributes:
        lineage: the engine's id of the first job of the chain.
        previous: the engine's id of the ended job, whose state the silos take over.
        checkpoint_sha256: of its checkpoint file, which is next to the server's configuration.
        state_sha256: of the state in it, with the total; silos start from no other.
        min_withdrawn: the least number of records that are withdrawn, over all silos; with fewer nothing is
            opened but their number.
    """

    lineage: JobId
    previous: JobId
    checkpoint_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    state_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    min_withdrawn: int = Field(default=10, ge=1, le=2**20)


class EvaluateOnly(StrictModel):
    """Settings of a job that trains nothing and evaluates a finished model.

    Attributes:
        normalisation: what the network has in place of BatchNorm: ``batch``: nothing else; ``group`` or
            ``frozen``, as a job with privacy has trained it.
    """

    normalisation: Literal["batch", "group", "frozen"] = "batch"


class Statistics(Lasting):
    """Settings of a job that trains nothing and sums statistics of its sites' tables.

    Attributes:
        bins: of one width, into which a number's range is cut.
        time_bins: of one width, into which the time of a contract's ``survival`` is cut.
        time_ends: ends of the bins of time in their place, ascending, in the contract's unit, such as
            ``[90, 365, 730]``; what is later is in one more bin.
    """

    bins: int = Field(default=10, ge=2, le=64)
    time_bins: Annotated[int, Field(ge=2, le=64), LATER] = 4
    time_ends: Annotated[tuple[float, ...], Field(strict=False, max_length=63), LATER] = ()

    @model_validator(mode="after")
    def _ends_ascend(self) -> Statistics:
        rising = all(one < other for one, other in itertools.pairwise((0.0, *self.time_ends)))
        if not rising or (self.time_ends and "time_bins" in self.model_fields_set):
            raise ValueError(
                f"Expected `time_ends` above 0 in ascending order, and no `time_bins` with them, but got "
                f"{list(self.time_ends)}"
            )
        return self


STATISTICS_METHOD, STATISTICS_MODEL = "statistics", "identity"
"""Method and model of a job with ``statistics``, which has neither: names that all jobs have."""


class JobConfig(Lasting):
    """One federated training job.

    Attributes:
        job_name: shown in outcomes.
        method, method_options: a name that ``tightframe methods`` lists, and its options.
        dataset, dataset_options: a data set and its options; ``table`` and ``images`` take a ``contract``.
        model, model_options: a model and its options.
        encoder: ``frozen`` trains and sends the model's head only, on the features of a pretrained start;
            ``random`` on those of weights drawn from the seed; ``trained`` trains all.
        site_models: silos that train another model than this, if the method has no global one.
        sites: the silos, by their provisioned names.
        min_sites: the least number of contributions; with fewer the run ends. ``jobs export`` writes two
            thirds of the silos and one, or all of three or fewer.
        sites_per_round: number of silos in each training round, at least ``min_sites``, drawn by the seed;
            None takes all. With plain sums only: a secure sum needs its whole roster, and the other silos
            would be drop-outs.
        rounds: training rounds; a closing phase that evaluates the last model follows. Methods of one sum
            (``fed3r``, ``fedcgs``, ``fedncm``) have 1, ``evaluate_only`` and ``statistics`` 0.
        seed: of every random stream; in production with a silo's secret. A later job that trains in another
            way needs each site's consent, whatever its seed (TF-617).
        training, evaluation: see ``Training`` and ``Evaluation``.
        summation: ``secure``, so that the server sees sums only, or ``plain``, in which it sees
            each silo's contribution; for research, and refused by sites that require secure sums.
        server_trust: the trust model of secure sums: ``malicious``, or ``semi_honest`` for a server that
            follows the protocol, which needs fewer silos.
        colluders: silos that are assumed to collude; ``max(1, floor(n / 10))`` by default.
        whole_sums: open secure sums only with all silos that enrolled: a drop-out ends the run, and each
            silo's share of noise is smaller, because more of them are in each sum. None: only where a method
            of one release has ``privacy``.
        class_rules: ``on`` uses class sums only of classes of which three silos have ``min_class_count``
            patients each; ``off`` those of any class, only if every site's policy allows it. With ``privacy``
            noise takes their place.
        weights: precision with which a silo's public weight discloses its number of training records:
            ``exact``, to a ``power_of_two``, or not (``uniform``). A later job with other ones, or with any
            other value that forms a term, needs each site's consent (TF-617).
        max_weight_share: the largest share of the total weight for one silo; a larger weight is reduced to
            it. 1 keeps each silo's declared weight.
        update_norm: L2 norm to which longer model updates are rescaled (not buffers, class sums and control
            variates); None leaves them. ``jobs export`` writes 100, with ``privacy`` 1000. Without
            ``privacy`` each round then has a histogram of norms.
        update_bound: largest coordinate of an update: without a norm a larger one is refused (TF-402), with
            one the update is rescaled to it.
        prototype_sites: the silos that submit class prototypes; None means all (FedMR's table 5). Ignored
            with ``privacy``.
        site_timeout: seconds that a silo may work on one task after fetching it.
        fetch_timeout: seconds to wait for silos that have not fetched their task while no silo works.
        answer_grid: seconds; a silo's term leaves it a whole number of these after its request came, so that
            the time does not tell how long it trained; in production, or where it is not 0, none
            leaves before a whole training's time. By default 1 in production, 0 in a simulation.
        threads: intra-op threads of torch in every process; they change the last bits of a run.
        local_baseline_epochs: epochs of the local-only baseline at each silo after the run; 0 skips it.
        privacy: differential privacy; None runs without it, and reports say so.
        average_last: the model that is kept, evaluated at the end and made personal is the mean of those
            after the last so many rounds; 1 keeps the last one. Most useful with ``privacy``.
        personalise: let each silo make a personal model after the run, by the method's own rule. It stays at
            the silo; only the mean quality of these models is summed.
        start: a method of one sum (``fed3r``, ``fedcgs``, ``fedncm``; with its default options), by which the
            head of the model is set before round 1, in three exchanges, from the features that the model
            begins with; None starts from the head that the seed, or the pretrained start, gives. Not for
            methods with a head of their own or without a global model.
        initial_model_sha256: of the safetensors file of a pretrained start, which the server has and each
            silo checks; None starts from the seed.
        resume: the stopped job that this one resumes; None starts a new one.
        withdraw: the ended run out of whose total this job takes records; None takes none out.
        evaluate_only: train nothing (``rounds`` is 0), and evaluate the model of ``initial_model_sha256``
            over all silos in one exchange; None trains.
        statistics: train nothing (``rounds`` is 0), and sum statistics of the sites' tables, in a first
            exchange which cells can be told and in a second one their numbers; with ``privacy`` in one,
            noisy.
    """

    job_name: Annotated[str, Field(pattern=f"^{NAME}$")]
    method: str
    method_options: Options = {}
    dataset: str
    dataset_options: NestedOptions = {}
    model: str
    model_options: Options = {}
    encoder: Annotated[Literal["trained", "frozen", "random"], LATER] = "trained"
    site_models: Annotated[dict[SiteName, SiteModel], BeforeValidator(_nothing_to_build), LATER] = {}
    sites: Annotated[list[SiteName], Field(min_length=1, max_length=250)]
    min_sites: int = Field(ge=1)
    sites_per_round: int | None = Field(default=None, ge=1, le=250)
    rounds: int = Field(ge=0, le=10_000)
    seed: int = Field(default=0, ge=0, lt=2**31)
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    summation: Literal["secure", "plain"] = "secure"
    server_trust: Trust = "malicious"
    colluders: int | None = Field(default=None, ge=1, le=MAX_SITES - 2)
    whole_sums: Annotated[bool | None, LATER] = None
    class_rules: Literal["on", "off"] = "on"
    weights: Literal["exact", "power_of_two", "uniform"] = "exact"
    max_weight_share: float = Field(default=0.6, gt=0, le=1)
    update_norm: float | None = Field(default=None, gt=0)
    update_bound: float = Field(default=8.0, gt=0, le=1e6)
    prototype_sites: list[SiteName] | None = None
    site_timeout: int = Field(default=600, ge=1, le=7 * 24 * 3600)
    fetch_timeout: int = Field(default=120, ge=1, le=24 * 3600)
    answer_grid: Annotated[float | None, LATER] = Field(default=None, ge=0, le=3600)
    threads: int = Field(default=1, ge=1, le=256)
    local_baseline_epochs: int = Field(default=0, ge=0, le=100_000)
    average_last: Annotated[int, LATER] = Field(default=1, ge=1, le=10_000)
    personalise: bool = False
    privacy: Privacy | None = None
    start: Annotated[str | None, LATER] = None
    initial_model_sha256: Annotated[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None, LATER] = None
    resume: Resume | None = None
    withdraw: Annotated[Withdraw | None, LATER] = None
    evaluate_only: Annotated[EvaluateOnly | None, LATER] = None
    statistics: Annotated[Statistics | None, LATER] = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in_one_release(cls, values: Any) -> Any:
        """Set the unset values of a private job of one release: no planned repeats, and whole sums.

        Filled in instead of defaults, so that files and hashes of all other jobs stay.
        """
        if not isinstance(values, dict) or values.get("method") not in ONE_RELEASE:
            return values
        privacy = values.get("privacy")
        if not isinstance(privacy, dict):
            return values
        filled = {**values, "privacy": {"spare_rounds": 0, **privacy}}
        if values.get("whole_sums") is None and values.get("summation", "secure") == "secure":
            filled["whole_sums"] = True
        return filled

    def model_at(self, site: str) -> SiteModel:
        """Return the model that a silo trains: its own, or the job's."""
        return self.site_models.get(site) or SiteModel(model=self.model, model_options=self.model_options)

    @property
    def models(self) -> str:
        """Description of the models: the job's, and those of silos with another one."""
        others = [
            f"{site}: {'another ' if item.model == self.model else ''}{item.model}"
            for site, item in sorted(self.site_models.items())
        ]
        return f"{self.model} ({', '.join(others)})" if others else self.model

    def assumed_colluders(self, sites: int) -> int:
        """Return the assumed number of colluding silos in a roster of this size."""
        return default_colluders(sites) if self.colluders is None else self.colluders

    def smallest_sum(self, sites: int) -> int:
        """Return the least number of silos in a secure sum, by threshold, c, and the job's own minimum.

        With ``whole_sums`` it is the whole enrolled roster. For fewer silos than any secure sum can have it
        is the least number of a secure sum.

        Args:
            sites: number of enrolled silos.
        """
        if sites < MIN_SITES:
            return MIN_SITES
        colluders = self.assumed_colluders(sites)
        least = smallest_set(threshold(sites, colluders, self.server_trust), colluders, self.min_sites)
        return max(least, sites) if self.whole_sums else least

    @property
    def normalisation(self) -> Literal["group", "frozen"] | None:
        """The replacement of BatchNorm in the network; None leaves it."""
        if self.evaluate_only is not None:
            return None if self.evaluate_only.normalisation == "batch" else self.evaluate_only.normalisation
        return None if self.privacy is None else self.privacy.normalisation

    @property
    def roster(self) -> tuple[str, ...]:
        """The silos in sorted order, which is the order of every sum."""
        return tuple(sorted(self.sites))

    @property
    def done(self) -> int:
        """Rounds completed by earlier jobs of the chain."""
        return 0 if self.resume is None else self.resume.after_round

    @property
    def anew(self) -> JobConfig:
        """This job without ``resume``: the same for a stopped job and those that resume it."""
        return self.model_copy(update={"resume": None})

    @property
    def origin(self) -> JobConfig:
        """This job without ``resume`` and ``withdraw``: the same for all jobs of a chain."""
        return self.model_copy(update={"resume": None, "withdraw": None})

    @property
    def continues(self) -> Resume | Withdraw | None:
        """The job whose checkpoint this one continues; None for a new one."""
        return self.resume or self.withdraw

    def lineage(self, job_id: str) -> str:
        """Return the id of the first job of the chain, given the engine's id of this one."""
        return job_id if self.continues is None else self.continues.lineage

    def sha256(self) -> str:
        """Return the SHA-256 of the canonical JSON; server and silos compare it at enrolment."""
        return config_hash(self.model_dump(mode="json"))


def _cross_problems(values: dict[str, Any]) -> list[str]:
    """List values that contradict each other, even if other values are invalid."""
    sites, least = values.get("sites"), values.get("min_sites")
    if not (isinstance(sites, list) and all(isinstance(site, str) for site in sites)):
        return []
    problems = []
    if len(set(sites)) != len(sites):
        problems.append("sites: a site is named twice")
    if isinstance(least, int) and least > len(sites):
        problems.append(f"min_sites: Expected at most the number of sites ({len(sites)}), but got {least}")
    problems += _sampling_problems(values, len(sites))
    last, rounds = values.get("average_last"), values.get("rounds")
    if isinstance(last, int) and isinstance(rounds, int) and last > rounds:
        problems.append(f"average_last: Expected at most `rounds` ({rounds}), but got {last}")
    for key, kind in (("prototype_sites", list), ("site_models", dict)):
        silos = values.get(key)
        if isinstance(silos, kind):
            unknown = sorted({str(site) for site in silos} - set(sites))
            problems += [f"{key}: {site}: {unknown_name('site of `sites`', site, sites)}" for site in unknown]
    if values.get("summation", "secure") == "secure":
        problems += _secure_problems(values, len(sites))
    elif values.get("whole_sums"):
        problems.append(
            "whole_sums: not possible with plain sums, which the server opens one by one: leave it out"
        )
    if values.get("privacy") is not None:
        problems += _privacy_problems(values)
    problems += _evaluation_problems(values)
    problems += _statistics_problems(values)
    if values.get("withdraw") is not None and values.get("privacy") is not None:
        problems.append(
            "withdraw: not possible with `privacy`: the difference of two noisy totals would be one more "
            "release, which nothing has charged. Start a new job without these records instead"
        )
    resume, withdraw = values.get("resume"), values.get("withdraw")
    stopped, ended = (item.get("previous") if isinstance(item, dict) else None for item in (resume, withdraw))
    if stopped is not None and stopped == ended:
        problems.append(
            f"resume.previous: Expected a withdrawal that was stopped, but {stopped!r} is the run from "
            "which `withdraw` takes records out: leave `resume` out"
        )
    done = resume.get("after_round") if isinstance(resume, dict) else None
    if isinstance(done, int) and isinstance(rounds, int) and done > rounds:
        problems.append(f"resume.after_round: Expected at most `rounds` ({rounds}), but got {done}")
    return problems


def _evaluation_problems(values: dict[str, Any]) -> list[str]:
    """List options that contradict a job which only evaluates, or a training job without rounds."""
    rounds = values.get("rounds")
    if values.get("evaluate_only") is None:
        alone = "only a job with `evaluate_only` or `statistics` has none"
        none = rounds == 0 and values.get("statistics") is None
        return [f"rounds: Expected 1 at least, but got 0: {alone}"] if none else []
    problems = []
    if rounds != 0:
        problems.append(f"rounds: Expected 0 with `evaluate_only`, which trains nothing, but got {rounds}")
    if values.get("initial_model_sha256") is None:
        problems.append("initial_model_sha256: Expected that of the model to evaluate with `evaluate_only`")
    trains = ("personalise", "local_baseline_epochs", "start", "resume", "withdraw", "sites_per_round")
    problems += [
        f"{name}: not possible with `evaluate_only`, which trains nothing and asks all silos"
        for name in trains
        if values.get(name)
    ]
    privacy = values.get("privacy")
    if isinstance(privacy, dict) and privacy.get("evaluation", "local") != "noisy":
        problems.append(
            "privacy.evaluation: Expected 'noisy' with `evaluate_only`: nothing would be summed otherwise"
        )
    return problems


def _statistics_problems(values: dict[str, Any]) -> list[str]:
    """List options that contradict a job which only sums statistics."""
    if values.get("statistics") is None:
        method = values.get("method")
        alone = f"method: {STATISTICS_METHOD!r} trains nothing: it is that of a job with `statistics`"
        return [alone] if method == STATISTICS_METHOD else []
    problems = [
        f"{name}: Expected {wanted!r} with `statistics`, which has no model, but got {values.get(name)!r}"
        for name, wanted in (("method", STATISTICS_METHOD), ("model", STATISTICS_MODEL))
        if values.get(name) != wanted
    ]
    if (rounds := values.get("rounds")) != 0:
        problems.append(f"rounds: Expected 0 with `statistics`, which trains nothing, but got {rounds}")
    trains = ("personalise", "local_baseline_epochs", "start", "resume", "withdraw", "sites_per_round")
    problems += [
        f"{name}: not possible with `statistics`, which trains nothing and asks all silos"
        for name in (*trains, "evaluate_only", "site_models", "initial_model_sha256")
        if values.get(name)
    ]
    if values.get("class_rules", "on") == "off":
        problems.append(
            "class_rules: Expected 'on' with `statistics`: a total of fewer than three silos is not opened"
        )
    if (weights := values.get("weights", "exact")) != "uniform":
        problems.append(
            f"weights: Expected 'uniform' with `statistics`, but got {weights!r}: nothing is weighed, and an "
            "exact number of records would disclose what a silo withholds"
        )
    privacy = values.get("privacy")
    if isinstance(privacy, dict) and privacy.get("evaluation", "local") != "local":
        problems.append("privacy.evaluation: Expected 'local' with `statistics`: there is no model")
    return problems


def _privacy_problems(values: dict[str, Any]) -> list[str]:
    """List options that cannot be combined with differential privacy, because they disclose exact values."""
    problems = []
    if (weights := values.get("weights", "exact")) != "uniform":
        problems.append(
            f"weights: Expected 'uniform' with `privacy`, but got {weights!r}: a weight that depends on the "
            "number of records discloses whether a record is among them"
        )
    if values.get("local_baseline_epochs"):
        problems.append(
            "local_baseline_epochs: not possible with `privacy`, because whether a training without noise "
            "completes depends on the records"
        )
    if values.get("personalise"):
        problems.append(
            "personalise: not possible with `privacy`, because the means over personal models are exact"
        )
    training = values.get("training")
    if isinstance(training, dict) and training.get("amp"):
        problems.append(
            "training.amp: not possible with `privacy`, because gradients are clipped in full precision"
        )
    if isinstance(training, dict) and training.get("loop") is not None:
        problems.append(
            "training.loop: not possible with `privacy`: it bounds no single record's influence, so that "
            "no noise hides a record; leave it out, or take a method's own private training"
        )
    privacy = values["privacy"]
    if isinstance(privacy, dict) and privacy.get("evaluation") == "noisy":
        problems += _noisy_evaluation_problems(privacy)
    return problems


def _noisy_evaluation_problems(privacy: dict[str, Any]) -> list[str]:
    """List options that cannot be combined with a noisy evaluation."""
    problems = []
    if (neighbours := privacy.get("neighbours", "record")) != "record":
        problems.append(
            "privacy.evaluation: Expected 'local' unless `neighbours` is 'record', but got 'noisy' with "
            f"{neighbours!r}: the contribution of a patient's records to an evaluation is not clipped"
        )
    names = ("class_noise_share", "evaluation_noise_share")
    shares = [privacy.get(name, Privacy.model_fields[name].default) for name in names]
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
            "sites_per_round: not possible with secure sums, in which silos that are not drawn would be "
            'drop-outs; set "summation": "plain", or leave sites_per_round out'
        )
    return problems


def _secure_problems(values: dict[str, Any], sites: int) -> list[str]:
    if sites < MIN_SITES:
        return [
            f"sites: secure sums need at least {MIN_SITES} silos, but got {sites}: with two, each could "
            'subtract its own term and learn the other\'s. Set "summation": "plain" if the server may see '
            "every term"
        ]
    colluders, trust = values.get("colluders"), values.get("server_trust", "malicious")
    if isinstance(colluders, int) and trust in ("malicious", "semi_honest"):
        most = max(c for c in range(sites - 1) if c + 2 <= sites and threshold(sites, c, trust) <= sites)
        if colluders > most:
            return [f"colluders: Expected at most {most} with {sites} silos, but got {colluders}"]
    return []


def config_hash(values: Any) -> str:
    """Return the SHA-256 (hex) of plain values as canonical JSON."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def parse_job(values: dict[str, Any]) -> JobConfig:
    """Validate a job's values; ``setup`` checks the names and options of registries.

    Raises:
        JobError: listing every problem.
    """
    job, problems = check_job(values)
    if job is None:
        raise JobError(problems)
    return job


def check_job(values: Any) -> tuple[JobConfig | None, list[str]]:
    """Return the validated job, or None and every problem of its values."""
    if not isinstance(values, dict):
        return None, [f"job: Expected a block of keys, but got {type(values).__name__}"]
    problems = _cross_problems(values)
    try:
        job = JobConfig.model_validate(values)
    except ValidationError as error:
        return None, listed(error, model=JobConfig) + problems
    return (None, problems) if problems else (job, [])
