"""docker/: what can be read from its files everywhere, and a real image where DDPKIT_IMAGE_TESTS=1 asks for it."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
IMAGE, BASE = "localhost/ddpkit-test", "localhost/ddpkit-test-base"


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


def test_the_base_image_is_the_users_choice() -> None:
    first, *others = _instructions()
    assert first[0] == "ARG"
    assert re.fullmatch(r"BASE_IMAGE=pytorch/pytorch:[\d.]+-cuda[\d.]+-cudnn\d+-runtime", first[1])
    bases = [words.split()[0] for instruction, words in others if instruction == "FROM"]
    assert set(bases) == {"${BASE_IMAGE}"}


def test_the_container_runs_the_command_and_not_as_root() -> None:
    settings = dict(_instructions())  # the last of each counts
    assert settings["ENTRYPOINT"] == '["ddpkit"]'
    assert settings["USER"].isdecimal()  # Kubernetes' runAsNonRoot cannot judge a name
    assert int(settings["USER"]) > 0


def test_the_build_gets_the_files_it_copies_and_not_the_rest_of_the_repository() -> None:
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


def test_compose_starts_two_nodes_that_meet_and_share_no_gpu() -> None:
    nodes = [_compose()["services"][name] for name in ("node0", "node1")]
    commands = [node["command"] for node in nodes]
    assert [re.findall(r"--node-rank (\d)", command) for command in commands] == [["0"], ["1"]]
    assert len({command.replace("--node-rank 1", "--node-rank 0") for command in commands}) == 1
    assert all("--nnodes 2 " in command and "--master-addr node0 " in command for command in commands)
    assert all(node["profiles"] == ["two-nodes"] for node in nodes)  # not started together with `train`
    first, second = (set(_gpus(node)["device_ids"]) for node in nodes)
    assert first.isdisjoint(second)


def test_the_default_script_of_compose_is_an_example() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    (folder,) = set(re.findall(r"\$\{TRAIN_DIR:-(.+?)\}", text))
    (script,) = set(re.findall(r"\$\{TRAIN_SCRIPT:-(.+?)\}", text))
    assert (DOCKER / folder / script).is_file()


@pytest.mark.parametrize("folder", ["docker", "launch"])
def test_nothing_in_the_folder_can_be_imported(folder: str) -> None:
    """The root is on sys.path in an editable install, and `docker` is the name of a package on PyPI."""
    assert not [path for path in (ROOT / folder).rglob("*") if fnmatch(path.name, "*.py*")]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The image, built on a bare Debian with Python.

    DDPKIT_IMAGE_BUILD_FLAGS: what buildah needs at your site, such as mounts of certificates and pip's configuration.
    """
    if os.environ.get("DDPKIT_IMAGE_TESTS") != "1":
        pytest.skip("builds an image, which takes minutes; set DDPKIT_IMAGE_TESTS=1")
    missing = [name for name in ("buildah", "mmdebstrap", "podman", "runc") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'}")
    rootfs = tmp_path_factory.mktemp("base") / "rootfs.tar"
    packages = "--include=ca-certificates,python3,python3-pip"
    _run("mmdebstrap", "--quiet", "--variant=apt", packages, "bookworm", str(rootfs))
    container = _run("buildah", "from", "scratch").strip()
    try:
        _run("buildah", "add", container, str(rootfs), "/")
        _run("buildah", "config", "--env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
        _run("buildah", "commit", "--quiet", container, BASE)
    finally:
        _run("buildah", "rm", container)
        rootfs.unlink()
    flags = ["--isolation", "chroot", "--network", "host", "--build-arg", f"BASE_IMAGE={BASE}"]
    flags += shlex.split(os.environ.get("DDPKIT_IMAGE_BUILD_FLAGS", ""))
    try:
        _run("buildah", "build", *flags, "-f", str(DOCKER / "Dockerfile"), "-t", IMAGE, str(ROOT))
        yield IMAGE
    finally:
        subprocess.run(["buildah", "rmi", "--force", IMAGE, BASE], capture_output=True, check=False)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def _in_container(image: str, *words: str, flags: tuple[str, ...] = ()) -> str:
    # The limits: podman asks for higher ones than a machine may allow.
    limits = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")
    mount = ("--volume", f"{ROOT / 'examples'}:/workspace:ro")
    return _run(
        "podman", "--runtime", "runc", "run", "--rm", "--network", "host", *limits, *mount, *flags, image, *words
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_image_trains_as_a_user_without_rights(image: str) -> None:
    import ddp_kit

    assert _in_container(image, "--version").strip() == f"ddpkit {ddp_kit.__version__}"
    assert _in_container(image, "-u", flags=("--entrypoint", "id")).strip() == "1000"
    assert "stopped after" in _in_container(image, "launch", "--nproc-per-node", "2", "imperative.py")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_image_holds_the_wheel_and_neither_sources_nor_caches(image: str) -> None:
    where = _in_container(image, "-c", "import ddp_kit; print(ddp_kit.__file__)", flags=("--entrypoint", "python"))
    assert where.startswith("/opt/ddpkit/lib/")
    look = "ls -d /src /root/.cache /home/*/.cache /tmp/wheels 2> /dev/null || true"
    assert _in_container(image, "-c", look, flags=("--entrypoint", "sh", "--user", "0")) == ""
