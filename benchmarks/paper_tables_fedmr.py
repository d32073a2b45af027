"""FedMR's tables: rows, columns and printed numbers (Fan et al., TMLR 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paper_layout import WEIGHTS, Column, Place, Row, Table, numbers
from scales import HAM

FEDDC = "feddc:momentum=normalise"
OWN_SCORE = "Ours is the mean of the last rounds' accuracy, as everywhere in these benchmarks."
MR_METHODS = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox",
    "FedProc": "fedproc:projection_width=null",  # the same network for all
    "FedNova": "fednova",
    "MOON": "moon",
    "FedDyn": "feddyn",
    "FedDC": FEDDC,
    "FedMR": "fedmr:",
}
FIVE = ("P5C2", "P10C2", "P10C3", "P10C5", "IID")
FIVE_100 = ("P10C10", "P10C20", "P10C30", "P10C50", "IID")
MR1 = {
    "FMNIST": {
        "P5C2": "67.29,69.60,66.28,66.87,66.82,71.01,68.50,75.51",
        "P10C2": "67.33,67.76,69.08,48.44,67.93,67.16,67.36,74.97",
        "P10C3": "81.67,80.93,82.06,83.20,83.42,83.00,83.24,83.55",
        "P10C5": "88.53,89.22,89.23,88.86,88.98,88.38,89.22,90.04",
        "IID": "91.93,91.95,92.06,91.84,92.12,91.76,92.15,92.19",
        "mean": "79.35,79.89,79.74,75.84,79.87,80.26,80.09,83.45",
    },
    "SVHN": {
        "P5C2": "81.85,81.83,79.54,81.11,81.60,79.89,81.63,83.10",
        "P10C2": "78.92,79.60,78.75,66.86,79.83,76.24,78.96,82.47",
        "P10C3": "87.70,87.40,88.13,87.50,87.83,87.27,88.05,89.13",
        "P10C5": "91.20,91.24,91.63,92.09,91.16,90.17,91.64,92.18",
        "IID": "92.74,92.89,93.57,92.62,93.12,92.26,92.90,93.04",
    },
    "CIFAR-10": {
        "P5C2": "67.68,68.18,69.27,67.57,66.86,69.64,69.18,74.19",
        "P10C2": "67.27,71.09,67.02,57.79,67.61,67.74,67.64,73.32",
        "P10C3": "77.82,77.89,77.87,77.22,78.42,77.99,77.94,82.75",
        "P10C5": "88.22,88.34,88.19,88.20,88.00,88.35,88.14,89.06",
        "IID": "91.88,92.14,92.62,92.37,92.56,92.29,92.85,93.06",
    },
    "CIFAR-100": {
        "P10C10": "54.31,54.79,54.69,54.45,54.98,55.94,54.73,57.27",
        "P10C20": "64.81,65.37,64.98,65.79,65.75,65.02,65.21,65.81",
        "P10C30": "69.35,69.75,69.64,69.55,69.51,69.84,69.38,70.24",
        "P10C50": "71.28,71.35,72.13,71.25,71.54,71.25,72.11,72.17",
        "IID": "72.28,72.55,73.07,72.66,73.01,73.04,72.77,72.79",
    },
}
MR2 = {
    "CIFAR-10 P50C3": "75.46,77.46,76.27,74.12,76.51,75.52,76.03,79.58",
    "CIFAR-10 P100C3": "71.65,72.37,72.44,70.46,72.46,71.85,73.95,76.93",
    "CIFAR-100 P50C10": "49.84,51.17,51.94,50.22,52.19,50.53,51.17,53.36",
    "CIFAR-100 P100C10": "47.90,48.26,49.01,48.07,48.94,49.24,48.76,49.60",
    "ISIC2019": "73.14,75.41,75.26,73.62,75.46,75.07,75.25,76.55",
}
DATA = {"FMNIST": "fashion_mnist", "SVHN": "svhn", "CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}
NO_WEIGHT = ("fedmr:mu_intra=0", "fedmr:mu_inter=0")


def mr_place(data: str, partition: str) -> Place:
    """Return one of FedMR's partitions; CIFAR-100's has a tenth of the classes at the small scale."""
    wide = data == "CIFAR-100"
    if partition == "IID":
        return Place(DATA[data], "IIDx10", "IIDx10")
    silos, classes = partition.removeprefix("P").split("C")
    many = int(silos) > 10
    small = f"P{20 if many else silos}C{int(classes) // 10 if wide else classes}"
    return Place(DATA[data], partition, small, share=10 / int(silos) if many else None)


def mr_places(data: str) -> tuple[Place, ...]:
    """Return a data set's five partitions."""
    return tuple(mr_place(data, partition) for partition in (FIVE_100 if data == "CIFAR-100" else FIVE))


