"""``tightframe site cohort`` and ``release``: decisions on what a site's sums may reveal."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tightframe.errors import TightframeError
from tightframe.results.words import plural
from tightframe.securesum.errors import ProtocolError
from tightframe.securesum.rules import MAX_SITES, MIN_SITES
from tightframe_app import formats
from tightframe_app.screens import lines
from tightframe_app.site.checks.findings import CONFIG_HELP, file_of
from tightframe_app.site.memory import Memory, memory_of, with_id

if TYPE_CHECKING:
    from tightframe.rounds.context import SiloContext
    from tightframe.rounds.setup import JobSetup
    from tightframe.securesum.site.journal import Entry, History, Most, Profile, ProfileUsed

cohort = typer.Typer(
    help="Silos for which this site's counts may be opened (class counts, class sums, evaluation).",
    no_args_is_help=True,
)
release = typer.Typer(
    help="Ways in which sums over this site's records may be formed: weights, norms, class rules.",
    no_args_is_help=True,
)
out = lines()

LEAK = """\
What this reveals: a site's counts hardly change from job to job. The total over
  {before}
was opened already. Once the total over
  {after}
is opened too, whoever has both can subtract them and learns exactly
  {difference}
Secure sums do not prevent it; only noise (differential privacy) would."""

FORMED = """\
Sums over {dataset} were formed at this site with
  {before}
This job forms them with
  {after}
What totals of both kinds reveal to whoever has them:"""
EVALUATED = """\
Earlier jobs opened exact evaluations over {dataset}: {before}.
{after}
From more than is allowed single validation and test records, with their classes, can be computed: of few
short columns by whoever reads the totals, of many by a hospital that steers the model."""
TRAINED = """\
Earlier jobs opened exact sums of what they trained on {dataset}: {before}.
{after}
From more than records allow there can be as many equations as records: whoever reads the totals computes
these."""
WITH_EVALUATIONS = "With those of this job: {total}; allowed: {allowed}."
WITH_ROUNDS = (
    "With the {more} of this job {total:.1%}, if the other sites have as many records each as this one."
)
FITS = "So this job fits as it is: it needs no such consent now."
LESS_EVALUATED = "Another job would disclose less: {smaller}."
LESS_TRAINED = "A job of fewer rounds would disclose less: {fit} of these sums fit without consent."
TOO_MUCH_ALONE = (
    "This job alone takes more than records allow: it stays refused (TF-625), whatever is accepted."
)
UNREAD = "What this job adds is not counted here, because that needs this site's records."
OTHERS = (
    "TF-617 takes the option for what it names (`--columns`), TF-627 `--evaluations`, TF-625 behind earlier "
    "jobs `--rounds`, TF-626 `tightframe site model accept`: `tightframe site check --job` has the command."
)
AGAIN = "What else the job needs: `tightframe site check --job` with it."
TOGETHER = """\
They were not all formed alike, but differ in
  {settings}
