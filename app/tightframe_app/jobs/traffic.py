"""Network traffic of a job's largest task, and the share of ``site_timeout`` that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tightframe.results.words import megabytes

if TYPE_CHECKING:
    from tightframe.config.job import JobConfig
    from tightframe.rounds.setup import JobSetup

LINE = 10.0
"""Assumed bandwidth of a silo's line, in Mbit/s."""
UNSEEN = 64 * 2**20
"""Bytes of an answer that the engine passes to the connection before it waits for an acknowledgement."""


def resend_after(job: JobConfig) -> int:
    """Return the seconds after which a silo sends again what was lost with its connection.

    The engine's default of 300 s is longer than many a silo has for its whole task.
    """
    return max(5, job.site_timeout // 3)


@dataclass(frozen=True)
class Traffic:
    """Network traffic of one task of a silo.

    Attributes:
        down: bytes of the largest total, from which a silo computes the next state of the run.
        up: bytes of the largest term.
        site_timeout: seconds that the silo has for the task.
        again: seconds after which it sends its answer again.
    """

    down: int
    up: int
    site_timeout: int
    again: int

    @classmethod
    def of(cls, setup: JobSetup) -> Traffic:
        """Return a job's traffic from its declared schemas, with evaluation, without a few KB of protocol."""
        sizes = [
            sum(item.bytes for item in phase.schema.fields)
            for exchange in setup.plan
            for phase in exchange.phases
        ]
        return cls(
            down=max(sizes),
            up=max(sizes),
            site_timeout=setup.job.site_timeout,
            again=resend_after(setup.job),
        )

    def seconds(self, line: float = LINE) -> float:
        """Return the seconds that a task takes on a line of ``line`` Mbit/s, down and then up."""
        return 8 * (self.down + self.up) / (line * 1e6)

    @property
    def slowest(self) -> float:
        """Return the bandwidth that a line needs, in Mbit/s.

        On a slower one the transfer takes more than half of the silo's time, or the silo takes its own answer
        for lost and sends it a second time.
        """
        resent = min(self.up, UNSEEN) / self.again
        return 8 * max(resent, 2 * (self.down + self.up) / self.site_timeout) / 1e6

    def __str__(self) -> str:
        """Return one line to print."""
        moves = f"a task moves up to {megabytes(self.down)} MB to a silo and {megabytes(self.up)} MB back"
        takes = f"{self.seconds():.1f} s of its {self.site_timeout} s on a line of {LINE:g} Mbit/s"
        text = f"{moves}: {takes}"
        if self.slowest > LINE / 2:
            text += f"; raise `site_timeout`, or ensure that no line is slower than {self.slowest:.1f} Mbit/s"
        return text
