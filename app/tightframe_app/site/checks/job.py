"""Prediction of a site's refusals of a job, by its policy and its records of earlier jobs.

It uses the code that decides at enrolment. Ledger and journal are only read.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tightframe.config import job_manifest
from tightframe.config.job import JobConfig
from tightframe.config.policy import Policy
from tightframe.config.refusals import BelowPolicyError
from tightframe.config.site import (
    ACCEPT_MODEL,
    SiteEntry,
    check_given_model,
    check_record_options,
    check_training_loop,
)
from tightframe.data.base import FOLDS, class_counts, own_labels
from tightframe.data.withdrawn import patients_of
from tightframe.errors import JobError, ManifestError, SecureSumError, SiteConfigError, TightframeError
from tightframe.files import quoted
from tightframe.flare.identity import site_identity
from tightframe.learning.few_records.products import Sizes
from tightframe.learning.one_sum.withdrawal import too_few
from tightframe.learning.own_loop import ENTRY_POINTS
from tightframe.privacy.ledger.entries import DatasetError, Entry, LedgerError, TamperError
from tightframe.privacy.ledger.store import read_secret
from tightframe.results.words import SUMS, described, plural
from tightframe.rounds import run_state
from tightframe.rounds.context import SiloContext
from tightframe.rounds.declaration import public_weight
from tightframe.rounds.few_records import rule
from tightframe.rounds.privacy_plan import HIDDEN, noise_of_scores
from tightframe.rounds.setup import JobSetup, prepare
from tightframe.rounds.silo.checks.enrolment import (
    REHEARSED,
    UNKNOWN,
    check_budget,
    check_evaluations,
    check_rounds,
    check_rows,
    check_sums,
    classes_left_out,
    classes_too_small,
    refused_at_first,
    sizes_alike,
)
from tightframe.rounds.site_ledger import LedgerPaths, journal_folder
from tightframe.rounds.site_ledger.known_records import check_records
from tightframe.rounds.state_files import STATE
from tightframe.rounds.sums.common import package_errors
from tightframe.rounds.sums.release import COLUMNS, SUMMED
from tightframe.rounds.sums.vault import read_journal
from tightframe.securesum.site.journal import CohortAccepted, StaticMasked, StaticOpened, opened
from tightframe.securesum.site.journal import Entry as JournalEntry
from tightframe_app.site.checks.findings import Finding, Scope, State, area_of

ACCEPT = {
    "TF-612": (
        " This site decides whether the new cohort's counts may be opened as well: `tightframe site cohort "
        "accept` shows what that reveals."
    ),
}
NEWCOMER = (
    "{job}: this is the first job in which counts of {dataset} are opened at this site. If the others "
    "({others}) have run jobs without this site before, totals without it exist: whoever has both can "
    "subtract them from this job's and obtain exactly this site's own values (records of each class, class "
    "sums, test results). The others are asked for their consent to the larger cohort (`tightframe site "
    "cohort accept`); this site is not, so ask them before you take part. Only noise (differential privacy) "
    "prevents it"
)
"""Note for a site before its first job, the counterpart of what earlier sites are shown."""


def check_policy(
    job: JobConfig, name: str | None, entry: SiteEntry, policy: Policy, scope: Scope
) -> Iterator[Finding]:
    """Check a job against the site's policy; yield the refusals that the lead would get."""
    area = area_of("job", name or "")
    refused = False
    if name is not None and name not in job.sites:
        text = f"the job is for {', '.join(job.roster)}, not for {name}: ask the lead"
        yield Finding(area, "problem", text, of_job=True)
    if policy.allowed_submitters is not None and scope.submitter is None:
        yield Finding(area, "note", "allowed_submitters: name the job's submitter with --submitter")
    submitter = scope.submitter or next(iter(policy.allowed_submitters or ()), None)

    def check_built() -> None:
        with policy.refuse_oversized():
            setup = prepare(job, policy.ceilings)
        policy.check_method(setup.setting.config, job)
        rule.check_job(policy, setup)

    checks: tuple[Callable[[], None], ...] = (
        lambda: policy.check(job, submitter=submitter),
        lambda: check_record_options(job, entry, policy),
        lambda: check_training_loop(job, entry, policy),
        lambda: check_given_model(job, entry, policy),
        check_built,
    )
    for check in checks:
        try:
            check()
        except BelowPolicyError as error:
            refused = True
            for refusal in error.refusals:
                text = str(refusal)
                if text.endswith(ACCEPT_MODEL):  # only the model's maker is missing
                    where = f"-c {quoted(scope.config)}" + (
                        f" --site {name}" if name and not scope.real else ""
                    )
                    text += f" {where} --source WHO-MADE-IT --sha256 {job.initial_model_sha256}"
                yield Finding(area, "problem", f"{error.code}: {text}", of_job=True)
        except JobError as error:
            refused = True
            for problem in error.problems:
                yield Finding(area, "problem", f"TF-101: {problem}", of_job=True)
    if not refused:
        yield Finding(area, "ok", f"{job.job_name}: the policy accepts it")
    yield from _unpinned(job, name, policy, area, scope)
    if not refused and job.training.loop is not None:
        text = f"training.loop {job.training.loop}: here that is {_where(job.training.loop)}"
        yield Finding(area, "note", text, of_job=True)


