"""`ddpkit checkpoints` of a URL."""

import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddp_kit.checkpoint.format import FileRecord, Hasher, Manifest, manifest_content, name_of
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.cli.main import main
from ddp_kit.storage import choosing, saving
from ddp_kit.storage.store import Store
from tests.support import launching
from tests.support.object_store import BUCKET, SECRET, ObjectStore, Proxy, answer, change_answer, cut_answer, stall


def write(place: str, *steps: int, best: int = -1, **more: float) -> None:
    with Saver(place, keep_last=2000, background=False) as saver:
        for step in steps:
            model = {"weight": torch.full((3,), float(step)), "same": torch.ones(2)}
            saver.save(step, {"model": model, "progress": {"epoch": step, **more}}, best=step == best)
            saver.finished(wait=True)


def prefix_of(url: str) -> str:
    return url.removeprefix(f"s3://{BUCKET}/")


def damage(url: str, object_store: ObjectStore, step: int) -> None:
    prefix = f"{prefix_of(url)}/{name_of(step)}/"
    (key,) = [key for key in object_store.keys(prefix) if key.endswith("/model.safetensors")]
    content = bytearray(object_store.read(key))
    content[-1] ^= 1
    object_store.write(key, bytes(content))


class Run:
    """The command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, list[str]]:
        code = main(["checkpoints", *words])
        told = self._capsys.readouterr()
        self.err = told.err
        assert SECRET not in told.out + told.err
        return code, told.out.splitlines()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The command, which leaves nothing in folders for temporary files."""
    monkeypatch.setattr(choosing, "SHARED_MEMORY", str(tmp_path / "no memory"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield Run(capsys)
    assert [*tmp_path.iterdir()] == []


def states(lines: list[str]) -> dict[str, str]:
    """The state of each step in a table."""
    assert lines[0].split() == ["step", "age", "size", "files", "state"]
    rows = (re.split(r" {2,}", line.strip()) for line in lines[1:] if line[:1].isdigit() or line[:1] == " ")
    return {row[0]: row[-1] for row in rows}


def test_list(run: Run, url: str, object_store: ObjectStore) -> None:
    write(url, 3, 4, 5, 6, best=4)
    moved = saving.set_aside(Store(url), 4)
    assert moved is not None
    object_store.write(f"{prefix_of(url)}/{name_of(9)}/a0/model.safetensors", b"unfinished")
    code, lines = run(url)
    assert code == 0
    assert states(lines[:3]) == {"4": "whole, the best", "3": "whole"}
    branch = moved[0].rpartition("/")[2]
    assert lines[3:] == [
        "step-00000009/a0: incomplete; a save removes it once nothing has been written there for an hour",
        f"{branch}: an abandoned branch, which no save removes; see `ddpkit checkpoints {moved[0]}`",
    ]
    code, lines = run(moved[0], "--verify")
    assert code == 0
    assert states(lines) == {"6": "whole", "5": "whole"}


def test_damage(run: Run, url: str, object_store: ObjectStore) -> None:
    write(url, 3, 4, 5)
    damage(url, object_store, 4)
    (key,) = [key for key in object_store.keys(f"{prefix_of(url)}/{name_of(5)}/") if key.endswith("state.json")]
    object_store.write(key, b"short")
    code, lines = run(url)
    assert code == 1
    assert states(lines)["4"] == "whole", "sizes alone do not tell"
    assert states(lines)["5"].startswith("state.json has 5 bytes instead of ")
    code, lines = run(url, "--verify")
    assert code == 1
    assert states(lines)["4"] == "model.safetensors is damaged: its hash differs from the one in manifest.json"
    assert states(lines)["3"] == "whole"
    assert re.findall(r"verifying step (\d \(\d of 3, \d+ bytes\))", run.err)
    object_store.delete(key)
    assert states(run(url)[1])["5"] == "state.json is missing"


@pytest.mark.parametrize("fault", [change_answer, cut_answer])
def test_file_that_arrives_damaged_once_is_read_again(
    fault: object, run: Run, url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(url, 3)
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.add(fault, "GET .*model.safetensors", times=1)  # type: ignore[arg-type]
        assert run(url, "--verify")[0] == 0


def test_verifying_stores_nothing_and_reads_each_byte_once(
    run: Run, url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(20 << 20)
    record = FileRecord("model.safetensors", len(content), str(Hasher(content)))
    manifest = Manifest(7, "2026-01-01T00:00:00+00:00", False, {}, (record,), "a0")
    store = Store(url)
    store.upload(f"{name_of(7)}/a0/model.safetensors", memoryview(content))
    store.put(f"{name_of(7)}/manifest.json", manifest_content(manifest))
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        assert run(url, "--verify")[0] == 0
        assert len(proxy.seen("GET .*model.safetensors")) == 3
        assert proxy.bytes_received < 1.02 * len(content)
    monkeypatch.setattr(tempfile, "tempdir", str(Path.cwd()))


def test_differences(run: Run, url: str) -> None:
    write(url, 3, 4)
    write(f"{url}-other", 4, more=1.5)
    code, lines = run(url, "--diff", "3", "4")
    assert (code, lines) == (
        0,
        ["step 3 -> step 4: 2 differences", "  model: weight: F32 [3], other values", "  progress.epoch: 3 -> 4"],
    )
    other = f"{url}-other/{name_of(4)}"
    code, lines = run(url, "--verify", "--diff", "4", other)
    assert (code, lines) == (0, [f"step 4 -> {other}: 1 difference", "+ progress.more: 1.5"])
    assert run(url, "--diff", "4", f"{url}/{name_of(4)}")[1] == [f"step 4 -> {url}/{name_of(4)}: no differences"]


def test_differences_to_a_folder(run: Run, url: str, tmp_path: Path) -> None:
    write(url, 3)
    write(str(tmp_path / "run"), 3)
    code, lines = run("run", "--diff", "3", f"{url}/{name_of(3)}")
    assert (code, lines) == (0, [f"step 3 -> {url}/{name_of(3)}: no differences"])
    for path in sorted((tmp_path / "run").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "run").rmdir()


def test_differences_of_damaged_checkpoints(run: Run, url: str, object_store: ObjectStore) -> None:
    write(url, 3, 4, 5)
    damage(url, object_store, 4)
    code, lines = run(url, "--diff", "3", "4")
    assert code == 1
    assert "model.safetensors is damaged" in lines[0]
    object_store.write(f"{prefix_of(url)}/{name_of(5)}/manifest.json", b"{}")
    code, lines = run(url, "--diff", "3", f"{url}/{name_of(5)}")
    assert code == 1
    assert states(lines)["5"].startswith("not a ddpkit checkpoint")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "there are no checkpoints in {url}"),
        ([f"/{name_of(3)}"], f"{{url}}/{name_of(3)} is one checkpoint, not a folder of checkpoints"),
        (["--diff", "3", "4"], "there are no checkpoints in {url}"),
    ],
)
def test_what_is_not_there(words: list[str], problem: str, run: Run, url: str) -> None:
    place = url + "".join(word for word in words if word.startswith("/"))
    assert run(place, *(word for word in words if not word.startswith("/"))) == (2, [])
    assert problem.format(url=url) in run.err


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("4", "there is no checkpoint of step 4"),
        ("s3://bucket/other", "s3://bucket/other is not the URL of a checkpoint"),
        ("hf://bucket/step-00000003", "checkpoints cannot be saved in hf://"),
        (f"s3://bucket/other/{name_of(3)}", f"there is no checkpoint at s3://bucket/other/{name_of(3)}"),
    ],
)
def test_nothing_to_compare_with(word: str, problem: str, run: Run, url: str) -> None:
    write(url, 3)
    assert run(url, "--diff", "3", word) == (2, [])
    assert problem in run.err


