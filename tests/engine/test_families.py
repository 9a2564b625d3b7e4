"""The table of families says what is in transformers."""

from importlib import import_module

import pytest
from transformers import AutoConfig

from optigpu.models.families import FAMILIES, ModelFamily
from tests.contract.test_families import classes


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_what_the_table_says_is_in_transformers(family: ModelFamily) -> None:
    """The classes of the family's file, and the names of its configuration."""
    source = import_module(f"transformers.models.{family.name}.modeling_{family.name}")
    newest = [family.decoder, family.attention, family.mlp]
    missing = {name for name in classes(tuple(newest)) if not hasattr(source, name)} - {
        "LayerNorm",
        "RMSNorm",
    }
    assert not missing
    config = AutoConfig.for_model(family.name)
    keys = family.keys
    if keys.inner_size:
        assert hasattr(config, keys.inner_size)
        assert hasattr(config, keys.activation)
    if family.gguf:
        assert hasattr(config, family.gguf.epsilon)