def _unpinned(job: JobConfig, name: str | None, policy: Policy, area: str, scope: Scope) -> Iterator[Finding]:
    """Check that a policy with ``pinned_only`` has a pin of each other silo."""
    if not policy.pinned_only or job.summation != "secure":
        return
    without = [site for site in job.roster if site != name and site not in policy.pins]
    if len(without) > (name is None):  # one of them may be this site
        how = "" if scope.real else "; a simulation makes new keys each time: try it with `pinned_only` false"
        text = f"TF-602: pinned_only: no pin for {', '.join(without)}, whose keys this site refuses"
        yield Finding(area, "problem", f"{text}: ask for it, and write it into `pins`{how}")


def check_roster(job: JobConfig, entries: Mapping[str, SiteEntry]) -> Iterator[Finding]:
    """Check that a simulation's file has an entry for each site of the job, or none at all."""
    if entries and (missing := [site for site in job.roster if site not in entries]):
        text = f"TF-201: the file has no entry for {', '.join(missing)}: add it, or export the job for others"
        yield Finding("job", "problem", f"{text} (--sites)")


def check_start(job: JobConfig, path: str | None) -> Iterator[Finding]:
    """Check that a simulation's server has the model that the job starts from or evaluates.

    Args:
        path: of the file that the configuration names for the server.
    """
    try:
        run_state.check_start(prepare(job), path)
    except JobError as error:
        yield from (Finding("job", "problem", f"TF-101: {problem}") for problem in error.problems)
    except TightframeError as error:
        yield Finding("job", "problem", str(error))


def _where(loop: str) -> str:
    """Return module, package and version of an installed training loop."""
    from importlib.metadata import entry_points

    (entry,) = {item.value: item for item in entry_points(group=ENTRY_POINTS, name=loop)}.values()
    return f"{entry.value}" + (f" of {entry.dist.name} {entry.dist.version}" if entry.dist else "")


def signature(job: JobConfig, name: str, policy: Policy, scope: Scope) -> Iterator[Finding]:
    """Check that the job's folder is signed as this site requires, and report the validity."""
    area = area_of("job", name)
    if scope.folder is None or scope.startup is None:
        return
    app, central = scope.folder / "app", policy.central_provisioning
    try:
        _, anchor = site_identity(scope.startup, name, production=scope.production, missing_role=central)
        manifest = job_manifest.verify(app, job, name, anchor, now=datetime.now(UTC))
    except SiteConfigError:
        return  # reported with the identity
    except ManifestError as error:
        if error.code != "TF-633":
            yield Finding(area, "problem", str(error), of_job=True)
        elif policy.signed_jobs:
            text = "not signed yet, and this site accepts signed jobs only: the lead must sign it at the end"
            yield Finding(area, "note", text)
        return
    state: State = "ok" if datetime.now(UTC) < manifest.until else "problem"
    text = f"signed by {manifest.signer}, valid from {manifest.created} until {manifest.expires}"
    yield Finding(area, state, text, of_job=True)


