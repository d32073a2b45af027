"""Sections of a server's page on privacy, time and traffic, configuration, versions and hashes."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from tightframe.report.drawing import plots
from tightframe.report.drawing.markup import Markup, Part, facts, figure, listed, section, table, tag
from tightframe.report.pages.results import MISSING, kept
from tightframe.report.reading import ServerResults
from tightframe.results.files import MODEL, SIMULATED_ROOT, TRANSCRIPT
from tightframe.results.parts.ranges import Spent
from tightframe.results.rows import names
from tightframe.results.words import dotted, megabytes

UNSET = {
    "sites_per_round": "all",
    "colluders": "a tenth of the silos, at least one",
    "update_norm": "none: updates are not rescaled",
    "prototype_sites": "all",
    "answer_grid": "1 in production, 0 in a simulation",
    "start": "none: the head that the model begins with",
    "initial_model_sha256": "none: the start is from the seed",
    "privacy": "none",
    "privacy.noise_multiplier": "as each silo solves it",
    "resume": "none: it began again",
    "withdraw": "none",
    "evaluate_only": "none: the job trains",
    "statistics": "none: the job trains",
    "whole_sums": "false: sums open without silos that drop out",
}
"""Meaning of a value without default that a job leaves out."""


def privacy(run: ServerResults) -> Markup:
    """Show which rules held, the promised epsilon, and the spent one as far as silos disclose it."""
    outcome = run.outcome
    parts: list[Part] = [tag("p", "Which rules held, and which were off:"), listed(outcome.rules)]
    promise = outcome.privacy
    if promise is None:
        return section("Privacy", *parts)
    parts += [
        tag("h3", "What was promised"),
        tag(
            "p",
            "All that a silo releases in this job together costs at most epsilon "
            f"{_plain(promise.get('epsilon'))} "
            f"at delta {_plain(promise.get('delta'))}, for one "
            f"{_plain(promise.get('neighbours'))} more or less. "
            "docs/privacy.md says what that means. Where silos make noise together, this counts on the part "
            "of the others; each silo's own report has the epsilon without it.",
        ),
        tag("h3", "What was spent"),
    ]
    spent_by_round = [(row.round, row.privacy) for row in run.rows if row.privacy is not None]
    if spent_by_round:
        parts += _spent(spent_by_round)
    else:
        parts.append(
            tag(
                "p",
                "The exact number stays at each silo: in its own report, and in its ledger "
                "(tightframe ledger explain). No silo's is in the server's results.",
            )
        )
    return section("Privacy", *parts)


def _spent(spent_by_round: list[tuple[int, Spent]]) -> list[Part]:
    parts: list[Part] = []
    ranged = {number: item.range for number, item in spent_by_round if item.range is not None}
    promised = {number: item.promised for number, item in spent_by_round}
    if ranged:
        silent = any(item.untold for _, item in spent_by_round)
        note = "Some silos report nothing, and may have spent all of it." if silent else ""
        parts.append(plots.epsilons(ranged, promised, note))
    body: list[list[Part]] = [
        [
            str(number),
            MISSING if item.range is None else f"{item.range[0]:g} to {item.range[1]:g}",
            f"{item.promised:g}",
            f"{item.delta:g}",
            ", ".join(f"{entry.silos} up to {entry.up_to:g}" for entry in item.histogram)
            + (f"{', ' if item.histogram else ''}{item.untold} reported nothing" if item.untold else "")
            or "-",
            # In thousandths, rounded up by the silo itself.
            ", ".join(f"{site} {epsilon:.3f}" for site, epsilon in sorted(item.shown.items())) or "-",
        ]
        for number, item in spent_by_round
    ]
    head = ["round", "epsilon of the silos", "promised", "delta", "how many silos", "silos that show theirs"]
    return [*parts, kept(len(body), "All rounds in numbers", table(head, body))]


def withdrawal(run: ServerResults) -> Markup | None:
    """Show what was withdrawn from an ended run, what both totals disclose, and the models not covered."""
    withdrawn = run.outcome.withdrawn
    return None if withdrawn is None else section("Withdrawal", listed(withdrawn.lines()))


def traffic(run: ServerResults) -> Markup | None:
    """Show seconds and bytes by exchange."""
    rows = [row for row in run.rows if row.seconds or row.bytes_up or row.bytes_down]
    if not rows:
        return None
    exchanges = [row for row in run.rows if row.asked]
    by_row = {id(row): name for row, name in zip(exchanges, names(exchanges), strict=True)}
    row_names = [by_row.get(id(row), (row.kind, row.kind)) for row in rows]
    brief = [short for _, short in row_names]
    body: list[list[Part]] = [
        [name, f"{row.seconds:.1f}", megabytes(row.bytes_down), megabytes(row.bytes_up)]
        for (name, _), row in zip(row_names, rows, strict=True)
    ]
    down, up = sum(row.bytes_down for row in rows), sum(row.bytes_up for row in rows)
    seconds = sum(row.seconds for row in rows)
    body.append(["together", f"{seconds:.1f}", megabytes(down), megabytes(up)])
    return section(
        "Time and traffic",
        figure(
            partial(
                plots.columns,
                "Seconds by exchange",
                brief,
                {"seconds": [row.seconds for row in rows]},
                x_name="exchange",
            ),
            "Seconds of each exchange, its training included; the whole run took "
            f"{run.outcome.seconds:.0f} s.",
        ),
        figure(
            partial(
                plots.columns,
                "Megabytes by exchange",
                brief,
                {
                    "MB to the silos": [row.bytes_down / 1e6 for row in rows],
                    "MB to the server": [row.bytes_up / 1e6 for row in rows],
                },
                x_name="exchange",
            ),
            "What travelled in models and terms, all silos together, in MB (10^6 bytes).",
        ),
        kept(
            len(body),
            "All exchanges in numbers",
            table(["exchange", "seconds", "MB to silos", "MB to server"], body),
        ),
    )


def configuration(run: ServerResults) -> Markup:
    """Show every value of the job that was in force."""
    job, effective = run.outcome.job, run.outcome.effective
    if not job:
        return section("Configuration", tag("p", "The results do not say what the job was."))
    # A job of statistics trains nothing.
    idle = ("training.", "method_options", "model") if run.outcome.statistics_only else ()
    rows: list[list[Part]] = [
        [key, _cell(key, value)] for key, value in dotted(effective or job) if not key.startswith(idle)
    ]
    about = (
        "Every value of the job, with the defaults of what it leaves out, those of its method, data set and "
        "model among them"
        if effective
        else "Every value of the job, its own defaults among them; what its method, data set and model take "
        "where it says nothing, these results do not have"
    )
    if idle:
        about += ", but for those of training, method and model, which statistics do not use"
    return section(
        "Configuration",
        tag("p", f"{about}; docs/jobs.md and docs/methods.md explain them."),
        table(["key", "value"], rows),
    )


def proof(run: ServerResults) -> Markup:
    """Show versions, hashes, and how to check the transcript."""
    outcome, card, transcript = run.outcome, run.card, run.transcript
    start = card.initial_model if card else None
    parts: list[Part] = [
        facts(
            [
                (MODEL, None if outcome.statistics_only else _hash(card.model_sha256 if card else None)),
                ("pretrained start", _hash(start.sha256) if start else None),
                ("job", _hash(outcome.job_sha256)),
                ("transcript, last line", _hash(transcript.head) if transcript else None),
                ("run's id", transcript.job if transcript else None),
            ]
        ),
        tag("p", "Hashes are SHA-256. Two copies of a transcript with the same last line are the same."),
    ]
    if transcript is not None:
        root = SIMULATED_ROOT if run.simulated else "rootCA.pem"
        whose = (
            "The root is a simulation's own: its identities prove nothing about who took part."
            if run.simulated
            else "Take rootCA.pem from your own startup kit, not from whoever gave you the transcript."
        )
        parts += [
            tag("h3", "Check the transcript"),
            tag(
                "p",
                "This page shows what the transcript says and has checked no signature "
                "of it. In this folder:",
            ),
            tag("pre", f"tightframe transcript verify {TRANSCRIPT} --root {root}"),
            tag("p", whose),
        ]
    versions = facts([(name, version) for name, version in outcome.versions.items()])
    return section("Hashes and versions", *parts, tag("h3", "Versions at the server"), versions)


def _hash(value: str | None) -> Markup:
    return MISSING if value is None else tag("code", value)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cell(key: str, value: Any) -> str:
    """Return a job's value as a cell's text.

    >>> _cell("prototype_sites", None), _cell("method_options.lite_m", None), _cell("model_options", {})
    ('all', 'not set', 'none')
    """
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value) or "none"
    if value is None:
        return UNSET.get(key, "not set")
    return "none" if value == {} else _plain(value)