def by_columns(methods: Mapping[str, str], printed: Sequence[str]) -> tuple[Row, ...]:
    """Return rows from printed numbers that are given by column."""
    columns = [numbers(text) for text in printed]
    return tuple(
        Row(title, {"": method}, tuple(values[place] for values in columns))
        for place, (title, method) in enumerate(methods.items())
    )


def mr1() -> Table:
    """Return the table of accuracy on all partitions."""
    columns = [
        Column(f"{data} {name}", mr_places(data) if name == "mean" else (mr_place(data, name),))
        for data, printed in MR1.items()
        for name in printed
    ]
    rows = by_columns(MR_METHODS, [text for printed in MR1.values() for text in printed.values()])
    return Table("mr1", "FedMR, table 1: accuracy, %", tuple(columns), rows, (WEIGHTS, OWN_SCORE))


def mr2() -> Table:
    """Return the table with many silos and the medical data set."""
    places = [
        Place(HAM, "natural", "natural") if title == "ISIC2019" else mr_place(*title.split()) for title in MR2
    ]
    columns = tuple(Column(title, (place,)) for title, place in zip(MR2, places, strict=True))
    notes = (
        WEIGHTS,
        OWN_SCORE,
        "ISIC2019's column here shows the HAM four-centre subset: other images, other size.",
    )
    rows = by_columns(MR_METHODS, list(MR2.values()))
    return Table("mr2", "FedMR, table 2: accuracy, %, 10 silos a round", columns, rows, notes)


def mr4() -> Table:
    """Return the table of rounds to FedAvg's best."""
    columns = tuple(
        Column(name, (mr_place("CIFAR-100", name),), "reached") for name in ("P10C10", "P50C10", "P100C10")
    )
    printed = {
        "FedProx": "352,370,384",
        "FedProc": "357,381,389",
        "FedNova": "290,385,382",
        "MOON": "332,373,395",
        "FedDyn": "178,366,384",
        "FedDC": "275,393,387",
        "FedMR": "149,293,368",
    }
    rows = tuple(Row(title, {"": MR_METHODS[title]}, numbers(text)) for title, text in printed.items())
    notes = (
        WEIGHTS,
        "Printed: of 400 rounds. Ours is the number of rounds plus one where it is never reached.",
    )
    return Table("mr4", "FedMR, table 4: rounds to FedAvg's best, CIFAR-100", columns, rows, notes)


def mr5() -> Table:
    """Return the table of silos that submit prototypes."""
    columns = tuple(
        Column(f"{data} {name}", (mr_place(data, name),))
        for data, names in (
            ("CIFAR-10", ("P10C3", "P50C3", "P100C3")),
            ("CIFAR-100", ("P10C10", "P50C10", "P100C10")),
        )
        for name in names
    )
    rows = (
        Row("FedAvg", {"": "fedavg"}, numbers("77.82 75.46 71.65 54.31 50.22 47.90")),
        Row("FedMR, 50 %", {"": "fedmr:submitting=0.5"}, numbers("80.42 79.14 76.73 56.41 51.06 48.80")),
        Row("FedMR, 80 %", {"": "fedmr:submitting=0.8"}, numbers("80.27 79.43 76.87 56.73 52.57 48.88")),
        Row("FedMR, 100 %", {"": "fedmr:"}, numbers("82.75 79.58 76.93 57.27 53.36 49.60")),
    )
    notes = (WEIGHTS, OWN_SCORE, "FedAvg's P50C10 is printed as FedNova's of table 2.")
    return Table("mr5", "FedMR, table 5: silos that submit prototypes, accuracy, %", columns, rows, notes)


