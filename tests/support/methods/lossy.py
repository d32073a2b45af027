"""Whole runs of a method in this process in which silos' answers are lost after they were made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tests.support.runs import Wire, contexts, coordinator, job

from tightframe.phases import ServerState, Tensors
from tightframe.rounds.context import Message
from tightframe.rounds.silo.session import SiloSession

TRAINING = {"epochs": 1, "batch_size": 32, "learning_rate": 0.05, "momentum": 0.0}


@dataclass
class LosesAnswers(Wire):
    """A silo contributes, but its answer never arrives: (round, silo)."""

    lost: Collection[tuple[int, str]] = ()

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Any) -> Mapping[str, str]:
        number = next(iter(requests.values())).get("round") if task == "contribute" else None
        kind = next(iter(requests.values())).get("kind") if task == "contribute" else None
        gone = {site for site in requests if kind == "train" and (number, site) in self.lost}

        def maybe(site: str, answer: Message) -> None:
            if site not in gone:
                accept(site, answer)

        return {**super().exchange(task, requests, maybe), **dict.fromkeys(gone, "TF-502")}


def run(
    method: str, folder: Path, lost: Collection[tuple[int, str]], **changes: Any
) -> tuple[ServerState, dict[str, Tensors]]:
    """Three rounds of four silos with secure sums, through the codec, masks and recovery.

    Returns:
        The server's state, and what each silo has kept, by silo.
    """
    of = job(**{"method": method, "rounds": 3, "training": TRAINING, **changes})
    silos = contexts(of, folder)
    line = LosesAnswers({site: SiloSession(context) for site, context in silos.items()}, lost=lost)
    state = coordinator(of, folder).run(line).state
    files = {site: context.state_folder / "committed.safetensors" for site, context in silos.items()}
    return state, {site: load_file(path) for site, path in files.items() if path.is_file()}
