"""What a backend whose engine has an environment of its own answers there, beside what transformers has."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from optigpu.documents.facts import RunFacts
from optigpu.engines.environments import environment_of, variables_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, NEW, PREFILL = np.random.default_rng(5).integers(2048, size=(2, 24)), 40, 8
"""Random tokens of bundled:tiny."""
SCORED = np.random.default_rng(6).integers(2048, size=(2, 32))


@dataclass(frozen=True)
class Answers:
    """Greedy tokens after PROMPTS, twice, with their gaps; logits of SCORED after each token from PREFILL on."""

    tokens: list[list[int]]
    again: list[list[int]]
    gaps_s: list[float]
    facts: RunFacts
    logits: NDArray[np.float32]
    from_nothing: NDArray[np.float32]
    last: NDArray[np.float32]


def answers_of(backend: str, model: str, folder: Path) -> Answers:
    """Starts a process with the interpreter of the backend's environment."""
    environment = environment_of(backend)
    assert environment is not None
    asked = {
        "backend": backend,
        "model": model,
        "prompts": PROMPTS.tolist(),
        "new_tokens": NEW,
        "scored": SCORED.tolist(),
        "prefill": PREFILL,
        "folder": str(folder),
    }
    done = subprocess.run(
        [str(environment.python), str(ROOT / "tests" / "engine" / "children" / "engine_answers.py")],
        input=json.dumps(asked),
        env=os.environ | variables_of(backend) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    with np.load(folder / "logits.npz") as kept:
        logits = {name: kept[name] for name in ("logits", "from_nothing", "last")}
    return Answers(**said | {"facts": RunFacts.model_validate(said["facts"])}, **logits)


def expected_tokens(model: str) -> list[list[int]]:
    """What transformers decodes greedily."""
    import torch

    found = _loaded(model).generate(torch.from_numpy(PROMPTS), max_new_tokens=NEW, do_sample=False)  # type: ignore[operator]
    tokens: list[list[int]] = found[:, PROMPTS.shape[1] :].tolist()
    return tokens


def expected_logits(model: str) -> NDArray[np.float32]:
    """What transformers has after each token of SCORED."""
    import torch

    with torch.no_grad():
        found: NDArray[np.float32] = _loaded(model)(input_ids=torch.from_numpy(SCORED)).logits.numpy()
    return found


def _loaded(model: str) -> "PreTrainedModel":
    from optigpu.models.loading.load import load_model
    from optigpu.models.reference import parse_reference

    return load_model(parse_reference(model), device="cpu", dtype="float32")
