"""Note in the heartbeat that a child process exits, then that this one does; exit with the phase after each."""

import os
import subprocess
import sys

from ddp_kit.heartbeat import note_exiting, read_heartbeat

heartbeat = os.environ["TORCHELASTIC_ERROR_FILE"]
code = "from ddp_kit.heartbeat import note_exiting; note_exiting()"
subprocess.run([sys.executable, "-c", code], check=True)
phase = read_heartbeat(heartbeat).phase.name
note_exiting()
sys.exit(f"{phase} {read_heartbeat(heartbeat).phase.name}")
