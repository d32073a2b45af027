from __future__ import annotations

import numpy as np
import pytest

from tightframe.data.validation import target_size, validation_mask


def cell(counts: list[int]) -> tuple[np.ndarray, list[str]]:
    labels = np.repeat(np.arange(len(counts)), counts).astype(np.int64)
    return labels, [f"image-{index}" for index in range(len(labels))]


def test_each_class_gets_its_share_and_keeps_some_for_training() -> None:
    counts = [0, 1, 2, 3, 4, 5, 6, 10, 100, 3363]
    labels, names = cell(counts)
    mask = validation_mask(labels, names)
    got = np.bincount(labels[mask], minlength=len(counts)).tolist()
    # floor(0.15 n + 0.5), at least 1 from 4 on.
    assert got == [0, 0, 0, 0, 1, 1, 1, 2, 15, 504]
    assert got == [target_size(count) for count in counts]


def test_choice_depends_on_names_only_and_not_on_their_order() -> None:
    labels, names = cell([40, 25, 7])
    mask = validation_mask(labels, names)
    chosen = {name for name, out in zip(names, mask, strict=True) if out}
    order = np.random.default_rng(0).permutation(len(labels))
    again = validation_mask(labels[order], [names[i] for i in order])
    assert {names[i] for i, out in zip(order, again, strict=True) if out} == chosen
    other = validation_mask(labels, [f"x{name}" for name in names])
    assert not np.array_equal(mask, other), "other names must lead to another choice"


def test_the_choice_is_frozen() -> None:
    labels, names = cell([20])
    mask = validation_mask(labels, names)
    # Another choice would move records between the folds of sites that have selected on them.
    assert np.flatnonzero(mask).tolist() == [5, 6, 13]


def test_a_lesion_stays_on_one_side() -> None:
    rng = np.random.default_rng(1)
    lesion = rng.integers(0, 150, 400)
    labels = (lesion % 4).astype(np.int64)  # images of a lesion share its diagnosis
    mask = validation_mask(labels, [f"lesion-{number}" for number in lesion])
    assert not set(lesion[mask]) & set(lesion[~mask])
    for label in range(4):
        share = mask[labels == label].mean()
        assert 0.10 <= share <= 0.16, f"class {label}: {share}"


def test_a_class_of_large_lesions_still_gets_one_to_validation() -> None:
    # Two lesions of two images: the target is 1, and no lesion is as small as that.
    mask = validation_mask(np.zeros(4, dtype=np.int64), ["a", "a", "b", "b"])
    assert mask.sum() == 2


def test_a_class_of_one_lesion_stays_in_training() -> None:
    mask = validation_mask(np.zeros(6, dtype=np.int64), ["a"] * 6)
    assert not mask.any()


@pytest.mark.parametrize("seed", range(20))
def test_training_keeps_every_class(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 60))
    labels = rng.integers(0, 5, size)  # lesions of mixed classes, which a wrong file may have
    groups = [f"g{number}" for number in rng.integers(0, max(2, size // 2), size)]
    mask = validation_mask(labels, groups)
    assert set(labels[~mask]) == set(labels)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="one group for each label"):
        validation_mask(np.zeros(2, dtype=np.int64), ["a"])


def test_no_record() -> None:
    assert validation_mask(np.zeros(0, dtype=np.int64), []).shape == (0,)
