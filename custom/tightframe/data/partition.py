"""Partitions of a benchmark set over silos, drawn as in the papers that use them.

Pure functions of labels, parameters and a seed. Each returns one index array per silo, int64,
ascending, and no index is in two of them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tightframe.phases import stream_seed

Labels: TypeAlias = NDArray[np.int64]
Parts: TypeAlias = list[NDArray[np.int64]]
DirichletVariant = Literal["fednh", "fedetf", "fedmr"]

MIN_SIZE = 10
"""Least number of records of a silo, in the Dirichlet variants that require one."""
EVEN = 1e5
"""The Dirichlet parameter that FedMR's experiments call IID."""
_ATTEMPTS = {"fednh": 100, "fedmr": 10_000}


def class_disjoint(
    labels: Labels, silos: int, classes_per_silo: int, *, seed: int, num_classes: int | None = None
) -> Parts:
    """Draw PrhoCsigma: rho silos of sigma classes each, so that no silo has every class.

    Each silo has sigma slots. The first C slots, silo by silo, hold the classes 0, 1, 2, ... in order, so
    that as many classes as possible are used; each later slot is drawn uniformly from the classes that
    its silo does not hold yet. The shuffled records of a class are split evenly among the silos that
    hold it. With ``sigma = C`` the partition is IID, drawn as ``dirichlet(alpha=1e5, variant="fedmr")``.

    Source: the experiments of Fan et al., TMLR 2023 (FedMR). Their code splits twice, so that every
    silo has a second share that overlaps with those of others; here there is one split, and it is
    disjoint.

    Args:
        labels: class of each record, int64 (n,).
        silos: rho.
        classes_per_silo: sigma.
        seed: of every draw.
        num_classes: C; one more than the largest label by default.

    Returns:
        Indices of each silo. With fewer than C slots the remaining classes are not used.

    Raises:
        ValueError: if sigma is not in 1..C, a parameter is not positive, or with ``sigma = C`` there
            are too few records.

    >>> [part.tolist() for part in class_disjoint(np.array([0, 1, 2, 3]), 2, 2, seed=0)]
    [[0, 1], [2, 3]]
    """
    classes = _class_count(labels, silos, num_classes)
    _check_classes_per_silo(classes_per_silo, classes)
    if classes_per_silo == classes:
        try:
            return dirichlet(labels, silos, EVEN, variant="fedmr", seed=seed, num_classes=classes)
        except ValueError:  # its message names options that this partition does not have
            raise ValueError(
                f"Expected enough records for {silos} silos of all {classes} classes with {MIN_SIZE} or more "
                f"each, but got {len(labels)}: lower `silos` or `classes_per_silo`."
            ) from None
    draws = _generator(seed, "class_disjoint")
    held: list[list[int]] = []
    for silo in range(silos):
        mine: list[int] = []
        for slot in range(silo * classes_per_silo, (silo + 1) * classes_per_silo):
            rest = [label for label in range(classes) if label not in mine]
            mine.append(slot if slot < classes else rest[int(draws.integers(len(rest)))])
        held.append(mine)
    return _split_over_slots(labels, held, draws)


