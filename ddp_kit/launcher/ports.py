"""Find the process that listens on a port."""

from contextlib import suppress

import psutil

from ddp_kit.masking import masked


def holder(port: int) -> str:
    """` by pid N (its command)`, to follow "in use"; empty if this process may not see it."""
    with suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            if found.laddr and found.laddr.port == port and found.status == psutil.CONN_LISTEN and found.pid:
                command = masked(" ".join(psutil.Process(found.pid).cmdline()[:6]))
                return f" by pid {found.pid} ({command})"
    return ""
