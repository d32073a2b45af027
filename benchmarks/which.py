"""Which method for which data: global and personal models on the clinical sets, on all and on own records.

For each set and method, over seeds: ``all``, the global model on all silos' test records; ``own``, each
silo's own model (the global one where there is none) on that silo's test records, pooled over silos, so that
it is the same number as ``all`` for a global model; ``others``, the silos' own models on all silos' records,
mean over silos. Networks and constants are those of ``one_sum_cases.py``. Every run is written as soon as it
is done and not repeated.

Sites have the profile ``standard``, as hospitals do: secure sums, class rules, drawn batches, the rules on
units and on products, for which a width is taken that fits. With ``--free`` they have ``research``, and jobs
plain sums without class rules.

    python benchmarks/which.py --data heart eicu ham --seeds 5 --out which.json
    python benchmarks/which.py --data heart --show --out which.json --effects clinical_effects.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import eicu
import torch
from comparison import effect, interval
from one_sum_cases import CASES, Case, Encoder
from safetensors.torch import load_file

from tightframe import federation, methods
from tightframe.config.job import Evaluation as Evaluating
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.data.base import SiloData
from tightframe.errors import TightframeError
from tightframe.files import write_json
from tightframe.results.files import PERSONAL
from tightframe.rounds.context import SiloContext
from tightframe.rounds.riders import evaluation
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.view import LocalSilo
from tightframe_app.jobs import presets, recipes

ENTRIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "local-only": ("local_only", {}),
    "FedAvg": ("fedavg", {}),
    "FedETF, step 1": ("fedetf", {"personal_alternations": 0}),
    "FedETF, steps 1 to 3": ("fedetf", {}),
    "FedROD": ("fedrod", {}),
    "FedROD, hyper-network": ("fedrod", {"personal_head": "hyper_network"}),
    "FedPer": ("fedper", {}),
    "FedRep": ("fedrep", {}),
    "Ditto": ("ditto", {}),
    "FedBABU": ("fedbabu", {}),
    "Fed3R": ("fed3r", {}),
    "FedCGS": ("fedcgs", {}),
    "FedNCM": ("fedncm", {}),
    "FedAvg, focal": ("fedavg", {"loss": "focal"}),
    "Fed3R, defaults": ("fed3r", {"priors": "observed"}),
    "FedCGS, defaults": ("fedcgs", {"priors": "observed"}),
}
"""Title -> method and options; without any those of its preset, with ``--free`` the case's."""
OWN = (
    "local-only",
    "FedETF, step 1",
    "FedETF, steps 1 to 3",
    "FedROD",
    "FedPer",
    "FedRep",
    "Ditto",
    "FedBABU",
)
"""Those whose own models ``--effects`` compares with the best model for all."""
ONE_SUM = ("fed3r", "fedcgs", "fedncm")
HEADLESS = ("fedper", "fedrep", "local_only")
"""Methods without a global model that anybody would use."""
MEASURE: Mapping[str, str] = {
    "heart": "balanced_accuracy",
    "eicu": "auroc",
    "eicu-100": "auroc",
    "ham": "balanced_accuracy",
}
POLICIES: Mapping[str, PolicyBlock] = {"heart": PolicyBlock(profile="standard", min_row_bits=0)}
"""Of each silo, where it is not ``standard`` as it is: the smallest centre, of 25 records, would refuse."""
FITTING: Mapping[str, Encoder] = {
    "ham": Encoder("scattering", {"J": 3, "colours": "rgb", "width": 97}, drawn=True),
    "eicu-100": Encoder("random_features", {"width": 7}, drawn=True),
}
"""Frozen encoders of no more features than the rules on products and class sums leave (TF-625)."""
DEFAULT_DATA = Path(__file__).resolve().parent.parent / ".." / "shared" / "data"


def job_of(
    case: Case, method: str, options: Mapping[str, Any], names: Sequence[str], seed: int, *, free: bool
) -> JobConfig:
    """Return a method's job: the case's, with personal models where training makes them."""
    # The hyper-network needs secure sums.
    summation = "plain" if free and "personal_head" not in options else "secure"
    options = options if free else options or presets.of(method).options
    values = case.job(method, options, names, "natural", seed, None, None, summation).model_dump()
    if method not in ONE_SUM:
        values["personalise"] = True
        if case.dataset == "eicu":  # with few deaths a trained model needs them repeated; see eicu.py
            values["dataset_options"]["oversample_minority"] = True
        values["model_options"].pop("standardise", None)  # columns have declared ranges; not every method can
    if free:
        return parse_job(values)
    if method in ONE_SUM and case.name in FITTING and (method, case.name) != ("fedncm", "ham"):
        values |= FITTING[case.name].values(seed)
    values |= {"class_rules": "on", "evaluation": {"models": 1, "score_bins": 32}}
    if methods.get(method).own_model is None:
        values["update_norm"] = recipes.UPDATE_NORM
    return parse_job(values)


