"""A component of the server that asks as a console does, from a thread of its own. For tests only."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.private.fed.server.server_commands import AppCommandProcessor, ShowStatsCommand

FILE = "asked.jsonl"


class Console(FLComponent):
    """Asks for the statistics, and by the command, by what the engine runs for a real console."""

    def __init__(self, seconds: float = 0.25) -> None:
        super().__init__()
        self._seconds = seconds
        self._ended = threading.Event()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            engine = fl_ctx.get_engine()
            folder = Path(engine.get_workspace().get_run_dir(fl_ctx.get_job_id()))
            threading.Thread(target=self._ask, args=(engine, folder / FILE), daemon=True).start()
        elif event_type == EventType.END_RUN:
            self._ended.set()

    def _ask(self, engine: Any, path: Path) -> None:
        before = None
        while not self._ended.wait(self._seconds):
            with engine.new_context() as context:
                stats = ShowStatsCommand().process(Shareable(), context)
                if "tightframe" not in stats:
                    continue  # not yet, or no longer; the command would be an error
                request = Shareable()
                request[ServerCommandKey.TOPIC] = "tightframe.status"
                answer = AppCommandProcessor().process(request, context).get(ServerCommandKey.DATA)
            found = json.dumps({"stats": stats, "answer": answer})
            if found != before:
                with path.open("a", encoding="utf-8") as file:
                    file.write(found + "\n")
            before = found
