"""Silos that a run has lost: since when, with which code, and what that means for its metrics.

A silo is lost from the exchange on that was the first of those without it, until one has it again. Every
place that tells of it (status, last screen, outcome, pages) has the same sentences from here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from tightframe.errors import REASONS
from tightframe.results.files import Values
from tightframe.results.words import exchange_name, plural, sentence

NOT_MEASURED = "trained, not measured"
"""End of a run whose model is there, and whose final model nobody was allowed or able to measure."""

WHERE: Mapping[str, str] = {
    "train": "",
    "statistics": "the statistics before round 1",
    "before": "the sums before round 1",
    "after": "the sums after the last round",
    "closing": "the last evaluation",
    "personal": "the evaluation of personal models",
}
"""Exchange that a silo is missing from, by its kind; a training round has a number instead."""


class Lost(Values):
    """Since when a silo is missing; held to the form in which this package's server tells it.

    Attributes:
        kind, round: of the first exchange without it.
        at: when the server knew it, in UTC, to the second: ``2026-11-22T21:42:10Z``.
        code: why, as the server knows it.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: str
    round: int = Field(ge=0)
    at: str = Field(pattern=r"\A20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ\z")
    code: str

    def words(self, silo: str) -> str:
        """Say it in one sentence."""
        when = self.at.replace("T", " ").removesuffix("Z")
        why = REASONS.get(self.code, "see tightframe explain")
        where = WHERE.get(self.kind) or exchange_name(self.kind, self.round)
        return f"{silo} is missing since {where} ({when} UTC): {self.code} ({why})."


def read(told: Any, silos: Collection[str], rounds: int) -> dict[str, Lost]:
    """Read who is missing, as a server tells a silo; what a run of this job cannot say is left out.

    Args:
        told: silo -> values of ``Lost``, or anything else.
    """
    lost: dict[str, Lost] = {}
    for silo in sorted(silos) if isinstance(told, Mapping) else ():
        if silo not in told:
            continue
        try:
            item = Lost.model_validate(told[silo])
        except ValidationError:
            continue
        if item.kind in WHERE and item.code in REASONS and item.round <= rounds:
            lost[silo] = item
    return lost


def now() -> str:
    """Return the time, as ``Lost.at`` has it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def unmeasured_since(exchanges: Iterable[tuple[str, int, bool]]) -> int | None:
    """Return the first of the last rounds in a row whose counts stayed shut; None if the last is open.

    Args:
        exchanges: kind, round, and whether counts stayed shut, in order.
    """
    shut: dict[int, bool] = {}
    for kind, number, closed in exchanges:
        if kind == "train":
            shut[number] = shut.get(number, False) or closed
    since = None
    for number in sorted(shut, reverse=True):
        if not shut[number]:
            break
        since = number
    return since


def notes(
    lost: Mapping[str, Lost],
    *,
    enrolled: int,
    since: int | None,
    closing_shut: bool = False,
    measured: Sequence[str] | None = None,
    last_measured: int | None = None,
) -> list[str]:
    """Say in sentences who is missing and what cannot be measured for it.

    Args:
        lost: silo -> since when it is missing.
        enrolled: silos that the run began with.
        since: the first round without loss and metrics, see ``unmeasured_since``.
        closing_shut: whether the last evaluation stayed shut.
        measured: who counted the final model; None if nobody did, or it is not time for it.
        last_measured: the round that made the last model which was measured.
    """
    said = [item.words(silo) for silo, item in sorted(lost.items())]
    if since is not None:
        said.append(f"No loss and no metric from round {since} on: {rule(enrolled)}.")
    if closing_shut:
        why = f": {rule(enrolled)}" if since is None else " for the same reason"
        last = "" if last_measured is None else f" The last measured model is that of round {last_measured}."
        said.append(
            f"The final model was not measured{why}; an evaluation over the other silos alone is not allowed "
            f"(static_cohort: enrolled).{last} Each silo's own report has its results on its own records."
        )
    elif measured is not None and (away := sorted(set(lost) - set(measured))):
        said.append(
            f"The final model was measured without {sentence(away)}: by {len(measured)} of "
            f"{plural(enrolled, 'silo')}."
        )
    return said


def rule(enrolled: int) -> str:
    """Say why counts stay shut after a drop-out."""
    return (
        f"counts are opened for all {enrolled} enrolled silos or for nobody, because the difference between "
        "two cohorts' counts is one silo's own"
    )
