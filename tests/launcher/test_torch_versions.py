"""What is used of torch and differs between its versions; `make versions` runs this with each of them."""

import socket

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import LogsDest

from ddp_kit.env import GRACE_DEFAULT
from ddp_kit.errors import UsageError
from ddp_kit.launcher import plan, spec
from ddp_kit.launcher.agent import torch_versions
from ddp_kit.launcher.agent.logs import streams
from ddp_kit.launcher.devices.cpus import Cpus


def planned(*words: str, env: dict[str, str] | None = None) -> plan.Plan:
    asked = spec.parse([*words, "train.py"], torch_versions.torchrun_parser(), env or {})
    return plan.make(asked, (), env or {}, "id", Cpus({0: 0}), {})


@pytest.mark.parametrize("flag", ["--shutdown-timeout", "--shutdown_timeout"])
def test_the_shutdown_timeout_can_be_given_with_every_version(flag: str) -> None:
    assert planned(flag, "5").shutdown_timeout == 5


def test_a_later_flag_has_a_variable_as_default_as_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_SHUTDOWN_TIMEOUT", "6")
    monkeypatch.setenv("PET_LOG_LINE_PREFIX_TEMPLATE", "<${rank}>")
    made = planned()
    assert made.shutdown_timeout == 6
    assert made.logs.log_line_prefix_template == "<${rank}>"


def test_the_shutdown_timeout_has_torch_s_own_variable() -> None:
    assert [planned(env=env).shutdown_timeout for env in ({GRACE_DEFAULT: "7"}, {})] == [7, plan.GRACE_SECONDS]


@pytest.mark.parametrize(("words", "env"), [(["--shutdown-timeout=-1"], {}), ([], {GRACE_DEFAULT: "soon"})])
def test_a_shutdown_timeout_that_torch_does_not_check_is_checked_here(words: list[str], env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"0 or more, not ('soon'|-1)"):
        planned(*words, env=env)


def test_the_flag_for_the_prefix_of_lines_wins_over_its_variable() -> None:
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "variable"}
    found = [planned(*words, env=env).logs for words in (["--log-line-prefix-template", "flag"], [])]
    assert [logs.log_line_prefix_template for logs in found] == ["flag", "variable"]


@pytest.mark.parametrize(
    ("words", "env", "label", "teed"),
    [
        (["--log-line-prefix-template", ""], {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "variable"}, "", "[default0]:"),
        ([], {"PET_LOG_LINE_PREFIX_TEMPLATE": ""}, "", "[default0]:"),
        ([], {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": ""}, "", "[default0]:"),
        ([], {}, None, "[default0]:"),
    ],
)
def test_an_empty_prefix_removes_the_labels_that_torchrun_does_not_have(
    words: list[str], env: dict[str, str], label: str | None, teed: str
) -> None:
    nowhere, out = {0: ""}, {0: "out"}
    for dest, expected in (
        (LogsDest(nowhere, nowhere, {}, {}, {0: "error.json"}), label),
        (LogsDest(out, out, out, out, {0: "error.json"}), teed),
    ):
        (found,) = streams(planned(*words, env=env).logs, "default", dest, {0: 3})
        assert (found.out.label, found.err.label) == (expected, expected)


def test_the_host_can_be_part_of_the_prefix_of_lines() -> None:
    dest = LogsDest({0: "out"}, {0: "err"}, {0: "out"}, {0: "err"}, {0: "error.json"})
    logs = planned("--log-line-prefix-template", "${hostname} ${role_name} ${rank} ${local_rank}").logs
    (found,) = streams(logs, "trainer", dest, {0: 3})
    assert found.out.label == f"{socket.gethostname()} trainer 3 0"


def test_the_defaults_are_those_of_the_installed_torchrun() -> None:
    assert torch_versions.torchrun_defaults() == vars(torchrun.get_args_parser().parse_args(["script.py"]))
    assert torch_versions.torchrun_defaults().keys() <= planned().torchrun.keys()


def test_torch_is_asked_for_the_cores_of_a_gpu_in_its_own_words() -> None:
    """Where there is no such GPU, or nothing is known of it, torch says so; it has no word on its arguments."""
    try:
        found = torch_versions.numa_cpus(0, "node")
    except TypeError:
        raise
    except Exception as error:
        assert "argument" not in str(error)
    else:
        assert found
