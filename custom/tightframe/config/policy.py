"""A site's policy: the rules that it enforces itself, whatever a job or the server asks for.

It is the ``policy`` block of the site's own ``local/tightframe.json``: a profile, and the rules that
differ from it. The default profile is ``standard`` in production and ``research`` in the simulator. A job
that asks for less than the policy is refused at enrolment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Union

from pydantic import create_model

from tightframe import data
from tightframe.config.job import JobConfig
from tightframe.config.profiles import NO_LIMIT, PROFILES, Profile, Rules
from tightframe.config.refusals import BelowPolicyError, Refusal
from tightframe.errors import TooLargeError
from tightframe.options import StrictModel
from tightframe.securesum.rules import MIN_SITES, SiteRules, Trust

MIN_CLASS_COUNT = 5
REPEATED = ("epochs", "alternations")
"""Suffixes of method options that count passes over the records."""


@dataclass(frozen=True)
class Ceilings:
    """Limits on a job's model and on its planned sums; None sets no limit.

    The defaults apply without a policy's own.

    Attributes:
        parameters: numbers in a model, including its buffers.
        message_bytes: bytes of a silo's largest term.
    """

    parameters: int | None = 100_000_000
    message_bytes: int | None = 2**30


class Policy(Rules):
    """One site's complete rules."""

    def site_rules(self) -> SiteRules:
        """Return the rules that the secure sum enforces."""
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
        """Return the least number of local records that a class must have at this site."""
        if self.min_class_count is not None:
            return self.min_class_count
        return 1 if synthetic else MIN_CLASS_COUNT

    def check(self, job: JobConfig, *, submitter: str | None = None) -> None:
        """Refuse a job that asks for less than this policy.

        Args:
            job: as this site received it.
            submitter: name of the user who submitted it; None if unknown, as in the simulator.

        Raises:
            BelowPolicyError: TF-614, listing every violated rule with the asked and the required value.
        """
        sizes = self._size_refusals(job)
        self.refuse(
            [
                *self.sum_refusals(job),
                *self._privacy_refusals(job),
                *sizes,
                *self._allowance_refusals(job, submitter),
            ]
        )

    @property
    def ceilings(self) -> Ceilings:
        """The size limits for building a job's model and planning its sums."""
        return Ceilings(self.max_parameters, self.max_message_bytes)

    @contextmanager
    def refuse_oversized(self) -> Iterator[None]:
        """Turn a size error inside the block into a refusal by this policy.

        Raises:
            BelowPolicyError: TF-614, instead of TF-632.
        """
        try:
            yield
        except TooLargeError as error:
            refusal = Refusal(error.rule, error.asked, f"at most {error.most}")
            raise BelowPolicyError([refusal], shown_to_lead=self.tell_refusals) from None

    def check_method(self, options: Any, job: JobConfig | None = None) -> None:
        """Refuse a method that discloses more than this policy accepts, or sends updates without a norm.

        Args:
            options: the method's validated options; with ``splits_by_sign`` it sums by sign, with
                ``geometric`` it takes geometric means; ``equations`` (1) of its fields are a silo's update
                times a factor of its own; with ``tells_gradients`` sums beside the updates, as those of a
                job's ``start``, tell that of the silos' gradients; with ``share_units`` a network with that
                many hidden units takes its class shares.
            job: the method's; with differential privacy each record's influence must be bounded. None skips
                the checks that depend on it.

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
                    "the method sums each coordinate's signs and logarithms separately, so that a coordinate "
                    "with one positive silo discloses that silo's value",
                )
            )
        if getattr(options, "geometric", False) and self.private(job):
            refusals.append(
                Refusal(
                    self._privacy_rule,
                    "geometric means of gradients",
                    "a bound for each record",
                    "one record's influence on a geometric mean has no bound, so no noise hides it; choose a "
                    "variant with arithmetic means, or run the job without differential privacy",
                )
            )
        least = least_sites(job, options) if job is not None and self.minimum_cohort > 1 else 0
        if job is not None and least > job.min_sites:
            refusals.append(
                Refusal(
                    "minimum_cohort",
                    f"min_sites {job.min_sites}",
                    f"at least {least} with {job.method}",
                    "its sums are several equations in the silos' updates: with so few honest silos in them, "
                    "the others can solve them for each one's, or for its class shares",
                )
            )
        if job is not None and self._needs_norm(job, options):
            refusals.append(
                Refusal(
                    "max_update_norm",
                    "no update_norm",
                    f"at most {_number(self.max_update_norm)}",
                    "without a norm nothing bounds how far one silo with wrong records moves the model; "
                    '"update_norm": 100 is several times as long as usual updates',
                )
            )
        self.refuse(refusals)

    def _needs_norm(self, job: JobConfig, options: Any) -> bool:
        return self.max_update_norm is not None and job.update_norm is None and takes_norm(job, options)

    def private(self, job: JobConfig | None) -> bool:
        """Check whether a job has, or must have, differential privacy at this site."""
        return self.required_privacy or getattr(job, "privacy", None) is not None

    def asks_of_method(self, job: JobConfig) -> bool:
        """Check whether ``check_method`` can refuse, so that enrolment needs the method's options."""
        norm = self.max_update_norm is not None and job.update_norm is None
        return not self.allow_sign_split or self.private(job) or norm

    def refuse(self, refusals: Sequence[Refusal]) -> None:
        """Refuse a job if there are any refusals.

        Raises:
            BelowPolicyError: TF-614.
        """
        if refusals:
            raise BelowPolicyError(refusals, shown_to_lead=self.tell_refusals)

    def describe(self) -> str:
        """Describe the policy in one line: the profile, and each rule that differs from ``standard``."""
        rules = ", ".join(f"{name} {value}" for name, value in self.differences().items())
        return f"{self.profile}" + (f" ({rules})" if rules else "")

    def name(self) -> str:
        """Name the profile and its changed rules."""
        changed = ", ".join(f"{name} {value}" for name, value in self.differences(self.profile).items())
        return f"{self.profile}, with {changed}" if changed else self.profile

    def differences(self, profile: Profile = "standard") -> dict[str, str]:
        """Return the rules that differ from a profile, with their values in words; pins are left out."""
        return {
            name: in_words(value)
            for name, value in self.model_dump().items()
            if name not in ("profile", "pins") and value != PROFILES[profile][name]
        }

    @property
    def _privacy_rule(self) -> str:
        return "required_privacy" if self.required_privacy else "privacy"

    def sum_refusals(self, job: JobConfig) -> list[Refusal]:
        """List the rules that a job's sums, as planned for all its silos, violate."""
        refusals: list[Refusal] = []
        plain = job.summation == "plain"
        if self.require_secure_sum and plain:
            refusals.append(Refusal("require_secure_sum", f"{job.summation} sums", "a secure sum"))
        if plain and (clear := [name for name in _clear_metrics(job) if name not in self.clear_metrics]):
            refusals.append(
                Refusal(
                    "clear_metrics",
                    f"{', '.join(clear)} in clear",
                    f"at most {', '.join(self.clear_metrics) or 'nothing'} in clear",
                    "in a plain sum the server sees this site's own numbers",
                )
            )
        if job.privacy is None and (bound := self.max_evaluations) is not None:
            models = len(job.evaluation.after(job.rounds))
            if models > bound:
                refusals.append(
                    Refusal(
                        "max_evaluations",
                        f"exact evaluations of {models} models",
                        f"at most {bound} in evaluation.models",
                        "whoever steers the model reads single test records out of many evaluations; set "
                        f'"evaluation": {{"models": {bound}}}',
                    )
                )
        bins, narrowest = job.evaluation.score_bins, self.max_score_bins
        if job.privacy is None and narrowest is not None and bins > narrowest:
            refusals.append(Refusal("max_score_bins", f"{bins} score bins", f"at most {narrowest}"))
        grid, least = job.answer_grid, self.min_answer_grid
        if grid is not None and grid < least:
            refusals.append(Refusal("min_answer_grid", f"answers every {grid:g} s", f"at least {least:g} s"))
        if job.class_rules == "off" and not self.class_rules_off:
            refusals.append(Refusal("class_rules_off", "class sums without the class rules", "keeping them"))
        refusals += self._cohort_refusals(job)
        if job.weights not in self.weights:
            refusals.append(Refusal("weights", job.weights, f"one of {', '.join(self.weights)}"))
        share, cap = job.max_weight_share, self.max_weight_share
        # Uniform weights need no cap.
        if job.weights != "uniform" and cap is not None and share > cap:
            refusals.append(Refusal("max_weight_share", _number(share), f"at most {_number(cap)}"))
        norm, most = job.update_norm, self.max_update_norm
        if norm is not None and most is not None and norm > most:
            refusals.append(Refusal("max_update_norm", _number(norm), f"at most {_number(most)}"))
        if not plain and job.prototype_sites is not None and not self.class_rules_off:
            refusals.append(
                Refusal(
                    "class_rules_off",
                    "class sums of chosen silos only (prototype_sites)",
                    "class sums of all silos",
                    "the totals of two jobs with different choices disclose one silo's class sums",
                )
            )
        refusals += self._site_model_refusals(job)
        withdraw, least = getattr(job, "withdraw", None), self.min_withdrawn
        if withdraw is not None and withdraw.min_withdrawn < least:
            refusals.append(
                Refusal(
                    "min_withdrawn",
                    f"at least {withdraw.min_withdrawn} withdrawn records",
                    f"at least {least}",
                    "the total after a withdrawal discloses the sum of the withdrawn records",
                )
            )
        if job.server_trust == "semi_honest" and not self.semi_honest_server:
            refusals.append(Refusal("semi_honest_server", "a semi_honest server", "a malicious one"))
        return refusals

    def _site_model_refusals(self, job: JobConfig) -> list[Refusal]:
        """Refuse models of fewer than three silos: whoever writes the job can let all others' say nothing."""
        if not job.site_models or job.summation == "plain" or job.privacy is not None or self.class_rules_off:
            return []
        models = [job.model_at(site).model_dump_json() for site in job.roster]
        if (least := min(map(models.count, models))) >= MIN_SITES:
            return []
        return [
            Refusal(
                "class_rules_off",
                f"a model that {least} of {len(models)} silos train (site_models)",
                f"each model at {MIN_SITES} silos or more",
                "if all others' models say the same of every record, totals are those of these silos",
            )
        ]

    def _cohort_refusals(self, job: JobConfig) -> list[Refusal]:
        """List the rules that a job's number of silos violates; the protocol checks smaller rosters later."""
        sites, least = len(job.sites), self.minimum_cohort
        plain = job.summation == "plain"
        refusals: list[Refusal] = []
        if sites < least:
            why = "more silos must take part, or those who answer for the records here lower the rule"
            refusals.append(Refusal("minimum_cohort", f"{sites} silos", f"at least {least}", why))
        elif (job.min_sites if plain else job.smallest_sum(sites)) < least:
            refusals.append(
                Refusal(
                    "minimum_cohort",
                    f"min_sites {job.min_sites}",
                    f"at least {least}",
                    "no sum may be of fewer silos",
                )
            )
        if not plain and (assumed := job.assumed_colluders(sites)) < self.colluders:
            refusals.append(
                Refusal(
                    "colluders",
                    str(assumed),
                    f"at least {self.colluders}",
                    f'set "colluders": {self.colluders} in the job',
                )
            )
        return refusals

    def _privacy_refusals(self, job: JobConfig) -> list[Refusal]:
        privacy = getattr(job, "privacy", None)
        if privacy is None:
            if not self.required_privacy:
                return []
            return [Refusal("required_privacy", "no differential privacy", "a job with a privacy block")]
        refusals = [
            Refusal(rule, _number(value), f"at most {_number(most)}")
            for rule, value, most in (
                ("epsilon_cap", privacy.epsilon, self.epsilon_cap),
                ("delta_cap", privacy.delta, self.delta_cap),
                ("max_releases", _releases(job.rounds, privacy), self.max_releases),
            )
            # A job cannot avoid a cap by leaving the value out.
            if most is not None and (value is None or value > most)
        ]
        if self.neighbours is not None and privacy.neighbours != self.neighbours:
            refusals.append(
                Refusal(
                    "neighbours",
                    str(privacy.neighbours),
                    self.neighbours,
                    "this site counts its budget in that relation; the epsilon of one does not bound the "
                    "other's",
                )
            )
        if self.private_noise == "own" and privacy.noise == "shared" and job.summation == "secure":
            refusals.append(
                Refusal(
                    "private_noise",
                    "noise shared by all silos",
                    "all noise this silo's own",
                    "this site's protection must not rest on noise of other silos; with privacy.noise 'own' "
                    "each silo adds all of it",
                )
            )
        return refusals

    def _size_refusals(self, job: JobConfig) -> list[Refusal]:
        """List the size rules that a job violates, as far as known before its model is built."""
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
        sizes = (
            ("max_sites", len(job.sites), "sites", self.max_sites),
            ("max_rounds", job.rounds, "rounds", self.max_rounds),
            ("max_epochs", epochs[longest], longest, self.max_epochs),
            ("max_batch_values", batch * values, "values in a batch", self.max_batch_values),
        )
        return [
            Refusal(rule, f"{value} {unit}", f"at most {most}")
            for rule, value, unit, most in sizes
            if most is not None and value > most
        ]

    def _allowance_refusals(self, job: JobConfig, submitter: str | None) -> list[Refusal]:
        refusals: list[Refusal] = []
        if self.allowed_methods is not None and job.method not in self.allowed_methods:
            refusals.append(
                Refusal("allowed_methods", job.method, f"one of {', '.join(self.allowed_methods) or 'none'}")
            )
        if self.allowed_submitters is not None and submitter not in self.allowed_submitters:
            name = "an unknown submitter" if submitter is None else submitter
            # The site does not disclose its list to the lead.
            refusals.append(Refusal("allowed_submitters", name, "one of this site's list"))
        return refusals