def test_store_that_refuses_is_a_message(
    run: Run, url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(url, 3)
    assert run("s3://nothing/run") == (2, [])
    assert "the bucket s3://nothing does not exist" in run.err
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        for where, words in (("list-type", []), ("manifest", []), ("GET .*model", ["--verify"])):
            with proxy.add(answer(403), where):
                assert run(url, *words) == (2, [])
            assert "AccessDenied" in run.err


def test_thousand_steps(run: Run, url: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1000):
        manifest = Manifest(step, "2026-01-01T00:00:00+00:00", False, {}, (), "a0")
        object_store.write(f"{prefix_of(url)}/{name_of(step)}/manifest.json", manifest_content(manifest))
    object_store.write(f"{prefix_of(url)}/.lock", b"{}")
    with Proxy(object_store) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        code, lines = run(url)
        assert code == 0
        assert states(lines) == {str(step): "whole" for step in range(1000)}
        assert len(proxy.seen("list-type")) == 2
        assert len(proxy.requests) == 1002


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--verify"], ["--diff", "3", "4"]])
def test_ctrl_c_while_the_store_stalls(words: list[str], url: str, object_store: ObjectStore, tmp_path: Path) -> None:
    write(url, 3, 4)
    with Proxy(object_store) as proxy:
        stalled = proxy.add(stall(), "GET .*model.safetensors" if words else "manifest.json")
        env = proxy.environment | {"TMPDIR": str(tmp_path)}
        with launching.started(launching.DDPKIT, "checkpoints", url, *words, env=env) as process:
            launching.wait_until(lambda: stalled.met, "the request")
            process.send_signal(signal.SIGINT)
            assert process.wait(launching.seconds(10)) == 128 + signal.SIGINT
    assert not [*tmp_path.iterdir()]
    assert not [*Path("/dev/shm").glob("ddpkit-fetched-*")]
