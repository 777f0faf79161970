"""An environment for gpu.py on a machine without a network: a Python that has torch, and a folder of wheels.

    python benchmarks/gpu_environment.py FOLDER [--for 3.12]     # where there is a network: fill the folder

Needs the standard library and pip alone.
"""

import argparse
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "build" / "gpu-environment"
COME_WITH_PYTHON = ("torch", "numpy")
"""These are large, and the Python that is given has them."""
FOR_TESTS = ("hypothesis>=6.110", "pytest>=8.3", "pytest-timeout>=2.3", "torchao>=0.18")
GLIBC = range(17, 29)
_SITES = "import site, sys; print(*[path for path in sys.path if path.endswith('-packages')], sep='\\n')"
_SCRIPTS = {"ddpkit": ("ddp_kit.cli.main", "entry"), "torchrun": ("torch.distributed.run", "main")}


def requirements() -> list[str]:
    """Wheels that ddpkit and its tests need in addition to what the Python installation has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [word for word in project["dependencies"] if not word.startswith(COME_WITH_PYTHON)] + [*FOR_TESTS]


def download(folder: Path, version: str) -> int:
    """Fill `folder` with wheels for Linux on x86-64 and this version of Python; pip's exit code."""
    platforms = ["manylinux1_x86_64", "manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC)]
    target = ["--python-version", version, "--implementation", "cp", "--only-binary=:all:"]
    target += [word for platform in platforms for word in ("--platform", platform)]
    words = ["download", "--quiet", "--dest", str(folder), "--constraint", str(ROOT / "constraints.txt"), *target]
    return subprocess.run([sys.executable, "-m", "pip", *words, *requirements()]).returncode


def make(wheels: Path) -> Path:
    """A virtual environment that sees this Python's packages, what they lack from `wheels`, and this checkout.

    Not by --system-site-packages: this Python may be that of a virtual environment itself. Returns its python.
    """
    shutil.rmtree(PLACE, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(PLACE)], check=True)
    python = PLACE / "bin" / "python"
    (own,) = PLACE.glob("lib/python*/site-packages")
    outside = subprocess.run([sys.executable, "-c", _SITES], capture_output=True, text=True, check=True).stdout
    lines = [f"import site; site.addsitedir({path!r})" for path in outside.splitlines()]
    (own / "outside.pth").write_text("\n".join([str(ROOT), *lines]) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--find-links", str(wheels), *requirements()])
    _introduce(own, python)
    return python


def _introduce(own: Path, python: Path) -> None:
    """What an editable install would leave: the version, and the commands. It would need a build tool."""
    version = next(
        line.split('"')[1]
        for line in (ROOT / "ddp_kit" / "__init__.py").read_text().splitlines()
        if line.startswith("__version__")
    )
    told = own / f"ddpkit-{version}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ddpkit\nVersion: {version}\n")
    for name, (module, function) in _SCRIPTS.items():
        script = python.with_name(name)
        script.write_text(f"#!{python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
        script.chmod(0o755)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--for", dest="version", default="3.12", help="the version of Python there (default: 3.12)")
    asked = parser.parse_args()
    sys.exit(download(asked.folder, asked.version))


if __name__ == "__main__":
    main()