What totals of different ways reveal together, to whoever has them:"""
ALIKE = """\
All were formed alike: no two totals differ by a rule that acts on this hospital alone."""
NONE_DIFFERS = "No setting that several jobs have differs, but some have settings that others lack."
ONE_JOB = "All are of one job, whose sums are of several kinds: no setting that two of them have differs."
CHANGED = "Where few records changed between two jobs, their totals together disclose these."
WITHDREW = (
    "Job {job} withdrew records from the chain of job {first}: if it was opened, the total before less "
    "the total after is the sum of those records, by class."
)
RESUMED = "Job {job} went on with job {first}."
UNUSED = "None was formed yet."
NO_NOISE = "Secure sums do not prevent it; only noise (differential privacy) would."

Config = Annotated[Path, typer.Option("--config", "-c", help=CONFIG_HELP, callback=file_of)]
Site = Annotated[
    str | None,
    typer.Option("--site", "-s", help="This site's name; by default the one in its certificate."),
]
Kit = Annotated[
    Path | None,
    typer.Option(
        "--kit",
        exists=True,
        file_okay=False,
        help="The startup kit's folder `startup`, whose key signs the decision; the one beside the "
        "configuration by default.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@cohort.command("show")
def cohort_show(config: Config, site: Site = None, kit: Kit = None, form: formats.Form = "text") -> None:
    """Show the silos for which this site's counts may be opened, for each data set."""
    from tightframe.securesum.site.journal import CohortAccepted, StaticMasked, StaticOpened

    memory = memory_of(config, site, kit)
    site, entries = memory.site, memory.read()
    kinds = StaticMasked | StaticOpened | CohortAccepted
    cohorts = {entry.dataset: entry for entry in entries if isinstance(entry, kinds)}
    if form == "json":
        from tightframe_app.outputs import Cohort, Cohorts

        listed = [
            Cohort(
                dataset=dataset,
                silos=entry.roster,
                how="accepted"
                if isinstance(entry, CohortAccepted)
                else ("requested" if isinstance(entry, StaticMasked) else "opened"),
                job=None if isinstance(entry, CohortAccepted) else entry.lineage,
            )
            for dataset, entry in sorted(cohorts.items())
        ]
        formats.show(Cohorts(site=site, cohorts=tuple(listed)))
        return
    if not cohorts:
        where = "" if entries else f": nothing is on record at {memory.places.ledger}"
        out.print(f"{site} has not opened counts of any data set yet{where}")
        out.print("the first job with secure sums fixes the cohort; check the site's name")
    for dataset, entry in sorted(cohorts.items()):
        how = "accepted by hand" if isinstance(entry, CohortAccepted) else f"opened in job {entry.lineage!r}"
        if isinstance(entry, StaticMasked):
            how = f"requested in job {entry.lineage!r}"
        out.print(f"{dataset}: {', '.join(entry.roster)} ({how})")


@cohort.command("accept")
def cohort_accept(
    config: Config,
    dataset: Annotated[str, typer.Option(help="Data set, as `tightframe site cohort show` names it.")],
    silos: Annotated[str, typer.Option(help="The new cohort: all silos, separated by commas.")],
    site: Site = None,
    kit: Kit = None,
    yes: Yes = False,
) -> None:
    """Allow this site's counts to be opened for another cohort from now on; shows what that reveals."""
    from tightframe.securesum.site.journal import CohortAccepted

    memory = memory_of(config, site, kit)
    site, roster = memory.site, tuple(sorted({part.strip() for part in silos.split(",") if part.strip()}))
    if site not in roster or not MIN_SITES <= len(roster) <= MAX_SITES:
        raise typer.BadParameter(
            f"expected {MIN_SITES} to {MAX_SITES} silos, including this one, {site}, but got {list(roster)}",
            param_hint="--silos",
        )
    cohorts = _cohorts(entries := memory.read(), dataset)
    if not cohorts:
        raise typer.BadParameter(
            f"{site} has opened no counts of {dataset!r}; see `tightframe site cohort show`",
            param_hint="--dataset",
        )
    if set(cohorts) == {roster}:
        out.print(f"{dataset} is open for {', '.join(roster)} already")
        return
    _print_leaks(entries, dataset, roster)
    _decide(memory, [CohortAccepted(dataset, roster)], yes)
    out.print(f"{dataset}: this site's counts may now be opened for {', '.join(roster)}")


