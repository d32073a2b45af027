"""Check before a run whether a site would refuse a job at enrolment, given its ledger.

It runs the code of the enrolment itself. The caller reads ledger and journal; nothing is written to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tightframe.config.refusals import BelowPolicyError, Refusal
from tightframe.data.table import TableOptions
from tightframe.errors import SecureSumError
from tightframe.learning.few_records.products import Parts, Sizes
from tightframe.rounds.context import SiloContext
from tightframe.rounds.declaration import public_weight
from tightframe.rounds.setup import JobSetup
from tightframe.rounds.silo.checks.summed_records import summed_sha256
from tightframe.rounds.sums.common import package_errors
from tightframe.rounds.sums.parameters import epoch_params
from tightframe.rounds.sums.secure_silo import SecureSite
from tightframe.securesum.site import journal

if TYPE_CHECKING:
    from tightframe.privacy.ledger.entries import Entry
    from tightframe.rounds.evaluation_bits import Evaluations
    from tightframe.rounds.few_records.across_jobs import Rounds
    from tightframe.rounds.silo.budget import Costs
    from tightframe.rounds.silo.view import LocalSilo

UNKNOWN = "not-submitted-yet"
"""Placeholder id of a job that no engine has received yet."""
REHEARSED = "in production a site with this policy refuses the job, even as its first: "
SHOWN = 12
"""Most columns that a refusal names, in the site's own log."""


def check_sums(context: SiloContext, setup: JobSetup, entries: Sequence[journal.Entry]) -> None:
    """Check the secure sums of a job's whole roster against this site's rules and journal.

    Args:
        context: of the silo, with ``UNKNOWN`` as the job's id.
        entries: of the site's journal.

    Raises:
        SecureSumError: TF-601 below the site's rules; TF-612 if counts were opened for another cohort;
            TF-617 if terms would be formed in another way.
    """
    params = epoch_params(
        setup,
        context.job_id,
        context.job.roster,
        epoch=0,
        # A resumed job is not refused because counts were opened for another cohort: they only stay closed.
        static_open=context.job.resume is None,
    )
    SecureSite(context, summed=partial(summed_sha256, context)).check_proposal(params, setup, entries)


def check_evaluations(
    context: SiloContext, setup: JobSetup, entries: Sequence[journal.Entry]
) -> tuple[journal.Evaluated, tuple[int, int, int], journal.Most] | None:
    """Check a job's exact evaluations against this site's remaining limits; its records are read.

    Returns:
        What the job discloses, what earlier jobs have disclosed, and the limits; None where nothing is
        limited.

    Raises:
        SecureSumError: TF-627, in a simulation too.
    """
    if (planned := evaluations_planned(context, setup, entries)) is None:
        return None
    dataset, history = context.site.records_id(context.job.dataset), journal.History(entries)
    with package_errors():
        planned.check(dataset, context.job_id, history)
    return planned.entry(dataset, context.job_id), history.evaluated(dataset), planned.most


def evaluations_planned(
    context: SiloContext, setup: JobSetup, entries: Sequence[journal.Entry]
) -> Evaluations | None:
    """Return a job's exact evaluations at this site, by its records; None if nothing is limited."""
    from tightframe.rounds.silo.checks import evaluations

    if not context.would_limit_evaluations:
        return None
    return evaluations.of_silo(context, setup, entries=entries)


def check_rounds(
    context: SiloContext, setup: JobSetup, entries: Sequence[journal.Entry], sizes: Sizes
) -> tuple[Rounds, Parts] | None:
    """Check a job's exact sums in training together with those of earlier jobs.

    Args:
        sizes: numbers of records that silos declare.

    Returns:
        The sums, and the shares of the records' limits that earlier jobs used; None if none are limited.

    Raises:
        BelowPolicyError: TF-625.
    """
    if (planned := rounds_planned(context, setup, entries, sizes)) is None:
        return None
    dataset, history = context.site.records_id(context.job.dataset), journal.History(entries)
    planned[0].check(context.policy, dataset, context.job_id, history)
    return planned


def rounds_planned(
    context: SiloContext, setup: JobSetup, entries: Sequence[journal.Entry], sizes: Sizes
) -> tuple[Rounds, Parts] | None:
    """Return the result of ``check_rounds``, without refusing anything."""
    from tightframe.rounds.few_records import across_jobs

    rounds = across_jobs.rounds_planned(setup, counted(context, sizes))
    if not context.limits_rounds or rounds is None:
        return None
    dataset, history = context.site.records_id(context.job.dataset), journal.History(entries)
    return rounds, rounds.before(dataset, context.job_id, history, context.policy.records_per_feature)


def classes_left_out(context: SiloContext, setup: JobSetup) -> tuple[list[str], int]:
    """Return the classes that this site leaves out of class sums in training, and the values one must have.

    Only classes of which it has enough records by ``min_class_count`` are named.
    """
    import torch

    from tightframe.rounds.few_records.rule import least_class_values
    from tightframe.rounds.silo.view import LocalSilo

    least = least_class_values(context.policy, setup)
    if not least or context.data.synthetic:
        return [], least
    silo = LocalSilo(context, setup, torch.device("cpu"), 0)
    own = silo.own_rows()
    too_few = (own.by_class * own.values < least) & (silo.held_counts() >= silo.min_class_count)
    return [setup.dataset.class_names[place] for place in too_few.nonzero().flatten().tolist()], least


