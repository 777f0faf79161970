"""What several ranks print at once: through real pipes and terminals, to a real descriptor."""

import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import textwrap
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_kit.launcher import output
from ddp_kit.launcher.output import FinalOutput, Output, Route, Streams
from tests.support.launching import clean_environment, seconds, started

SPEAKERS = 8
LINES = 2000

# The launcher's descriptors 1 and 2 are what the test reads; workers are plain programs that get their ends.
# A traceback is held back until its rank has failed, however long that takes here, unless `held` says otherwise, or
# `silent` for a rank that writes nothing more.
# And `partial`: after how many seconds the beginning of a line is shown.
HOST = f"""
import os, subprocess, sys
from ddp_kit.launcher import output as module
from ddp_kit.launcher.output import Output
from ddp_kit.launcher.output import Route, Streams

def run(
    programs, route=lambda rank: Route(console=True), failed=(), direct=False, colour=False,
    is_ending=lambda rank: False, is_secondary=lambda trace: False,
    held={seconds(60)}, silent={seconds(60)}, partial=0.05,
):
    module._HELD_SECONDS, module._SILENT_SECONDS, module._PARTIAL_SECONDS = held, silent, partial
    streams = [Streams(rank, rank, route(rank), route(rank)) for rank in range(len(programs))]
    output = Output(streams, direct, colour, is_ending)
    workers = []
    for rank, program in enumerate(programs):
        out, err = output.descriptors(rank)
        workers.append(subprocess.Popen([sys.executable, "-u", "-c", program], stdout=out, stderr=err))
    output.start()
    for rank, worker in enumerate(workers):
        if worker.wait():
            output.failed(rank)
    return output.end(list(failed), True, {seconds(60)}, lambda: False, is_secondary)

"""


def host_of(code: str) -> list[str]:
    """Command of a host that runs `code`."""
    return [sys.executable, "-c", HOST + textwrap.dedent(code)]


def hosted(code: str, *, merged: bool = False) -> "subprocess.CompletedProcess[str]":
    errors = subprocess.STDOUT if merged else subprocess.PIPE
    return subprocess.run(
        host_of(code),
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        timeout=seconds(120),
    )


def hosted_raw(code: str) -> "subprocess.CompletedProcess[bytes]":
    """As `hosted`, with bytes instead of text."""
    return subprocess.run(host_of(code), env=clean_environment(), capture_output=True, timeout=seconds(120))


def hosted_until(words: str, code: str) -> tuple[str, str]:
    """Standard output and errors of a host whose standard input ends when its errors have a line with `words`."""
    with started(*host_of(code), stdin=subprocess.PIPE) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        assert host.stderr is not None
        shown = ""
        while words not in shown:
            line = host.stderr.readline()
            assert line, shown
            shown += line
        host.stdin.close()
        return host.stdout.read(), shown + host.stderr.read()


# --- Without processes: what workers write, in any pieces -------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """Bytes that a worker writes at once."""

    rank: int
    content: bytes
    stream: int = 0
    """0: stdout, 1: stderr."""
    then_waits: bool = True
    """Whether so much time passes until the next write that the beginning of a line is shown."""


class WrittenOutput(Output):
    """Output of workers whose writes follow when everything before has been shown."""

    def __init__(self, streams: list[Streams], writes: Iterable[Written]) -> None:
        super().__init__(streams, direct=False, colour=False)
        self._writes = deque(writes)
        self._ends = {each.rank: [os.dup(end) for end in self.descriptors(each.rank)] for each in streams}
        self._write_next()

    def _show_overdue(self) -> None:
        super()._show_overdue()
        if not select.select([source.descriptor for source in self._sources], [], [], 0)[0]:
            self._write_next()

    def _write_next(self) -> None:
        while self._writes:
            write = self._writes.popleft()
            os.write(self._ends[write.rank][write.stream], write.content)
            if write.then_waits:
                return
        for end in chain.from_iterable(self._ends.values()):
            os.close(end)
        self._ends.clear()


@contextmanager
def console_in(file: IO[bytes]) -> Iterator[None]:
    """Let descriptors 1 and 2 be this file."""
    before = {number: os.dup(number) for number in (1, 2)}
    for number in before:
        os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        for number, descriptor in before.items():
            os.dup2(descriptor, number)
            os.close(descriptor)


@dataclass
class Shown:
    """What a user sees, and gets."""

    console: bytes
    files: dict[int, bytes]
    """Log files by rank."""
    final: dict[int, FinalOutput]


