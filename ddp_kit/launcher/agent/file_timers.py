"""Serve the workers' timers (torch.distributed.elastic.timer) if an environment variable asks for it."""

import os
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.timer import FileTimerServer

from ddp_kit.env import FILE_TIMER, FILE_TIMER_PATH

_INTERVAL_SECONDS = 0.1  # as in torch's agent


def serve(run_id: str, log_event: Callable[[str, Any], None]) -> FileTimerServer | None:
    """Start the timer server of a round, which kills workers that time out. They find its path in their environment."""
    if os.environ.get(FILE_TIMER) != "1":
        return None
    path = str(Path(tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}"))
    path = os.environ.setdefault(FILE_TIMER_PATH, path)
    server = FileTimerServer(path, run_id, max_interval=_INTERVAL_SECONDS, daemon=True, log_event=log_event)
    server.start()
    return server
