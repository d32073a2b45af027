"""Python's clocks of this process, and of those that it starts, go ahead by ``SECONDS_AHEAD``.

It stands for a machine whose clock is wrong; what is no Python (TLS) sees the right one.
"""

import datetime
import os
import time

_AHEAD = int(os.environ["SECONDS_AHEAD"])
_time, _time_ns, _datetime = time.time, time.time_ns, datetime.datetime


class _Skewed(_datetime):
    __slots__ = ()

    @classmethod
    def now(cls, tz=None):
        return _datetime.now(tz) + datetime.timedelta(seconds=_AHEAD)

    @classmethod
    def utcnow(cls):
        return _datetime.utcnow() + datetime.timedelta(seconds=_AHEAD)


time.time = lambda: _time() + _AHEAD
time.time_ns = lambda: _time_ns() + _AHEAD * 10**9
datetime.datetime = _Skewed
