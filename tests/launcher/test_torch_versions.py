"""What is used of torch and differs between its versions; `make versions` runs this with each of them."""

import argparse
import importlib.metadata
import os
import socket
from typing import Any

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import LogsDest

from ddp_kit.cli.launch import _later_torchrun_parser
from ddp_kit.devices.cpus import Cpus
from ddp_kit.env import GRACE_DEFAULT
from ddp_kit.errors import UsageError
from ddp_kit.launcher import plan, spec
from ddp_kit.launcher.agent import torchrun as our_torchrun
from ddp_kit.launcher.agent.torchrun import streams


def plan_with_env(*words: str, env: dict[str, str] | None = None) -> plan.Plan:
    asked = spec.parse([*words, "train.py"], env or {})
    return plan.make(asked, (), env or {}, "id", Cpus({0: 0}), {})


@pytest.mark.parametrize("flag", ["--shutdown-timeout", "--shutdown_timeout"])
def test_shutdown_timeout_flag_works_with_every_torch(flag: str) -> None:
    assert plan_with_env(flag, "5").shutdown_timeout == 5


def test_flag_of_a_later_torch_has_a_variable_for_its_default() -> None:
    made = plan_with_env(env={"PET_SHUTDOWN_TIMEOUT": "6", "PET_LOG_LINE_PREFIX_TEMPLATE": "<${rank}>"})
    assert made.shutdown_timeout == 6
    assert made.logs.log_line_prefix_template == "<${rank}>"


def test_shutdown_timeout_is_read_from_torchs_variable() -> None:
    assert [plan_with_env(env=env).shutdown_timeout for env in ({GRACE_DEFAULT: "7"}, {})] == [7, plan.GRACE_SECONDS]


@pytest.mark.parametrize(("words", "env"), [(["--shutdown-timeout=-1"], {}), ([], {GRACE_DEFAULT: "soon"})])
def test_shutdown_timeout_that_torch_does_not_check_is_checked(words: list[str], env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"0 or more, not ('soon'|-1)"):
        plan_with_env(*words, env=env)


def test_log_line_prefix_flag_takes_precedence_over_its_variable() -> None:
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "variable"}
    found = [plan_with_env(*words, env=env).logs for words in (["--log-line-prefix-template", "flag"], [])]
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
def test_empty_log_line_prefix_removes_the_labels(
    words: list[str], env: dict[str, str], label: str | None, teed: str
) -> None:
    nowhere, out = {0: ""}, {0: "out"}
    for dest, expected in (
        (LogsDest(nowhere, nowhere, {}, {}, {0: "error.json"}), label),
        (LogsDest(out, out, out, out, {0: "error.json"}), teed),
    ):
        (found,) = streams(plan_with_env(*words, env=env).logs, "default", dest, {0: 3})
        assert (found.out.label, found.err.label) == (expected, expected)


def test_log_line_prefix_can_contain_the_host() -> None:
    dest = LogsDest({0: "out"}, {0: "err"}, {0: "out"}, {0: "err"}, {0: "error.json"})
    logs = plan_with_env("--log-line-prefix-template", "${hostname} ${role_name} ${rank} ${local_rank}").logs
    (found,) = streams(logs, "trainer", dest, {0: 3})
    assert found.out.label == f"{socket.gethostname()} trainer 3 0"


def test_torchrun_defaults_are_those_of_the_installed_torchrun() -> None:
    assert our_torchrun.torchrun_defaults() == vars(torchrun.get_args_parser().parse_args(["script.py"]))
    assert our_torchrun.torchrun_defaults().keys() <= plan_with_env().torchrun.keys()


def test_numa_cpus_calls_torch_with_valid_arguments() -> None:
    """Where there is no such GPU, or nothing is known of it, torch says so; it has no word on its arguments."""
    try:
        found = our_torchrun.numa_cpus(0, "node")
    except TypeError:
        raise
    except Exception as error:
        assert "argument" not in str(error)
    else:
        assert found


# --- Flags ------------------------------------------------------------------------------------------------------------

LATER = {"shutdown_timeout", "log_line_prefix_template", "print_completion"}
"""Flags that earlier torch versions lack."""
CHOSEN_BY_THE_LAUNCHER = {"nproc_per_node": "1", "master_port": 29500}
"""Defaults of torchrun that ddpkit leaves open; later torch versions also leave the port open."""


def torchrun_actions() -> dict[str, argparse.Action]:
    return {action.dest: action for action in torchrun.get_args_parser()._actions if action.dest != "help"}


