"""A stand-in for GPTQModel, for the process that the engine starts: it rounds to the nearest number.

Each quantization adds a line to the file that STAND_IN_LOG names. A model whose texts begin with token 3 makes it fail.
"""

import os
from pathlib import Path
from typing import Any

from tests.engine.packed_models import Layout, write_packed


class QuantizeConfig:
    """Takes what the library's own takes."""

    def __init__(self, **options: Any) -> None:
        self.options = options


class GPTQModel:
    """A model that is to be quantized."""

    def __init__(self, model: Any, method: str) -> None:
        self.model = model
        self.method = method

    @classmethod
    def load(cls, folder: str, config: QuantizeConfig, dtype: Any) -> "GPTQModel":
        """Reads a saved model."""
        from transformers import AutoModelForCausalLM

        print("\x1b[31mnoise\x1b[0m")
        return cls(
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), config.options.get("method", "gptq")
        )

    def quantize(self, rows: list[dict[str, list[int]]], batch_size: int) -> None:
        """Looks at the calibration text, and leaves a trace."""
        import torch

        for row in rows:
            self.model(
                input_ids=torch.tensor([row["input_ids"]]),
                attention_mask=torch.tensor([row["attention_mask"]]),
            )
        if self.model.config.bos_token_id == 3:
            raise ValueError("token 3 is no beginning.")
        with Path(os.environ["STAND_IN_LOG"]).open("a") as log:
            log.write(f"{self.method} {len(rows)} {batch_size}\n")

    def save(self, folder: str) -> None:
        """Packs every linear layer; for AWQ the norms change as well."""
        import torch

        if self.method == "awq":
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    if "norm" in name:
                        parameter.mul_(1.25)
        write_packed(Path(folder), self.model, Layout(self.method))