def shown(
    *writes: Written,
    label: str | None = None,
    read: int = 1 << 18,
    failed: Collection[int] = (),
    separate: bool = False,
) -> Shown:
    """The output of these writes of two ranks, read at most `read` bytes at a time. All of it goes to one console.

    `separate`: whether the log files of stdout and stderr are separate, and so also the pipes.
    """
    with (
        tempfile.TemporaryFile() as console,
        tempfile.TemporaryDirectory() as folder,
        console_in(console),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(output, "_READ_BYTES", read)
        patch.setattr(output, "_PARTIAL_SECONDS", 0.0)
        patch.setattr(output, "_FIRST_OUTPUT_SECONDS", 0.0)
        patch.setattr(output, "_HELD_SECONDS", 1e9)
        patch.setattr(output, "_SILENT_SECONDS", 1e9)
        streams = []
        for rank in range(2):
            route = Route(console=True, file=f"{folder}/{rank}", label=label and label.format(rank))
            other = replace(route, file=f"{route.file}.err") if separate else route
            streams.append(Streams(rank, rank, route, other))
        result = WrittenOutput(streams, writes)
        result.start()
        for rank in failed:
            result.failed(rank)
        final = result.end(failed, True, seconds(60), lambda: False, lambda trace: False)
        console.seek(0)
        files = {rank: Path(folder, str(rank)).read_bytes() for rank in range(2)}
        return Shown(console.read(), files, final)


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ([(0, b"half "), (1, b"other\n"), (0, b"done\n")], b"half \n[rank 1] other\n[rank 0] done\n"),
        ([(0, b"bar"), (1, b"other\n"), (0, b"\n"), (0, b"next\n")], b"bar\n[rank 1] other\n[rank 0] next\n"),
        ([(0, b"bar\n"), (1, b"other\n"), (0, b"\x1b[?25h")], b"bar\n[rank 1] other\n\x1b[?25h"),
    ],
    ids=["unfinished line", "line end of a progress bar that an exception ends", "sequence that shows the cursor"],
)
def test_output_between_the_pieces_of_a_line_is_on_a_line_of_its_own(
    writes: list[tuple[int, bytes]], expected: bytes
) -> None:
    assert shown(*(Written(*write) for write in writes)).console == expected


@pytest.mark.parametrize("pieces", [[b"a\n\rb\n"], [b"a\n", b"\rb\n"], [b"a\n\r", b"b\n"]])
def test_label_of_a_progress_bar_comes_after_its_carriage_return(pieces: list[bytes]) -> None:
    writes = [Written(0, piece) for piece in pieces]
    assert shown(*writes, label="{{{}}} ").console == b"{0} a\n\r{0} b\n"


def test_progress_bar_is_not_broken_by_the_other_stream_to_the_same_place() -> None:
    """Each stream has a file of its own, as with --tee 3."""
    writes = [Written(0, b"\r  5%|###", 1), Written(0, b"after 5\n"), Written(0, b"\r 10%|####\n", 1)]
    found = shown(*writes, label="[default{}]:", separate=True)
    assert found.console == b"\r[default0]:  5%|###\n[default0]:after 5\n\r[default0]: 10%|####\n"


def test_control_sequences_before_a_traceback_are_shown_and_not_part_of_it() -> None:
    text = b"bar\n\x1b[?25h[rank0]: Traceback (most recent call last)\n[rank0]: ValueError: no\n"
    found = shown(Written(0, text), failed=[0])
    assert found.console == b"bar\n\x1b[?25h"
    assert found.final[0].trace == "Traceback (most recent call last)\nValueError: no"


CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
# What scripts print: words, line ends, progress bars, colours, text that is not UTF-8.
tokens = st.sampled_from([b"word", b"\n", b"\r", b"\x1b[?25h", b"\x1b[0m", "\u20ac".encode(), b"\xff\x80", b"\0"])
outputs = st.lists(tokens | st.binary(max_size=9), max_size=12).map(b"".join)


@st.composite
def writes_of(draw: st.DrawFn, *texts: bytes, wait: bool) -> list[Written]:
    """The texts of the ranks, cut into any pieces, and written in any order."""
    writes = []
    left = dict(enumerate(texts))
    while left := {rank: text for rank, text in left.items() if text}:
        rank = draw(st.sampled_from(sorted(left)))
        length = draw(st.integers(1, len(left[rank])))
        writes.append(Written(rank, left[rank][:length], draw(st.integers(0, 1)), wait and draw(st.booleans())))
        left[rank] = left[rank][length:]
    return writes


