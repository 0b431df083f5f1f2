"""Which of equal values torch takes: std::nth_element and std::sort, or std::partial_sort, as GCC's library has them.

Written from the algorithms (introselect, insertion sort, heaps), for values whose order alone counts.
"""

from __future__ import annotations

from typing import Any

Item = tuple[int, int]  # what orders it, its place


def _before(one: Item, other: Item) -> bool:
    return one[0] > other[0]


def _adjust(q: list[Item], lo: int, hole: int, size: int, value: Item) -> None:
    top, child = hole, hole
    while child < (size - 1) // 2:
        child = 2 * (child + 1)
        if _before(q[lo + child], q[lo + child - 1]):
            child -= 1
        q[lo + hole], hole = q[lo + child], child
    if size % 2 == 0 and child == (size - 2) // 2:
        child = 2 * (child + 1)
        q[lo + hole], hole = q[lo + child - 1], child - 1
    parent = (hole - 1) // 2
    while hole > top and _before(q[lo + parent], value):
        q[lo + hole], hole = q[lo + parent], parent
        parent = (hole - 1) // 2
    q[lo + hole] = value


def _heap_select(q: list[Item], lo: int, middle: int, hi: int) -> None:
    size = middle - lo
    for parent in range((size - 2) // 2, -1, -1):
        _adjust(q, lo, parent, size, q[lo + parent])
    for i in range(middle, hi):
        if _before(q[i], q[lo]):
            value, q[i] = q[i], q[lo]
            _adjust(q, lo, 0, size, value)


def _insertion_sort(q: list[Item], lo: int, hi: int) -> None:
    for i in range(lo + 1, hi):
        value, j = q[i], i
        while j > lo and _before(value, q[j - 1]):
            q[j] = q[j - 1]
            j -= 1
        q[j] = value


def _nth_element(q: list[Item], nth: int) -> None:
    lo, hi, depth = 0, len(q), 2 * (len(q).bit_length() - 1)
    while hi - lo > 3:
        if depth == 0:
            _heap_select(q, lo, nth + 1, hi)
            q[lo], q[nth] = q[nth], q[lo]
            return
        depth -= 1
        a, b, c = lo + 1, lo + (hi - lo) // 2, hi - 1
        if _before(q[a], q[b]):
            median = b if _before(q[b], q[c]) else c if _before(q[a], q[c]) else a
        else:
            median = a if _before(q[a], q[c]) else c if _before(q[b], q[c]) else b
        q[lo], q[median] = q[median], q[lo]
        first, last = lo + 1, hi
        while True:
            while _before(q[first], q[lo]):
                first += 1
            last -= 1
            while _before(q[lo], q[last]):
                last -= 1
            if first >= last:
                break
            q[first], q[last] = q[last], q[first]
            first += 1
        lo, hi = (first, hi) if first <= nth else (lo, first)
    _insertion_sort(q, lo, hi)


def adversary(count: int) -> list[int]:
    """Values that make nth_element of an early place run out of depth: McIlroy's, made up while it compares."""
    values: dict[int, int] = {}
    last = [0]

    class Undecided(int):
        def __gt__(self, other: int) -> bool:
            for place in (self, other):  # the one that is not the pivot becomes the next in order
                if int(self) not in values and int(other) not in values:
                    values[int(last[0] if int(last[0]) in (int(self), int(other)) else place)] = len(values)
            loose = int(other) if int(self) in values else int(self)
            if loose not in values:
                last[0] = loose
            return values.get(int(self), count) > values.get(int(other), count)

    _nth_element([(Undecided(place), place) for place in range(count)], count // 4)
    return [values.get(place, count) for place in range(count)]


def topk(row: list[Any], k: int, in_order: bool) -> list[int]:
    """Places of the k largest of a row of floats; NaN counts as the largest. k is at most 17."""
    keys = [(1, 0.0) if value != value else (0, float(value)) for value in row]
    ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    q = [(ranks[key], place) for place, key in enumerate(keys)]
    if 64 * k <= len(q):
        _heap_select(q, 0, k, len(q))
        for last in range(k - 1, 0, -1):
            value, q[last] = q[last], q[0]
            _adjust(q, 0, 0, last, value)
    else:
        _nth_element(q, k - 1)
        if in_order:
            _insertion_sort(q, 0, k - 1)
    return [place for _, place in q[:k]]
