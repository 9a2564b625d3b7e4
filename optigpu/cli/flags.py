"""The flags that describe a job, read from the fields of JobSpec, of the models within it, and of the workloads.

A new field, and a new workload, has its flag without a change here.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from pydantic import BaseModel, Field, JsonValue

from optigpu.cli.options import FlagValue, Given
from optigpu.documents.fields import read_text
from optigpu.vocabulary import SpecError
from optigpu.workloads import WORKLOADS
from optigpu.workloads.base import Workload


class Unit(NamedTuple):
    """What a field's number counts. `suffix` is the end of the field's name that the flag's name leaves out."""

    suffix: str
    factors: dict[str, float]
    example: str


SIZE = Unit(
    "_bytes",
    {"": 1, "B": 1}
    | {f"{prefix}B": 1000.0**power for power, prefix in enumerate("KMGT", 1)}
    | {f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", 1)},
    "bytes, or a size such as 8GB or 512MiB",
)
DURATION = Unit("_s", {"": 1, "S": 1, "M": 60, "H": 3600}, "seconds, or a time such as 90s, 30m or 1h30m")


def unit_of(field: str) -> Unit | None:
    """The unit that the end of a field's name tells."""
    if field.endswith("_seconds"):
        return DURATION
    return next((unit for unit in (SIZE, DURATION) if field.endswith(unit.suffix)), None)


def read_quantity(value: FlagValue, unit: Unit, flag: str) -> float:
    """The number in the field's unit. Raises SpecError for what is not a sum of numbers with units."""
    text = str(value).replace(" ", "")
    parts = re.findall(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)", text)
    factors = {name.lower(): factor for name, factor in unit.factors.items()}
    try:
        if not parts or "".join(number + name for number, name in parts) != text:
            raise ValueError
        total = sum((float(number) * factors[name.lower()] for number, name in parts), 0.0)
    except (ValueError, KeyError):
        given = flag.replace("_", "-")
        raise SpecError(f"--{given} {value}: write {unit.example}.") from None
    return int(total) if total.is_integer() else total


FLAG_TYPES: dict[str | None, type[FlagValue]] = {"integer": int, "number": float, "boolean": bool}
NUMBERS: dict[type[FlagValue], str] = {int: "INTEGER", float: "FLOAT"}
"""What stands for a number in the help."""
DEFAULT_WORKLOAD = "generate"
OWN_SYNTAX = ("workload", "stack", "beside")
REPEATED = ("beside",)


class FieldSchema(BaseModel):
    """The parts of a field's JSON schema that flags need."""

    type: str | None = None
    ref: str | None = Field(None, alias="$ref")
    any_of: tuple["FieldSchema", ...] = Field((), alias="anyOf")
    items: "FieldSchema | None" = None
    properties: "dict[str, FieldSchema]" = Field({})
    const: JsonValue = None
    content: str | None = Field(None, alias="contentMediaType")
    enum: tuple[JsonValue, ...] = ()
    minimum: int | float | None = None
    maximum: int | float | None = None
    description: str = ""
    default: JsonValue = None


class ModelSchema(BaseModel):
    """The parts of a model's JSON schema that flags need."""

    properties: dict[str, FieldSchema]
    definitions: dict[str, FieldSchema] = Field({}, alias="$defs")


class Flag(NamedTuple):
    """One flag: the field that it sets, the type of its value (of each, where it takes several) and its help. `field`
    has a dot where it is within a model of the model. A `repeated` flag may be given several times; that of a text in a
    file names the file."""

    field: str
    kind: type[FlagValue]
    takes_several: bool
    help: str
    unit: Unit | None = None
    repeated: bool = False
    is_file: bool = False

    @property
    def name(self) -> str:
        """Its name as a parameter: --min-vram is `min_vram`. One that would say nothing without its unit keeps it."""
        whole = self.field.replace(".", "_")
        short = whole.removesuffix(self.unit.suffix if self.unit else "")
        return whole if short in ("max", "min") else short

    def parameter(self, panel: str) -> Parameter:
        """The flag as typer reads it; `panel` is its heading in the help."""
        given: Any = list[str] if self.repeated else bool if self.kind is bool else str
        is_number = self.kind in NUMBERS and not self.takes_several and not self.unit
        metavar = NUMBERS[self.kind] if is_number else None
        option = typer.Option(help=self.help, rich_help_panel=panel, metavar=metavar)
        annotation = Annotated[given | None, option]
        return Parameter(self.name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)

    def read(self, value: FlagValue) -> object:
        """The value for the job's document. Raises SpecError for a quantity, or a file, that cannot be read."""
        if self.is_file:
            return read_text(Path(str(value)))
        if self.unit:
            return read_quantity(value, self.unit, self.name)
        if self.takes_several:
            return [self._number(part) for part in split(str(value))]
        return self._number(value)

    def _number(self, value: FlagValue) -> object:
        """A number where one is expected. What is none stays a text, so that the job's own check answers."""
        if isinstance(value, str) and self.kind in NUMBERS:
            with suppress(ValueError):
                return self.kind(value)
        return value


def job_flags() -> list[Flag]:
    """The flags of JobSpec's own fields."""
    schemas = _schemas(_job())
    workloads = [f"{name} (the default)" if name == DEFAULT_WORKLOAD else name for name in WORKLOADS]
    helps = {
        "workload": f"What to run: {_listed(workloads)}.",
        "model": f"{schemas['model'].description} {_default_models()}",
        "models": f"{_clause(schemas['models'])}, comma separated, for example preset:gpt2,preset:opt-125m.",
        "device": f"{_sentence(schemas['device'])} Default: cuda where there is a GPU.",
        "stack": f"{_clause(schemas['stack'])}, comma separated, "
        "for example int8_weight_only,torch_compile:mode=max-autotune.",
        "beside": f"{_clause(schemas['beside'])}: [BACKEND/]STACK[ as LABEL], or a server as URL#MODEL, for example "
        "'llama_cpp/gguf:type=Q8_0 as eight bits'. May be given several times.",
    }
    flags = []
    for name, schema in schemas.items():
        if name in OWN_SYNTAX:
            flags.append(Flag(name, str, False, helps[name], repeated=name in REPEATED))
        elif (schema.items or schema).type in ("integer", "number", "boolean", "string"):
            words = helps.get(name) or f"{_sentence(schema)} Default: {_default(schema)}."
            flags.append(Flag(name, _kind(schema), schema.items is not None, words))
    return flags


@cache
def sections() -> tuple[str, ...]:
    """The fields of JobSpec that are models with flags of their own: measure, target, limits."""
    return tuple(name for name, schema in _schemas(_job()).items() if schema.properties)


def section_flags(section: str, with_defaults: bool = True) -> list[Flag]:
    """The flags of the fields of one of the `sections`. The help names the defaults if asked to."""
    return _flags(_schemas(_job())[section].properties, with_defaults)


def model_flags(model: type[BaseModel], with_defaults: bool = True) -> list[Flag]:
    """The flags of the fields of another model than a job."""
    return _flags(_schemas(model), with_defaults)


def _flags(schemas: Mapping[str, FieldSchema], with_defaults: bool) -> list[Flag]:
    flags = []
    for name, schema in _flat(schemas):
        unit = unit_of(name)
        text = f"{_clause(schema)}: {unit.example}." if unit else _sentence(schema)
        default = f" Default: {_default(schema)}." if with_defaults else ""
        flags.append(Flag(name, _kind(schema), schema.items is not None, text + default, unit))
    return flags


def workload_flags(workloads: Mapping[str, type[Workload]] = WORKLOADS) -> list[Flag]:
    """The flags of the workloads' fields. A flag's help names the workloads that it is for."""
    owners: dict[str, dict[str, FieldSchema]] = {}
    for kind, workload in workloads.items():
        for name, schema in _schemas(workload).items():
            if name != "kind":
                owners.setdefault(name, {})[kind] = schema
    return [_workload_flag(name, schemas) for name, schemas in owners.items()]


def read_flags(flags: Iterable[Flag], given: Given) -> dict[str, Any]:
    """The part of the job's document that the flags define."""
    document: dict[str, Any] = {}
    for flag in flags:
        if flag.name in given:
            *models, field = flag.field.split(".")
            place = document
            for model in models:
                place = place.setdefault(model, {})
            place[field] = flag.read(given[flag.name])
    return document


def split(text: str) -> list[str]:
    """The parts of a comma separated text."""
    return [part.strip() for part in text.split(",") if part.strip()]


@cache
def _schemas(model: type[BaseModel]) -> Mapping[str, FieldSchema]:
    """The schema of each field, with what it refers to filled in. A job's takes tenths of a second."""
    schema = ModelSchema.model_validate(model.model_json_schema())
    return {name: _resolved(field, schema.definitions) for name, field in schema.properties.items()}


def _resolved(schema: FieldSchema, definitions: Mapping[str, FieldSchema]) -> FieldSchema:
    """The schema of the values: what a reference names, and what may be null without the null."""
    target = _target(schema, definitions)
    chosen = _target(next((each for each in target.any_of if each.type != "null"), target), definitions)
    items = chosen.items and _resolved(chosen.items, definitions)
    fields = {name: _resolved(field, definitions) for name, field in chosen.properties.items()}
    own = {"description": schema.description, "default": schema.default, "items": items, "properties": fields}
    return chosen.model_copy(update=own)


def _target(schema: FieldSchema, definitions: Mapping[str, FieldSchema]) -> FieldSchema:
    return definitions[schema.ref.rpartition("/")[2]] if schema.ref else schema


def _flat(schemas: Mapping[str, FieldSchema], model: str = "") -> Iterator[tuple[str, FieldSchema]]:
    """Each field with its schema, those of models within the model with a dot: "quality.text"."""
    for name, schema in schemas.items():
        if schema.properties:
            yield from _flat(schema.properties, f"{model}{name}.")
        else:
            yield f"{model}{name}", schema


def _job() -> type[BaseModel]:
    """JobSpec, imported where a command needs it: it loads every technique."""
    from optigpu.job.spec import JobSpec

    return JobSpec


def _workload_flag(name: str, schemas: Mapping[str, FieldSchema]) -> Flag:
    owners: dict[str, list[str]] = {}
    for kind, schema in schemas.items():
        clause = _clause(schema)
        owners.setdefault(clause[:1].lower() + clause[1:] + _values(schema), []).append(kind)
    text = " ".join(f"{', '.join(kinds)}: {clause}." for clause, kinds in owners.items())
    first, *others = schemas.values()
    same = all(_kind(schema) is _kind(first) for schema in others)
    is_file = first.content is not None
    return Flag(name, _kind(first) if same else str, first.items is not None, text, is_file=is_file)


def _kind(schema: FieldSchema) -> type[FlagValue]:
    return FLAG_TYPES.get(schema.items.type if schema.items else schema.type, str)


def _clause(schema: FieldSchema) -> str:
    return schema.description.removesuffix(".")


def _sentence(schema: FieldSchema) -> str:
    return f"{_clause(schema)}{_values(schema)}."


def _default(schema: FieldSchema) -> str:
    return _joined(schema.default if isinstance(schema.default, list) else [schema.default]) or "none"


def _values(schema: FieldSchema) -> str:
    """The valid values, as the end of a sentence; for a list of numbers, an example."""
    each = schema.items or schema
    several = ", comma separated" if schema.items else ""
    choices = [str(choice) for choice in each.enum] or ([str(each.const)] if each.const is not None else [])
    if choices:
        return f"{several}: {', '.join(choices) if schema.items else _listed(choices)}"
    if isinstance(schema.default, list) and schema.default:
        return f"{several}, for example {_joined(schema.default)}"
    if each.minimum is not None and each.maximum is not None:
        return f"{several} ({each.minimum} to {each.maximum})"
    return several


def _joined(values: Sequence[JsonValue]) -> str:
    """The values as they are written on the command line."""
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value).lower() for value in values)


def _listed(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _default_models() -> str:
    """The model of each workload that needs one, where none is named."""
    usual = WORKLOADS[DEFAULT_WORKLOAD].example_model
    others = [
        f"for {name} {workload.example_model}"
        for name, workload in WORKLOADS.items()
        if workload.task.needs_model and workload.example_model != usual
    ]
    return f"Default: {'; '.join([usual, ', '.join(others)])}."
