"""A script in a folder of modules that have the names of others: it imports those of its folder."""

import json
import queue
import sys

import typing_extensions
import utils

print(
    json.dumps(
        {module.__name__: [module.__file__, module.MARK] for module in (queue, typing_extensions, utils)}
        | {"path": sys.path}
    )
)
