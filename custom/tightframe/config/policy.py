"""A site's policy: the rules that it enforces itself, whatever a job or a server says.

It is the ``policy`` block of the site's own ``local/tightframe.json``: a profile, and any rule of
it set otherwise. In production the profile is ``standard`` unless the site names another; the
simulator's is ``research``. A job that asks for less than the policy is refused at enrolment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field

from tightframe import data
from tightframe.config.ceilings import Ceilings
from tightframe.config.job import JobConfig, SiteName
from tightframe.config.profiles import (
    NO_LIMIT,
    PROFILES,
    ClearMetric,
    EpsilonShown,
    Profile,
    WeightRule,
)
from tightframe.config.refusals import BelowPolicyError, Refusal
from tightframe.errors import TooLargeError
from tightframe.options import StrictModel
from tightframe.phases import Neighbours
from tightframe.securesum.rules import MAX_SITES, SiteRules, Trust

Pin = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Submitter = Annotated[str, Field(min_length=1, max_length=200)]

MIN_CLASS_COUNT = 5
REPEATED = ("epochs", "alternations")
"""How options of methods are called that say how often records are gone through."""

__all__ = ["MIN_CLASS_COUNT", "PROFILES", "BelowPolicyError", "Policy", "PolicyBlock", "Profile", "Refusal"]


class Policy(StrictModel):
    """One site's rules, complete.

    Attributes:
        profile: the profile that they started from.
        require_secure_sum: refuse jobs with plain sums, in which the server sees this site's terms.
        minimum_cohort: the smallest number of silos in a job and in any sum.
        colluders: at least so many silos must be assumed to collude.
        semi_honest_server: accept jobs that assume a server which keeps to the protocol.
        weights: weight rules that it accepts; ``exact`` tells its number of training records.
        max_weight_share: the most of all weights together that a job may let one silo's be; None sets no
            limit.
        max_records: the largest number of training records that another silo is believed to have; None sets
            no limit.
        min_class_count: fewer local records of a class are never part of a per-class total; None
            stands for 5, and for 1 where the records are the synthetic twin.
        class_rules_off: accept jobs that switch the class rules off by name, or that choose which silos
            submit class sums.
        allow_sign_split: accept sums split by sign, in which a coordinate with one positive silo
            shows that silo's value.
        static_cohort: ``enrolled`` opens counts, class sums and evaluation for one cohort only, for
            ever; ``any`` gives the difference of two cohorts away exactly.
        pins: peer -> SHA-256 (hex) of the public keys that it may have, old and new during a renewal.
        pinned_only: refuse peers without a pin.
        central_provisioning: accept certificates without the role attribute, which only central
            provisioning makes; for tests.
        required_privacy: refuse jobs without differential privacy.
        epsilon_cap: what all jobs together may spend on one data set, and so the most that one may ask;
            None sets no limit. At ``delta_cap``.
        delta_cap: the largest delta; None sets no limit.
        max_releases: the most releases of class sums, class counts and noisy evaluations in a job, repeats
            aside; None sets no limit.
        charged_retries: the most releases of a job that are charged although they failed or are repeated,
            so that a server cannot drain the budget by failing rounds; None sets no limit.
        neighbours: the one relation in which this site counts its budget, ``record`` or ``patient``; None
            takes either. Neither epsilon bounds the other.
        epsilon_shown: what the lead learns of the epsilon that a job has cost this site's records so far:
            ``range`` counts the site in a histogram over silos, ``exact`` also tells its own number,
            ``nothing`` leaves it out of both.
        clear_metrics: which of this site's own numbers a plain sum may show the server: ``evaluation``,
            ``training`` (losses), ``personal`` (its personal model's accuracy).
        max_score_bins: the most bins of score histograms in an exact evaluation, because narrow ones tell
            single records' scores; None sets no limit.
        min_test_count: a fold of fewer records is left out of an exact evaluation, which tells how each of
            them fares to whoever knows the others.
        allowed_methods: the methods that it takes part in; None for all.
        allowed_submitters: who may submit a job, by their provisioned names; None for everybody.
        signed_jobs: take part in production only in jobs with a lead's manifest (``config.job_manifest``).
        max_parameters: the most numbers in a model that is built here; held before it is allocated.
        max_message_bytes: the largest term of a sum.
        max_sites, max_rounds: of a job.
        max_epochs: of any one training that a job names: a round's, the baseline's, those of its method.
        max_batch_values: the most input values at a time: records of a batch times values of a record.
        tell_refusals: tell the lead which rule a job falls short of, with the asked and required value;
            the code alone leaves otherwise.
        egress_guard: run in production only with the site's result filter (``flare.guard``) in place.
        log_streaming: always False: the engine must not send the site's log to the server.
    """

    profile: Profile
    require_secure_sum: bool
    minimum_cohort: int
    colluders: int
    semi_honest_server: bool
    weights: tuple[WeightRule, ...]
    max_weight_share: float | None
    max_records: int | None
    min_class_count: int | None
    class_rules_off: bool
    allow_sign_split: bool
    static_cohort: Literal["enrolled", "any"]
    pins: Mapping[str, tuple[Pin, ...]]
    pinned_only: bool
    central_provisioning: bool
    required_privacy: bool
    epsilon_cap: float | None
    delta_cap: float | None
    max_releases: int | None
    charged_retries: int | None
    neighbours: Neighbours | None
    epsilon_shown: EpsilonShown
    clear_metrics: tuple[ClearMetric, ...]
    max_score_bins: int | None
    min_test_count: int
    allowed_methods: tuple[str, ...] | None
    allowed_submitters: tuple[str, ...] | None
    signed_jobs: bool
    max_parameters: int | None
    max_message_bytes: int | None
    max_sites: int | None
    max_rounds: int | None
    max_epochs: int | None
    max_batch_values: int | None
    tell_refusals: bool
    egress_guard: bool
    log_streaming: Literal[False]

    def site_rules(self) -> SiteRules:
        """The part that the secure sum enforces."""
        trust: frozenset[Trust] = frozenset({"malicious"})
        if self.semi_honest_server:
            trust |= {"semi_honest"}
        return SiteRules(
            minimum_cohort=self.minimum_cohort,
            colluders=self.colluders,
            trust=trust,
            weights=frozenset(self.weights),
            any_static_cohort=self.static_cohort == "any",
            pins={site: frozenset(bytes.fromhex(pin) for pin in pins) for site, pins in self.pins.items()},
            pinned_only=self.pinned_only,
        )

    def class_count(self, *, synthetic: bool) -> int:
        """Local records that a class must have at this site."""
        if self.min_class_count is not None:
            return self.min_class_count
        return 1 if synthetic else MIN_CLASS_COUNT

    def check(self, job: JobConfig, *, submitter: str | None = None) -> None:
        """Refuse a job that asks for less than this policy.

        Args:
            job: as this site was given it.
            submitter: who submitted it; None if nobody knows, as in the simulator.

        Raises:
            BelowPolicyError: TF-614, listing every rule, what the job asks and what is required.
        """
        sizes = self._size_refusals(job)
        self.refuse(
            [*self._sum_refusals(job), *self._privacy_refusals(job), *sizes, *self._who(job, submitter)]
        )

    @property
    def ceilings(self) -> Ceilings:
        """What is held where a job's model is built and its sums are planned."""
        return Ceilings(self.max_parameters, self.max_message_bytes)

    @contextmanager
    def refuse_oversized(self) -> Iterator[None]:
        """Make what is larger than ``ceilings`` a refusal by this policy.

        Raises:
            BelowPolicyError: TF-614, in place of TF-632.
        """
        try:
            yield
        except TooLargeError as error:
            refusal = Refusal(error.rule, error.asked, f"at most {error.most}")
            raise BelowPolicyError([refusal], told=self.tell_refusals) from None

    def check_method(self, options: Any, job: JobConfig | None = None) -> None:
        """Refuse what a job's method does in a way that this policy does not accept.

        Args:
            options: the method's validated options; with ``splits_by_sign`` it sums by sign, with
                ``geometric`` it takes geometric means.
            job: whose method it is; with differential privacy, a bound for each record is needed.

        Raises:
            BelowPolicyError: TF-614.
        """
        refusals = []
        if getattr(options, "splits_by_sign", False) and not self.allow_sign_split:
            refusals.append(
                Refusal(
                    "allow_sign_split",
                    "sums split by sign",
                    "sums of whole values",
                    "the method sums each coordinate's signs and logarithms apart, so that a coordinate "
                    "with one positive silo tells that silo's value",
                )
            )
        if getattr(options, "geometric", False) and self.private(job):
            refusals.append(
                Refusal(
                    self._privacy_rule,
                    "geometric means of gradients",
                    "a bound for each record",
                    "what one record does to a geometric mean has no bound, so no noise hides it; choose a "
                    "variant with arithmetic means, or run the job without differential privacy",
                )
            )
        self.refuse(refusals)

    def private(self, job: JobConfig | None) -> bool:
        """Whether a job runs with differential privacy at this site: it asks for it, or must."""
        return self.required_privacy or getattr(job, "privacy", None) is not None

    def asks_of_method(self, job: JobConfig) -> bool:
        """Whether ``check_method`` can refuse: then the method's options are looked at on enrolment."""
        return not self.allow_sign_split or self.private(job)

    def refuse(self, refusals: Sequence[Refusal]) -> None:
        """Raise what a job is refused for, if that is anything.

        Raises:
            BelowPolicyError: TF-614.
        """
        if refusals:
            raise BelowPolicyError(refusals, told=self.tell_refusals)

    def describe(self) -> str:
        """One line for people: the profile, and each rule that differs from ``standard``."""
        shown = ", ".join(f"{name} {value}" for name, value in self.differences().items())
        return f"{self.profile}" + (f" ({shown})" if shown else "")

    def differences(self, profile: Profile = "standard") -> dict[str, str]:
        """Rules that are not a profile's, with their values in words; pins are the site's own affair."""
        return {
            name: in_words(value)
            for name, value in self.model_dump().items()
            if name not in ("profile", "pins") and value != PROFILES[profile][name]
        }

    @property
    def _privacy_rule(self) -> str:
        return "required_privacy" if self.required_privacy else "privacy"

    def _sum_refusals(self, job: JobConfig) -> list[Refusal]:
        found: list[Refusal] = []
        plain = job.summation == "plain"
        if self.require_secure_sum and plain:
            found.append(Refusal("require_secure_sum", f"{job.summation} sums", "a secure sum"))
        if plain and (clear := [name for name in _clear_metrics(job) if name not in self.clear_metrics]):
            found.append(
                Refusal(
                    "clear_metrics",
                    f"{', '.join(clear)} in clear",
                    f"at most {', '.join(self.clear_metrics) or 'nothing'} in clear",
                    "in a plain sum the server sees this site's own numbers",
                )
            )
        bins, most = job.evaluation.score_bins, self.max_score_bins
        if job.privacy is None and most is not None and bins > most:
            found.append(Refusal("max_score_bins", f"{bins} score bins", f"at most {most}"))
        if job.class_rules == "off" and not self.class_rules_off:
            found.append(Refusal("class_rules_off", "class sums without the class rules", "keeping them"))
        if plain and job.min_sites < self.minimum_cohort:
            found.append(Refusal("minimum_cohort", str(job.min_sites), f"at least {self.minimum_cohort}"))
        if job.weights not in self.weights:
            found.append(Refusal("weights", job.weights, f"one of {', '.join(self.weights)}"))
        asked, share = job.max_weight_share, self.max_weight_share
        # Where all weigh the same there is nothing to lower.
        if job.weights != "uniform" and share is not None and asked > share:
            found.append(Refusal("max_weight_share", _number(asked), f"at most {_number(share)}"))
        if not plain and job.prototype_sites is not None and not self.class_rules_off:
            found.append(
                Refusal(
                    "class_rules_off",
                    "a choice of who submits class sums (prototype_sites)",
                    "class sums of all silos",
                    "totals of two jobs with different choices tell one silo's",
                )
            )
        if job.server_trust == "semi_honest" and not self.semi_honest_server:
            found.append(Refusal("semi_honest_server", "a semi_honest server", "a malicious one"))
        return found

    def _privacy_refusals(self, job: JobConfig) -> list[Refusal]:
        asked = getattr(job, "privacy", None)
        if asked is None:
            if not self.required_privacy:
                return []
            return [Refusal("required_privacy", "no differential privacy", "a job with a privacy block")]
        found = [
            Refusal(rule, _number(value), f"at most {_number(most)}")
            for rule, value, most in (
                ("epsilon_cap", asked.epsilon, self.epsilon_cap),
                ("delta_cap", asked.delta, self.delta_cap),
                ("max_releases", _releases(job.rounds, asked), self.max_releases),
            )
            # A job that leaves a value out does not get round its cap.
            if most is not None and (value is None or value > most)
        ]
        if self.neighbours is not None and asked.neighbours != self.neighbours:
            found.append(
                Refusal(
                    "neighbours",
                    str(asked.neighbours),
                    self.neighbours,
                    "this site counts its budget in that relation; the epsilon of one does not bound the "
                    "other's",
                )
            )
        return found

    def _size_refusals(self, job: JobConfig) -> list[Refusal]:
        """What can be told of a job's size before anything is built."""
        spec = data.get(job.dataset)
        values = math.prod(spec.input_shape(spec.options.model_validate(job.dataset_options)))
        batch = max(job.training.batch_size, job.evaluation.batch_size)
        epochs = {
            "training.epochs": job.training.epochs,
            "local_baseline_epochs": job.local_baseline_epochs,
            **{
                f"method_options.{name}": value
                for name, value in job.method_options.items()
                if name.endswith(REPEATED) and isinstance(value, int)
            },
        }
        longest = max(epochs, key=lambda name: epochs[name])
        asked = (
            ("max_sites", len(job.sites), "sites", self.max_sites),
            ("max_rounds", job.rounds, "rounds", self.max_rounds),
            ("max_epochs", epochs[longest], longest, self.max_epochs),
            ("max_batch_values", batch * values, "values in a batch", self.max_batch_values),
        )
        return [
            Refusal(rule, f"{value} {what}", f"at most {most}")
            for rule, value, what, most in asked
            if most is not None and value > most
        ]

    def _who(self, job: JobConfig, submitter: str | None) -> list[Refusal]:
        found: list[Refusal] = []
        if self.allowed_methods is not None and job.method not in self.allowed_methods:
            found.append(
                Refusal("allowed_methods", job.method, f"one of {', '.join(self.allowed_methods) or 'none'}")
            )
        if self.allowed_submitters is not None and submitter not in self.allowed_submitters:
            shown = "an unknown submitter" if submitter is None else submitter
            # Who else may submit is not the lead's affair.
            found.append(Refusal("allowed_submitters", shown, "one of this site's list"))
        return found


class PolicyBlock(StrictModel):
    """The ``policy`` block as it is written: what is left out comes from the profile."""

    profile: Profile | None = None
    require_secure_sum: bool | None = None
    minimum_cohort: int | None = Field(default=None, ge=1, le=MAX_SITES)
    colluders: int | None = Field(default=None, ge=1, le=MAX_SITES - 2)
    semi_honest_server: bool | None = None
    weights: list[WeightRule] | None = Field(default=None, min_length=1)
    max_weight_share: float | None = Field(default=None, gt=0, le=1)
    max_records: int | None = Field(default=None, ge=1)
    min_class_count: int | None = Field(default=None, ge=1)
    class_rules_off: bool | None = None
    allow_sign_split: bool | None = None
    static_cohort: Literal["enrolled", "any"] | None = None
    pins: dict[SiteName, list[Pin]] | None = None
    pinned_only: bool | None = None
    central_provisioning: bool | None = None
    required_privacy: bool | None = None
    epsilon_cap: float | None = Field(default=None, gt=0)
    delta_cap: float | None = Field(default=None, gt=0, lt=1)
    max_releases: int | None = Field(default=None, ge=1)
    charged_retries: int | None = Field(default=None, ge=0)
    neighbours: Neighbours | None = None
    epsilon_shown: EpsilonShown | None = None
    clear_metrics: list[ClearMetric] | None = None
    max_score_bins: int | None = Field(default=None, ge=2)
    min_test_count: int | None = Field(default=None, ge=1)
    allowed_methods: list[str] | None = None
    allowed_submitters: list[Submitter] | None = None
    signed_jobs: bool | None = None
    max_parameters: int | None = Field(default=None, ge=1)
    max_message_bytes: int | None = Field(default=None, ge=1)
    max_sites: int | None = Field(default=None, ge=1)
    max_rounds: int | None = Field(default=None, ge=1)
    max_epochs: int | None = Field(default=None, ge=1)
    max_batch_values: int | None = Field(default=None, ge=1)
    tell_refusals: bool | None = None
    egress_guard: bool | None = None
    log_streaming: Literal[False] | None = None

    def resolve(self, *, production: bool) -> Policy:
        """The complete policy."""
        profile: Profile = self.profile or ("standard" if production else "research")
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.model_dump(include=self.model_fields_set - {"profile"}).items()
            if value is not None or name in NO_LIMIT
        }
        if "pins" in given:
            given["pins"] = {site: tuple(pins) for site, pins in given["pins"].items()}
        return Policy(profile=profile, **{**PROFILES[profile], **given})


def in_words(value: Any) -> str:
    """A rule's value for people."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "not limited" if value is None else _number(value)


def _clear_metrics(job: JobConfig) -> list[str]:
    """Which numbers of a silo's own the server sees if the job's sums are plain."""
    if job.privacy is not None:
        return []  # losses stay at the silo, and so does the evaluation, or has all of the noise its own
    return ["training", "evaluation"] + ["personal"] * job.personalise


def _releases(rounds: int, asked: Any) -> int | None:
    """Noisy sums that a job can make: class sums, if its method has any, and evaluations where they leave.

    No more than its rounds allow. What its method really makes is counted before it trains, by
    ``rounds.silo.budget``, which needs torch.
    """
    if asked.releases is None:
        return None
    from tightframe.privacy.releases.plan import release_rounds  # light tasks of other jobs need none of it

    evaluated = 0
    if asked.evaluation == "noisy":
        evaluated = len(release_rounds(rounds, asked.evaluations, predicts=True))
    return len(release_rounds(rounds, asked.releases)) + evaluated


def _number(value: Any) -> str:
    return "no limit" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
