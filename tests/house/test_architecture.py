"""The import rules of the house, read from the syntax tree."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddp_kit.clusters.engines import ENGINES
from tests.support.launching import tool

PACKAGE = Path(__file__).parents[2] / "ddp_kit"
STANDARD_LIBRARY_ONLY = {"errors", "env", "exit_codes", "heartbeat", "uncaught", "masking", "checkpoint.format"}

layers = tool("layers")
LAYER = {
    name: number for side in (layers.WORKER, layers.LAUNCHER) for number, row in enumerate(side, 1) for name in row
}
LAYER |= dict.fromkeys(layers.GROUND, 0)
OF_LAUNCHER = {name for row in layers.LAUNCHER for name in row}
WITHOUT_LAYER = {"__init__", "__main__", "launcher.__init__"}
LAUNCHER_FOLDERS = ("cli", "clusters", "devices", "doctor", "launcher", "rehearsal", "report", "watching")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def room(name: str) -> str:
    """The room in the list of layers that a module belongs to: a folder, or a module that is listed by itself."""
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in LAYER), name)


def imports(path: Path) -> Iterator[str]:
    """Full names of what a module imports when it runs, wherever the statement stands; not what types alone need."""
    tree = tree_of(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folder(name: str) -> set[str]:
    return {name_of(path) for path in modules() if name_of(path).startswith(f"{name}.")}


def own_imports(path: Path) -> set[str]:
    """The package's modules that a module imports, such as `errors` or `launcher.plan`."""
    known = {name_of(module).removesuffix(".__init__") for module in modules()}
    found = set()
    for full in imports(path):
        name = full.removeprefix("ddp_kit.")
        if name != full:
            found.add(name if name in known else name.rpartition(".")[0])
    return {name for name in found if name}


def of_launcher() -> list[Path]:
    return [path for path in modules() if name_of(path).split(".")[0] in LAUNCHER_FOLDERS]


def test_every_module_has_a_layer() -> None:
    assert {room(name_of(path)) for path in modules()} - WITHOUT_LAYER == set(LAYER)


def test_layers_are_in_the_document() -> None:
    assert layers.with_table(layers.DOCUMENT.read_text()) == layers.DOCUMENT.read_text(), "run `make docs`"


@pytest.mark.parametrize("path", [path for path in modules() if name_of(path) not in WITHOUT_LAYER], ids=name_of)
def test_module_imports_only_lower_layers_of_its_own_side(path: Path) -> None:
    own = room(name_of(path))
    for other in {room(each) for each in own_imports(path)} - {own, "__init__"}:
        assert LAYER[other] < LAYER[own] or LAYER[other] == LAYER[own] == 0, f"{own} imports {other}"
        same_side = LAYER[other] == 0 or (other in OF_LAUNCHER) == (own in OF_LAUNCHER)
        assert same_side, f"{own} imports {other}"


@pytest.mark.parametrize("name", sorted(STANDARD_LIBRARY_ONLY))
def test_layer_0_imports_little_but_the_standard_library(name: str) -> None:
    roots = {full.split(".")[0] for full in imports((PACKAGE / name.replace(".", "/")).with_suffix(".py"))}
    assert not roots & {"torch", "loguru", "rich", "pynvml", "pydantic", "yaml", "numpy"}


def test_engine_names_stay_in_clusters() -> None:
    """The rest of the launcher knows engines as `Engine`. `ssh` is also a program, and some variables are in env.py."""
    words = {*ENGINES, "sbatch", "srun", "kubectl", "k8s", "mpirun", "mpi", "azureml", "pytorchjob"} - {"ssh"}
    pattern = re.compile(rf"(?<![a-z])({'|'.join(words)})(?![a-z])", re.IGNORECASE)
    for path in of_launcher():
        if path.parent.name == "clusters":
            continue
        documentation = {node.value for node in nodes_of(path) if isinstance(node, ast.Expr)}
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and node not in documentation:
                text = str(node.value)
            else:
                text = getattr(node, "id", getattr(node, "attr", ""))
            assert not pattern.search(text), f"{path.name}: {text}"


def test_strategy_classes_of_torch_are_used_only_in_parallel() -> None:
    own = {"DistributedDataParallel", "fully_shard", "FSDPModule", "DTensor", "ZeroRedundancyOptimizer"}
    for path in modules():
        if "parallel" not in path.relative_to(PACKAGE).parts:
            tree = tree_of(path)
            named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            assert not named & own, f"{path.name} knows {named & own}"
            assert not own & {full.rpartition(".")[2] for full in imports(path)}, path.name
            assert "DistributedDataParallel" not in path.read_text(), path.name


PRIVATE_USES = {  # of torch, by module: what a new torch may take away
    # Three of them for tensors without memory, and a count of what is live: torch has no public API for either, and
    # without them a plan of the memory would need the memory.
    # One to compile in place, with the user's settings, what the user has passed as torch.compile(model).
    # Two to see whether a module has its own code for loading, which may take buffers of other shapes.
    # Two to find the hooks of an optimizer's step, which torch has no function to list.
    # Two to find the buffers that are in the state_dict, in each step.
    # Four for plans of scripts that name a GPU which is not there, or that read values of tensors without memory.
    # One to join the flags of an overflow, which fused optimizers need as one scalar. Three to refuse what sharding
    # would lose: hooks on the gradients of parameters, and memory that setting `data` has replaced in a DTensor.
    "torch_internals": 29,
    "memory.fake": 3,
    "parallel.ddp": 1,
    "trainer.model_flops": 3,
    "rehearsal.watch": 11,  # in a rehearsal only: it replaces functions that have no hooks
    "launcher.agent.torchrun": 1,
    "launcher.warm.worker": 4,  # the collectives that each worker has begun
}


