"""`ddpkit rehearse`: show whether a resumed run of a script is the same run."""

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread

from ddp_kit.arguments import Parser
from ddp_kit.env import KEEP_WARM, OFFLINE, PACKAGE_FOLDER, REHEARSAL, WATCHED_BY, child_code
from ddp_kit.errors import LaunchError, UsageError
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher import spec
from ddp_kit.launcher.processes import die_with_parent
from ddp_kit.rehearsal import compare
from ddp_kit.rehearsal.compare import CAUSES, Difference
from ddp_kit.rehearsal.lines import (
    DISTURBED_FILE,
    ELSEWHERE_FILE,
    LAUNCHER_FILE,
    Instructions,
    Recording,
    read_attempts,
)
from ddp_kit.terminal import Terminal
from ddp_kit.texts import plural

_RUN = "{run}"
_LAUNCH = child_code("from ddp_kit.cli.main import entry", "entry(['launch', *sys.argv[2:]])")
_WATCH = "ddp_kit.rehearsal.watch:install"  # not imported here, because it imports torch
_FEWEST_STEPS = 4
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SHOWN_LINES = 12
_POLL_SECONDS = 0.1
_END_SECONDS = 40.0
_HINT = (
    "put {run} into the argument that names this folder, such as --output_dir out-{run}: it becomes the name of the run"
)
_OWN = ("help", "steps", "ranks", "step_timeout", "keep", "json")
_EPILOG = """\
examples:
  ddpkit rehearse --nproc-per-node 2 train.py                                a script with a Trainer
  ddpkit rehearse --nproc-per-node 2 train.py --output_dir out-{run}         any other script
  ddpkit rehearse --steps 60 --gpus 4 --ranks 2,3 train.py --output_dir out-{run}

All flags of `ddpkit launch` are accepted, except those for several nodes. The first steps of the script run several
times: twice undisturbed, with `kill -9` of one rank and a restart, with SIGTERM and the same command again, and with
--ranks, with SIGTERM and the same command at other numbers of ranks. Choose --steps so that the script saves a
checkpoint within two thirds of them. Each run has its own folders: checkpoint.dir of a Trainer is replaced, and {run}
in an argument of the script becomes the name of the run. W&B, MLflow and others are offline.

exit codes:
  0  every resumed run is the undisturbed run
  1  a run differs, or fails
  2  the command line is invalid, or the script cannot be rehearsed
"""


class RehearsalError(LaunchError):
    """A run of the rehearsal failed, so nothing can be compared."""


def parser(env: Mapping[str, str] | None = None) -> Parser:
    """Create the argument parser of `ddpkit rehearse`: its own flags, and those of `ddpkit launch`."""
    flags = Parser(
        prog="ddpkit rehearse",
        usage="ddpkit rehearse [flags] script.py [script arguments]",
        description="Show whether a resumed run of a script is the same run: its first steps run undisturbed, killed, "
        "and stopped, and every step is compared.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[spec.parser(env or {})],
        add_help=False,
        conflict_handler="resolve",
    )
    own = flags.add_argument_group("flags of the rehearsal")
    own.add_argument("--steps", metavar="N", type=int, default=40, help="optimizer steps of each run. Default: 40")
    own.add_argument(
        "--ranks",
        metavar="N,...",
        default="",
        help="also resume at these numbers of ranks, and compare with a tolerance",
    )
    own.add_argument(
        "--step-timeout",
        metavar="SECONDS",
        type=float,
        default=300.0,
        help="longest time for one optimizer step, or from the start to the first one. Default: 300",
    )
    own.add_argument("--keep", action="store_true", help="keep the folders of the runs")
    own.add_argument("--json", action="store_true", help="print the result as JSON")
    return flags


@dataclass(frozen=True)
class Result:
    """What one disturbance has shown."""

    disturbance: str
    equal: bool
    summary: str
    differences: tuple[Difference, ...] = ()
    cause: str = ""
    note: str = ""


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """Run the rehearsal, print one line per disturbance, and return the exit code."""
    try:
        return _rehearse(argv, terminal)
    except RehearsalError as error:
        terminal.print_message(f"error: {error}")
        return ExitCode.BROKEN


