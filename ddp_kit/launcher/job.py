"""The state machine of a job and its restart policy (`--max-restarts`). It does no I/O and reads no clock."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import Enum, auto

from ddp_kit.launcher.verdict import Failure, Outcome, asks_for_another_run, first_failure, health_lines, normalised
from ddp_kit.texts import plural

# --- Restart policy ---------------------------------------------------------------------------------------------------
# A failure without progress counts against --max-restarts. After a first crash, or if something outside the job killed
# a worker, the restart is immediate; after further crashes, it is delayed by 1, 2, 4 ... 60 s. After an error at some
# step, there is one restart; if the same error occurs at the same step, the job ends. Lost nodes have their own limit.


IDENTICAL_FAILURES = 5
"""Number of consecutive restarts with the same failure and no progress after which the job ends."""
LOST_NODES = 100
"""Limit on consecutive node losses without progress. It is high, because node losses are not the script's fault."""
PROGRESS_SECONDS = 300.0
"""Seconds after which a round is no longer considered part of a crash loop, if the script records no steps."""
MAX_WAIT = 60.0
_LISTED_LOSSES = 4


@dataclass(frozen=True)
class Steps:
    """The range of optimizer steps in one round, as recorded by the Trainer."""

    began: int
    """The step at which the round started: 0, or the step of the checkpoint from which it resumed."""
    reached: int
    on_disk: int
    """The step of the checkpoint on disk at which it could have started; lower than `began` after a copy in memory."""


@dataclass(frozen=True)
class Restart:
    """Decision to restart the workers."""

    description: str
    """Which restart this is, as text for a message, for example `restart 1 of 3`."""
    wait: float
    """Seconds before the restart."""


@dataclass(frozen=True)
class GiveUp:
    """Decision to end the job."""

    note: str
    """Why the job does not restart; empty if --max-restarts alone explains it."""


class Restarts:
    """Restart counters of one job, and the decision after each failure.

    A round counts as progress if it starts at a later step than the latest round with progress, and gets further than
    every earlier round. A script that always starts from step 0 therefore never makes progress. If only copies in
    memory let it start later, a round is progress if it was long, or ended by a cause outside of the job: a script that
    crashes after every copy must not restart forever.
    """

    def __init__(self, max_restarts: int) -> None:
        """`max_restarts`: the maximum number of consecutive restarts without progress."""
        self._max_restarts = max_restarts
        self.count = 0
        """Number of restarts after failures so far."""
        self._began = self._on_disk = 0  # of the latest round with progress
        self._reached = 0  # the highest step of any round
        self._further: Steps | None = None  # the latest round, if it is progress for a cause outside of the job
        self._since = 0  # the step of the latest progress
        self._failures = 0  # failures since the latest progress
        self._losses = 0  # losses of nodes since the latest progress
        self._crashes = 0  # consecutive crashes since the latest progress; workers killed from outside do not count
        self._latest: tuple[int, int, str] | None = None  # the latest failure
        self._times = 0  # how many times in a row it has occurred
        self._errors: set[tuple[int, str, int]] = set()  # all errors at a known step

    def round_ended(self, steps: Steps | None, seconds: float) -> None:
        """Record that a round ended after `seconds`. `steps`: None if the round's workers recorded no steps."""
        self._further = None
        if steps is None:
            if seconds >= PROGRESS_SECONDS:
                self._losses = 0
            return
        if steps.began > self._began and steps.reached > self._reached:
            self._further = steps
            if steps.on_disk > self._on_disk or seconds >= PROGRESS_SECONDS:
                self._note_progress(steps)
        self._reached = max(self._reached, steps.reached)

    def _note_progress(self, steps: Steps) -> None:
        self._began = steps.began
        self._on_disk = steps.on_disk
        self._since = steps.reached
        self._failures = self._losses = self._crashes = 0
        self._latest = None

    def node_lost(self) -> str:
        """Record that a node was lost. Return why the job must end, or an empty string if it continues."""
        self._losses += 1
        if self._losses <= LOST_NODES:
            return ""
        return f"nodes were lost {self._losses} times in a row without progress"

    def round_failed(self, first: Failure) -> Restart | GiveUp:
        """Decide what follows a round that ended with this failure."""
        if first.at_start:
            note = "not restarted: an import in the script failed"
            return GiveUp(note if self._failures < self._max_restarts else "")
        if first.faulty:
            note = "not restarted: its device would compute wrong numbers again"
            return GiveUp(note if self._max_restarts else "")
        if self._further is not None and first.from_outside:
            self._note_progress(self._further)
        self._failures += 1
        times = self._count_alike(first)
        if self._is_repeated(first):
            return GiveUp(f"not restarted again: the same error occurred twice after step {first.step}")
        if self._failures > self._max_restarts:
            if not self._max_restarts or first.step is None:
                return GiveUp("")
            return GiveUp(f"not restarted again: {self._max_restarts} consecutive restarts made no progress")
        if times > IDENTICAL_FAILURES:
            return GiveUp(f"not restarted again: the same failure occurred {times} times in a row without progress")
        self.count += 1
        description = f"restart {self.count} ({self._failures} of {self._max_restarts} since step {self._since})"
        if self.count == self._failures:
            description = f"restart {self.count} of {self._max_restarts}"
        return Restart(description, self._wait())

    def _count_alike(self, first: Failure) -> int:
        """Return how many times in a row this failure has occurred.

        If a worker was killed from outside the job, or a script that records no steps ran for a long time, the counts
        start again.
        """
        kind = (first.rank, first.exit_code, _kind_of_error(first))
        lasted = first.step is None and first.after >= PROGRESS_SECONDS
        if lasted or first.from_outside:
            self._crashes = 0
            self._latest = None
        if not first.from_outside:
            self._crashes += 1
        if kind != self._latest:
            self._times = 0
        self._latest = kind
        self._times += 1
        return self._times

    def _is_repeated(self, first: Failure) -> bool:
        """Whether the same error has already occurred at the same step, on any rank.

        The rank does not matter: if all ranks fail, any of them may be the first.
        """
        if first.step is None or first.exit_code <= 0 or first.secondary or first.hung:
            return False
        error = (first.exit_code, normalised(_kind_of_error(first)), first.step)
        repeated = error in self._errors
        self._errors.add(error)
        return repeated

    def _wait(self) -> float:
        if self._crashes < 2:
            return 0.0
        doublings = min(self._crashes, 10) - 2  # with more doublings, the wait would exceed MAX_WAIT anyway
        return min(MAX_WAIT, 2.0**doublings)