@release.command("show")
def release_show(config: Config, site: Site = None, kit: Kit = None, form: formats.Form = "text") -> None:
    """Explain what can be computed from all exact totals so far that this site was in, for each data set.

    Two totals together give one site's numbers if they were formed in different ways, or over different
    sites. ``--format json`` lists every setting.
    """
    from tightframe.rounds.evaluation_bits import most
    from tightframe.securesum.site.journal import (
        PARTS,
        Evaluated,
        History,
        Multiplied,
        ProfileAccepted,
        ProfileUsed,
        StateSummed,
        Trained,
    )

    memory = memory_of(config, site, kit)
    site, entries = memory.site, memory.read()
    policy = memory.entry.policy.resolve(production=True)
    limits, factor = most(policy), policy.records_per_feature
    ways: dict[tuple[str, Profile], ProfileUsed | ProfileAccepted] = {}
    for entry in entries:
        if isinstance(entry, ProfileUsed | ProfileAccepted):
            ways.setdefault((entry.dataset, entry.profile), entry)
    used_profiles = dict.fromkeys(
        (entry.dataset, entry.profile) for entry in entries if isinstance(entry, ProfileUsed)
    )
    if form == "json":
        from tightframe_app.outputs import EvaluatedSoFar, Evaluations, Formed, Releases, TrainedSoFar

        formed = [
            Formed(
                dataset=entry.dataset,
                settings=dict(entry.profile),
                job=None if isinstance(entry, ProfileAccepted) else entry.lineage,
            )
            for entry in ways.values()
        ]
        history, names = History(entries), sorted({name for name, _ in ways})
        trained = tuple(
            TrainedSoFar.of(name, len(history.trained(name)), *_trained(history, name, factor))
            for name in names
        )
        evaluated = tuple(
            EvaluatedSoFar(
                dataset=name,
                **Evaluations.of(history.evaluated(name), PARTS).model_dump(),
                allowed=Evaluations.of(limits, PARTS),
                left=Evaluations.of(history.left(name, limits), PARTS),
            )
            for name in names
        )
        formats.show(Releases(site=site, formed=tuple(formed), evaluated=evaluated, trained=trained))
        return
    if not ways:
        out.print(
            f"{site} has taken part in no sums without noise yet: the first job fixes how they are formed"
        )
    for dataset in sorted({name for name, _ in ways}):
        of_records = [entry for entry in entries if isinstance(entry, ProfileUsed | ProfileAccepted)]
        hows = dict.fromkeys(
            "accepted by hand"
            if isinstance(entry, ProfileAccepted)
            else f"used in job {_job(memory, entry.lineage if isinstance(entry, ProfileUsed) else entry.job)}"
            for entry in entries
            if isinstance(entry, ProfileUsed | ProfileAccepted | Evaluated | Trained | Multiplied)
            and entry.dataset == dataset
        )
        out.print(f"Exact totals over {dataset} ({', '.join(hows)})")
        for line in consents(memory, dataset):
            out.print(line)
        chains = {entry.lineage for entry in of_records if isinstance(entry, ProfileUsed)}
        for job in dict.fromkeys(item.job for item in entries if isinstance(item, StateSummed)):
            chain = next(
                item.lineage for item in entries if isinstance(item, StateSummed) and item.job == job
            )
            if chain in chains and job != chain:
                kind = WITHDREW if _withdrew(memory, job) else RESUMED
                out.print(kind.format(job=_job(memory, job), first=_job(memory, chain)))
        users = [entry for entry in of_records if isinstance(entry, ProfileUsed) and entry.dataset == dataset]
        one_job = len(hows.keys() - {"accepted by hand"}) == 1
        out.print(_together([profile for name, profile in used_profiles if name == dataset], one_job=one_job))
        history = History(entries)
        for line in evaluations_told(history, dataset, limits):
            out.print(line)
        _uncounted(memory, users, {entry.job for entry in entries if isinstance(entry, Evaluated)})
        out.print(rounds_told(history, dataset, factor))
        _uncounted(memory, users, {entry.job for entry in entries if isinstance(entry, Trained | Multiplied)})
        for before, after in combinations(dict.fromkeys(_cohorts(entries, dataset, all_of_them=True)), 2):
            out.print(_leak(before, after))


def _uncounted(memory: Memory, users: Sequence[ProfileUsed], counted: set[str]) -> None:
    """Name the jobs of which nothing of a kind is on record."""
    ids = dict.fromkeys(entry.lineage for entry in users if entry.lineage not in counted)
    if jobs := ", ".join(_job(memory, job) for job in ids):
        out.print(f"Of {jobs} none are counted: there were none, or an earlier version did not count them.")


