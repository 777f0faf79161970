"""All launches and long tests, part by part: `make thorough`, or `make thorough ONLY="slurm hosts"`.

Each part is a run of pytest by itself. At the end a table says what ran, how it ended and how long it took.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent

# A file belongs to the part with the longest prefix of its path; tests/house/test_thorough.py checks that there is one.
PARTS = {
    "launcher": ("launcher",),
    "commands": ("cli", "clusters", "devices", "doctor", "rehearsal/", "report", "watching"),
    "kept": ("launcher/test_kept", "launcher/test_killed.py"),
    "contract": ("launcher/test_contract_flags.py", "launcher/test_documented_commands.py", "cli/test_dry_run.py"),
    "same-script": (
        "end_to_end/test_same_script.py", "end_to_end/test_launchers.py", "end_to_end/test_import_traces.py",
    ),
    "faults": (
        "end_to_end/test_faults.py", "end_to_end/test_hangs.py", "end_to_end/test_restarts.py",
        "end_to_end/test_preemption.py", "end_to_end/test_health.py", "health", "rigs/test_full_disk.py",
        "rigs/test_shared_memory.py",
    ),
    "training": (
        "end_to_end", "trainer", "data", "distributed", "callbacks", "config", "model", "test_",
    ),
    "replay": ("end_to_end/test_replayed.py",),
    "mistakes": ("end_to_end/test_mistakes.py", "end_to_end/test_as_one_process.py"),
    "placement": (
        "parallel", "end_to_end/test_placements.py", "end_to_end/test_pipelined.py", "end_to_end/test_staged.py",
        "memory", "end_to_end/test_planned.py", "end_to_end/test_device_map_runs.py", "end_to_end/test_utilised.py",
        "end_to_end/test_activations_at_two_ranks.py", "end_to_end/test_reduced_alike.py", "end_to_end/test_float8.py",
    ),
    "strategy": ("end_to_end/test_third_strategy.py", "end_to_end/test_third_strategy_whole.py"),
    "checkpoints": ("checkpoint", "end_to_end/test_resume.py"),
    "lose-nothing": (
        "end_to_end/test_copies.py", "rigs/test_copies_without_memory.py", "rigs/test_spares.py",
    ),
    "object-storage": (
        "storage", "rigs/test_object_storage.py", "end_to_end/test_end_in_store.py",
        "end_to_end/test_commands_in_store.py", "end_to_end/test_without_client.py",
        "checkpoint/test_load_from_store.py", "cli/test_checkpoints_in_store.py", "cli/test_export_from_store.py",
        "doctor/test_object_store_checks.py",
    ),
    "fuzz": ("checkpoint/test_fuzz.py",),
    "rehearsals": ("end_to_end/test_rehearsals.py",),
    "chaos": ("end_to_end/test_chaos.py",),
    "recipes": ("end_to_end/test_recipes.py", "end_to_end/test_examples.py", "end_to_end/test_adapted.py"),
    "benchmarks": ("end_to_end/test_benchmarks.py",),
    "notebooks": ("end_to_end/test_notebooks.py", "end_to_end/test_function_launch.py"),
    "documents": ("house",),
    "types": ("house/test_types.py",),
    "hosts": ("rigs/test_hosts.py",),
    "slurm": ("rigs/test_slurm.py",),
    "kubernetes": ("rigs/test_kubernetes.py",),
    "ray": ("rigs/test_ray.py",),
    "skypilot": ("rigs/test_skypilot.py",),
    "ssh": ("rigs/test_ssh.py",),
    "images": ("rigs/test_docker.py",),
}  # fmt: skip


def part_of(file: str) -> str | None:
    """Name of the part of a test file, such as `launcher/test_cli.py`."""
    prefixes = [
        (len(prefix), name) for name, prefixes in PARTS.items() for prefix in prefixes if file.startswith(prefix)
    ]
    return max(prefixes)[1] if prefixes else None


def test_files() -> list[str]:
    """Test files, relative to tests/."""
    return sorted(str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PARTS", help=f"names of parts: {', '.join(PARTS)}")
    parser.add_argument("--jobs", default="2", help="processes of pytest (default: 2)")
    arguments = parser.parse_args()
    names = arguments.only.split() or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are: {', '.join(PARTS)}")
    rows = []
    for name in names:
        files = [f"tests/{file}" for file in test_files() if part_of(file) == name]
        print(f"\n{name}: {', '.join(files)}", flush=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "slow",
            "--numprocesses",
            arguments.jobs,
            "--dist",
            "worksteal",
        ]
        begun, summary = time.monotonic(), ""
        with subprocess.Popen(
            [*command, *files], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if re.match(r"=+ .* in [\d.]+s", line):
                    summary = line.strip("= \n").rpartition(" in ")[0]
        minutes, seconds = divmod(round(time.monotonic() - begun), 60)
        rows.append((name, process.returncode, f"{minutes}:{seconds:02}", summary or f"exit code {process.returncode}"))
    print(f"\n{'part':<13}{'time':>6}  result")
    for name, _, duration, summary in rows:
        print(f"{name:<13}{duration:>6}  {summary}")
    return int(any(code for _, code, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
