"""The queue's order against a sorted list."""

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scheduler.request import Request
from scheduler.waiting import QueueOrder, WaitingQueue
from tests.scheduler.drive import request

# Priority, pool, needs a scratch, in the background.
entries = st.lists(
    st.tuples(st.integers(-3, 3), st.integers(0, 1), st.booleans(), st.booleans()), max_size=30
)


@given(entries, st.sampled_from(QueueOrder), st.data())
def test_heads_are_those_of_sorted_lists(
    entries: list[tuple[int, int, bool, bool]], order: QueueOrder, data: st.DataObject
) -> None:
    queue, model = WaitingQueue(order), list[Request]()
    for arrival, (priority, pool, needs_scratch, is_background) in enumerate(entries):
        add = replace(request("a", priority=priority, is_background=is_background), pool=pool)
        model.append(Request(add, 0, needs_scratch, arrival))
        queue.push(model[-1])
    while model:
        model.sort(
            key=lambda r: (
                r.add.is_background,
                r.add.priority if order is QueueOrder.PRIORITY else 0,
                r.arrival_order,
            )
        )
        lines = itertools.product((0, 1), (False, True))
        heads = [next((r for r in model if (r.add.pool, r.needs_scratch) == line), None) for line in lines]
        assert queue.heads() == sorted((head for head in heads if head is not None), key=model.index)
        assert (len(queue), queue.num_waiting(1)) == (len(model), sum(r.add.pool for r in model))
        queue.remove(model.pop(data.draw(st.integers(0, len(model) - 1))))
    assert (len(queue), queue.heads()) == (0, [])
