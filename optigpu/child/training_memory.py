"""python -m optigpu.child.training_memory: predicts what steps of training need, in a process that may load torch.

It reads one `PredictTraining` from stdin and answers with `TrainingPredicted` or `Broken`, as
`optigpu.child.connection` says.
"""

from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from optigpu.backends.training import TrainingBatch
from optigpu.child.connection import broken, connect
from optigpu.child.messages import PredictTraining, TrainingPredicted
from optigpu.documents.shapes import ImageFacts, ModelFacts
from optigpu.fit.training import StackNeeds
from optigpu.job.spec import resolve
from optigpu.techniques.base import Technique
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.train_step import DrawnImages, DrawnTexts, TrainStep


def main() -> NoReturn:
    """Answers each order, for ever: the thread that reads stdin ends the process."""
    lines, tell = connect("optigpu.child.training_memory", "Predicts the memory of training.")
    while True:
        line = lines.get()
        try:
            order = PredictTraining.model_validate_json(line)
            needs = tuple(_needs(order.model, stack, order.workloads) for stack in order.stacks)
            tell(TrainingPredicted(stacks=needs))
        except Exception as error:
            tell(broken(error))


def _needs(model: str, stack: tuple[Technique, ...], workloads: Sequence[TrainStep]) -> StackNeeds:
    from optigpu.backends.torch.training.predicted import predicted_need

    batches = tuple(partial(_batch, workload) for workload in workloads)
    try:
        found = predicted_need(workloads[0].update_rule, model, resolve(stack, "train_step"), batches)
    except UnsupportedError as error:
        return StackNeeds(reason=str(error))
    return StackNeeds(needs=tuple(found))


def _batch(workload: TrainStep, facts: ModelFacts | ImageFacts) -> TrainingBatch:
    """Samples of the workload's shapes."""
    if isinstance(facts, ImageFacts):
        side = workload.image_size or facts.image_size
        return DrawnImages(facts, side, 0).batch(workload.batch_size)
    length = workload.sequence_tokens
    return DrawnTexts(facts, 0).batch(workload.batch_size, length, workload.shortest_tokens or length)


if __name__ == "__main__":
    main()
