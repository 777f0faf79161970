"""`python -m ddp_kit.trainer.plan_script script.py args`: runs a training script for `ddpkit plan`.

Each parameter is replaced by a fake tensor when its module registers it, so at most one real parameter is in memory at
a time; other tensors are real, and on the CPU, even if the script puts them on a GPU. When the script starts to train,
the Trainer finds the request for a plan in an environment variable, prints the plan, and ends the script.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ddp_kit.errors import DdpKitError, UsageError
from ddp_kit.exit_codes import ExitCode
from ddp_kit.memory.fake import FakeTensors, TensorsOnCpu, is_fake
from ddp_kit.memory.plan_report import PlanPrinted
from ddp_kit.texts import first_line
from ddp_kit.uncaught import show_without_traceback, user_code_location


class _WithoutMemory:
    """A parameter registration hook that replaces parameters with fake tensors, which take no memory."""

    def __init__(self) -> None:
        self._fakes = FakeTensors()
        self._made = WeakIdKeyDictionary()  # so that a parameter shared by two modules remains shared

    def __call__(self, _module: nn.Module, _name: str, parameter: Any) -> nn.Parameter | None:
        if parameter is None or is_fake(parameter) or is_lazy(parameter):
            return None
        if parameter not in self._made:
            self._made[parameter] = self._fakes.like(parameter)
        made: nn.Parameter = self._made[parameter]
        return made


def main(words: list[str]) -> None:
    """Run a script as the main program, with fake parameters. `words`: the script and its arguments."""
    script = words[0]
    sys.argv = words
    sys.path.insert(0, str(Path(script).resolve().parent))
    show_without_traceback()
    # torch annotates the hook as returning None, but replaces the parameter with what the hook returns.
    hook = register_module_parameter_registration_hook(_WithoutMemory())  # type: ignore[arg-type]
    try:
        # Without gradients until the Trainer measures, because `Module.to` cannot swap a fake parameter that an
        # autograd graph uses: `torch.nn.utils.weight_norm` computes the weight when it is applied, and keeps its graph.
        with TensorsOnCpu(), torch.no_grad():
            runpy.run_path(script, run_name="__main__")
    except PlanPrinted:
        return
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    except DdpKitError:
        raise
    except Exception as error:
        raise UsageError(
            f"{script} fails before it trains{user_code_location(error.__traceback__)}: {first_line(error)}",
            "under `ddpkit plan`, the parameters of a model have no values until the script trains, so it cannot read "
            f"them; if that is not the cause, `python {script}` shows the whole traceback",
        ) from error
    finally:
        hook.remove()
    raise UsageError(
        f"{script} ended without training: there is nothing to plan",
        "the plan is made when the script calls trainer.fit(...) or trainer.steps(...)",
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        sys.stderr.write(f"ddpkit: error: {error}\n")
        sys.exit(ExitCode.USAGE)
