"""Overhead of our code in local training: a silo's records per second relative to a bare PyTorch loop's.

The same network, records, order, augmentation off, loss and optimiser (torch's own class in the bare
loop); both sides read through a ``DataLoader``. Rounds of both take turns; the ratio is the median
over rounds within this run. The goal is 0.9.

    python benchmarks/local_training.py
    python benchmarks/local_training.py --model efficientnet_b0 --size 64 --batch-size 32 --device cuda
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tightframe.config.job import parse_job
from tightframe.config.site import SiteEntry
from tightframe.learning.batches import merge_single_tail
from tightframe.learning.optimizers import OptimizerSettings
from tightframe.learning.stages import Stage, cross_entropy
from tightframe.phases import Fold
from tightframe.rounds.context import SiloContext
from tightframe.rounds.setup import prepare, set_threads
from tightframe.rounds.silo.view import LocalSilo


class Images:
    """Random images in memory, so that only training is measured."""

    source, synthetic = "random images", True

    def __init__(self, count: int, shape: tuple[int, ...], classes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn((count, *shape), generator=generator)
        self._labels = torch.randint(classes, (count,), generator=generator)

    def labels(self, fold: Fold) -> Any:
        """Return the labels, (n,)."""
        return self._labels.numpy()

    def check(self, progress: Any = None) -> None:
        """Do nothing: no image can be missing."""

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Any:
        """Return (image, label) pairs."""
        return [(self._inputs[i], int(self._labels[i])) for i in range(len(self._labels))]


def ours(silo: LocalSilo, model: torch.nn.Module, local: Any) -> None:
    """Train an epoch as every method's silo does."""
    stage = Stage(terms=(cross_entropy(),), optimizer=OptimizerSettings.of(local), epochs=1)
    silo.fit(model, [stage])


def bare(records: Any, model: torch.nn.Module, local: Any, device: torch.device, *, last: bool) -> None:
    """Train the same epoch, written as in a tutorial."""
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(1)).tolist()
    loader: Any = DataLoader(records, batch_sampler=merge_single_tail(order, local.batch_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=local.learning_rate, momentum=local.momentum)
    model.train()
    for inputs, labels in loader:
        inputs = inputs.to(device)
        if last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels.to(device))
        loss.backward()
        optimizer.step()
        loss.item()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="small_cnn")
    parser.add_argument("--size", type=int, default=48, help="pixels")
    parser.add_argument("--records", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--contiguous", action="store_true", help="run the bare loop without channels last")
    options = parser.parse_args(arguments)
    set_threads(options.threads)
    job = parse_job(
        {
            "job_name": "speed",
            "method": "fedavg",
            "dataset": "fed_isic2019",
            "dataset_options": {"image_size": options.size},
            "model": options.model,
            "sites": ["a"],
            "min_sites": 1,
            "rounds": 1,
            "summation": "plain",
            "training": {"batch_size": options.batch_size, "augment": False, "weight_decay": 0.0},
        }
    )
    setup, device = prepare(job), torch.device(options.device)
    records: Any = Images(options.records, setup.setting.input_shape, setup.setting.num_classes)
    with tempfile.TemporaryDirectory() as folder:
        entry = SiteEntry(device=options.device)
        context = SiloContext("a", job, entry, run_dir=Path(folder), records=records)
        silo = LocalSilo(context, setup, device, 1)
        start = {name: value.clone() for name, value in setup.setting.build_model().state_dict().items()}
        mine, plain = silo.load(start), silo.load(start)
        if options.contiguous:
            plain = plain.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        kept, times = records.records("train"), {"ours": [], "bare": []}
        for turn in range(options.turns + 1):
            for name in ("ours", "bare") if turn % 2 else ("bare", "ours"):
                began = time.perf_counter()
                if name == "ours":
                    ours(silo, mine, job.training)
                else:
                    bare(kept, plain, job.training, device, last=not options.contiguous)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if turn:  # the first turn warms up
                    times[name].append(time.perf_counter() - began)
    ratios = [one / other for one, other in zip(times["bare"], times["ours"], strict=True)]
    for name, values in times.items():
        print(f"{name}: {options.records / statistics.median(values):.0f} records per second")
    print(
        f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); the goal is 0.9: "
        f"{'met' if statistics.median(ratios) >= 0.9 else 'MISSED'}"
    )


if __name__ == "__main__":
    main()
