"""An executor that fails as it is told, at some sites, in some tasks. Used by the fault tests only."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from tightframe.flare import MESSAGE
from tightframe.flare.executor import SiloExecutor
from tightframe.securesum.messages import AgreementRequest, Receipt, RevealRequest

WEIGHTS, EVENT = np.full(64, 4711.4711), "tightframe.leak"


class FaultyExecutor(SiloExecutor):
    """An executor with faults.

    Each of ``faults`` has these keys:

        site: names of the faulty sites.
        task: in which task; ``contribute`` by default.
        round: in which training round, for tasks that belong to one.
        kind: ``raise``, ``nan`` (both: train as always, on broken records), ``late`` (sleep first), ``leak``
            (send a raw tensor in place of an answer, and as a federated event), or ``killed``, which is
            what a silo looks like whose machine has lost its power.
        seconds: of sleep.
        watch: a folder that gets a copy of every site's stored state after every task.
    """

    def __init__(self, faults: list[dict[str, Any]], **job: Any) -> None:
        super().__init__(**job)
        self._faults = faults

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        for fault in self._faults:
            here = fl_ctx.get_identity_name() in fault.get("site", [])
            if not (here and self._meant(fault, task_name, shareable.get(MESSAGE) or {})):
                continue
            kind = fault["kind"]
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "late":
                time.sleep(fault["seconds"])
            if kind == "leak":
                return self._leaked(fl_ctx)
            if kind in ("nan", "raise"):
                return self._poisoned(kind, task_name, shareable, fl_ctx, abort_signal)
        reply = super().execute(task_name, shareable, fl_ctx, abort_signal)
        self._show(task_name, fl_ctx)
        return reply

    def _meant(self, fault: dict[str, Any], task: str, message: dict[str, Any]) -> bool:
        if task != fault.get("task", "contribute"):
            return False
        if task in ("enroll", "confirm"):
            return True
        if task == "contribute":
            return message.get("kind") == "train" and message.get("round") == fault["round"]
        kind = RevealRequest if task == "reveal" else AgreementRequest
        receipts: tuple[Receipt, ...] = kind.from_bytes(message["secure"]).receipts
        asked = receipts[0].sum_id
        return asked.phase.startswith("train") and asked.round == fault["round"]

    def _show(self, task: str, fl_ctx: FLContext) -> None:
        """Copy the stored state, which later steps overwrite, for a test to look for its secrets."""
        for fault in self._faults:
            if "watch" in fault and self._session is not None:
                context = self._session.context
                kept = Path(fault["watch"]) / context.name
                kept.mkdir(parents=True, exist_ok=True)
                shutil.copy(context.secure_folder / "state", kept / f"{len(list(kept.iterdir()))}-{task}")

    def _leaked(self, fl_ctx: FLContext) -> Shareable:
        self.fire_fed_event(EVENT, DXO(DataKind.WEIGHTS, data={"w": WEIGHTS}).to_shareable(), fl_ctx)
        reply = make_reply(ReturnCode.OK)
        reply[MESSAGE] = {"secure": WEIGHTS}
        return reply

    def _poisoned(
        self, kind: str, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Train as always, on records that are not numbers, or that cannot be read."""
        import torch

        session = self._session or self._open(fl_ctx)
        self._session = session
        data = session.context.data
        records = data.records

        def broken(fold: Any, *, augment_seed: int | None = None) -> Any:
            if kind == "raise":
                raise RuntimeError("the disk is on fire, patient Mustermann is affected")
            good: Any = records(fold, augment_seed=augment_seed)
            return [(torch.full_like(good[i][0], float("nan")), good[i][1]) for i in range(len(good))]

        data.records = broken  # type: ignore[method-assign]
        try:
            return super().execute(task_name, shareable, fl_ctx, abort_signal)
        finally:
            data.records = records  # type: ignore[method-assign]
