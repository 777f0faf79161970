"""What commands read of a run whose ranks have written shards into object storage is what they read of one on disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.launching import PROGRAMS
from tests.support.object_store import SECRET, ObjectStore
from tests.support.toys import same_state

pytestmark = pytest.mark.slow

SCRIPT = PROGRAMS / "shards_in_store.py"


@pytest.mark.parametrize("parallel", [{"strategy": "fsdp"}, {"strategy": "zero1"}], ids=str)
def test_commands_and_load_model(
    parallel: dict[str, Any], ddpkit: Callable[..., Any], url: str, object_store: ObjectStore, tmp_path: Path
) -> None:
    def run(*words: object) -> str:
        done = ddpkit(*words, env=object_store.environment)
        assert done.returncode == 0, done.stderr
        assert SECRET not in done.stdout + done.stderr
        return str(done.stdout)

    loaded = []
    for place in (str(tmp_path / "run"), url):
        loaded.append(run("launch", "--nproc-per-node", 2, SCRIPT, place, json.dumps(parallel)))
    assert loaded[0] == loaded[1].replace(url, str(tmp_path / "run"))
    assert "obstore is not imported" in loaded[1]
    assert "whole" in run("checkpoints", url, "--verify")
    same = run("checkpoints", url, "--diff", f"{url}/step-00000004", tmp_path / "run" / "step-00000004")
    assert "other values" not in same
    for flags in ([], ["--best"], ["--ema"]):
        files = [tmp_path / f"{name}{len(flags)}{''.join(flags)}.safetensors" for name in ("disk", "store")]
        run("export", tmp_path / "run", files[0], *flags)
        run("export", url, files[1], *flags)
        assert same_state(*map(load_file, files))