def case_of(name: str, root: Path) -> Case:
    """Return a case; ``eicu-100`` trains at the 100 largest hospitals in place of the 20 of ``eicu``."""
    if name != "eicu-100":
        return CASES[name](root)
    options = {"drugs": 920, "train_hospitals": 100}
    return replace(
        CASES["eicu"](root),
        name=name,
        open=lambda partition, seed: eicu.silos(root, options),
        dataset_options=lambda partition, seed: dict(options),
    )


def run(job: JobConfig, records: Mapping[str, SiloData], measure: str, entry: SiteEntry) -> dict[str, Any]:
    """Train; return ``all``, ``own`` and ``others``, or the code of a failure.

    Args:
        entry: of each site.
    """
    begun = time.process_time()
    with tempfile.TemporaryDirectory(prefix="tightframe-") as place:
        try:
            setup = prepare(job)  # refuses some: without a hidden layer FedPer, FedRep, FedBABU have no body
            entries = dict.fromkeys(records, entry)
            result = federation.run_job(job, data=records, entries=entries, folder=Path(place))
        except TightframeError as error:
            return {"error": error.code, "reason": str(error)}
        exact = job.model_copy(update={"evaluation": Evaluating(score_bins=1024)})
        setup_exact = prepare(exact)
        views = {
            name: LocalSilo(
                SiloContext(name, exact, entry, run_dir=Path(place) / name, records=silo),
                setup_exact,
                torch.device("cpu"),
                0,
            )
            for name, silo in records.items()
        }

        def scored(pairs: Sequence[tuple[LocalSilo, torch.nn.Module]]) -> float | None:
            totals: dict[str, Any] = {}
            for silo, model in pairs:
                for field, value in evaluation.count_at(silo, model).items():
                    totals[field] = totals.get(field, 0) + value.numpy()
            found = getattr(evaluation.summarise(totals, setup.dataset.class_names).test, measure)
            return None if found is None else float(found)

        def own_model(name: str) -> torch.nn.Module:
            module = setup.setting.build_model()
            if setup.method.personal_form is not None:
                module = setup.method.personal_form(setup.setting, module)
            module.load_state_dict(load_file(Path(place) / name / PERSONAL))
            return module.eval()

        shared = None
        if job.method not in HEADLESS:
            model = setup.setting.build_model()
            model.load_state_dict(dict(result.state.model))
            shared = scored([(view, model) for view in views.values()])
        own, others = shared, None
        if job.personalise:
            models = {name: own_model(name) for name in views}
            own = scored([(view, models[name]) for name, view in views.items()])
            each = [scored([(view, item) for view in views.values()]) for item in models.values()]
            known = [value for value in each if value is not None]
            others = statistics.fmean(known) if known else None
    return {"all": shared, "own": own, "others": others, "seconds": round(time.process_time() - begun, 2)}