def consents(memory: Memory, dataset: str) -> list[str]:
    """List what was accepted by hand for a data set, when, and the job that first used it."""
    from tightframe.securesum.site.journal import (
        CohortAccepted,
        Evaluated,
        EvaluationsAccepted,
        Multiplied,
        ProfileAccepted,
        ProfileUsed,
        RoundsAccepted,
        StaticMasked,
        Trained,
        differences,
        in_words,
    )

    runs = {
        EvaluationsAccepted.KIND: ("all exact evaluations of one run of a job", (Evaluated.KIND,)),
        RoundsAccepted.KIND: ("all exact rounds of one run of a job", (Trained.KIND, Multiplied.KIND)),
    }
    facts = [(time, fact) for time, fact in memory.facts if fact.get("dataset") == dataset]
    accepted, profiles = [], list[Any]()
    for place, (time, fact) in enumerate(facts):
        later = [item for _, item in facts[place + 1 :]]
        if fact["entry"] == CohortAccepted.KIND:
            what = f"the cohort {', '.join(fact['roster'])}"
            uses = [item for item in later if item["entry"] == StaticMasked.KIND]
            jobs = [str(item["lineage"]) for item in uses if item["roster"] == fact["roster"]]
        elif fact["entry"] == ProfileAccepted.KIND:
            differing = differences(profiles, tuple(sorted(fact["profile"].items())))
            settings = {name: value for name, _, value in differing} or fact["profile"]
            what = ", ".join(f"{name} {in_words(values, value)[1]}" for name, values, value in differing)
            uses = [item for item in later if item["entry"] == ProfileUsed.KIND]
            jobs = [str(item["lineage"]) for item in uses if settings.items() <= item["profile"].items()]
        elif fact["entry"] in runs:
            what, kinds = runs[fact["entry"]]
            uses = [item for item in later if item["entry"] in kinds]
            jobs = [str(item["job"]) for item in uses if item["config"] == fact["config"]]
        else:
            jobs, what = [], ""
        if fact["entry"] in (ProfileUsed.KIND, ProfileAccepted.KIND):
            profiles.append(tuple(sorted(fact["profile"].items())))
        if fact["entry"] in (CohortAccepted.KIND, ProfileAccepted.KIND, *runs):
            where = f"first used in job {_job(memory, jobs[0])}" if jobs else "not used yet"
            what = what or "a combination of settings"
            accepted.append(f"accepted by hand on {time:%Y-%m-%d %H:%M} UTC: {what}; {where}")
    return accepted


def _job(memory: Memory, job: str) -> str:
    """Return a job's id, with its name, method and day if kit and ledger have them."""
    kit = None if memory.startup is None else memory.startup.resolve().parent
    day = memory.first_days.get(job)
    return with_id(job, None if kit is None else kit / job, memory.site) + (f" of {day}" if day else "")


def _withdrew(memory: Memory, job: str) -> bool:
    """Check whether a job began as a withdrawal, by its state at this site."""
    from tightframe.rounds.notes import WITHDRAWS, Notes
    from tightframe.rounds.state_files import STATE
    from tightframe.rounds.withdrawn_list import NAMES

    folder = Path(str(memory.entry.state_dir)) / job / memory.site / STATE
    before = Notes.read(folder).jobs[-2:-1]
    return (folder / NAMES).is_file() and bool(before) and before[0].words[-1:] == (WITHDRAWS,)


def _together(profiles: Sequence[Profile], *, one_job: bool) -> str:
    """Describe what totals formed in these ways reveal together."""
    from tightframe.rounds.sums.revealed import what_both_reveal
    from tightframe.securesum.site.journal import in_words, values_of

    settings_used = [dict(profile) for profile in profiles]
    values = {
        name: list(dict.fromkeys(value for item in settings_used for value in values_of(name, item)))
        for name in dict.fromkeys(name for item in settings_used for name in item)
    }
    differing = {name: options for name, options in values.items() if len(options) > 1}
    if not profiles:
        return UNUSED
    if not differing:
        lacking = ONE_JOB if one_job else NONE_DIFFERS
        return f"{ALIKE if len(profiles) == 1 else lacking}\n{CHANGED}"
    texts = {name: in_words(options[:-1], options[-1]) for name, options in differing.items()}
    settings = "\n  ".join(
        f"{name}: {' or '.join((*others, last))}" for name, (others, last) in texts.items()
    )
    lines = [TOGETHER.format(settings=settings)]
    lines += [f"- {text}" for text in dict.fromkeys(what_both_reveal(*item) for item in differing.items())]
    return "\n".join([*lines, NO_NOISE])


