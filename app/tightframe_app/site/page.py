"""``tightframe site page``: what runs at a hospital, what left it, was spent and refused, as a live page.

Its sources are this site's own files and processes, which are read and never written: the configuration,
the ledger, the kit's logs. No record, key or credential is on it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightframe.errors import TightframeError
from tightframe.options import meanings
from tightframe.report.drawing import layout
from tightframe.report.drawing.markup import (
    Markup,
    Part,
    coded,
    facts,
    folded,
    join,
    listed,
    section,
    table,
    tag,
)
from tightframe.results.words import plural, rounded_down, rounded_up
from tightframe_app.federation.kits import CONFIG_FILE, Kit
from tightframe_app.live.server import Content
from tightframe_app.site import stop
from tightframe_app.site.checks.findings import Finding, Scope
from tightframe_app.site.memory import job_name, memory_of

if TYPE_CHECKING:
    from tightframe.config.policy import Policy
    from tightframe.config.site import SiteEntry
    from tightframe.privacy.ledger.entries import Entry
    from tightframe.privacy.ledger.summary import Spending
    from tightframe_app.site.memory import Memory

KIND = "Tightframe: a hospital's own page, for this machine only"
DELTA = 1e-5
"""Delta for epsilon if the policy sets none."""
EVERY = 2.0
"""Seconds between two looks."""
TAIL = 2**20
"""Bytes of each log that are looked through, from its end."""
MOST_REFUSALS = 40
LONGEST = 300
"""Characters of a message; the log has it whole."""
CHECK_AGAIN = 600.0
"""Seconds after which the site is checked again, as by ``tightframe site check``."""
_SETTINGS = {"changes": "training", "features": "features"}
"""Kind of what is summed -> the setting of a release profile that only jobs with such sums have."""
_ITEM = "  - "
_LINE = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ - [^-]+ - "
    r"(?:WARNING|ERROR|CRITICAL) - .*?\b(TF-\d{3})\b[:)]? ?(.*)"
)
_GROUPS = {
    "update": "training: model changes or sums of features",
    "changes": "model changes",
    "features": "sums of features",
    "static": "counts and evaluation",
}


@dataclass(frozen=True)
class Released:
    """Sums to which this site contributed in one job, by its ledger.

    Attributes:
        first: when its first sum was answered.
        last: when its last one was.
        sums: number of sums to which this site gave its shares.
        fewest: smallest number of sites in one of them.
        groups: what the sums were of.
    """

    job: str
    first: datetime
    last: datetime
    sums: int
    fewest: int
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """A line with a code in a log of this kit.

    Attributes:
        when: as the log has it, by this machine's clock and zone.
        text: what it says.
        job: id; empty for the client's own log.
    """

    when: str
    code: str
    text: str
    job: str = ""


@dataclass(frozen=True)
class Known:
    """Values that the page shows.

    Attributes:
        running: a line for each of the kit's processes.
        jobs: ids of the jobs that run.
        entry: the site's configuration; None if it cannot be used.
        policy: rules, complete.
        released: what left, newest job first.
        cohorts: data set -> for which silos its counts may be known.
        spendings: on each data set.
        exact: ids of the jobs that released exact totals.
        told: data set -> what exact totals have told of what the policy's limits allow, and what a person
            accepted, in words.
        names: job id -> what people call it, where that is known.
        refusals: newest first.
        findings: of the last check.
        problems: what could not be read, with the reason.
    """

    site: str
    kit: Path
    running: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    entry: SiteEntry | None = None
    policy: Policy | None = None
    released: tuple[Released, ...] = ()
    cohorts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spendings: tuple[Spending, ...] = ()
    exact: tuple[str, ...] = ()
    told: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    findings: tuple[Finding, ...] = ()
    problems: tuple[str, ...] = ()


class Looker:
    """Looks at a site again and again; reads a file again only when it has changed.

    Args:
        kit: of the site, with its ``local/tightframe.json``.
    """

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._config = kit.local / CONFIG_FILE
        self._known = Known(kit.name, kit.folder)
        self._versions: dict[str, object] = {}
        self._checked = -CHECK_AGAIN

    def look(self) -> Known:
        """Return what is known now; what cannot be read is named in ``problems``."""
        folder = self._kit.folder
        processes = stop.running(folder)
        known = replace(
            self._known,
            running=tuple(one.described() for one in processes if one.role != "child"),
            jobs=tuple(stop.jobs(processes)),
        )
        if self._changed("logs", logs := [folder / "log.txt", *sorted(folder.glob("*-*-*-*-*/log.txt"))]):
            known = replace(known, refusals=refusals(folder, logs))
        files = [self._config, *_ledger_files(self._config, self._kit.name)]
        if self._changed("site", files):
            known = self._read(known)
            self._checked = -CHECK_AGAIN
        if time.monotonic() - self._checked >= CHECK_AGAIN:
            self._checked = time.monotonic()
            known = replace(known, findings=self._check())
        shown = {*known.jobs, *(one.job for one in known.released), *(one.job for one in known.refusals)} - {
            ""
        }
        found = {
            job: name
            for job in shown - known.names.keys()
            if (name := job_name(self._kit.folder / job, self._kit.name))
        }
        known = replace(known, names={**known.names, **found})
        self._known = known
        return known

    def _changed(self, what: str, files: Sequence[Path]) -> bool:
        now = tuple((str(path), _version(path)) for path in files)
        before, self._versions[what] = self._versions.get(what), now
        return now != before

    def _read(self, known: Known) -> Known:
        from tightframe.config.site import parse_single, read_object
        from tightframe.privacy.ledger.summary import exact_jobs, spendings
        from tightframe.rounds.site_ledger import read_contents

        try:
            entry, _ = parse_single(read_object(self._config), str(self._config))
            policy = entry.policy.resolve(production=True)
        except (TightframeError, OSError) as error:
            return replace(known, entry=None, policy=None, problems=(str(error),))
        known = replace(known, entry=entry, policy=policy, problems=())
        if entry.state_dir is None:
            return known
        try:
            memory = memory_of(self._config, self._kit.name, self._kit.startup)
            whole = read_contents(memory.places, check=memory.check())
            entries = () if whole is None else whole.entries
            spent = tuple(spendings(entries, policy.delta_cap or DELTA))
            return replace(
                known,
                released=released(entries),
                cohorts=cohorts(entries),
                spendings=spent,
                exact=tuple(exact_jobs(entries)),
                told=told_exactly(memory, policy),
            )
        except (TightframeError, OSError) as error:
            nothing = replace(known, released=(), cohorts={}, spendings=(), exact=(), told={})
            return replace(nothing, problems=(str(error),))

    def _check(self) -> tuple[Finding, ...]:
        from tightframe_app.site.checks.all_checks import check_site

        scope = Scope(self._config, production=True, kit=self._kit.startup, records=False)
        try:
            return tuple(check_site(scope))
        except (TightframeError, OSError) as error:
            return (Finding("check", "problem", str(error)),)


def released(entries: Sequence[Entry]) -> tuple[Released, ...]:
    """Return what left for each job, by the facts that this site wrote down before it gave its shares."""
    found: dict[str, Released] = {}
    kinds = _kinds(entries)
    for entry in entries:
        for fact in getattr(entry.content, "facts", ()):
            if fact.get("entry") != "revealed":
                continue
            job, silos = str(fact["job"]), len(fact["survivors"])
            old = found.pop(job, Released(job, entry.time, entry.time, 0, silos, ()))
            of_sums = (
                kinds.get(job, ["update"]) if name == "update" else [str(name)] for name in fact["groups"]
            )
            groups = tuple(sorted({*old.groups, *(name for names in of_sums for name in names)}))
            found[job] = Released(job, old.first, entry.time, old.sums + 1, min(old.fewest, silos), groups)
    return tuple(reversed(found.values()))


def _kinds(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Return job -> which of model changes and sums of features it sums, where profile or charges say so."""
    from tightframe.privacy.ledger.entries import Charge

    found: dict[str, set[str]] = {}
    lineages: dict[str, str] = {}
    for entry in entries:
        if isinstance(charge := entry.content, Charge):
            kind = "features" if charge.purpose.endswith("feature sums") else "changes"
            found.setdefault(charge.job_id, set()).add(kind)
        for fact in getattr(entry.content, "facts", ()):
            if "job" in fact and "lineage" in fact:
                lineages[str(fact["job"])] = str(fact["lineage"])
            if fact.get("entry") == "profile_used":
                names = [str(name).partition(" ")[0] for name in fact["profile"]]
                kinds = {kind for kind, name in _SETTINGS.items() if name in names}
                found.setdefault(str(fact["lineage"]), set()).update(kinds)
    return {
        job: sorted(found[first])
        for job, first in {**{job: job for job in found}, **lineages}.items()
        if found.get(first)
    }


