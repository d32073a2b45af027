"""Participation: silos by exchange, missing silos with reasons, and the survivors of each sum."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tightframe.errors import LATE, REASONS
from tightframe.report.drawing import matrix, plots
from tightframe.report.drawing.markup import Markup, Part, facts, figure, section, table, tag
from tightframe.report.drawing.matrix import ABSENT, FAILED, Cell
from tightframe.report.drawing.plots import Series
from tightframe.report.pages.results import MISSING, kept
from tightframe.report.reading import ServerResults, Transcript
from tightframe.results.outcome import Outcome
from tightframe.results.rows import Row, names
from tightframe.results.words import plural

_REFUSALS = ("TF-1", "TF-2", "TF-4", "TF-6", "TF-7", "TF-505", "TF-509")
"""Codes of answers that a silo or the server refused; others are failures."""
_ASSUMED = {"malicious": "malicious (any deviation)", "semi_honest": "semi-honest (curious only)"}
"""Assumed server that sums are protected against."""
_WHAT_TO_DO = tag("p", "tightframe explain CODE says what to do.")
_SAID = {"in": "answered", "late": "late", "refused": "refused", "out": "failed", "idle": "not asked"}


def silos(run: ServerResults) -> Markup:
    """Show the grid of silos and exchanges, and list the missing silos."""
    outcome = run.outcome
    rows = [row for row in run.rows if row.asked]
    if not rows and outcome.not_enrolled:
        return _only_asked(outcome)
    missing = [
        [name, "the whole run", code, _why(outcome, name)]
        for name, code in sorted(outcome.not_enrolled.items())
    ]
    labels = names(rows)
    for (where, _), row in zip(labels, rows, strict=True):
        missing += [[silo, where, code, reason(code)] for silo, code in sorted(row.dropped.items())]
    parts: list[Part] = []
    if rows:
        everyone = _everyone(run, rows)
        cells = [
            [
                _cell(silo, row, where, outcome.not_enrolled)
                for (where, _), row in zip(labels, rows, strict=True)
            ]
            for silo in everyone
        ]
        parts.append(
            figure(
                partial(matrix.grid, "Silos by exchange", everyone, [brief for _, brief in labels], cells),
                f"Each silo in each exchange, in order{_keys(labels)}. "
                "Where too few answered, nothing was opened.",
            )
        )
        parts.append(kept(len(everyone), "All silos in numbers", _counted(everyone, cells, run)))
    else:
        parts.append(tag("p", "No exchange with the silos is on record."))
    if missing:
        parts.append(tag("h3", "Who was missing"))
        shown = table(["silo", "missing from", "code", "meaning"], missing)
        parts.append(kept(len(missing), plural(len(missing), "entry").replace("entrys", "entries"), shown))
        parts.append(_WHAT_TO_DO)
    else:
        parts.append(tag("p", "Nobody was missing." if rows else None))
    if broken := [(where, row) for (where, _), row in zip(labels, rows, strict=True) if row.failed]:
        parts.append(tag("h3", "Answers that contributed nothing"))
        parts.append(
            tag("p", "Training failed there, inside the sum. Which silos, and why, is in their own logs.")
        )
        counted = [[where, str(row.failed)] for where, row in broken]
        parts.append(kept(len(broken), "Exchanges", table(["exchange", "silos"], counted)))
    return section("Silos", *parts)


def _only_asked(outcome: Outcome) -> Markup:
    """List the silos of a run that ended before any sum."""
    roster = [*outcome.roster, *sorted(outcome.not_enrolled.keys() - set(outcome.roster))]
    body = [
        [name, outcome.not_enrolled[name], _why(outcome, name)]
        if name in outcome.not_enrolled
        else [name, "-", "neither refused nor failed to answer"]
        for name in roster
    ]
    return section(
        "Silos",
        tag("p", "The run ended while silos were being enrolled; nothing else was asked of them."),
        kept(len(body), "All silos", table(["silo", "code", "meaning"], body)),
        _WHAT_TO_DO,
    )


def _why(outcome: Outcome, silo: str) -> str:
    """Say why a silo is not in the run, with the rules that it disclosed."""
    return "; ".join([reason(outcome.not_enrolled[silo]), *outcome.not_enrolled_rules.get(silo, [])])


def reason(code: str) -> str:
    """Return a code's short meaning."""
    return REASONS.get(code, "-")


def coded(code: str) -> str:
    """Return a code, with its meaning where it has a short one."""
    return f"{code} ({REASONS[code]})" if code in REASONS else code


def sums(run: ServerResults) -> Markup:
    """Show threshold and survivors of each secret sum; for plain sums the job's minimum."""
    outcome, transcript = run.outcome, run.transcript
    summary = tag("p", f"{outcome.sums[:1].upper()}{outcome.sums[1:]}.") if outcome.sums else None
    if transcript is None:
        minimum = outcome.job.get("min_sites")
        what = (
            "plain" if outcome.summation == "plain" else "secret, but no transcript lies beside the results"
        )
        facts_ = [("sums", what), ("silos that a sum needs", None if minimum is None else str(minimum))]
        return section("Protocol", summary, facts(facts_))
    return section(
        "Protocol",
        summary,
        facts(
            [
                ("transcript begun", transcript.started),
                ("written by", f"the server, Tightframe {transcript.version}"),
                ("complete", "yes" if transcript.complete else "no: it has no last line"),
                ("sums", _results(transcript)),
            ]
        ),
        tag("h3", "What every silo signed"),
        table(
            ["epoch", "silos", "threshold", "smallest sum", "colluders assumed", "server assumed to be"],
            [
                [
                    str(item.number),
                    str(len(item.roster)),
                    str(item.threshold),
                    str(item.smallest),
                    str(item.colluders),
                    _ASSUMED.get(item.trust, item.trust),
                ]
                for item in transcript.epochs.values()
            ],
        ),
        *_survivors(transcript),
    )


