"""The Trainer: the training loop and the modules that it uses.

trainer.py          the loop; setup.py checks the arguments, build.py makes the parts, stages.py and optimizers.py
step.py             one optimizer step; step_loss.py: its loss; run_parameters.py: which parameters it changes
updates.py          several updates per step; pipeline_step.py: the passes of a pipeline
out_of_memory.py    a step that runs out of memory; rate_finder.py: the search for a learning rate
agreement.py        what ranks compare before a call; position.py: where the run is
learning_rates.py   scaling, warm-up, schedules; scheduler_state.py: a schedule in a checkpoint
logging.py          log points, rows and advice; timing.py, model_flops.py, profile.py, progress.py, run_record.py
evaluation.py       evaluations; prediction.py; loss_modules.py: loss functions and metrics that are modules
non_finite.py       the cause of a loss that is not finite; replay.py: a rank that computes wrong numbers;
                    both repeat a pass (repeated_pass.py)
preemption.py       signals and time limits; snapshots.py: states to return to; garbage.py
planning.py         `Trainer.plan`; plan_script.py: the script under `ddpkit plan`
context.py          what most of these use, and the values that user code logs
"""

from ddp_kit.trainer.learning_rates import scheduler_steps
from ddp_kit.trainer.trainer import Trainer
from ddp_kit.trainer.updates import Update

__all__ = ["Trainer", "Update", "scheduler_steps"]
