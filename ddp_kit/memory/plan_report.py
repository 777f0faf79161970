"""What `ddpkit plan` prints: the memory plan as a table, whether it fits, and if not, what to change."""

from dataclasses import replace

from ddp_kit.config.settings import AUTO, MemoryConfig, ParallelConfig, TrainerConfig
from ddp_kit.env import PlanRequest
from ddp_kit.memory.choose import advice, candidates, choose
from ddp_kit.memory.estimate import MemoryPlan, ModelMemory, plan_memory
from ddp_kit.texts import distinct_sizes, size_text


class PlanPrinted(SystemExit):  # a normal exit of the script, not an error
    """Raised to end the script after `ddpkit plan` has printed the plan."""


def described(model: ModelMemory, config: TrainerConfig, asked: PlanRequest, micro_batch: int) -> str:
    """The full output of `ddpkit plan`."""
    config, plan, lines = planned(model, config, asked.ranks, asked.memory, asked.per_node)
    values = sum(row.numel for row in model.rows)
    title = (
        f"{values:,} parameters, parallel={config.parallel.strategy!r}, "
        f"precision={config.precision!r}, micro-batch {micro_batch}"
    )
    if config.micro_batch_size == "auto":
        title += ' (micro_batch_size="auto": planned for one sample)'
    return "\n".join([*lines, report(model, plan, asked.ranks, asked.memory, asked.per_node, title)])


def planned(
    model: ModelMemory, config: TrainerConfig, ranks: int, device_memory: int | None, per_node: int
) -> tuple[TrainerConfig, MemoryPlan, list[str]]:
    """Calculate the memory plan of a configuration. `per_node`: the number of ranks on each node.

    Returns also the configuration, in which ``parallel="auto"`` is replaced by the candidate that it chooses for
    `device_memory`, or by the last one if none fits; and lines that describe this choice.
    """
    chosen = config
    lines = []
    if config.parallel.strategy == AUTO and device_memory is not None:
        # Count the optimizer state as in training, where "auto" chooses before the optimizer has any state.
        rows = (replace(row, state_per_value=2 * row.itemsize * row.trained) for row in model.rows)
        whole = ModelMemory(tuple(rows), model.buffers)
        fits, refused = choose(candidates(whole, config.parallel, config.memory, ranks, device_memory, per_node))
        last = fits or refused[-1]
        lines = [f"parallel='auto': {fits or 'no placement fits'}"]
        lines += [f"  does not fit: {candidate}" for candidate in refused]
        chosen = config.model_copy(update={"parallel": last.parallel, "memory": last.memory})
    plan = plan_memory(
        model,
        chosen.parallel,
        ranks,
        device_memory=device_memory,
        # The measured pass already recomputes as configured, so only a change by "auto" has to be estimated.
        checkpointing=float(chosen.memory.activation_checkpointing != config.memory.activation_checkpointing),
        offload_activations=chosen.memory.offload_activations,
        offload=chosen.memory.offload,
    )
    if config.parallel.strategy == "device_map":
        problem = "device_map: the plan is for the whole model on one device"
        plan = replace(plan, problems=(*plan.problems, problem))
    return chosen, plan, lines


def report(model: ModelMemory, plan: MemoryPlan, ranks: int, device_memory: int, per_node: int, title: str) -> str:
    """Describe a plan as text: a table, whether the plan fits in memory, and if not, what to change."""
    devices = "on 1 device:" if ranks == 1 else f"on each of {ranks} devices:"
    lines = [f"{title}; {devices}", str(plan)]
    lines += [f"  not known: {problem}" for problem in plan.problems]
    needs, has = distinct_sizes(plan.total, device_memory)
    known = ""
    if plan.problems:
        needs = f"at least {needs}"
        known = ", as far as is known"
    if plan.total <= device_memory:
        lines.append(f"fits: {needs} of {has}{known}")
        return "\n".join(lines)
    lines.append(f"does not fit: needs {needs}, but a device has {has}")
    if found := advice(model, plan, ranks, device_memory, per_node):
        lines.append("settings that fit, cheapest first:")
        for candidate in found:
            line = f"  {candidate.text}: {size_text(candidate.plan.total)}"
            if candidate.note:
                line += f" ({candidate.note})"
            lines.append(line)
    else:
        tried = candidates(model, ParallelConfig(), MemoryConfig(), ranks, device_memory, per_node)
        smallest = min(tried, key=lambda candidate: candidate.plan.total)
        least_needed = f"{size_text(smallest.plan.total)} with {smallest.text}"
        lines.append(f"no setting of ddpkit makes it fit; the smallest total is {least_needed}")
        lines.append("use more devices, a smaller micro_batch_size, or a smaller model")
    return "\n".join(lines)