def check_history(
    job: JobConfig, name: str, entry: SiteEntry, entries: Sequence[Entry] | None, scope: Scope
) -> Iterator[Finding]:
    """Check a job against the cohorts and the privacy budget that earlier jobs leave.

    Args:
        job: to check; no findings if it is not for this site.
        entry: the site's only configuration.
        entries: of its ledger; None if unknown.
    """
    if name not in job.sites:
        return
    try:
        setup = prepare(job, entry.policy.resolve(production=scope.real).ceilings)
    except JobError:
        return  # reported by ``check_policy``
    area = area_of("job", name)
    with tempfile.TemporaryDirectory() as folder:
        context = SiloContext(name, job, entry, Path(folder), job_id=UNKNOWN, production=scope.real)
        if job.summation == "secure":
            yield from _cohort(context, setup, area, scope)
            yield from _evaluations(context, setup, area, scope)
            yield from _rounds(context, setup, area, scope)
        if job.privacy is not None:
            yield _budget(context, setup, entries, area)
        if context.production and entry.data and entry.state_dir is not None:
            yield from _check_names(context, entries or (), area, scope)
        yield from _records(context, setup, area, several=False)


def check_own_records(job: JobConfig, name: str, entry: SiteEntry, scope: Scope) -> Iterator[Finding]:
    """Check a job against a simulated site's records; such a site remembers no other jobs."""
    try:
        setup = prepare(job, entry.policy.resolve(production=scope.real).ceilings)
    except JobError:
        return  # reported by ``check_policy``
    with tempfile.TemporaryDirectory() as folder:
        context, area = SiloContext(name, job, entry, Path(folder), job_id=UNKNOWN), area_of("job", name)
        yield from _records(context, setup, area, several=True)
        if entry.data and job.summation == "secure":
            yield from _rehearsed(context, setup, area)


def check_sizes(job: JobConfig, entries: Mapping[str, SiteEntry], scope: Scope) -> Iterator[Finding]:
    """Check that a simulation's sites together have enough records for the job's sums (TF-625)."""
    if not all(site in entries and entries[site].data for site in job.roster):
        return
    refusals: dict[str, list[str]] = {}
    try:
        setup = prepare(job)
        with tempfile.TemporaryDirectory() as folder:
            contexts = [
                SiloContext(site, job, entries[site], Path(folder), job_id=UNKNOWN) for site in job.roster
            ]
            weights = {item.name: public_weight(item.public_records, job.weights) for item in contexts}
            sizes = Sizes.of(weights, job.assumed_colluders(len(weights)))
            for context in contexts:
                for text in _too_few(context, setup, sizes):
                    refusals.setdefault(text, []).append(context.name)
            hidden = _hidden_scores(
                setup, np.sum([_tested(context, setup) for context in contexts], axis=0), ""
            )
    except (JobError, TightframeError):
        return  # reported for each site
    if hidden:
        yield Finding("job", "note", hidden)
    for text, sites in refusals.items():
        yield Finding("job", "problem", f"{', '.join(sites)}: {text}", of_job=True)


def _tested(context: SiloContext, setup: JobSetup) -> NDArray[np.int64]:
    """Return a site's number of test records by class."""
    return class_counts(context.data.labels("test"), setup.dataset.num_classes)


def _hidden_scores(setup: JobSetup, tested: NDArray[np.int64], guessed: str) -> str:
    """Say that noise hides all scores of these numbers of test records by class; empty if it does not."""
    plan = setup.privacy
    if plan is None or plan.evaluation is None:
        return ""
    cell, floor = noise_of_scores(setup.job, plan)
    fold = f"of a test fold of {int(tested.sum())} records{guessed}"
    return "" if tested.max(initial=0) >= floor else HIDDEN.format(cell=cell, of=fold, floor=floor)


