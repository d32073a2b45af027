"""A site's policy: the rules that it enforces itself, whatever a job or a server says.

It is the ``policy`` block of the site's own ``local/tightframe.json``: a profile, and any rule of
it set otherwise. In production the profile is ``standard`` unless the site names another; the
simulator's is ``research``. A job that asks for less than the policy is refused at enrolment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tightframe.config.job import JobConfig, SiteName
from tightframe.errors import PolicyError
from tightframe.securesum.rules import MAX_SITES, SiteRules, Trust

WeightRule = Literal["exact", "power_of_two", "uniform"]
Profile = Literal["standard", "research"]
Pin = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

MIN_CLASS_COUNT = 5


class Policy(BaseModel):
    """One site's rules, complete.

    Attributes:
        profile: the profile that they started from.
        require_secure_sum: refuse jobs with plain sums, in which the server sees this site's terms.
        minimum_cohort: the smallest number of silos in a job and in any sum.
        colluders: at least so many silos must be assumed to collude.
        semi_honest_server: accept jobs that assume a server which keeps to the protocol.
        weights: weight rules that it accepts; ``exact`` tells its number of training records.
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
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    profile: Profile
    require_secure_sum: bool
    minimum_cohort: int
    colluders: int
    semi_honest_server: bool
    weights: tuple[WeightRule, ...]
    min_class_count: int | None
    class_rules_off: bool
    allow_sign_split: bool
    static_cohort: Literal["enrolled", "any"]
    pins: Mapping[str, tuple[Pin, ...]]
    pinned_only: bool
    central_provisioning: bool

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

    def check(self, job: JobConfig) -> None:
        """Refuse a job that asks for less than this policy.

        Raises:
            PolicyError: TF-614, listing every rule, what the job asks and what is required.
        """
        problems: list[str] = []
        if self.require_secure_sum and job.summation != "secure":
            problems.append(f"require_secure_sum: the job asks for {job.summation} sums, secure is required")
        if job.class_rules == "off" and not self.class_rules_off:
            problems.append("class_rules_off: the job switches the class rules off, which is not accepted")
        if job.min_sites < self.minimum_cohort and job.summation == "plain":
            problems.append(
                f"minimum_cohort: the job asks for {job.min_sites}, "
                f"at least {self.minimum_cohort} is required"
            )
        if job.weights not in self.weights:
            problems.append(
                f"weights: the job asks for {job.weights}, one of {list(self.weights)} is required"
            )
        if job.summation == "secure" and job.prototype_sites is not None and not self.class_rules_off:
            problems.append(
                "class_rules_off: the job chooses who submits class sums (prototype_sites), so that "
                "totals of two jobs tell one silo's; that is not accepted"
            )
        if job.server_trust == "semi_honest" and not self.semi_honest_server:
            problems.append("semi_honest_server: the job assumes one, a malicious one must be assumed")
        if problems:
            raise PolicyError(
                "the job asks for less than this site's policy requires:\n"
                + "\n".join(f"  - {problem}" for problem in problems)
            )

    def check_method(self, options: Any) -> None:
        """Refuse what a job's method does in a way that this policy does not accept.

        Args:
            options: the method's validated options; with ``splits_by_sign`` it sums by sign.

        Raises:
            PolicyError: TF-614.
        """
        if getattr(options, "splits_by_sign", False) and not self.allow_sign_split:
            raise PolicyError(
                "the job asks for less than this site's policy requires:\n"
                "  - allow_sign_split: the method sums each coordinate's signs and logarithms apart, so that "
                "a coordinate with one positive silo tells that silo's value; that is not accepted"
            )

    def describe(self) -> str:
        """One line for people: the profile, and each rule that differs from ``standard``."""
        strict = PROFILES["standard"]
        loose = {
            name: value
            for name, value in self.model_dump().items()
            if name not in ("profile", "pins") and value != strict[name]
        }
        shown = ", ".join(f"{name} {_shown(value)}" for name, value in loose.items())
        return f"{self.profile}" + (f" ({shown})" if shown else "")


PROFILES: Mapping[Profile, Mapping[str, Any]] = {
    "standard": {
        "require_secure_sum": True,
        "minimum_cohort": 3,
        "colluders": 1,
        "semi_honest_server": False,
        "weights": ("exact", "power_of_two", "uniform"),
        "min_class_count": None,
        "class_rules_off": False,
        "allow_sign_split": False,
        "static_cohort": "enrolled",
        "pins": {},
        "pinned_only": False,
        "central_provisioning": False,
    },
    "research": {
        "require_secure_sum": False,
        "minimum_cohort": 1,
        "colluders": 1,
        "semi_honest_server": True,
        "weights": ("exact", "power_of_two", "uniform"),
        "min_class_count": None,
        "class_rules_off": True,
        "allow_sign_split": True,
        "static_cohort": "enrolled",
        "pins": {},
        "pinned_only": False,
        "central_provisioning": False,
    },
}


class PolicyBlock(BaseModel):
    """The ``policy`` block as it is written: what is left out comes from the profile."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    profile: Profile | None = None
    require_secure_sum: bool | None = None
    minimum_cohort: int | None = Field(default=None, ge=1, le=MAX_SITES)
    colluders: int | None = Field(default=None, ge=1, le=MAX_SITES - 2)
    semi_honest_server: bool | None = None
    weights: list[WeightRule] | None = Field(default=None, min_length=1)
    min_class_count: int | None = Field(default=None, ge=1)
    class_rules_off: bool | None = None
    allow_sign_split: bool | None = None
    static_cohort: Literal["enrolled", "any"] | None = None
    pins: dict[SiteName, list[Pin]] | None = None
    pinned_only: bool | None = None
    central_provisioning: bool | None = None

    def resolve(self, *, production: bool) -> Policy:
        """The complete policy."""
        profile: Profile = self.profile or ("standard" if production else "research")
        given = {name: value for name, value in self.model_dump().items() if value is not None}
        given.pop("profile", None)
        if "weights" in given:
            given["weights"] = tuple(given["weights"])
        if "pins" in given:
            given["pins"] = {site: tuple(pins) for site, pins in given["pins"].items()}
        return Policy(profile=profile, **{**PROFILES[profile], **given})


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(value) if isinstance(value, tuple) else str(value)
