"""What running the folder runs; the test also packs it into a zip file."""

import json
import sys

import beside

spec = globals()["__spec__"]
print(
    json.dumps(
        {
            "__name__": __name__,
            "__file__": __file__,
            "__package__": __package__,
            "__loader__": type(globals()["__loader__"]).__name__,
            "__spec__": [spec.name, spec.origin, spec.parent],
            "argv": sys.argv,
            "path": sys.path,
            "beside": beside.__file__,
        }
    )
)
