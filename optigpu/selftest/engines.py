"""Checks the engines other than torch, without a technique: what each decodes, beside what torch does."""

from collections.abc import Iterator
from typing import cast

from optigpu.backends import BACKENDS
from optigpu.backends.runtime import DecodingRuntime
from optigpu.documents.endpoints import ENDPOINT
from optigpu.documents.selftest import Comparison, SelfCheck, Subject
from optigpu.engines.recipes import RECIPES
from optigpu.selftest.models import WORKLOAD
from optigpu.selftest.outputs import Decoded
from optigpu.selftest.setting import PLAIN_BACKEND, TEXT_MODELS, Setting
from optigpu.selftest.techniques import OF
from optigpu.techniques.base import EXACT
from optigpu.vocabulary import DeviceKind, UnsupportedError


def engine_checks() -> Iterator[SelfCheck]:
    """One for each device of each engine that decodes; a server is no engine of this machine."""
    for name, backend in BACKENDS.items():
        if name in (PLAIN_BACKEND, ENDPOINT) or backend.supports(WORKLOAD, None):
            continue
        for device in backend.devices:
            alone = name in RECIPES
            yield SelfCheck(subject=Subject.ENGINE, name=name, device=device, alone=alone, backend=name)


def run_engine(check: SelfCheck, setting: Setting) -> Comparison:
    """The largest error of a logit; of an engine that gives none, by how much its tokens are behind torch's.

    Raises UnsupportedError where the engine runs none of the small models.
    """
    model, engine = _prepared(check.name, setting)
    on_cpu = setting.prepared(WORKLOAD, model, device=DeviceKind.CPU)
    expected = Decoded(cast(DecodingRuntime, on_cpu), WORKLOAD)
    try:
        error = expected.error_of(engine, own_loop=False)
    except UnsupportedError:
        error = expected.error_of_tokens(engine)
    return Comparison(error, EXACT, OF, how=model)


def _prepared(name: str, setting: Setting) -> tuple[str, DecodingRuntime]:
    """The first small model that the engine runs. Raises UnsupportedError with the last reason."""
    reason = f"{name} runs no small model."
    for model in TEXT_MODELS:
        try:
            return model, cast(DecodingRuntime, setting.prepared(WORKLOAD, model, backend=name))
        except UnsupportedError as error:
            reason = str(error)
    raise UnsupportedError(reason)
