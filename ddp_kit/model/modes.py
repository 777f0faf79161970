"""The mode of a model, training or evaluation, and its weights with sparse gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Context manager that sets a model to training or evaluation mode, and restores the mode of each module on exit.

    Calls the model's own `train` and `eval`, as a loop by hand does: a model may override them, for example to merge
    adapters into its weights, or to keep BatchNorm frozen. A module whose mode differs from the model's was set by
    hand, and gets the same call again.
    """
    before = model.training
    modes = {module: module.training for module in model.modules()}
    _set_mode(model, training=training)
    try:
        yield
    finally:
        _set_mode(model, training=before)
        for module, mode in modes.items():  # from the outside in: a call also sets the modules inside
            if module.training != mode:
                _set_mode(module, training=mode)
        for module, mode in modes.items():
            module.training = mode


def _set_mode(module: nn.Module, *, training: bool) -> None:
    """Call the module's own `train()` or `eval()`."""
    if training:
        module.train()
    else:
        module.eval()


def sparse_weights(model: nn.Module) -> set[Tensor]:
    """The weights of `nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)`, whose gradients are sparse."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    return {module.weight for module in model.modules() if isinstance(module, embeddings) and module.sparse}
