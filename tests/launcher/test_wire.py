"""The messages between processes: values as JSON and back, and frames on a socket."""

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, Store

from ddp_kit.launcher.agent.inbox import Disconnected, Item, StartWorkers
from ddp_kit.launcher.agent.nodes import _REMOVED, Coordinator, MultiNodeLink
from ddp_kit.launcher.job import (
    Dismiss,
    End,
    Limits,
    Node,
    Order,
    Pause,
    RankAssignment,
    Report,
    StartRound,
    State,
    Steps,
    Stop,
)
from ddp_kit.launcher.verdict import Outcome
from ddp_kit.launcher.warm.messages import Import, Message
from ddp_kit.launcher.wire import ClosedError, Connection, from_json, to_json

# --- Values as JSON ---------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec=None))
PLAIN = {
    str: texts,
    int: st.integers(-(2**60), 2**60),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    Any: st.just({"cores": [1, None]}),
}


def any_value(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation; of a message, with a value for each of its fields."""
    if kind in PLAIN:
        return PLAIN[kind]
    arguments = get_args(kind)
    origin = get_origin(kind)
    if origin is UnionType:
        return st.none() | any_value(arguments[0])
    if origin is tuple:
        return st.lists(any_value(arguments[0]), max_size=3).map(tuple)
    if origin is not None:
        return st.dictionaries(*map(any_value, arguments), max_size=3)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    fields = get_type_hints(kind)
    return st.builds(kind, **{name: any_value(each) for name, each in fields.items()})


MESSAGES = (*get_args(Message), Report, Node, Outcome, RankAssignment)


@pytest.mark.parametrize("kind", MESSAGES)
@settings(max_examples=20)
@given(st.data())
def test_message_is_equal_after_the_conversion_to_json_and_back(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(any_value(kind))
    assert from_json(kind, json.loads(to_json(message))) == message


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


# --- Orders to nodes --------------------------------------------------------------------------------------------------


class Listener(MultiNodeLink):
    """The receiving half of the link of a node."""

    def __init__(self, number: int, store: Store) -> None:
        self.number = number
        self.items: list[Item] = []
        self._orders = store
        self._inbox: Any = SimpleNamespace(put=self.items.append)
        self._has_started = self._is_over = False

    def listen(self) -> list[Item]:
        self._listen(0)
        return self.items


def item_for(order: Order, node: int, lost: set[int]) -> Item | None:
    """What the inbox of a node gets for an order; None: nothing."""
    if isinstance(order, StartRound):
        if node in order.assignments:
            return StartWorkers(order.assignments[node], order.why)
        return Disconnected(_REMOVED) if node in lost else None
    if isinstance(order, Dismiss):
        return End(order.outcome) if node == order.node else None
    if isinstance(order, End) and node in lost:
        return Disconnected(_REMOVED)
    return order


def with_round(order: Order, number: int) -> Order:
    """The order; if it starts a round, then with a number that no other order has."""
    if not isinstance(order, StartRound):
        return order
    return replace(order, assignments={node: replace(each, round=number) for node, each in order.assignments.items()})


NODES = range(3)
outcomes = st.builds(Outcome, lost=texts)
ORDERS = {
    StartRound: st.builds(
        StartRound,
        st.dictionaries(st.sampled_from(NODES), any_value(RankAssignment), min_size=1),
        texts,
    ),
    Stop: any_value(Stop),
    Dismiss: st.builds(Dismiss, st.sampled_from(NODES), outcomes),
    Pause: any_value(Pause),
    End: st.builds(End, outcomes),
}


def test_every_order_is_tried() -> None:
    assert set(ORDERS) == set(get_args(Order))


@given(st.lists(st.one_of(*ORDERS.values()), max_size=5), outcomes, st.sets(st.sampled_from(NODES[1:])))
def test_orders_arrive_at_each_node_as_the_job_has_given_them(
    orders: list[Order], outcome: Outcome, lost: set[int]
) -> None:
    orders = [with_round(order, number) for number, order in enumerate([*orders, End(outcome)])]
    store = HashStore()
    coordinator = Coordinator(store, Limits(min_nodes=9, max_nodes=9), 1.0)
    for number in NODES:
        joined = {"joined": Node(number, f"h{number}", 1)}
        assert coordinator._orders_after(json.loads(to_json(joined)), 0.0) == []
    for number in lost:
        coordinator._orders_after({"bye": number}, 0.0)
    coordinator._publish(orders)
    for node in NODES:
        expected: list[Item] = []
        for order in orders:
            item = item_for(order, node, lost)
            if item is not None:
                expected.append(item)
            if isinstance(item, (End, Disconnected)):
                break  # the node has left the job
        assert Listener(node, store).listen() == expected


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
