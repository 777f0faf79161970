"""The import rules of the house, read from the syntax tree."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from ddp_kit.clusters.engines import ENGINES

PACKAGE = Path(__file__).parents[2] / "ddp_kit"
STANDARD_LIBRARY_ONLY = {"errors", "env", "exit_codes", "heartbeat", "uncaught", "masking", "checkpoint.format"}

FLOOR = {
    "errors": 0, "env": 0, "exit_codes": 0, "heartbeat": 0, "uncaught": 0, "masking": 0, "config": 0,
    "checkpoint.format": 0, "checkpoint.weight_files": 0,
    "torch_internals": 1, "log": 1, "records": 1, "structures": 1, "pieces": 1, "state_values": 1, "function_launch": 1,
    "progress": 2, "float8": 2, "timing": 2,
    "distributed": 3,
    "data": 4, "precision": 4, "parallel": 4, "compilation": 4, "metrics": 4, "callbacks": 4,
    "profile": 4,
    "checkpoint": 5, "memory": 5,
    "trainer": 6,
}  # fmt: skip
LAUNCHER_LAYER = {  # of a folder or module of launcher/
    "parser": 0, "program": 0, "diagnosis": 0, "verdict": 0, "clusters.request": 0, "trace": 0,
    "rehearsal": 0,
    "job": 1, "output": 1, "devices": 1, "clusters": 1, "warm.messages": 1,
    "spec": 2,
    "rendezvous": 3,
    "plan": 4,
    "devices.reservations": 5, "record": 5, "warm": 5,
    "agent": 6, "dry_run": 6,
    "doctor": 7, "report": 7, "readings": 7,
    "commands": 8,
    "cli": 9,
    "warm.kept": 10,
}  # fmt: skip
OUTSIDE_THE_FLOORS = {"__init__", "__main__"}


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
    """The folder of a module, or the module itself if it is in none, or on another floor than its folder."""
    return name if name in FLOOR else name.split(".")[0]


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
    known = {name_of(module) for module in modules()}
    found = set()
    for full in imports(path):
        name = full.removeprefix("ddp_kit.")
        if name != full:
            found.add(name if name in known else name.rpartition(".")[0])
    return {name for name in found if name}


def test_every_module_has_a_layer() -> None:
    upstairs = {
        room(name_of(path)) for path in modules() if not name_of(path).startswith("launcher")
    } - OUTSIDE_THE_FLOORS
    assert upstairs == set(FLOOR)


@pytest.mark.parametrize("path", [path for path in modules() if not name_of(path).startswith("launcher")], ids=name_of)
def test_module_imports_only_lower_layers(path: Path) -> None:
    own = room(name_of(path))
    if own in OUTSIDE_THE_FLOORS:
        return
    for other in map(room, own_imports(path)):
        assert other in FLOOR, f"{own} imports {other}"
        # The ground floor builds on itself: errors, then env, then heartbeat, uncaught and config.
        below = FLOOR[other] < FLOOR[own] or FLOOR[other] == FLOOR[own] == 0
        assert below or other == own, f"{own} imports {other}"


@pytest.mark.parametrize("name", sorted(STANDARD_LIBRARY_ONLY))
def test_layer_0_imports_little_but_the_standard_library(name: str) -> None:
    roots = {full.split(".")[0] for full in imports((PACKAGE / name.replace(".", "/")).with_suffix(".py"))}
    assert not roots & {"torch", "loguru", "rich", "pynvml", "pydantic", "yaml", "numpy"}


def test_launcher_imports_only_layer_0_and_itself() -> None:
    for path in (PACKAGE / "launcher").rglob("*.py"):
        for other in own_imports(path):
            assert room(other) == "launcher" or FLOOR.get(room(other)) == 0 or other == "", (
                f"{path.name} imports {other}"
            )


def launcher_layer(name: str) -> str:
    """The folder or module of `LAUNCHER_LAYER` that a module of the launcher, such as `launcher.job`, belongs to."""
    inside = name.removeprefix("launcher.")
    return inside if inside in LAUNCHER_LAYER else inside.split(".")[0]


def test_every_module_of_the_launcher_has_a_layer() -> None:
    names = {launcher_layer(name) for name in folder("launcher")} - OUTSIDE_THE_FLOORS
    assert names == set(LAUNCHER_LAYER)


@pytest.mark.parametrize("name", sorted(folder("launcher") - {"launcher.__init__"}))
def test_launcher_module_imports_only_lower_layers(name: str) -> None:
    own = launcher_layer(name)
    for imported in own_imports((PACKAGE / name.replace(".", "/")).with_suffix(".py")):
        other = launcher_layer(imported)
        if imported.startswith("launcher.") and other != own:
            assert LAUNCHER_LAYER[other] < LAUNCHER_LAYER[own], f"{own} imports {other}"


def test_engine_names_stay_in_clusters() -> None:
    """The rest of the launcher knows engines as `Engine`. `ssh` is also a program, and some variables are in env.py."""
    words = {*ENGINES, "sbatch", "srun", "kubectl", "k8s", "mpirun", "mpi", "azureml", "pytorchjob"} - {"ssh"}
    pattern = re.compile(rf"(?<![a-z])({'|'.join(words)})(?![a-z])", re.IGNORECASE)
    for path in (PACKAGE / "launcher").rglob("*.py"):
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
    # without them a plan of the memory would need the memory. Two for what took the memory of a GPU, by source line.
    # One to compile in place, with the user's settings, what the user has passed as torch.compile(model).
    # Two to see whether a module has its own code for loading, which may take buffers of other shapes.
    # Two to find the hooks of an optimizer's step, which torch has no function to list.
    # Two to find the buffers that are in the state_dict, in each step.
    # Four for plans of scripts that name a GPU which is not there, or that read values of tensors without memory.
    # One to join the flags of an overflow, which fused optimizers need as one scalar. Three to refuse what sharding
    # would lose: hooks on the gradients of parameters, and memory that setting `data` has replaced in a DTensor.
    "torch_internals": 33,
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


def test_private_members_of_torch_are_used_only_in_torch_internals() -> None:
    for path in modules():
        if name_of(path).startswith("launcher") or "checkpoint" in path.relative_to(PACKAGE).parts:
            continue
        found = private_uses(path)
        outside = [use for use in found if use.startswith(("torch.", "dist.")) or "_pytree" in use]
        assert not outside or name_of(path) == "torch_internals", f"{path.name}: {outside}"
    assert len(private_uses(PACKAGE / "torch_internals.py")) <= PRIVATE_USES["torch_internals"]


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


def test_no_module_outside_the_launcher_imports_it() -> None:
    for path in modules():
        if not name_of(path).startswith("launcher") and name_of(path) != "__main__":
            assert not any(other.startswith("launcher") for other in own_imports(path)), path.name


def test_launcher_imports_torch_only_in_the_agent_and_in_the_watch_of_a_rehearsal() -> None:
    with_torch = {path for path in (PACKAGE / "launcher").rglob("*.py") if _uses(path, "torch")}
    assert {path.parent.name for path in with_torch} == {"agent", "rehearsal"}
    assert {name_of(path) for path in with_torch if path.parent.name == "rehearsal"} == {"launcher.rehearsal.watch"}


def test_watch_of_a_rehearsal_is_imported_by_name_only_in_its_workers() -> None:
    for path in modules():
        assert "launcher.rehearsal.watch" not in own_imports(path), f"{path.name} would import torch"


def _uses(path: Path, root: str) -> bool:
    return any(full.split(".")[0] == root for full in imports(path))


def test_environment_is_accessed_in_few_modules() -> None:
    touching = {
        name_of(path)
        for path in modules()
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv", "environb")
    }
    starting = {"function_launch", "launcher.cli", "launcher.clusters.ray_driver"}
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
    for path in modules():
        if path.stem == "__main__":
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