def mr6() -> Table:
    """Return the table of FedMR's two terms."""
    columns = tuple(Column(f"{data} mean", mr_places(data)) for data in DATA)
    rows = (
        Row("neither", {"": "fedavg"}, numbers("79.35/86.48/78.58/66.41".replace("/", " "))),
        Row("inter-class", {"": NO_WEIGHT[0]}, numbers("80.18/87.46/78.86/66.62".replace("/", " "))),
        Row("intra-class", {"": NO_WEIGHT[1]}, numbers("81.03/87.15/80.89/67.11".replace("/", " "))),
        Row("both", {"": "fedmr:"}, numbers("83.45/87.98/82.48/67.66".replace("/", " "))),
    )
    title = "FedMR, table 6: accuracy, %, mean over five partitions"
    return Table("mr6", title, columns, rows, (WEIGHTS, OWN_SCORE))


def mr7() -> Table:
    """Return the table of the features' spread."""
    columns = tuple(Column(name, (mr_place("FMNIST", name),), "spread") for name in FIVE)
    printed = {
        "FedAvg": "1201,1274,1055,814,640",
        "FedProx": "931,977,874,727,582",
        "FedProc": "1044,1074,955,739,522",
        "FedNova": "1234,1277,977,755,572",
        "MOON": "749,866,774,744,579",
        "FedDyn": "854,906,844,759,599",
        "FedDC": "1077,1104,784,766,572",
        "FedMR, intra-class only": "478,437,372,407,538",
        "FedMR": "570,538,566,579,635",
    }
    methods = {**MR_METHODS, "FedMR, intra-class only": NO_WEIGHT[1]}
    rows = tuple(Row(title, {"": methods[title]}, numbers(text)) for title, text in printed.items())
    notes = (
        WEIGHTS,
        "The data set of the printed numbers is not known to us; FMNIST is assumed. Ours: the last model's "
        "features of 128 test images, drawn by the seed; the spread grows with their width.",
    )
    title = "FedMR, table 7: spread of the 50 largest eigenvalues of the features' correlations"
    return Table("mr7", title, columns, rows, notes)


def mr8() -> Table:
    """Return the table of other methods with FedMR's prototypes added."""
    places = mr_places("FMNIST")
    columns = (
        Column("FMNIST mean, without", places, variant="without"),
        Column("FMNIST mean, with prototypes", places, variant="with"),
    )
    printed = {
        "FedProx": ("fedprox", "local=fedprox", "79.89,80.29"),
        "FedNova": ("fednova", "server=fednova", "75.84,78.76"),
        "MOON": ("moon", "local=moon", "79.87,80.12"),
        "FedDyn": ("feddyn", "local=feddyn,server=feddyn", "80.26,81.21"),
        "FedDC": (FEDDC, "local=feddc,server=feddc,feddc_momentum=normalise", "80.09,80.57"),
    }
    rows = [
        Row(title, {"without": alone, "with": f"combine:{parts},prototypes=fedmr"}, numbers(text))
        for title, (alone, parts, text) in printed.items()
    ]
    rows.append(Row("FedMR", {"without": NO_WEIGHT[1], "with": "fedmr:"}, numbers("81.03,83.45")))
    title = "FedMR, table 8: accuracy, %, mean over five partitions"
    return Table("mr8", title, columns, tuple(rows), (WEIGHTS, OWN_SCORE))
