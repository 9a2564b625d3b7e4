"""kernel: a function that somebody brings in a file, against the reference beside it and torch.compile of that."""

import ast
import hashlib
import math
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, model_validator

from optigpu.backends.operators import DrawnInput, KernelCall, KernelOperator, OperatorRuntime
from optigpu.documents.facts import Answers
from optigpu.vocabulary import SpecError, Task, as_value_error
from optigpu.workloads.base import Workload
from optigpu.workloads.requests import WIDTHS, Calls, Dtype, require_memory

Implementation = Literal["reference", "compiled", "custom"]
Argument = DrawnInput | bool | int | float
Case = tuple[Argument, ...]

MOST_CHARACTERS = 200_000
MOST_CASES, MOST_ARGUMENTS, MOST_ELEMENTS = 16, 32, 2**31
ACCEPTED = "OPTIGPU_KERNELS"
"""The environment variable by which an operator allows a service and its workers to run code that jobs bring."""
HOW = "INPUTS = [((1024, 4096), (4096,))], def reference(x, weight) and def custom(x, weight), for example"


_SHAPE: TypeAdapter[tuple[int, ...]] = TypeAdapter(
    Annotated[tuple[Annotated[int, Field(strict=True, ge=1)], ...], Field(min_length=1, max_length=8)]
)
_BELOW: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(strict=True, ge=1, lt=2**62)])


def code_refusal(workload: Workload) -> str | None:
    """Why a service, or a worker of one, does not run that workload's code, or None if it does, or there is none."""
    if not isinstance(workload, Kernel) or os.environ.get(ACCEPTED, "").lower() in ("1", "true", "yes"):
        return None
    return (
        "workload.kernel: this service runs no code that jobs bring. Its operator allows it with "
        f"{ACCEPTED}=true, for the API and for each worker; or measure with `optigpu run` on a machine of your own."
    )