def cohorts(entries: Sequence[Entry]) -> dict[str, tuple[str, ...]]:
    """Return for which silos the counts of each data set may be known now."""
    kinds = ("static_masked", "static_opened", "cohort_accepted")
    return {
        str(fact["dataset"]): tuple(map(str, fact["roster"]))
        for entry in entries
        for fact in getattr(entry.content, "facts", ())
        if fact.get("entry") in kinds
    }


def told_exactly(memory: Memory, policy: Policy) -> dict[str, tuple[str, ...]]:
    """Return what exact totals over each data set have told, what is left, and what a person accepted."""
    from tightframe.rounds.evaluation_bits import most
    from tightframe.securesum.site.journal import Evaluated, History, Multiplied, ProfileUsed, Trained
    from tightframe_app.site.releases import consents, evaluations_told, rounds_told

    entries = memory.read()
    history, kinds = History(entries), Evaluated | Multiplied | ProfileUsed | Trained
    return {
        name: (
            *evaluations_told(history, name, most(policy)),
            rounds_told(history, name, policy.records_per_feature),
            *consents(memory, name),
        )
        for name in sorted({entry.dataset for entry in entries if isinstance(entry, kinds)})
    }


def refusals(kit: Path, logs: Sequence[Path]) -> tuple[Refusal, ...]:
    """Return the lines with codes in a kit's logs, each with the list below it, newest first."""
    found: list[Refusal] = []
    for path in logs:
        job = path.parent.name if path.parent != kit else ""
        within = False
        for line in _tail(path).splitlines():
            if (match := _LINE.match(line)) is not None:
                when, code, text = match.groups()
                found.append(Refusal(when, code, text[:LONGEST], job))
                within = True
            elif within := within and line.startswith(_ITEM):
                longer = f"{found[-1].text} {line.removeprefix(_ITEM)}"
                found[-1] = replace(found[-1], text=longer[:LONGEST])
    found.sort(key=lambda one: one.when, reverse=True)
    return tuple(found[:MOST_REFUSALS])