def _too_few(context: SiloContext, setup: JobSetup, sizes: Sizes) -> list[str]:
    """Return this site's refusals of a job for too few declared records; none if the rule does not apply."""
    job = context.job
    if job.privacy is not None or job.withdraw is not None or not context.policy.records_per_feature:
        return []
    try:
        if job.weights != "uniform":
            rule.check_declared(context.policy, setup, sizes)
        if not context.data.synthetic:
            rule.check_behind(context.policy, setup, len(own_labels(context.data)))
    except BelowPolicyError as error:
        return [f"{error.code}: {refusal}" for refusal in error.refusals]
    return []


def _records(context: SiloContext, setup: JobSetup, area: str, *, several: bool) -> Iterator[Finding]:
    """Check what depends on this site's records: possible rows, withdrawn records, small sums."""
    if not context.site.data:
        return
    if context.job.privacy is None:
        yield from _rows(context, setup, area)
    if context.job.withdraw is not None:
        yield _withdrawal(context, setup, area, several=several)
    if not several:
        yield from _alone(context, setup, area)


def _alone(context: SiloContext, setup: JobSetup, area: str) -> Iterator[Finding]:
    """Note what this site would refuse if the others had as many records."""
    try:
        sizes = sizes_alike(context)
        alike = len(context.job.sites) * _tested(context, setup)
    except TightframeError:
        return  # of the records, which have findings of their own
    if hidden := _hidden_scores(setup, alike, " (were all sites as this one)"):
        yield Finding(area, "note", f"{context.job.job_name}: {hidden}")
    for text in _too_few(context, setup, sizes):
        yield Finding(area, "note", f"refused unless other sites have more records than this one: {text}")


def _rehearsed(context: SiloContext, setup: JobSetup, area: str) -> Iterator[Finding]:
    """Note exact evaluations that a site in production refuses and a simulation only warns of."""
    try:
        why = refused_at_first(context, setup)
    except TightframeError:
        return  # of the records, which have findings of their own
    if why:
        yield Finding(area, "note", f"{REHEARSED}{why}", of_job=True)


def _withdrawal(context: SiloContext, setup: JobSetup, area: str, *, several: bool) -> Finding:
    """Check that this site can name the records that it withdraws, and has withdrawn no others.

    Args:
        several: for a simulation's file, whose sites' states are where it ran.
    """
    job, outliving = context.job, context.site.state_dir
    assert job.withdraw is not None  # noqa: S101  (the caller has checked)
    if outliving is not None:
        context.previous_state = Path(outliving) / job.withdraw.previous / context.name / STATE
        context.journal_dir = journal_folder(Path(outliving), context.name)
    try:
        stays, before = context.withdrawn.remaining, context.withdrawn.before
    except TightframeError as error:
        return Finding(area, "problem", str(error))
    train, validation, test = (len(before.labels(fold)) - len(stays.labels(fold)) for fold in FOLDS)
    text = (
        f"{job.job_name}: withdraws {train} training, {validation} validation and {test} test records from "
        f"job {job.withdraw.previous}"
    )
    if not several and (context.previous_state is None or not context.previous_state.is_dir()):
        return Finding(area, "problem", f"{text}, of which this site has no state here (TF-522)")
    least, classes = context.policy.class_count(synthetic=context.data.synthetic), setup.dataset.num_classes
    patients, every, others = patients_of(before, "train", context.withdrawn.names, classes)
    if setup.job.class_rules == "off":
        small = "in all" if 0 < patients.sum() < least else ""
    else:
        places = too_few(patients, every, np.where(patients > 0, others, np.inf), least)
        names = ", ".join(setup.dataset.class_names[place] for place in places)
        small = f"of class {names}" if names else ""
    if small:
        return Finding(
            area,
            "problem",
            f"{text}, but fewer than {least} ({small}), or of fewer patients, that would leave "
            "the total (`min_class_count`): if the run summed these, this site cannot take part (TF-523). "
            "Wait until there are more.",
        )
    return Finding(area, "ok", text)


