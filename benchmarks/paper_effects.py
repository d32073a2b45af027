"""Settings in which a method's effect shows in a minute on a CPU, and the order in which all runs are made.

A table of an effect compares methods with the first row, by paired differences over seeds. Settings were
tried on seed 900, or are those of an earlier measurement; the tables have seeds from 10 on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paper_layout import Column, Measure, Place, Row, Table

FIRST_SEED, SEEDS = 10, 5
TWO = ("FedAvg", "FedNH")
MLP: Mapping[str, Any] = {"model": "mlp", "model_options": {"widths": [200, 100]}, "batch_size": 32}
RESNET: Mapping[str, Any] = {"model": "resnet18", "model_options": {}, "batch_size": 64}
CONV: Mapping[str, Any] = {"model": "conv2cifar", "model_options": {}, "batch_size": 64}
TRAINED: Mapping[str, Any] = {
    "rounds": 10,
    "epochs": 5,
    "learning_rate": 0.01,
    "subset": 2000,
    "test_subset": 2000,
}
SCAFFOLD = "scaffold:momentum=normalise"
HEADLINE: Mapping[str, str] = {
    "FedAvg": "fedavg",
    "FedETF": "fedetf",
    "FedNH": "fednh:scale=1",
    "FedAvg_ETF": "fedavg_etf",
    "FedMR": "fedmr",
    "FedROD": "fedrod",
    "FedRS": "fedrs",
    "CCVR": "ccvr",
    "FedOpt": "fedopt",
}
OTHERS: Mapping[str, str] = {
    "SCAFFOLD": SCAFFOLD,
    "MOON": "moon",
    "FedProx": "fedprox",
    "FedNova": "fednova",
    "FedDyn": "feddyn",
    "FedDC": "feddc:momentum=normalise",
    "FedProc": "fedproc:projection_width=null",
    "FedMMD": "fedmmd",
    "FedAwS": "fedaws",
    "FedCurv": "fedcurv",
    "CReFF": "creff",
    "FedRS (soft)": "fedrs:form=soft",
    "FedOpt (Yogi)": "fedopt:variant=yogi",
    "SCAFFOLD/RS": "combine:local=scaffold,server=scaffold,scaffold_momentum=normalise,loss=fedrs",
    "MOON + ETF": "combine:head=etf,local=moon",
}
ALL = {**HEADLINE, **OTHERS}
MR_WEIGHTS: Mapping[str, str] = {
    "FedAvg": "fedavg",
    "FedMR": "fedmr",
    **{
        f"FedMR ({', '.join(f'{key} {value}' for key, value in options.items())})": "fedmr:"
        + ",".join(
            f"mu_{key}={value}" if key != "support" else f"inter_support={value}"
            for key, value in options.items()
        )
        for options in (
            {"inter": 0, "intra": 0.4},
            {"inter": 0.3, "intra": 0},
            {"inter": 1, "intra": 0.4},
            {"inter": 3, "intra": 0.4},
            {"inter": 1, "intra": 0.4, "support": "all"},
            {"inter": 0.3, "intra": 2},
        )
    },
}


def effect(
    name: str,
    title: str,
    methods: Mapping[str, str],
    *,
    data: str = "fashion_mnist",
    partition: str,
    scale: Mapping[str, Any],
    measures: Mapping[str, Measure] | None = None,
    job: Mapping[str, Any] | None = None,
    first_seed: int = FIRST_SEED,
) -> Table:
    """Return a table that compares methods with the first one, at the small scale alone."""
    place = Place(data, partition, partition, small_scale=scale, scale=scale, job=job or {}, replaced=False)
    columns = tuple(
        Column(shown, (place,), measure)
        for shown, measure in (measures or {"accuracy, %": "accuracy"}).items()
    )
    rows = tuple(Row(row, {"": method}, (None,) * len(columns)) for row, method in methods.items())
    first = next(iter(methods))
    return Table(name, title, columns, rows, baseline=first, first_seed=first_seed, seeds=SEEDS)


def of_fashion(name: str, partition: str, network: str, methods: Mapping[str, str], **more: Any) -> Table:
    """Return a table of 2,000 Fashion-MNIST images, or as many as ``subset`` says."""
    scale = {**TRAINED, **{"mlp": MLP, "conv2cifar": CONV, "resnet18": RESNET}[network], **more}
    changed = "".join(f", {key} {value}" for key, value in more.items() if key != "subset")
    title = f"Fashion-MNIST, {scale['subset']:,} images, {partition}, {network}{changed}"
    return effect(name, title, methods, partition=partition, scale=scale)


def fx_nh() -> Table:
    """FedNH's effect with its paper's network and partition, in half the rounds."""
    chosen = {name: HEADLINE[name] for name in TWO}
    return of_fashion("fx_nh", "Dir0.3x10-fednh", "conv2cifar", {**chosen, **HEADLINE}, rounds=5)


def fx_nh10() -> Table:
    """The same in ten rounds."""
    chosen = {name: HEADLINE[name] for name in TWO}
    return of_fashion("fx_nh10", "Dir0.3x10-fednh", "conv2cifar", {**chosen, **HEADLINE})


def fx_c2() -> Table:
    """All methods on ten silos of two classes, conv2cifar."""
    return of_fashion("fx_c2", "P10C2", "conv2cifar", ALL)


def fx_mlp() -> Table:
    """All methods on ten silos of two classes, a perceptron without normalisation."""
    return of_fashion("fx_mlp", "P10C2", "mlp", ALL)


def fx_r18() -> Table:
    """FedMR with its paper's network, for a GPU."""
    chosen = {name: HEADLINE[name] for name in ("FedAvg", "FedMR", "FedETF")}
    return of_fashion("fx_r18", "P10C2", "resnet18", chosen, subset=4000, rounds=12)


