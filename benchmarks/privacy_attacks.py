"""Attacks on class sums and on a global model, each compared with chance.

Two questions. *Inversion*: does a released class mean resemble one of its records more than any other
record of the class? *Inference*: does a release reveal whether a canary was among the records? Both are
tested against a permutation null: participants are drawn at random, so that if nothing is revealed any
other drawing would score as well, and the true one exceeds the null's 95 % quantile in one trial of 20.

The releases are the real ones (``privacy.releases.class_sums``, whole private runs). Seeds fix which
records are drawn; the noise comes from the operating system and has no seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm, rankdata
from torch import nn

from tightframe import federation, models
from tightframe.data.arrays import ArrayData
from tightframe.data.base import SiloData
from tightframe.data.image_sets import open_silos
from tightframe.learning import loop
from tightframe.learning.batches import merge_single_tail
from tightframe.learning.model_update import build_template
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import Stage, cross_entropy
from tightframe.privacy import accounting
from tightframe.privacy.events import Gaussian
from tightframe.privacy.releases.class_sums import class_sums, noise_for
from tightframe.privacy.releases.class_sums_plan import ClassSumsConfig
from tightframe.rounds.setup import prepare

Array = NDArray[Any]
CLASSES = 10  # of the digits
LEVEL = 0.05


@dataclass(frozen=True)
class Pool:
    """Records for trying attacks.

    Attributes:
        features: (n, d) float64, of unit norm, which is the clip.
        labels: (n,).
        known: class -> mean of *other* records of the class, (d,), which the attacker knows.
    """

    features: Array
    labels: Array
    known: Mapping[int, Array]

    def of_class(self, label: int) -> Array:
        """Return the features of a class, (m, d)."""
        features: Array = self.features[self.labels == label]
        return features


def stacked(silo: SiloData, fold: Any = "train") -> tuple[Array, Array]:
    """Return all inputs (n, ...) and labels (n,) of a fold."""
    records: Any = silo.records(fold)
    inputs = np.stack([records[place][0].numpy() for place in range(len(silo.labels(fold)))])
    return inputs, silo.labels(fold)


def digits_pool(seed: int, *, epochs: int = 20, widths: Sequence[int] = (16, 64)) -> Pool:
    """Return features of half of the digits; the attacker knows the other half, which trained the network."""
    silos = open_silos("digits", partition="iid", silos=2, partition_seed=seed, test="own")
    (inputs, labels), (own, own_labels) = (stacked(silo) for silo in silos.values())
    torch.manual_seed(seed)
    spec = models.get("small_cnn")
    model: Any = spec.build(spec.options.model_validate({"widths": list(widths)}), inputs.shape[1:], CLASSES)
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    batches = [
        (torch.from_numpy(inputs[part]), torch.from_numpy(labels[part]))
        for part in merge_single_tail(shuffled, 32)
    ]
    settings = OptimizerSettings(learning_rate=0.05, momentum=0.9)
    stage = Stage((cross_entropy(),), settings, epochs=epochs)
    loop.fit(model, lambda epoch: iter(batches), [stage], device="cpu")
    others, other_labels = _unit(model, inputs, labels)
    known = {label: others[other_labels == label].mean(0) for label in range(CLASSES)}
    return Pool(*_unit(model, own, own_labels), known)


@torch.no_grad()
def _unit(model: Any, inputs: Array, labels: Array) -> tuple[Array, Array]:
    """Return features of unit norm and their labels, without the few of norm zero."""
    features = model.features(torch.from_numpy(inputs)).double().numpy()
    norms = np.linalg.norm(features, axis=1)
    return features[norms > 0] / norms[norms > 0, None], labels[norms > 0]


def release_noise(epsilon: float | None, delta: float) -> float | None:
    """Return the noise multiplier of a release that costs ``epsilon``; None without privacy.

    The average of R releases with the same total cost has the noise of this one.
    """
    if epsilon is None:
        return None
    return accounting.solve(lambda noise: [Gaussian(noise)], epsilon=epsilon, delta=delta)


def released(features: Array, owners: Array, trials: int, noise: float | None) -> Array:
    """Return class sums as the server opens them, with the least promised noise: a class for each trial.

    Args:
        features: (r, d) of all records.
        owners: (r,) the trial to which each belongs.
        trials: T.
        noise: multiplier; None adds none.

    Returns:
        (T, d + 1): the sum of the features, and 0.3 of the number of records.
    """
    config = ClassSumsConfig(noise_multiplier=1.0 if noise is None else noise)
    units = class_sums(torch.from_numpy(features), torch.from_numpy(owners), trials, config)
    if noise is not None:
        units += noise_for(tuple(units.shape), config, honest=1)
    sums: Array = config.as_numbers(units.numpy())
    return sums


def invert(
    pool: Pool,
    epsilon: float | None,
    records: int,
    *,
    seed: int,
    trials: int = 200,
    permutations: int = 199,
    delta: float = 1e-5,
) -> dict[str, Any]:
    """Measure how much a released class mean of a few records resembles one of them.

    Each trial draws a class and ``records`` of its records. The score is the cosine between the released
    mean and the nearest record in it; the null's scores are the same for other drawings from the class.
    A stronger attacker, who knows the number of records, first subtracts the class's known mean from both.

    Returns:
        ``cosine`` and ``centred``, each with ``score`` (mean over trials), ``null`` (means of its 5, 50 and
        95 % quantiles), ``beyond`` (part of trials with p <= 0.05) and ``top`` (part of trials in which the
        record nearest to the mean took part); ``top_chance``.
    """
    rng = np.random.default_rng([seed, records])
    noise = release_noise(epsilon, delta)
    usable = [label for label in sorted(pool.known) if len(pool.of_class(label)) > 2 * records]
    drawn = [usable[rng.integers(len(usable))] for _ in range(trials)]
    chosen = [rng.permutation(len(pool.of_class(label)))[:records] for label in drawn]
    members = np.concatenate([pool.of_class(label)[own] for label, own in zip(drawn, chosen, strict=True)])
    totals = released(members, np.repeat(np.arange(trials), records), trials, noise)[:, :-1]
    rows: dict[str, list[tuple[float, ...]]] = {"cosine": [], "centred": []}
    for label, own, total in zip(drawn, chosen, totals, strict=True):
        records_of, known = pool.of_class(label), pool.known[label]
        others = np.argsort(rng.random((permutations, len(records_of))), axis=1)[:, :records]
        for name, shift in (("cosine", 0.0 * known), ("centred", known)):
            cosines = cosine(records_of - shift, total / records - shift)
            null, score = cosines[others].max(1), float(cosines[own].max())
            quantiles = np.quantile(null, (0.05, 0.5, 0.95))
            hits = (p_value(score, null) <= LEVEL, cosines.argmax() in own)
            rows[name].append((score, *quantiles, *map(float, hits)))
    summed = {name: [float(np.mean(item)) for item in zip(*own, strict=True)] for name, own in rows.items()}
    chance = statistics.fmean(records / len(pool.of_class(label)) for label in drawn)
    common = {"epsilon": epsilon, "noise_multiplier": noise, "records": records, "trials": trials}
    return {**common, "top_chance": chance} | {
        name: {"score": own[0], "null": own[1:4], "beyond": own[4], "top": own[5]}
        for name, own in summed.items()
    }


def cosine(rows: Array, vector: Array) -> Array:
    """Return the cosine of each row (n, d) with a vector (d,)."""
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(vector)
    cosines: Array = rows @ vector / np.maximum(norms, 1e-300)
    return cosines


def infer_from_sums(
    pool: Pool,
    epsilon: float | None,
    *,
    seed: int,
    records: int = 20,
    together: int = 1,
    trials: int = 2000,
    permutations: int = 999,
    delta: float = 1e-5,
) -> list[dict[str, Any]]:
    """Test whether a class's released sum reveals that a canary was among its records.

    One attacker knows all other records: no attack on this release is stronger. The other knows the canary
    alone.

    Args:
        pool: the records.
        epsilon: of the release, for one record; None without privacy.
        seed: of the drawings.
        records: number of other records of the class in the sum.
        together: number of records that are either all in the sum or all absent: 1 for a canary, more for a
            site's records of the class, to test whether the site took part.
        trials: number of sums.
        permutations: of the coins.
        delta: of the release.
    """
    rng = np.random.default_rng([seed, 1])
    noise = release_noise(epsilon, delta)
    classes = [pool.of_class(label) for label in np.unique(pool.labels)]
    classes = [own for own in classes if len(own) >= records + together]
    drawn = np.stack(
        [
            own[rng.permutation(len(own))[: records + together]]
            for own in (classes[rng.integers(len(classes))] for _ in range(trials))
        ]
    )
    present = rng.permutation(trials) < trials // 2
    there = np.ones((trials, records + together), bool)
    there[:, :together] = present[:, None]
    owners = np.repeat(np.arange(trials)[:, None], records + together, axis=1)
    totals = released(drawn[there], owners[there], trials, noise)
    rest, canaries = (
        released(drawn[part].reshape(-1, drawn.shape[2]), owners[part].reshape(-1), trials, None)
        for part in (np.s_[:, together:], np.s_[:, :together])
    )
    norms = np.maximum(np.linalg.norm(totals[:, :-1], axis=1), 1e-300)
    what = "canary" if together == 1 else "site"
    scores = {
        # The likelihood ratio of normal noise, up to a factor that all trials share.
        "knows all other records": ((totals - rest - canaries / 2) * canaries).sum(1),
        f"knows the {what} alone": (totals * canaries)[:, :-1].sum(1) / norms,
    }
    bound = 1.0 if noise is None else float(norm.cdf(together / (noise * math.sqrt(2))))
    source = "class sums" if together == 1 else f"class sums, a site's {together}"
    common = {"from": source, "epsilon": epsilon, "noise_multiplier": noise, "at_most": bound}
    return [
        {**common, "attacker": attacker, "runs": 1}
        | judge([(values, present)], permutations=permutations, seed=seed)
        for attacker, values in scores.items()
    ]


def with_canaries(
    silos: Mapping[str, SiloData], each: int, seed: int
) -> tuple[dict[str, SiloData], tuple[Array, Array, Array]]:
    """Add mislabelled records to the silos, each kept or left out by a coin.

    Returns:
        The silos, and all canaries' inputs (m, ...), wrong labels (m,) and coins (m,).
    """
    rng = np.random.default_rng([seed, 2])
    mixed: dict[str, SiloData] = {}
    canaries = []
    for name, silo in silos.items():
        folds = {fold: stacked(silo, fold) for fold in ("train", "validation", "test")}
        inputs, labels = folds["train"]
        order = rng.permutation(len(labels))
        own, rest = order[:each], np.sort(order[each:])
        wrong = (labels[own] + rng.integers(1, CLASSES, size=len(own))) % CLASSES
        coins = rng.permutation(len(own)) < len(own) // 2
        folds["train"] = (
            np.concatenate([inputs[rest], inputs[own[coins]]]),
            np.concatenate([labels[rest], wrong[coins]]),
        )
        mixed[name] = ArrayData(folds, source=silo.source, num_classes=CLASSES)  # type: ignore[arg-type]
        canaries.append((inputs[own], wrong, coins))
    return mixed, tuple(np.concatenate(item) for item in zip(*canaries, strict=True))  # type: ignore[return-value]


def infer_from_models(
    job_of: Callable[[int, float | None, Sequence[str]], Any],
    silos_of: Callable[[int], Mapping[str, SiloData]],
    epsilon: float | None,
    *,
    seeds: Sequence[int],
    canaries: int = 20,
    permutations: int = 999,
    delta: float = 1e-5,
) -> dict[str, Any]:
    """Test whether the final global model's loss on mislabelled canaries reveals that it was trained on them.

    Args:
        job_of: returns the job of a seed and an epsilon, for these silos.
        silos_of: returns a seed's silos.
        epsilon: None without privacy.
        seeds: one run each.
        canaries: number in each silo; a coin decides whether each takes part.
        permutations: of the coins, within each run.
        delta: of the jobs.
    """
    runs = []
    for seed in seeds:
        silos, (inputs, labels, present) = with_canaries(silos_of(seed), canaries, seed)
        job = job_of(seed, epsilon, list(silos))
        result = federation.run_job(job, data=silos)
        model = build_template(prepare(job).setting)
        model.load_state_dict(dict(result.state.model))
        runs.append((-losses(model, inputs, labels), present))
    return {
        "from": "global model",
        "epsilon": epsilon,
        "noise_multiplier": None,
        "at_most": auc_bound(epsilon, delta),
        "attacker": "knows the canary alone",
        "runs": len(runs),
    } | judge(runs, permutations=permutations, seed=seeds[0])


@torch.no_grad()
def losses(model: nn.Module, inputs: Array, labels: Array) -> Array:
    """Return the cross-entropy of each record, (n,)."""
    model.eval()
    logits = model(torch.from_numpy(inputs)).double()
    values = nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="none")
    return np.nan_to_num(values.numpy(), nan=1e4, posinf=1e4)


def judge(runs: Sequence[tuple[Array, Array]], *, permutations: int, seed: int) -> dict[str, Any]:
    """Return the AUC of the scores for the coins, averaged over runs, and its permutation null.

    Args:
        runs: scores (m,) and coins (m,) of each; coins are permuted within a run.
        permutations: number of permutations.
        seed: of the permutations.
    """
    rng = np.random.default_rng([seed, 3])
    score = statistics.fmean(auc(scores, coins) for scores, coins in runs)
    ranks = [(rankdata(scores), int(coins.sum())) for scores, coins in runs]
    null = np.zeros(permutations)
    for own, hits in ranks:
        order = np.argsort(rng.random((permutations, len(own))), axis=1)[:, :hits]
        null += _area(own[order].sum(1), hits, len(own) - hits) / len(runs)
    return {
        "canaries": sum(len(scores) for scores, _ in runs),
        "auc": score,
        "null": [float(item) for item in np.quantile(null, (0.05, 0.5, 0.95))],
        "p": p_value(score, null),
    }


def auc(scores: Array, present: Array) -> float:
    """Return the probability that a present canary scores above an absent one; ties count half."""
    hits = int(present.sum())
    return float(_area(rankdata(scores)[present].sum(), hits, len(scores) - hits))


def _area(rank_sum: Any, hits: int, misses: int) -> Any:
    return (rank_sum - hits * (hits + 1) / 2) / (hits * misses)


def p_value(score: float, null: Array) -> float:
    """Return the part of the drawings, including the true one, that score at least as high."""
    return float((1 + (null >= score).sum()) / (1 + len(null)))


def auc_bound(epsilon: float | None, delta: float) -> float:
    """Return the largest expected AUC of any attack on an (epsilon, delta)-private release.

    It is the area under ``min(1, e^eps x + delta, 1 - e^-eps (1 - delta - x))`` over false alarms x.

    >>> round(auc_bound(1e-9, 0.0), 6), auc_bound(None, 1e-5)
    (0.5, 1.0)
    """
    if epsilon is None:
        return 1.0
    alarms = np.concatenate([np.geomspace(1e-12, 1e-3, 20_000), np.linspace(1e-3, 1, 20_001)])
    steep, flat = math.exp(epsilon) * alarms + delta, 1 - math.exp(-epsilon) * (1 - delta - alarms)
    return float(np.trapezoid(np.minimum(1.0, np.minimum(steep, flat)), alarms))
