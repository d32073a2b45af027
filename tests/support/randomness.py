"""A stream of random bytes for each test, in place of the operating system's.

Tests measure noise and attack releases. With other noise in each run, each of them would fail now and then
on code that is right, and in thousands of tests some always does. So ``os.urandom``, of which noise, batches
and salts are drawn, and with it ``secrets`` and NumPy's streams without a seed, give what the test's name
says, for as long as it runs; so do the generators that torch, NumPy and ``random`` share in a process, which
would else depend on the tests before. The code under test knows nothing of it, and has no option for it.

Keys that OpenSSL makes and what other processes draw stay random. With ``--drawn-anew`` all does.
"""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np


def stream_of(name: str) -> np.random.Generator:
    """The stream of a test; Philox, so that no generator of NumPy's default kind repeats it by its seed."""
    return np.random.Generator(np.random.Philox(zlib.crc32(name.encode())))


@contextmanager
def drawn_by_name(name: str) -> Iterator[None]:
    """Draw everything that this process draws from streams of this name."""
    stream = stream_of(name)
    seed = int(stream.integers(2**32))
    random.seed(seed)
    np.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)
    # The module `random`, which `secrets` stands on, keeps a name of its own for the function.
    with mock.patch.object(os, "urandom", stream.bytes), mock.patch.object(random, "_urandom", stream.bytes):
        yield