def fx_spread() -> Table:
    """FedMR's table 7 in the same runs: the spread of the features' eigenvalues."""
    chosen = {name: HEADLINE[name] for name in ("FedAvg", "FedMR")}
    title = "Fashion-MNIST, 2,000 images, P10C2, mlp, table 7"
    scale, measures = {**TRAINED, **MLP}, {"spread": "spread"}
    return effect("fx_spread", title, chosen, partition="P10C2", scale=scale, measures=measures)


def fx_mlp5() -> Table:
    """The same on five silos of two classes."""
    return of_fashion("fx_mlp5", "P5C2", "mlp", ALL)


def fx_ilc() -> Table:
    """FedILC on Color-MNIST, out of distribution."""
    network = {
        "model": "mlp",
        "model_options": {"widths": [390, 390], "single_logit": True},
        "rounds": 300,
        "epochs": 1,
        "last": 1,
    }
    common = "learning_rate=3e-3,weight_decay=0.01"
    methods = {
        "FedSGD": f"fedilc:variant=fedsgd,{common}",
        "Fishr+Intra-Geo": f"fedilc:variant=intra_geo,{common},penalty_weight=15",
        "Geometric": f"fedilc:variant=geometric,{common}",
        "Fishr+Inter-Geo": f"fedilc:variant=inter_geo,{common},penalty_weight=15",
    }
    measures: dict[str, Measure] = {"loss": "loss", "accuracy": "rate"}
    return effect(
        "fx_ilc",
        "Color-MNIST, out of distribution",
        methods,
        data="color_mnist",
        partition="natural",
        scale=network,
        measures=measures,
    )


def fx_mr() -> Table:
    """FedMR's weights on five silos of two classes: a search, on seeds that no other table has."""
    table = of_fashion("fx_mr", "P5C2", "mlp", MR_WEIGHTS, rounds=20)
    return Table(**{**vars(table), "first_seed": 1000, "seeds": 2})


