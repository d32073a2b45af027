"""The rules of a site's policy, and their values in the profiles."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from tightframe.config.job import SiteName
from tightframe.options import StrictModel
from tightframe.phases import Neighbours
from tightframe.securesum.rules import MAX_SITES

GivenModels = Literal["none", "accepted", "any"]
WeightRule = Literal["exact", "power_of_two", "uniform"]
Profile = Literal["strict", "standard", "research"]
ClearMetric = Literal["evaluation", "training", "personal"]
EpsilonShown = Literal["nothing", "range", "exact"]

CLEAR_METRICS: tuple[ClearMetric, ...] = get_args(ClearMetric)

Pin = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Submitter = Annotated[str, Field(min_length=1, max_length=200)]


class Rules(StrictModel):
    """The rules of a policy, with their values in the profile ``standard``.

    Attributes:
        profile: the profile that they are based on.
        require_secure_sum: refuse jobs with plain sums, in which the server sees this site's terms.
        minimum_cohort: the smallest number of silos in a job and in any sum; of secure sums never below 3.
        colluders: the least number of colluding silos that a job must assume.
        semi_honest_server: accept jobs that assume a server which follows the protocol.
        weights: the weight rules that it accepts; ``exact`` discloses its number of training records.
        max_weight_share: the largest share of the total weight that a job may give one silo, ignored with
            ``uniform`` weights; None sets no limit.
        max_update_norm: the largest ``update_norm`` of a job; one without is refused if its method sends
            updates that a norm can bound. None accepts both.
        max_records: the largest number of training records that another silo may plausibly declare (TF-631);
            None sets no limit.
        min_class_count: a class of fewer local patients is never part of a per-class total; None means 5,
            or 1 if the records are the synthetic twin.
        class_rules_off: accept jobs that switch the class rules off, that choose which silos submit class
            sums, or that give a model to fewer than three silos; let exact evaluations of silos' own models
            leave, and personal models' PM(V) and PM(L) be of classes of fewer patients.
        allow_sign_split: accept sums split by sign, in which a coordinate with one positive silo
            discloses that silo's value.
        full_batches: train on the job's batches, each record once in an epoch. Otherwise, without privacy,
            each batch is drawn anew from this site's training records and has at most half of them: what is
            computed from all of them is a function of records and model alone, which repeats.
        static_cohort: ``enrolled`` opens counts, class sums and evaluation for a single cohort,
            permanently, and does not sum with silos that have ``any``, which discloses the exact difference
            between two cohorts.
        pins: peer -> SHA-256 (hex) of the public keys that it may have, old and new during a renewal.
        pinned_only: refuse peers without a pin; with no pins, all.
        central_provisioning: accept certificates without the role attribute, which only central
            provisioning issues; for tests.
        required_privacy: refuse jobs without differential privacy.
        epsilon_cap: the most epsilon that all jobs together may spend on one data set, and so the most that
            one job may ask for, at ``delta_cap``; None sets no limit.
        delta_cap: the largest delta; None sets no limit.
        max_releases: the most releases of class sums, class counts and noisy evaluations in a job, not
            counting repeats; None sets no limit.
        charged_retries: the most releases of a job that are charged although they failed or are repeated,
            so that a server cannot exhaust the budget by failing rounds; None sets no limit.
        neighbours: the neighbouring relation in which this site counts its budget, ``record`` or
            ``patient``; None accepts either. The epsilon of one does not bound the other's.
        private_noise: ``own`` refuses jobs whose noise of training is made by all silos together, so that
            this site's protection rests on no other silo; ``shared`` accepts both.
        epsilon_shown: what the lead learns of the epsilon that a job has cost this site's records so far:
            ``range`` counts the site in a histogram over silos, ``exact`` also reports its own number,
            ``nothing`` leaves it out of both.
        clear_metrics: the site's own numbers that a plain sum may show the server: ``evaluation``,
            ``training`` (losses), ``personal`` (its personal model's accuracy).
        max_evaluations: the most models that are evaluated exactly, by all jobs on a data set until a person
            accepts more (TF-627), because whoever steers the model reads single test records out of many
            evaluations. Starts count: an author chooses their seeds. None: no limit.
        evaluated_share: the largest part of the bits that validation or test records hold which exact
            evaluations may open, those of all jobs together (TF-627): from more, rows of few short columns
            are computed. None sets no limit.
        max_score_bins: the most bins of score histograms in an exact evaluation, because narrow bins
            disclose the scores of single records; None sets no limit.
        min_test_count: a fold of fewer patients is left out of an exact evaluation, and of means of personal
            models, because whoever knows all records but one could infer the result of that one. A fold of
            fewer than three silos is in no secure sum (but with ``class_rules: off``).
        min_answer_grid: seconds; the least ``answer_grid`` of a job that sets one, because when a term comes
            tells how long this site trained.
        allowed_methods: the methods that it takes part in; None for all.
        allowed_submitters: provisioned names of the users who may submit a job; None for all.
        min_withdrawn: the least number of records that a withdrawal must take out over all silos
            (``withdraw`` in a job), because the total tells their sum.
        records_per_feature: how many records exact sums must rest on, because single records are computed
            from sums over fewer (TF-625); 0 switches the rule off. A number k asks for k records of honest
            silos for each feature whose products are summed; for k values in a class's records for each
            frozen feature summed by class; and, where a layer trains densely on inputs or frozen features,
            for k records for each of its units, for each of these inputs (or, if fewer, units times rounds)
            and for each round, over all jobs. Of this site's own records it asks for k / 2 values for each
            number that a run's class sums in training tell, and for k / 2 records with a column for each
            unit trained on it.
        min_row_bits: refuse jobs without privacy over a table of fewer than 2 to this number possible
            rows, by the values of this site's training records (TF-628): from exact totals, of a round of
            training too, records are found among these, by least squares. With 0 there is no rule.
        given_models: a start, or a model to evaluate, that a job names (``initial_model_sha256``): ``none``
            of them, one that a person ``accepted`` here (``tightframe site model accept``), or ``any``
            (TF-626). Weights can be made so that totals of many records show single ones.
        signed_jobs: take part in production only in jobs that a lead has signed (TF-633).
        max_parameters: the most numbers in a model that is built here, checked before it is allocated (in
            ``research`` with the first training).
        max_message_bytes: the largest term of a sum.
        max_sites: the most silos in a job; of secure sums never above 250.
        max_rounds: the most rounds of a job, at most 10,000.
        max_epochs: of each training in a job: a round's, the baseline's, those of its method (options that
            end in ``epochs`` or ``alternations``).
        max_batch_values: the most input values at a time: records of a batch times values of a record.
        tell_refusals: report to the lead which rule a job does not meet, with the asked and the required
            value; otherwise only the code leaves the site.
        egress_guard: run in production only with the site's result filter in place (TF-202).
        log_streaming: always False: the engine must not send the site's log to the server (TF-202).
    """

    profile: Profile
    require_secure_sum: bool = True
    minimum_cohort: int = Field(default=3, ge=1, le=MAX_SITES)
    colluders: int = Field(default=1, ge=1, le=MAX_SITES - 2)
    semi_honest_server: bool = False
    weights: tuple[WeightRule, ...] = Field(
        default=("exact", "power_of_two", "uniform"), strict=False, min_length=1
    )
    max_weight_share: float | None = Field(default=0.6, gt=0, le=1)
    max_update_norm: float | None = Field(default=1000.0, gt=0)
    max_records: int | None = Field(default=10_000_000, ge=1)
    min_class_count: int | None = Field(default=None, ge=1)
    class_rules_off: bool = False
    allow_sign_split: bool = False
    full_batches: bool = False
    static_cohort: Literal["enrolled", "any"] = "enrolled"
    pins: Mapping[SiteName, Annotated[tuple[Pin, ...], Field(strict=False)]] = {}
    pinned_only: bool = False
    central_provisioning: bool = False
    required_privacy: bool = False
    epsilon_cap: float | None = Field(default=8.0, gt=0)
    delta_cap: float | None = Field(default=1e-5, gt=0, lt=1)
    max_releases: int | None = Field(default=10, ge=1)
    charged_retries: int | None = Field(default=3, ge=0)
    neighbours: Neighbours | None = None
    private_noise: Literal["own", "shared"] = "shared"
    epsilon_shown: EpsilonShown = "range"
    clear_metrics: tuple[ClearMetric, ...] = Field(default=(), strict=False)
    max_evaluations: int | None = Field(default=11, ge=1)
    evaluated_share: float | None = Field(default=0.5, gt=0, le=1)
    max_score_bins: int | None = Field(default=32, ge=2)
    min_test_count: int = Field(default=10, ge=1)
    min_answer_grid: float = Field(default=1.0, ge=0, le=3600)
    min_withdrawn: int = Field(default=10, ge=1, le=2**20)
    records_per_feature: int = Field(default=2, ge=0, le=1000)
    min_row_bits: int = Field(default=24, ge=0, le=1000)
    given_models: GivenModels = "accepted"
    allowed_methods: tuple[str, ...] | None = Field(default=None, strict=False)
    allowed_submitters: tuple[Submitter, ...] | None = Field(default=None, strict=False)
    signed_jobs: bool = True
    max_parameters: int | None = Field(default=50_000_000, ge=1)
    max_message_bytes: int | None = Field(default=2**30, ge=1)
    max_sites: int | None = Field(default=100, ge=1)
    max_rounds: int | None = Field(default=1000, ge=1)
    max_epochs: int | None = Field(default=500, ge=1)
    max_batch_values: int | None = Field(default=2**26, ge=1)
    tell_refusals: bool = True
    egress_guard: bool = True
    log_streaming: Literal[False] = False


_STANDARD: Mapping[str, Any] = {
    name: rule.default for name, rule in Rules.model_fields.items() if name != "profile"
}
PROFILES: Mapping[Profile, Mapping[str, Any]] = {
    "strict": {
        **_STANDARD,
        "minimum_cohort": 5,
        "weights": ("power_of_two", "uniform"),
        "max_weight_share": 0.5,
        "pinned_only": True,
        "required_privacy": True,
        "charged_retries": 1,
        "max_evaluations": 6,
        "evaluated_share": 0.25,
        "min_test_count": 20,
        "min_withdrawn": 20,
        "records_per_feature": 4,
        "neighbours": "record",
    },
    "standard": _STANDARD,
    "research": {
        **_STANDARD,
        "require_secure_sum": False,
        "minimum_cohort": 1,
        "semi_honest_server": True,
        "max_weight_share": None,
        "max_update_norm": None,
        "class_rules_off": True,
        "allow_sign_split": True,
        "full_batches": True,
        "epsilon_cap": None,
        "delta_cap": None,
        "max_releases": None,
        "charged_retries": None,
        "clear_metrics": CLEAR_METRICS,
        "max_evaluations": None,
        "evaluated_share": None,
        "max_score_bins": None,
        "min_test_count": 1,
        "min_answer_grid": 0.0,
        "min_withdrawn": 1,
        "records_per_feature": 0,
        "min_row_bits": 0,
        "given_models": "any",
        "max_parameters": 100_000_000,
        "max_sites": None,
        "max_rounds": None,
        "max_epochs": None,
        "max_batch_values": None,
        "signed_jobs": False,
        "egress_guard": False,
    },
}
DELTA = 1e-5
"""Delta of epsilon if neither an option nor a policy (``delta_cap``) gives one."""
NO_LIMIT = frozenset(
    name for name, rule in Rules.model_fields.items() if NoneType in get_args(rule.annotation)
)
"""Rules for which null in a site's file means no limit. For all others null keeps the profile's value."""
