"""Fixtures of the engine's tests that these use too."""

from tests.engine.forked import forked_children as forked_children
from tests.engine.sessions import own_lock as own_lock
