"""Time of the scattering transform on one core: of 1,000 pictures at 200 px, J = 4, L = 8.

    python benchmarks/scattering.py
    python benchmarks/scattering.py --sample 1000
    python benchmarks/scattering.py --channels 3 --features

Fewer pictures than 1,000 are timed by default, and the line says that the rest is extrapolated. Each channel
of a picture is one transform; ``--features`` times the whole backbone instead: colours, moments, projection.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from tightframe import models
from tightframe.models.scattering import scattering2d

PICTURES = 1000


def timed(
    run: Callable[[torch.Tensor], torch.Tensor], batches: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """Return seconds and processor seconds that all batches take, after one that is not counted."""
    run(batches[0][:1])
    started, worked = time.perf_counter(), time.process_time()
    for batch in batches:
        run(batch)
    return time.perf_counter() - started, time.process_time() - worked


def main(arguments: Sequence[str] | None = None) -> str:
    """Time a sample, and return and print the line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=64, help="pictures that are timed")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=200)
    parser.add_argument("--channels", type=int, default=1)
    parser.add_argument("--features", action="store_true", help="the whole backbone")
    parser.add_argument("-J", type=int, default=4)
    parser.add_argument("-L", type=int, default=8)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    shape = (args.channels, args.size, args.size)
    pictures = torch.rand(args.sample, *shape, generator=torch.Generator().manual_seed(0))
    batches = list(pictures.split(args.batch))
    if args.features:
        spec = models.get("scattering")
        model = models.freeze(spec.build(spec.options(J=args.J, L=args.L), shape, 2))
        seconds, worked = timed(model.encode, batches)  # type: ignore[operator]
    else:
        seconds, worked = timed(lambda batch: scattering2d(batch.flatten(0, 1), args.J, args.L), batches)
    each = seconds / args.sample
    extrapolated = "" if args.sample == PICTURES else f", extrapolated from {args.sample}"
    line = (
        f"{PICTURES} pictures of {args.channels} x {args.size} x {args.size}, J = {args.J}, L = {args.L}, "
        f"one thread: {each * PICTURES:.1f} s{extrapolated} ({each * 1e3:.1f} ms each, "
        f"{worked / args.sample * 1e3:.1f} of them at work)"
    )
    print(line)
    return line


if __name__ == "__main__":
    main()
