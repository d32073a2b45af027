"""Python's clocks of this process, and of those that it starts, go ahead by ``SECONDS_AHEAD``.

It stands for a machine whose clock is wrong; what is no Python (TLS) sees the right one.
"""

import datetime
import os
import time


def _shift(ahead: int) -> None:
    real_time, real_time_ns, real = time.time, time.time_ns, datetime.datetime

    class Either(type):
        # What is not Python (certificates' dates) makes the real ones.
        def __instancecheck__(cls, value):
            return isinstance(value, real)

    class Skewed(real, metaclass=Either):  # type: ignore[misc, valid-type]
        __slots__ = ()

        @classmethod
        def now(cls, tz=None):
            at = real.now(tz) + datetime.timedelta(seconds=ahead)
            # Of this very class, as `cryptography` asks.
            return cls(*at.timetuple()[:6], at.microsecond, at.tzinfo)

        @classmethod
        def utcnow(cls):
            return cls.now(datetime.UTC).replace(tzinfo=None)

    time.time = lambda: real_time() + ahead
    time.time_ns = lambda: real_time_ns() + ahead * 10**9
    datetime.datetime = Skewed  # type: ignore[misc]


if _ahead := int(os.environ.get("SECONDS_AHEAD", "0")):
    _shift(_ahead)
