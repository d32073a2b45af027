"""Difficulty of the synthetic twin: its only calibration, with plain cross-entropy.

Three ways to train one small CNN: FedAvg over the six centres (weights = training records), all
centres' records pooled, each centre alone; for the same number of epochs, scored by balanced
accuracy on the test folds of all centres together. The twin's constants were set once so that
FedAvg has something to learn in four rounds and something left to learn after them; no other
method was considered, and these numbers say nothing about real lesions.

    PYTHONPATH=custom python benchmarks/twin.py --out twin.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tightframe.data.isic import CLASS_NAMES, NUM_CENTERS, IsicOptions
from tightframe.data.isic.twin import TWIN_VERSION, TwinData
from tightframe.phases import stream_seed

WIDTHS = (32, 64, 128)
State = dict[str, torch.Tensor]


def build(seed: int) -> nn.Module:
    """Return three blocks of conv3x3 - GroupNorm(8) - ReLU - maxpool2, average pooling, linear head."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, width in zip((3, *WIDTHS[:-1]), WIDTHS, strict=True):
        layers += [
            nn.Conv2d(before, width, 3, padding=1, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], len(CLASS_NAMES))
    )


class Benchmark:
    """The twin's six silos and the pooled test fold.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.silos = [TwinData(center, IsicOptions(image_size=args.size)) for center in range(NUM_CENTERS)]
        self.weights = [len(silo.labels("train")) for silo in self.silos]
        test = [silo.records("test")[i] for silo in self.silos for i in range(len(silo.labels("test")))]
        self.test_inputs = torch.stack([inputs for inputs, _ in test])
        self.test_labels = np.array([label for _, label in test])

    def fit(
        self, model: nn.Module, centers: Sequence[int], epochs: int, seed: int, *, first: int = 0
    ) -> None:
        """Train with cross-entropy and SGD on the training folds of these centres.

        Args:
            model: trained in place.
            centers: centres whose training folds are used.
            epochs: passes over them.
            seed: of order and augmentation.
            first: number of the first epoch.
        """
        args = self.args
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
        model.train()
        for epoch in range(first, first + epochs):
            augment = [stream_seed(seed, "augment", epoch, c) if args.augment else None for c in centers]
            records = torch.utils.data.ConcatDataset(
                [
                    self.silos[c].records("train", augment_seed=s)
                    for c, s in zip(centers, augment, strict=True)
                ]
            )
            order = torch.Generator().manual_seed(stream_seed(seed, "order", epoch, *centers))
            for inputs, labels in DataLoader(records, args.batch, shuffle=True, generator=order):
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()

    def score(self, model: nn.Module) -> float:
        """Return the balanced accuracy on the pooled test fold: the mean recall of the eight classes."""
        model.eval()
        with torch.no_grad():
            guess = torch.cat([model(part) for part in self.test_inputs.split(256)]).argmax(1).numpy()
        return float(np.mean([np.mean(guess[self.test_labels == c] == c) for c in range(len(CLASS_NAMES))]))

    def fedavg(self, seed: int) -> list[float]:
        """Return the scores after each round of FedAvg."""
        model, local = build(seed), build(seed)
        scores = []
        for number in range(self.args.rounds):
            start = {name: value.clone() for name, value in model.state_dict().items()}
            mean = {name: torch.zeros_like(value) for name, value in start.items()}
            for center, weight in enumerate(self.weights):
                local.load_state_dict(start)
                self.fit(local, [center], self.args.epochs, seed, first=number * self.args.epochs)
                for name, value in local.state_dict().items():
                    mean[name] += value * (weight / sum(self.weights))
            model.load_state_dict(mean)
            scores.append(self.score(model))
        return scores

    def alone(self, centers: Sequence[int], seed: int) -> list[float]:
        """Return the scores of training on these centres' records together, once for each round's epochs."""
        model = build(seed)
        scores = []
        for number in range(self.args.rounds):
            self.fit(model, centers, self.args.epochs, seed, first=number * self.args.epochs)
            scores.append(self.score(model))
        return scores


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run every arm with every seed; return plain values."""
    torch.set_num_threads(1)
    benchmark = Benchmark(args)
    arms = {"fedavg": None, "pooled": list(range(NUM_CENTERS))} | {
        f"centre {center} alone": [center] for center in range(NUM_CENTERS)
    }
    rows: dict[str, Any] = {}
    for name, centers in arms.items():
        if args.arms and name.split()[0] not in args.arms:
            continue
        started = time.perf_counter()
        runs = [
            benchmark.fedavg(seed) if centers is None else benchmark.alone(centers, seed)
            for seed in args.seeds
        ]
        seconds = (time.perf_counter() - started) / (len(args.seeds) * args.rounds)
        rows[name] = {"balanced_accuracy_by_round": runs, "seconds_a_round": round(seconds, 2)}
        table = np.array(runs)
        print(
            f"{name:16s} by round {np.round(table.mean(0), 3)}  last: mean {table[:, -1].mean():.3f} "
            f"lowest {table[:, -1].min():.3f} highest {table[:, -1].max():.3f}  {seconds:.1f} s a round",
            flush=True,
        )
    return {
        "twin_version": TWIN_VERSION,
        "records": {"train": benchmark.weights, "test": len(benchmark.test_labels)},
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "model": f"conv3x3-GroupNorm8-ReLU-maxpool2 {WIDTHS}, average pooling, linear",
        "machine": f"{platform.machine()}, one thread, torch {torch.__version__}, numpy {np.__version__}",
        "results": rows,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4, help="local epochs per round")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--augment", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--arms", nargs="*", choices=["fedavg", "pooled", "centre"], help="default: all")
    args = parser.parse_args()
    result = measure(args)
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