_OPTIONAL: dict[str, Any] = {
    name: (Annotated[Union[rule.annotation, None], name, *rule.metadata], None)  # noqa: UP007
    for name, rule in Rules.model_fields.items()
}
_Optional: Any = create_model("_Optional", __base__=StrictModel, **_OPTIONAL)


class PolicyBlock(_Optional):
    """The ``policy`` block of a site's file; rules that it leaves out come from the profile."""

    def resolve(self, *, production: bool) -> Policy:
        """Return the complete policy."""
        profile: Profile = self.profile or ("standard" if production else "research")
        written = {name: getattr(self, name) for name in self.model_fields_set - {"profile"}}
        overrides = {name: value for name, value in written.items() if value is not None or name in NO_LIMIT}
        return Policy(profile=profile, **{**PROFILES[profile], **overrides})


def least_sites(job: JobConfig, options: Any) -> int:
    """Return the least number of silos in a sum with fewer fields than honest silos; 0 if any is enough.

    Args:
        job: with the method.
        options: of the method, validated; see ``Policy.check_method``.
    """
    started = job.start is not None and job.privacy is None
    several: int = getattr(options, "equations", 1)
    several += started or getattr(options, "tells_gradients", False)
    if units := getattr(options, "share_units", 0):
        spec = data.get(job.dataset)
        classes = spec.of(spec.options.model_validate(job.dataset_options)).num_classes
        several = max(several, units, classes - 1)
    return 0 if several < 2 else several + 1 + job.assumed_colluders(len(job.sites))


