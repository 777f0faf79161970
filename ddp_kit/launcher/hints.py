"""What to do about the usual causes (stub)."""


def hint(text: str, exit_code: int, out_of_memory: bool = False) -> str:  # noqa: ARG001
    """What to do now; empty where nothing is known."""
    return ""


def is_echo(text: str) -> bool:
    """Whether it is what ranks say when another one went away."""
    return "Connection closed by peer" in text or "Connection reset by peer" in text
