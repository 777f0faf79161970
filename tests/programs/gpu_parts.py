"""`make gpu` with parts that hang, fail and succeed. Arguments: the number of GPUs, a time limit in seconds, --out.

PYTHONPATH: the folder of gpu.py.
"""

import sys

import gpu

HANGS = (
    "import subprocess, sys, time\n"
    "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "print('left', left.pid, flush=True); time.sleep(600)"
)
number, limit = int(sys.argv.pop(1)), int(sys.argv.pop(1))


def part(name, code, seconds=60, read=lambda figures, log: []):
    return gpu.Part(name, "about it", lambda figures: ["-c", code], seconds, read, needs_gpu=name != "machine")


gpu.write_section = lambda name, text: None
gpu.PARTS = (
    part("machine", f"print('gpus: {number}')"),
    part("hangs", HANGS, seconds=limit, read=lambda figures, log: [("so far", log.strip())]),
    part("fails", "import sys; print('why'); sys.exit(3)"),
    part("good", "print('done')"),
)
gpu.main()
