"""An executor that tries to send a raw tensor. Used by the guard's test only."""

from __future__ import annotations

from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from tightframe.flare import MESSAGE
from tightframe.flare.executor import SiloExecutor

WEIGHTS = np.full(64, 4711.4711)


class LeakyExecutor(SiloExecutor):
    """Takes part as it should, but for one task at one site: there it sends what it likes.

    ``leak`` names the site and the round; the executor also fires a federated event there.
    """

    def __init__(self, leak: dict[str, Any], **job: Any) -> None:
        super().__init__(**job)
        self._leak = leak

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        message = shareable.get(MESSAGE) or {}
        asked = (fl_ctx.get_identity_name(), message.get("kind"), message.get("round"))
        if task_name == "contribute" and asked == (self._leak["site"], "train", self._leak["round"]):
            self.fire_fed_event(
                "tightframe.leak", DXO(DataKind.WEIGHTS, data={"w": WEIGHTS}).to_shareable(), fl_ctx
            )
            reply = make_reply(ReturnCode.OK)
            reply[MESSAGE] = {"secure": WEIGHTS}
            return reply
        return super().execute(task_name, shareable, fl_ctx, abort_signal)
