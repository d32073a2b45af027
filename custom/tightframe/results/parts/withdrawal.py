"""Result of a withdrawal: the records taken out, what the new total reveals, the models not covered."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tightframe.results.files import CARD, MAX_BYTES, Values
from tightframe.results.words import plural

BESIDE = (f"*/{CARD}", f"../*/server/{CARD}", f"../*/workspace/{CARD}")
"""Patterns of other runs' cards, from the folder above a run's results: on the same server, in a simulator's
workspace, or downloaded beside it."""
ARCHIVES = "*/workspace"
"""Pattern of ZIP files of results in the folder in which the engine's server keeps ended jobs."""


class NotCovered(Values):
    """A model on record that continues from the run whose records were withdrawn.

    Attributes:
        job_name: of its job.
        folder: of its results.
        how: it continues, in words.
    """

    job_name: str
    folder: str
    how: str


class WithdrawnRecords(Values):
    """The withdrawal of one run.

    Attributes:
        previous: the engine's id of the run whose total the records left.
        lineage: of the first run of its chain.
        records: number of training records that left the total.
        stay: number of records in the new total.
        silos: least number of silos that the withdrawn records come from.
        withheld: folds not evaluated, because too few of their records were withdrawn.
        not_covered: models on record that continue from the run; others may exist.
    """

    previous: str
    lineage: str
    records: int
    stay: int
    silos: int
    withheld: list[str] = []
    not_covered: list[NotCovered] = []

    def lines(self) -> list[str]:
        """Describe the withdrawal in sentences."""
        sentences = [
            f"{plural(self.records, 'training record')} of at least {self.silos} hospitals left the total of "
            f"run {self.previous}: the model is, bit for bit, that of the {self.stay} others",
            "whoever has both totals knows the sum of the records that left, class by class; with fewer of "
            "them than features it shows whether a given record is among them",
        ]
        sentences += [
            f"{fold} records are not evaluated any more: of these too few were withdrawn, and counts before "
            "and after would disclose single ones"
            + ("; the model keeps its temperature" if fold == "validation" else "")
            for fold in self.withheld
        ]
        sentences += [
            f"NOT covered: {item.job_name} in {item.folder} ({item.how})" for item in self.not_covered
        ]
        sentences.append(
            f"{'others' if self.not_covered else 'models'} that continue from the run, or were trained on "
            "the records elsewhere (other jobs, personal models, copies), are not covered, and may exist"
        )
        return sentences


def not_covered(
    above: Path, lineage: str, models: Iterable[str], own: Path, ended_jobs: Path | None = None
) -> list[NotCovered]:
    """List the models on record that continue from a run, directly or not: resumed jobs, pretrained starts.

    Args:
        above: folder above the results of this run.
        models: SHA-256 of the files of its models.
        own: folder of this run's results, left out.
        ended_jobs: folder in which the engine's server keeps ended jobs; None if it keeps none.
    """
    cards = [
        (path.parent.resolve(), card)
        for pattern in BESIDE
        for path in sorted(above.glob(pattern))
        if path.parent.resolve() != own.resolve() and (card := _card(path)) is not None
    ]
    if ended_jobs is not None:
        archives = [path for path in sorted(ended_jobs.glob(ARCHIVES)) if path.is_file()]
        cards += [(path.parent.resolve(), card) for path in archives if (card := _archived(path)) is not None]
    reached = set(models)
    continuing: dict[Path, tuple[dict[str, Any], str]] = {}
    while True:
        new = {
            place: (card, how)
            for place, card in cards
            if place not in continuing and (how := _continues(card, lineage, reached)) is not None
        }
        if not new:
            break
        continuing |= new
        reached |= {str(card.get("model_sha256")) for card, _ in new.values()}
    return [
        NotCovered(job_name=str(_job(card).get("job_name")), folder=str(place), how=how)
        for place, (card, how) in sorted(continuing.items())
    ]


def _continues(card: dict[str, Any], lineage: str, models: set[str]) -> str | None:
    job = _job(card)
    resume = job.get("resume")
    if isinstance(resume, dict) and resume.get("lineage") == lineage and job.get("withdraw") is None:
        return "resumes it"
    return "starts from its model" if job.get("initial_model_sha256") in models else None


def _job(card: dict[str, Any]) -> dict[str, Any]:
    job = card.get("job")
    return job if isinstance(job, dict) else {}


def _card(path: Path) -> dict[str, Any] | None:
    """Read a card's plain values, of any version; None if it cannot be read."""
    try:
        return _values(path.read_bytes())
    except OSError:
        return None


def _archived(path: Path) -> dict[str, Any] | None:
    """Read the plain values of the card in an ended job's archive; None if it is missing or unreadable."""
    try:
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo(CARD)
            return None if entry.file_size > MAX_BYTES else _values(archive.read(entry))
    except (OSError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _values(content: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
