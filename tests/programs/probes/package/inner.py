"""A module that is run with -m and imports relatively."""

import json
import pickle
import sys
from dataclasses import dataclass

from . import IMPORTED, neighbour


@dataclass
class Record:
    number: int = 0


if __name__ == "__main__":
    print(
        json.dumps(
            neighbour.facts(globals())
            | {
                "argv": sys.argv,
                "orig_argv": sys.orig_argv,
                "path": sys.path,
                "imported": [*IMPORTED, *sorted(name for name in sys.modules if name.startswith("package"))],
                "again": type(pickle.loads(pickle.dumps(Record(3)))) is Record,
                "frame below": sys._getframe().f_back and sys._getframe().f_back.f_code.co_filename,
            }
        )
    )