def settings_of(words: list[str]) -> dict[str, Any]:
    """ddpkit's settings for a command line, in the form of torchrun's."""
    asked = spec.parse(words, os.environ)
    return {**asked.torchrun, "nproc_per_node": asked.processes}


def test_flags_have_the_names_types_choices_and_defaults_of_the_installed_torch() -> None:
    actions = torchrun_actions()
    listed = {flag.dest: flag for flag in spec.TORCHRUN_FLAGS}
    assert actions.keys() - listed.keys() == {"training_script", "training_script_args"}
    assert listed.keys() - actions.keys() <= LATER
    for name, action in actions.items():
        if not action.option_strings:
            continue
        flag = listed[name]
        underscores = f"--{name}"
        assert {*action.option_strings} == {*filter(None, (flag.short, flag.name, underscores))}, name
        assert (action.nargs == 0) == (flag.metavar == ""), name
        if name == "print_completion":  # the choices are the shells that the installed shtab supports
            continue
        assert (None if action.choices is None else tuple(action.choices)) == flag.choices, name
        if flag.metavar and flag.type is not spec._words:
            assert action.type is flag.type, name
        default = flag.default if flag.metavar else False
        assert action.default == default or action.default == CHOSEN_BY_THE_LAUNCHER[name], name


@pytest.mark.parametrize(
    "words",
    [
        "train.py --nnodes 2 --x",
        "--nnodes=2:4 --nproc_per_node 3 --rdzv-b c10d --rdzv_endpoint h:1 --rdzv-id=a --rdzv-conf a=1,b=2 train.py",
        "--standalone --max-r=3 --monitor_i 0.5 --start-method fork --event-log console --role r train.py a b",
        "-m -r 3 -t0:1 --log_dir=logs package.train -m -- --y",
        "-mr3 --tee=3 --local_ranks_filter 0,1 package",
        "-r=1 --no-python --duplicate-stdout-filters a,,b,c --duplicate_stderr=d -- program --role x",
        "--run-path --node_rank 1 --master-addr ::1 --master_port 1234 --local-addr h /train.py",
        "--logs-specs x --numa-b socket --signals-to-handle SIGUSR1 --virtual_local_rank train.py --",
        "--role= --rdzv-id -1 -- train.py -- -x",
        "train.py -- -- x --",
    ],
)
def test_command_line_has_the_settings_of_the_installed_torchrun(words: str) -> None:
    expected = vars(torchrun.parse_args(words.split()))
    ours = settings_of(words.split())
    expected = {name: value for name, value in expected.items() if name in ours}
    for name, default in CHOSEN_BY_THE_LAUNCHER.items():
        if ours[name] is None:
            assert expected[name] in (default, None)
            expected[name] = None
    assert {name: ours[name] for name in expected} == expected


VALUES = {"monitor_interval": "0.5", "max_restarts": "3", "node_rank": "2", "master_port": "123"}


@pytest.mark.parametrize("name", [flag.dest for flag in spec.TORCHRUN_FLAGS])
def test_variable_of_a_flag_is_read_as_by_the_installed_torchrun(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in torchrun_actions():
        pytest.skip("the installed torchrun does not have this flag")
    for value in (VALUES.get(name, "9"), "1", "0"):
        monkeypatch.setenv(f"PET_{name.upper()}", value)
        assert settings_of(["train.py"])[name] == vars(torchrun.parse_args(["train.py"]))[name]


def test_unknown_flag_is_left_to_the_parser_of_a_later_torch() -> None:
    later = torchrun.get_args_parser()
    later.add_argument("--new-flag", "--new_flag", type=int, default=1)
    words = ["--nproc=2", "--new_fl", "5", "train.py", "--new-flag"]
    assert spec.parse(words, {}, lambda: later).torchrun["new_flag"] == 5
    with pytest.raises(UsageError, match="there is no flag '--new_fl'"):
        spec.parse(words, {})
    with pytest.raises(UsageError, match="there is no flag '--newer-flag'"):
        spec.parse(["--newer-flag", "train.py"], {}, lambda: later)


@pytest.mark.parametrize(
    ("version", "is_asked"), [("2.13.0+cpu", False), ("2.15", False), ("2.16.0", True), ("3.0a0", True)]
)
def test_parser_of_torch_is_used_only_if_torch_is_newer_than_the_listed_flags(
    version: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert (_later_torchrun_parser() is not None) is is_asked
