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
def test_the_first_is_that_of_a_sorted_list(
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
        free = data.draw(st.sets(st.sampled_from(list(itertools.product((0, 1), (False, True))))))

        def has_room(request: Request, free: set[tuple[int, bool]] = free) -> bool:
            return (request.add.pool, request.needs_scratch) in free

        assert queue.first(has_room) is next(filter(has_room, model), None)
        assert (len(queue), queue.num_waiting(1)) == (len(model), sum(r.add.pool for r in model))
        queue.remove(model.pop(data.draw(st.integers(0, len(model) - 1))))
    assert (len(queue), queue.first(lambda _: True)) == (0, None)
