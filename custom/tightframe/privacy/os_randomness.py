"""Sampling of records and Gaussian noise from the operating system's generator.

Never from torch's: the server knows the job's seed, and the guarantee holds only against parties that cannot
repeat the draws. Opacus offers this as ``secure_mode``, whose package torchcsprng no longer builds. As there,
each value of the noise is the sum of four normal draws: the floating-point values that a single draw can
reach have gaps, which disclose the value under the noise (Holohan and Braghin, Secure Random Sampling in
Differential Privacy, ESORICS 2021, section 5.1).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from tightframe.privacy.discrete_gaussian import system_bytes

RandomBytes = Callable[[int], bytes]

DRAWS = 4  # normal draws summed for one value of noise
NOISE_CHUNK = 2**17
KEY_BYTES = 32


class MaskSeeds:
    """Reseeds torch's generator for each record, from seeds that nobody knows.

    A seed belongs to a record's place among those drawn, so one more record gives those after it other masks
    and moves the sum by more than C. The proof still holds. Seeds are independent of each other and of the
    records, so no output's probability changes if they are assigned differently: let each record have the
    same seed in both data sets. For any seeds, the sums then differ by at most C, and the noise gives
    (epsilon, delta); a mixture over seeds gives no more (joint convexity). That needs a secret key, not only
    seeds that are hard to guess. One stream for all is not enough: torch's generator on a CPU keeps 32 bits
    of its seed, which can be tried one by one, and a known stream discloses how many records came before.

    On a GPU the records of a portion share a stream, whose seed has 64 bits. Augmentations belong to a
    record's place in its fold, by seeds from the site's secret salt (``SiloContext.salt``): the same holds.

    Args:
        device: of the generator of masks.
        random_bytes: gives the key of all seeds.
    """

    def __init__(self, device: torch.device, random_bytes: RandomBytes = system_bytes) -> None:
        self._key = random_bytes(KEY_BYTES)
        self._count = 0
        self._generator = torch.default_generator
        if device.type == "cuda":
            place = torch.cuda.current_device() if device.index is None else device.index
            self._generator = torch.cuda.default_generators[place]

    def start_next(self) -> None:
        """Start the stream of the next record, or of the next records that a GPU handles together."""
        self._count += 1
        counted = self._count.to_bytes(8, "big")
        digest = hashlib.blake2b(counted, key=self._key, digest_size=8).digest()
        self._generator.manual_seed(int.from_bytes(digest, "big"))


def poisson_batch(count: int, rate: float, random_bytes: RandomBytes = system_bytes) -> list[int]:
    """Draw the places of records that take part: each with probability ``rate`` (to 2^-64), independently."""
    threshold = int(rate * 2.0**64)
    if threshold >= 2**64:
        return list(range(count))
    words = np.frombuffer(random_bytes(8 * count), dtype=np.uint64)
    places: list[int] = np.flatnonzero(words < np.uint64(threshold)).tolist()
    return places


def standard_normal(count: int, random_bytes: RandomBytes = system_bytes) -> torch.Tensor:
    """Draw standard normal values, each the sum of four draws over two, (count,) float64 on the CPU.

    Box and Muller's transform of uniform numbers with 64 random bits. A radius reaches 9.4 standard
    deviations; the tail cut off has a probability of 3e-20.
    """
    values = torch.empty(count, dtype=torch.float64)
    for start in range(0, count, NOISE_CHUNK):
        number = min(NOISE_CHUNK, count - start)
        pairs = (number + 1) // 2
        radius = (-2.0 * _uniform((DRAWS, pairs), random_bytes).log()).sqrt_()
        angle = _uniform((DRAWS, pairs), random_bytes).mul_(2.0 * math.pi)
        # The summed draws come from different pairs: sine plus cosine of one pair is one draw.
        halves = [(radius * angle.cos()).sum(0), (radius * angle.sin()).sum(0)]
        values[start : start + number] = torch.cat(halves)[:number] / math.sqrt(DRAWS)
    return values


def _uniform(shape: tuple[int, int], random_bytes: RandomBytes) -> torch.Tensor:
    """Draw uniform numbers in (0, 1] from 64 random bits each."""
    words: NDArray[np.uint64] = np.frombuffer(random_bytes(8 * math.prod(shape)), dtype=np.uint64)
    return torch.from_numpy((words.astype(np.float64) + 0.5) * 2.0**-64).view(shape)