def fx_mr10() -> Table:
    """The same on ten silos of two classes."""
    table = of_fashion("fx_mr10", "P10C2", "mlp", MR_WEIGHTS, rounds=20)
    return Table(**{**vars(table), "first_seed": 1000, "seeds": 2})


def fx_toy() -> Table:
    """Features of two numbers, which can be drawn as they are: FedMR's toy figure."""
    network = {"model": "mlp", "model_options": {"widths": [64, 2]}, "batch_size": 32}
    chosen = {name: HEADLINE[name] for name in ("FedAvg", "FedMR", "FedROD")}
    scale = {**TRAINED, **network, "rounds": 10}
    return effect(
        "fx_toy",
        "Fashion-MNIST, 2,000 images, P5C2, features of two numbers",
        chosen,
        partition="P5C2",
        scale=scale,
    )


EFFECTS: dict[str, Callable[[], Table]] = {
    made.__name__: made
    for made in (fx_nh, fx_nh10, fx_mlp, fx_r18, fx_spread, fx_c2, fx_mlp5, fx_ilc, fx_mr, fx_mr10, fx_toy)
}


@dataclass(frozen=True)
class Step:
    """A part of a table in the queue; None stands for all rows or columns, or the table's own seeds."""

    table: str
    rows: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    seeds: int | None = None


QUEUE: dict[str, tuple[Step, ...]] = {
    "cpu": (
        Step("fx_mlp", tuple(HEADLINE), seeds=2),
        Step("fx_toy", seeds=1),
        Step("fx_mr", seeds=1),
        Step("fx_nh", TWO),
        Step("fx_mlp", tuple(HEADLINE)),
        Step("fx_ilc", ("FedSGD", "Fishr+Intra-Geo")),
        Step("fx_mr"),
        Step("fx_mlp5", tuple(HEADLINE)),
        Step("fx_nh10", TWO, seeds=3),
        Step("fx_c2", ("FedAvg", "FedETF", "FedMR", "FedROD", "FedRS"), seeds=3),
        Step("fx_mr10"),
        Step("fx_mlp"),
        Step("fx_nh10", TWO),
        Step("fx_c2", tuple(HEADLINE), seeds=3),
        Step("fx_ilc"),
        Step("fx_nh", seeds=3),
        Step("fx_c2"),
        Step("mr1", seeds=3),
        Step("etf1", seeds=3),
        Step("nh1", seeds=3),
        Step("gmv1", seeds=3),
        Step("gmv2", seeds=3),
        Step("mr8", seeds=3),
        Step("mr2", seeds=3),
        Step("gmv4", seeds=3),
        Step("etf2", seeds=3),
        *(
            Step(name, seeds=3)
            for name in ("mr6", "mr7", "ilc1", "ilc2", "gmv5", "gmv6", "mr4", "mr5", "gmv3")
        ),
        Step("fx_mlp5"),
    ),
    "paper": (
        Step("mr1", ("FedAvg", "FedMR"), ("CIFAR-10 P10C2",), 3),
        Step("mr1", ("FedAvg", "FedMR"), ("CIFAR-10 P5C2", "FMNIST P5C2", "FMNIST P10C2"), 3),
        Step("etf1", ("FedAvg", "FedETF"), ("CIFAR-10 a=0.1 General", "CIFAR-10 a=0.1 Personal"), 3),
        Step("nh1", TWO, ("Dir(0.3) GM", "Dir(0.3) PM(V)", "Dir(0.3) PM(L)"), 3),
        Step("gmv4", columns=("E=2 C10-100-2",), seeds=3),
        Step("ilc1", seeds=5),
        *(Step(name, seeds=3) for name in ("mr1", "etf1", "nh1", "gmv1", "gmv2", "gmv4", "mr8", "mr2")),
        *(Step(name, seeds=3) for name in ("etf2", "mr6", "mr7", "mr4", "mr5", "gmv5", "gmv3", "ilc2")),
    ),
}
"""The most telling runs first."""
