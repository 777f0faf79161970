"""The workers' own timers, by torch.distributed.elastic.timer: served where a variable asks for that."""

import os
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.timer import FileTimerServer

from ddp_kit.env import FILE_TIMER, FILE_TIMER_PATH

_LOOK_SECONDS = 0.1  # torch's own agent's


def serve(run_id: str, log_event: Callable[[str, Any], None]) -> FileTimerServer | None:
    """For one round, whose workers find its path in their environment. It kills a worker whose timer has expired."""
    if os.environ.get(FILE_TIMER) != "1":
        return None
    path = str(Path(tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}"))
    path = os.environ.setdefault(FILE_TIMER_PATH, path)
    server = FileTimerServer(path, run_id, max_interval=_LOOK_SECONDS, daemon=True, log_event=log_event)
    server.start()
    return server