@release.command("accept")
def release_accept(
    config: Config,
    job: Annotated[Path, typer.Option("--job", "-j", help="Folder of the job to accept.")],
    weight: Annotated[
        str | None, typer.Option(help="Weight of this site's terms, as a refusal names it (`own weight`).")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(help="Classes whose records are summed, as a refusal names them (`classes in ...`)."),
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="SHA-256 of the features' weights and moments, as a refusal names it.")
    ] = None,
    moments: Annotated[
        str | None,
        typer.Option(help="SHA-256 of the means and deviations in training, as a refusal names it."),
    ] = None,
    counts: Annotated[
        str | None, typer.Option(help="SHA-256 of the counts that weigh classes, as a refusal names it.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="SHA-256 of the head whose losses are summed, as a refusal names it.")
    ] = None,
    records: Annotated[
        str | None,
        typer.Option(help="SHA-256 of this site's summed records, as a refusal names it."),
    ] = None,
    columns: Annotated[bool, typer.Option("--columns", help="If a refusal names `sums of columns`.")] = False,
    evaluations: Annotated[
        bool, typer.Option("--evaluations", help="Also all exact evaluations of one run of the job (TF-627).")
    ] = False,
    rounds: Annotated[
        bool, typer.Option("--rounds", help="Also all exact rounds of one run of the job (TF-625).")
    ] = False,
    site: Site = None,
    kit: Kit = None,
    yes: Yes = False,
) -> None:
    """Allow this site's sums to be formed as in a job from now on; shows what that reveals.

    For a job that this site refuses with TF-617 (sums were formed in another way before) or TF-612 (counts
    were opened for other silos before), with ``--evaluations`` also TF-627 (exact evaluations would tell too
    much), with ``--rounds`` also TF-625 where earlier jobs' rounds add to it. It lifts these refusals only.
    """
    from tightframe.config.job import parse_job
    from tightframe.rounds.few_records.planned import products_planned
    from tightframe.rounds.riders.class_rules import IN_LOSSES, IN_MOMENTS, IN_PRODUCTS, sums_over_classes
    from tightframe.rounds.setup import prepare
    from tightframe.rounds.sums.release import (
        COLUMNS,
        COUNTS,
        ENCODER,
        FEATURES,
        MOMENTS,
        OWN_WEIGHT,
        TRAINING,
        caps_weights,
        columns_summed,
        head_name,
        records_name,
        release_profile,
        with_formed,
    )
    from tightframe.rounds.sums.revealed import what_both_reveal
    from tightframe.securesum.site.journal import (
        CohortAccepted,
        Entry,
        EvaluationsAccepted,
        History,
        ProfileAccepted,
        RoundsAccepted,
        differences,
        in_words,
    )
    from tightframe_app.jobs import folders as job_folders

    setup = prepare(parse_job(job_folders.read_job(job)))
    memory = memory_of(config, site, kit)
    if (site := memory.site) not in setup.job.sites:
        raise typer.BadParameter(f"expected a job with this site, {site}", param_hint="--job")
    dataset, entries = memory.entry.records_id(setup.job.dataset), memory.read()
    history, decisions = History(entries), list[Entry]()
    profile, roster = release_profile(setup, memory.entry), setup.job.roster
    if profile is None or setup.job.summation != "secure":
        out.print("this job needs no such consent: its sums have noise, or are not secure sums")
        return
    if weight is not None:
        if not caps_weights(profile):
            raise typer.BadParameter(
                "expected a job that caps weights (`max_weight_share`), but this one has no weights to cap",
                param_hint="--weight",
            )
        profile = tuple(sorted([*profile, (OWN_WEIGHT, _weight(weight))]))
    if classes is not None:
        sums = {
            IN_PRODUCTS: products_planned(setup) is not None,
            IN_LOSSES: "losses" in dict(profile),
            IN_MOMENTS: any(sums_over_classes(phase.schema) for phase in setup.statistics_phases()),
        }
        names = [name for name, summed in sums.items() if summed]
        if not names:
            raise typer.BadParameter(
                "expected a job that sums products of features, losses or moments of inputs, but this one "
                "sums none",
                param_hint="--classes",
            )
        profile = with_formed(profile, dict.fromkeys(names, _classes(classes, setup.dataset.class_names)))
    hashes = {
        "--encoder": (encoder, ENCODER, FEATURES, "sums features which no training moves"),
        "--moments": (moments, MOMENTS, TRAINING, "trains a model"),
        "--counts": (counts, COUNTS, TRAINING, "trains a model"),
        "--head": (head, head_name(setup), "losses", "sums losses at a head"),
    }
    for hint, (digest, name, setting, what) in hashes.items():
        if digest is not None:
            if setting not in dict(profile or ()):
                raise typer.BadParameter(
                    f"expected a job that {what}, but this one does not", param_hint=hint
                )
            profile = with_formed(profile, {name: (_sha256(digest, hint),)})
    if records is not None:
        if (summed := records_name(setup)) is None:
            raise typer.BadParameter(
                "expected a job whose exact sums disclose records that have changed, but this one has none",
                param_hint="--records",
            )
        profile = with_formed(profile, {summed: (_sha256(records, "--records"),)})
    if columns:
        if (way := columns_summed(setup)) is None:
            raise typer.BadParameter(
                "expected a job that sums a table's columns, but this one does not", param_hint="--columns"
            )
        profile = with_formed(profile, {COLUMNS: (way,)})
    assert profile is not None  # noqa: S101  (checked above)
    differing = []
    try:
        history.check_profile(dataset, profile)
    except ProtocolError:
        differing = differences(history.profiles(dataset), profile)
        decisions.append(ProfileAccepted(dataset, profile))
        texts = [(name, *in_words(values, value)) for name, values, value in differing]
        before = [f"{name}: {' or '.join(values)}" for name, values, _ in texts]
        after = [f"{name}: {value}" for name, _, value in texts]
        shown = FORMED.format(dataset=dataset, before="\n  ".join(before), after="\n  ".join(after))
        out.print(shown)
        for text in dict.fromkeys(
            what_both_reveal(name, [*values, value]) for name, values, value in differing
        ):
            out.print(f"- {text}")
    cohorts = _cohorts(entries, dataset)
    if cohorts and set(cohorts) != {roster}:
        decisions.append(CohortAccepted(dataset, roster))
        _print_leaks(entries, dataset, roster)
    if evaluations:
        decisions.append(EvaluationsAccepted(dataset, bytes.fromhex(setup.job.sha256())))
        total = _planned(memory, setup, entries, _with_evaluations)
        out.print(EVALUATED.format(dataset=dataset, before=_evaluations(history, dataset), after=total))
    if rounds:
        decisions.append(RoundsAccepted(dataset, bytes.fromhex(setup.job.sha256())))
        factor = memory.entry.policy.resolve(production=True).records_per_feature
        total = _planned(memory, setup, entries, _with_rounds)
        out.print(TRAINED.format(dataset=dataset, before=_rounds(history, dataset, factor), after=total))
    if not decisions:
        out.print(f"{dataset}: this site's sums may already be formed as in this job")
        out.print(f"Refused all the same? {OTHERS}")
        return
    if differing:
        out.print(NO_NOISE)
    _decide(memory, decisions, yes)
    out.print(f"{dataset}: this site's sums may now be formed as in this job, over {', '.join(roster)}")
    out.print(AGAIN)


