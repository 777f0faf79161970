"""A job that ends badly saves its newest copy in object storage, and the same command resumes there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import PROGRAMS
from tests.support.object_store import SECRET, ObjectStore, Proxy, answer

pytestmark = pytest.mark.slow

SCRIPT = PROGRAMS / "dies_with_copies.py"


def words(place: object) -> tuple[object, ...]:
    return "launch", "--nproc-per-node", 2, "--max-restarts", 0, SCRIPT, place


def ended_with(output: str) -> str:
    (found,) = re.findall(r"ended with (\w+)", output)
    return str(found)


def test_same_command_resumes_at_the_copy(
    ddpkit: Callable[..., Any], url: str, object_store: ObjectStore, tmp_path: Path
) -> None:
    on_disk = ddpkit(*words(tmp_path / "run"))
    assert on_disk.returncode == 137, on_disk.stderr
    straight = ended_with(ddpkit(*words(tmp_path / "run")).stdout)

    died = ddpkit(*words(url), env=object_store.environment)
    assert died.returncode == 137, died.stderr
    told = rf"ddpkit: the state after step (\d+) was saved to {url}; the same command continues there\n"
    (saved,) = map(int, re.findall(told, died.stderr))
    assert saved >= 1
    again = ddpkit(*words(url), env=object_store.environment)
    assert again.returncode == 0, again.stderr
    assert f"after step {saved}" in again.stderr
    assert "waiting for the lock" not in again.stderr
    assert ended_with(again.stdout) == straight
    assert SECRET not in died.stderr + died.stdout + again.stderr + again.stdout


def test_store_that_refuses_the_copy_is_told_in_one_line(
    ddpkit: Callable[..., Any], url: str, object_store: ObjectStore
) -> None:
    with Proxy(object_store) as proxy:
        proxy.add(answer(403), "PUT .*/step-")
        died = ddpkit(*words(url), env=proxy.environment)
    assert died.returncode == 137, died.stderr
    (line,) = [line for line in died.stderr.splitlines() if "the state after step" in line]
    assert re.match(rf"ddpkit: the state after step \d+ could not be saved: cannot write {url}/step-", line)
    assert SECRET not in died.stderr