def _cohort(context: SiloContext, setup: JobSetup, area: str, scope: Scope) -> Iterator[Finding]:
    """Check that this site takes part in this job's sums with its silos."""
    state_dir, job = context.site.state_dir, context.job
    try:
        journal = _journal(context, scope)
        check_sums(context, setup, journal)
    except SecureSumError as error:
        if error.code == "TF-601" and context.policy.sum_refusals(job):
            return  # reported by ``check_policy``
        hint = ACCEPT.get(error.code, "")
        if error.code == "TF-617" and scope.folder is not None:
            hint = f" To decide: {_accept(scope)}{records_option(str(error))}"
        yield Finding(area, "problem", f"{error}{hint}", of_job=error.code in ("TF-601", "TF-612", "TF-617"))
        return
    except (LedgerError, TamperError):
        yield Finding(area, "note", f"{job.job_name}: cohorts not checked, because of the ledger's problem")
        return
    except (OSError, TightframeError) as error:
        yield Finding(area, "problem", f"the journal of its cohorts cannot be read: {error}")
        return
    which = "" if state_dir is not None else "; earlier cohorts unknown without `state_dir`"
    yield Finding(
        area, "ok", f"{job.job_name}: this site takes part in sums over {', '.join(job.roster)}{which}"
    )
    dataset = context.site.records_id(job.dataset)
    opened_before = any(
        isinstance(entry, StaticMasked | StaticOpened | CohortAccepted) and entry.dataset == dataset
        for entry in journal
    )
    if state_dir is not None and job.privacy is None and not opened_before:
        others = ", ".join(site for site in job.roster if site != context.name)
        yield Finding(area, "note", NEWCOMER.format(job=job.job_name, dataset=dataset, others=others))


def _rows(context: SiloContext, setup: JobSetup, area: str) -> Iterator[Finding]:
    """Check that exact totals do not disclose records because few rows are possible, or few of a class."""
    try:
        check_rows(context, setup)
        rare, least = classes_left_out(context, setup)
        small, count = classes_too_small(context, setup)
    except BelowPolicyError as error:
        for refusal in error.refusals:
            yield Finding(area, "problem", f"{error.code}: {refusal}", of_job=True)
    except TightframeError:
        return  # of the records, which have findings of their own
    else:
        if small:
            text = (
                f"{context.job.job_name}: this site leaves {', '.join(small)} out of the class sums: it has "
                f"fewer than {count} patients with training records of each (`min_class_count`)"
            )
            yield Finding(area, "note", text)
        if rare:
            text = (
                f"{context.job.job_name}: this site leaves {', '.join(rare)} out of the class sums: of each "
                f"its records have fewer than the {least} values that its rounds and features ask for "
                "(`records_per_feature`); with fewer rounds or features it would take part"
            )
            yield Finding(area, "note", text)


