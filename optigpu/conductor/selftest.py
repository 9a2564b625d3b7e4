"""Runs the self-test: each check in a process that several share, so that one that dies or hangs fails by itself."""

import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from optigpu import paths
from optigpu.child.messages import Checked, Checks, ListChecks, RunCheck
from optigpu.conductor.processes.asking import TimedWatch, ask
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.locks import hold
from optigpu.conductor.processes.variables import child_variables
from optigpu.conductor.scratch import scratch_folder
from optigpu.conductor.session import environment_for
from optigpu.documents.names import closest, did_you_mean
from optigpu.documents.result import Environment
from optigpu.documents.selftest import CheckResult, CheckStatus, SelfCheck, SelfTest, Subject
from optigpu.hardware.device_kinds import no_device
