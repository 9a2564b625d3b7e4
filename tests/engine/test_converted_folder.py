"""The folder of converted models: what is said where it cannot be written."""

from pathlib import Path

import pytest

from optigpu.backends.folders import folder_of
from optigpu.vocabulary import OptiGPUError
from tests.engine.caches import CONVERTED, cache_with
from tests.engine.converted_engines import ordered


def test_a_folder_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_with(tmp_path)
    (cache / CONVERTED).write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    with pytest.raises(OptiGPUError) as raised:
        folder_of("vllm", ordered(tmp_path, model="preset:tiny-llama-test"), lambda _: None)
    assert str(raised.value) == (
        f"Converted models cannot be kept in {cache / CONVERTED / 'vllm'} (Not a directory); give the right to write "
        "there, name another folder in XDG_CACHE_HOME, or set OPTIGPU_CONVERTED_CACHE_GB=0 to keep none."
    )
