"""What `-m package` runs."""

import json
import sys

from package.neighbour import facts

print(json.dumps(facts(globals()) | {"argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path}))
