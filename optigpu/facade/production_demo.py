"""What one-line quantization does to a model: bytes, speed and quality beside the unquantized one."""

from optigpu.facade.job_report import JobReport
from optigpu.facade.measuring import run
from optigpu.job.plan import PlanKind
from optigpu.vocabulary import UnsupportedError