def _rehearse(argv: Sequence[str], terminal: Terminal) -> int:
    print_text, report = terminal.print_text, terminal.print_message
    settings, flags, words = _parse(argv, terminal.env)
    with _folder(keep=settings.keep, report=report) as folder:
        rehearsal = _Rehearsal(settings, _Command(flags, words, terminal.env, folder, settings.step_timeout, report))
        try:
            results = rehearsal.results()
        finally:
            if not settings.keep:
                rehearsal.remove_folders()
    equal = all(result.equal for result in results)
    if settings.json:
        content = {"equal": equal, "steps": rehearsal.steps, "runs": [asdict(result) for result in results]}
        print_text(json.dumps(content, indent=2))
    else:
        for result in results:
            print_text(f"{result.disturbance}: {result.summary}")
            if result.cause:
                print_text(f"  usual cause: {result.cause}")
            if result.note:
                print_text(f"  note: {result.note}")
    return ExitCode.OK if equal else ExitCode.BROKEN


def _parse(
    argv: Sequence[str], env: Mapping[str, str]
) -> tuple[argparse.Namespace, dict[str, tuple[str, ...]], list[str]]:
    """The settings of the rehearsal; the flags for `ddpkit launch` by name; the script and its arguments."""
    known = parser(env)
    typed, words = spec.split(argv, known)
    own = [word for name in _OWN for word in typed.pop(name, ())]
    settings = known.parse_args([*own, "script.py"])
    if not words:
        known.error("the following arguments are required: script.py")
    launch = spec.parse([*(word for flag in typed.values() for word in flag), *words], env)
    spec.check_script(launch, env)
    if launch.torchrun["nnodes"] not in ("1", "1:1"):
        raise UsageError(
            f"--nnodes {launch.torchrun['nnodes']}: a rehearsal runs on one node", "omit the flags for several nodes"
        )
    if not launch.may_fork(env) or sys.platform != "linux":
        raise UsageError(
            "a rehearsal watches forked workers, but these workers are started with a new interpreter",
            "omit --cold, --no-python, --run-path and PYTHON_EXEC; a rehearsal needs Linux",
        )
    if launch.dry_run:
        raise UsageError("--dry-run starts nothing that could be compared", "omit --dry-run")
    if settings.steps < _FEWEST_STEPS:
        raise UsageError(f"--steps {settings.steps} is too few", f"use at least {_FEWEST_STEPS}, such as --steps 40")
    ranks = settings.ranks.split(",") if settings.ranks else []
    if not all(text.isdecimal() and int(text) for text in ranks) or len(set(ranks)) < len(ranks):
        raise UsageError(
            f"--ranks {settings.ranks} is not a list of different numbers", "use numbers of ranks, such as --ranks 2,3"
        )
    settings.ranks = [int(text) for text in ranks]
    if not settings.step_timeout > 0:
        raise UsageError(f"--step-timeout {settings.step_timeout:g} is no time", "use seconds, such as 300")
    for name in ("max_restarts", "keep_warm"):
        typed.pop(name, None)
    return settings, typed, words


