"""What a job does on all its nodes, decided in one place: a pure state machine without I/O or clock.

    gathering --enough nodes--> running --a failure, a node lost or a newcomer--> stopping --all stopped--> running
                                   |                                                   | |
                                   |          running <--time-- waiting <--it crashes--+ |
                                   |   running <--a node joins-- short <--too few live--+ |
                                   |                               |  nobody joins in time |
                                   +------------- every node done --> ended <------------+ nothing left to try

Reports of nodes go in, orders for them come out. Time is seconds of one monotonic clock, the one of whoever runs
this: the clocks of other nodes do not matter.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from ddp_kit.launcher.restarts import NoMore, Restarts, Steps
from ddp_kit.launcher.verdict import Failure, Outcome, asks_for_another_run, first_failure

HOST = 0
"""The number of the node that hosts the rendezvous: without it the job ends."""


@dataclass(frozen=True)
class Node:
    """A launcher that wants to take part."""

    number: int
    """In the order of arrival."""
    host: str
    processes: int
    role: str = "default"
    rank: int | None = None
    """The node rank that its user gave it; None: any."""
    nnodes: str = "1"
    """Its --nnodes, which must be the same everywhere."""
    address: str = ""
    """Where other nodes reach it."""
    port: int = 0
    """Where it would serve the workers' store in the next round; it listens there already."""


@dataclass(frozen=True)
class RankAssignment:
    """A node's place in one round."""

    round: int
    restarts: int
    """How many restarts after failures there were so far."""
    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int
    master_addr: str
    """Where the workers' store of this round is: on the node of group rank 0."""
    master_port: int


class State(Enum):
    """What a node says about its workers of a round."""

    DONE = auto()
    """All ended well."""
    FAILING = auto()
    """At least one failed; the others are being stopped, which may take their whole shutdown timeout."""
    FAILED = auto()
    """At least one failed; the others were stopped."""
    STOPPED = auto()
    """They were stopped as ordered."""
    LEFT = auto()
    """The node leaves the job; its launcher was told to stop."""


@dataclass(frozen=True)
class Report:
    """One node's word to the job."""

    node: int
    round: int
    state: State
    failures: tuple[Failure, ...] = ()
    port: int = 0
    """Where the node would serve the workers' store in the next round: a fresh one for each."""
    signal: int = 0
    """What stopped the launcher, where it leaves."""
    ended_well: tuple[int, ...] = ()
    """The ranks that had ended with exit code 0 before any failed here."""
    steps: Steps | None = None
    """Of all its workers, those that were stopped too; None where none has noted any."""


@dataclass(frozen=True)
class Go:
    """Start workers: each node at its own assignment."""

    assignments: Mapping[int, RankAssignment]
    why: str = ""
    """Why the round before ended."""


@dataclass(frozen=True)
class Stop:
    """Stop the workers of a round and report."""

    round: int
    joined: bool = False
    """Whether it is for a newcomer: the workers are well, and may save."""


@dataclass(frozen=True)
class Pause:
    """The next round starts in a while: nothing to do but to say so."""

    why: str


@dataclass(frozen=True)
class End:
    """The job is over."""

    outcome: Outcome


Order = Go | Stop | Pause | End


@dataclass(frozen=True)
class Limits:
    """How many nodes, how many restarts, how long to wait. Seconds."""

    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: int = 0
    join: float = 600.0
    """For enough nodes to come."""
    last_call: float = 30.0
    """For more nodes, once there are enough."""
    silence: float = 3.0
    """After which a node that is not heard of is dead."""
    replacement: float = 12.0
    """For a replacement, where too few nodes are left."""


class _Phase(Enum):
    GATHERING = auto()
    RUNNING = auto()
    STOPPING = auto()
    WAITING = auto()
    SHORT = auto()
    """Too few nodes are left: waiting for a replacement."""
    ENDED = auto()


@dataclass
class _Round:
    """What is known of the round that runs, or is being stopped."""

    number: int = -1
    members: frozenset[int] = frozenset()
    began: float = 0.0
    here: set[int] = field(default_factory=set)
    """The members that are still there; `done` and `down` are among them."""
    done: set[int] = field(default_factory=set)
    down: set[int] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    ended_well: list[int] = field(default_factory=list)
    steps: list[Steps] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    failing: bool = False
    ordered: bool = False
    """Whether the job itself stopped it for the sake of a newcomer; what fails then does so in consequence."""


