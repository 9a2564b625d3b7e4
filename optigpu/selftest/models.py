"""Checks the unmodified model on a device: its decode steps, beside whole passes on the CPU."""

from collections.abc import Iterator
from typing import cast

from optigpu.backends.runtime import DecodingRuntime, ReferenceRuntime
from optigpu.documents.selftest import Comparison, SelfCheck, Subject
from optigpu.selftest.outputs import Decoded
from optigpu.selftest.setting import TRAINED_MODEL, Setting
from optigpu.selftest.techniques import BATCH, NEW_TOKENS, OF, PROMPT_TOKENS
from optigpu.techniques.base import EXACT
from optigpu.vocabulary import DeviceKind, ReplicateError, UnsupportedError
from optigpu.workloads.generate import Generate

WORKLOAD = Generate(prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, batch_size=BATCH)


def model_checks() -> Iterator[SelfCheck]:
    """One for each device."""
    for device in DeviceKind:
        yield SelfCheck(subject=Subject.MODEL, name="unmodified model", device=device)


def run_model(_check: SelfCheck, setting: Setting) -> Comparison:
    """The largest error of a logit.

    Raises ReplicateError if torch cannot use a device that the machine has: then no other check can run on it.
    """
    try:
        there = cast(DecodingRuntime, setting.prepared(WORKLOAD, TRAINED_MODEL))
    except UnsupportedError as refused:
        raise ReplicateError(str(refused)) from refused
    on_cpu = cast(ReferenceRuntime, setting.prepared(WORKLOAD, TRAINED_MODEL, device=DeviceKind.CPU))
    error = Decoded(there, WORKLOAD).error_of_whole_passes(on_cpu)
    return Comparison(error, EXACT, OF, how=TRAINED_MODEL)