def norms(run: ServerResults) -> Markup | None:
    """Show how many silos' updates have a norm in each range, by round; None without `update_norm`."""
    rows = [row for row in run.rows if row.kind == "train" and row.asked]
    all_norms = [row.update_norms for row in rows if row.update_norms is not None]
    if not all_norms:
        return None
    limit = all_norms[-1].limit
    ranges = {item.above: str(item) for one in all_norms for item in one.histogram}
    body: list[list[Part]] = []
    for (where, _), row in zip(names(rows), rows, strict=True):
        counts = {item.above: item.silos for item in row.update_norms.histogram} if row.update_norms else {}
        cells: list[Part] = [str(counts.get(above, "-")) if counts else MISSING for above in sorted(ranges)]
        body.append([where, *cells, "one silo" if row.update_norms and row.update_norms.apart else "-"])
    apart = sum(one.apart for one in all_norms)
    verdict = (
        f"In {plural(apart, 'sum')} one silo's update was more than four times as long as all others': its "
        "records, labels or units may be wrong, or it has far more records. Each silo's own log has the norm "
        "of its update."
        if apart
        else "In no sum one silo's update stood out from all others'."
    )
    return section(
        "Norms of updates",
        tag(
            "p",
            f"Number of silos by the norm of their update. One above {limit:g} (update_norm) was rescaled to "
            f"it. {verdict} A missing row stayed shut after a drop-out.",
        ),
        kept(
            len(body),
            "All rounds",
            table(["sum", *(ranges[above] for above in sorted(ranges)), "apart"], body),
        ),
    )


def _survivors(transcript: Transcript) -> list[Part]:
    rows = transcript.sums
    if not rows:
        return []
    xs = list(range(1, len(rows) + 1))
    epochs = [transcript.epochs.get(item.epoch) for item in rows]
    needed = {"threshold": [float(item.threshold) if item else None for item in epochs]}
    if any(item and item.smallest != item.threshold for item in epochs):
        needed["smallest sum"] = [float(item.smallest) if item else None for item in epochs]
    chart = partial(
        plots.lines,
        "Survivors and threshold by sum",
        xs,
        [
            # A sum may fail before its survivors are settled.
            Series("survivors", [float(len(item.survivors)) if item.survivors else None for item in rows], 0),
            *(Series(name, values, kind) for kind, (name, values) in enumerate(needed.items(), 1)),
        ],
        x_name="sum, in order",
        low=0.0,
    )
    body: list[list[Part]] = []
    for x, item, epoch in zip(xs, rows, epochs, strict=True):
        gone = sorted(set(epoch.roster) - set(item.survivors)) if epoch and item.survivors else []
        body.append(
            [
                str(x),
                f"{item.round}/{item.phase}/{item.attempt}",
                f"{len(item.survivors)} of {len(epoch.roster) if epoch else '?'}"
                if item.survivors
                else "not settled",
                str(epoch.threshold) if epoch else "?",
                ", ".join(gone) or ("nobody" if item.survivors else "not settled"),
                "opened" if item.failure is None else f"not opened: {coded(item.failure)}",
            ]
        )
    head = ["sum", "round/phase/try", "survivors", "threshold", "missing", "result"]
    return [
        tag("h3", "Survivors of each sum"),
        figure(
            chart,
            "Silos whose masked terms are in each sum. With fewer than the threshold nobody can open one, "
            "and silos give no shares for fewer than the smallest sum, which is at least the threshold.",
        ),
        kept(len(body), "All sums in numbers", table(head, body)),
    ]


def _keys(labels: Sequence[tuple[str, str]]) -> str:
    """Explain the short names that are not round numbers."""
    kinds = {
        brief.partition(".")[0]: name.partition(",")[0] for name, brief in labels if not brief[:1].isdigit()
    }
    return "".join(f"; {brief}: {name}" for brief, name in kinds.items())


def _results(transcript: Transcript) -> str:
    failed = sum(item.failure is not None for item in transcript.sums)
    return f"{len(transcript.sums) - failed} opened, {failed} not opened"


def _everyone(run: ServerResults, rows: Sequence[Row]) -> list[str]:
    """Return the roster and any other silo in the rows, so that a wrong file hides no silo."""
    mentioned = {silo for row in rows for silo in (*row.silos, *row.dropped)}
    return [*run.outcome.roster, *sorted(mentioned - set(run.outcome.roster))]


def _cell(silo: str, row: Row, where: str, absent: dict[str, str]) -> Cell:
    if silo in row.silos:
        return Cell("in", "", f"{silo}, {where}: answered")
    if silo in row.dropped:
        code = row.dropped[silo]
        kind, sign = (
            ("late", "L")
            if code == LATE
            else ("refused", "R")
            if code.startswith(_REFUSALS)
            else ("out", FAILED)
        )
        return Cell(kind, sign, f"{silo}, {where}: {coded(code)}")
    if silo in absent:
        return Cell("absent", ABSENT, f"{silo}, {where}: not enrolled, {coded(absent[silo])}")
    return Cell("idle", "", f"{silo}, {where}: not asked")


def _counted(everyone: Sequence[str], cells: Sequence[Sequence[Cell]], run: ServerResults) -> Markup:
    weights = run.card.public_weights if run.card else {}
    body = []
    for silo, row in zip(everyone, cells, strict=True):
        kinds = [cell.kind for cell in row]
        weight = f"{weights[silo]:g}" if silo in weights else "-"
        body.append([silo, *(str(kinds.count(kind)) for kind in _SAID), weight])
    return table(["silo", *_SAID.values(), "public weight"], body)
