"""An executor that fails as it is told, at one site in one round. Used by the fault tests only."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from tightframe.flare.executor import SiloExecutor
from tightframe.flare.wire import MESSAGE


class FaultyExecutor(SiloExecutor):
    """``fault`` = {"site": [names], "round": 1, "kind": "raise" | "nan" | "late" | "killed"}."""

    def __init__(self, fault: dict[str, Any], **job: Any) -> None:
        super().__init__(**job)
        self._fault = fault

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        here = fl_ctx.get_identity_name() in self._fault["site"]
        message = shareable.get(MESSAGE) or {}
        if here and task_name == "contribute" and message.get("round") == self._fault["round"]:
            kind = self._fault["kind"]
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "late":
                time.sleep(self._fault["seconds"])
            if kind in ("nan", "raise"):
                return self._poisoned(kind, task_name, shareable, fl_ctx, abort_signal)
        return super().execute(task_name, shareable, fl_ctx, abort_signal)

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
            good = records(fold, augment_seed=augment_seed)
            return [(torch.full_like(good[i][0], float("nan")), good[i][1]) for i in range(len(good))]

        data.records = broken  # type: ignore[method-assign]
        try:
            return super().execute(task_name, shareable, fl_ctx, abort_signal)
        finally:
            data.records = records  # type: ignore[method-assign]
