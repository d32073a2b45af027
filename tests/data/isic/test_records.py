from __future__ import annotations

import torch

from tightframe.data.isic.records import ImageCache


def test_the_cache_keeps_up_to_its_limit_and_makes_the_rest_again() -> None:
    made: list[str] = []

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return torch.full((3, 4, 4), len(name), dtype=torch.uint8)

    cache = ImageCache(limit=100)  # two images of 48 bytes
    for _ in range(2):
        for name in ("a", "bb", "ccc"):
            assert cache.get(name, lambda name=name: make(name))[0, 0, 0] == len(name)
    assert made == ["a", "bb", "ccc", "ccc"]
    assert cache.used == 96
