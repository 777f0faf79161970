"""A shell script that runs a launcher on another host, and stops it once its standard input ends.

The input is a connection or a pipe of whoever started it: it ends with that process, however that ends, and with the
connection.
"""

import shlex
from collections.abc import Sequence

# Descriptor 3 is the input: a command in the background would get /dev/null instead.
_SCRIPT = """\
exec 3<&0
{start}{launch} </dev/null 3<&- &
launcher=$!
{{ cat; kill -TERM "$launcher"; }} <&3 >/dev/null 2>&1 &
watcher=$!
exec 3<&-
wait "$launcher"
code=$?
kill "$watcher" 2>/dev/null
exit "$code"
"""


def found_first(command: Sequence[str], programs: str) -> str:
    """The words of a command for a shell, which looks for it in the folder `programs` first."""
    return f'PATH={shlex.quote(programs)}:"$PATH" {shlex.join(command)}'


def script(launch: Sequence[str], folder: str = "", programs: str = "") -> tuple[str, ...]:
    """The command `sh -c ...` that runs `launch`; its exit code is the launcher's.

    `folder`: where it runs; `programs`: a folder in which programs are looked for first. Empty: as they are.
    """
    start = f"cd {shlex.quote(folder)} || exit 2\n" if folder else ""
    start += f'PATH={shlex.quote(programs)}:"$PATH"\n' if programs else ""
    return "sh", "-c", _SCRIPT.format(start=start, launch=shlex.join(launch))
