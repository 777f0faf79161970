"""The watch in a worker of a rehearsal: records each optimizer step, sends the disturbance, and ends the run.

It draws no random numbers, keeps no tensors, and starts no collectives, so the script computes what it always computes.
It replaces functions of torch and safetensors, which have no hooks: in a rehearsal only, never in a training run.
"""

import gc
import os
import pickle
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from numbers import Number
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import safetensors.numpy
import safetensors.torch
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ddp_kit.env import from_env, rehearsal_folder, restarts
from ddp_kit.rehearsal.guard import FileGuard, resolved
from ddp_kit.rehearsal.lines import (
    DISTURBED_FILE,
    ELSEWHERE_FILE,
    LAUNCHER_FILE,
    Instructions,
    Line,
    attempt_file,
    write_line,
)

_WAIT_SECONDS = 30.0
"""Longest wait for the other ranks at the end."""
_SIGTERM_SECONDS = 0.3
"""Time for SIGTERM to arrive at the ranks before the next step."""
_QUIET_SECONDS = 0.5
"""Time without a change after which a save is complete."""
_MOST_FILES = 10_000
_DEEPEST = 8
_LOGS = (".jsonl", ".json", ".log", ".txt", ".csv", ".yaml", ".yml", ".lock", ".html")
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


_Container = dict[str, Tensor] | list[Tensor]
_RECORDED: tuple[type, ...] = (nn.Module, torch.amp.GradScaler, dict, list)
"""Classes of the objects that are searched for values of the run."""


