"""Job files that `ddpkit submit` would submit."""

from ddp_kit.cli import submit
from ddp_kit.terminal import Terminal


def job_file(*words: str) -> str:
    """The job file for these words after `ddpkit submit`, of which the first two are `--on` and an engine."""
    printed: list[str] = []
    assert submit.run([*words[:2], "--dry-run", *words[2:]], Terminal({}, printed.append)) == 0
    return printed[0]
