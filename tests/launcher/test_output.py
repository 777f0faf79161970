"""What several ranks print at once: through real pipes and terminals, to a real descriptor."""

import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launching import clean_environment, seconds, started

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


def test_output_of_a_single_writing_rank_has_no_label() -> None:
    assert hosted('run(["print(1); print(2, end=str())", "pass"])').stdout == "1\n2"


def test_output_of_ranks_to_different_streams_has_no_label() -> None:
    """A reader of rank 0's JSON lines is not disturbed by a warning of another rank."""
    done = hosted("""
        says = "import os; [os.write(1, b'{}' + bytes([10])) for _ in range(2)]"
        run([says, "import sys; print('warns', file=sys.stderr)"])
    """)
    assert (done.stdout, done.stderr) == ("{}\n{}\n", "warns\n")


def test_output_with_an_empty_label_is_unchanged() -> None:
    done = hosted("""
        run([f"print({rank}); print('bar', end='')" for rank in range(2)], route=lambda rank: Route(True, label=""))
    """)
    assert sorted(done.stdout.split()) == ["0", "1", "bar", "bar"]


def test_output_passes_arbitrary_bytes_through() -> None:
    done = hosted_raw('run(["import os; os.write(1, bytes(range(256)))", "pass"])')
    assert done.stdout == bytes(range(256))


def test_unfinished_line_is_not_broken_by_another_rank(tmp_path: Path) -> None:
    turns = [tmp_path / "first", tmp_path / "second"]
    for turn in turns:
        os.mkfifo(turn)
    halting = f"print('half ', end=''); open({str(turns[1])!r}).read(); print('done')"
    other = f"open({str(turns[0])!r}).read(); print('other')"
    with started(*host_of(f"run([{halting!r}, {other!r}])"), stderr=None) as host:
        assert host.stdout is not None
        assert host.stdout.read(len("half ")) == "half ", "it is shown although its line is not complete"
        turns[0].write_text("go")
        assert host.stdout.read(len("\n[rank 1] other\n")) == "\n[rank 1] other\n"
        turns[1].write_text("go")
        assert host.stdout.read() == "[rank 0] done\n"


def test_line_end_after_a_line_that_another_rank_ended_is_not_an_empty_line(tmp_path: Path) -> None:
    """A progress bar ends its line when an exception leaves the loop."""
    turns = [tmp_path / "first", tmp_path / "second"]
    for turn in turns:
        os.mkfifo(turn)
    bar = f"import os; os.write(1, b'bar'); open({str(turns[1])!r}).read(); os.write(1, b'\\n'); print('next')"
    other = f"open({str(turns[0])!r}).read(); print('other')"
    with started(*host_of(f"run([{bar!r}, {other!r}])"), stderr=None) as host:
        assert host.stdout is not None
        assert host.stdout.read(len("bar")) == "bar"
        turns[0].write_text("go")
        assert host.stdout.read(len("\n[rank 1] other\n")) == "\n[rank 1] other\n"
        turns[1].write_text("go")
        assert host.stdout.read() == "[rank 0] next\n"


def test_output_without_visible_characters_has_no_label(tmp_path: Path) -> None:
    """Such as the sequence that shows the cursor again, before a traceback."""
    turns = [tmp_path / "first", tmp_path / "second"]
    for turn in turns:
        os.mkfifo(turn)
    shows_cursor = f"import os; print('bar'); open({str(turns[0])!r}).read(); os.write(1, b'\\x1b[?25h'); os._exit(1)"
    other = f"print('other'); open({str(turns[1])!r}).read()"
    with started(*host_of(f"run([{shows_cursor!r}, {other!r}], partial=0.0)"), stderr=None) as host:
        assert host.stdout is not None
        assert {host.stdout.readline().split()[-1] for _ in range(2)} == {"bar", "other"}
        turns[0].write_text("go")
        assert host.stdout.read(len("\x1b[?25h")) == "\x1b[?25h"
        turns[1].write_text("go")
        assert host.stdout.read() == ""


def test_control_sequences_before_a_traceback_are_shown_and_not_part_of_it() -> None:
    text = b"bar\n\x1b[?25h[rank0]: Traceback (most recent call last)\n[rank0]: ValueError: no\n"
    fails = f"import os; os.write(2, {text!r}); os._exit(1)"
    done = hosted(f"print(repr(run([{fails!r}], failed=[0])[0].trace))")
    assert done.stderr == "bar\n\x1b[?25h"
    assert done.stdout == repr("Traceback (most recent call last)\nValueError: no") + "\n"


def test_progress_bar_is_not_broken_by_the_other_stream_to_the_same_place(tmp_path: Path) -> None:
    """Each stream has a file of its own, as with --tee 3."""
    turn = tmp_path / "turn"
    os.mkfifo(turn)
    program = (
        f"import sys; sys.stderr.write(chr(13) + '  5%|###'); open({str(turn)!r}).read(); print('after 5');"
        " sys.stderr.write(chr(13) + ' 10%|####' + chr(10))"
    )
    code = f"""
        files = iter([f"{tmp_path}/{{number}}" for number in range(4)])
        run([{program!r}, "pass"], route=lambda rank: Route(True, next(files), f"[default{{rank}}]:"))
    """
    with started(*host_of(code), stderr=subprocess.STDOUT) as host:
        assert host.stdout is not None
        with open(host.stdout.fileno(), "rb", closefd=False) as shown:  # as bytes, because of the carriage returns
            bar = b"\r[default0]:  5%|###"
            assert shown.read(len(bar)) == bar
            turn.write_text("go")
            assert shown.read() == b"\n[default0]:after 5\n\r[default0]: 10%|####\n"


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


def test_log_file_gets_a_copy_of_the_output_without_labels(tmp_path: Path) -> None:
    folder = str(tmp_path)
    hosted(f"""
        program = "import sys; print('out'); print('err', file=sys.stderr)"
        run([program] * 2, route=lambda rank: Route(True, "{folder}/%d.log" % rank))
    """)
    for rank in range(2):
        assert sorted((tmp_path / f"{rank}.log").read_text().split()) == ["err", "out"]


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