class Shown:
    """The runs of a data set, their means and paired differences.

    Args:
        runs: of all sets, by ``set method seed``.
        name: of the data set.
        seeds: that are looked at.
    """

    def __init__(self, runs: Mapping[str, Mapping[str, Any]], name: str, seeds: Sequence[int]) -> None:
        self.runs, self.name, self.seeds = runs, name, seeds
        self.titles = [title for title in ENTRIES if any(f"{name} {title} {seed}" in runs for seed in seeds)]
        means = {title: statistics.fmean(item) for title in self.titles if (item := self._each(title, "all"))}
        self.best = max(means, key=lambda title: means[title], default="none")

    def _values(self, title: str, what: str) -> dict[int, float]:
        found = {seed: self.runs.get(f"{self.name} {title} {seed}", {}).get(what) for seed in self.seeds}
        return {seed: value for seed, value in found.items() if value is not None}

    def _each(self, title: str, what: str) -> list[float]:
        return list(self._values(title, what).values())

    def less(self, title: str, what: str, base: str, of: str) -> list[float]:
        """Return the differences of two numbers of the same seeds."""
        known = self._values(base, of)
        return [value - known[seed] for seed, value in self._values(title, what).items() if seed in known]

    def _mean(self, title: str, what: str) -> str:
        each = self._each(title, what)
        spread = f" ± {statistics.stdev(each):.3f}" if len(each) > 1 else ""
        return f"{statistics.fmean(each):.3f}{spread} ({len(each)})" if each else ""

    def _less(self, title: str, what: str, base: str, of: str) -> str:
        pairs = self.less(title, what, base, of)
        if (title, what) == (base, of) or not pairs:
            return ""
        middle, low, high = interval(pairs)
        return f"{middle:+.3f}" + (f" [{low:+.3f}, {high:+.3f}]" if len(pairs) > 1 else "")

    def lines(self) -> list[str]:
        """Return the lines of a table in Markdown."""
        lines = [
            f"**{self.name}**: {MEASURE[self.name].replace('_', ' ')}, mean ± sd (seeds), paired differences "
            f"[95 %]; the best for all: {self.best}",
            "",
            "| method | all | less FedAvg's | own | less local-only's | less the best for all "
            "| own models on all | less the best for all |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for title in self.titles:
            each = (self.runs.get(f"{self.name} {title} {seed}", {}) for seed in self.seeds)
            failed = sorted({item["error"] for item in each if "error" in item})
            cells = [self._mean(title, "all"), self._less(title, "all", "FedAvg", "all")]
            cells += [self._mean(title, "own"), self._less(title, "own", "local-only", "own")]
            cells += [self._less(title, "own", self.best, "all")]
            cells += [self._mean(title, "others"), self._less(title, "others", self.best, "all")]
            lines.append(f"| {title} | {' | '.join(cells)} |" + (f" {', '.join(failed)}" if failed else ""))
        return lines

    def effects(self, free: bool) -> list[dict[str, Any]]:
        """Return how silos' own models compare with the best model for all, as ``jobs.presets`` shows it."""
        found = []
        for title in OWN:
            pairs = self.less(title, "own", self.best, "all")
            if len(pairs) < 2:
                continue
            method, options = ENTRIES[title]
            where = f"{self.name}, own records" + (", without hospitals' rules" if free else "")
            flags = " --free" if free else ""
            found.append(
                {
                    "method": method,
                    "setting": where,
                    "measure": MEASURE[self.name].replace("_", " "),
                    "baseline": f"the global {self.best}",
                    **effect(options, pairs),
                    "command": f"python benchmarks/which.py --data {self.name}{flags} --out which.json",
                }
            )
        return found


def main(given: Sequence[str] | None = None) -> int:
    """Make the missing runs, print the tables, and return the exit code."""
    command = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("--data", nargs="+", choices=list(MEASURE), default=["heart", "eicu"])
    command.add_argument("--methods", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    command.add_argument("--seeds", type=int, default=5, help="seeds 0, 1, ...")
    command.add_argument("--hours", type=float, default=math.inf, help="begin no run after that time")
    command.add_argument("--out", type=Path, required=True, help="JSON file, which a later call extends")
    command.add_argument("--show", action="store_true", help="run nothing")
    command.add_argument("--effects", type=Path, help="JSON file that gets what own models gain")
    command.add_argument("--free", action="store_true", help="without the rules of hospitals; another file")
    command.add_argument(
        "--root", type=Path, default=Path(os.environ.get("TIGHTFRAME_TEST_DATA", DEFAULT_DATA))
    )
    arguments = command.parse_args(given)
    torch.set_num_threads(1)
    runs: dict[str, dict[str, Any]] = {}
    if arguments.out.is_file():
        runs = json.loads(arguments.out.read_text(encoding="utf-8"))
    until = time.monotonic() + 3600 * arguments.hours
    with tempfile.TemporaryDirectory(prefix="tightframe-") as kept:
        for name in () if arguments.show else arguments.data:
            case = case_of(name, arguments.root)
            policy = POLICIES.get(name, PolicyBlock(profile="standard"))
            policy = PolicyBlock(profile="research") if arguments.free else policy
            accepted = {case.dataset: case.dataset_options("natural", 0)}
            entry = SiteEntry(policy=policy, accepted_options=accepted, feature_cache="kept", state_dir=kept)
            plain = repeated = case.silos("natural", 0)
            if case.dataset == "eicu":
                options = case.dataset_options("natural", 0)
                repeated = eicu.silos(arguments.root, {**options, "oversample_minority": True})
            for seed, title in product(range(arguments.seeds), arguments.methods):
                key = f"{name} {title} {seed}"
                if key in runs or time.monotonic() > until:
                    continue
                method, options = ENTRIES[title]
                records = plain if method in ONE_SUM else repeated
                job = job_of(case, method, options, sorted(records), seed, free=arguments.free)
                runs[key] = run(job, records, MEASURE[name], entry)
                write_json(arguments.out, runs)
                print(key, runs[key], file=sys.stderr, flush=True)
    for name in arguments.data:
        of = Shown(runs, name, range(arguments.seeds))
        print("\n".join(of.lines()), end="\n\n")
        if arguments.effects is not None:
            made = of.effects(arguments.free)
            known = json.loads(arguments.effects.read_text()) if arguments.effects.is_file() else []
            same = {item["command"] for item in made}
            write_json(arguments.effects, [item for item in known if item["command"] not in same] + made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