def without_controls(text: bytes) -> bytes:
    while CONTROL.search(text):
        text = CONTROL.sub(b"", text)
    return text


def labelled_lines(text: bytes, label: bytes) -> list[bytes]:
    """The lines of one rank, each with the label."""
    lines = without_controls(text).split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [label + line for line in lines]


def lines_on(console: bytes) -> list[bytes]:
    """The lines on a console. A carriage return at the start of a line may stand before or after the label."""
    lines = re.sub(rb"^(\r?)(\{\d\} )", rb"\2\1", without_controls(console), flags=re.MULTILINE).split(b"\n")
    if lines[-1] in (b"", b"{0} ", b"{1} "):  # only a control sequence
        lines.pop()
    return lines


@settings(max_examples=60)
@given(outputs, st.data(), st.integers(1, 16), st.sampled_from([None, "", "{{{}}} "]))
def test_output_of_one_rank_is_the_same_in_any_pieces(
    text: bytes, data: st.DataObject, read: int, label: str | None
) -> None:
    """Unchanged, unless each of its lines gets a label. The log file has no labels."""
    writes = data.draw(writes_of(text, wait=True))
    found = shown(*writes, label=label, read=read)
    assert found.files == {0: text, 1: b""}
    if label:
        assert lines_on(found.console) == labelled_lines(text, b"{0} ")
    else:
        assert found.console == text


@settings(max_examples=60)
@given(outputs, outputs, st.data(), st.integers(1, 16))
def test_output_of_several_ranks_has_whole_lines_in_order(
    one: bytes, other: bytes, data: st.DataObject, read: int
) -> None:
    writes = data.draw(writes_of(one, other, wait=False))
    found = shown(*writes, label="{{{}}} ", read=read)
    assert found.files == {0: one, 1: other}
    lines = lines_on(found.console)
    ours = [line for line in lines if line.startswith(b"{0} ")]
    others = [line for line in lines if line.startswith(b"{1} ")]
    assert len(ours) + len(others) == len(lines)
    assert ours == labelled_lines(one, b"{0} ")
    assert others == labelled_lines(other, b"{1} ")


@settings(max_examples=60)
@given(outputs, outputs, st.data(), st.integers(1, 16))
def test_no_line_has_output_of_several_ranks_even_if_they_halt_within_lines(
    one: bytes, other: bytes, data: st.DataObject, read: int
) -> None:
    """Such a line is continued on a new line."""
    writes = data.draw(writes_of(one, other, wait=True))
    found = shown(*writes, label="{{{}}} ", read=read)
    assert found.files == {0: one, 1: other}
    parts = {b"{0} ": b"", b"{1} ": b"", b"": b""}
    for line in lines_on(found.console):
        assert line.count(b"{0} ") + line.count(b"{1} ") == bool(line)
        parts[line[:4]] += line[4:]
    texts = [without_controls(text.replace(b"\n", b"")) for text in (one, other)]
    assert [without_controls(part) for part in parts.values()] == [*texts, b""]


TRACE = b'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\nValueError: no\n'


@settings(max_examples=60)
@given(outputs, outputs, st.data(), st.integers(1, 16))
def test_traceback_of_a_failed_rank_is_held_back_in_any_pieces(
    text: bytes, other: bytes, data: st.DataObject, read: int
) -> None:
    writes = data.draw(writes_of(text + b"\n" + TRACE, other, wait=False))
    found = shown(*writes, label="{{{}}} ", read=read, failed=[0])
    assert found.final[0].trace == TRACE.decode().rstrip()
    assert b"ValueError" not in found.console
    ours = [line for line in lines_on(found.console) if line.startswith(b"{0} ")]
    assert ours == labelled_lines(text + b"\n", b"{0} ")


# --- With processes ---------------------------------------------------------------------------------------------------


def test_output_of_all_ranks_arrives_in_whole_lines() -> None:
    """Each is written at once; one in pieces is shown in pieces, where the machine lets much time pass between them."""
    done = hosted(f"""
        line = "os.write(1, ' '.join(map(str, [{{rank}}, i, 'x' * (i % 300)])).encode() + bytes([10]))"
        run(["import os\\nfor i in range({LINES}): " + line.format(rank=rank) for rank in range({SPEAKERS})])
    """)
    lines = re.findall(r"^(?:\[rank (\d)\] )?(\d) (\d+) x*$", done.stdout, re.MULTILINE)
    assert len(lines) == done.stdout.count("\n") == SPEAKERS * LINES
    assert all(label in (rank, "") for label, rank, _ in lines), "without a label as long as one rank speaks alone"
    assert lines[-1][0]
    assert [int(number) for _, rank, number in lines if rank == "5"] == list(range(LINES)), "and in order"


