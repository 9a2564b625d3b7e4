"""The messages between the conductor and a measuring process: JSON, one message on each line.

The conductor writes an `Assignment` and then commands to the child's stdin; the child answers on a separate pipe,
never on stdout, which belongs to the model's code. That pipe's file descriptor is an argument:
`python -m optigpu.child.replicate --answers-fd 5`. A child that reads the end of its stdin ends.

    conductor                     child
    Begin               ->
                        <-        Started | Broken            (may be left out)
    Assignment          ->
                        <-        Ready | Refused | Broken
        or, where the assignment asks to wait:
                        <-        Loaded | Refused | Broken
    RunLook             ->
                        <-        Round | Broken              (any number of times)
    RunWarmUp           ->
                        <-        Ready | Refused | Broken
    RunRound            ->
                        <-        Round | Broken              (any number of times)
    RunAudit            ->
                        <-        Audited | Broken
    DrawCalls           ->
                        <-        CallsDrawn | Broken
    RunCalls            ->
                        <-        CallsDone | Broken
    DigestCalls         ->
                        <-        CallsDigest | Broken        (these any number of times, where answers are compared)
    RunMeter            ->
                        <-        Metered | Broken            (for each meter)
    RunReference        ->
                        <-        Metered | Broken            (only to a separate process, before all others)
    (closes stdin)                ends with status 0
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from optigpu.documents.facts import Answers, MeterFacts, RunFacts, WeightFacts
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.documents.rounds import LoadRun
from optigpu.documents.selftest import SelfCheck
from optigpu.fit.memory import StackNeeds
from optigpu.job.spec import Measure, Variant
from optigpu.recipes.request import RecipeOutcome, RecipeRequest
from optigpu.techniques import AnyTechnique
from optigpu.vocabulary import DeviceKind, Frozen
from optigpu.workloads.train_step import TrainStep


class PredictTraining(Frozen):
    """Asks `optigpu.child.tasks` to predict what these steps need with each of the stacks."""

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


LOADING = "loading"
"""What the child says it does while it reads its model; it begins with that."""

KEPT_WORK = ("applying: ", "converting ")
"""How it begins what it says while it makes what is kept on disk: packed weights, compiled operators, converted models.
"""

WARMING_UP = "warming up"
"""What the child says it does when nothing but requests is left before Ready."""


class Begin(Frozen):
    """Asks to import the libraries of a backend, with `model` also those that load models: not timed, and side by side
    for several variants."""

    kind: Literal["begin"] = "begin"
    backend: str
    model: bool


class Assignment(Frozen):
    """What this process is to measure. `folder` is shared by the job's processes and removed at its end. A server may
    take `answer_s` seconds for one answer. Where nothing is `timed`, no request need run. With `waits` the process
    answers Loaded before its first request, and warms up when it is told to."""

    kind: Literal["assignment"] = "assignment"
    variant: Variant
    environment: Environment
    measure: Measure
    seed: int
    replicate: int
    folder: str
    threads: int | None = None
    answer_s: float = 600.0
    timed: bool = True
    waits: bool = False


class RunLook(Frozen):
    """Asks for a short request, as `Request.look` makes it: its samples are rough."""

    kind: Literal["run_look"] = "run_look"


class RunWarmUp(Frozen):
    """Asks a process that waits to check its output and to warm up."""

    kind: Literal["run_warm_up"] = "run_warm_up"


class RunRound(Frozen):
    """Asks for requests: at least `min_requests`, then until `seconds` are over."""

    kind: Literal["run_round"] = "run_round"
    seconds: float
    min_requests: int = 1
    max_requests: int | None = None


class RunMeter(Frozen):
    """Asks for a pass of one meter, apart from the latency rounds; quality takes at most `seconds`, where given."""

    kind: Literal["run_meter"] = "run_meter"
    meter: str
    seconds: float | None = None


class RunAudit(Frozen):
    """Asks for requests with inputs that were never seen before, and for one more look at the output.

    They are drawn from `seed` and the numbers after it, which the conductor chooses by chance: the job's own seed would
    tell a process beforehand what it will be asked. With `repeat` each of them comes after one with the inputs that
    were timed.
    """

    kind: Literal["run_audit"] = "run_audit"
    requests: int
    seed: int
    repeat: bool = False


class DrawCalls(Frozen):
    """Asks for the inputs of at most so many calls, drawn from a seed that nobody in that process knew."""

    kind: Literal["draw_calls"] = "draw_calls"
    seed: int
    calls: int


class CallsDrawn(Frozen):
    """They are drawn, for so many calls."""

    kind: Literal["calls_drawn"] = "calls_drawn"
    calls: int


class RunCalls(Frozen):
    """Asks for these calls; what they return goes into `file`, with the inputs as they are afterwards if asked to."""

    kind: Literal["run_calls"] = "run_calls"
    calls: int
    file: str
    with_inputs: bool = False


class CallsDone(Frozen):
    """The answers are in the file."""

    kind: Literal["calls_done"] = "calls_done"
    answers: Answers


class DigestCalls(Frozen):
    """Asks for the SHA-256 of the bytes of the last answers, in which nobody else has a hand."""

    kind: Literal["digest_calls"] = "digest_calls"


class CallsDigest(Frozen):
    """The answers' SHA-256."""

    kind: Literal["calls_digest"] = "calls_digest"
    sha256: str


class RunReference(Frozen):
    """Asks for what quality is compared with, to be left in the assignment's folder; the variant is the baseline."""

    kind: Literal["run_reference"] = "run_reference"


