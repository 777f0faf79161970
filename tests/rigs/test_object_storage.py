"""Training with checkpoints in object storage: the real command, a local server, and a proxy that makes faults.

Nothing complete is lost, whatever is killed or fails.
"""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddp_kit.checkpoint.format import MANIFEST, Hasher, Manifest, checkpoints, manifest_in, step_of
from ddp_kit.storage.listing import object_name
from tests.support import launching
from tests.support.job_processes import JobProcesses
from tests.support.launching import DDPKIT, PROGRAMS, free_port, launch, seconds, started, wait_until
from tests.support.object_store import (
    KEY_ID,
    SECRET,
    ObjectStore,
    Proxy,
    Request,
    after,
    answer,
    before,
    change_answer,
    change_request,
    conditional,
    cut_answer,
    cut_request,
    drop_conditions,
    instead,
    kill_sender,
    lose_answer,
    stall,
)

pytestmark = pytest.mark.slow

SCRIPT = PROGRAMS / "stored.py"
FILE = r"/step-(\d{8})/([0-9a-f]+)/[\w-]+\.(safetensors|json)"
"""The path of an object with a file of a checkpoint."""
FILES = f"PUT .*{FILE}"
MANIFESTS = f"PUT .*{MANIFEST}"
LOCKS = r"PUT .*/\.lock"


class Placement(NamedTuple):
    ranks: int
    parallel: dict[str, Any] = {}


PLACEMENTS = {
    "one rank": Placement(1),
    "ddp": Placement(2),
    "ddp at 4 ranks": Placement(4),
    "zero1": Placement(2, {"strategy": "zero1"}),
    "fsdp": Placement(2, {"strategy": "fsdp"}),
    "fsdp at 4 ranks": Placement(4, {"strategy": "fsdp"}),
    "pipeline": Placement(2, {"pipeline": 2, "pipeline_stages": ["3"]}),
}


