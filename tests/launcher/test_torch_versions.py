"""What is used of torch and differs between its versions; `make versions` runs this with each of them."""

import argparse
import socket

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.numa.binding import AffinityMode, NumaOptions

from ddp_kit.env import GRACE_DEFAULT
from ddp_kit.errors import UsageError
from ddp_kit.launcher.agent import torch_versions
from ddp_kit.launcher.agent.logs import Console


def settings(*words: str) -> argparse.Namespace:
    parsed = torch_versions.torchrun_parser().parse_args([*words, "train.py"])
    parsed.master_port = 29500
    return parsed


@pytest.mark.parametrize("flag", ["--shutdown-timeout", "--shutdown_timeout"])
def test_the_shutdown_timeout_can_be_given_with_every_version(flag: str) -> None:
    asked = settings(flag, "5")
    config, _, _ = torchrun.config_from_args(asked)
    assert torch_versions.shutdown_timeout(config, asked, {}) == 5


def test_a_later_flag_has_a_variable_as_default_as_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "6")
    monkeypatch.setenv("PET_LOG_LINE_PREFIX_TEMPLATE", "<${rank}>")
    asked = settings()
    config, _, _ = torchrun.config_from_args(asked)
    assert torch_versions.shutdown_timeout(config, asked, {}) == 6
    assert torch_versions.log_line_prefix(config, asked) == "<${rank}>"


def test_the_shutdown_timeout_has_torch_s_own_variable_and_default(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for env in ({GRACE_DEFAULT: "7"}, {}):
        monkeypatch.delenv(GRACE_DEFAULT, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)  # later versions read it themselves
        config, _, _ = torchrun.config_from_args(settings())
        found.append(torch_versions.shutdown_timeout(config, settings(), env))
    assert found == [7, 30]


@pytest.mark.parametrize(("words", "env"), [(["--shutdown-timeout=-1"], {}), ([], {GRACE_DEFAULT: "soon"})])
def test_a_shutdown_timeout_that_torch_does_not_check_is_checked_here(words: list[str], env: dict[str, str]) -> None:
    without_the_field: object = object()  # as that of torch 2.10 and 2.11
    with pytest.raises(UsageError, match=r"at least 0, not ('soon'|-1)"):
        torch_versions.shutdown_timeout(without_the_field, settings(*words), env)  # type: ignore[arg-type]


def test_the_flag_for_the_prefix_of_lines_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "variable")
    found = []
    for words in (["--log-line-prefix-template", "flag"], []):
        config, _, _ = torchrun.config_from_args(settings(*words))
        found.append(torch_versions.log_line_prefix(config, settings(*words)))
    assert found == ["flag", "variable"]


def test_the_host_can_be_part_of_the_prefix_of_lines() -> None:
    dest = LogsDest({0: "out"}, {0: "err"}, {0: "out"}, {0: "err"}, {0: "error.json"})
    console = Console(direct=False, colour=False, template="${hostname} ${role_name} ${rank} ${local_rank}")
    (streams,) = console._streams(dest, "trainer", {0: {"RANK": "3"}})
    assert streams.out.label == f"{socket.gethostname()} trainer 3 0"


def test_the_defaults_are_those_of_the_installed_torchrun() -> None:
    assert torch_versions.torchrun_defaults() == vars(torchrun.get_args_parser().parse_args(["script.py"]))
    assert torch_versions.torchrun_defaults().keys() <= vars(settings()).keys()


def test_torch_is_asked_for_the_cores_of_a_gpu_in_its_own_words() -> None:
    """Where there is no such GPU, or nothing is known of it, torch says so; it has no word on its arguments."""
    try:
        found = torch_versions.numa_cpus(0, NumaOptions(AffinityMode.NODE))
    except TypeError:
        raise
    except Exception as error:
        assert "argument" not in str(error)
    else:
        assert found
