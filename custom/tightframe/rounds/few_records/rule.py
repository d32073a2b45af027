"""The rule on exact sums of features, products and dense layers (``records_per_feature`` of a site's policy).

It is checked on declared numbers of records before anything runs, and on opened numbers before each term is
made (``learning.few_records.products`` has the reasons and the counts). Both are public, so that a refusal
tells nothing. Whether its own records have enough values a silo checks while it makes the term: if not, it
fails like any silo that cannot contribute, so that the sum opens nothing but the number of failed silos.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tightframe.config.policy import Policy
from tightframe.config.profiles import PROFILES
from tightframe.config.refusals import BelowPolicyError, Refusal
from tightframe.errors import RunError
from tightframe.learning.few_records.products import (
    ALONE,
    COUNTED,
    ENOUGH,
    LEAVING,
    LOSING,
    ROWS,
    ClassSums,
    Products,
    Sizes,
    Units,
)
from tightframe.learning.model_update import shared_template
from tightframe.models.frozen import is_frozen
from tightframe.phases import OwnRows, Schema, ServerState
from tightframe.results.words import plural
from tightframe.rounds.few_records.layers import NARROW, behind, behind_few, units_planned
from tightframe.rounds.few_records.planned import (
    class_numbers,
    class_sums_in,
    class_sums_planned,
    means_of_columns,
    products_in,
    products_planned,
)
from tightframe.rounds.riders.class_rules import MIN_HOLDERS, holders_in, offered
from tightframe.rounds.setup import JobSetup

RULE, CODE = "records_per_feature", "TF-625"


def least_class_values(policy: Policy, setup: JobSetup) -> int:
    """Return how many values a silo's own records of a class need for a job's class sums in training.

    That is half of ``records_per_feature`` for each number, as two of a class's three holders are honest. If
    a liar's flags leave one honest holder, its records have at least as many values as numbers are opened. 0
    if the job has no such sums, or the policy no rule.
    """
    return math.ceil(policy.records_per_feature * class_numbers(setup) / 2)


def check_job(policy: Policy, setup: JobSetup) -> None:
    """Refuse a job that could not meet the rule with any number of records.

    Raises:
        BelowPolicyError: TF-625.
    """
    if not policy.records_per_feature:
        return
    if setup.job.class_rules == "off" and least_class_values(policy, setup):
        refuse(
            policy,
            "class sums in training without class rules",
            "class_rules on, or privacy",
            "no silo could leave out a class of which it has so few records that these are computed",
        )
    if means_of_columns(setup):
        refuse(
            policy,
            "class means of each silo's own columns",
            "weighting records (fedproto), mu_divisor count_weighted (fedavg_etf), or a hidden layer",
            "of a column of yes and no a silo's mean is a fraction k/n, and a sum of fractions discloses "
            "each of them: sum records in place of means, or give mlp model_options.widths",
        )
    products = products_planned(setup)
    if (numbers := behind_few(setup)) and (products or class_sums_planned(setup) or _on_features(setup)):
        refuse(
            policy,
            f"sums of features that units make of {plural(numbers, 'number')}",
            f"at least {NARROW} before each ReLU, or privacy",
            "of units on two or three numbers a combination is zero for all records but one between two "
            "borders, so that a sum discloses it, with its class: make hidden layers before the last wider "
            "(model_options.widths of mlp, hidden of vgg11), take random_features, or give the job `privacy`",
        )
    if products is None:
        return
    if setup.job.weights == "uniform":
        refuse(
            policy,
            f"products of {products.width} features with uniform weights",
            "weights exact or power_of_two, or privacy",
            "uniform weights disclose to nobody how many records stand behind the sum",
        )
    by_class = any(
        item.products and item.per_class
        for exchange in setup.plan
        for phase in exchange.phases
        for item in phase.schema.fields
    )
    if by_class:
        refuse(
            policy,
            f"products of {products.width} features by class",
            "method_options.covariance shared",
            "a rare class has fewer records than features, and these are computed from its sum",
        )


def _on_features(setup: JobSetup) -> bool:
    """Check whether a job opens exact sums of features of a model known to all, or sums by class."""
    frozen = setup.trains and setup.privacy is None and is_frozen(shared_template(setup.setting))
    return frozen or class_numbers(setup) > 0


def check_declared(policy: Policy, setup: JobSetup, sizes: Sizes) -> None:
    """Refuse a job whose silos declare too few records, before anything runs.

    Raises:
        BelowPolicyError: TF-625.
    """
    if (products := products_planned(setup)) is not None:
        records = sizes.sure()
        _check(policy, products, records, records * products.values, "declared")
    if setup.job.weights != "uniform" and (layers := units_planned(setup)) is not None:
        check_units(policy, layers, sizes.behind(behind(setup)), "declared records")
    if setup.job.weights != "uniform" and (sums := class_sums_planned(setup)) is not None:
        _check_class(policy, sums, sizes.declared * sums.values, "all declared records")
    if setup.job.weights != "uniform" and (least := least_class_values(policy, setup)):
        held = sizes.declared * setup.most_values
        if MIN_HOLDERS * least > held:
            refuse(
                policy,
                f"{class_numbers(setup)} numbers of each class from sums in training",
                f"at most {int(class_numbers(setup) * held / (MIN_HOLDERS * least))}, or privacy",
                f"a class's records are computed from more numbers than they have values, and all "
                f"{sizes.declared:.0f} declared records have no more than {held:.0f}: make rounds or "
                "features (model_options.widths) fewer, or give the job `privacy`",
            )


def check_units(policy: Policy, layers: Units, records: float, of: str) -> None:
    """Refuse to train dense layers on too few records.

    Raises:
        BelowPolicyError: TF-625.
    """
    factor = policy.records_per_feature
    if layers.allowed(records, factor):
        return
    most, asked = int(records // factor), list[str]()
    if layers.most > most:
        asked.append(f"{plural(most, 'unit')} a layer")
    units = min(layers.first, most)
    if units and layers.inputs > most and layers.times * units > most:
        asked.append(
            f"{plural(most // units, 'round')} of {plural(units, 'unit')}, or {plural(most, 'input')}"
        )
    elif layers.numbers > most and layers.times > most:
        asked.append(plural(most, "round"))
    refuse(
        policy,
        f"layers of up to {layers.most} units, {layers.where} in {layers.times} sums, trained on "
        f"{records:.0f} {of}",
        f"at most {', and '.join(asked)}; or privacy" if most else "privacy",
        "records are computed from totals of layers with more units, or both more inputs and more units by "
        f"rounds, or more rounds, than 1/{factor} of the records, those of the largest silos not counted, as "
        "these may lie: set model_options.widths of mlp, width of random_features, or rounds, have smaller "
        "patches or larger pictures, or give the job `privacy`",
    )


def check_behind(policy: Policy, setup: JobSetup, records: float) -> None:
    """Refuse a job if hardly any of this silo's records would be behind a sum in training.

    Args:
        records: number of this silo's records; below ``min_class_count`` all of them must be behind it.

    Raises:
        BelowPolicyError: TF-625.
    """
    records_behind, least = behind(setup).of(records), policy.class_count(synthetic=False)
    trains = setup.trains and setup.method.one_sum is None
    if not policy.records_per_feature or not trains or records_behind >= min(least, records):
        return
    refuse(
        policy,
        f"updates of {records_behind:.1f} records of a silo",
        f"at least {least} (min_class_count), or privacy",
        "few records are read from their update. So few are drawn (sampling_rate), not dropped out "
        "(model_options.dropout), or in the last steps that a strong term or weight decay does not undo",
    )


def part_behind(policy: Policy, setup: JobSetup, sizes: Sizes) -> tuple[float, float]:
    """Return the fractions of a silo's records that must be behind a trained layer, and an input of a head.

    If each honest silo has so many, then all together have as many as the widest layer has units, or inputs
    that training does not change, or as there are rounds; and behind a class's row as many as it has inputs.
    Only the silo sees which of its records have a loss. Zeros without a rule.
    """
    factor, layers = policy.records_per_feature, units_planned(setup)
    if not factor or layers is None:
        return 0.0, 0.0
    width = max(layers.most, layers.inputs, min(layers.numbers, layers.times))
    records = max(1.0, sizes.behind(behind(setup)))
    return min(1 / factor, width / records), 1 / records


def check_sum(policy: Policy, setup: JobSetup, schema: Schema, state: ServerState, sizes: Sizes) -> None:
    """Refuse a sum over too few records, whatever their values, before its term is made.

    Args:
        state: of the run, after all verified totals so far, with the opened numbers of records.

    Raises:
        BelowPolicyError: TF-625.
        RunError: TF-523 if too few records stay in a withdrawal.
    """
    products, sums = products_in(setup, schema), class_sums_in(setup, schema)
    if products is None and sums is None:
        return
    least = _least_in_sum(state, setup.setting.num_classes)
    try:
        if products is not None:
            sure = sizes.sure(least.records)
            _check(policy, products, sure, sure * products.values, "counted")
        if sums is not None:
            for label, rows in least.by_class.items():
                _check_class(policy, sums, rows * sums.values, f"the counted records of class {label}")
    except BelowPolicyError as error:
        if LEAVING not in state.extra:
            raise
        raise RunError(
            "Expected enough records to stay in the total that sums of features do not disclose them "
            f"(`{RULE}` {policy.records_per_feature}), but too few would: {least.records:.0f} in all, "
            "whichever silos lie. Nothing is taken out: withdraw fewer, or start a new job with fewer "
            f"features, or with `privacy`. {error}",
            code="TF-523",
        ) from error


def check_own(
    policy: Policy,
    setup: JobSetup,
    schema: Schema,
    state: ServerState,
    sizes: Sizes,
    own: OwnRows,
    *,
    seen: bool,
) -> None:
    """Refuse a sum if this silo's records have fewer values, on average, than it needs of each record.

    Args:
        state: see ``check_sum``, which must have passed.
        own: rows of the classes that this silo takes part in; in a withdrawal, those that stay.
        seen: whether the server sees this silo's term alone, so that its records alone must be enough.

    Raises:
        BelowPolicyError: TF-625, which depends on this silo's records.
    """
    products, sums = products_in(setup, schema), class_sums_in(setup, schema)
    least = _least_in_sum(state, setup.setting.num_classes)
    classes = list(least.by_class)
    rows = float(own.counts[classes].sum())
    if products is not None and rows:
        sure = sizes.sure(min(least.records, rows) if seen else least.records)
        mean_values = float(own.counts[classes] @ own.values[classes]) / rows
        _check(policy, products, sure, sure * mean_values, "counted")
    if sums is None:
        return
    for label, counted in least.by_class.items():
        own_rows, values = float(own.by_class[label]), float(own.values[label])
        alone = label in least.alone and policy.records_per_feature <= ALONE and not seen
        if own_rows and not alone:
            held = (min(counted, own_rows) if seen else counted) * values
            _check_class(
                policy, sums, held, f"the counted records of class {label}, each worth one of this silo's"
            )


@dataclass(frozen=True)
class _LeastInSum:
    """Least numbers of distinct records in a sum.

    Attributes:
        records: in all.
        by_class: of each class that is in the sum.
        alone: classes of which one silo alone has enough values.
    """

    records: float
    by_class: dict[int, float]
    alone: frozenset[int]


def _least_in_sum(state: ServerState, classes: int) -> _LeastInSum:
    """Return the least numbers of distinct records in a sum.

    In a withdrawal these are the records that stay. How many leave is known for all classes together only, so
    that each class which loses records could lose that many. A class without enough holders leaves whole.
    """
    if not {COUNTED, ROWS, ENOUGH} <= state.extra.keys():
        return _LeastInSum(0.0, dict.fromkeys(range(classes), 0.0), frozenset())
    counts, rows, enough = (state.extra[name] for name in (COUNTED, ROWS, ENOUGH))
    kept, holders = rows > 0, holders_in(state)
    # By flags: a liar's negative number can make a class's count 0, and so can a withdrawal.
    summed = None if holders is None else offered(holders, classes).bool()
    leaving, loses = 0.0, torch.zeros_like(kept)
    if LEAVING in state.extra:
        leaving, loses = float(state.extra[LEAVING]), state.extra[LOSING].bool()
        kept = kept if summed is None else summed
    elif summed is not None:
        kept = kept | summed
    by_class = {
        label: max(0.0, float(rows[label]) - (leaving if loses[label] else 0.0))
        for label in torch.nonzero(kept).flatten().tolist()
    }
    alone = torch.nonzero((enough > 0.5) & ~loses).flatten().tolist()
    return _LeastInSum(max(0.0, float(counts[kept].sum()) - leaving), by_class, frozenset(alone))


def warned(sums: Products | ClassSums | Units, records: float | None, *, classes: int = 1) -> list[str]:
    """Describe what sums tell that a ``standard`` policy would refuse; empty if it would allow them.

    Args:
        records: number of records certainly in the sums; None where weights do not tell it.
        classes: C of sums by class: the smallest class has at most a C-th of the records.
    """
    by_class = isinstance(sums, ClassSums)
    if records is None and not isinstance(sums, Products):
        return []
    if records is not None:
        held = records / classes * (sums.values if isinstance(sums, ClassSums) else 1)
        if sums.allowed(held, PROFILES["standard"][RULE]):
            return []
    many = (
        "UNKNOWN NUMBERS OF" if records is None else f"{records:.0f}" if by_class else f"{records:.0f} SURE"
    )
    few = f"a small one of the {classes} classes has few" if by_class else "they are few"
    return [
        f"{sums.name.upper()} OVER {many} RECORDS: whoever reads their total, as all silos, can compute "
        f"single records from it if {few}; `standard` policies refuse it ({RULE}, {CODE})"
    ]


def _check(policy: Policy, products: Products, records: float, values: float, how: str) -> None:
    factor = policy.records_per_feature
    if products.allowed(records, factor, values):
        return
    _refuse_wide(
        policy,
        f"{products.numbers} sums of products of {products.width} features over {records:.0f} {how} records, "
        f"with {values:.0f} values",
        products.widest(records, factor, values),
        f"the sums if fewer than {factor} records a feature surely stand behind them, "
        "whichever silos lie, or fewer values than sums",
    )


def _check_class(policy: Policy, sums: ClassSums, values: float, of: str) -> None:
    factor = policy.records_per_feature
    if sums.allowed(values, factor):
        return
    _refuse_wide(
        policy,
        f"sums of {sums.width} features by class over {of}, with {values:.0f} values",
        sums.widest(values, factor),
        f"the sum of a class if it is more than 1/{factor} as many numbers as its records have values",
    )


def _refuse_wide(policy: Policy, asked: str, widest: int, case: str) -> None:
    """Refuse a sum over too few records; ``case`` says from what records are computed, and when."""
    refuse(
        policy,
        asked,
        f"at most {plural(widest, 'feature')}, or privacy" if widest else "privacy",
        f"records are computed from {case}: make the features fewer (model_options.width of "
        "random_features, scattering), or give the job `privacy`",
    )


def refuse(policy: Policy, asked: str, required: str, why: str) -> None:
    """Refuse a job by this rule.

    Raises:
        BelowPolicyError: TF-625.
    """
    raise BelowPolicyError(
        [Refusal(RULE, asked, required, why)], shown_to_lead=policy.tell_refusals, code=CODE
    )