def content(known: Known) -> Content:
    """Return the page's content: a pure function of what is known."""
    doing = f"{plural(len(known.jobs), 'job')} running" if known.running else "the client does not run"
    wrong = [one for one in known.findings if one.state == "problem"]
    said = f"{known.site}: {doing}" + (f"; {plural(len(wrong), 'problem')}" if wrong else "")
    parts = [
        tag("div", *_top(known, doing, wrong), id="top"),
        _left(known),
        _spent(known),
        _refused(known),
        _rules(known),
        _checked(known),
    ]
    return Content(f"{known.site} \N{EN DASH} {doing}", said, join(parts))


def _top(known: Known, doing: str, wrong: Sequence[Finding]) -> Iterator[Part]:
    for problem in known.problems:
        yield layout.notice("bad", tag("b", "This site's files cannot be used. "), coded(problem))
    for finding in wrong:
        yield layout.notice("warn", tag("b", f"{finding.area}: "), coded(finding.text))
    data = "" if known.entry is None else ", ".join(sorted(known.entry.data)) or "none is set up"
    yield facts(
        [
            ("now", doing),
            ("jobs that run", ", ".join(_named(known, job, len(job)) for job in known.jobs) or None),
            ("processes", join(known.running, ", ") if known.running else "none of this kit"),
            ("data sets", data or None),
            ("policy", None if known.policy is None else known.policy.profile),
            ("kit", str(known.kit)),
        ]
    )


def _left(known: Known) -> Markup:
    rows: list[list[Part]] = [
        [
            _job(known, one.job),
            _when(one.first),
            _when(one.last),
            str(one.sums),
            str(one.fewest),
            ", ".join(_GROUPS.get(name, name) for name in one.groups),
        ]
        for one in known.released
    ]
    head = ["job", "first sum", "last sum", "sums", "fewest hospitals in one", "what"]
    parts: list[Part] = [
        tag(
            "p",
            "A term of this site leaves masked; a sum is opened only with the shares of the hospitals in it. "
            "The server has the sums below, and no hospital's term. Models, reports and logs of jobs stay in "
            "the kit; what a job's log says is for this hospital alone.",
        )
    ]
    none = tag("p", "Nothing has left this site in a sum yet.", class_="missing")
    parts.append(table(head, rows) if rows else none)
    if known.cohorts:
        parts.append(tag("p", "Counts and evaluation may be known for one cohort of each data set:"))
        parts.append(listed(f"{name}: {', '.join(who)}" for name, who in sorted(known.cohorts.items())))
    return section("What left in sums", *parts)