def _planned(
    memory: Memory,
    setup: JobSetup,
    entries: Sequence[Entry],
    describe: Callable[[SiloContext, JobSetup, Sequence[Entry]], str],
) -> str:
    """Describe what a job adds to earlier ones' disclosures, by this site's records."""
    from tightframe.rounds.context import SiloContext
    from tightframe.rounds.silo.checks.enrolment import UNKNOWN

    if not memory.entry.data:
        return UNREAD
    with tempfile.TemporaryDirectory() as folder:
        site = (memory.site, setup.job, memory.entry)
        try:
            return describe(SiloContext(*site, Path(folder), job_id=UNKNOWN, production=True), setup, entries)
        except (TightframeError, OSError) as error:
            return f"{UNREAD} They cannot be read: {error}"


def _with_evaluations(context: SiloContext, setup: JobSetup, entries: Sequence[Entry]) -> str:
    """Describe what exact evaluations of all jobs disclose, a new one included, and a smaller job."""
    from tightframe.rounds.silo.checks.enrolment import evaluations_planned
    from tightframe.securesum.site.journal import History

    if (planned := evaluations_planned(context, setup, entries)) is None:
        return "This site's policy has no limit on them."
    history, dataset = History(entries), context.site.records_id(context.job.dataset)
    total = [sum(both) for both in zip(history.evaluated(dataset), planned.wanted, strict=True)]
    summary = WITH_EVALUATIONS.format(total=_words(total), allowed=_words(planned.most))
    left = history.left(dataset, planned.most)
    if planned.fits(left):
        return f"{summary}\n{FITS}"
    return f"{summary}\n{LESS_EVALUATED.format(smaller=planned.smaller(left))}"