def _evaluations(context: SiloContext, setup: JobSetup, area: str, scope: Scope) -> Iterator[Finding]:
    """Check what exact evaluations of this and earlier jobs disclose of this site's records."""
    if not context.limits_evaluations:
        return
    name = context.job.job_name
    if not context.site.data:
        yield Finding(area, "note", f"{name}: exact evaluations not checked, because that needs its records")
        return
    try:
        journal = _journal(context, scope)
    except (LedgerError, TamperError, OSError, TightframeError):
        return  # reported with the cohort
    try:
        checked = check_evaluations(context, setup, journal)
    except SecureSumError as error:
        hint = "" if scope.folder is None else f" To decide: {_accept(scope)} --evaluations"
        yield Finding(area, "problem", f"{error}{hint}", of_job=error.code == "TF-627")
        return
    except TightframeError as error:
        yield Finding(area, "problem", str(error))
        return
    assert checked is not None  # noqa: S101  (they are limited)
    wanted, before, most = checked
    numbers = (wanted.models, wanted.validation, wanted.test)
    now, limits, earlier = (opened(values) for values in (numbers, most, before))
    counts = [
        f"{str(number).partition(' ')[0]} of {limit}, {str(past).partition(' ')[0]} opened by earlier jobs"
        for number, limit, past in zip(now, limits, earlier, strict=True)
        if limit is not None
    ]

    def exceeded(runs: int) -> bool:
        return any(
            limit is not None and past + runs * number > limit
            for number, limit, past in zip(numbers, most, before, strict=True)
        )

    last = "; after it another job of this form is refused (TF-627)" if exceeded(2) else ""
    if exceeded(1):
        last = "; that is more than allowed: a person at this site accepted one run of it"
    yield Finding(area, "ok", f"{name}: its exact evaluations open {'; '.join(counts)}{last}")


def _rounds(context: SiloContext, setup: JobSetup, area: str, scope: Scope) -> Iterator[Finding]:
    """Check the job's exact rounds together with earlier jobs', if other sites have as many records."""
    if not context.limits_rounds or not context.site.data:
        return
    try:
        checked = check_rounds(context, setup, _journal(context, scope), sizes_alike(context))
    except BelowPolicyError as error:
        uniform = context.job.weights == "uniform"
        unless = "" if uniform else "refused unless other sites have more records than this one: "
        hint = "" if scope.folder is None else f". To decide: {_accept(scope)} --rounds"
        for refusal in error.refusals:
            text = f"{unless}{error.code}: {refusal}{hint}"
            yield Finding(area, "problem" if uniform else "note", text, of_job=uniform)
        return
    except (OSError, TightframeError):
        return  # of records and ledger, which have findings of their own
    if checked is None:
        return
    sums, before = checked
    parts = sums.parts(context.policy.records_per_feature)
    if parts.largest <= 1:
        more = "" if parts.fit(before) else "; that is more: a person at this site accepted one run of it"
        takes = (
            f"take {float(parts.largest):.1%} of the nearest of their limits; earlier jobs took "
            f"{float(before.largest):.1%} of theirs{more}"
        )
        yield Finding(area, "ok", f"{context.job.job_name}: its exact sums of what is trained {takes}")


def _journal(context: SiloContext, scope: Scope) -> list[JournalEntry]:
    """Return this site's journal of secure sums; empty without a `state_dir`."""
    if context.site.state_dir is None:
        return []
    places = LedgerPaths.of_site(Path(context.site.state_dir), context.name, scope.kit_root)
    with package_errors():
        return read_journal(places, check=None)


def _check_names(
    context: SiloContext, entries: Sequence[Entry], area: str, scope: Scope
) -> Iterator[Finding]:
    """Check that the ledger has these records under no other name."""
    try:
        if context.data.synthetic:
            return
        places = LedgerPaths.of_site(Path(str(context.site.state_dir)), context.name, scope.kit_root)
        note = check_records(context, entries, read_secret(places.ledger))
    except (DatasetError, LedgerError) as error:
        yield Finding(area, "problem", str(error))
    except TightframeError:
        return  # of the records, which have findings of their own
    else:
        if note:
            yield Finding(area, "note", note)


def _accept(scope: Scope) -> str:
    """Return the command that accepts a job at this site."""
    assert scope.folder is not None  # noqa: S101  (the caller has checked)
    where = f"-c {quoted(scope.config)} --job {quoted(scope.folder)}"
    return f"tightframe site release accept {where}"


def records_option(refusal: str) -> str:
    """Return the options that accept this site's records and columns in a refusal; empty if it names none.

    Without it, accepting the job lifts only the rest of the refusal, and the next job asks again.
    """
    _, _, other_form = refusal.partition("but found another")
    match = re.search(rf'{SUMMED} from form \w+ \["([0-9a-f]{{64}})"\]', other_form)
    records = "" if match is None else " --records " + match.group(1)
    return records + (" --columns" if COLUMNS in other_form else "")