def _spent(known: Known) -> Markup:
    cap = None if known.policy is None else known.policy.epsilon_cap
    parts: list[Part] = []
    for one in known.spendings:
        left = None
        if cap is not None:
            left = f"epsilon {rounded_down(max(0.0, cap - one.spent.guaranteed))} of {cap:g}"
        parts.append(tag("h3", one.dataset_id))
        parts.append(
            facts(
                [
                    ("spent", f"epsilon {rounded_up(one.spent.guaranteed)}, delta {one.delta:g}"),
                    ("left", left or "this site has set no cap (epsilon_cap)"),
                    ("if no other silo adds noise", f"epsilon {rounded_up(one.alone)}"),
                    ("protects", one.neighbours),
                ]
            )
        )
        rows: list[list[Part]] = [
            [
                _short(job.job_id),
                job.name,
                str(len(job.charges)),
                str(job.retries),
                rounded_up(job.epsilon),
            ]
            for job in reversed(one.jobs)
        ]
        if rows:
            parts.append(table(["job", "name", "charges", "repeats", "epsilon of it alone"], rows))
    if known.exact:
        from tightframe.privacy.ledger.summary import exact_text

        parts.append(tag("p", f"{exact_text([_named(known, job) for job in known.exact])}."))
        for name, lines in known.told.items():
            parts += [tag("h3", f"{name}: what exact totals told"), listed(lines)]
    if not known.spendings:
        parts.append(
            tag("p", "No job with differential privacy has charged this site's ledger yet.", class_="missing")
        )
    return section("What was spent", *parts)


def _refused(known: Known) -> Markup:
    rows: list[list[Part]] = [
        [_logged(one.when), one.code, coded(one.text), _job(known, one.job) if one.job else "the client"]
        for one in known.refusals
    ]
    parts: list[Part] = [
        tag("p", "From this kit's logs, the newest first; these texts never leave the site.")
    ]
    none = tag("p", "No refusal and no error with a code is in the logs.", class_="missing")
    parts.append(table(["when", "code", "what", "where"], rows, wrapped=[2]) if rows else none)
    return section("What was refused", *parts)


def _rules(known: Known) -> Markup:
    if known.policy is None:
        return section("Policy", tag("p", "The configuration cannot be read.", class_="missing"))
    from tightframe.config.policy import PROFILES

    usual: Mapping[str, Any] = PROFILES[known.policy.profile]
    words = rule_words()
    own: list[list[Part]] = []
    others: list[list[Part]] = []
    for name, value in known.policy:
        if name == "profile":
            continue
        row: list[Part] = [tag("code", name), _value(value), words.get(name, "")]
        (own if name in usual and _value(usual[name]) != _value(value) else others).append(row)
    head = ["rule", "here", "what it means"]
    parts: list[Part] = [
        tag("p", f"Profile {known.policy.profile}. A job that breaks a rule is refused here.")
    ]
    if own:
        parts += [tag("h3", "Changed from the profile"), table(head, own, wrapped=[2])]
    parts.append(folded(f"{plural(len(others), 'rule')} as in the profile", table(head, others, wrapped=[2])))
    return section("Policy", *parts)


def _checked(known: Known) -> Markup:
    rows: list[list[Part]] = [[one.area, one.state, coded(one.text)] for one in known.findings]
    states = [one.state for one in known.findings]
    said = f"{plural(states.count('problem'), 'problem')}, {plural(states.count('note'), 'note')}"
    return section(
        "Check",
        tag(
            "p",
            "As by ",
            tag("code", "tightframe site check --production --no-records"),
            ", every ten minutes.",
        ),
        folded(
            f"{said}; {plural(len(rows), 'thing')} looked at",
            table(["what", "state", "what was found"], rows, wrapped=[2]),
        ),
    )


def rule_words() -> dict[str, str]:
    """Return rule -> what it means, by the documentation of ``Policy`` itself."""
    from tightframe.config.policy import Policy

    return {name: said.replace("`", "") for name, said in meanings(Policy).items()}


def _short(job: str) -> Markup:
    return tag("code", job[:8], title=job)


def _named(known: Known, job: str, length: int = 8) -> str:
    """Return a job's name with the start of its id, or that alone."""
    name = known.names.get(job)
    return f"{name} ({job[:length]})" if name else job[:length]


def _job(known: Known, job: str) -> Markup:
    return tag("span", _named(known, job), title=job)


def _value(value: object) -> str:
    if value is None:
        return "no limit"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} ({plural(len(pins), 'pin')})" for name, pins in value.items()) or "none"
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _when(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _logged(when: str) -> str:
    """Return a time of a log, which is of this machine's zone, in the page's; as it stands if it is none."""
    try:
        return _when(datetime.strptime(when, "%Y-%m-%d %H:%M:%S").astimezone())
    except (ValueError, OverflowError):
        return when


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - TAIL))
            return stream.read(TAIL).decode("utf-8", "replace")
    except OSError:
        return ""


def _version(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _ledger_files(config: Path, site: str) -> list[Path]:
    from tightframe.privacy.ledger.ledger import ledger_path

    try:
        state = json.loads(config.read_text(encoding="utf-8"))["state_dir"]
        path = ledger_path(Path(state), site)
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [path, path.with_name(f"{path.name}-wal")]
