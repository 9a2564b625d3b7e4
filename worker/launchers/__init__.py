"""The schedulers of clusters: each hands a job to its own, says what became of it, and cancels it.

A launcher is one file here and a name in LAUNCHERS. `worker.launch` decides what is handed over, and when.
"""

from collections.abc import Mapping
from types import MappingProxyType

from optigpu.vocabulary import Scheduler
from worker.launchers.base import Launcher
from worker.launchers.slurm import Slurm

LAUNCHERS: Mapping[Scheduler, type[Launcher]] = MappingProxyType({Scheduler.SLURM: Slurm})
