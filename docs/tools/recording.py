"""Write the pictures of docs/images from real runs, each in a terminal of its own.

launch.svg                         the tutorial's script, in which one of two workers is killed
training-80.svg, training-200.svg  the tutorial's script while it trains, in terminals of 80 and 200 columns
top-80.svg, top-200.svg            `ddpkit top` while a job runs in which rank 1 is slow

python docs/tools/recording.py [FOLDER]
"""

import argparse
import fcntl
import io
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parents[1]
COMMAND = "ddpkit launch --nproc-per-node 2 --max-restarts 3 spirals.py run"
TRAINING = "ddpkit launch --nproc-per-node 2 spirals.py run"
KILLED_AFTER, SHOWN_AFTER = "step 2000/", "evaluation at step 2000"
COLUMNS = 134
STYLES = {
    r"^\$ .*": "bold green",
    r"^ddpkit: .*": "bold yellow",
    r"^  hint: .*": "yellow",
    r"resumed from .*": "bold cyan",
    r"^loss .*": "bold green",
    r"INFO": "dim",
}
SLOW = """
import sys, time, torch
from torch.utils.data import TensorDataset
from ddp_kit import Trainer, TrainerConfig

def loss_fn(model, batch):
    time.sleep(0.01 + 0.02 * trainer.world.rank)
    return model(batch[0]).square().mean()

model = torch.nn.Linear(8, 1)
config = TrainerConfig(global_batch_size=32, log_every_steps=20, max_steps=20_000)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=float(sys.argv[2])), loss_fn, config)
trainer.fit(TensorDataset(torch.ones(1024, 8)))
"""


def command(line: str) -> list[str]:
    program, *words = line.split()
    return [str(Path(sys.executable).with_name(program)), *words]


# What is run ----------------------------------------------------------------------------------------------------------


def killed_and_restarted(folder: Path) -> list[Text]:
    """The lines of a run in which the last worker is killed, all that it prints."""
    write_script(folder)
    lines, killed = [f"$ {COMMAND}"], False
    with subprocess.Popen(
        command(COMMAND), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout
        for line in job.stdout:
            lines.append(line.rstrip().replace(f"{folder}/", ""))
            if KILLED_AFTER in line and not killed:
                killed = True
                workers(job.pid)[-1].kill()
    assert job.returncode == 0, "\n".join(lines)
    assert killed, "\n".join(lines)
    return [coloured(line) for line in lines]


def write_script(folder: Path) -> None:
    """Of the tutorial."""
    document = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    script = re.search(r"^```python\n(# spirals\.py\n.*?)^```$", document, re.MULTILINE | re.DOTALL)
    assert script, "docs/tutorial.md has no spirals.py"
    (folder / "spirals.py").write_text(script[1], encoding="utf-8")


def workers(launcher: int) -> list[psutil.Process]:
    """The processes of the script, by their rank."""
    children = psutil.Process(launcher).children(recursive=True)
    found = [child for child in children if re.search(r"python\S* -u spirals\.py", " ".join(child.cmdline()))]
    return sorted(found, key=lambda child: child.pid)


def training(folder: Path, columns: int) -> list[Text]:
    """The terminal of a run in which some steps are still to be done."""

    def has_bar(lines: Sequence[Text]) -> bool:
        shown = [line.plain for line in lines]
        return any(SHOWN_AFTER in line for line in shown) and " left epoch" in shown[-1]

    shutil.rmtree(folder / "run", ignore_errors=True)
    return [coloured(f"$ {TRAINING}"), *in_terminal(TRAINING, columns, folder, has_bar)]


def top(folder: Path, columns: Sequence[int]) -> list[list[Text]]:
    """`ddpkit top` in terminals of so many columns, while a job runs."""
    (folder / "train.py").write_text(SLOW, encoding="utf-8")
    words = command("ddpkit launch --nproc-per-node 2 train.py --lr 0.0001")
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        try:
            shown = [in_terminal("ddpkit top", each, folder, names_slow_rank) for each in columns]
            return [[coloured("$ ddpkit top"), *table(lines)] for lines in shown]
        finally:
            job.send_signal(signal.SIGINT)


def table(lines: Sequence[Text]) -> list[Text]:
    """The lines on this job, whatever else runs on the machine."""
    at = next(
        (number for number, line in enumerate(lines) if line.plain.startswith("train.py --lr 0.0001")), len(lines)
    )
    ends = next((number for number in range(at, len(lines)) if not lines[number].plain.strip()), len(lines))
    return [*lines[at:ends]]


def names_slow_rank(lines: Sequence[Text]) -> bool:
    return any("rank 1" in line.plain for line in table(lines))


def in_terminal(line: str, columns: int, folder: Path, is_enough: Callable[[Sequence[Text]], bool]) -> list[Text]:
    """What a command shows in a terminal of so many columns, as soon as it is enough. It then runs to its end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        command(line), cwd=folder, env=env | {"TERM": "xterm-256color"}, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    output, found = b"", None
    while True:
        try:
            output += os.read(ours, 1 << 16)
        except OSError:  # the last process has closed its end
            break
        lines = screen(output)
        if found is None and lines and is_enough(lines):
            found = lines
            os.write(ours, b"q")  # a key that ends the display of `ddpkit top`
    os.close(ours)
    assert process.wait() == 0, output.decode()
    assert found is not None, output.decode()
    return found


def screen(output: bytes) -> list[Text]:
    """The lines on a terminal. The only movements of the cursor are to the start of a line, and of the whole screen."""
    text = output.decode(errors="replace").replace("\r\n", "\n")
    if "\x1b[H" in text:
        text = text.split("\x1b[H")[-1]
    lines = list(AnsiDecoder().decode(text))
    while lines and not lines[-1].plain.strip():
        lines.pop()
    return lines


# The picture ----------------------------------------------------------------------------------------------------------


def coloured(line: str) -> Text:
    text = Text(line)
    for pattern, style in STYLES.items():
        text.highlight_regex(pattern, style)
    return text


def picture(lines: Sequence[Text], columns: int) -> str:
    """The lines as they stand in a terminal, of which empty columns on the right are left out."""
    width = min(columns, max(len(line.plain.rstrip()) for line in lines))
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        line.rstrip()
        console.print(line, highlight=False, overflow="fold")
    svg = console.export_svg(title="ddpkit", unique_id="ddpkit")
    # Without fonts from other hosts, which a page that shows the picture as an image would not load anyway.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=DOCS / "images")
    images = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {"launch": (killed_and_restarted(folder), COLUMNS)}
        found |= {f"training-{columns}": (training(folder, columns), columns) for columns in (80, 200)}
        found |= {
            f"top-{columns}": (lines, columns) for columns, lines in zip((80, 200), top(folder, (80, 200)), strict=True)
        }
    for image, (lines, columns) in found.items():
        (images / f"{image}.svg").write_text(picture(lines, columns), encoding="utf-8")
        print("\n".join(line.plain for line in lines), end="\n\n")


if __name__ == "__main__":
    main()
