"""`ddpkit report`: write an HTML report about one or more runs, based on the records in their folders."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import indent

from ddp_kit.arguments import Parser
from ddp_kit.errors import UsageError
from ddp_kit.report.charts import write_pictures
from ddp_kit.report.comparison import first_differences
from ddp_kit.report.findings import Profile, findings, profiles_of, state
from ddp_kit.report.page import MARK, page
from ddp_kit.report.run_history import RunHistory, read_runs, repeated_folders
from ddp_kit.storage.command_line import path_on_disk, record_folder
from ddp_kit.terminal import Terminal

_EPILOG = """\
examples:
  ddpkit report runs/1                  write report.html
  ddpkit report runs/1 runs/2           show both runs in each chart, and where they first differ
  ddpkit report runs/1 --images plots   also write the charts as SVG files
"""


def parser() -> Parser:
    """Create the argument parser of `ddpkit report`."""
    flags = Parser(
        prog="ddpkit report",
        description="Write an HTML report about one or more runs: loss, speed, ranks, memory, restarts, configuration, "
        "advice; of two runs, also where they first differ. The page needs neither a network nor a server. The runs "
        "may still be in progress.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        type=record_folder,
        help="a checkpoint folder (checkpoint.dir) on disk, or a --log-dir folder",
    )
    flags.add_argument(
        "--out",
        metavar="FILE",
        type=path_on_disk,
        default=Path("report.html"),
        help="the file to write (default: report.html)",
    )
    flags.add_argument(
        "--images",
        metavar="FOLDER",
        type=path_on_disk,
        help="also write the charts to this folder as SVG files; needs matplotlib",
    )
    return flags


def run(argv: Sequence[str], terminal: Terminal) -> int:
    """Write the report as an HTML page, print its findings, and return the exit code.

    Raises `UsageError` if a run cannot be read, or a file cannot be written.
    """
    print_text = terminal.print_text
    args = parser().parse_args(argv)
    runs = read_runs(args.runs)
    try:
        _check(args.out)
        profiles = {run.name: profiles_of(run) for run in runs}
        args.out.write_text(page(runs, profiles), encoding="utf-8", errors="backslashreplace")  # lone surrogates
        pictures = []
        if args.images is not None:
            pictures = write_pictures(runs, args.images)
    except OSError as error:
        where = error.filename or args.out
        raise UsageError(f"{where} cannot be written: {error.strerror}", "use another path") from None
    for run in runs:
        _print_findings(run, profiles[run.name], print_text)
    for folder, first in repeated_folders(args.runs):
        print_text(f"{folder} is the same run as {first}: it is shown once")
    if len(runs) == 2:
        summary, *details = first_differences(*runs)
        print_text("\n".join([summary, *(f"  {line}" for line in details)]))
    written = f"{args.out}: {args.out.stat().st_size / 1000:,.0f} kB"
    if pictures:
        written += f"; {len(pictures)} charts in {args.images}"
    print_text(written)
    return 0


def _print_findings(run: RunHistory, profiles: Sequence[Profile], print_text: Callable[[str], None]) -> None:
    print_text(f"{run.name}: {state(run)}")
    for finding in findings(run):
        print_text(indent(finding.text, "  "))
    for profile in profiles:
        print_text(f"  {profile.title}:")
        for line in profile.lines:
            print_text(indent(line, "    "))


def _check(out: Path) -> None:
    """Raise `UsageError` if `out` is a folder, or an existing file that is not a report."""
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder", f"use --out {out / 'report.html'}")
    if out.exists() and MARK not in out.read_text(encoding="utf-8", errors="replace")[:1000]:
        raise UsageError(f"--out {out} exists and is not a ddpkit report", "give the name of a new file")
