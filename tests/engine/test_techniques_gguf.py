"""gguf chooses the number format of the file that llama.cpp reads."""

from typing import get_args

import pytest

from optigpu.backends.llama_cpp.file_types import FileType, file_type_of
from optigpu.techniques.base import GgufType
from optigpu.techniques.quantization.gguf import Gguf
from tests.engine.tiny_models import assert_needs_hook


@pytest.mark.parametrize("kind", get_args(GgufType))
def test_the_file_has_the_type_that_is_asked_for(kind: GgufType) -> None:
    technique = Gguf(type=kind)

    def claim() -> None:
        assert file_type_of((technique,)) is FileType(kind)

    assert_needs_hook(technique, "load", claim)


def test_without_it_weights_are_float32() -> None:
    assert file_type_of(()) is FileType.F32