def takes_norm(job: JobConfig, options: Any) -> bool:
    """Check whether a job's method sends updates that ``update_norm`` can bound.

    Methods without a global model send none, logarithms of sums split by sign have no norm, and a noisy sum
    of gradients is bounded by record and must keep its noise.

    Args:
        job: with the method.
        options: of the method, validated.
    """
    from tightframe import methods  # imports torch

    if job.evaluate_only is not None or job.statistics is not None:
        return False
    method = methods.get(job.method)
    if method.own_model is not None or getattr(options, "splits_by_sign", False):
        return False
    return method.gradient_rate is None or job.privacy is None


def in_words(value: Any) -> str:
    """Describe a rule's value."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "not limited" if value is None else _number(value)


def _clear_metrics(job: JobConfig) -> list[str]:
    """Return the kinds of a silo's own numbers that the server sees in plain sums."""
    if job.privacy is not None:
        return []  # losses and evaluation stay at the silo, or have all of the evaluation's noise from it
    return ["training", "evaluation"] + ["personal"] * job.personalise


def _releases(rounds: int, privacy: Any) -> int | None:
    """Return an upper bound on a job's noisy sums: class sums, if its method has any, and noisy evaluations.

    Its rounds limit both. ``rounds.silo.budget``, which needs torch, counts the method's actual releases
    before training.
    """
    if privacy.releases is None:
        return None
    if not rounds:
        return 1  # the evaluation or statistics of a job without training
    from tightframe.privacy.releases.class_sums_plan import release_rounds  # jobs without privacy do without

    evaluated = 0
    if privacy.evaluation == "noisy":
        evaluated = len(release_rounds(rounds, privacy.evaluations, predicts=True))
    return len(release_rounds(rounds, privacy.releases)) + evaluated


def _number(value: Any) -> str:
    return "no limit" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