def test_output_of_ranks_to_different_streams_has_no_label() -> None:
    """A reader of rank 0's JSON lines is not disturbed by a warning of another rank."""
    done = hosted("""
        says = "import os; [os.write(1, b'{}' + bytes([10])) for _ in range(2)]"
        run([says, "import sys; print('warns', file=sys.stderr)"])
    """)
    assert (done.stdout, done.stderr) == ("{}\n{}\n", "warns\n")


@pytest.mark.parametrize("merged", [True, False])
def test_streams_to_the_same_place_keep_their_order(merged: bool) -> None:
    program = "import sys\nfor i in range(200): print(i, file=(sys.stdout, sys.stderr)[i % 2])"
    done = hosted(f"run([{program!r}, 'pass'])", merged=merged)
    if merged:
        assert done.stdout.split() == [str(number) for number in range(200)]
    else:
        assert done.stdout.split() == [str(number) for number in range(0, 200, 2)]
        assert done.stderr.split() == [str(number) for number in range(1, 200, 2)]


def test_traceback_of_a_failed_rank_is_held_back_and_returned() -> None:
    done = hosted("""
        words = run(["print('fine')", "print('before'); raise ValueError('no')"], failed=[1])
        print("GIVEN", words[1].trace.splitlines()[-1], words[1].shown, flush=True)
    """)
    assert "Traceback" not in done.stderr
    assert "GIVEN ValueError: no False" in done.stdout
    assert re.search(r"^(\[rank 1\] )?before$", done.stdout, re.MULTILINE)  # no label where it speaks first


def test_traceback_of_a_rank_that_succeeded_is_shown() -> None:
    program = "import traceback\ntry: 1 / 0\nexcept Exception: traceback.print_exc()"
    done = hosted(f"run([{program!r}, 'pass'])")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_very_long_message_is_shown_whole_and_shortened_in_the_verdict() -> None:
    program = "raise ValueError(chr(10).join(map('row {}'.format, range(500))))"
    done = hosted(f"""
        words = run([{program!r}, "pass"], failed=[0])
        print("GIVEN", len(words[0].trace.splitlines()) < 100, words[0].shown, flush=True)
    """)
    assert re.findall(r"row \d+$", done.stderr, re.MULTILINE) == [f"row {number}" for number in range(500)]
    assert "GIVEN True True" in done.stdout


def test_output_of_a_failed_rank_after_a_caught_error_is_shown() -> None:
    program = """
import os, sys, traceback
try: 1 / 0
except Exception: traceback.print_exc()
os.write(2, bytes(range(128, 256)) + b"\\n")
for i in range(500): print("row", i, file=sys.stderr)
sys.exit(7)
"""
    done = hosted_raw(f"run([{program!r}, 'pass'], failed=[0])")
    assert done.stderr.count(b"row ") == 500
    assert bytes(range(128, 256)) in done.stderr


def test_interpreter_crash_is_held_back_like_a_traceback() -> None:
    done = hosted("""
        program = "import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(1)"
        words = run([program, "pass"], failed=[0], partial=60)  # it is written in pieces, with any time in between
        print("GIVEN", words[0].trace.splitlines()[0], words[0].shown, flush=True)
    """)
    assert "Fatal Python error" not in done.stderr
    assert "GIVEN Fatal Python error: Segmentation fault False" in done.stdout


@pytest.mark.slow
def test_traceback_that_was_caught_is_not_the_reason_of_a_later_failure() -> None:
    program = "import sys, traceback\ntry: 1 / 0\nexcept Exception: traceback.print_exc()\nsys.stdin.read(1)"
    code = f"""
        words = run([{program!r} + "; print('on'); sys.exit(4)", "pass"], failed=[0], silent={seconds(0.7)})
        print("GIVEN", repr(words[0].trace), flush=True)
    """
    output, errors = hosted_until("ZeroDivisionError: division by zero", code)
    assert "GIVEN ''" in output, output
    assert errors.count("ZeroDivisionError: division by zero") == 1


