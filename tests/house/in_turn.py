"""Run by test_docs.py: runs scripts one after the other in this process. Each word is a script with its arguments."""

import runpy
import sys

for words in [each.split() for each in sys.argv[1:]]:
    print("begins", *words, flush=True)
    sys.argv[:] = words
    sys.path[0] = ""
    runpy.run_path(words[0], run_name="__main__")