@contextmanager
def _folder(*, keep: bool, report: Callable[[str], None]) -> Iterator[Path]:
    """A folder for what the runs record and save; removed at the end, unless it is kept."""
    folder = Path(tempfile.mkdtemp(prefix="ddpkit-rehearsal-"))
    try:
        yield folder
    except OSError as error:
        raise RehearsalError(
            f"a file of the rehearsal cannot be written: {error}", "free space, or set TMPDIR to a folder elsewhere"
        ) from error
    finally:
        if keep:
            report(f"the runs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


class _Rehearsal:
    """The runs of one rehearsal."""

    def __init__(self, settings: argparse.Namespace, command: "_Command") -> None:
        self.steps = settings.steps
        self._ranks = settings.ranks
        self._command = command
        self._script = command.words[0]
        self._runs: list[_Run] = []
        self._noise: compare.Noise = {}

    def results(self) -> list[Result]:
        """Run everything, and compare."""
        first = self._undisturbed("undisturbed-1")
        second = self._undisturbed("undisturbed-2")
        self._check_separate(first, second)
        self._noise = compare.noise(first, second)
        unseeded = {"random": self._noise["random"]}
        noisy = compare.differences(compare.without(first, unseeded), compare.without(second, unseeded))
        repeated = compare.repeated_epoch(first)
        results = [self._result_of_undisturbed(noisy, repeated)]
        # A value that is random by itself is left out by its name if it has one; otherwise its kind is ignored.
        first, second = (compare.without(each, self._noise) for each in (first, second))
        ignored = frozenset(each.kind for each in compare.differences(first, second))
        at, rank = self._disturbance(first)

        killed = self._run("killed")
        killed.launch(signal.SIGKILL, step=at, rank=rank, max_restarts=1)
        title = f"kill -9 of rank {rank} at step {at} and a restart"
        results.append(self._compare(title, killed, first, ignored))

        stopped = self._run("stopped")
        stopped.launch(signal.SIGTERM, step=at)
        stopped.launch()
        results.append(self._compare(f"SIGTERM at step {at} and the same command again", stopped, first, ignored))

        noise = compare.loss_distance(first, second)
        for ranks in self._ranks:
            moved = self._run(f"at-{ranks}-ranks")
            moved.launch(signal.SIGTERM, step=at)
            moved.launch(ranks=ranks)
            title = f"SIGTERM at step {at} and the same command at {plural(ranks, 'rank')}"
            results.append(self._compare(title, moved, first, ignored, noise=noise, ranks=ranks))
        return results

    def remove_folders(self) -> None:
        """Remove the folders that the script made from {run} in its arguments."""
        for each in self._runs:
            for path in each.own_paths:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with suppress(OSError):  # there is no such file, or the folder is read-only
                        path.unlink()

    def _run(self, title: str) -> "_Run":
        self._runs.append(_Run(self._command, title, self.steps))
        return self._runs[-1]

    def _undisturbed(self, title: str) -> Recording:
        """Run the script without a disturbance. Raises an error if that does not work."""
        made = self._run(title)
        end = made.launch()
        attempts = read_attempts(made.folder)
        if end.code:
            kind = UsageError if end.code == ExitCode.USAGE else RehearsalError
            raise kind(
                f"{self._script} fails without any disturbance, with exit code {end.code}:\n{end.last_lines}",
                "fix this error first",
            )
        if not attempts:
            raise UsageError(
                f"the workers of {self._script} were not forked, so they are not watched",
                "see the message of `ddpkit launch`, and move what prevents it behind `import torch`",
            )
        recording = attempts[-1]
        steps = min(lines[-1].step if lines else 0 for lines in recording.values())
        if not steps:
            raise UsageError(
                f"{self._script} ended without a step of a torch.optim.Optimizer after a backward pass",
                "a rehearsal compares optimizer steps; check that the script trains with these arguments",
            )
        if steps < _FEWEST_STEPS:
            raise UsageError(
                f"{self._script} ended after step {steps}", f"make it train for at least {_FEWEST_STEPS} steps"
            )
        if steps < self.steps:
            self._command.report(f"{self._script} ended after step {steps}, so {steps} steps are compared")
            self.steps = steps
        return recording

    def _check_separate(self, first: Recording, second: Recording) -> None:
        """Raise `UsageError` if the second run has resumed from what the first one saved."""
        begin = compare.begins_at(first, second)
        weights = second[0][0].weights
        if begin and weights != first[0][0].weights and weights in [line.weights for line in first[0]]:
            raise UsageError(
                f"the second run of {self._script} began with the weights that the first one had at step "
                f"{first[0][begin].step}: it resumes from a folder that all runs share",
                _HINT,
            )

    def _disturbance(self, first: Recording) -> tuple[int, int]:
        """The step after which the disturbance comes, and the rank that is killed: the last one.

        The step is at two thirds, or three steps after the first save if that is later.
        """
        at = 2 * self.steps // 3
        saved = compare.first_save(first)
        if saved is not None:
            at = max(at, min(saved + 3, self.steps - 2))
        return at, max(first)

    def _result_of_undisturbed(self, noisy: Sequence[Difference], repeated: Difference | None) -> Result:
        title = "undisturbed, twice"
        if noisy:
            summary = f"differ from step {noisy[0].step}: {compare.described(noisy)}"
            cause = (
                "the script is random by itself: it does not seed all random generators, or uses operations that are "
                "not deterministic. What differs here is not compared below"
            )
            return Result(title, False, summary, tuple(noisy), cause)
        if repeated is not None:
            summary = f"equal, but from step {repeated.step}: {repeated.description}"
            return Result(title, False, summary, (repeated,), CAUSES["epochs"])
        return Result(title, True, f"equal in all {self.steps} steps")

    def _compare(
        self,
        title: str,
        made: "_Run",
        first: Recording,
        ignored: frozenset[str],
        *,
        noise: float = 0.0,
        ranks: int | None = None,
    ) -> Result:
        """Compare the last attempt of a disturbed run with the undisturbed run."""
        disturbed = made.folder / DISTURBED_FILE
        end = made.ends[-1]
        if not disturbed.exists():
            return Result(title, False, "the run ended before this step", cause=end.last_lines)
        attempts = [compare.without(each, self._noise) for each in read_attempts(made.folder) if all(each.values())]
        if end.code:
            summary = f"the resumed run fails with exit code {end.code}:\n{end.last_lines}"
            cause = "the script cannot load its own checkpoint"
            if end.code == ExitCode.USAGE:
                cause = ""
            return Result(title, False, summary, cause=cause)
        if len(attempts) < 2:
            return Result(title, False, "the resumed run ended without an optimizer step: it counts as finished")
        resumed = attempts[-1]
        note = ""
        if made.ignored_sigterm:
            note = f"the script continued after SIGTERM until step {attempts[-2][0][-1].step}, where it was ended"
        begin = compare.begins_at(first, resumed) if ranks is None else compare.begins_at_step(first, resumed)
        if begin is None:
            summary = "cannot be compared: nothing shows with which step the resumed run begins"
            cause = "the script is random by itself" if "weights" in ignored else CAUSES["weights"]
            return Result(title, False, summary, cause=cause, note=note)
        if begin == 0 and not disturbed.read_text():
            summary = "not shown: the script had saved nothing, and starts again at step 1"
            cause = "more --steps are needed until it saves; or it saves nothing"
            return Result(title, False, summary, cause=cause, note=note)
        if begin == 0:
            text = "the run starts again at step 1, although files were saved"
            start = Difference("start", 1, text)
            return Result(title, False, text, (start,), CAUSES["start"], note)
        if ranks is None:
            found = compare.differences(first, resumed, begin, ignored)
        else:
            in_total = compare.differences_in_total(first, resumed, begin, noise)
            found = [difference for difference in in_total if difference.kind not in ignored]
        steps = compare.compared_steps(first, {0: resumed[0]}, begin)
        if steps is None:
            return Result(title, False, "not shown: the resumed run has no step in common", note=note)
        where = f"resumed with step {steps[0]}, compared until step {steps[1]}"
        if not found or (ranks is None and compare.is_harmless(found)):
            if found:
                note = f"from step {found[0].step}: {compare.described(found)}; nothing that was compared depends on it"
            how = "equal"
            if ranks is not None:
                how += " within the tolerance for another number of ranks"
            if ignored or any(names for field, names in self._noise.items() if field != "random"):
                how += " in what is not random by itself"
            return Result(title, True, f"{how} ({where})", tuple(found), note=note)
        summary = f"differs from step {found[0].step}: {compare.described(found)} ({where})"
        cause = "; ".join(CAUSES[each.kind] for each in compare.origins(found))
        return Result(title, False, summary, tuple(found), cause, note)


@dataclass(frozen=True)
class _End:
    """The end of one launch."""

    code: int
    last_lines: str


@dataclass(frozen=True)
class _Command:
    """What all runs of a rehearsal have in common."""

    flags: Mapping[str, tuple[str, ...]]
    words: Sequence[str]
    """The script and its arguments."""
    env: Mapping[str, str]
    folder: Path
    step_timeout: float
    report: Callable[[str], None]
    token: str = field(default_factory=lambda: secrets.token_hex(3))
    """Makes the names of the runs unique."""
    began: float = field(default_factory=time.time)


class _Run:
    """One run with folders of its own: one launch, or two with the same command."""

    def __init__(self, command: _Command, title: str, steps: int) -> None:
        self.name = f"rehearsal-{command.token}-{title}"
        self.folder = command.folder / title
        self.ends: list[_End] = []
        self._command = command
        self._title = title
        self._steps = steps
        script, *arguments = command.words
        self._words = [script, *(word.replace(_RUN, self.name) for word in arguments)]
        self._env = {**command.env, **{name: value.format(folder=self.folder) for name, value in OFFLINE.items()}}
        self._env |= {REHEARSAL: str(self.folder), WATCHED_BY: _WATCH, KEEP_WARM: "off"}
        (self.folder / "tmp").mkdir(parents=True)
        self.own_paths = {path for word in self._words[1:] for path in _paths(word, self.name)}
        """The files and folders whose name contains that of the run."""

    def launch(
        self, disturbance: int = 0, step: int = 0, rank: int = 0, max_restarts: int = 0, ranks: int | None = None
    ) -> _End:
        """Launch the script, and wait for its end. `disturbance`: a signal. `ranks`: another number of ranks."""
        command = self._command
        title = self._title
        steps = self._steps
        resumed_steps = steps - steps // 3
        again = bool(self.ends)
        if again:
            title += ", the same command again"
            steps = resumed_steps
        command.report(f"running {self._words[0]}: {title} ...")
        Instructions(
            launch=len(self.ends),
            steps=steps,
            steps_after_restart=resumed_steps,
            folders=(str(self.folder / "checkpoints"), *map(str, self.own_paths)),
            began=command.began,
            signal=disturbance,
            step=step,
            rank=rank,
        ).write(self.folder)
        flags = dict(command.flags)
        if ranks is not None:
            name = "gpus" if "gpus" in flags else "nproc_per_node"
            flags = {flag: typed for flag, typed in flags.items() if flag not in ("gpus", "nproc_per_node")}
            flags[name] = (f"--{name.replace('_', '-')}", str(ranks))
        typed = [word for flag in flags.values() for word in flag]
        flags_and_script = [*typed, "--max-restarts", str(max_restarts), *self._words]
        lines: deque[bytes] = deque(maxlen=_SHOWN_LINES)
        with subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, PACKAGE_FOLDER, *flags_and_script],
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(die_with_parent, os.getpid()),
        ) as process:
            (self.folder / LAUNCHER_FILE).write_text(str(process.pid))
            assert process.stdout is not None
            blocks = iter(partial(process.stdout.readline, 1 << 16), b"")
            reader = Thread(target=lines.extend, args=(blocks,), daemon=True)
            reader.start()
            try:
                late = self._wait(process)
            finally:
                if process.poll() is None:
                    for number in _STOPPING:  # from now on, so that they cannot prevent the removal of the folders
                        signal.signal(number, signal.SIG_IGN)
                    process.terminate()
                    try:
                        process.wait(_END_SECONDS)
                    except subprocess.TimeoutExpired:
                        process.kill()
            reader.join(_END_SECONDS)
        text = b"".join(lines).decode(errors="replace").rstrip("\n")
        self._check_own()
        if late:
            kind = RehearsalError if disturbance or again else UsageError
            raise kind(
                f"{self._words[0]} made no optimizer step within {command.step_timeout:g} s ({self._title}):\n{text}",
                "raise --step-timeout if it is slow; a rehearsal compares steps of torch.optim.Optimizer",
            )
        code = process.returncode
        self.ends.append(_End(code if code >= 0 else ExitCode.of_signal(-code), text))
        return self.ends[-1]

    def _check_own(self) -> None:
        """Raise `UsageError` if the script was ended before it changed or saved a file outside of the run's folders."""
        if not (self.folder / ELSEWHERE_FILE).exists():
            return
        script = self._words[0]
        path = (self.folder / ELSEWHERE_FILE).read_text()
        if moved := [*_paths(path, self.name)]:
            self.own_paths.update(moved)
            raise UsageError(
                f"{script} changes its current folder before it saves {path}",
                f"use an absolute path for the argument with {_RUN}, such as {Path.cwd() / f'out-{_RUN}'}",
            )
        if Path(path).exists() and Path(path).stat().st_ctime < self._command.began:
            raise UsageError(
                f"{script} changes {path}, which existed before the rehearsal, so the rehearsal ends here; the file is "
                "unchanged",
                f"{_HINT}; or move the file away",
            )
        raise UsageError(f"{script} saves {path}, in a folder that all runs would share", _HINT)

    @property
    def ignored_sigterm(self) -> bool:
        """Whether the first launch ended as if SIGTERM had not arrived."""
        return len(self.ends) > 1 and len(list(self.folder.glob("0.*.done"))) > 0

    def _wait(self, process: "subprocess.Popen[bytes]") -> bool:
        """Wait for the end of a launch. Returns True if no step came for too long."""
        sizes: dict[Path, int] = {}
        since = time.monotonic()
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
                return False
            now = {path: path.stat().st_size for path in self.folder.glob("*.jsonl")}
            if now != sizes:
                sizes = now
                since = time.monotonic()
            if time.monotonic() - since > self._command.step_timeout:
                return True


def _paths(word: str, name: str) -> Iterator[Path]:
    """The absolute path in an argument such as `--dir=out-NAME/logs`, up to the part that contains the name, if any."""
    path = Path(os.path.abspath(word.rpartition("=")[2]))  # noqa: PTH100  # links are kept
    for parent in (path, *path.parents):
        if name in parent.name and name not in str(parent.parent):
            yield parent
