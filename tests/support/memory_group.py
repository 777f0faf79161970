"""A control group with little memory."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def little_memory(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A control group with half a GiB, or with the parameter's; with two where torch is built with CUDA.

    CUDA's libraries take more.
    """
    try:
        own = re.search(r"^\d+:(?:memory)?:(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        mount = Path("/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").is_dir() else "/sys/fs/cgroup")
        found = re.search(r"^\d+:memory:(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE) or own
        assert found is not None
        group = mount / found[1].lstrip("/") / f"ddpkit-test-{os.getpid()}"
        group.mkdir()
        limit = next(file for file in (group / "memory.max", group / "memory.limit_in_bytes") if file.exists())
        limit.write_text(str((getattr(request, "param", 512) if torch.version.cuda is None else 2048) << 20))
    except (OSError, StopIteration) as error:
        pytest.skip(f"needs a memory control group of its own: {error}")
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    group.rmdir()