class Started(Frozen):
    """The backend's libraries are imported."""

    kind: Literal["started"] = "started"


class Loaded(Frozen):
    """The model is loaded and the stack is applied."""

    kind: Literal["loaded"] = "loaded"
    weights: WeightFacts | None = None


class Progress(Frozen):
    """What the child is busy with ("loading", "applying", "compiling", "warming up"); may come before any answer.
    `samples` are those of a request of the warm-up, one number for each metric."""

    kind: Literal["progress"] = "progress"
    doing: str
    samples: dict[str, float] = Field(default_factory=dict)


class Ready(Frozen):
    """The stack is applied, the output was checked, and the last warm-up requests agreed (or the cap was reached).
    With a `problem` of the output the variant is measured all the same, and is not valid."""

    kind: Literal["ready"] = "ready"
    load_s: float
    compile_s: float | None
    steady: bool
    warmup_requests: int
    request_s: float
    facts: RunFacts = RunFacts()
    problem: str | None = None


class Refused(Frozen):
    """This machine or model cannot do it; nothing was changed."""

    kind: Literal["refused"] = "refused"
    reason: str


class Broken(Frozen):
    """The process failed. `fault` is "out_of_memory" or "error"; `trace` is the end of an unforeseen traceback."""

    kind: Literal["broken"] = "broken"
    fault: Literal["out_of_memory", "error"]
    reason: str
    trace: str = ""


class Round(Frozen):
    """The samples of one round: for each per-request metric one number a request, in the order of the requests.

    `request_s` is how long each request took by the clock, whatever its metrics are, and `loads` what became of the
    queries of each, where a request is a run of a load.
    """

    kind: Literal["round"] = "round"
    samples: dict[str, tuple[float, ...]]
    request_s: tuple[float, ...] = ()
    loads: tuple[LoadRun, ...] = ()


class Audited(Frozen):
    """The samples of requests with fresh inputs, as in a Round, and of those with the timed inputs in between.

    `problem` says what is wrong with the output by now. `described` are times within requests (of each token), in
    seconds, that describe and that no interval is made of. `replaced` names the functions of clocks, meters and
    workloads that are others than before the stack was applied.
    """

    kind: Literal["audited"] = "audited"
    samples: dict[str, tuple[float, ...]]
    repeated: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    described: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    problem: str | None = None
    replaced: tuple[str, ...] = ()


class Metered(Frozen):
    """What a meter read: a number for each metric, or the reason why there is none; `artifacts` are files' paths, and
    `replaced` is as in Audited."""

    kind: Literal["metered"] = "metered"
    meter: str
    values: dict[str, float] = Field(default_factory=dict)
    reasons: dict[str, str] = Field(default_factory=dict)
    facts: MeterFacts = MeterFacts()
    artifacts: dict[str, str] = Field(default_factory=dict)
    replaced: tuple[str, ...] = ()


class RunPeaks(Frozen):
    """Asks it for the peak rates of a device with so many threads."""

    kind: Literal["run_peaks"] = "run_peaks"
    device: DeviceKind
    threads: int


class RunProof(Frozen):
    """Asks it to compute something small on a device."""

    kind: Literal["run_proof"] = "run_proof"
    device: DeviceKind


class Proven(Frozen):
    """The device computed what it was asked to."""

    kind: Literal["proven"] = "proven"


class ListChecks(Frozen):
    """Asks it for the names of all checks of the self-test."""

    kind: Literal["list_checks"] = "list_checks"


class RunCheck(Frozen):
    """Asks it for one check, with so many threads; `folder` is for files."""

    kind: Literal["run_check"] = "run_check"
    check: SelfCheck
    environment: Environment
    threads: int
    folder: str


class Checks(Frozen):
    """Every check of the self-test, in the order in which they run."""

    kind: Literal["checks"] = "checks"
    checks: tuple[SelfCheck, ...]


class Checked(Frozen):
    """What a check found: its largest error, null if that is NaN or infinite, and the bound, both as shares of `of`."""

    kind: Literal["checked"] = "checked"
    error: float | None
    bound: float
    of: str
    how: str = ""


class RunRecipe(Frozen):
    """Asks it to make a smaller model with so many threads."""

    kind: Literal["run_recipe"] = "run_recipe"
    request: RecipeRequest
    threads: int


class RecipeMade(Frozen):
    """The model is written."""

    kind: Literal["recipe_made"] = "recipe_made"
    outcome: RecipeOutcome


AnyCommand = (
    RunLook | RunWarmUp | RunRound | RunAudit | RunMeter | RunReference | DrawCalls | RunCalls | DigestCalls
)
AnyTask = RunPeaks | RunProof | RunRecipe | PredictTraining | ListChecks | RunCheck
AnyAnswer = (
    Started | Progress | Loaded | Ready | Refused | Broken | Round | Audited | Metered | Peaks | Proven | Checks
    | Checked | RecipeMade | TrainingPredicted | BatchesReady | BatchTried
    | CallsDrawn | CallsDone | CallsDigest
)  # fmt: skip
Answer = Annotated[AnyAnswer, Field(discriminator="kind")]

COMMAND: TypeAdapter[AnyCommand] = TypeAdapter(Annotated[AnyCommand, Field(discriminator="kind")])
TASK: TypeAdapter[AnyTask] = TypeAdapter(Annotated[AnyTask, Field(discriminator="kind")])
ANSWER: TypeAdapter[AnyAnswer] = TypeAdapter(Answer)