class Job:
    """The machine. Every method that something may follow from returns the orders that follow, in their order."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._phase = _Phase.GATHERING
        self._nodes: dict[int, Node] = {}
        self._heard: dict[int, float] = {}
        self._by_rank: dict[int, int] = {}  # given node rank -> the latest node with it
        self._began = self._now = now
        self._enough_since: float | None = None
        self._round = _Round()
        self._restarts = Restarts(limits.max_restarts)
        self._due = now  # when the next round starts, where it waits; or when nobody is waited for any longer
        self._left_by = 0
        self._left = False  # whether a node has left of its own accord since the latest round began
        self._outcome = Outcome()

    @property
    def ended(self) -> bool:
        """Whether the last order was given."""
        return self._phase is _Phase.ENDED

    @property
    def alive(self) -> tuple[int, ...]:
        """The nodes that are there."""
        return tuple(self._nodes)

    def timeout(self, now: float) -> float | None:
        """Seconds after which `tick` starts the next round; None: none waits for its time."""
        return max(0.0, self._due - now) if self._phase is _Phase.WAITING else None

    def joined(self, node: Node, now: float) -> list[Order]:
        """A node is there. One that comes after the end is told how it was."""
        self._now = now
        if self._phase is _Phase.ENDED:
            return [End(self._outcome)]
        twin = self._nodes.get(self._by_rank.get(node.rank, -1)) if node.rank is not None else None
        if twin is not None and (self._phase is not _Phase.GATHERING or twin.host == node.host):
            # A replacement that came before its predecessor's silence was noticed.
            self._lose(twin.number, f"{twin.host} was replaced")
            twin = None
        if self._phase is _Phase.GATHERING and (problem := self._misfit(node, twin)):
            return self._end(Outcome(lost=problem, started=False))
        self._nodes[node.number] = node
        self._heard[node.number] = now
        if node.rank is not None:
            self._by_rank[node.rank] = node.number
        if self._phase is _Phase.GATHERING:
            return self._gather(now)
        return self._proceed()

    def _misfit(self, node: Node, twin: Node | None) -> str:
        if twin is not None:
            return f"two nodes were given node rank {node.rank}: {twin.host} and {node.host}"
        other = next(iter(self._nodes.values()), node)  # the others are like this one
        if other.nnodes != node.nnodes:
            return f"{other.host} was started with --nnodes {other.nnodes}, {node.host} with --nnodes {node.nnodes}"
        return ""

    def heard(self, number: int, now: float) -> None:
        """A node gave a sign of life."""
        if number in self._heard:
            self._heard[number] = now

    def reported(self, report: Report, now: float) -> list[Order]:
        """A node said how its workers are; what concerns an earlier round is old news."""
        self._now = now
        if report.node not in self._nodes:
            return []
        self._heard[report.node] = now
        if report.state is State.LEFT:
            self._left_by = report.signal
            why = f"{self._nodes[report.node].host} left the job"
            self._left = True
            self._lose(report.node, why)
            if self._phase is _Phase.GATHERING and report.node == HOST:
                return self._end(Outcome(lost=why, stopped_by=report.signal, started=False))
        elif report.round == self._round.number and report.state is State.FAILING:
            self._round.failing = True
        elif report.round == self._round.number:
            self._nodes[report.node] = replace(self._nodes[report.node], port=report.port)
            self._round.failures += report.failures
            self._round.ended_well += report.ended_well
            self._round.steps += [report.steps] if report.steps is not None else []
            if report.node in self._round.here:
                (self._round.done if report.state is State.DONE else self._round.down).add(report.node)
        return self._proceed()

    def tick(self, now: float) -> list[Order]:
        """Time has passed."""
        self._now = now
        for number, heard in list(self._heard.items()):
            if now - heard > self._limits.silence:
                self._lose(number, f"{self._nodes[number].host} has not been heard of for {self._limits.silence:g} s")
        return self._gather(now) if self._phase is _Phase.GATHERING else self._proceed()

    def _lose(self, number: int, why: str) -> None:
        self._nodes.pop(number)
        self._heard.pop(number)
        if number in self._round.members:
            self._round.lost.append(why)
        for among in (self._round.here, self._round.done, self._round.down):
            among.discard(number)

    def _gather(self, now: float) -> list[Order]:
        limits, here = self._limits, len(self._nodes)
        if here < limits.min_nodes or HOST not in self._nodes:
            self._enough_since = None
            if now - self._began > limits.join:
                wanted = f"{limits.min_nodes} nodes" if limits.min_nodes > 1 else "the node"
                what = f"only {here} of {wanted} came within {limits.join:g} s"
                return self._end(Outcome(lost=what, started=False))
            return []
        if self._enough_since is None:
            self._enough_since = now
        if here >= limits.max_nodes or now - self._enough_since >= limits.last_call:
            return self._go("")
        return []

    def _proceed(self) -> list[Order]:
        """Whatever follows from what is known."""
        if self._phase is _Phase.RUNNING:
            here = len(self._round.here)
            room = here < min(len(self._nodes), self._limits.max_nodes)
            disturbed = bool(self._round.lost or self._round.down or self._round.failing)
            self._round.ordered = room and not self._round.done and not disturbed
            if disturbed or self._round.ordered:
                self._phase = _Phase.STOPPING
                after = self._decide()
                return after if after is not None else [Stop(self._round.number, self._round.ordered)]
            if self._round.here and self._round.done == self._round.here:
                return self._end(Outcome())
        elif self._phase is _Phase.STOPPING:
            return self._decide() or []
        elif self._phase is _Phase.WAITING:
            return self._wait()
        elif self._phase is _Phase.SHORT:
            return self._await_replacement()
        return []

    def _decide(self) -> list[Order] | None:
        """Once every live member has stopped: continue, or end. None: some have not."""
        round_ = self._round
        if len(round_.down) < len(round_.here):
            return None
        self._restarts.ended(_of_all(round_.steps), self._now - round_.began)
        if self._too_few():
            return self._miss_nodes()
        if round_.lost:
            what = "; ".join(round_.lost)
            too_often = self._restarts.lost()
            return self._end(Outcome(tuple(round_.failures), lost=too_often)) if too_often else self._go(what)
        if round_.ordered:
            return self._go("a node joined")
        if not round_.failures:
            return self._end(Outcome(lost="all workers were stopped, and no node reported a failure"))
        return self._after_failure(tuple(round_.failures))

    def _too_few(self) -> bool:
        return len(self._nodes) < self._limits.min_nodes or HOST not in self._nodes

    def _miss_nodes(self) -> list[Order]:
        """Too few nodes are left. One that was lost may be replaced; one that left on purpose is not waited for."""
        if HOST not in self._nodes or self._left or not self._limits.replacement:
            return self._end_for_want_of_nodes()
        self._phase, self._due = _Phase.SHORT, self._now + self._limits.replacement
        return [Pause(f"{'; '.join(self._round.lost)}; waiting {self._limits.replacement:g} s for a replacement")]

    def _await_replacement(self) -> list[Order]:
        if HOST not in self._nodes or self._left:
            return self._end_for_want_of_nodes()
        if not self._too_few():
            too_often = self._restarts.lost()
            return self._end(Outcome(lost=too_often)) if too_often else self._go("a node joined")
        if self._now >= self._due:
            self._round.lost.append(f"no replacement came within {self._limits.replacement:g} s")
            return self._end_for_want_of_nodes()
        return []

    def _end_for_want_of_nodes(self) -> list[Order]:
        what = "; ".join(self._round.lost) or "too few nodes are left"
        return self._end(Outcome(tuple(self._round.failures), lost=what, stopped_by=self._left_by))

    def _after_failure(self, failures: tuple[Failure, ...]) -> list[Order]:
        first = first_failure(failures)
        outcome = Outcome(failures, tuple(sorted(self._round.ended_well)), restarts=self._restarts.count)
        if asks_for_another_run(outcome):
            return self._end(outcome)
        follows = self._restarts.failed(first)
        if isinstance(follows, NoMore):
            return self._end(replace(outcome, note=follows.note))
        why = f"{first}; {follows.words}"
        if not follows.wait:
            return self._go(why)
        self._phase, self._due = _Phase.WAITING, self._now + follows.wait
        return [Pause(f"{why} in {follows.wait:g} s")]

    def _wait(self) -> list[Order]:
        if self._too_few():
            return self._miss_nodes()
        return self._go("; ".join(self._round.lost)) if self._now >= self._due else []

    def _go(self, why: str) -> list[Order]:
        self._left_by, self._left = 0, False
        places = sorted(self._nodes.values(), key=lambda node: (node.rank is None, node.rank, node.number))
        members = places[: self._limits.max_nodes]
        self._phase = _Phase.RUNNING
        numbers = frozenset(node.number for node in members)
        self._round = _Round(self._round.number + 1, numbers, self._now, set(numbers))
        return [Go(self._seats(members), why)]

    def _seats(self, members: Sequence[Node]) -> dict[int, RankAssignment]:
        assignments: dict[int, RankAssignment] = {}
        in_role = Counter[str]()
        for node in members:
            in_role[node.role] += node.processes
        before, before_in_role = 0, Counter[str]()
        for position, node in enumerate(members):
            assignments[node.number] = RankAssignment(
                round=self._round.number,
                restarts=self._restarts.count,
                group_rank=position,
                group_world_size=len(members),
                first_rank=before,
                world_size=in_role.total(),
                first_role_rank=before_in_role[node.role],
                role_world_size=in_role[node.role],
                master_addr=members[0].address,
                master_port=members[0].port,
            )
            before += node.processes
            before_in_role[node.role] += node.processes
        return assignments

    def _end(self, outcome: Outcome) -> list[Order]:
        self._phase, self._outcome = _Phase.ENDED, outcome
        return [End(outcome)]


def _of_all(steps: Sequence[Steps]) -> Steps | None:
    """Those of a round: its ranks begin at the same one, and those that came to begin have it noted."""
    if not steps:
        return None
    return Steps(max(each.began for each in steps), max(each.reached for each in steps))