def shards(
    labels: Labels, silos: int, classes_per_silo: int, *, seed: int, num_classes: int | None = None
) -> Parts:
    """Draw Cx-100-c: c slots for each silo, dealt from random permutations of the classes.

    Random permutations of the classes are concatenated; silo k takes the entries
    ``k c .. k c + c - 1``, and the shuffled records of a class are split evenly over its slots. A silo
    whose entries span two permutations may get the same class twice: it has c slots, but then fewer than
    c classes.

    Source: Li and Zhan (FedRS, KDD 2021), used by Huang et al. (FedAvg_ETF): C10-100-2 gives 250
    records a slot, C10-100-5 100, C100-100-20 25.

    Args:
        labels: class of each record, int64 (n,).
        silos: 100 in the papers.
        classes_per_silo: c.
        seed: of every draw.
        num_classes: C; one more than the largest label by default.

    Returns:
        Indices of each silo.

    Raises:
        ValueError: if c is not in 1..C, or a parameter is not positive.
    """
    classes = _class_count(labels, silos, num_classes)
    _check_classes_per_silo(classes_per_silo, classes)
    draws = _generator(seed, "shards")
    slots = silos * classes_per_silo
    dealt = np.concatenate([draws.permutation(classes) for _ in range(-(-slots // classes))])[:slots]
    return _split_over_slots(labels, dealt.reshape(silos, classes_per_silo).tolist(), draws)


def dirichlet(
    labels: Labels,
    silos: int,
    alpha: float,
    *,
    variant: DirichletVariant = "fednh",
    seed: int,
    num_classes: int | None = None,
    min_size: int = MIN_SIZE,
) -> Parts:
    """Divide each class by a draw ``p ~ Dir(alpha)`` over the silos, in one of three ways.

    * ``fednh`` (default): class by class, silos that already hold ``n / K`` records or more get
      nothing of the class (``p`` is renormalised), and the class is cut at
      ``floor(cumsum(p) n_c)``. The whole partition is drawn again until every silo has
      ``min_size`` records, at most 100 times. The authors' code also exchanges records so that every
      silo has a second class; this is not done here.
    * ``fedmr``: the same rule, with up to 10,000 draws.
    * ``fedetf``: no cap and no minimum: ``round(p n_c)`` records for each silo in turn, the rest for the
      last one. A silo may be small, or empty.

    Source: Dai et al., AAAI 2023 (FedNH); Fan et al., TMLR 2023 (FedMR); Li et al., ICCV 2023
    (FedETF).

    Args:
        labels: class of each record, int64 (n,).
        silos: K.
        alpha: concentration; a small value gives uneven shares.
        variant: the paper whose rule is used.
        seed: of every draw.
        num_classes: C; one more than the largest label by default.
        min_size: records of the smallest silo; without effect on ``fedetf``.

    Returns:
        Indices of each silo; together all of them.

    Raises:
        ValueError: if a parameter is not positive, or no draw gave every silo ``min_size`` records.
    """
    classes = _class_count(labels, silos, num_classes)
    if not (np.isfinite(alpha) and alpha > 0):
        raise ValueError(f"Expected `alpha` to be positive and finite, but got {alpha}.")
    draws = _generator(seed, "dirichlet")
    if variant == "fedetf":
        return _uncapped(labels, silos, alpha, classes, draws)
    if variant not in _ATTEMPTS:
        raise ValueError(f"Expected `variant` to be 'fednh', 'fedetf' or 'fedmr', but got {variant!r}.")
    if min_size * silos > len(labels):
        raise ValueError(
            f"Expected at least {min_size * silos} records for {silos} silos of {min_size} or more, "
            f"but got {len(labels)}: lower `min_size` or the number of silos."
        )
    smallest = 0
    for _ in range(_ATTEMPTS[variant]):
        parts = _capped(labels, silos, alpha, classes, draws)
        least = min(len(part) for part in parts)
        if least >= min_size:
            return parts
        smallest = max(smallest, least)
    raise ValueError(
        f"Expected every silo to have {min_size} records or more, but in {_ATTEMPTS[variant]} draws with "
        f"alpha {alpha:g} the smallest of {silos} silos had at most {smallest}: "
        "raise `alpha`, or lower `min_size` or the number of silos."
    )


def iid(labels: Labels, silos: int, *, seed: int) -> Parts:
    """Shuffle all records and cut them into equal shares, which differ by at most one record.

    Args:
        labels: class of each record, int64 (n,); only their number matters.
        silos: K.

    Raises:
        ValueError: if ``silos`` is not positive.
    """
    _class_count(labels, silos, None)
    order = _generator(seed, "iid").permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, silos)]


def follow(train_labels: Sequence[Labels], test_labels: Labels, *, seed: int) -> Parts:
    """Divide a test set like the training set: each class in proportion to the silos' records of it.

    A class that no silo trains on is divided evenly, so that together the silos always have the whole
    test set, and pooled results are those of the whole test set.

    Args:
        train_labels: class of each training record of each silo.
        test_labels: class of each record of the test set, int64 (n,).

    Returns:
        Indices into the test set, one array per silo.
    """
    classes = int(
        max((int(labels.max()) for labels in (*train_labels, test_labels) if len(labels)), default=0)
    )
    held = np.stack([np.bincount(labels, minlength=classes + 1) for labels in train_labels]).astype(float)
    draws = _generator(seed, "follow")
    parts: list[list[NDArray[np.int64]]] = [[] for _ in train_labels]
    for label in range(classes + 1):
        members = draws.permutation(np.flatnonzero(test_labels == label))
        weights = held[:, label] if held[:, label].any() else np.ones(len(train_labels))
        cuts = np.rint(np.cumsum(weights) / weights.sum() * len(members)).astype(np.int64)[:-1]
        for part, piece in zip(parts, np.split(members, cuts), strict=True):
            part.append(piece)
    return [_joined(pieces) for pieces in parts]


def _split_over_slots(labels: Labels, held: Sequence[Sequence[int]], draws: np.random.Generator) -> Parts:
    """Shuffle the records of each class and split them evenly over the slots of that class."""
    parts: list[list[NDArray[np.int64]]] = [[] for _ in held]
    for label in sorted({label for mine in held for label in mine}):
        owners = [silo for silo, mine in enumerate(held) for slot in mine if slot == label]
        members = draws.permutation(np.flatnonzero(labels == label))
        for silo, piece in zip(owners, np.array_split(members, len(owners)), strict=True):
            parts[silo].append(piece)
    return [_joined(pieces) for pieces in parts]


def _capped(labels: Labels, silos: int, alpha: float, classes: int, draws: np.random.Generator) -> Parts:
    """Draw a partition in which a silo that has its even share of the records gets no further class."""
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(silos)]
    sizes = np.zeros(silos, dtype=np.int64)
    for label in range(classes):
        members = draws.permutation(np.flatnonzero(labels == label))
        shares = draws.dirichlet(np.full(silos, alpha))
        if len(members) == 0:
            continue
        # While a record is left, `sizes` sum to less than n, so at least one silo is open.
        is_open = sizes < len(labels) / silos
        shares = np.where(is_open, shares, 0.0)
        if not shares.any():  # with a tiny alpha full silos may have all of the mass
            shares = is_open.astype(float)
        # Divided by its own last value, so that a full last silo gets exactly nothing.
        running = np.cumsum(shares)
        cuts = np.floor(running / running[-1] * len(members))
        for silo, piece in enumerate(np.split(members, cuts.astype(np.int64)[:-1])):
            parts[silo].append(piece)
            sizes[silo] += len(piece)
    return [_joined(pieces) for pieces in parts]


def _uncapped(labels: Labels, silos: int, alpha: float, classes: int, draws: np.random.Generator) -> Parts:
    """Draw a partition with rounded shares in turn; the last silo takes the rest."""
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(silos)]
    for label in range(classes):
        members = draws.permutation(np.flatnonzero(labels == label))
        shares = draws.dirichlet(np.full(silos, alpha))
        cuts = np.cumsum(np.rint(shares[:-1] * len(members)).astype(np.int64))
        for part, piece in zip(parts, np.split(members, np.minimum(cuts, len(members))), strict=True):
            part.append(piece)
    return [_joined(pieces) for pieces in parts]


def _joined(pieces: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.sort(np.concatenate([np.zeros(0, np.int64), *pieces]).astype(np.int64))


def _generator(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng(stream_seed(seed, "partition", purpose))


def _class_count(labels: Labels, silos: int, num_classes: int | None) -> int:
    """Return C, from the argument or the labels.

    Raises:
        ValueError: if there is no silo, labels are not of shape (n,), or a label is not in [0, C).
    """
    if silos < 1:
        raise ValueError(f"Expected `silos` to be at least 1, but got {silos}.")
    if labels.ndim != 1 or len(labels) == 0:
        raise ValueError(f"Expected `labels` of shape (n,) with n of at least 1, but got {labels.shape}.")
    classes = int(labels.max()) + 1 if num_classes is None else num_classes
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f"Expected `labels` in [0, {classes}), but got values from {labels.min()} to {labels.max()}."
        )
    return classes


def _check_classes_per_silo(classes_per_silo: int, classes: int) -> None:
    if not 1 <= classes_per_silo <= classes:
        raise ValueError(f"Expected `classes_per_silo` to be 1..{classes}, but got {classes_per_silo}.")