def _kind_of_error(first: Failure) -> str:
    """The message that identifies an error; empty for ddpkit's own errors, whose messages change after a restart."""
    return "" if first.printed else first.message


# --- State machine ----------------------------------------------------------------------------------------------------
#     gathering   enough nodes have joined                    -> running
#                 too few nodes join within the join timeout  -> ended
#     running     a failure, a lost node or a new node        -> stopping
#                 the workers of all nodes are done           -> ended
#     stopping    once all workers have stopped:
#                     restart at once                         -> running
#                     restart after a delay                   -> backoff
#                     too few nodes are left                  -> awaiting replacement
#                     no restart is left                      -> ended
#     backoff     the delay has passed                        -> running
#     awaiting replacement
#                 a node joins                                -> running
#                 no node joins within replacement_timeout    -> ended
#
# The inputs are reports from the nodes, and the outputs are orders to the nodes. Times are in seconds on the monotonic
# clock of the process that runs the state machine; the clocks of other nodes do not matter.


HOST = 0
"""The number of the node that hosts the rendezvous. If this node is lost, the job ends."""


@dataclass(frozen=True)
class Node:
    """A node, as its launcher describes it when it joins the job."""

    number: int
    """Position in the order of arrival, from 0."""
    host: str
    processes: int
    role: str = "default"
    rank: int | None = None
    """The value of --node-rank; None: any rank."""
    nnodes: str = "1"
    """The value of --nnodes, which must be the same on all nodes."""
    address: str = ""
    """Address at which other nodes reach this node."""
    port: int = 0
    """Port on which this node already listens for the workers' store of the next round."""

    @property
    def name(self) -> str:
        """Host name, followed by the address if it differs, because several hosts may have the same name."""
        return f"{self.host} ({self.address})" if self.address not in ("", self.host) else self.host


