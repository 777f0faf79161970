"""A launch as far as its choice of GPUs, as `ddpkit launch` makes it, but without torch: `chooser.py GPUS [INNER...]`.

It chooses when its standard input is closed, says what it got or why not, and holds that until it is ended. For each
word after the first it starts a chooser of its own, when it has its GPUs. It waits for others that choose for as long
as CHOOSING_SECONDS says, because on a busy machine fifty take longer than a launch waits.
"""

import os
import signal
import subprocess
import sys
from functools import partial
from types import MappingProxyType

from ddp_kit.devices import cpus, gpus, reservations
from ddp_kit.errors import UsageError
from ddp_kit.launcher import plan, spec

SETTINGS = {
    "standalone": True,
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "",
    "master_port": None,
    "local_addr": None,
    "nnodes": "1",
    "training_script": "train.py",
    "training_script_args": [],
    "event_log_handler": "null",
    "local_ranks_filter": "",
    "log_dir": None,
    "logs_specs": None,
    "max_restarts": 0,
    "module": False,
    "monitor_interval": 0.1,
    "no_python": False,
    "numa_binding": None,
    "rdzv_conf": "",
    "redirects": "0",
    "role": "default",
    "run_path": False,
    "shutdown_timeout": None,
    "signals_to_handle": "SIGTERM",
    "tee": "0",
    "virtual_local_rank": False,
    "log_line_prefix_template": "",
    "duplicate_stdout_filters": [],
    "duplicate_stderr_filters": [],
}

reservations._TIMEOUT_SECONDS = float(os.environ["CHOOSING_SECONDS"])
asked = spec.LaunchSpec(
    sys.argv[1], None, keep_warm=None, cold=False, preload="auto", dry_run=False, torchrun=MappingProxyType(SETTINGS)
)
make = partial(plan.make, asked, gpus.gpus(), os.environ, "id", cpus.here())
sys.stdin.read()
try:
    with reservations.reserved(make, lambda made: made.held_gpus) as settled:
        os.write(1, f"{os.getpid()} has {settled.env['CUDA_VISIBLE_DEVICES']}\n".encode())
        for words in sys.argv[2:]:
            subprocess.Popen([sys.executable, __file__, words], stdin=subprocess.DEVNULL)
        signal.pause()
except UsageError as error:
    os.write(1, f"{os.getpid()} has none: {' | '.join(str(error).splitlines())}\n".encode())
