"""``tightframe site page``: live page of a hospital's jobs, contributions, privacy spending and refusals.

It reads, and never writes, this site's own configuration, ledger, kit's logs and processes. It shows no
record, key or credential.
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

from tightframe.config.profiles import DELTA
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
EVERY = 2.0
"""Seconds between two updates."""
TAIL = 2**20
"""Bytes read from the end of each log."""
MOST_REFUSALS = 40
LONGEST = 300
"""Most characters of a message; the log has all."""
CHECK_AGAIN = 600.0
"""Seconds after which the site is checked again, as by ``tightframe site check``."""
_SETTINGS = {"changes": "training", "features": "features"}
"""Kind of sum -> setting of a release profile that only jobs with such sums have."""
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
        first: time of its first sum.
        last: time of its last sum.
        sums: number of sums to which this site gave its shares.
        fewest: least number of sites in one of them.
        groups: kinds of values summed.
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
        when: the log's time, in this machine's zone.
        text: of the message.
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
        jobs: ids of the running jobs.
        entry: the site's configuration; None if it cannot be used.
        policy: rules, complete.
        released: sums this site contributed to, newest job first.
        cohorts: data set -> silos for which its counts may be opened.
        spendings: by data set.
        exact: ids of the jobs that released exact totals.
        told: data set -> sentences on what exact totals disclosed, what the policy's limits leave, and what
            was accepted by hand.
        names: job id -> name, where known.
        refusals: newest first.
        findings: of the last check.
        problems: files that could not be read, with the reason.
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
    """Polls a site's state; reads a file again only when it has changed.

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
        """Return the current values, naming what cannot be read in ``problems``."""
        folder = self._kit.folder
        processes = stop.running(folder)
        state = replace(
            self._known,
            running=tuple(item.described() for item in processes if item.role != "child"),
            jobs=tuple(stop.jobs(processes)),
        )
        if self._changed("logs", logs := [folder / "log.txt", *sorted(folder.glob("*-*-*-*-*/log.txt"))]):
            state = replace(state, refusals=refusals(folder, logs))
        files = [self._config, *_ledger_files(self._config, self._kit.name)]
        if self._changed("site", files):
            state = self._read(state)
            self._checked = -CHECK_AGAIN
        if time.monotonic() - self._checked >= CHECK_AGAIN:
            self._checked = time.monotonic()
            state = replace(state, findings=self._check())
        shown = {
            *state.jobs,
            *(item.job for item in state.released),
            *(item.job for item in state.refusals),
        } - {""}
        names = {
            job: name
            for job in shown - state.names.keys()
            if (name := job_name(self._kit.folder / job, self._kit.name))
        }
        state = replace(state, names={**state.names, **names})
        self._known = state
        return state

    def _changed(self, what: str, files: Sequence[Path]) -> bool:
        now = tuple((str(path), _version(path)) for path in files)
        before, self._versions[what] = self._versions.get(what), now
        return now != before

    def _read(self, state: Known) -> Known:
        from tightframe.config.site import parse_single, read_object
        from tightframe.privacy.ledger.summary import exact_jobs, spendings
        from tightframe.rounds.site_ledger import read_contents

        try:
            entry, _ = parse_single(read_object(self._config), str(self._config))
            policy = entry.policy.resolve(production=True)
        except (TightframeError, OSError) as error:
            return replace(state, entry=None, policy=None, problems=(str(error),))
        state = replace(state, entry=entry, policy=policy, problems=())
        if entry.state_dir is None:
            return state
        try:
            memory = memory_of(self._config, self._kit.name, self._kit.startup)
            contents = read_contents(memory.places, check=memory.check())
            entries = () if contents is None else contents.entries
            spent = tuple(spendings(entries, policy.delta_cap or DELTA))
            return replace(
                state,
                released=released(entries),
                cohorts=cohorts(entries),
                spendings=spent,
                exact=tuple(exact_jobs(entries)),
                told=told_exactly(memory, policy),
            )
        except (TightframeError, OSError) as error:
            nothing = replace(state, released=(), cohorts={}, spendings=(), exact=(), told={})
            return replace(nothing, problems=(str(error),))

    def _check(self) -> tuple[Finding, ...]:
        from tightframe_app.site.checks.all_checks import check_site

        scope = Scope(self._config, production=True, kit=self._kit.startup, records=False)
        try:
            return tuple(check_site(scope))
        except (TightframeError, OSError) as error:
            return (Finding("check", "problem", str(error)),)


