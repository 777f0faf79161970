"""Type checkers accept every example of the documents without a plugin, and find mistakes in settings."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.launching import BIN, ROOT, run, seconds

BLOCK = re.compile(r"^```(python|py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHECKERS = {
    # `strict` as for ddp_kit itself: what `make check` has read of torch is not read again.
    "mypy": ["--config-file=mypy.ini", "--cache-dir", str(ROOT / ".mypy_cache"), "--python-executable", sys.executable],
    "pyright": ["--pythonpath", sys.executable],
    "basedpyright": ["--level", "error", "--pythonpath", sys.executable],
}
MYPY = """\
[mypy]
strict = true
untyped_calls_exclude = torch.distributions
[mypy-cloudpickle.*,datasets.*,mlflow.*,pynvml.*,sklearn.*,tensorboard.*,threadpoolctl.*,torchao.*,trackio.*,wandb.*]
ignore_missing_imports = true
[mypy-accelerate.*,peft.*,transformers.*]
follow_imports = skip
ignore_missing_imports = true
[mypy-torch.distributed.*]
implicit_reexport = true
"""
# Before a part of a script, which the documents show alone.
CONTEXT = """\
from typing import Any

import torch
from torch.utils.data import WeightedRandomSampler

from ddp_kit import Trainer, TrainerConfig

model: Any = None
loss_fn: Any = None
weights: Any = None
labels: Any = None
MyBatchSampler: Any = None
"""
SETTINGS = """\
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_kit import DataConfig, ParallelConfig, Trainer, TrainerConfig

config = TrainerConfig(parallel="fsdp", checkpoint={"dir": "run"}, data={"num_workers": 4}, max_grad_norm=1)
folder: Path | None = config.checkpoint.dir
workers: int | str = config.data.num_workers
config = TrainerConfig(data=DataConfig(num_workers="auto"), parallel=ParallelConfig(tensor=2))
config = TrainerConfig.from_command_line(epochs=3, checkpoint={"dir": Path("run")})
values: dict[str, Any] = {"epochs": 3}
config = TrainerConfig(**values)


class Own(TrainerConfig):
    rate: float = 0.1


class Net(nn.Module):
    def cost(self, batch: Tensor) -> Tensor:
        return batch.sum()


def loss_fn(model: Net, batch: Tensor) -> Tensor:
    return model.cost(batch)


own = Own(rate=0.3, epochs=3)
trainer = Trainer(Net(), lambda parameters: torch.optim.SGD(parameters, lr=own.rate), loss_fn, own)
trainer.fit([torch.zeros(1)])

TrainerConfig(data={"num_worker": 4})  # mistake
Trainer(Net(), max_epochs=3)  # mistake
trainer.fit([torch.zeros(1)], epochs=3)  # mistake
TrainerConfig(data={"num_workers": "four"})  # mistake
TrainerConfig(parallel={"shard": "2"})  # mistake
TrainerConfig(parallel="fdsp")  # mistake
TrainerConfig(precision="bf15")  # mistake
TrainerConfig(epoch=3)  # mistake
TrainerConfig.from_command_line(epoch=3)  # mistake
DataConfig(num_worker=3)  # mistake
print(config.checkpoint.dirs)  # mistake
number: int = config.checkpoint.dir  # mistake
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every example, and the settings above."""
    folder = tmp_path_factory.mktemp("examples")
    for number, document in enumerate([ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]):
        for place, (language, block) in enumerate(BLOCK.findall(document.read_text())):
            if language == "python":
                (folder / f"{block.split()[1].removesuffix('.py')}.py").write_text(block)
            elif "TrainerConfig" in block and document.name != "recipes.md":  # which shows parts of the recipes
                (folder / f"part_{number}_{place}.py").write_text(CONTEXT + block)
    for example in [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples" / "recipes").glob("*.py")]:
        if "ddp_kit" in example.read_text():
            shutil.copy(example, folder)
    (folder / "settings.py").write_text(SETTINGS)
    (folder / "mypy.ini").write_text(MYPY)
    (folder / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"]}}')
    return folder


@pytest.mark.slow
@pytest.mark.timeout(seconds(900))  # they read all of torch
@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checker_accepts_the_examples_and_finds_each_mistake(checker: str, folder: Path) -> None:
    command = shutil.which(checker, path=f"{BIN}:{os.environ['PATH']}")
    if command is None:
        pytest.skip(f"{checker} is not installed: `pip install -e .[dev]`")
    assert len(list(folder.glob("*.py"))) > 20
    # Without this variable pyright asks a server on the internet whether there is a newer one.
    environment = {"MYPYPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = run(command, *CHECKERS[checker], ".", cwd=folder, env=environment, timeout=840)
    found = re.findall(r"(\w+\.py):(\d+)(?::\d+)?(?: -|:) error", done.stdout)
    lines = SETTINGS.splitlines()
    mistakes = {("settings.py", str(number)) for number, line in enumerate(lines, 1) if line.endswith("# mistake")}
    assert set(found) == mistakes, done.stdout + done.stderr