def private_uses(path: Path) -> list[str]:
    """Attributes and modules of torch with a leading underscore, which are no public API."""
    tree = tree_of(path)
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in own
        and ast.unparse(node.value).split(".")[0] not in ("self", "cls", "os")
    ]
    return found + [full for full in imports(path) if full.startswith("torch.") and "._" in full]


def test_private_members_of_torch_are_used_in_few_modules() -> None:
    for path in modules():
        if name_of(path).startswith("launcher") or "checkpoint" in path.relative_to(PACKAGE).parts:
            continue
        found = private_uses(path)
        of_torch = [use for use in found if use.startswith(("torch.", "dist.")) or "_pytree" in use]
        assert not of_torch or len(found) <= PRIVATE_USES.get(name_of(path), 0), (
            f"{name_of(path)}: {len(found)} {found}"
        )


def test_agent_uses_private_members_of_torch_in_one_module() -> None:
    found = {name_of(path): private_uses(path) for path in (PACKAGE / "launcher" / "agent").glob("*.py")}
    allowed = "launcher.agent.torchrun"
    assert len(found.pop(allowed)) <= PRIVATE_USES[allowed]
    assert found.keys() >= {"launcher.agent.loop", "launcher.agent.workers"}
    assert not {name: uses for name, uses in found.items() if uses}


def test_warm_worker_uses_private_members_of_torch_in_one_module() -> None:
    python = {"_run_module_as_main", "_set_native_id", "_getframe", "_get_candidate_names", "_registry", "_data"}
    found = {
        name_of(path): [use for use in private_uses(path) if use.rpartition(".")[2] not in python]
        for path in (PACKAGE / "launcher" / "warm").glob("*.py")
    }
    allowed = "launcher.warm.worker"
    assert len(found.pop(allowed)) <= PRIVATE_USES[allowed]
    assert not {name: uses for name, uses in found.items() if uses}


def test_agent_classes_do_not_inherit_from_torch() -> None:
    for path in (PACKAGE / "launcher").rglob("*.py"):
        theirs = {full.rpartition(".")[2] for full in imports(path) if full.startswith("torch.")}
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                assert not theirs & {ast.unparse(base) for base in node.bases}, f"{path.name}: {node.name}"


def test_launcher_and_commands_import_torch_in_few_modules() -> None:
    with_torch = {name_of(path) for path in of_launcher() if _uses(path, "torch")}
    assert with_torch - folder("launcher.agent") == {"doctor.probe", "rehearsal.watch"}


def test_modules_with_torch_are_not_imported_by_commands() -> None:
    for path in modules():
        assert not own_imports(path) & {"doctor.probe", "rehearsal.watch"}, f"{path.name} would import torch"


def _uses(path: Path, root: str) -> bool:
    return any(full.split(".")[0] == root for full in imports(path))


def test_environment_is_accessed_in_few_modules() -> None:
    touching = {
        name_of(path)
        for path in modules()
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv", "environb")
    }
    starting = {"launcher.function", "cli.main", "cli.launch", "clusters.ray_driver"}
    assert touching <= {"env", "heartbeat", *starting, *folder("launcher.agent"), *folder("launcher.warm")}


def test_environment_variables_are_named_in_one_module() -> None:
    import ddp_kit.env as contract

    names = {
        value for name, value in vars(contract).items() if name.isupper() and isinstance(value, str) and value.isupper()
    }
    assert {"RANK", "CUDA_VISIBLE_DEVICES"} <= names
    for path in modules():
        if name_of(path) == "env":
            continue
        written = {node.value for node in nodes_of(path) if isinstance(node, ast.Constant)}
        assert not written & names, f"{path.name} spells out {written & names}"


def test_public_dataclasses_are_frozen() -> None:
    left_out = {"__main__"} if find_spec("ray") else {"__main__", "ray_driver"}  # which imports ray
    for path in modules():
        if path.stem in left_out:
            continue
        module = import_module(f"ddp_kit.{name_of(path)}".removesuffix(".__init__"))
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and is_dataclass(kind):
                public = not kind.__name__.startswith("_")
                assert kind.__dataclass_params__.frozen or not public, kind  # type: ignore[attr-defined]
                assert fields(kind)


def test_no_text_is_markup_for_rich() -> None:
    """Names and output of users may contain [brackets] and :colons:, with which rich would fail or omit them."""
    for path in modules():
        for node in nodes_of(path):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            off = {each.arg for each in node.keywords if isinstance(each.value, ast.Constant) and not each.value.value}
            assert name not in ("from_markup", "render_markup"), f"{path}:{node.lineno}"
            needed = {"Console": {"markup", "emoji"}, "TextColumn": {"markup"}}.get(name, set())
            assert needed <= off, f"{path}:{node.lineno}: {name} without {', '.join(needed - off)}=False"
    cells = [
        ast.unparse(cell)
        for path in modules()
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "table.add_row"
        for cell in node.args
    ]
    assert cells
    assert all("Text(" in cell for cell in cells)


def test_launch_and_docker_folders_contain_no_python() -> None:
    for folder in ("launch", "docker"):
        assert not list((PACKAGE.parent / folder).rglob("*.py")), f"{folder}/ would be importable"


def test_unit_tests_mirror_the_package() -> None:
    tests = Path(__file__).parents[1]
    whole = {"end_to_end", "house", "rigs"}
    assert {path.parent.name for path in tests.glob("*/test_*.py")} - whole <= {path.name for path in PACKAGE.iterdir()}
    units = {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")}
    assert units - {path.stem for path in PACKAGE.glob("*.py")} == {"fake_cuda", "gpu", "object_store"}
