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
from ddp_kit.launcher.agent.nodes import _REMOVED, _SPARE, Coordinator, MultiNodeLink
from ddp_kit.launcher.job import (
    Dismiss,
    End,
    Job,
    Limits,
    Node,
    Order,
    Pause,
    RankAssignment,
    Report,
    StandBy,
    StartRound,
    State,
    Steps,
    Stop,
)
from ddp_kit.launcher.verdict import Failure, Outcome
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
    report = json.loads(to_json(Report(1, 0, State.FAILED, steps=Steps(3, 9, 3))))
    assert report["state"] == "FAILED"
    assert report["steps"] == {"began": 3, "reached": 9, "on_disk": 3}
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
    """The receiving half of the link of a node that does not host the rendezvous."""

    def __init__(self, number: int, store: Store) -> None:
        self.number = number
        self.items: list[Item] = []
        self._orders = store
        self._coordinator = None
        self._inbox: Any = SimpleNamespace(put=self.items.append)
        self._has_started = self._is_over = self._is_spare = False

    def listen(self) -> list[Item]:
        self._listen(0)
        return self.items


def coordinator_of(store: Any, nodes: int) -> Coordinator:
    """The coordinator of a job that waits for more nodes than have joined."""
    coordinator = Coordinator(store, Limits(min_nodes=nodes + 1, max_nodes=nodes + 1), 1.0)
    for number in range(nodes):
        joined = {"joined": Node(number, f"h{number}", 1)}
        assert coordinator._orders_after(json.loads(to_json(joined)), 0.0) == []
    return coordinator


def item_for(order: Order, node: int, lost: set[int]) -> Item | None:
    """What the inbox of a node gets for an order; None: nothing."""
    if isinstance(order, StartRound):
        if node in order.assignments:
            return StartWorkers(order.assignments[node], order.why)
        return Disconnected(_REMOVED) if node in lost else None
    if isinstance(order, StandBy):
        return Pause(_SPARE) if node in order.nodes else None
    if isinstance(order, Dismiss):
        return End(order.outcome) if node == order.node else None
    if isinstance(order, End) and node in lost:
        return Disconnected(_REMOVED)
    return order


def with_round(order: Order, number: int, lost: set[int]) -> Order:
    """The order; if it starts a round, then with a number that no other order has, and without the lost nodes."""
    if not isinstance(order, StartRound):
        return order
    members = order.assignments.keys() - lost
    return replace(order, assignments={node: replace(order.assignments[node], round=number) for node in members})


NODES = range(3)
outcomes = st.builds(Outcome, lost=texts)
ORDERS = {
    StartRound: st.builds(
        StartRound,
        st.fixed_dictionaries(
            {0: any_value(RankAssignment)}, optional={node: any_value(RankAssignment) for node in NODES[1:]}
        ),
        texts,
    ),
    Stop: any_value(Stop),
    Dismiss: st.builds(Dismiss, st.sampled_from(NODES), outcomes),
    StandBy: st.builds(StandBy, st.lists(st.sampled_from(NODES)).map(tuple)),
    Pause: any_value(Pause),
    End: st.builds(End, outcomes),
}


def test_every_order_is_tried() -> None:
    assert set(ORDERS) == set(get_args(Order))


@given(st.lists(st.one_of(*ORDERS.values()), max_size=5), outcomes, st.sets(st.sampled_from(NODES[1:])))
def test_orders_arrive_at_each_node_as_the_job_has_given_them(
    orders: list[Order], outcome: Outcome, lost: set[int]
) -> None:
    orders = [with_round(order, number, lost) for number, order in enumerate([*orders, End(outcome)])]
    for node in NODES:
        store = HashStore()
        coordinator = coordinator_of(store, len(NODES))
        for number in lost:
            coordinator._orders_after({"bye": number}, 0.0)
        given = iter(orders)

        def get(key: str, store: Store = store, given: Iterator[Order] = given, to: Coordinator = coordinator) -> bytes:
            if "order" in key:
                to._publish([next(given)])  # once the node has carried out all earlier orders
            return store.get(key)

        expected: list[Item] = []
        is_spare = False
        for order in orders:
            item = item_for(order, node, lost)
            is_new = not (is_spare and isinstance(order, StandBy))
            is_spare = not isinstance(item, StartWorkers) and (is_spare or item == Pause(_SPARE))
            if item is not None and is_new:
                expected.append(item)
            if isinstance(item, (End, Disconnected)):
                break  # the node has left the job
        assert Listener(node, SimpleNamespace(get=get)).listen() == expected  # type: ignore[arg-type]


