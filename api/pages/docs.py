"""The page at `/docs`: every call, from the OpenAPI document. It needs no network, no script and no key."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from api.pages.view import Plain, View

SCHEMAS = "#/components/schemas/"
CREDENTIALS = {"HTTPBearer": "Bearer $OPTIGPU_API_KEY"}
"""What a call's header `Authorization` holds, by its security scheme; a device's signature has no short form."""


class _Part(BaseModel):
    """A part of an OpenAPI document, with the fields that the page shows."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Parameter(_Part):
    name: str
    place: str = Field(alias="in")
    required: bool = False
    description: str = ""
    shape: JsonValue = Field(None, alias="schema")

    @property
    def type(self) -> str:
        """What it holds, in words."""
        return type_of(self.shape)


class Example(_Part):
    summary: str = ""
    value: JsonValue

    @property
    def text(self) -> str:
        """The document, indented."""
        return json.dumps(self.value, indent=2)


class Content(_Part):
    shape: JsonValue = Field(None, alias="schema")
    examples: dict[str, Example] = {}

    @property
    def type(self) -> str:
        """What it holds, in words."""
        return type_of(self.shape)

    @property
    def schema_name(self) -> str | None:
        """The schema of the document that it is; None if it has one of its own."""
        return _reference(self.shape)


class Body(_Part):
    content: dict[str, Content]


class Answer(_Part):
    description: str = ""
    content: dict[str, Content] = {}


class Operation(_Part):
    name: str = Field(alias="operationId")
    summary: str
    description: str = ""
    tags: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    body: Body | None = Field(None, alias="requestBody")
    answers: dict[str, Answer] = Field(alias="responses")
    security: tuple[dict[str, tuple[str, ...]], ...] = ()


class Tag(_Part):
    name: str
    description: str = ""


class Components(_Part):
    schemas: dict[str, JsonValue] = {}


class Document(_Part):
    """An OpenAPI document."""

    paths: dict[str, dict[str, Operation]]
    tags: tuple[Tag, ...] = ()
    components: Components = Components()

    def groups(self) -> list["Group"]:
        """The calls by their first tag, in the order of the tags."""
        calls = list(self._calls())
        return [
            Group(tag, tuple(call for call in calls if call.operation.tags[:1] == (tag.name,)))
            for tag in self.tags
        ]

    def schemas(self) -> dict[str, str]:
        """Each schema's JSON, indented, by its name."""
        return {name: json.dumps(shape, indent=2) for name, shape in sorted(self.components.schemas.items())}

    def _calls(self) -> Iterator["Call"]:
        for path, methods in self.paths.items():
            for method, operation in methods.items():
                yield Call(method.upper(), path, operation)


@dataclass(frozen=True)
class Call:
    """One operation, with where it is."""

    method: str
    path: str
    operation: Operation

    @property
    def curl(self) -> str:
        """A command that makes the call. $URL is the service, $OPTIGPU_API_KEY a key."""
        words = ["curl", "-s"]
        if self.method != ("POST" if self.operation.body else "GET"):
            words += ["-X", self.method]
        words.append(f'"$URL{_with_variables(self.path)}{self._query()}"')
        if self.operation.security:
            scheme = next(iter(self.operation.security[0]))
            words += ["-H", f'"Authorization: {CREDENTIALS.get(scheme, "$AUTHORIZATION")}"']
        if self.operation.body:
            words += _sent(self.operation.body)
        return " ".join(words)

    def _query(self) -> str:
        """The parameters that must be given."""
        wanted = [each for each in self.operation.parameters if each.place == "query" and each.required]
        text = "&".join(f"{each.name}=${each.name.upper()}" for each in wanted)
        return f"?{text}" if text else ""


@dataclass(frozen=True)
class Group:
    """The calls of one tag."""

    tag: Tag
    calls: tuple[Call, ...]


def phrase(status: str) -> str:
    """A status with its name: "404 Not Found"."""
    return f"{status} {HTTPStatus(int(status)).phrase}"


def type_of(shape: JsonValue) -> str:
    """A schema in words: "integer", "Result", "string or null"."""
    if not isinstance(shape, dict):
        return "anything"
    if (name := _reference(shape)) is not None:
        return name
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := shape.get(key), list):
            return " or ".join(dict.fromkeys(map(type_of, choices)))
    if isinstance(values := shape.get("enum"), list):
        return " or ".join(map(json.dumps, values))
    if shape.get("type") == "array":
        return f"list of {type_of(shape.get('items'))}"
    words = [str(shape[key]) for key in ("type", "format") if key in shape]
    return ", ".join(words) or "anything"


def _reference(shape: JsonValue) -> str | None:
    target = shape.get("$ref") if isinstance(shape, dict) else None
    return target.removeprefix(SCHEMAS) if isinstance(target, str) else None


def _sent(body: Body) -> list[str]:
    """The options that send the body, with its first example."""
    media_type, content = next(iter(body.content.items()))
    example = next(iter(content.examples.values()), None)
    sent = shlex.quote(json.dumps(example.value)) if example else "@body.json"
    return ["-H", f"'Content-Type: {media_type}'", "-d", sent]


def _with_variables(path: str) -> str:
    """The path with shell variables: "/v1/jobs/$ID"."""
    return "/".join(
        f"${part[1:-1].upper()}" if part.startswith("{") and part.endswith("}") else part
        for part in path.split("/")
    )


router = APIRouter()


@router.get("/docs")
def read_docs(request: Request, view: View, _: Plain) -> Response:
    """The calls by their tags, then the schemas."""
    document = _document(request.app)
    return view.page(
        "docs.html",
        url=str(request.base_url).rstrip("/"),
        groups=document.groups(),
        schemas=document.schemas(),
        phrase=phrase,
    )


@lru_cache(maxsize=1)
def _document(app: FastAPI) -> Document:
    """Read once: the document is 300 kB, and the application does not change while it runs."""
    return Document.model_validate(app.openapi())