def released(entries: Sequence[Entry]) -> tuple[Released, ...]:
    """Return each job's released sums, by the facts that this site recorded before it gave its shares."""
    by_job: dict[str, Released] = {}
    kinds = _kinds(entries)
    for entry in entries:
        for fact in getattr(entry.content, "facts", ()):
            if fact.get("entry") != "revealed":
                continue
            job, silos = str(fact["job"]), len(fact["survivors"])
            old = by_job.pop(job, Released(job, entry.time, entry.time, 0, silos, ()))
            of_sums = (
                kinds.get(job, ["update"]) if name == "update" else [str(name)] for name in fact["groups"]
            )
            groups = tuple(sorted({*old.groups, *(name for names in of_sums for name in names)}))
            by_job[job] = Released(job, old.first, entry.time, old.sums + 1, min(old.fewest, silos), groups)
    return tuple(reversed(by_job.values()))


def _kinds(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Return job -> ``changes`` or ``features``, as profiles or charges say."""
    from tightframe.privacy.ledger.entries import Charge

    by_job: dict[str, set[str]] = {}
    lineages: dict[str, str] = {}
    for entry in entries:
        if isinstance(charge := entry.content, Charge):
            kind = "features" if charge.purpose.endswith("feature sums") else "changes"
            by_job.setdefault(charge.job_id, set()).add(kind)
        for fact in getattr(entry.content, "facts", ()):
            if "job" in fact and "lineage" in fact:
                lineages[str(fact["job"])] = str(fact["lineage"])
            if fact.get("entry") == "profile_used":
                names = [str(name).partition(" ")[0] for name in fact["profile"]]
                kinds = {kind for kind, name in _SETTINGS.items() if name in names}
                by_job.setdefault(str(fact["lineage"]), set()).update(kinds)
    return {
        job: sorted(by_job[first])
        for job, first in {**{job: job for job in by_job}, **lineages}.items()
        if by_job.get(first)
    }


def cohorts(entries: Sequence[Entry]) -> dict[str, tuple[str, ...]]:
    """Return data set -> silos for which its counts may now be opened."""
    kinds = ("static_masked", "static_opened", "cohort_accepted")
    return {
        str(fact["dataset"]): tuple(map(str, fact["roster"]))
        for entry in entries
        for fact in getattr(entry.content, "facts", ())
        if fact.get("entry") in kinds
    }


def told_exactly(memory: Memory, policy: Policy) -> dict[str, tuple[str, ...]]:
    """Return data set -> sentences on what exact totals disclosed, what is left, and acceptances by hand."""
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
    """Return the lines with codes in a kit's logs, with their lists, newest first."""
    refused: list[Refusal] = []
    for path in logs:
        job = path.parent.name if path.parent != kit else ""
        within = False
        for line in _tail(path).splitlines():
            if (match := _LINE.match(line)) is not None:
                when, code, text = match.groups()
                refused.append(Refusal(when, code, text[:LONGEST], job))
                within = True
            elif within := within and line.startswith(_ITEM):
                longer = f"{refused[-1].text} {line.removeprefix(_ITEM)}"
                refused[-1] = replace(refused[-1], text=longer[:LONGEST])
    refused.sort(key=lambda item: item.when, reverse=True)
    return tuple(refused[:MOST_REFUSALS])


def content(state: Known) -> Content:
    """Return the page's content, a pure function of the known values."""
    doing = f"{plural(len(state.jobs), 'job')} running" if state.running else "the client does not run"
    wrong = [item for item in state.findings if item.state == "problem"]
    summary = f"{state.site}: {doing}" + (f"; {plural(len(wrong), 'problem')}" if wrong else "")
    parts = [
        tag("div", *_top(state, doing, wrong), id="top"),
        _left(state),
        _spent(state),
        _refused(state),
        _rules(state),
        _checked(state),
    ]
    return Content(f"{state.site} \N{EN DASH} {doing}", summary, join(parts))


def _top(state: Known, doing: str, wrong: Sequence[Finding]) -> Iterator[Part]:
    for problem in state.problems:
        yield layout.notice("bad", tag("b", "This site's files cannot be used. "), coded(problem))
    for finding in wrong:
        yield layout.notice("warn", tag("b", f"{finding.area}: "), coded(finding.text))
    data = "" if state.entry is None else ", ".join(sorted(state.entry.data)) or "none is set up"
    yield facts(
        [
            ("now", doing),
            ("jobs that run", ", ".join(_named(state, job, len(job)) for job in state.jobs) or None),
            ("processes", join(state.running, ", ") if state.running else "none of this kit"),
            ("data sets", data or None),
            ("policy", None if state.policy is None else state.policy.profile),
            ("kit", str(state.kit)),
        ]
    )


def _left(state: Known) -> Markup:
    rows: list[list[Part]] = [
        [
            _job(state, item.job),
            _when(item.first),
            _when(item.last),
            str(item.sums),
            str(item.fewest),
            ", ".join(_GROUPS.get(name, name) for name in item.groups),
        ]
        for item in state.released
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
    if state.cohorts:
        parts.append(tag("p", "Counts and evaluation may be known for one cohort of each data set:"))
        parts.append(listed(f"{name}: {', '.join(who)}" for name, who in sorted(state.cohorts.items())))
    return section("What left in sums", *parts)


def _spent(state: Known) -> Markup:
    cap = None if state.policy is None else state.policy.epsilon_cap
    parts: list[Part] = []
    for item in state.spendings:
        left = None
        if cap is not None:
            left = f"epsilon {rounded_down(max(0.0, cap - item.spent.guaranteed))} of {cap:g}"
        parts.append(tag("h3", item.dataset_id))
        parts.append(
            facts(
                [
                    ("spent", f"epsilon {rounded_up(item.spent.guaranteed)}, delta {item.delta:g}"),
                    ("left", left or "this site has set no cap (epsilon_cap)"),
                    ("if no other silo adds noise", f"epsilon {rounded_up(item.alone)}"),
                    ("protects", item.neighbours),
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
            for job in reversed(item.jobs)
        ]
        if rows:
            parts.append(table(["job", "name", "charges", "repeats", "epsilon of it alone"], rows))
    if state.exact:
        from tightframe.privacy.ledger.summary import exact_text

        parts.append(tag("p", f"{exact_text([_named(state, job) for job in state.exact])}."))
        for name, lines in state.told.items():
            parts += [tag("h3", f"{name}: what exact totals disclosed"), listed(lines)]
    if not state.spendings:
        parts.append(
            tag("p", "No job with differential privacy has charged this site's ledger yet.", class_="missing")
        )
    return section("What was spent", *parts)


def _refused(state: Known) -> Markup:
    rows: list[list[Part]] = [
        [_logged(item.when), item.code, coded(item.text), _job(state, item.job) if item.job else "the client"]
        for item in state.refusals
    ]
    parts: list[Part] = [
        tag("p", "From this kit's logs, the newest first; these texts never leave the site.")
    ]
    none = tag("p", "No refusal and no error with a code is in the logs.", class_="missing")
    parts.append(table(["when", "code", "what", "where"], rows, wrapped=[2]) if rows else none)
    return section("What was refused", *parts)


def _rules(state: Known) -> Markup:
    if state.policy is None:
        return section("Policy", tag("p", "The configuration cannot be read.", class_="missing"))
    from tightframe.config.policy import PROFILES

    usual: Mapping[str, Any] = PROFILES[state.policy.profile]
    words = rule_words()
    changed: list[list[Part]] = []
    others: list[list[Part]] = []
    for name, value in state.policy:
        if name == "profile":
            continue
        row: list[Part] = [tag("code", name), _value(value), words.get(name, "")]
        (changed if name in usual and _value(usual[name]) != _value(value) else others).append(row)
    head = ["rule", "here", "what it means"]
    parts: list[Part] = [
        tag("p", f"Profile {state.policy.profile}. A job that breaks a rule is refused here.")
    ]
    if changed:
        parts += [tag("h3", "Changed from the profile"), table(head, changed, wrapped=[2])]
    parts.append(folded(f"{plural(len(others), 'rule')} as in the profile", table(head, others, wrapped=[2])))
    return section("Policy", *parts)


def _checked(state: Known) -> Markup:
    rows: list[list[Part]] = [[item.area, item.state, coded(item.text)] for item in state.findings]
    states = [item.state for item in state.findings]
    summary = f"{plural(states.count('problem'), 'problem')}, {plural(states.count('note'), 'note')}"
    return section(
        "Check",
        tag(
            "p",
            "As by ",
            tag("code", "tightframe site check --production --no-records"),
            ", every ten minutes.",
        ),
        folded(
            f"{summary}; {plural(len(rows), 'thing')} looked at",
            table(["what", "state", "what was found"], rows, wrapped=[2]),
        ),
    )


def rule_words() -> dict[str, str]:
    """Return rule -> meaning, from the docstring of ``Policy``."""
    from tightframe.config.policy import Policy

    return {name: meaning.replace("`", "") for name, meaning in meanings(Policy).items()}


def _short(job: str) -> Markup:
    return tag("code", job[:8], title=job)


def _named(state: Known, job: str, length: int = 8) -> str:
    """Return a job's name with the start of its id, or the id alone."""
    name = state.names.get(job)
    return f"{name} ({job[:length]})" if name else job[:length]


def _job(state: Known, job: str) -> Markup:
    return tag("span", _named(state, job), title=job)


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
    """Convert a log's time from this machine's zone to UTC; return any other text unchanged."""
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
