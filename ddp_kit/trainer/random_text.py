"""Converts the states of random generators to text and back, for checkpoints."""

import json
from array import array
from base64 import b64decode, b64encode

import torch

from ddp_kit.state_values import real_number
from ddp_kit.world import RandomStates

_MT19937_NUMBERS = 624


def encoded(states: RandomStates) -> str:
    """The states as text: a line of JSON, then one line of base64 per generator, which is fast to encode."""
    version, numbers, gauss = states.python
    blocks = {"python": array("I", numbers).tobytes(), "torch": states.torch.numpy().tobytes()}
    numpy = states.numpy
    if numpy is not None:
        blocks["numpy"] = numpy[1].tobytes()
    if states.device is not None:
        blocks["device"] = states.device.numpy().tobytes()
    first = {
        "python": [version, gauss],
        "numpy": None if numpy is None else [numpy[0], *map(float, numpy[2:])],
        "lines": list(blocks),
    }
    return "\n".join([json.dumps(first), *(b64encode(block).decode() for block in blocks.values())])


def decoded(text: str) -> RandomStates:
    """The inverse of `encoded`. Raises `ValueError`, `KeyError` or `TypeError` for other text."""
    line, *lines = text.split("\n")
    first = json.loads(line)
    blocks = {name: bytearray(b64decode(block)) for name, block in zip(first["lines"], lines, strict=True)}
    version, gauss = first["python"]
    numpy = first["numpy"]
    if numpy is not None:
        import numpy as np

        key = np.frombuffer(blocks["numpy"], dtype=np.uint32)
        if numpy[0] != "MT19937" or len(key) != _MT19937_NUMBERS or not 0 <= numpy[1] <= len(key):
            raise ValueError("no state of numpy's generator")  # numpy would read out of bounds
        numpy = (numpy[0], key, int(numpy[1]), int(numpy[2]), numpy[3])
    if gauss is not None:
        gauss = real_number(gauss, "the next number of Python's generator")  # Python accepts any object here
    return RandomStates(
        (version, tuple(array("I", bytes(blocks["python"]))), gauss),
        torch.frombuffer(blocks["torch"], dtype=torch.uint8),
        numpy,
        torch.frombuffer(blocks["device"], dtype=torch.uint8) if "device" in blocks else None,
    )
