"""The rule on exact sums of products of features, by each site's own policy (``records_per_feature``).

It is checked on declared numbers before anything runs, and again on opened ones before each such term is made
(``learning.products`` says why, and what is counted). All of it is public, so that a refusal tells nothing.
"""

from __future__ import annotations

import math

from tightframe.config.policy import Policy
from tightframe.config.profiles import PROFILES
from tightframe.config.refusals import BelowPolicyError, Refusal
from tightframe.learning.products import COUNTED, Products, Sizes
from tightframe.phases import Schema, ServerState
from tightframe.results.words import plural
from tightframe.rounds.setup import JobSetup

RULE, CODE = "records_per_feature", "TF-625"


def planned(setup: JobSetup) -> Products | None:
    """Return the widest sum of products that a job plans; None if it plans none."""
    return max(
        (
            found
            for exchange in setup.plan
            for phase in exchange.phases
            if (found := products_in(setup, phase.schema)) is not None
        ),
        key=lambda item: item.width,
        default=None,
    )


def products_in(setup: JobSetup, schema: Schema) -> Products | None:
    """Return what the rule is on in a sum; None if it has no products without noise."""
    width = max((item.products for item in schema.fields), default=0)
    values = math.prod(setup.setting.input_shape)
    return Products(width, setup.setting.num_classes, values) if width else None


def check_job(policy: Policy, setup: JobSetup) -> None:
    """Refuse a job of which no number of records could meet the rule.

    Raises:
        BelowPolicyError: TF-625.
    """
    if not policy.records_per_feature or (found := planned(setup)) is None:
        return
    if setup.job.weights == "uniform":
        _refuse(
            policy,
            f"products of {found.width} features with uniform weights",
            "weights exact or power_of_two, or privacy",
            "uniform weights tell nobody how many records stand behind the sum",
        )
    by_class = any(
        item.products and item.per_class
        for exchange in setup.plan
        for phase in exchange.phases
        for item in phase.schema.fields
    )
    if by_class:
        _refuse(
            policy,
            f"products of {found.width} features by class",
            "method_options.covariance shared",
            "a rare class has fewer records than features, and these are computed from its sum",
        )


def check_declared(policy: Policy, setup: JobSetup, sizes: Sizes) -> None:
    """Refuse a job whose silos declare too few records, before anything runs.

    Raises:
        BelowPolicyError: TF-625.
    """
    if policy.records_per_feature and (found := planned(setup)) is not None:
        _check(policy, found, sizes.sure(), "declared")


def check_sum(policy: Policy, setup: JobSetup, schema: Schema, state: ServerState, sizes: Sizes) -> None:
    """Refuse a sum over too few records, before its term is made.

    Args:
        state: behind the verified totals so far, with the opened numbers of records.

    Raises:
        BelowPolicyError: TF-625.
    """
    if not policy.records_per_feature or (found := products_in(setup, schema)) is None:
        return
    counted = float(state.extra[COUNTED].sum()) if COUNTED in state.extra else 0.0
    _check(policy, found, sizes.sure(counted), "counted")


def warned(found: Products, records: float | None) -> list[str]:
    """Say what a reader of a sum can do that a ``standard`` policy would refuse; empty if it would not.

    Args:
        records: surely in it; None where weights tell no number.
    """
    if records is not None and found.allowed(records, PROFILES["standard"][RULE]):
        return []
    many = "UNTOLD NUMBERS OF" if records is None else f"{records:.0f} SURE"
    return [
        f"PRODUCTS OF {found.width} FEATURES OVER {many} RECORDS: whoever reads their total, as all silos, "
        "can compute single records from it if they are few; `standard` policies refuse it "
        f"({RULE}, {CODE})"
    ]


def _check(policy: Policy, found: Products, records: float, how: str) -> None:
    least = policy.records_per_feature
    if found.allowed(records, least):
        return
    widest = found.widest(records, least)
    _refuse(
        policy,
        f"{found.numbers} sums of products of {found.width} features over {records:.0f} {how} records",
        f"at most {plural(widest, 'feature')}, or privacy" if widest else "privacy",
        f"records are computed from the sums if fewer than {least} records a feature surely stand behind "
        f"them, whichever silos lie, or fewer values ({found.values} a record) than sums: make "
        "the features fewer (model_options.width of random_features, scattering), or give the job `privacy`",
    )


def _refuse(policy: Policy, asked: str, required: str, why: str) -> None:
    raise BelowPolicyError(
        [Refusal(RULE, asked, required, why)], shown_to_lead=policy.tell_refusals, code=CODE
    )