def install() -> None:
    """Watch this process from now on."""
    folder = rehearsal_folder()
    assert folder is not None
    watch = Watch(folder, Instructions.read(folder))

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch.before_step(optimizer, with_closure=any(map(callable, (*args[1:], *kwargs.values()))))

    def after_step(optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        watch.after_step(optimizer)

    # torch.compile would otherwise compile the hooks as a part of a step.
    register_optimizer_step_pre_hook(torch.compiler.disable(before_step))  # type: ignore[no-untyped-call]
    register_optimizer_step_post_hook(torch.compiler.disable(after_step))  # type: ignore[no-untyped-call]
    register_module_buffer_registration_hook(lambda module, _name, _buffer: watch.modules.add(module))
    register_module_parameter_registration_hook(lambda module, _name, _parameter: watch.modules.add(module))

    open_loader = DataLoader.__iter__
    next_batch = _BaseDataLoaderIter.__next__
    backward = torch.autograd.backward
    grad = torch.autograd.grad
    save = torch.save

    def watched_loader(loader: DataLoader[Any]) -> Any:
        watch.note_epoch(loader)
        return open_loader(loader)

    def watched_batch(batches: _BaseDataLoaderIter) -> Any:
        batch = next_batch(batches)
        watch.note_batch(batch)
        return batch

    def watched_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        with watch.backward_pass(tensors):
            backward(tensors, *args, **kwargs)

    def watched_grad(*args: Any, **kwargs: Any) -> Any:
        watch.has_trained = True
        return grad(*args, **kwargs)

    def watched_save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        watch.check_own(f)
        save(obj, f, *args, **kwargs)

    DataLoader.__iter__ = watched_loader  # type: ignore[method-assign]
    _BaseDataLoaderIter.__next__ = watched_batch  # type: ignore[method-assign, assignment]
    torch.autograd.backward = watched_backward
    torch.autograd.grad = watched_grad
    torch.save = watched_save
    _watch_native_code(watch.check_own)
    watch.guard.install()


def _watch_native_code(check: Callable[[Any], None]) -> None:
    """Call `check` with the path before native code of torch or safetensors writes a file."""

    class WatchedWriter(torch._C.PyTorchFileWriter):  # of torch.save, torch.export.save and torch.package
        def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
            check(file)
            super().__init__(file, *args, **kwargs)

    torch._C.PyTorchFileWriter = WatchedWriter  # type: ignore[assignment, misc]
    for owner, name in (
        (safetensors, "serialize_file"),
        (safetensors.torch, "serialize_file"),
        (safetensors.numpy, "serialize_file"),
        (torch.jit, "save"),
        (torch.jit.ScriptModule, "save"),
        (torch.jit._script.RecursiveScriptModule, "save"),
        (torch._C.ScriptFunction, "save"),
        (torch._C._autograd._ProfilerResult, "save"),
    ):
        _watch_function(owner, name, check)


def _watch_function(owner: Any, name: str, check: Callable[[Any], None]) -> None:
    """Replace a function whose second argument is the path of a file."""
    function = getattr(owner, name)

    def watched(first: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        check(path)
        return function(first, path, *args, **kwargs)

    setattr(owner, name, watched)


class Watch:
    """The record of one rank in one attempt."""

    def __init__(self, folder: Path, instructions: Instructions) -> None:
        self._folder = folder
        self._instructions = instructions
        self.guard = FileGuard([folder, *map(Path, instructions.folders)], instructions.began, self._end_before_change)
        self._worker = from_env()
        self._restart = restarts()
        name = attempt_file(instructions.launch, self._restart, self._worker.rank)
        self._file = (folder / name).open("w", buffering=1)
        self._last_step = instructions.steps_after_restart if self._restart else instructions.steps
        self.modules: WeakSet[nn.Module] = WeakSet()
        self._kinds: dict[type, type] = {}
        self._optimizers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._stepping: Optimizer | None = None
        self._line = Line(step=0)
        self._step = 0
        self._in_backward = False
        self.has_trained = False
        self._losses: list[float] = []
        self._batches: list[tuple[int, int, str]] = []
        self._epochs: list[tuple[int, bool, int]] = []
        self._files: dict[str, int] = {}
        self._written()  # files that exist already are not written by this attempt

    # --- What happens between two steps

    def note_epoch(self, loader: "DataLoader[Any]") -> None:
        """Record that an iteration over a DataLoader begins."""
        if not torch.is_grad_enabled():
            return
        for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            if isinstance(sampler, DistributedSampler):
                self._epochs.append((len(self._batches), bool(sampler.shuffle), int(sampler.epoch)))
                return

    def note_batch(self, batch: object) -> None:
        """Record a batch that a DataLoader gave for training."""
        if torch.is_grad_enabled():
            self._batches.append(checksum_of_batch(batch))

    @contextmanager
    def backward_pass(self, tensors: Any) -> Iterator[None]:
        """Record a backward pass. Those inside another one, as with activation checkpointing, are not counted."""
        if self._in_backward:
            yield
            return
        self._in_backward = self.has_trained = True
        with torch.no_grad():
            parts = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            self._losses.append(sum(float(_local(part).sum()) for part in parts))
        try:
            yield
        finally:
            self._in_backward = False

    def check_own(self, target: Any) -> None:
        """End the run if the script is about to save a checkpoint in a place that is not of this run alone.

        The next run would resume from there, and a file of the user's may be overwritten.
        """
        path = resolved(target if isinstance(target, str | os.PathLike) else getattr(target, "name", None))
        if path is not None and not self.guard.is_own(path) and (self._step or self.guard.protects(path.resolve())):
            self._end_before_change(path)

    def _end_before_change(self, path: Path) -> None:
        (self._folder / ELSEWHERE_FILE).write_text(str(path))
        self._end()

    # --- A step

    def before_step(self, optimizer: Optimizer, *, with_closure: bool = False) -> None:
        """Record the state of this rank just before a step. `with_closure`: the step makes backward passes itself."""
        if not self.has_trained and not with_closure:  # a trial of the optimizer, not training
            return
        if self._stepping not in (None, optimizer):  # a wrapper such as ZeRO calls it: its state is the wrapper's
            state, count = _state_of(optimizer)
            self._line = replace(self._line, state={**self._line.state, **state}, count=count)
            return
        self._stepping = optimizer
        number = self._optimizers.setdefault(optimizer, len(self._optimizers))
        self._step += number == 0
        with torch.no_grad():
            self._line = self._state(optimizer, number)

    def after_step(self, optimizer: Optimizer) -> None:
        """Write the record of the step. Send the disturbance, or end the run, if it is due."""
        if self._stepping is not optimizer:
            return
        self._stepping = None
        line = replace(self._line, losses=tuple(self._losses), batches=tuple(self._batches), epochs=tuple(self._epochs))
        self._file.write(write_line(line))
        self._losses.clear()
        self._batches.clear()
        self._epochs.clear()
        if self._optimizers[optimizer] != 0:
            return
        instructions = self._instructions
        is_due = instructions.signal and not self._restart and self._step == instructions.step
        if is_due and self._worker.rank == instructions.rank:
            files = self._complete_files()
            (self._folder / DISTURBED_FILE).write_text("\n".join(files[:10]))
            if instructions.signal == signal.SIGKILL:
                os.kill(os.getpid(), signal.SIGKILL)
            os.kill(int((self._folder / LAUNCHER_FILE).read_text()), instructions.signal)
            time.sleep(_SIGTERM_SECONDS)
        if self._step == self._last_step:
            self._wait_for_ranks()
            self._end()

    def _complete_files(self) -> list[str]:
        """The files of this run, once nothing writes there: a save in the background is complete."""
        deadline = time.monotonic() + _WAIT_SECONDS
        before = None
        files = dict(self._files_of_run())
        while before != files and time.monotonic() < deadline:
            time.sleep(_QUIET_SECONDS)
            before = files
            files = dict(self._files_of_run())
        return [str(path) for path in files]

    def _wait_for_ranks(self) -> None:
        """Wait until all ranks have done their last step: none may miss another one in a collective."""
        name = f"{attempt_file(self._instructions.launch, self._restart, self._worker.rank)}.done"
        (self._folder / name).touch()
        deadline = time.monotonic() + _WAIT_SECONDS
        pattern = attempt_file(self._instructions.launch, self._restart, 0).replace(".0.jsonl", ".*.done")
        while len(list(self._folder.glob(pattern))) < self._worker.world_size and time.monotonic() < deadline:
            time.sleep(0.01)

    def _end(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(0)

    # --- The state of this rank

    def _state(self, optimizer: Optimizer, number: int) -> Line:
        roots, containers, scalers = self._objects()
        parameters = _parameters(optimizer)
        optimized = {id(parameter) for each in self._optimizers for parameter in _parameters(each)}
        in_modules = {tensor.data_ptr() for root in roots for tensor in (*root.parameters(), *root.buffers())}
        names: dict[int, str] = {}
        buffers = defaultdict[str, list[str]](list)
        copies = defaultdict[str, list[str]](list)
        for root in roots:
            named = {_plain(name): parameter for name, parameter in root.named_parameters()}
            named_buffers = {_plain(name): buffer for name, buffer in root.named_buffers()}
            if optimized.isdisjoint(map(id, named.values())):
                for name, tensor in (named | named_buffers).items():
                    copies[f"{type(root).__name__}.{name}"].append(checksum(tensor))
                continue
            names.update((id(parameter), name) for name, parameter in named.items())
            for name, buffer in named_buffers.items():
                buffers[name].append(checksum(buffer))
            for container in containers:
                kind = "list" if isinstance(container, list) else "dict"
                for name, tensor in _copies_in(container, named).items():
                    if tensor.data_ptr() not in in_modules:
                        copies[f"{kind}.{name}"].append(checksum(tensor))
        state, count = _state_of(optimizer)
        locals_of_parameters = [_local(parameter) for parameter in parameters]
        return Line(
            step=self._step,
            optimizer=number,
            parameters=tuple(names.get(id(parameter), "") for parameter in parameters) if self._step == 1 else (),
            weights=tuple(map(checksum, parameters)),
            numel=sum(part.numel() for part in locals_of_parameters),
            norm=sum(float(part.abs().double().pow(2).sum()) for part in locals_of_parameters) ** 0.5,
            state=state,
            count=count,
            settings=_settings(optimizer),
            scalers=tuple(scalers),
            random=_random_states(),
            buffers={name: tuple(sorted(values)) for name, values in buffers.items()},
            copies={name: tuple(sorted(values)) for name, values in copies.items()},
            files=tuple(self._written()),
        )

    def _objects(self) -> tuple[list[nn.Module], list[_Container], list[dict[str, float]]]:
        """The modules that are part of no other module, dicts and lists of tensors, and states of gradient scalers.

        Modules that were copied or unpickled are known to the garbage collector only.
        """
        modules: dict[int, nn.Module] = {id(module): module for module in self.modules}
        containers: list[_Container] = []
        scalers = []
        for each in gc.get_objects():
            kind = type(each)
            if kind not in self._kinds:
                self._kinds[kind] = next((base for base in _RECORDED if issubclass(kind, base)), object)
            base = self._kinds[kind]
            if base is nn.Module:
                modules[id(each)] = each
                self.modules.add(each)  # `gc.freeze` in the script hides it from now on
            elif base is torch.amp.GradScaler and each.is_enabled():
                scalers.append({name: float(value) for name, value in each.state_dict().items()})
            elif base in (dict, list) and each and _has_only_tensors(each):
                containers.append(each)
        own = {id(tensors) for module in modules.values() for tensors in (module._parameters, module._buffers)}
        children = {
            id(child) for module in modules.values() for child in (module._modules or {}).values() if child is not None
        }
        roots = [module for module in modules.values() if id(module) not in children and hasattr(module, "_parameters")]
        return roots, [container for container in containers if id(container) not in own], scalers

    def _files_of_run(self) -> Iterator[tuple[Path, int]]:
        """The files of this run with their modification times, without logs and settings."""
        for folder in map(Path, self._instructions.folders):
            with suppress(OSError):
                paths = [folder] if folder.is_file() else folder.rglob("*")
                for number, path in enumerate(paths):
                    is_log = path.name.endswith(_LOGS) or "tfevents" in path.name
                    if number < _MOST_FILES and not is_log and path.is_file() and path.stat().st_size:
                        yield path, path.stat().st_mtime_ns

    def _written(self) -> list[str]:
        """Files of this run that were written since the last call; on rank 0 only."""
        if self._worker.rank:
            return []
        files = {str(path): changed for path, changed in self._files_of_run()}
        written = [path for path, changed in files.items() if self._files.get(path) != changed]
        self._files = files
        return written


# --- Checksums --------------------------------------------------------------------------------------------------------


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without autograd."""
    to_local: Callable[[], Tensor] = getattr(tensor, "to_local", lambda: tensor)
    return to_local().detach()


def _dense(tensor: Tensor) -> Tensor:
    """The values of a tensor on this rank, in the memory of the host and in the usual layout."""
    local = _local(tensor)
    if local.is_nested:
        local = local.to_padded_tensor(0.0)
    if local.layout is not torch.strided:
        local = local.to_dense()
    return local.resolve_conj().resolve_neg().cpu().contiguous()


def _bytes(dense: Tensor) -> memoryview:
    flat = dense.reshape(-1)
    content: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(content)


def checksum(tensor: Tensor) -> str:
    """Checksum of the values of a tensor on this rank."""
    if tensor.is_meta or is_lazy(tensor):
        return ""
    return str(xxhash.xxh3_64_hexdigest(_bytes(_dense(tensor))))


def checksum_of_batch(batch: object) -> tuple[int, int, str]:
    """Number of samples of a batch, sum of their hashes modulo 2**64, and checksum of the whole batch."""
    leaves = [_dense(leaf) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf for leaf in _leaves(batch)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    whole = _joined(leaves)
    size = min((len(tensor) for tensor in tensors), default=1)
    rows = [tensor for tensor in tensors if len(tensor) == size and not tensor.is_meta]
    if not rows:
        return size, int(whole, 16), whole
    total = 0
    for index in range(size):
        sample = xxhash.xxh3_64()
        for tensor in rows:
            sample.update(_bytes(tensor[index]))
        total += sample.intdigest()
    return size, total % 2**64, whole


def _leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """The tensors, numbers and texts in a batch. Other objects count with their fields, if they have any.

    What is more than eight levels deep is omitted: objects may refer to each other.
    """
    if isinstance(value, Tensor | str | bytes | Number | None):
        yield value
    elif hasattr(value, "__array__") and not isinstance(value, type):
        array = value.__array__()
        if array.dtype.kind in "biufc":
            yield torch.as_tensor(array.astype(array.dtype.newbyteorder("="), order="C"))
        else:
            yield repr(value)
    elif depth < _DEEPEST and not isinstance(value, type | ModuleType):
        parts: Iterable[Any] = getattr(value, "__dict__", {}).values()
        if isinstance(value, Mapping):
            parts = (value[name] for name in value)
        elif isinstance(value, list | tuple):
            parts = value
        elif isinstance(value, set | frozenset):
            parts = sorted(value, key=repr)  # the order of texts in a set differs between processes
        for part in parts:
            yield from _leaves(part, depth + 1)


def _joined(leaves: Iterable[Any]) -> str:
    """Checksum of tensors, numbers and texts."""
    texts = (checksum(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    return str(xxhash.xxh3_64_hexdigest("\n".join(texts).encode()))


def _random_states() -> dict[str, str]:
    """Checksums of the states of Python's, NumPy's and torch's global random generators."""
    states: dict[str, str] = {
        "Python": xxhash.xxh3_64_hexdigest(repr(random.getstate()).encode()),
        "torch": checksum(torch.get_rng_state()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        states["NumPy"] = xxhash.xxh3_64_hexdigest(pickle.dumps(numpy.random.get_state()))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["CUDA"] = checksum(torch.cuda.get_rng_state())
    return states


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state_of(optimizer: Optimizer) -> tuple[dict[str, str], float | None]:
    """Checksum of an optimizer's state by name, over all parameters; the highest step count, or None."""
    states = defaultdict[str, list[Any]](list)
    count = None
    for parameter in _parameters(optimizer):
        # In ZeRO, the state of another rank's parameter is None once a checkpoint was loaded.
        for name, value in sorted((optimizer.state.get(parameter) or {}).items(), key=lambda item: str(item[0])):
            states[str(name)] += _leaves(value)
            if name == "step":
                count = max(count or 0.0, float(value))
    return {name: _joined(values) for name, values in states.items()}, count


def _settings(optimizer: Optimizer) -> dict[str, tuple[float, ...]]:
    """The numbers of the parameter groups, such as `lr`, by name."""
    settings = defaultdict[str, list[float]](list)
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name == "params":
                continue
            numbers = value if isinstance(value, tuple | list) else [value]
            for number in numbers:
                if isinstance(number, Number) or (isinstance(number, Tensor) and number.numel() == 1):
                    settings[name].append(float(number))  # type: ignore[arg-type]
    return {name: tuple(values) for name, values in settings.items()}


def _plain(name: str) -> str:
    """The name of a tensor without those of wrappers such as DDP."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _has_only_tensors(container: dict[Any, Any] | list[Any]) -> bool:
    """Whether a dict or a list contains tensors only; the keys of a dict must be names."""
    with suppress(RuntimeError):  # another thread changes the dict
        if isinstance(container, dict):
            return isinstance(next(iter(container)), str) and all(isinstance(v, Tensor) for v in container.values())
        return all(isinstance(value, Tensor) for value in container)
    return False


def _copies_in(container: _Container, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a dict with the names of a model's parameters, or of a list with their shapes, by name."""
    if isinstance(container, dict):
        by_name = {_plain(name): tensor for name, tensor in container.items()}
        if parameters.keys() <= by_name.keys():
            return {name: by_name[name] for name in parameters}
        return {}
    for named in (parameters, {name: p for name, p in parameters.items() if p.requires_grad}):
        if 1 < len(named) == len(container) and [t.shape for t in container] == [p.shape for p in named.values()]:
            return dict(zip(named, container, strict=True))
    return {}
