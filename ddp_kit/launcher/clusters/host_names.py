"""The value of --hosts."""

from pathlib import Path

from ddp_kit.errors import UsageError


def hosts_of(text: str | None) -> tuple[str, ...]:
    """Names from `a,b`, or from a file with one per line. Raises `UsageError`."""
    if text is None:
        return ()
    path = Path(text)
    lines = path.read_text().splitlines() if path.is_file() else text.split(",")
    hosts = tuple(name for line in lines if (name := line.partition("#")[0].strip()))
    wrong = next((name for name in hosts if name.startswith("-") or len(name.split()) > 1), None)
    if not hosts or wrong is not None:
        raise UsageError(
            f"--hosts {text} names no hosts" if wrong is None else f"--hosts: {wrong!r} is not a host",
            "type --hosts gpu1,gpu2, or the name of a file with one host per line",
        )
    return hosts
