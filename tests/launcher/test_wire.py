"""The messages between processes: values as JSON and back, and frames on a socket."""

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_kit.launcher.job import Node, RankAssignment, Report, State, Steps
from ddp_kit.launcher.program import Program
from ddp_kit.launcher.verdict import Failure, Outcome
from ddp_kit.launcher.warm.messages import Import, Keep
from ddp_kit.launcher.wire import ClosedError, Connection, from_json, to_json

# --- Values as JSON ---------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec=None))
numbers = st.integers(-(2**60), 2**60)
programs = st.builds(Program, texts, texts, st.lists(texts).map(tuple), st.booleans())
imports = st.builds(Import, program=programs, env=st.dictionaries(texts, texts))
failures = st.builds(Failure, rank=numbers, after=st.floats(allow_nan=False), others=st.lists(texts).map(tuple))
values = st.one_of(
    programs,
    imports,
    failures,
    st.builds(Keep, imports=imports, env=st.dictionaries(texts, texts), facts=st.just({"cores": [1, None]})),
    st.builds(Outcome, failures=st.lists(failures).map(tuple)),
    st.builds(Report, state=st.sampled_from(State), failures=st.lists(failures).map(tuple)),
    st.builds(Report, state=st.just(State.DONE), steps=st.builds(Steps)),
    st.builds(Node, rank=st.none() | numbers),
    st.builds(RankAssignment),
)


@given(values)
def test_value_is_equal_after_the_conversion_to_json_and_back(value: Any) -> None:
    assert from_json(type(value), json.loads(to_json(value))) == value


def test_report_has_the_names_of_its_fields() -> None:
    report = json.loads(to_json(Report(1, 0, State.FAILED, steps=Steps(3, 9))))
    assert report["state"] == "FAILED"
    assert report["steps"] == {"began": 3, "reached": 9}
    assert report["failures"] == []


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (Import, None),
        (Import, []),
        (Import, [1]),
        (Import, {}),
        (Import, {"program": None}),
        (Import, {"program": ["python", "train.py"], "env": {}, "differing": []}),
        (Import, {"program": ["python", "train.py", []], "env": {}, "differing": 3}),
        (Steps, {"began": 1, "reached": 2, "other": 3}),
        (Report, {"node": 0, "round": 0, "state": "ABSENT"}),
        (Report, {"node": 0, "round": 0, "state": []}),
    ],
)
def test_content_with_other_fields_is_refused(kind: type[Any], content: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_json(kind, content)


# --- Frames -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(20)
    one, other = map(Connection, ends)
    yield one, other
    one.close()
    other.close()


def test_message_arrives_with_its_descriptors(pair: tuple[Connection, Connection]) -> None:
    one, other = pair
    with tempfile.TemporaryFile() as file:
        one.send({"for": "launch"}, [file.fileno()] * 3)
        assert other.receive_object() == {"for": "launch"}
        descriptors = other.take_descriptors(3)
        assert [os.fstat(number).st_ino for number in descriptors] == [os.fstat(file.fileno()).st_ino] * 3
    assert not any(map(os.get_inheritable, descriptors))
    for number in descriptors:
        os.close(number)


def test_message_with_too_few_descriptors_is_refused(pair: tuple[Connection, Connection]) -> None:
    one, other = pair
    one.send({}, [0, 1])
    assert other.receive_object() == {}
    with pytest.raises(ValueError, match="not a message"):
        other.take_descriptors(3)


def test_descriptors_that_nobody_has_taken_are_closed_with_the_connection(pair: tuple[Connection, Connection]) -> None:
    one, other = pair
    before = len(list(Path("/proc/self/fd").iterdir()))
    one.send({}, [0] * 5)
    other.receive_object()
    other.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 1


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", ClosedError),
        (b"\0\0", ClosedError),
        (b"\0\0\0\x05{}", ClosedError),
        (b"\xff\xff\xff\xff", ValueError),
        (b"\0\0\0\x02[]", ValueError),
        (b"\0\0\0\x02x]", ValueError),
        (b"\0\0\0\x01\xff", ValueError),
    ],
)
def test_message_that_is_damaged_is_refused(
    content: bytes, error: type[Exception], pair: tuple[Connection, Connection]
) -> None:
    one, other = pair
    one.socket.sendall(content)
    one.close()
    with pytest.raises(error):
        other.receive_object()


def test_end_that_neither_answers_nor_reads_is_given_up(pair: tuple[Connection, Connection]) -> None:
    one, _ = pair
    one.socket.settimeout(0.01)
    with pytest.raises(ClosedError):
        one.receive_object()
    with pytest.raises(ClosedError):
        one.send("x" * 10_000_000)


def test_messages_of_any_size_arrive_in_any_pieces(pair: tuple[Connection, Connection]) -> None:
    one, other = pair
    sent = [{"number": number, "large": "x" * 300_000} for number in range(3)]
    child = os.fork()
    if child == 0:
        for message in sent:
            one.send(message)
        os._exit(0)
    assert [other.receive_object() for _ in sent] == sent
    os.waitpid(child, 0)


def test_all_complete_messages_are_received_at_once_and_the_rest_later(pair: tuple[Connection, Connection]) -> None:
    one, other = pair
    frames = b"".join(len(text).to_bytes(4, "big") + text for text in (b"[1]", b"{}", b"[3]"))
    one.socket.sendall(frames[:-1])
    assert list(other.receive()) == [[1], {}]
    one.socket.sendall(frames[-1:])
    assert list(other.receive()) == [[3]]


def test_sender_can_act_while_the_other_end_does_not_read(pair: tuple[Connection, Connection]) -> None:
    one, other = pair
    one.socket.settimeout(0.01)
    received = bytearray()

    def read() -> None:
        received.extend(other.socket.recv(1 << 20))

    one.send({"large": "x" * 2_000_000}, while_full=read)
    assert len(received) > 1_000_000