@dataclass(frozen=True)
class RankAssignment:
    """The ranks of one node in one round."""

    round: int
    """Number of rounds before this one."""
    restarts: int
    """Number of restarts after failures so far."""
    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int
    master_addr: str
    """Address of the node with group rank 0, which serves the workers' store of this round."""
    master_port: int


class State(Enum):
    """State of the workers of one node in a round."""

    DONE = auto()
    """All workers exited with code 0."""
    FAILING = auto()
    """At least one worker failed; the others are being stopped, which may take up to the shutdown timeout."""
    FAILED = auto()
    """At least one worker failed; the others have been stopped."""
    STOPPED = auto()
    """All workers were stopped because the job ordered it."""
    LEFT = auto()
    """The node leaves the job because its launcher received a stop signal."""


@dataclass(frozen=True)
class Report:
    """Report of one node about its workers."""

    node: int
    round: int
    state: State
    failures: tuple[Failure, ...] = ()
    port: int = 0
    """The port on which this node can serve the workers' store of the next round."""
    signal: int = 0
    """The signal that stopped the launcher, if the node leaves."""
    ended_well: tuple[int, ...] = ()
    """The ranks that exited with code 0 before any rank failed on this node."""
    steps: Steps | None = None
    """The steps of all workers of the node, including stopped ones; None if no worker recorded steps."""
    gpu_failure: Failure | None = None
    """A fatal error of a GPU of the node, which may not be in `failures`: other ranks often fail first."""


@dataclass(frozen=True)
class StartRound:
    """Order to start the workers of a round on all nodes that have an assignment.

    An agent gets only its own assignment, in `StartWorkers`.
    """

    assignments: Mapping[int, RankAssignment]
    why: str = ""
    """Why the previous round ended."""


@dataclass(frozen=True)
class Stop:
    """Order to stop the workers of a round and to report their state."""

    round: int
    may_save: bool = False
    """Whether workers may save a checkpoint first: true if a node joined or left, and no worker has failed."""


@dataclass(frozen=True)
class Dismiss:
    """Order to one node to leave the job, with this outcome. The job continues without it."""

    node: int
    outcome: Outcome


@dataclass(frozen=True)
class StandBy:
    """Announcement that these nodes are spares: they wait for a round in which a node has been lost."""

    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Pause:
    """Announcement of a delay before the next round. Nodes only print the reason."""

    why: str


@dataclass(frozen=True)
class End:
    """Announcement that the job has ended."""

    outcome: Outcome


Order = StartRound | Stop | Dismiss | StandBy | Pause | End


@dataclass(frozen=True)
class Limits:
    """The limits on nodes and restarts, and timeouts in seconds."""

    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: int = 0
    join_timeout: float = 600.0
    """Time for `min_nodes` nodes to join."""
    last_call_timeout: float = 30.0
    """Time for more nodes to join, once `min_nodes` nodes have joined."""
    heartbeat_timeout: float = 3.0
    """Time without a heartbeat after which a node counts as lost."""
    replacement_timeout: float = 12.0
    """Time for a replacement to join, if too few nodes are left."""


class _Phase(Enum):
    GATHERING = auto()
    RUNNING = auto()
    STOPPING = auto()
    BACKOFF = auto()
    AWAITING_REPLACEMENT = auto()
    """Too few nodes are left, and the job waits for a replacement."""
    ENDED = auto()


@dataclass
class _Round:
    """The round that is running or being stopped."""

    number: int = -1
    members: tuple[int, ...] = ()
    """The nodes of the round, by group rank."""
    began: float = 0.0
    present: set[int] = field(default_factory=set)
    """The members that have not been lost; includes those in `done` and `down`."""
    done: set[int] = field(default_factory=set)
    down: set[int] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    ended_well: set[int] = field(default_factory=set)
    steps: list[Steps] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    faulty: dict[int, Failure] = field(default_factory=dict)
    """The members on which a GPU has failed or a rank computes wrong gradients."""
    failing: bool = False
    for_new_node: bool = False
    """Whether the round is being stopped to admit a new node. Any failures are then caused by the stop."""

    @property
    def why_lost(self) -> str:
        """Why members have been lost; empty: none has been lost. Every node gets this text: it names only a few."""
        listed = self.lost[:_LISTED_LOSSES]
        if len(self.lost) > len(listed):
            listed.append(f"{len(self.lost) - len(listed)} more nodes were lost")
        return "; ".join(listed)


