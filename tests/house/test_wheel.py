"""What a user gets from the wheel."""

import sys
import zipfile

import pytest

from tests.support.launching import ROOT, run


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built)


def test_wheel_has_only_the_package_and_ddpkit_at_its_top_level(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ddp_kit", "ddpkit.py"}


def test_wheel_contains_every_module_the_types_and_the_licence(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "ddp_kit"
    modules = {f"ddp_kit/{path.relative_to(package)}" for path in package.rglob("*.py")}
    names = set(wheel.namelist())
    assert modules <= names
    assert "ddp_kit/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_installs_the_command(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "ddpkit = ddp_kit.cli.main:entry" in wheel.read(entry_points).decode()
