"""Names of modules and parameters: how they are joined, found by patterns, and reported."""

import pytest
from torch import nn

from ddp_kit.errors import ConfigError
from ddp_kit.model.names import full_name, matching, parents, refuse, trained_embeddings


def test_full_name_in_the_model_itself_has_no_prefix() -> None:
    assert full_name("blocks.0", "weight") == "blocks.0.weight"
    assert full_name("", "weight") == "weight"


def test_parents_are_the_containing_modules_from_the_outside_in() -> None:
    assert [*parents("layers.0.head")] == ["layers", "layers.0"]
    assert [*parents("head")] == []


def test_pattern_without_a_match_names_the_setting_and_a_similar_name() -> None:
    model = nn.ModuleDict({"head": nn.Linear(2, 2), "trunk": nn.Linear(2, 2)})
    names = [name for name, _ in model.named_modules()]
    assert matching("*", names, model, "setting") == ["", "head", "trunk"]
    with pytest.raises(ConfigError, match="setting names 'haed', but the model ModuleDict has no such module\n.*head"):
        matching("haed", names, model, "setting")


def test_refused_names_are_listed_with_the_problem() -> None:
    refuse([], "not supported", "leave them out")
    with pytest.raises(ConfigError, match="not supported: a, b\n.*leave them out"):
        refuse(["a", "b"], "not supported", "leave them out")


def test_trained_embeddings_exclude_frozen_ones() -> None:
    frozen = nn.Embedding(2, 2).requires_grad_(False)
    model = nn.ModuleList([nn.Embedding(2, 2), nn.EmbeddingBag(2, 2), frozen, nn.Linear(2, 2)])
    assert trained_embeddings(model) == {"0": model[0], "1": model[1]}
    assert [*trained_embeddings(nn.Embedding(2, 2))] == ["the model"]
