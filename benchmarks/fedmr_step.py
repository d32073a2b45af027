"""Cost of FedMR's two terms relative to the cross-entropy step to which they are added.

    python benchmarks/fedmr_step.py --out fedmr_step.json

For each case, every repetition times a full cross-entropy step (forward, backward, SGD) and then,
on that step's real features, the forward and backward of each term alone. Times are medians; the
share is the terms' time over the step's, within one run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from tightframe import models
from tightframe.methods.fedmr import inter_class_loss, intra_class_loss


@dataclass(frozen=True)
class Case:
    """A network and a batch."""

    name: str
    backbone: str
    pixels: int
    batch: int
    classes: int


@dataclass(frozen=True)
class Result:
    """Medians in milliseconds, and the terms' share of the step in percent."""

    case: str
    backbone: str
    pixels: int
    batch: int
    classes: int
    width: int
    repeats: int
    cross_entropy_ms: float
    intra_ms: float
    inter_ms: float
    share_percent: float


CASES = (
    Case("dermoscopy", "efficientnet_b0", pixels=64, batch=64, classes=8),
    Case("100 classes", "resnet18", pixels=32, batch=128, classes=100),
)


def _milliseconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - start)


def measure(case: Case, repeats: int, device: torch.device) -> Result:
    """Time one case: one warm-up repetition, then ``repeats`` interleaved ones."""
    torch.manual_seed(0)
    spec = models.get(case.backbone)
    shape = (3, case.pixels, case.pixels)
    model = spec.build(spec.options(), shape, case.classes).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs = torch.randn(case.batch, *shape, device=device)
    labels = torch.randint(0, case.classes, (case.batch,), device=device)
    width = models.feature_width(model)
    prototypes = torch.rand(case.classes, width, device=device)
    valid = torch.ones(case.classes, dtype=torch.bool, device=device)
    kept: list[torch.Tensor] = []

    def cross_entropy_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        features = model.features(inputs)
        nn.functional.cross_entropy(model.head(features), labels).backward()
        optimizer.step()
        kept[:] = [features.detach().requires_grad_()]

    def intra() -> None:
        intra_class_loss(kept[0], labels).backward()

    def inter() -> None:
        inter_class_loss(kept[0], labels, prototypes, valid).backward()

    times: dict[str, list[float]] = {"step": [], "intra": [], "inter": []}
    for repetition in range(repeats + 1):
        for name, work in (("step", cross_entropy_step), ("intra", intra), ("inter", inter)):
            taken = _milliseconds(work, device)
            if repetition:
                times[name].append(taken)
    step, intra_ms, inter_ms = (statistics.median(times[name]) for name in ("step", "intra", "inter"))
    return Result(
        case.name,
        case.backbone,
        case.pixels,
        case.batch,
        case.classes,
        width,
        repeats,
        cross_entropy_ms=round(step, 3),
        intra_ms=round(intra_ms, 4),
        inter_ms=round(inter_ms, 4),
        share_percent=round(100 * (intra_ms + inter_ms) / step, 4),
    )


def main() -> None:
    """Print the table and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--repeats", type=int, default=30, help="timed repetitions (default 30)")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of torch (default 1)")
    parser.add_argument("--device", default="cpu", help="for example cuda (default cpu)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(
        f"torch {torch.__version__}, {place}, {arguments.threads} thread(s), medians of {arguments.repeats}"
    )
    print(f"{'case':<14}{'backbone':<18}{'CE step ms':>12}{'intra ms':>10}{'inter ms':>10}{'share %':>9}")
    results = []
    for case in CASES:
        result = measure(case, arguments.repeats, device)
        results.append(result)
        print(
            f"{result.case:<14}{result.backbone:<18}{result.cross_entropy_ms:>12.1f}"
            f"{result.intra_ms:>10.3f}{result.inter_ms:>10.3f}{result.share_percent:>9.3f}",
            flush=True,
        )
    if arguments.out:
        report = {
            "torch": torch.__version__,
            "device": place,
            "threads": arguments.threads,
            "results": [asdict(result) for result in results],
        }
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