def assignment(round: int, node: int) -> RankAssignment:
    return RankAssignment(round, 0, node, len(NODES), node, len(NODES), node, len(NODES), "h0", 29500)


def test_node_that_is_late_starts_only_the_latest_round() -> None:
    store = HashStore()
    rounds = [StartRound({node: assignment(number, node) for node in NODES}) for number in range(3)]
    coordinator_of(store, len(NODES))._publish([*rounds, Dismiss(1, Outcome())])
    assert Listener(1, store).listen() == [StartWorkers(assignment(2, 1)), End(Outcome())]


def test_node_that_joins_after_the_end_gets_the_outcome_and_a_lost_node_does_not() -> None:
    store = HashStore()
    coordinator = Coordinator(store, Limits(join_timeout=5.0, min_nodes=9, max_nodes=9), 1.0)
    coordinator._job = Job(coordinator._job._limits, 0.0)

    def join(number: int, now: float) -> None:
        joined = json.loads(to_json({"joined": Node(number, f"h{number}", 1)}))
        coordinator._publish(coordinator._orders_after(joined, now))
        coordinator._publish(coordinator._job.tick(now))

    join(1, 0.0)
    join(0, 4.0)
    join(2, 6.0)
    assert Listener(1, store).listen() == [Disconnected(_REMOVED)]
    for number in (0, 2):
        assert Listener(number, store).listen() == [End(coordinator.outcome)]


# --- Number of bytes --------------------------------------------------------------------------------------------------


class CountingStore:
    """A store that counts the bytes of all values."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.written = self.read = 0

    def clone(self) -> "CountingStore":
        return self

    def add(self, key: str, number: int) -> int:
        return self.store.add(key, number)

    def set(self, key: str, value: str) -> None:
        self.written += len(value)
        self.store.set(key, value)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.written += sum(map(len, values))
        self.store.multi_set(keys, values)

    def get(self, key: str) -> bytes:
        value = self.store.get(key)
        self.read += len(value)
        return value


TRACE = "Traceback (most recent call last):\n" + '  File "/home/user/train.py", line 3, in step\n    go()\n' * 20


def reports(nodes: int, round: int, state: State) -> Iterator[dict[str, Any]]:
    """The reports of all nodes, on which all of four workers have failed."""
    for node in range(nodes):
        failures = tuple(
            Failure(4 * node + rank, rank, 1, 1, 1.0, f"h{node}", f"ValueError: {rank}", trace=TRACE)
            for rank in range(4)
        )
        yield json.loads(to_json({"report": Report(node, round, state, failures, ended_well=(5000 + node,))}))


@pytest.mark.parametrize("phase", ["restart", "end", "partition"])
def test_bytes_per_node_do_not_depend_on_the_number_of_nodes(phase: str) -> None:
    per_node = []
    for nodes in (8, 64, 256):
        store = CountingStore()
        limits = Limits(nodes, nodes, max_restarts=phase == "restart")
        coordinator = Coordinator(store, limits, 1.0)
        for node in range(nodes):
            coordinator._publish(
                coordinator._orders_after(json.loads(to_json({"joined": Node(node, f"h{node}", 1)})), 0.0)
            )
        links = [Listener(node, store) for node in range(nodes)]  # type: ignore[arg-type]
        store.written = store.read = 0
        if phase == "partition":
            for node in range(nodes // 2):
                coordinator._job.heartbeat(node, 9.0)
            coordinator._publish(coordinator._job.tick(9.0))
        for report in reports(nodes, 0, State.FAILED):
            coordinator._publish(coordinator._orders_after(report, 9.0))
        orders = [store.get(f"ddpkit/order/{number}") for number in range(coordinator._orders)]
        for link in links:
            for order in orders:
                link._item(*json.loads(order))
        per_node.append((store.written + store.read + len(links) * sum(map(len, orders))) / nodes)
    assert "End" in str(orders[-1]) or phase != "end"
    assert per_node[2] < 1.15 * per_node[0] + 100, per_node


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