class Run:
    """Runs of the training program that save under one URL, through a proxy."""

    def __init__(self, proxy: Proxy, folder: Path, prefix: str) -> None:
        self.proxy = proxy
        self.store = proxy.store
        self.folder = folder
        self.prefix = prefix
        self.url = f"s3://{self.store.bucket}/{prefix}"
        self.job = JobProcesses()
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)

    def train(
        self,
        placement: str = "one rank",
        *flags: object,
        url: str = "",
        env: dict[str, str | None] | None = None,
        checkpoint: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Any:
        """Train to the end. Returns the finished process, with its output."""
        words = self.words(placement, *flags, url=url, checkpoint=checkpoint, **settings)
        return launch(*words, env={**self.environment, **(env or {})}, cwd=self.folder)

    @property
    def environment(self) -> dict[str, str]:
        others = {"TMPDIR": str(self.temporary), "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled")}
        return {**self.proxy.environment, **self.job.env, **others}

    def words(
        self,
        placement: str,
        *flags: object,
        url: str = "",
        checkpoint: dict[str, Any] | None = None,
        **settings: Any,
    ) -> list[object]:
        """The words of the command after `ddpkit launch`."""
        ranks, parallel = PLACEMENTS[placement]
        if checkpoint:
            settings["checkpoint"] = checkpoint
        flags = ("--nproc-per-node", ranks, *flags)
        return [*flags, SCRIPT, url or self.url, json.dumps(parallel), json.dumps(settings)]

    def pid_of(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def saved_steps(self) -> list[int]:
        """The steps that have a manifest, newest first."""
        names = [name.removeprefix(f"{self.prefix}/").split("/") for name in self.store.keys(f"{self.prefix}/step-")]
        steps = [step_of(name[0]) for name in names if name[1:] == [MANIFEST]]
        return sorted((step for step in steps if step is not None), reverse=True)

    def check_manifests(self) -> dict[int, Manifest]:
        """All manifests name objects that exist, with the right hashes. Returns those of the run, by their steps."""
        manifests = {}
        objects = self.store.keys(f"{self.prefix}/")
        for name in objects:
            place, _, last = name.removeprefix(f"{self.prefix}/").rpartition("/")
            if last != MANIFEST:
                continue
            manifest, problem = manifest_in(self.store.read(name), step_of(place.rpartition("/")[2]))
            assert manifest is not None, f"{name}: {problem}"
            for file in manifest.files:
                found = f"{self.prefix}/{object_name(place, manifest, file.name)}"
                assert found in objects, f"{name} names {found}"
                assert str(Hasher(self.store.read(found))) == file.hash, f"{found} has another hash than in {name}"
            if "/" not in place:
                manifests[manifest.step] = manifest
        return manifests

    def check_nothing_left(self) -> None:
        """No process, temporary file or shared memory of this job is left."""
        wait_until(lambda: not self.job.alive(), lambda: f"left {self.job.alive()}")
        assert not [*self.temporary.rglob("*")]
        for note in self.folder.glob("memory-*"):
            assert not Path(note.read_text()).exists()


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Of the objects of a test; no other test has it."""
    return f"{tmp_path.parent.name}-{tmp_path.name}"


@pytest.fixture
def run(object_store: ObjectStore, prefix: str, tmp_path: Path) -> Iterator[Run]:
    with Proxy(object_store) as proxy:
        yield Run(proxy, tmp_path / "run", prefix)


def ended_with(done: Any) -> list[str]:
    """The last words of all ranks, of a run that has ended well."""
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"ended \d .*", done.stdout))


def resumed_steps(done: Any) -> list[int]:
    """The steps after which a run has resumed."""
    return [int(step) for step in re.findall(r"resumed from .* after step (\d+)", done.stderr)]


# A kill between any two requests --------------------------------------------------------------------------------------


FEW_STEPS = {"max_steps": 6, "checkpoint": {"keep_last": 1}}
"""Three saves, of which the second and the third delete an older checkpoint."""


class Kill:
    """SIGKILL for a process of a run at one of its requests. `number`: of the request. `kind`: 0 to 3.

    0, 2: the process that has sent the request is killed, before and after it is done; 1, 3: rank 0.
    """

    def __init__(self, run: Run, number: int, kind: int) -> None:
        self.run = run
        self.done: Request | None = None
        self.saved: list[int] = []
        self.before = kind in (0, 3)
        self.sender = kind in (0, 2)
        moment = instead if self.before else after
        run.proxy.add(moment(self.strike), lambda request: request.number == number, times=1)
        run.proxy.add(before(self.check_read), f"GET .*{FILE}")

    def strike(self, request: Request) -> None:
        self.done = request
        pid = request.pid if self.sender else self.run.pid_of(0)
        assert pid
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.saved = self.run.saved_steps()
        for left in reversed(range(3)):  # another process may delete a checkpoint meanwhile
            try:
                self.run.check_manifests()
                break
            except AssertionError:
                if not left:
                    raise

    def check_read(self, request: Request) -> None:
        """A file is read only if a manifest names it."""
        found = re.search(FILE, request.path)
        assert found
        content = self.run.store.read(f"{self.run.prefix}/step-{found[1]}/{MANIFEST}")
        manifest, problem = manifest_in(content, int(found[1]))
        assert manifest is not None, problem
        assert manifest.folder == found[2]

    def __str__(self) -> str:
        who = "its sender" if self.sender else "rank 0"
        return f"{who} was killed {'before' if self.before else 'after'} {self.done}"


def train_with_kill(
    store: ObjectStore, folder: Path, prefix: str, placement: str, number: int, kind: int, settings: dict[str, Any]
) -> list[str]:
    """What a run ends with that resumes after a kill. Nothing complete is lost, and nothing is left."""
    with Proxy(store, finds_clients=True) as proxy:
        run = Run(proxy, folder, prefix)
        kill = Kill(run, number, kind)
        try:
            done = run.train(placement, "--max-restarts", 1, **settings)
            ended = ended_with(done)
            assert all(step >= max(kill.saved, default=0) for step in resumed_steps(done)), "a step was lost"
            assert (
                run.saved_steps()[0] == settings["max_steps"]
            )  # older ones may be left if the process that deletes them was killed
            run.check_manifests()
            run.check_nothing_left()
        except AssertionError as error:
            error.add_note(f"request {number}, kind {kind}: {kill}")
            raise
        return ended


KILLED = ("ddp", "zero1", "fsdp", "pipeline")


@pytest.mark.timeout(seconds(900))
@pytest.mark.parametrize("kinds", [0, 1])
@pytest.mark.parametrize("placement", KILLED)
def test_run_that_is_killed_between_any_two_requests_loses_nothing(
    placement: str, kinds: int, object_store: ObjectStore, prefix: str, tmp_path: Path
) -> None:
    with Proxy(object_store) as proxy:
        undisturbed = Run(proxy, tmp_path / "undisturbed", f"{prefix}/undisturbed")
        expected = ended_with(undisturbed.train(placement, **FEW_STEPS))
        undisturbed.check_nothing_left()
    requests = len(proxy.requests)
    assert requests > 40
    for number in range(requests):
        folder = tmp_path / f"{number}"
        kind = (number + kinds) % 4
        ended = train_with_kill(object_store, folder, f"{prefix}/{number}", placement, number, kind, FEW_STEPS)
        assert ended == expected


@pytest.mark.timeout(seconds(900))
@pytest.mark.parametrize(
    ("placement", "settings", "every"),
    [
        ("ddp at 4 ranks", FEW_STEPS, 7),
        ("fsdp at 4 ranks", FEW_STEPS, 11),
        ("ddp", {"hidden": 800_000, "max_steps": 4}, 7),
    ],
    ids=["ddp at 4 ranks", "fsdp at 4 ranks", "several writers, large files"],
)
def test_run_that_is_killed_at_some_requests_loses_nothing(
    placement: str, settings: dict[str, Any], every: int, object_store: ObjectStore, prefix: str, tmp_path: Path
) -> None:
    with Proxy(object_store) as proxy:
        expected = ended_with(
            Run(proxy, tmp_path / "undisturbed", f"{prefix}/undisturbed").train(placement, **settings)
        )
    for kind, number in enumerate(range(every, len(proxy.requests), every)):
        folder = tmp_path / f"{number}"
        ended = train_with_kill(object_store, folder, f"{prefix}/{number}", placement, number, kind % 4, settings)
        assert ended == expected


def test_run_that_is_killed_after_a_save_resumes_from_the_store(run: Run) -> None:
    run.proxy.add(after(lambda _: os.kill(run.pid_of(0), signal.SIGKILL)), MANIFESTS, skip=1, times=1)
    done = run.train("fsdp", "--max-restarts", 1, **FEW_STEPS)
    assert ended_with(done)
    assert resumed_steps(done) == [4]
    assert run.saved_steps() == [6]
    run.check_manifests()
    run.check_nothing_left()


# Two runs -------------------------------------------------------------------------------------------------------------


@contextmanager
def training(run: Run, *flags: object, **settings: Any) -> Iterator["subprocess.Popen[str]"]:
    """A run with one rank that has saved its first checkpoint and waits in each step; all of it ends with the block."""
    words = run.words("one rank", *flags, **settings)
    with started(DDPKIT, "launch", *words, env=run.environment, cwd=run.folder) as launcher:
        try:
            wait_until(run.saved_steps, "a checkpoint")
            yield launcher
        finally:
            for pid in (launcher.pid, *run.job.alive()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_second_run_with_the_same_url_is_refused_in_words(run: Run, tmp_path: Path) -> None:
    with training(run, seconds=0.5, max_steps=1000) as launcher:
        second = Run(run.proxy, tmp_path / "second", run.prefix)
        refused = second.train()
        assert refused.returncode == 1
        holder = f"process {run.pid_of(0)} on {socket.gethostname()!r}"
        assert f"another run is writing checkpoints to {run.url}: " in refused.stderr
        assert holder in refused.stderr
        assert "use a separate checkpoint.dir for each run" in refused.stderr
        assert "Traceback" not in refused.stderr
        saved = run.saved_steps()[0]
        wait_until(lambda: run.saved_steps()[0] > saved, "another checkpoint of the first run")
        assert launcher.poll() is None
    run.check_manifests()


def test_run_takes_over_at_once_from_one_that_was_killed_with_all_its_processes(run: Run) -> None:
    expected = ended_with(Run(run.proxy, run.folder / "undisturbed", f"{run.prefix}-undisturbed").train())
    with training(run, seconds=0.5):
        pass
    wait_until(lambda: not run.job.alive(), "the end")
    saved = run.saved_steps()[0]
    assert json.loads(run.store.read(f"{run.prefix}/.lock"))["held"]
    done = run.train()
    assert ended_with(done) == expected
    assert resumed_steps(done) == [saved]
    assert "waiting for the lock" not in done.stderr
    run.check_manifests()


def test_run_whose_lock_was_taken_stops_at_its_next_save(run: Run) -> None:
    with training(run, seconds=0.5, max_steps=1000) as launcher:
        lock = json.loads(run.store.read(f"{run.prefix}/.lock"))
        other = {**lock, "run": "another", "job": "42", "host": "elsewhere", "pid": 7}
        run.store.write(f"{run.prefix}/.lock", json.dumps(other).encode())
        taken = len(run.proxy.requests)
        _, err = launcher.communicate(timeout=seconds(60))
    assert launcher.returncode == 1
    assert f"another run has taken over {run.url}" in err
    assert "job '42', process 7 on 'elsewhere'" in err
    assert "Traceback" not in err
    late = [request for request in run.proxy.requests[taken:] if request.method == "PUT" and MANIFEST in request.path]
    assert len(late) <= 1, "at most the manifest that was about to be put"
    assert json.loads(run.store.read(f"{run.prefix}/.lock"))["run"] == "another", "the other run keeps the lock"
    run.check_manifests()


# Faults while a run trains and saves ----------------------------------------------------------------------------------


UNDISTURBED: dict[str, list[str]] = {}
"""What a run without faults ends with, by its settings."""


def undisturbed(run: Run, placement: str = "one rank", **settings: Any) -> list[str]:
    key = f"{placement} {settings}"
    if key not in UNDISTURBED:
        other = Run(run.proxy, run.folder / "undisturbed", f"{run.prefix}-undisturbed")
        UNDISTURBED[key] = ended_with(other.train(placement, **settings))
        run.proxy.requests.clear()
    return UNDISTURBED[key]


LARGE = {"hidden": 300_000, "max_steps": 4}
RETRIED: dict[str, tuple[Any, str, int, int, dict[str, Any]]] = {
    "503 for a file": (answer(503), FILES, 3, 0, {}),
    "503 for a manifest": (answer(503), MANIFESTS, 3, 1, {}),
    "503 for the lock": (answer(503), LOCKS, 3, 0, {}),
    "503 for the lock at a save": (answer(503), LOCKS, 3, 4, {}),
    "503 for a list": (answer(503), "GET .*list-type", 3, 1, {}),
    "503 for everything": (answer(503), "", 5, 20, {}),
    "500 for a deletion": (answer(500), "POST .*delete", 2, 2, {}),
    "500 for a manifest": (answer(500), MANIFESTS, 2, 1, {}),
    "file cut": (cut_request, FILES, 2, 4, {}),
    "manifest cut": (cut_request, MANIFESTS, 2, 0, {}),
    "answers of a list cut": (cut_answer, "GET .*list-type", 2, 1, {}),
    "answer for the first manifest lost": (lose_answer, MANIFESTS, 1, 0, {}),
    "answers for a manifest lost": (lose_answer, MANIFESTS, 3, 2, {}),
    "answer for the first lock lost": (lose_answer, LOCKS, 1, 0, {}),
    "answers for locks lost": (lose_answer, LOCKS, 3, 0, {}),
    "answers for locks lost at a save": (lose_answer, LOCKS, 3, 4, {}),
    "answer for a deletion lost": (lose_answer, "POST .*delete", 2, 1, {}),
    "stall of a file": (stall(5), FILES, 2, 3, {}),
    "stall of a manifest": (stall(5), MANIFESTS, 1, 1, {}),
    "stall of the lock": (stall(5), LOCKS, 1, 0, {}),
    "stall of a list": (stall(5), "GET .*list-type", 1, 1, {}),
    "part cut": (cut_request, "PUT .*partNumber=2", 2, 0, LARGE),
    "503 for a part": (answer(503), "PUT .*partNumber=", 3, 2, LARGE),
    "500 for the end of an upload": (answer(500), "POST .*uploadId", 2, 0, LARGE),
    "answer for a part lost": (lose_answer, "PUT .*partNumber=", 2, 0, LARGE),
    "answer for the end of an upload lost": (lose_answer, "POST .*uploadId", 1, 0, LARGE),
    "stall of a part": (stall(5), "PUT .*partNumber=", 1, 0, LARGE),
}


@pytest.mark.parametrize("name", RETRIED)
def test_fault_that_passes_is_not_noticed(name: str, run: Run) -> None:
    fault, where, times, skip, settings = RETRIED[name]
    expected = undisturbed(run, **settings)
    rule = run.proxy.add(fault, where, times=times, skip=skip)
    done = run.train(**settings)
    assert rule.met
    assert ended_with(done) == expected
    assert "WARNING" not in done.stderr
    steps = settings.get("max_steps", 12)
    assert run.saved_steps() == [steps, steps - 2]
    run.check_manifests()
    run.check_nothing_left()
    run.proxy.clear()
    assert resumed_steps(run.train(**settings)) == [steps]


def test_outage_of_some_seconds_is_waited_for_by_a_save(run: Run) -> None:
    """Also by the last save, after which there is no other that tries again."""
    expected = undisturbed(run)
    where = "PUT .*step-00000012/"
    run.proxy.add(before(lambda _: threading.Timer(5, rule.remove).start()), where, times=1)
    rule = run.proxy.add(answer(503), where)
    done = run.train()
    assert len(rule.met) > 2
    assert ended_with(done) == expected
    assert "WARNING" not in done.stderr
    run.check_manifests()


WARNED: dict[str, tuple[Any, str, int, int, dict[str, Any]]] = {
    "403 for a file": (answer(403), FILES, 1, 4, {}),
    "403 for files": (answer(403), FILES, 4, 0, {}),
    "403 for the first manifest": (answer(403), MANIFESTS, 1, 0, {}),
    "403 for manifests": (answer(403), MANIFESTS, 2, 1, {}),
    "403 for reading the lock": (answer(403), r"GET .*/\.lock", 2, 3, {}),
    "403 for a part": (answer(403), "PUT .*partNumber=2", 1, 0, LARGE),
    "403 for the lock at the first save": (answer(403), LOCKS, 1, 5, {}),
}


@pytest.mark.parametrize("name", WARNED)
def test_save_that_fails_is_a_warning_and_the_next_one_succeeds(name: str, run: Run) -> None:
    fault, where, times, skip, settings = WARNED[name]
    expected = undisturbed(run, **settings)
    rule = run.proxy.add(fault, where, times=times, skip=skip)
    done = run.train(**settings)
    assert len(rule.met) == times
    assert ended_with(done) == expected
    warnings = re.findall(r"WARNING (.*)", done.stderr)
    assert len(warnings) == times, warnings
    assert all("; training continues, and the next save tries again" in warning for warning in warnings)
    assert all(run.url in warning or "checkpoint of step" in warning for warning in warnings)
    assert run.saved_steps()[0] == settings.get("max_steps", 12)
    run.check_manifests()
    run.check_nothing_left()


def test_renewals_that_stall_do_not_end_the_run(run: Run) -> None:
    settings = {"seconds": 2.0}  # longer than the time between two renewals
    renewals: list[Request] = []
    run.proxy.add(before(renewals.append), LOCKS, skip=6)
    rule = run.proxy.add(stall(5), LOCKS, skip=6)
    done = run.train(**settings)
    assert rule.met == renewals
    assert len(renewals) > 1
    assert done.returncode == 0
    assert "WARNING" not in done.stderr
    run.check_manifests()
    run.check_nothing_left()


def test_processes_that_use_the_store_may_be_killed_while_training(run: Run) -> None:
    """A writer: the next save starts another one. The one that holds the lock: the run takes the lock again."""
    expected = undisturbed(run)
    run.proxy.finds_clients = True
    run.proxy.add(after(kill_sender), r"PUT .*/trainer-config.yaml", times=1)
    run.proxy.add(instead(kill_sender), FILES, times=1, skip=4)
    done = run.train()
    assert ended_with(done) == expected
    assert len(re.findall("WARNING", done.stderr)) == 2, done.stderr
    assert "resumed from" not in done.stderr
    run.check_manifests()
    run.check_nothing_left()


@pytest.mark.parametrize("what", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_file_that_was_damaged_on_its_way_to_the_store_is_not_used(what: str, run: Run) -> None:
    expected = undisturbed(run)
    with run.proxy.add(change_request, f"PUT .*/step-00000006/.*{what}"):
        run.train(max_steps=6)
    done = run.train()
    assert ended_with(done) == expected
    assert re.search(f"WARNING checkpoint skipped .*step-00000006.*{re.escape(what)}", done.stderr)
    assert resumed_steps(done) == [4]
    run.check_manifests()


@pytest.mark.parametrize(
    "fault",
    [change_answer, cut_answer, lose_answer, answer(503), stall(5)],
    ids=["changed", "cut", "lost", "503", "stall"],
)
@pytest.mark.parametrize(
    "where", [f"GET .*{FILE}", f"GET .*{MANIFEST}", "GET .*list-type"], ids=["file", "manifest", "list"]
)
def test_resume_repeats_what_was_read_wrongly(where: str, fault: Any, run: Run) -> None:
    with training(run, seconds=0.1):
        wait_until(lambda: run.saved_steps()[0] >= 4, "two checkpoints")
    saved = run.saved_steps()[0]
    before_that = run.store.keys(f"{run.prefix}/step-")
    rule = run.proxy.add(fault, where, times=1)
    done = run.train("one rank", max_steps=saved)
    assert rule.met
    assert done.returncode == 0, done.stderr
    assert resumed_steps(done) == [saved]
    assert before_that.items() <= run.store.keys(f"{run.prefix}/step-").items()


@pytest.mark.parametrize("where", [f"GET .*{FILE}", f"GET .*{MANIFEST}", "GET .*list-type", r"GET .*/\.lock"])
def test_resume_that_may_not_read_ends_in_words_and_loses_nothing(where: str, run: Run) -> None:
    """An older checkpoint, or a start from step 0, would silently repeat steps."""
    with training(run, seconds=0.1):
        wait_until(lambda: run.saved_steps()[0] >= 4, "two checkpoints")
    saved = run.store.keys(f"{run.prefix}/step-")
    with run.proxy.add(answer(403), where):
        done = run.train("ddp")
    check_refused(done, "AccessDenied", run.url)
    assert run.store.keys(f"{run.prefix}/step-") == saved
    assert resumed_steps(run.train("ddp")) == [resumed_from(saved)]


def test_resume_with_bytes_that_stay_wrong_uses_an_older_checkpoint_with_a_warning(run: Run) -> None:
    with training(run, seconds=0.1):
        wait_until(lambda: run.saved_steps()[0] >= 4, "two checkpoints")
    newest, older = run.saved_steps()
    run.proxy.add(change_answer, f"GET .*step-{newest:08}/.*model.safetensors")
    done = run.train("ddp", max_steps=newest)
    assert re.search(rf"WARNING checkpoint skipped .*step-{newest:08}.*model.safetensors is damaged", done.stderr)
    assert resumed_steps(done) == [older]


def test_store_that_forbids_to_delete_keeps_all_checkpoints(run: Run) -> None:
    expected = undisturbed(run)
    run.proxy.add(answer(403), "POST .*delete|DELETE")
    done = run.train()
    assert ended_with(done) == expected
    (warning,) = re.findall("WARNING (.*)", done.stderr)
    assert warning.startswith(f"old checkpoints in {run.url} will not be deleted, whatever keep_last says: ")
    assert run.saved_steps() == [12, 10, 8, 6, 4, 2]
    run.check_manifests()


@pytest.mark.parametrize("fault", [drop_conditions, answer(501)], ids=["ignored", "501"])
def test_store_without_conditional_requests_is_said_once(fault: Any, run: Run) -> None:
    expected = undisturbed(run)
    run.proxy.add(fault, conditional)
    done = run.train()
    assert ended_with(done) == expected
    assert len(run.proxy.seen(lambda request: request.status == 501 and MANIFEST in request.path)) == 0
    (warning,) = re.findall("WARNING (.*)", done.stderr)
    assert warning.startswith(
        f"{run.url}: the store has no conditional requests, so two runs that start at the same moment"
    )
    run.check_manifests()
    assert resumed_steps(run.train()) == [12]


# Mistakes -------------------------------------------------------------------------------------------------------------


def check_refused(done: Any, *words: str) -> None:
    """The run has ended with one message, of one rank, that has these words."""
    assert done.returncode in (1, 2), done.stderr
    for word in words:
        assert word in done.stderr
    assert len(re.findall("ddpkit: error|hint: ", done.stderr)) == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "a bug in ddpkit" not in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert not done.stdout


def resumed_from(saved: dict[str, int]) -> int:
    """The newest step among these objects."""
    return max(int(name.split("/")[-2].removeprefix("step-")) for name in saved if name.endswith(MANIFEST))


def test_bucket_that_does_not_exist(run: Run) -> None:
    check_refused(run.train("ddp", url="s3://missing/run"), "the bucket s3://missing does not exist", "hint: create it")


def test_no_credentials(run: Run) -> None:
    """A machine outside of the cloud has no metadata service: it must not be waited for."""
    env = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}
    began = time.monotonic()
    done = run.train("ddp", env={**env, "AWS_METADATA_ENDPOINT": None, "AWS_EC2_METADATA_DISABLED": None})
    check_refused(done, "there are no credentials")
    assert time.monotonic() - began < seconds(60)


@pytest.mark.parametrize(
    ("where", "verb"),
    [("PUT", "put"), ("GET .*list-type", "list"), (r"GET .*/\.lock", "get"), ("", "get")],
    ids=["put", "list", "get", "anything"],
)
def test_no_permission(where: str, verb: str, run: Run) -> None:
    run.proxy.add(answer(403), where)
    check_refused(run.train("ddp"), "AccessDenied", f"permit the identity of this job to {verb} objects in s3://bucket")
    assert not run.store.keys(f"{run.prefix}/step-")


def test_endpoint_that_refuses_connections(run: Run) -> None:
    began = time.monotonic()
    done = run.train("ddp", env={"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"})
    check_refused(done, f"cannot read {run.url}/.lock", "check the network, AWS_ENDPOINT_URL")
    assert time.monotonic() - began < seconds(90)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket", "is a whole bucket"),
        ("s3://", "has no bucket"),
        (f"s3://user:{SECRET}@bucket/run", "has a user or a password"),
        ("hf://bucket/run", "cannot be saved in hf://"),
        (f"s3://bucket/run?AWSAccessKeyId={SECRET}", "has a query or a fragment"),
    ],
)
def test_url_that_cannot_be_used(url: str, words: str, run: Run) -> None:
    check_refused(run.train("ddp", url=url), words)
    assert not run.proxy.requests


def test_other_objects_below_the_url_do_not_disturb_and_stay(run: Run) -> None:
    expected = undisturbed(run)
    names = (
        "notes.txt",
        "a/step-00000002/manifest.json",
        "step-00000002/eval/scores.json",
        "step-2/x",
        "step-00000004",
    )
    others = {f"{run.prefix}/{name}": b"not a checkpoint" for name in names}
    for name, content in others.items():
        run.store.write(name, content)
    done = run.train()
    assert ended_with(done) == expected
    assert "WARNING" not in done.stderr
    assert {name: run.store.read(name) for name in others} == others


# Placements, settings, branches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [("fsdp", "fsdp at 4 ranks"), ("ddp", "fsdp"), ("pipeline", "zero1"), ("fsdp at 4 ranks", "one rank")],
)
def test_checkpoint_is_resumed_at_another_number_of_ranks_and_placement(one: str, other: str, run: Run) -> None:
    done = run.train(one, max_steps=6)
    assert done.returncode == 0, done.stderr
    again = run.train(other, max_steps=8)
    assert ended_with(again)
    assert resumed_steps(again) == [6]
    assert run.saved_steps() == [8, 6]
    run.check_manifests()
    run.check_nothing_left()


@pytest.mark.parametrize(
    ("placement", "settings"),
    [
        ("ddp", {"checkpoint": {"trainable_only": True}}),
        ("fsdp", {"checkpoint": {"save": "blocking"}}),
        ("ddp", {"checkpoint": {"save": "overlapped"}}),
        ("ddp", {"checkpoint": {"best_metric": "loss", "keep_last": 1}, "eval_every_steps": 3}),
    ],
    ids=["trainable_only", "blocking", "overlapped", "best_metric"],
)
def test_settings_of_checkpoints_work_as_on_a_disk(placement: str, settings: dict[str, Any], run: Run) -> None:
    on_disk = run.train(placement, url=str(run.folder / "on disk"), **settings)
    steps = sorted((found.step for found in checkpoints(run.folder / "on disk") if found.whole), reverse=True)
    expected = ended_with(on_disk)
    run.proxy.finds_clients = True
    run.proxy.add(after(lambda _: os.kill(run.pid_of(0), signal.SIGKILL)), MANIFESTS, skip=1, times=1)
    done = run.train(placement, "--max-restarts", 1, **settings)
    assert ended_with(done) == expected
    assert len(resumed_steps(done)) == 1
    assert run.saved_steps() == steps
    assert best_of(run.check_manifests()) == best_of(
        {found.step: found.manifest for found in checkpoints(run.folder / "on disk")}
    )
    run.check_nothing_left()


def best_of(manifests: dict[int, Any]) -> list[int]:
    return sorted(step for step, manifest in manifests.items() if manifest.best)


def test_resume_from_an_earlier_step_sets_later_ones_aside_and_these_can_be_resumed_from(run: Run) -> None:
    kept = {"checkpoint": {"keep_last": 9}}
    expected = ended_with(run.train("fsdp", **kept))
    done = run.train("fsdp", max_steps=8, checkpoint={"keep_last": 9, "resume": f"{run.url}/step-00000004"})
    assert ended_with(done)
    assert resumed_steps(done) == [4]
    (words, branch) = re.findall(
        rf"the checkpoints of steps (.*) belong to another branch and were moved to {run.url}/(\S+);", done.stderr
    )[0]
    assert words == "6, 8, 10, 12"
    assert run.saved_steps() == [8, 6, 4, 2]
    run.check_manifests()
    aside = f"{run.url}/{branch}/step-00000010"
    other = Run(run.proxy, run.folder / "other", f"{run.prefix}-other")
    again = other.train("fsdp", checkpoint={"resume": aside})
    assert ended_with(again) == expected
    assert resumed_steps(again) == [10]
    assert resumed_steps(run.train("fsdp", max_steps=8)) == [8]


def test_branch_whose_steps_are_saved_again_keeps_its_files(run: Run) -> None:
    """Although the new checkpoints of these steps are deleted in turn."""
    assert ended_with(run.train(checkpoint={"keep_last": 9}))
    assert ended_with(run.train(checkpoint={"keep_last": 1, "resume": f"{run.url}/step-00000002"}))
    assert run.saved_steps() == [12]
    manifests = run.check_manifests()
    assert sorted(manifests) == [12]
    aside = [name for name in run.store.keys(f"{run.prefix}/set-aside-") if name.endswith(MANIFEST)]
    assert len(aside) == 5


def test_step_that_is_saved_again_is_replaced(run: Run) -> None:
    assert ended_with(run.train("fsdp", max_steps=4, again=True))
    assert len(run.proxy.seen(f"PUT .*step-00000004/{MANIFEST}")) == 2
    assert run.saved_steps() == [4, 2]
    files = [name for name in run.store.keys(f"{run.prefix}/step-00000004/") if not name.endswith(MANIFEST)]
    assert len({name.split("/")[-2] for name in files}) == 1, "the files of the first save are deleted"
    run.check_manifests()
    assert resumed_steps(run.train("fsdp", max_steps=4)) == [4]


def test_secrets_are_nowhere(run: Run) -> None:
    logs = run.folder / "logs"
    outputs = [run.train("fsdp", "--log-dir", logs, "--redirects", 3, "--tee", 3)]
    with run.proxy.add(answer(403), f"PUT .*{FILE}"):
        outputs.append(run.train("ddp", "--max-restarts", 1, max_steps=14))
    words = run.words("ddp", "--dry-run")
    outputs.append(launch(*words, env=run.environment, cwd=run.folder))
    outputs += [
        launching.run(DDPKIT, *words, env=run.environment, cwd=run.folder)
        for words in (("checkpoints", run.url), ("env",), ("report", logs))
    ]
    assert [done.returncode for done in outputs][:3] == [0, 1, 0], outputs
    assert "AccessDenied" in outputs[1].stderr
    for done in outputs:
        assert SECRET not in done.stdout + done.stderr, done.args
        assert KEY_ID not in done.stdout + done.stderr, done.args
    for name in run.store.keys(f"{run.prefix}/"):
        assert SECRET.encode() not in run.store.read(name), name
    assert f"{run.prefix}/trainer-config.yaml" in run.store.keys(f"{run.prefix}/")
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path


# Costs ----------------------------------------------------------------------------------------------------------------


def test_bytes_on_the_wire_are_those_of_the_state(run: Run) -> None:
    done = run.train("ddp", hidden=480_000, max_steps=2)
    assert ended_with(done)
    saved = sum(size for name, size in run.store.keys(f"{run.prefix}/step-").items())
    assert saved > 60 << 20
    assert len(run.proxy.seen("PUT .*partNumber=")) > 5
    assert run.proxy.bytes_sent <= 1.02 * saved
    run.proxy.requests.clear()
    assert resumed_steps(run.train("ddp", hidden=480_000, max_steps=2)) == [2]
    assert run.proxy.bytes_received <= 1.02 * saved, "one process per node reads"


def test_writer_needs_little_more_memory_than_the_buffer(run: Run) -> None:
    """Of its own: the buffer is shared with the rank."""
    own: dict[int, int] = {}
    idle: dict[int, int] = {}

    def measure(request: Request) -> None:
        assert request.pid
        own[request.pid] = max(own.get(request.pid, 0), own_memory(request.pid))

    def measure_idle(request: Request) -> None:
        assert request.pid
        idle.setdefault(request.pid, own_memory(request.pid))

    run.proxy.finds_clients = True
    run.proxy.add(before(measure_idle), f"GET .*step-00000002/{MANIFEST}")
    run.proxy.add(before(measure), "PUT .*partNumber=")
    assert ended_with(run.train("one rank", hidden=1_950_000, max_steps=2))
    (writer,) = idle
    assert sum(run.store.keys(f"{run.prefix}/step-").values()) > 240 << 20
    assert 0 < own[writer] - idle[writer] <= 64 << 20, (own, idle)


def own_memory(pid: int) -> int:
    """Bytes of memory that this process does not share."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found
    return int(found[1]) << 10
