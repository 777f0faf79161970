"""Write docs/images/launch.svg: a real run of the tutorial's script, in which one of two workers is killed.

python docs/tools/recording.py [FILE]
"""

import argparse
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parents[1]
COMMAND = "ddpkit launch --nproc-per-node 2 --max-restarts 3 spirals.py run"
KILLED_AFTER = "step 400/"
COLUMNS = 128
STYLES = {
    r"^\$ .*": "bold green",
    r"^ddpkit: .*": "bold yellow",
    r"^  hint: .*": "yellow",
    r"resumed from .*": "bold cyan",
    r"^loss .*": "bold green",
    r"INFO": "dim",
}


def run(folder: Path) -> list[str]:
    """The lines of the run, all that it prints."""
    document = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    script = re.search(r"^```python\n(# spirals\.py\n.*?)^```$", document, re.MULTILINE | re.DOTALL)
    assert script, "docs/tutorial.md has no spirals.py"
    (folder / "spirals.py").write_text(script[1], encoding="utf-8")
    program, *words = COMMAND.split()
    command = [str(Path(sys.executable).with_name(program)), *words]
    lines, killed = [], False
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout
        for line in job.stdout:
            lines.append(line.rstrip().replace(f"{folder}/", ""))
            if KILLED_AFTER in line and not killed:
                killed = True
                workers(job.pid)[-1].kill()
    assert job.returncode == 0, "\n".join(lines)
    assert killed, "\n".join(lines)
    return lines


def workers(launcher: int) -> list[psutil.Process]:
    """The processes of the script, by their rank."""
    children = psutil.Process(launcher).children(recursive=True)
    found = [child for child in children if re.search(r"python\S* -u spirals\.py", " ".join(child.cmdline()))]
    return sorted(found, key=lambda child: child.pid)


def picture(lines: list[str]) -> str:
    """The lines as they would stand in a terminal."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in [f"$ {COMMAND}", *lines]:
        text = Text(line)
        for pattern, style in STYLES.items():
            text.highlight_regex(pattern, style)
        console.print(text, highlight=False)
    svg = console.export_svg(title="ddpkit", unique_id="ddpkit")
    # Without fonts from other hosts, which a page that shows the picture as an image would not load anyway.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=DOCS / "images" / "launch.svg")
    file = parser.parse_args().file
    with tempfile.TemporaryDirectory() as folder:
        lines = run(Path(folder))
    file.write_text(picture(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
