"""python -m optigpu.child.training_memory: predicts what steps of training need, in a process that may load torch.

It reads one JSON object from stdin, {"model", "stacks", "workloads"}, and writes one line: for each stack the needs of
each workload, all of them train_step, or the reason why there are none.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from optigpu.backends.training import TrainingBatch
from optigpu.documents.shapes import ImageFacts
from optigpu.job.spec import Beside, resolve
from optigpu.techniques.base import Technique
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.requests.training import DrawnImages, DrawnTexts
from optigpu.workloads.train_step import TrainStep


def main() -> None:
    """Answers on the stdout that the process was started with; whatever libraries print goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    asked = json.loads(sys.stdin.read())
    workloads = [TrainStep.model_validate(each) for each in asked["workloads"]]
    stacks = [Beside.model_validate({"stack": stack}).stack for stack in asked["stacks"]]
    found = [_answer(asked["model"], stack, workloads) for stack in stacks]
    print(json.dumps(found), file=answers, flush=True)


def _answer(model: str, stack: tuple[Technique, ...], workloads: Sequence[TrainStep]) -> dict[str, Any]:
    from optigpu.backends.torch.training.predicted import predicted_need

    rule = workloads[0].update_rule
    assert rule is not None
    batches = tuple(partial(_batch, workload) for workload in workloads)
    try:
        needs = predicted_need(rule, model, resolve(stack, "train_step"), batches)
    except UnsupportedError as error:
        return {"reason": str(error)}
    return {"needs": [asdict(need) for need in needs]}


def _batch(workload: TrainStep, facts: Any) -> TrainingBatch:
    """Samples of the workload's shapes."""
    if isinstance(facts, ImageFacts):
        side = workload.image_size or facts.image_size
        return DrawnImages(facts, side, 0).batch(workload.batch_size)
    length = workload.sequence_tokens
    return DrawnTexts(facts, 0).batch(workload.batch_size, length, workload.shortest_tokens or length)


if __name__ == "__main__":
    main()