def classes_too_small(context: SiloContext, setup: JobSetup) -> tuple[list[str], int]:
    """Return the classes of which this site has fewer patients than `min_class_count`, and that number.

    Classes without records are not named, nor any class where a job has no class sums or no class rules.
    """
    import torch

    from tightframe.rounds.riders.class_rules import sums_by_class
    from tightframe.rounds.silo.view import LocalSilo

    fields = (item for exchange in setup.plan for phase in exchange.phases for item in phase.schema.fields)
    if context.data.synthetic or setup.job.class_rules == "off" or not any(map(sums_by_class, fields)):
        return [], 0
    silo = LocalSilo(context, setup, torch.device("cpu"), 0)
    held, least = silo.held_counts(), silo.min_class_count
    too_few = ((held > 0) & (held < least)).nonzero().flatten().tolist()
    return [setup.dataset.class_names[place] for place in too_few], least


def sizes_alike(context: SiloContext) -> Sizes:
    """Return the declared numbers of records as if all silos had as many as this one."""
    own = public_weight(context.public_records, context.job.weights)
    declared = dict.fromkeys(context.job.roster, own)
    return Sizes.of(declared, context.job.assumed_colluders(len(declared)))


def refused_at_first(context: SiloContext, setup: JobSetup) -> str:
    """Return why a site refuses a job's evaluations even as its first job; empty if it does not."""
    try:
        check_evaluations(context, setup, ())
    except SecureSumError as error:
        return str(error)
    return ""


def check_budget(context: SiloContext, setup: JobSetup, entries: Sequence[Entry]) -> Costs | None:
    """Check the planned charges of a job with privacy against the budget left at this site.

    Args:
        context: of the silo; its records are opened, and the solved noise is stored in its folder.
        entries: of the site's ledger.

    Returns:
        What the job costs; None for a job that has charges already, which is checked at each charge.

    Raises:
        TightframeError: as ``PrivateSilo.check_budget_against``; TF-701 if it does not fit.
    """
    import torch

    from tightframe.rounds.silo.private_view import PrivateSilo
    from tightframe.rounds.silo.view import RequestedSum

    silo = PrivateSilo(context, setup, torch.device("cpu"), 0, RequestedSum((context.name,)))
    return silo.check_budget_against(entries)


def check_rows(context: SiloContext, setup: JobSetup) -> None:
    """Check that training records, and possible rows, are too many for exact totals to disclose records.

    Args:
        context: of the silo; its records are read, if they are a table.

    Raises:
        PolicyError: TF-628 for a job without privacy over fewer rows than the site's policy asks for; TF-625
            where weights give no number of records, for layers of more units than this silo's records allow.
    """
    import torch

    from tightframe.rounds.silo.view import LocalSilo

    if not setup.trains or context.job.privacy or context.data.synthetic:
        return
    if context.job.weights == "uniform":
        sizes = sizes_alike(context)
        honest = len(sizes.each) - sizes.colluders
        of = f"records, were {honest} silos as this one (uniform weights disclose no others' numbers)"
        check_layers(context, setup, sizes, of)
    check_possible_rows(LocalSilo(context, setup, torch.device("cpu"), 0))


def check_layers(context: SiloContext, setup: JobSetup, sizes: Sizes, of: str) -> None:
    """Check that layers have no more units than the silos' records allow.

    Args:
        of: name of the records in the refusal.

    Raises:
        PolicyError: TF-625.
    """
    from tightframe.rounds.few_records.layers import behind, units_planned
    from tightframe.rounds.few_records.rule import check_units

    if (layers := units_planned(setup)) is not None:
        check_units(context.policy, layers, counted(context, sizes).behind(behind(setup)), of)


def counted(context: SiloContext, sizes: Sizes) -> Sizes:
    """Return silos' numbers of training records; where weights give none, as if all were like this one.

    If all silos accept by their own numbers, the smallest one has accepted by the smallest number.
    """
    return sizes.times(own_records(context)) if context.job.weights == "uniform" else sizes


def own_records(context: SiloContext) -> float:
    """Return this silo's number of distinct training records, as exactly as its policy declares it.

    A job's layers choose the threshold at which it is refused, and the refusal may name it. Counted with
    repeats, it would disclose, before any sum, twice the larger class.
    """
    how = "exact" if "exact" in context.policy.weights else "power_of_two"
    return public_weight(context.public_records, how)


def check_possible_rows(silo: LocalSilo) -> None:
    """Check that a table has as many possible rows, as the model sees them, as the policy asks for.

    Args:
        silo: before the moments by which a model standardises are opened, or after: a colluding silo's false
            ones can make the model see only a few columns.

    Raises:
        PolicyError: TF-628.
    """
    context, policy, setup = silo.context, silo.context.policy, silo.setup
    least = policy.min_row_bits
    if not least or setup.privacy is not None or not context.has_rows or context.data.synthetic:
        return
    bits = silo.column_bits()
    if sum(bits) < least:
        refusal = Refusal(
            "min_row_bits",
            f"exact totals of a table of fewer than 2 to the {least} possible rows",
            "privacy",
            f"from few totals its records are found among these. {_row_bits(setup, bits)}. Columns that keep "
            "patients apart better, fewer units in the first layer, or `privacy`, are safe",
        )
        raise BelowPolicyError([refusal], shown_to_lead=policy.tell_refusals, code="TF-628")


def _row_bits(setup: JobSetup, bits: Sequence[float]) -> str:
    """Describe the number of possible rows, by column, for the site's own check and log only."""
    names = [str(place) for place in range(len(bits))]
    if isinstance(options := setup.dataset_options, TableOptions):
        names = [column.column for column in options.contract.columns]
    columns = sorted(zip(bits, names, strict=True), key=lambda item: -item[0])
    parts = [f"{name} {number:.1f}" for number, name in columns[:SHOWN] if number]
    more = sum(number for number, _ in columns[SHOWN:])
    rest = f", all others {more:.1f}" if more else ""
    return f"This table has 2 to the {sum(bits):.1f}, by column: {', '.join(parts) or 'none'}{rest}"