def _budget(context: SiloContext, setup: JobSetup, entries: Sequence[Entry] | None, area: str) -> Finding:
    """Check that the job's planned charges fit into the remaining budget."""
    name = context.job.job_name
    if entries is None or not context.site.data:
        what = "its ledger" if entries is None else "its records"
        text = f"{name}: privacy budget not checked, because that needs this site and {what}"
        return Finding(area, "note", text)
    try:
        costs = check_budget(context, setup, entries)
    except TightframeError as error:
        return Finding(area, "problem", str(error), of_job=error.code in ("TF-701", "TF-706"))
    if costs is None:
        text = f"{name}: it continues a run that was charged here: each charge is checked when it is made"
        return Finding(area, "note", text)
    text = f"{name}: its planned charges fit into the privacy budget: this job brings it {costs.in_words()}"
    return Finding(area, "ok", text)


def would_leave(job: JobConfig) -> Iterator[Finding]:
    """List the terms that each site would send, by kind of sum; nothing if the job is wrong."""
    try:
        planned = terms(job)
    except TightframeError:
        return  # reported by ``check_policy``
    how = "masked" if job.summation == "secure" else "as they are, for the server to see"
    noise = "exact" if job.privacy is None else "with noise"
    lines = [f"would leave: terms of sums over {plural(len(job.roster), 'site')}, {how}, {noise}:"]
    for kind, (times, numbers, held) in planned.items():
        lines.append(f"- {SUMS.get(kind, kind)}, {plural(times, 'sum')}: {described(numbers, times, held)}")
    yield Finding("job", "note", "\n".join(lines))


def terms(job: JobConfig) -> dict[str, tuple[int, dict[str, int], dict[str, int]]]:
    """Return kind of sum -> planned sums, numbers in a term, and terms with them.

    The latter two are by the first part of the fields' names.

    Raises:
        TightframeError: if the job is wrong.
    """
    planned: dict[str, tuple[int, Counter[str], Counter[str]]] = {}
    for exchange in prepare(job).plan:
        times, numbers, held = planned.get(exchange.kind, (0, Counter(), Counter()))
        names: set[str] = set()
        for phase in exchange.phases:
            sizes: Counter[str] = Counter()
            for item in phase.schema.fields:
                sizes[item.name.split("/")[0]] += item.size
            numbers |= sizes
            names |= sizes.keys()
        planned[exchange.kind] = times + 1, numbers, held + Counter(names)
    return {kind: (times, dict(numbers), dict(held)) for kind, (times, numbers, held) in planned.items()}


@dataclass(frozen=True)
class Held:
    """Patients of training records by class at one site, and its minimum of these (``min_class_count``)."""

    counts: Sequence[int]
    least: int


def never_answered(methods: str, held: Mapping[str, Held], names: Sequence[str]) -> str:
    """Name the classes that a model of one sum over these sites will never answer; empty if there are none.

    Args:
        methods: names, as the sentence's subject.
        held: by site, at least one.
        names: of the classes, in the counts' order.
    """
    from tightframe.rounds.riders.class_rules import MIN_HOLDERS

    absent = [
        name
        for place, name in enumerate(names)
        if sum(site.counts[place] >= site.least for site in held.values()) < MIN_HOLDERS
    ]
    low, high = (choose(site.least for site in held.values()) for choose in (min, max))
    it = "it" if len(absent) == 1 else "them"
    if not absent:
        return ""
    return (
        f"{', '.join(absent)}: fewer than {MIN_HOLDERS} sites have "
        f"{low if low == high else f'{low} to {high}'} patients with training records; "
        f"{methods} will never answer {it}. "
        f"Take more sites that have {it}, another method "
        "(fedavg) or class_rules=off, with which a class sum can be one site's."
    )
