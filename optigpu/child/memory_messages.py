"""The messages to and from the processes that find out about memory: `child.training_memory` and `child.largest_batch`.

They are answered as those of `optigpu.child.messages`, whose `Answer` knows them.
"""

from typing import Literal

from optigpu.documents.facts import RunFacts
from optigpu.fit.training import StackNeeds
from optigpu.techniques import AnyTechnique
from optigpu.vocabulary import Frozen
from optigpu.workloads.train_step import TrainStep


class PredictTraining(Frozen):
    """The one line to `python -m optigpu.child.training_memory`: the stacks and the steps whose needs to predict."""

    kind: Literal["predict_training"] = "predict_training"
    model: str
    stacks: tuple[tuple[AnyTechnique, ...], ...]
    workloads: tuple[TrainStep, ...]


class TrainingPredicted(Frozen):
    """What the steps need with each of the stacks."""

    kind: Literal["training_predicted"] = "training_predicted"
    stacks: tuple[StackNeeds, ...]


class BatchesReady(Frozen):
    """`python -m optigpu.child.largest_batch` has loaded the model of its `Assignment` under the variant's limit."""

    kind: Literal["batches_ready"] = "batches_ready"
    facts: RunFacts = RunFacts()


class TryBatch(Frozen):
    """Asks it for a request of so many samples."""

    kind: Literal["try_batch"] = "try_batch"
    batch_size: int


class BatchTried(Frozen):
    """Whether the request found enough memory. Where it did not, `why` is the error's; it can try another one."""

    kind: Literal["batch_tried"] = "batch_tried"
    fits: bool
    why: str = ""