def _with_rounds(context: SiloContext, setup: JobSetup, entries: Sequence[Entry]) -> str:
    """Describe what exact sums of all jobs in training use up, a new one included, and how many would fit."""
    from tightframe.rounds.few_records.across_jobs import rounds_left
    from tightframe.rounds.silo.checks.enrolment import rounds_planned, sizes_alike

    if (planned := rounds_planned(context, setup, entries, sizes_alike(context))) is None:
        return "This job has none, or this site's policy has no limit on them."
    (sums, before), factor = planned, context.policy.records_per_feature
    parts = sums.parts(factor)
    total = max(now + earlier for now, earlier in zip(astuple(parts), astuple(before), strict=True))
    summary = WITH_ROUNDS.format(more=len(sums.places), total=float(total))
    if parts.fit(before):
        return f"{summary}\n{FITS}"
    if parts.largest > 1:
        return f"{summary}\n{TOO_MUCH_ALONE}"
    fit = rounds_left(sums.parts(factor, [min(sums.places)]), before)
    return f"{summary}\n{LESS_TRAINED.format(fit=fit or 'none')}"


def evaluations_told(history: History, dataset: str, limits: Most) -> list[str]:
    """Describe what exact evaluations of all jobs have disclosed, and what a site's limits leave."""
    lines = [f"Exact evaluations so far: {_evaluations(history, dataset)}."]
    if allowed := _words(limits):
        lines.append(f"Allowed over all jobs: {allowed}.")
        lines.append(f"Left: {_words(history.left(dataset, limits))}.")
    return lines


def rounds_told(history: History, dataset: str, factor: int) -> str:
    """Describe the exact sums in training that all jobs have opened, and what a site's rule leaves."""
    return f"Exact sums of trained layers and features so far: {_rounds(history, dataset, factor)}."


def _evaluations(history: History, dataset: str) -> str:
    """Describe what exact evaluations of all jobs have disclosed."""
    return _words(history.evaluated(dataset))


def _words(numbers: Sequence[int | None]) -> str:
    """Describe numbers of exact evaluations, without those that have no limit."""
    from tightframe.securesum.site.journal import opened

    return ", ".join(text for text in opened(numbers) if text is not None)


def _trained(history: History, dataset: str, factor: int) -> tuple[Fraction | None, int | None]:
    """Return the share of what records allow that exact sums in training used, and how many more fit.

    The share is None if the policy has no rule; the number, if sums like the last fit any number of times.
    """
    from tightframe.rounds.few_records.across_jobs import rounds_left, taken

    if not factor:
        return None, None
    sums = history.trained(dataset)
    used = taken(sums, factor)
    return used.largest, rounds_left(taken(sums[-1:], factor), used)


