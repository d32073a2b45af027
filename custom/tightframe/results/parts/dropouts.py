"""Silos that a run has lost: since when, with which code, and the consequences for its metrics.

A silo is lost from the first exchange without it until one includes it again. Status, last screen, outcome
and pages share the sentences of this module.
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
"""End of a run with a final model that no silo was allowed or able to measure."""

WHERE: Mapping[str, str] = {
    "train": "",
    "statistics": "the statistics before round 1",
    "before": "the sums before round 1",
    "after": "the sums after the last round",
    "closing": "the last evaluation",
    "personal": "the evaluation of personal models",
}
"""Kind of exchange -> name in sentences; a training round has its number instead."""


class Lost(Values):
    """First exchange without a silo, validated in the form that this package's server sends.

    Attributes:
        kind, round: of the first exchange without it.
        at: when the server noticed, in UTC, to the second: ``2026-11-22T21:42:10Z``.
        code: the server's reason.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: str
    round: int = Field(ge=0)
    at: str = Field(pattern=r"\A20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ\z")
    code: str

    def words(self, silo: str) -> str:
        """Return a sentence on the missing silo."""
        when = self.at.replace("T", " ").removesuffix("Z")
        why = REASONS.get(self.code, "see tightframe explain")
        where = WHERE.get(self.kind) or exchange_name(self.kind, self.round)
        return f"{silo} is missing since {where} ({when} UTC): {self.code} ({why})."


def read(received: Any, silos: Collection[str], rounds: int) -> dict[str, Lost]:
    """Parse the lost silos that a server reports, leaving out values that a run of this job cannot have.

    Args:
        received: silo -> values of ``Lost``, or anything else.
    """
    lost: dict[str, Lost] = {}
    for silo in sorted(silos) if isinstance(received, Mapping) else ():
        if silo not in received:
            continue
        try:
            item = Lost.model_validate(received[silo])
        except ValidationError:
            continue
        if item.kind in WHERE and item.code in REASONS and item.round <= rounds:
            lost[silo] = item
    return lost


def now() -> str:
    """Return the time in the format of ``Lost.at``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def unmeasured_since(exchanges: Iterable[tuple[str, int, bool]]) -> int | None:
    """Return the first of the latest consecutive rounds whose counts stayed shut; None if the last is open.

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
    """Return sentences on missing silos and on what cannot be measured without them.

    Args:
        lost: silo -> since when it is missing.
        enrolled: number of silos that the run began with.
        since: the first round without loss and metrics, see ``unmeasured_since``.
        closing_shut: whether the last evaluation stayed shut.
        measured: silos that evaluated the final model; None if none did, or not yet.
        last_measured: the round of the last measured model.
    """
    sentences = [item.words(silo) for silo, item in sorted(lost.items())]
    if since is not None:
        sentences.append(f"No loss and no metric from round {since} on: {rule(enrolled)}.")
    if closing_shut:
        why = f": {rule(enrolled)}" if since is None else " for the same reason"
        last = "" if last_measured is None else f" The last measured model is that of round {last_measured}."
        sentences.append(
            f"The final model was not measured{why}; an evaluation over the other silos alone is not allowed "
            f"(static_cohort: enrolled).{last} Each silo's own report has its results on its own records."
        )
    elif measured is not None and (away := sorted(set(lost) - set(measured))):
        sentences.append(
            f"The final model was measured without {sentence(away)}: by {len(measured)} of "
            f"{plural(enrolled, 'silo')}."
        )
    return sentences


def rule(enrolled: int) -> str:
    """Say why counts stay shut after a drop-out."""
    return (
        f"counts are opened for all {enrolled} enrolled silos or for nobody, because the difference between "
        "two cohorts' counts is one silo's own"
    )
