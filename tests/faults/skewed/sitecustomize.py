"""Python's clocks of this process, and of those that it starts, go ahead by ``SECONDS_AHEAD``.

It stands for a machine whose clock is wrong; what is no Python (TLS) sees the right one.
"""

import datetime
import os
import time


def _shift(ahead: int) -> None:
    real_time, real_time_ns, real = time.time, time.time_ns, datetime.datetime

    class Skewed(real):  # type: ignore[misc, valid-type]
        __slots__ = ()

        @classmethod
        def now(cls, tz=None):  # type: ignore[no-untyped-def]
            return real.now(tz) + datetime.timedelta(seconds=ahead)

        @classmethod
        def utcnow(cls):  # type: ignore[no-untyped-def]
            return real.utcnow() + datetime.timedelta(seconds=ahead)

    time.time = lambda: real_time() + ahead
    time.time_ns = lambda: real_time_ns() + ahead * 10**9
    datetime.datetime = Skewed  # type: ignore[misc]


if _ahead := int(os.environ.get("SECONDS_AHEAD", "0")):
    _shift(_ahead)