class Job:
    """State machine of one job. Each event is a method call that returns the resulting orders."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._phase = _Phase.GATHERING
        self._nodes: dict[int, Node] = {}
        self._last_heartbeat: dict[int, float] = {}
        self._by_rank: dict[int | None, int] = {}  # --node-rank -> the latest node with that rank
        self._began = now
        self._now = now
        self._enough_since: float | None = None
        self._round = _Round()
        self._restarts = Restarts(limits.max_restarts)
        # In BACKOFF: when the next round starts; in AWAITING_REPLACEMENT: when the job ends if no node has joined.
        self._due = now
        self._left_by = 0
        self._left = False  # whether a launcher has been asked to stop since the latest round began
        self._outcome = Outcome()

    @property
    def ended(self) -> bool:
        """Whether the job has ended. A node that joins later only gets the outcome."""
        return self._phase is _Phase.ENDED

    @property
    def alive(self) -> tuple[int, ...]:
        """The nodes that have joined and are not lost."""
        return tuple(self._nodes)

    def timeout(self, now: float) -> float | None:
        """Seconds until `tick` starts the next round, or None if no round is scheduled."""
        return max(0.0, self._due - now) if self._phase is _Phase.BACKOFF else None

    def joined(self, node: Node, now: float) -> list[Order]:
        """Handle a node that joins. If the job has already ended, the node gets the outcome."""
        self._now = now
        if self._phase is _Phase.ENDED:
            return [End(self._outcome)]
        is_gathering = self._phase is _Phase.GATHERING
        problem = ""
        other = next(iter(self._nodes.values()), node)  # one is enough, because the nodes that have joined agree
        if other.nnodes != node.nnodes:
            problem = f"{other.name} was started with --nnodes {other.nnodes}, {node.name} with --nnodes {node.nnodes}"
        if problem and not is_gathering:
            return [Dismiss(node.number, Outcome(lost=problem, started=False, usage=True))]
        predecessor = self._nodes.get(self._by_rank.get(node.rank, -1))
        if predecessor is not None and (not is_gathering or predecessor.host == node.host):
            # A replacement joined before the loss of its predecessor was noticed.
            self._lose(predecessor.number, f"{predecessor.name} was replaced")
        elif predecessor is not None:
            problem = f"two nodes were given node rank {node.rank}: {predecessor.name} and {node.name}"
        self._nodes[node.number] = node
        self._last_heartbeat[node.number] = now
        if node.rank is not None:
            self._by_rank[node.rank] = node.number
        if problem:
            return self._end(Outcome(lost=problem, started=False, usage=True))
        orders = self._advance()
        if self._phase is _Phase.RUNNING and not (orders or self._round.done):
            orders = [StandBy((node.number,))]
        return orders

    def heartbeat(self, number: int, now: float) -> None:
        """Handle a heartbeat from a node."""
        if number in self._last_heartbeat:
            self._last_heartbeat[number] = now

    def reported(self, report: Report, now: float) -> list[Order]:
        """Handle a report. Reports about an earlier round are ignored."""
        self._now = now
        if report.node not in self._nodes:
            return []
        self._last_heartbeat[report.node] = now
        if report.state is State.LEFT:
            self._left_by = report.signal
            why = f"{self._nodes[report.node].name} left the job"
            self._left = True
            self._lose(report.node, why)
            if self._phase is _Phase.GATHERING and report.node == HOST:
                return self._end(Outcome(lost=why, stopped_by=report.signal, started=False))
        elif report.round == self._round.number and report.state is State.FAILING:
            self._round.failing = True
        elif report.round == self._round.number:
            self._nodes[report.node] = replace(self._nodes[report.node], port=report.port)
            self._round.failures += report.failures
            faulty = next((failure for failure in report.failures if failure.faulty), report.gpu_failure)
            if faulty is not None:
                self._round.faulty[report.node] = faulty
            self._round.ended_well.update(report.ended_well)  # a node that is done reports again when it is stopped
            if report.steps is not None:
                self._round.steps.append(report.steps)
            if report.node in self._round.present:
                ended = self._round.done if report.state is State.DONE else self._round.down
                ended.add(report.node)
        return self._advance()

    def tick(self, now: float) -> list[Order]:
        """Handle the passage of time: missing heartbeats, timeouts and the end of a delay."""
        self._now = now
        limit = self._limits.heartbeat_timeout
        for number, latest in list(self._last_heartbeat.items()):
            if now - latest > limit:
                self._lose(number, f"no heartbeat from {self._nodes[number].name} for {limit:g} s")
        return self._advance()

    def _lose(self, number: int, why: str) -> None:
        self._nodes.pop(number)
        self._last_heartbeat.pop(number)
        if number in self._round.members:
            self._round.lost.append(why)
        for members in (self._round.present, self._round.done, self._round.down):
            members.discard(number)

    def _gather(self) -> list[Order]:
        limits = self._limits
        joined = len(self._nodes)
        if joined < limits.min_nodes or HOST not in self._nodes:
            self._enough_since = None
            if self._now - self._began > limits.join_timeout:
                wanted = plural(limits.min_nodes, "node")
                what = f"only {joined} of {wanted} joined within {limits.join_timeout:g} s"
                return self._end(Outcome(lost=what, started=False))
            return []
        if self._enough_since is None:
            self._enough_since = self._now
        if joined >= limits.max_nodes or self._now - self._enough_since >= limits.last_call_timeout:
            return self._start_round("")
        return []

    def _advance(self) -> list[Order]:
        """Return the orders that follow from the current state."""
        if self._phase is _Phase.GATHERING:
            return self._gather()
        if self._phase is _Phase.RUNNING:
            has_room = len(self._round.present) < min(len(self._nodes), self._limits.max_nodes)
            disturbed = bool(self._round.lost or self._round.down or self._round.failing)
            self._round.for_new_node = has_room and not self._round.done and not disturbed
            if disturbed or self._round.for_new_node:
                self._phase = _Phase.STOPPING
                after = self._after_stopping()
                if after is not None:
                    return after
                failed = bool(self._round.down or self._round.failing)
                may_save = self._round.for_new_node or (self._left and not failed)
                return [Stop(self._round.number, may_save)]
            if self._round.present and self._round.done == self._round.present:
                return self._end(Outcome())
        elif self._phase is _Phase.STOPPING:
            return self._after_stopping() or []
        elif self._phase is _Phase.BACKOFF:
            return self._check_backoff()
        elif self._phase is _Phase.AWAITING_REPLACEMENT:
            return self._check_for_replacement()
        return []

    def _after_stopping(self) -> list[Order] | None:
        """Continue or end the job once every present member has stopped. Return None if some have not stopped yet."""
        round_ = self._round
        if len(round_.down) < len(round_.present):
            return None
        self._restarts.round_ended(combined_steps(round_.steps), self._now - round_.began)
        dismissed = []
        for number, failure in round_.faulty.items():  # the next round starts without these nodes
            if number in self._nodes and number != HOST and len(self._nodes) > self._limits.min_nodes:
                self._lose(number, f"{self._nodes[number].name} was excluded from the job: {failure}")
                dismissed.append(Dismiss(number, Outcome((failure,))))
        if dismissed:
            return [*dismissed, *self._start_round_after_loss(round_.why_lost)]
        if self._too_few():
            return self._wait_for_replacement()
        if round_.lost:
            return self._start_round_after_loss(round_.why_lost)
        if round_.for_new_node:
            return self._start_round("a node joined")
        if not round_.failures:
            return self._end(Outcome(lost="all workers were stopped, and no node reported a failure"))
        return self._after_failure(tuple(round_.failures))

    def _too_few(self) -> bool:
        return len(self._nodes) < self._limits.min_nodes or HOST not in self._nodes

    def _wait_for_replacement(self) -> list[Order]:
        """Wait for a replacement for a lost node, or end the job.

        The job ends if the host is lost, if a node left after a stop signal, or if the replacement timeout is 0.
        """
        timeout = self._limits.replacement_timeout
        if HOST not in self._nodes or self._left or not timeout:
            return self._end_with_too_few_nodes()
        self._phase = _Phase.AWAITING_REPLACEMENT
        self._due = self._now + timeout
        return [Pause(f"{self._round.why_lost}; waiting {timeout:g} s for a replacement")]

    def _check_for_replacement(self) -> list[Order]:
        if HOST not in self._nodes or self._left:
            return self._end_with_too_few_nodes()
        if not self._too_few():
            return self._start_round_after_loss("a node joined")
        if self._now >= self._due:
            limit = self._limits.replacement_timeout
            return self._end_with_too_few_nodes(f"; no replacement joined within {limit:g} s")
        return []

    def _end_with_too_few_nodes(self, then: str = "") -> list[Order]:
        what = (self._round.why_lost or "too few nodes are left") + then
        return self._end(Outcome(tuple(self._round.failures), lost=what, stopped_by=self._left_by))

    def _after_failure(self, failures: tuple[Failure, ...]) -> list[Order]:
        first = first_failure(failures)
        outcome = Outcome(failures, tuple(sorted(self._round.ended_well)), restarts=self._restarts.count)
        if asks_for_another_run(outcome):
            return self._end(outcome)
        follows = self._restarts.round_failed(first)
        if isinstance(follows, GiveUp):
            return self._end(replace(outcome, note=follows.note))
        delay = f" in {follows.wait:g} s" if follows.wait else ""
        why = "\n  ".join([f"{first}; {follows.description}{delay}", *health_lines(first, failures)])
        if not follows.wait:
            return self._start_round(why)
        self._phase = _Phase.BACKOFF
        self._due = self._now + follows.wait
        return [Pause(why)]

    def _check_backoff(self) -> list[Order]:
        if self._too_few():
            return self._wait_for_replacement()
        if self._now < self._due:
            return []
        if self._round.lost:
            return self._start_round_after_loss(self._round.why_lost)
        return self._start_round("")

    def _start_round_after_loss(self, why: str) -> list[Order]:
        """Start the next round after a loss of nodes, or end the job after too many losses without progress."""
        too_often = self._restarts.node_lost()
        if too_often:
            return self._end(Outcome(tuple(self._round.failures), lost=too_often))
        return self._start_round(why)

    def _start_round(self, why: str) -> list[Order]:
        self._left_by = 0
        self._left = False
        members = self._next_members()
        self._phase = _Phase.RUNNING
        numbers = tuple(node.number for node in members)
        self._round = _Round(self._round.number + 1, numbers, self._now, set(numbers))
        orders: list[Order] = [StartRound(self._assignments(members), why)]
        spares = tuple(number for number in self._nodes if number not in self._round.present)
        if spares:
            orders.append(StandBy(spares))
        return orders

    def _next_members(self) -> list[Node]:
        """The nodes of the next round, by group rank. Nodes keep their positions; others take those of lost nodes."""
        members = []
        before = set(self._round.members)
        new = [node for node in self._nodes.values() if node.number not in before]
        new.sort(key=lambda node: (node.rank is None, node.rank, node.number))
        for number in self._round.members:
            if number in self._nodes:
                members.append(self._nodes[number])
            elif new:
                members.append(new.pop(0))
        return [*members, *new][: self._limits.max_nodes]

    def _assignments(self, members: Sequence[Node]) -> dict[int, RankAssignment]:
        assignments: dict[int, RankAssignment] = {}
        in_role = Counter[str]()
        for node in members:
            in_role[node.role] += node.processes
        before = Counter[str]()  # processes on earlier nodes, by role
        for position, node in enumerate(members):
            assignments[node.number] = RankAssignment(
                round=self._round.number,
                restarts=self._restarts.count,
                group_rank=position,
                group_world_size=len(members),
                first_rank=before.total(),
                world_size=in_role.total(),
                first_role_rank=before[node.role],
                role_world_size=in_role[node.role],
                master_addr=members[0].address,
                master_port=members[0].port,
            )
            before[node.role] += node.processes
        return assignments

    def _end(self, outcome: Outcome) -> list[Order]:
        self._phase = _Phase.ENDED
        self._outcome = outcome
        return [End(outcome)]


def combined_steps(steps: Sequence[Steps]) -> Steps | None:
    """Combine the steps of several ranks or nodes. All ranks that train start at the same step."""
    if not steps:
        return None
    return Steps(*(max(numbers) for numbers in zip(*map(astuple, steps), strict=True)))
