"""Runs behind the papers' tables: planning, training and storing them."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import comparison
import paper_measures
import torch
from paper_layout import Column, Row, Run, Setting, Size, Table, setting_of
from safetensors.torch import load_file

from tightframe import federation, methods, metrics
from tightframe.data.base import SiloData
from tightframe.data.image_sets import DERIVED
from tightframe.errors import TightframeError
from tightframe.files import write_json
from tightframe.results.files import CHECKPOINT
from tightframe.results.rows import Row as Exchange
from tightframe.rounds.setup import prepare

PERCENT = ("accuracy", "personal", "valid_classes", "label_share")
SPREAD_RECORDS = 128
Log = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        row, column: of the table.
        printed: the paper's number.
        here: description of the data used here.
        runs: by seed, one for each of the column's places.
        reason: why there are no runs.
        base: FedAvg's runs by seed, for a measure that compares with them.
    """

    row: Row
    column: Column
    printed: str | None
    here: str
    runs: Mapping[int, tuple[Run, ...]]
    reason: str = ""
    base: Mapping[int, tuple[Run, ...]] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all its runs."""
        return tuple(key_of(run) for runs in self.runs.values() for run in runs)


class Store:
    """Finished runs in one JSON file, by the settings that determine their numbers.

    Raises:
        SystemExit: if the file does not hold runs of this program.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, dict[str, Any]] = {}
        if path.exists():
            try:
                self.runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
            except (ValueError, KeyError, TypeError) as error:
                raise SystemExit(f"expected a file of this program's runs, got {path}: {error!r}") from error

    def put(self, run: Run, result: dict[str, Any]) -> None:
        """Add a run and write the file at once."""
        job = run.job
        if self.path.exists():  # what another process has written meanwhile
            self.runs = json.loads(self.path.read_text(encoding="utf-8"))["runs"]
        described = {"data": run.data, "method": job.method, "options": job.method_options, "seed": job.seed}
        self.runs[key_of(run)] = {**described, "partition": job.dataset_options, **result}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"runs": self.runs})


def key_of(run: Run) -> str:
    """Return a key that is equal exactly for runs with equal settings."""
    values = json.dumps([run.data, run.job.model_dump(mode="json")], sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()[:24]


def cells_of(
    table: Table, size: Size, roots: Mapping[str, Path], seeds: Sequence[int], changes: Mapping[str, Any]
) -> list[list[Cell]]:
    """Return every row's cells, in the columns' order."""
    made = [[setting_of(place, size, roots, changes) for place in column.places] for column in table.columns]

    def cell(row: Row, place: int) -> Cell:
        column, printed = table.columns[place], row.printed[place]
        method = row.method(column.variant, size)
        here = sorted({item.described for item in made[place] if isinstance(item, Setting)})
        reason = next((item for item in made[place] if isinstance(item, str)), "")
        if method is None:
            reason = f"not run: {row.title} does not exist on its own here"
        if reason or method is None:
            return Cell(row, column, printed, "", {}, reason)
        settings = [item for item in made[place] if isinstance(item, Setting)]
        runs = {seed: tuple(item.run(method, seed) for item in settings) for seed in seeds}
        compared = column.measure == "reached"
        base = {seed: tuple(item.run("fedavg", seed) for item in settings) for seed in seeds if compared}
        return Cell(row, column, printed, "; ".join(here), runs, base=base)

    return [[cell(row, place) for place in range(len(table.columns))] for row in table.rows]


def train(run: Run, records: Mapping[str, SiloData]) -> dict[str, Any]:
    """Train; return everything that any table or figure shows of the run, or the code of a failure."""
    begun = time.monotonic()
    inputs, labels = paper_measures.sampled(records, run.job.seed)
    module: Any = prepare(run.job).setting.build_model()
    own = methods.get(run.job.method).own_model is not None
    shapes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tightframe-") as place:

        def watch(row: Exchange) -> None:
            """Measure the model that this exchange evaluated: that of the round before."""
            kept = Path(place) / "server" / CHECKPOINT
            if not row.makes_model or not kept.is_file():
                return
            start = "model/"
            held = {
                name.removeprefix(start): item
                for name, item in load_file(kept).items()
                if name.startswith(start)
            }
            module.load_state_dict(held)
            shapes.append({"round": row.round - 1, **paper_measures.geometry(module, inputs, labels)})

        try:
            result = federation.run_job(
                run.job, data=records, folder=Path(place), on_round=None if own else watch
            )
        except TightframeError as error:
            return {"error": error.code, "reason": str(error), "seconds": time.monotonic() - begun}
    rows = [row for row in result.outcome.rows if row.makes_model]
    models = [row.test for row in rows]
    final = models[-1] if models else None
    names = ("accuracy", "balanced_accuracy", "loss", "auroc", "average_precision")
    drawn: dict[str, Any] = {}
    environments: list[float] = []
    if result.state.model and not own:
        module.load_state_dict(dict(result.state.model))
        shapes.append({"round": run.job.rounds, **paper_measures.geometry(module, inputs, labels)})
        drawn = paper_measures.picture(module, inputs, labels, embed=run.job.seed % 10 == 0)
        environments = paper_measures.by_environment(module, records) if run.data in DERIVED else []
    return {
        # Silos' own models are evaluated, too, but are no global one.
        "course": [] if own else [None if model is None else model.accuracy for model in models],
        "losses": [] if own else [None if model is None else model.loss for model in models],
        "final": {name: getattr(final, name, None) for name in names},
        "personal": None if result.outcome.personal is None else result.outcome.personal.as_json(),
        "spread": spread(run, result.state.model, records),
        "shapes": shapes,
        "drawn": drawn,
        "environments": environments,
        "seconds": time.monotonic() - begun,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
    }


@torch.no_grad()
def spread(run: Run, model: Mapping[str, torch.Tensor], records: Mapping[str, SiloData]) -> float | None:
    """Return the spread of FedMR's table 7 for the last model, on test records drawn by the seed."""
    if not model:
        return None
    module: Any = prepare(run.job).setting.build_model()
    module.load_state_dict(dict(model))
    folds = [silo.records("test") for silo in records.values()]
    places = [(fold, index) for fold in folds for index in range(len(fold))]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(run.job.seed))
    chosen = [places[int(place)] for place in order[:SPREAD_RECORDS]]
    inputs = torch.stack([fold[index][0] for fold, index in chosen])
    return metrics.eigenvalue_spread(module.eval().features(inputs).double().numpy())


