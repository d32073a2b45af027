"""What a job would take from a site, by its plan, in the words of the silo's own report after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tightframe_app.site.checks.findings import Finding

if TYPE_CHECKING:
    from tightframe.config.job import JobConfig


def would_leave(job: JobConfig) -> Iterator[Finding]:
    """Yield what each site would send as terms of sums, by kind of sum; nothing if the job is wrong."""
    from tightframe.errors import TightframeError
    from tightframe.results.parts.terms import SUMS, described
    from tightframe.results.words import plural

    try:
        planned = terms(job)
    except TightframeError:
        return  # reported by ``check_policy``
    how = "masked" if job.summation == "secure" else "as they are, for the server to see"
    noise = "exact" if job.privacy is None else "with noise"
    lines = [f"would leave: terms of sums over {plural(len(job.roster), 'site')}, {how}, {noise}:"]
    for kind, (times, numbers) in planned.items():
        lines.append(f"- {SUMS.get(kind, kind)}, {plural(times, 'sum')}: {described(numbers)}")
    yield Finding("job", "note", "\n".join(lines))


def terms(job: JobConfig) -> dict[str, tuple[int, dict[str, int]]]:
    """Return kind of sum -> how many a job plans, and the numbers of a term by the first part of their names.

    Raises:
        TightframeError: if the job is wrong.
    """
    from tightframe.rounds.setup import prepare

    planned: dict[str, tuple[int, Counter[str]]] = {}
    for exchange in prepare(job).plan:
        times, numbers = planned.get(exchange.kind, (0, Counter()))
        for phase in exchange.phases:
            held: Counter[str] = Counter()
            for item in phase.schema.fields:
                held[item.name.split("/")[0]] += item.size
            numbers |= held
        planned[exchange.kind] = times + 1, numbers
    return {kind: (times, dict(numbers)) for kind, (times, numbers) in planned.items()}