@pytest.mark.slow
def test_traceback_of_a_rank_that_exits_slowly_is_held_back(tmp_path: Path) -> None:
    """As one does whose CUDA context or threads have to be taken down.

    That it is held back longer than otherwise shows at another rank: what it wrote later is shown before.
    """
    written = tmp_path / "written"
    os.mkfifo(written)
    program = (
        "import sys, traceback\ntry: 1 / 0\nexcept Exception: traceback.print_exc()\n"
        f"open({str(written)!r}, 'w').close(); sys.stdin.read(1); sys.exit(4)"
    )
    later = f"import os; open({str(written)!r}).read(); os.write(2, b'Fatal Python error: told' + bytes([10]))"
    code = f"""
        words = run(
            [{program!r}, {later!r}], failed=[0], is_ending=lambda rank: rank == 0, silent={seconds(0.7)}
        )
        print("GIVEN", words[0].trace.splitlines()[-1], words[0].shown, flush=True)
    """
    output, errors = hosted_until("Fatal Python error: told", code)
    assert "GIVEN ZeroDivisionError: division by zero False" in output, output
    assert "Traceback" not in errors


@pytest.mark.slow
def test_traceback_of_a_silent_rank_is_held_back_longer(tmp_path: Path) -> None:
    """Of a rank that Python itself has started, nobody knows that it is ending."""
    written = tmp_path / "written"
    os.mkfifo(written)
    silent = (
        f"import atexit, sys; atexit.register(lambda: (open({str(written)!r}, 'w').close(), sys.stdin.read(1)))\n"
        "raise ValueError('no luck')"
    )
    writes_on = (
        f"import os, select, sys; open({str(written)!r}).read(); os.write(2, b'Fatal Python error: told' + bytes([10]))"
        "\nwhile not select.select([sys.stdin], [], [], 0.1)[0]: print('on')"
    )
    code = f"""
        words = run([{silent!r}, {writes_on!r}], failed=[0], held={seconds(0.7)})
        print("GIVEN", words[0].trace.splitlines()[-1], words[0].shown, flush=True)
    """
    output, errors = hosted_until("Fatal Python error: told", code)
    assert "GIVEN ValueError: no luck False" in output, output
    assert "Traceback" not in errors


@pytest.mark.slow
def test_traceback_already_shown_is_the_reason_of_a_silent_failure() -> None:
    """Whatever the rank has written before it."""
    program = "import sys, traceback\nprint('before')\ntry: 1 / 0\nexcept Exception: traceback.print_exc()\n"
    code = f"""
        words = run([{program!r} + "sys.stdin.read(1); sys.exit(4)", "pass"], failed=[0], silent={seconds(0.7)})
        print("GIVEN", words[0].trace.splitlines()[-1], flush=True)
    """
    output, _ = hosted_until("ZeroDivisionError: division by zero", code)
    assert "GIVEN ZeroDivisionError: division by zero" in output, output


def test_very_long_traceback_of_a_secondary_failure_is_not_shown() -> None:
    program = "raise RuntimeError(chr(10).join(map('frame #{}: c10'.format, range(500))))"
    done = hosted(f"""
        words = run([{program!r}, "pass"], failed=[0], is_secondary=lambda trace: "c10" in trace)
        print("GIVEN", words[0].shown, flush=True)
    """)
    assert "frame #" not in done.stderr
    assert "GIVEN False" in done.stdout


def test_log_file_that_exists_or_is_a_link_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "0.log").symlink_to(tmp_path / "precious")
    done = hosted(f'run(["print(1)"], route=lambda rank: Route(False, "{tmp_path}/0.log"))')
    assert "FileExistsError" in done.stderr
    assert (tmp_path / "precious").read_text() == "mine"


def test_ranks_end_if_the_reader_of_their_output_closes() -> None:
    code = "run(['while True: print(1)', 'while True: print(2)'])"
    with started(*host_of(code), stderr=subprocess.DEVNULL) as host:
        assert host.stdout is not None
        host.stdout.readline()
        host.stdout.close()
        assert host.wait(timeout=seconds(60)) == 0, "both have ended by themselves"


def test_ranks_on_a_terminal_have_terminals_and_coloured_labels(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    both_speak = tmp_path / "both speak"
    program = f"""
import os, sys, time
print("begins")
while not os.path.exists("{both_speak}"): time.sleep(0.01)
print(sys.stdout.isatty())
"""
    with started(*host_of(f"run([{program!r}] * 2, colour=True)"), stdout=theirs, stderr=theirs) as host:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:
                break
            if shown.count(b"begins") == 2:
                both_speak.touch()
        assert host.wait(seconds(60)) == 0
    assert sorted(line for line in shown.splitlines() if b"True" in line) == [
        b"\x1b[32m[rank 1] \x1b[0mTrue",
        b"\x1b[36m[rank 0] \x1b[0mTrue",
    ]