def fill(
    cells: Sequence[Cell],
    store: Store,
    *,
    retry: bool,
    log: Log,
    workers: int = 1,
    until: float = math.inf,
) -> dict[str, str]:
    """Train the runs that are missing, seed by seed, and store each at once.

    Args:
        cells: cells whose runs are needed.
        store: of the finished runs.
        retry: repeat those that failed.
        log: called with a line after each run.
        workers: number of processes.
        until: time of ``time.monotonic`` from which on no run begins; with several processes all begin.

    Returns:
        By key, the reason why a run's records could not be opened.
    """
    wanted: dict[str, Run] = {}
    for cell in cells:
        for run in _runs(cell):
            done = store.runs.get(key_of(run))
            if done is None or (retry and "error" in done):
                wanted[key_of(run)] = run
    refused: dict[str, str] = {}
    ordered = sorted(wanted.values(), key=_order)
    for number, (key, result) in enumerate(_made(ordered, workers, until), 1):
        run = wanted[key]
        if isinstance(result, str):
            refused[key] = ended = result
        else:
            store.put(run, result)
            value = value_of(result, "accuracy", run.last)
            ended = result.get("error") or ("no global model" if value is None else f"{value:.1f} %")
        method = f"{run.job.method} ({comparison.described(run.job.method_options)})"
        log(f"{number} of {len(wanted)}: seed {run.job.seed}, {run.data}: {method}: {ended}")
    return refused


def _made(runs: Sequence[Run], workers: int, until: float) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yield the keys of the runs with their results, as they finish."""
    if workers == 1 or len(runs) < 2:
        yield from map(make, takewhile(lambda run: time.monotonic() < until, runs))
        return
    with ProcessPoolExecutor(min(workers, len(runs)), mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(make, run) for run in runs]):
            yield done.result()


_opened: dict[tuple[int, str, str], Mapping[str, SiloData] | str] = {}
"""Records that this process opened last."""


def make(run: Run) -> tuple[str, dict[str, Any] | str]:
    """Return a run's key and its result, or the reason why its records cannot be opened."""
    if (order := _order(run)) not in _opened:
        _opened.clear()
        _opened[order] = _open(run)
    records = _opened[order]
    if isinstance(records, str):
        return key_of(run), records
    assert sorted(records) == list(run.job.roster)
    return key_of(run), train(run, records)


def _runs(cell: Cell) -> Iterator[Run]:
    return (run for part in (cell.runs, cell.base) for runs in part.values() for run in runs)


def _order(run: Run) -> tuple[int, str, str]:
    """Return a sort key that is equal for runs with the same records."""
    options = json.dumps(run.job.dataset_options, sort_keys=True)
    return run.job.seed, f"{run.data} {run.root}", options


def _open(run: Run) -> Mapping[str, SiloData] | str:
    try:
        return run.open()
    except TightframeError as error:
        return f"not run: {error}"


def value_of(
    result: Mapping[str, Any], measure: str, last: int, base: Mapping[str, Any] | None = None
) -> float | None:
    """Return a measure of a run as the tables show it; None if there is none.

    ``reached`` is the first round in which the run is as good as FedAvg's best (``base``), and the number of
    rounds plus one if it never is.
    """
    if measure == "reached":
        return _reached(result.get("course") or [], (base or {}).get("course") or [])
    if measure == "accuracy":
        value = comparison.score(result, last)
    elif measure == "rate":
        value = result.get("final", {}).get("accuracy")
    elif measure == "spread":
        value = result.get("spread")
    elif measure in ("variance", "entropy"):
        each = result.get("environments")
        value = getattr(paper_measures, measure)(each) if each else None
    elif measure.startswith("environment "):
        each, place = result.get("environments") or [], int(measure.partition(" ")[2]) - 1
        value = each[place] if place < len(each) else None
    elif measure in PERCENT:
        value = (result.get("personal") or {}).get("accuracy" if measure == "personal" else measure)
    else:
        value = result.get("final", {}).get(measure)
    return value * 100 if value is not None and measure in PERCENT else value


def _reached(course: Sequence[float | None], other: Sequence[float | None]) -> float | None:
    known = [value for value in other[1:] if value is not None]
    if not known or not course:
        return None
    return comparison.rounds_to(course, max(known)) or len(course)
