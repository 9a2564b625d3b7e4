"""A feed by itself: which events it holds, and from where on it is whole."""

import pytest

from api import feeds
from api.feeds import Batch, Feed
from optigpu.documents.views import EventView
from optigpu.vocabulary import utc_now


def test_a_feed_gives_what_came_after_a_position() -> None:
    feed = Feed(0)
    now = utc_now()
    feed.extend(
        Batch(tuple(EventView(sequence=n, at=now, kind="k", data={}) for n in (1, 2, 3)), complete=False)
    )

    def after(position: int) -> list[int] | None:
        found = feed.since(position)
        return None if found is None else [event.sequence for event in found]

    assert [after(position) for position in range(5)] == [[1, 2, 3], [2, 3], [3], [], []]


def test_a_feed_knows_from_where_on_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers may have gaps: progress that newer progress has replaced."""
    monkeypatch.setattr(feeds, "TAIL", 3)
    feed = Feed(4)
    now = utc_now()
    for sequence in (6, 7, 9, 12):
        event = EventView(sequence=sequence, at=now, kind="k", data={})
        feed.extend(Batch((event,), complete=False))
    found = {position: feed.since(position) for position in (4, 5, 6, 8, 12)}
    assert found[4] is None
    assert found[5] is None
    assert [[event.sequence for event in found[p] or ()] for p in (6, 8, 12)] == [[7, 9, 12], [9, 12], []]