@lru_cache(maxsize=16)
def cases_of(text: str) -> tuple[Case, ...]:
    """The inputs of each case in a kernel's file, which is read and not run. Raises SpecError for a file without any,
    or without the two functions."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise SpecError(f"the file is no Python: {str(error).partition(' (')[0]}{where}") from None
    names = {name for statement in tree.body for name in bound(statement)}
    for needed in ("INPUTS", "reference", "custom"):
        if needed not in names:
            raise SpecError(f"the file has no {needed}; it needs {HOW}")
    (*_, last) = (each for each in tree.body if "INPUTS" in bound(each))
    value = last.value if isinstance(last, ast.Assign | ast.AnnAssign) else None
    try:
        found = ast.literal_eval(value) if value else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        found = None
    if not isinstance(found, list | tuple) or not 1 <= len(found) <= MOST_CASES:
        raise SpecError(
            f"INPUTS must be a list of 1 to {MOST_CASES} cases, written out in numbers: each the shapes of the "
            "inputs, such as ((1024, 4096), (4096,))"
        )
    return tuple(_case(each) for each in found)


def _case(given: object) -> Case:
    if not isinstance(given, list | tuple) or not 1 <= len(given) <= MOST_ARGUMENTS:
        raise SpecError(
            f"a case of INPUTS is a tuple of 1 to {MOST_ARGUMENTS} inputs, and {repr(given)[:80]} is none"
        )
    case = tuple(_argument(each) for each in given)
    drawn = [each for each in case if isinstance(each, DrawnInput)]
    if not drawn or sum(math.prod(each.shape) for each in drawn) > MOST_ELEMENTS:
        raise SpecError(
            "a case of INPUTS needs a shape in parentheses of its own, such as ((1024, 4096),), and has at most "
            f"{MOST_ELEMENTS} elements"
        )
    return case


def _argument(given: object) -> Argument:
    """A shape, {"shape": SHAPE, "below": N} for whole numbers below N, or a number that is passed as it is."""
    if isinstance(given, bool | int) or (isinstance(given, float) and math.isfinite(given)):
        return given
    whole = isinstance(given, dict) and set(given) == {"shape", "below"}
    shape, below = (given["shape"], given["below"]) if isinstance(given, dict) and whole else (given, None)
    with suppress(ValidationError):
        return DrawnInput(_SHAPE.validate_python(shape), _BELOW.validate_python(below) if whole else None)
    raise SpecError(
        f'an input is a shape such as (1024, 4096), {{"shape": (8, 128), "below": 50257}} or a number, and '
        f"{repr(given)[:80]} is none"
    )


def bound(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module binds in it."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    nodes = list(ast.walk(statement))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return names | {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}


def part_of(text: str, function: str) -> str:
    """A function of a file with what it uses of it, and nothing else: no statement that binds none of these names is
    left, so that what stands beside the function cannot change what it computes."""
    body = ast.parse(text).body
    bindings = [bound(statement) for statement in body]
    wanted, kept = [function], set[int]()
    while wanted:
        name = wanted.pop()
        for place, statement in enumerate(body):
            if place not in kept and (name in bindings[place] or _is_for_all(statement)):
                kept.add(place)
                wanted += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return ast.unparse(ast.Module([body[place] for place in sorted(kept)], []))


def _is_for_all(statement: ast.stmt) -> bool:
    """`from __future__ import annotations`, `from math import *`."""
    return isinstance(statement, ast.ImportFrom) and (
        statement.module == "__future__" or any(alias.name == "*" for alias in statement.names)
    )


def _readable(text: str) -> str:
    as_value_error(cases_of, text)
    return text


class Kernel(Workload):
    """A function `custom` of a Python file, the `reference` beside it, and torch.compile of that, on the same inputs.

    `INPUTS` of the file lists the cases. Each is measured by itself, in each dtype. Answers are compared with those
    that the reference gives in another process, which has nothing of the file but what the reference uses.
    """

    summary: ClassVar[str] = "a kernel from a file, checked against its reference and torch.compile of that"
    primary: ClassVar[str] = "latency_s"
    metrics: ClassVar[tuple[str, ...]] = ("latency_s",)
    task: ClassVar[Task] = Task.OPERATOR
    reference: ClassVar[str | None] = "reference"
    lists: ClassVar[tuple[str, ...]] = ("cases", "dtypes", "implementations")

    kind: Literal["kernel"] = "kernel"
    kernel: Annotated[str, AfterValidator(_readable)] = Field(
        max_length=MOST_CHARACTERS,
        description="A Python file with INPUTS, reference and custom, as its text; on the command line its path.",
        json_schema_extra={"contentMediaType": "text/x-python"},
    )
    cases: tuple[Annotated[int, Field(ge=0, lt=MOST_CASES)], ...] = Field(
        (), max_length=MOST_CASES, description="Which cases of INPUTS, from 0; by default all."
    )
    dtypes: tuple[Dtype, ...] = Field(
        ("float32",), min_length=1, max_length=3, description="Dtypes to measure."
    )
    implementations: tuple[Implementation, ...] = Field(
        ("reference", "compiled", "custom"),
        min_length=1,
        max_length=3,
        description="Which implementations to measure.",
    )

    @model_validator(mode="after")
    def _cases_exist(self) -> Self:
        count = len(cases_of(self.kernel))
        if any(case >= count for case in self.cases):
            raise ValueError(f"cases must be below {count}: INPUTS of the file has so many")
        return self

    def expand(self) -> tuple[Workload, ...]:
        cases = self.cases or tuple(range(len(cases_of(self.kernel))))
        return super(Kernel, self.model_copy(update={"cases": cases})).expand()

    @property
    def label(self) -> str:
        implementations, dtypes = "/".join(self.implementations), "/".join(self.dtypes)
        return f"{implementations} {dtypes} {' '.join(self.described_cases)}"

    @property
    def chosen(self) -> tuple[Case, ...]:
        every = cases_of(self.kernel)
        return tuple(every[case] for case in self.cases) or every

    @property
    def described_cases(self) -> tuple[str, ...]:
        """Of each case the shapes and numbers: `2048x4096,4096`."""
        return tuple(",".join(map(_described, case)) for case in self.chosen)

    @property
    def implementation(self) -> str:
        """That of a function that was brought has the hash of its file: two files may have the same reference."""
        (name,) = self.implementations
        return f"custom {_sha256(self.kernel)}" if name == "custom" else name

    @property
    def compiled(self) -> str | None:
        return "compiled" if self.implementations == ("custom",) else None

    @property
    def compiles(self) -> bool:
        return self.implementations == ("compiled",)

    @property
    def referee(self) -> "Kernel | None":
        """The same by the implementation whose answers are right; None for that itself."""
        if self.implementations == ("reference",):
            return None
        return self.model_copy(update={"implementations": ("reference",)})

    def identity(self) -> dict[str, object]:
        """The reference with what it uses of the file, and its inputs: kernels for these are compared."""
        reference = _sha256(part_of(self.kernel, "reference"))
        shapes: dict[str, object] = {"inputs": self.described_cases, "dtypes": self.dtypes}
        return shapes | {"kind": self.kind, "reference": reference}

    def prepare(self, runtime: OperatorRuntime) -> "KernelRequest":
        """Draws the inputs from the runtime's seed. Raises UnsupportedError where they do not fit the free memory, and
        OptiGPUError for a file that cannot be imported."""
        return KernelRequest(runtime, self)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _described(argument: Argument) -> str:
    if not isinstance(argument, DrawnInput):
        return str(argument)
    shape = "x".join(map(str, argument.shape))
    return shape if argument.below is None else f"{shape}<{argument.below}"


class KernelRequest(Calls):
    """Calls, each with the next of the sets of inputs. Answers are compared in the conductor: what the process that
    runs somebody's code says of them is worth nothing."""

    def __init__(self, runtime: OperatorRuntime, workload: Kernel) -> None:
        (case,), (dtype,) = workload.chosen, workload.dtypes
        drawn = [each for each in case if isinstance(each, DrawnInput)]
        needed = sum(math.prod(each.shape) * (8 if each.below else WIDTHS[dtype]) for each in drawn)
        require_memory(runtime, 2 * needed, f"the inputs of {workload.label}")
        function = "custom" if workload.implementations == ("custom",) else "reference"
        # What is right is computed by nothing but the reference's own part of the file.
        text = workload.kernel if function == "custom" else part_of(workload.kernel, function)
        self.operator: KernelOperator = runtime.kernel(
            KernelCall(text, function, case, dtype, workload.compiles)
        )
        super().__init__(runtime, self.operator)

    def draw(self, seed: int, calls: int) -> int:
        return self.operator.draw(seed, calls)

    def answer(self, calls: int, file: Path, *, with_inputs: bool) -> Answers:
        return self.operator.answer(calls, file, with_inputs=with_inputs)

    def digest(self) -> str:
        return self.operator.digest()
