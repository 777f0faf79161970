"""The traceback at the end of what a process printed."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_kit.launcher.diagnosis import failed_at_start, is_interrupt, message_of, shortened, split
from ddp_kit.launcher.output import WarningFilter
from tests.support.launching import run

PLAIN = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: no\n'


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("raise ValueError('no')", "ValueError: no"),
        ("raise RuntimeError('CUDA error\\nmore about it\\nfor debugging')", "RuntimeError: CUDA error"),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error", "KeyError: 'x'"),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('x')", "KeyError: 'x'"),
        ("raise ValueError('no\\nluck\\nnow')", "ValueError: no"),
        ("raise ExceptionGroup('all', [ValueError('no'), KeyError('x')])", "ExceptionGroup: all (2 sub-exceptions)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import json.nothing", "ModuleNotFoundError: No module named 'json.nothing'"),
    ],
)
def test_split_finds_a_whole_traceback_with_its_causes(tmp_path: Path, statement: str, message: str) -> None:
    main = tmp_path / "main.py"
    main.write_text(f"import sys\nprint('before', file=sys.stderr)\n{statement}\n")
    printed = run(sys.executable, main).stderr
    trace, rest = split(printed)
    assert trace + "\n" == printed.removeprefix("before\n")
    assert rest == "before\n"
    assert message_of(trace) == message


def test_split_removes_torchs_prefixes_and_leaves_its_warnings() -> None:
    warning = "[rank3]:[W1120 10:00:00.123 ProcessGroup.cpp:1] destroy_process_group() was not called\n"
    marked = "".join(f"[rank3]: {line}\n" for line in PLAIN.splitlines())
    assert split(marked + warning) == (PLAIN.rstrip(), warning)


def test_split_leaves_the_greeting_of_gloo_after_a_traceback() -> None:
    greeting = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
    assert split(PLAIN + greeting) == (PLAIN.rstrip(), greeting)


def test_split_of_a_dataloader_workers_error_is_one_traceback() -> None:
    text = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    fit()\n'
        "ValueError: Caught ValueError in DataLoader worker process 0.\n"
        'Original Traceback (most recent call last):\n  File "train.py", line 1, in __getitem__\n    raise\n'
        "ValueError: broken image\nwhile reading sample 17 of Photos\n"
    )
    trace, rest = split(f"before\n{text}")
    assert (trace, rest) == (text.rstrip(), "before\n")
    assert message_of(trace) == "ValueError: broken image"


def test_is_interrupt_distinguishes_ctrl_c_from_other_errors() -> None:
    interrupt = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nKeyboardInterrupt\n'
    direct = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert is_interrupt(split(interrupt)[0])
    assert is_interrupt(split("".join(f"[rank0]: {line}\n" for line in interrupt.splitlines()))[0])
    assert is_interrupt(split(interrupt + direct + PLAIN)[0])
    assert not is_interrupt(split(PLAIN)[0])
    assert not is_interrupt("")


def test_split_returns_the_last_traceback_only() -> None:
    trace, rest = split("Traceback (most recent call last):\n  File x\nKeyError: 1\ncontinues\n" + PLAIN)
    assert trace == PLAIN.rstrip()
    assert "KeyError" in rest


def test_split_finds_a_crash_of_the_interpreter() -> None:
    text = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File "a.py"\n'
    trace, rest = split(text)
    assert (trace, rest) == (text.rstrip(), "")
    assert message_of(trace) == "Fatal Python error: Segmentation fault"


@pytest.mark.parametrize(
    ("code", "expected"),
    [("import nowhere", True), ("def work():\n    import nowhere\nwork()", False), ("raise ValueError", False)],
)
def test_failed_at_start_is_true_only_for_imports_at_the_top(tmp_path: Path, code: str, expected: bool) -> None:
    (tmp_path / "main.py").write_text(code)
    printed = run(sys.executable, tmp_path / "main.py").stderr
    assert failed_at_start(split(printed)[0]) == expected


def test_split_without_a_traceback_returns_everything_as_the_rest() -> None:
    assert split("a\nb") == ("", "a\nb")
    assert message_of("") == ""


def test_split_ignores_an_abort_of_torch_after_a_traceback() -> None:
    abort = "terminate called after throwing an instance of 'std::system_error'\n  what():  x\n"
    assert message_of(split(PLAIN + abort)[0]) == "ValueError: no"
    assert message_of(split(abort)[0]) == abort.splitlines()[0]


def test_shortened_keeps_the_beginning_and_the_end() -> None:
    frames = "".join(f'  File "a.py", line {number}\n' for number in range(1000))
    trace, _ = split(f"Traceback (most recent call last):\n{frames}RecursionError: too deep\n")
    lines = shortened(trace).splitlines()
    assert len(lines) < 70
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "RecursionError: too deep")


def warned(where: str, what: str) -> list[bytes]:
    return [
        f"[rank3]:[W1124 13:40:49.378767068 {where}] [c10d] {what}: Connection reset by peer\n".encode(),
        b"Exception raised from recvBytes at /torch/csrc/distributed/c10d/Utils.hpp:784 (most recent call first):\n",
        b"frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f64c5579b8d in libc10.so)\n",
        b"<omitting python frames>\n",
        b"frame #21: <unknown function> + 0x1098ec (0x7f64c7b1c8ec in libc.so.6)\n",
        b"\n",
    ]


def test_warning_filter_removes_warnings_of_the_store_with_their_stack() -> None:
    store = warned("TCPStore.cpp:125", "recvValue failed on SocketImpl(fd=15, addr=[10d7:dbdf:687f]:57307)")
    lines = [b"step 1\n", *store, b"\n", b"frame #1 of 2\n", *store, b"step 2\n"]
    kept = [b"step 1\n", b"\n", b"frame #1 of 2\n", b"step 2\n"]
    assert WarningFilter().without_stacks(b"".join(lines)) == b"".join(kept)


def test_warning_filter_keeps_other_warnings_without_their_stack() -> None:
    other = warned("ProcessGroupNCCL.cpp:1783", "Failed to check the should dump flag")
    assert WarningFilter().without_stacks(b"".join(other)) == other[0]
    error = [b"RuntimeError: what\n", *other[1:]]
    assert WarningFilter().without_stacks(b"".join(error)) == b"".join(error), "asked for by TORCH_SHOW_CPP_STACKTRACES"


STORE = warned("TCPStore.cpp:125", "recvValue failed on SocketImpl(fd=15, addr=[10d7:dbdf:687f]:57307)")
OTHER = warned("ProcessGroupNCCL.cpp:1783", "Failed to check the should dump flag")
written = st.sampled_from([*STORE, b"".join(STORE), b"".join(OTHER), b"step 1\n"])
parts = st.lists(st.lists(written, max_size=4).map(b"".join))


@given(parts)
def test_warning_filter_shows_the_same_for_lines_in_any_parts(parts: list[bytes]) -> None:
    in_parts = WarningFilter()
    line_by_line = WarningFilter()
    text = b"".join(parts)
    kept = WarningFilter().without_stacks(text)
    assert b"".join(map(in_parts.without_stacks, parts)) == kept
    assert b"".join(map(line_by_line.without_stacks, text.splitlines(keepends=True))) == kept
    assert kept.count(b"step 1\n") == text.count(b"step 1\n")
