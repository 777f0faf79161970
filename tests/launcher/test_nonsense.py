"""Values that mean nothing, for every flag and variable: a `UsageError` that names them, or a plan; nothing else."""

import logging
import os
import traceback

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ddp_kit.devices import cpus
from ddp_kit.errors import UsageError
from ddp_kit.launcher import agent, plan, spec

C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
NONSENSE = [
    "nonsense",
    "-1",
    "",
    "1.5",
    "9" * 20,
    "nan",
    "1e999",
    "\u2603\x07",
    "a=b",
    ",",
    "0:9",
    "/nowhere/x",
    "\u00b2",
]
CONF = ["timeout", "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout", "is_host"]
CONF += ["keep_alive_interval", "keep_alive_max_attempt", "replacement_timeout"]


def plan_of(*words: str) -> plan.Plan:
    """The plan of a launch. Raises `UsageError`."""
    asked = spec.parse([*words, "train.py"], os.environ)
    asked = asked._replace(processes=agent.nproc_per_node(asked.processes))
    return plan.make(asked, (), os.environ, "id", cpus.here(), {})


def refusal(*words: str) -> str:
    """Why a launch is refused, empty where it is not; as `ddpkit launch --dry-run` does it."""
    try:
        agent.check(plan_of(*words))
    except UsageError as error:
        assert error.hint
        return error.message
    return ""


def unexpected(*words: str) -> str:
    """The traceback that a user would see."""
    try:
        refusal(*words)
    except Exception:
        return f"{words}: {traceback.format_exc()}"
    return ""


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else torch says that it sets it


def test_flag_with_any_nonsense_value_raises_no_other_error() -> None:
    valued = [flag.name for flag in spec.TORCHRUN_FLAGS if flag.metavar]
    found = [
        unexpected(f"{flag}={value}")
        for flag in [*valued, "--gpus", "--gpus-per-process", "--hang-timeout"]
        for value in NONSENSE
    ]
    assert not list(filter(None, found))


def test_variable_with_any_nonsense_value_raises_no_other_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for flag in spec.TORCHRUN_FLAGS:
        for value in NONSENSE:
            with monkeypatch.context() as patch:
                patch.setenv(f"PET_{flag.dest.upper()}", value)
                found.append(unexpected())
    assert not list(filter(None, found))


def torchrun_refuses(*words: str) -> bool:
    """Whether torchrun ends with an error before it starts a worker."""
    try:
        config, _, _ = torchrun.config_from_args(torchrun.parse_args([*words, "train.py"]))
        where = config.rdzv_backend, config.rdzv_endpoint, config.run_id, config.min_nodes, config.max_nodes
        get_rendezvous_handler(RendezvousParameters(*where, **config.rdzv_configs))
    except Exception:
        return True
    return False


@pytest.mark.parametrize("backend", [C10D, ("--master-port=29871",)], ids=["c10d", "static"])
@pytest.mark.parametrize("name", [*CONF, "unknown", "protocol", "store_type"])
def test_rdzv_conf_accepts_and_refuses_the_same_as_torchrun(
    backend: tuple[str, ...], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for value in ("abc", "-1", "", "nan", "inf", "1e999", "\u00b2", "0", " 5 ", "5'", "''", "TCP"):
        setting = f"--rdzv-conf={name}={value}"
        assert not refusal(*backend, setting) or torchrun_refuses(*backend, setting) or name == "replacement_timeout"
    given = "tcp" if name == "store_type" else "1"
    assert not refusal(*backend, f"--rdzv-conf={name}={given}")
    assert not refusal(*backend, f"--rdzv-conf='{name}={given}'")


@pytest.mark.parametrize("name", CONF)
def test_rdzv_conf_setting_that_torchrun_refuses_is_named(name: str) -> None:
    backend = ("--master-port=29871",) if name == "timeout" else C10D
    for value in ("abc", "nan", "\u00b2"):
        assert f"{name}={value}" in refusal(*backend, f"--rdzv-conf={name}={value}")


@pytest.mark.parametrize("backend", [(), C10D, ("--master-port=29871",)], ids=["alone", "c10d", "static"])
def test_rdzv_conf_with_quotes_that_no_shell_removed_is_read(backend: tuple[str, ...]) -> None:
    """As the launcher's own tests in torch write them, and a list of words in a YAML file."""
    made = plan_of(*backend, "--rdzv-conf='join_timeout=5,last_call_timeout=1,timeout=5'")
    assert (made.rendezvous.limits.join_timeout, made.rendezvous.limits.last_call_timeout) == (5, 1)
    assert not made.notices


def test_rdzv_conf_setting_that_torchrun_never_reads_is_ignored_with_a_notice() -> None:
    assert plan_of(*C10D, "--rdzv-conf=timeout=soon").notices == (
        "--rdzv-conf timeout=soon is not a number greater than 0, and is ignored",
    )


@settings(max_examples=40)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_rdzv_conf_and_rdzv_endpoint_with_any_text_give_no_traceback(text: str) -> None:
    assert not unexpected(f"--rdzv-conf={text}") + unexpected(*C10D, f"--rdzv-conf=timeout={text}")
    assert not unexpected("--rdzv-backend=c10d", f"--rdzv-endpoint={text}")
    assert not unexpected("--rdzv-backend=static", f"--rdzv-endpoint={text}")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--rdzv-backend=static --rdzv-endpoint=somewhere", "--rdzv-endpoint somewhere has no port"),
        ("--rdzv-endpoint=::1", "--rdzv-endpoint ::1 has no port"),
        ("--rdzv-endpoint=[::1]", "--rdzv-endpoint [::1] has no port"),
        ("--monitor-interval=0", "--monitor-interval must be greater than 0 seconds, not 0.0"),
        ("--monitor-interval=nan", "--monitor-interval must be greater than 0 seconds, not nan"),
        (f"--nproc-per-node={9 * 10**19}", f"--nproc-per-node {9 * 10**19}"),
    ],
)
def test_unusable_value_is_named(words: str, named: str) -> None:
    assert refusal(*words.split()).startswith(named)


def test_ipv6_master_address_keeps_its_port() -> None:
    words = ["--nproc-per-node=1", "--master-addr=::1", "--master-port=29871", "train.py"]
    made = plan.make(spec.parse(words, {}), (), {}, "id", cpus.here(), {})
    assert (made.rendezvous.host, made.rendezvous.port) == ("::1", 29871)
