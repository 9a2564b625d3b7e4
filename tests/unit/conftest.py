"""Hypothesis without a stopwatch: how long an example takes says nothing on a machine that is busy with other work."""

from hypothesis import HealthCheck, settings

from tests.engine.forked import forked_children as forked_children
from tests.engine.sessions import own_lock as own_lock

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
