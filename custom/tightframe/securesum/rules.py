"""The rules that a site enforces from its own configuration, whatever the server proposes.

Sources: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS
2017, section 6, for the threshold against a malicious server; the cohort rules are our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tightframe.securesum.errors import ParametersError

if TYPE_CHECKING:
    from tightframe.securesum.messages import FieldSpec, Params

Trust = Literal["malicious", "semi_honest"]
"""Trust model of the server: it may deviate in any way, or it follows the protocol and reads all it gets."""

MIN_SITES, MAX_SITES = 3, 250
MAX_SLOTS = 256
MIN_SURVIVORS = 3


def default_colluders(sites: int) -> int:
    """Return the default number of colluding sites: ``max(1, floor(n / 10))``."""
    return max(1, sites // 10)


def threshold(sites: int, colluders: int, trust: Trust = "malicious") -> int:
    """Return the number t of shares that are needed to open a sum.

    Malicious: at least ``floor(2n/3) + 1``, and large enough for ``2t > n + c``, so that two survivor
    sets cannot both have t - c honest signers. Semi-honest: ``floor(n/2) + 1``, and more than c.

    >>> [threshold(n, default_colluders(n)) for n in (3, 4, 6, 10, 20, 100)]
    [3, 3, 5, 7, 14, 67]
    """
    if trust == "semi_honest":
        return max(sites // 2 + 1, colluders + 1)
    return max(2 * sites // 3 + 1, (sites + colluders) // 2 + 1)


def honest_sites(survivors: int, colluders: int) -> int:
    """Return ``max(1, s - c)``: the least number of honest sites in any sum that can be opened.

    A sum opens by t shares, of which at least t - c >= 1 are honest sites'; each of these gives its shares
    only for a survivor set of at least s sites, whose receipts it has verified, and a malicious server gets t
    shares for one set only (``2t > n + c``). So s terms are in the sum, and all but c of them are honest.

    Args:
        survivors: s, the size of the smallest survivor set, see ``minimum_survivors``.
        colluders: c.
    """
    return max(1, survivors - colluders)


def minimum_survivors(params: Params) -> int:
    """Return the size of the smallest survivor set for which shares are revealed."""
    return smallest_set(params.threshold, params.colluders, params.min_sites)


def smallest_set(threshold: int, colluders: int, min_sites: int) -> int:
    """Return ``minimum_survivors`` for values that are not part of parameters yet."""
    return max(threshold, min_sites, MIN_SURVIVORS, colluders + 2)


@dataclass(frozen=True)
class SiteRules:
    """One site's own rules.

    Attributes:
        minimum_cohort: the smallest roster and survivor set that it takes part in.
        colluders: the least number of colluding sites that parameters must assume.
        trust: the trust models that it accepts; ``semi_honest`` must be allowed explicitly.
        weights: the weight rules that it accepts.
        any_static_cohort: whether the static group may be opened for other cohorts, which discloses
            the exact difference between two cohorts (research only).
        pins: peer -> SHA-256 of the public keys (DER, SubjectPublicKeyInfo) that it accepts for it.
            A peer without an entry is identified by its certificate alone, unless ``pinned_only``.
        pinned_only: refuse peers that have no pin.
    """

    minimum_cohort: int = MIN_SURVIVORS
    colluders: int = 1
    trust: frozenset[Trust] = frozenset({"malicious"})
    weights: frozenset[str] = frozenset({"exact", "power_of_two", "uniform"})
    any_static_cohort: bool = False
    pins: Mapping[str, frozenset[bytes]] = field(default_factory=dict)
    pinned_only: bool = False


@dataclass(frozen=True)
class Expected:
    """The parameters that a site derives from its own copy of the job, for a roster of the proposed size.

    None of them comes from the server, so a server can neither lower nor raise them. Of ``Params`` the
    server chooses only roster, epoch and ``static_open``, and each of these has rules of its own.

    Attributes:
        name: the site's own name.
        job: the job's id, as the engine gives it to this site.
        lineage: the first job of the chain that this site's job resumes; the job itself if it resumes none.
        sites: the job's silos; a roster is a subset of them.
        colluders: silos that the job assumes to collude, in a roster of that size.
        trust: the trust model of the server that the job assumes.
        threshold: the threshold that colluders and trust require in a roster of that size.
        min_sites: the smallest survivor set of the job in a roster of that size.
        weights: the job's weight rule.
        config_sha256: SHA-256 of the job configuration that this site runs.
        version: of the package that this site runs.
        slots: of an epoch of the job; None if the caller cannot plan the job's sums.
        schemas: of the job's sums; None as for ``slots``. Each is compared again when a term is masked.
    """

    name: str
    job: str
    lineage: str
    sites: frozenset[str]
    colluders: int
    trust: Trust
    threshold: int
    min_sites: int
    weights: str
    config_sha256: bytes
    version: str
    slots: int | None = None
    schemas: Mapping[str, tuple[FieldSpec, ...]] | None = None


def check(params: Params, rules: SiteRules, expected: Expected) -> None:
    """Refuse parameters that are not this job's or below this site's rules.

    Raises:
        ParametersError: TF-601, naming the first rule that is violated, with both values.
    """
    sites, roster = len(params.roster), set(params.roster)
    colluders = max(1, rules.colluders)
    needed = threshold(sites, params.colluders, params.trust)
    demands: tuple[tuple[bool, str, str, str], ...] = (
        (params.job == expected.job, "the job id", repr(expected.job), repr(params.job)),
        (params.lineage == expected.lineage, "the lineage", repr(expected.lineage), repr(params.lineage)),
        (
            params.config_sha256 == expected.config_sha256,
            "the SHA-256 of the job's configuration",
            expected.config_sha256.hex(),
            params.config_sha256.hex(),
        ),
        (params.version == expected.version, "the package version", expected.version, params.version),
        (params.weights == expected.weights, "the weight rule", expected.weights, params.weights),
        (
            params.weights in rules.weights,
            "the weight rule",
            f"one of {sorted(rules.weights)} (this site's policy)",
            params.weights,
        ),
        (
            list(params.roster) == sorted(roster),
            "the roster",
            "sorted, each site once",
            str(list(params.roster)),
        ),
        (
            roster <= expected.sites,
            "the roster",
            f"silos of the job {sorted(expected.sites)}",
            str(sorted(roster)),
        ),
        (expected.name in roster, "the roster", f"with this site, {expected.name}", str(sorted(roster))),
        (
            MIN_SITES <= sites <= MAX_SITES,
            "the number of sites",
            f"from {MIN_SITES} to {MAX_SITES}",
            str(sites),
        ),
        (
            sites >= rules.minimum_cohort,
            "the number of sites",
            f"at least {rules.minimum_cohort} (this site's policy: minimum_cohort)",
            str(sites),
        ),
        (
            params.trust in rules.trust,
            "the trust model of the server",
            f"one of {sorted(rules.trust)} (this site's policy)",
            params.trust,
        ),
        (
            params.colluders >= colluders,
            "the number of assumed colluders",
            f"at least {colluders} (this site's policy: colluders)",
            str(params.colluders),
        ),
        (
            needed <= params.threshold <= sites,
            "the threshold",
            f"from {needed} to {sites}",
            str(params.threshold),
        ),
        (
            params.colluders + 2 <= sites,
            "the number of assumed colluders",
            f"at most {sites - 2}",
            str(params.colluders),
        ),
        (
            params.min_sites >= rules.minimum_cohort,
            "the smallest survivor set",
            f"at least {rules.minimum_cohort} (this site's policy: minimum_cohort)",
            str(params.min_sites),
        ),
        (1 <= params.slots <= MAX_SLOTS, "the number of slots", f"from 1 to {MAX_SLOTS}", str(params.slots)),
        (
            params.trust == expected.trust,
            "the trust model of the server",
            f"{expected.trust} (the job's)",
            params.trust,
        ),
        (
            params.colluders == expected.colluders,
            "the number of assumed colluders",
            f"{expected.colluders} (the job's)",
            str(params.colluders),
        ),
        (
            params.threshold == expected.threshold,
            "the threshold",
            f"{expected.threshold} (the job's)",
            str(params.threshold),
        ),
        (
            params.min_sites == expected.min_sites,
            "the smallest survivor set",
            f"{expected.min_sites} (the job's)",
            str(params.min_sites),
        ),
        (
            expected.slots in (None, params.slots),
            "the number of slots",
            f"{expected.slots} (the job's)",
            str(params.slots),
        ),
    )
    for holds, rule, required, proposed in demands:
        if not holds:
            raise ParametersError(rule, expected=required, found=proposed)
    if expected.schemas is not None and params.schemas != expected.schemas:
        names = {*params.schemas, *expected.schemas}
        differing = sorted(name for name in names if params.schemas.get(name) != expected.schemas.get(name))
        raise ParametersError(
            "the schemas", expected="those of the job's sums", found=f"a difference in {differing}"
        )