def _rounds(history: History, dataset: str, factor: int) -> str:
    """Describe the exact sums in training that all jobs have opened, and what records still allow."""
    if not (sums := history.trained(dataset)):
        return "none"
    used, fit = _trained(history, dataset, factor)
    count = f"{len(sums)} in {plural(len({item.job for item in sums}), 'job')}"
    if used is None:
        return f"{count}; this site's policy has no limit (`records_per_feature` 0)"
    more = "any number" if fit is None else str(fit)
    left = f"{float(max(Fraction(0), 1 - used)):.1%} is left, for {more} more in another job like the last"
    return f"{count}, {float(used):.1%} of what the records allow (`records_per_feature` {factor}); {left}"


def _cohorts(entries: Sequence[Entry], dataset: str, *, all_of_them: bool = False) -> list[tuple[str, ...]]:
    """Return the cohorts for which counts of a data set may be opened, or ever could, the latest last."""
    from tightframe.securesum.site.journal import CohortAccepted, StaticMasked, StaticOpened

    cohorts: list[tuple[str, ...]] = []
    for entry in entries:
        if isinstance(entry, StaticMasked | StaticOpened | CohortAccepted) and entry.dataset == dataset:
            anew = isinstance(entry, CohortAccepted) and not all_of_them
            cohorts = [entry.roster] if anew else [*cohorts, entry.roster]
    return cohorts


def _weight(text: str) -> str:
    """Return a profile's value of ``own weight``: as declared, or a positive number."""
    from tightframe.rounds.sums.release import DECLARED

    if text == DECLARED:
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(
            f"expected a positive number or '{DECLARED}', but got {text!r}", param_hint="--weight"
        )
    return repr(value)


def _classes(text: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the classes in a JSON list, in the data set's order."""
    try:
        chosen = json.loads(text)
    except ValueError:
        chosen = None
    if not isinstance(chosen, list) or not chosen or not all(name in names for name in chosen):
        raise typer.BadParameter(
            f"expected a list of classes of {list(names)}, as '[\"{names[0]}\"]', but got {text!r}",
            param_hint="--classes",
        )
    return tuple(name for name in names if name in chosen)


def _sha256(text: str, hint: str) -> str:
    """Return an option's hash in lower case."""
    if len(text) != 64 or set(text.lower()) - set("0123456789abcdef"):
        raise typer.BadParameter(f"expected 64 hexadecimal digits, but got {text!r}", param_hint=hint)
    return text.lower()


def _leak(before: tuple[str, ...], roster: tuple[str, ...]) -> str:
    """Describe what counts of two cohorts reveal together."""
    gone, new = sorted(set(before) - set(roster)), sorted(set(roster) - set(before))
    parts = [f"the counts of {', '.join(names)} together" for names in (gone, new) if names]
    difference = "\n  minus ".join(parts)
    return LEAK.format(before=", ".join(before), after=", ".join(roster), difference=difference)


def _print_leaks(entries: Sequence[Entry], dataset: str, roster: tuple[str, ...]) -> None:
    """Print what a cohort's counts reveal together with those of each earlier cohort."""
    for before in dict.fromkeys(_cohorts(entries, dataset, all_of_them=True)):
        if before != roster:
            out.print(_leak(before, roster))


def _decide(memory: Memory, entries: Sequence[Entry], yes: bool) -> None:
    """Ask for a decision and write it into the site's ledger.

    Raises:
        TightframeError: without the site's kit, or if its ledger cannot be used.
    """
    from tightframe.rounds.sums.vault import locked_ledger, remember

    site_ledger = memory.site_ledger()
    if not yes and not typer.confirm("Accept it at this site?"):
        out.print("nothing was changed")
        raise typer.Exit(1)
    with locked_ledger(site_ledger) as ledger:  # no job writes meanwhile
        remember(ledger, entries)
