"""Divide numbers (sequence lengths) into groups under a capacity, or evenly.

In: a list of non-negative integers. Out: lists of indices into it.
Called by ``utils/batch/split`` (micro-batches) and by the data-parallel dealing of rows. Pure Python, no torch.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from areal.utils.errors import ArealError

T = TypeVar("T")

UNLIMITED_TOKENS = 10**12  # capacity (tokens) that stands for "no limit"


class PackingError(ArealError, RuntimeError):
    """A list of lengths cannot be divided as asked."""


def flat2d(nested: Iterable[Iterable[T]]) -> list[T]:
    """Concatenate the inner lists."""
    return list(itertools.chain.from_iterable(nested))


def ffd_allocate(values: Sequence[int], capacity: int, min_groups: int, n_groups_divisor: int = 1) -> list[list[int]]:
    """Allocate longest first; among the groups with room take the one with the fewest members.

    A new group is opened while there are fewer than ``min_groups``, or when the smallest group has no room.
    The search repeats with more groups until their number is a multiple of ``n_groups_divisor``.

    Args:
        values: sizes (tokens).
        capacity: largest sum of a group (tokens).
        min_groups: least number of groups.
        n_groups_divisor: the number of groups is a multiple of this.

    Returns: index groups in the order they were opened.

    Raises:
        PackingError: a value exceeds the capacity, or there are fewer values than groups.
    """
    _check_sizes(values, capacity)
    min_groups = max(min_groups, 1)
    while True:
        if len(values) < min_groups:
            raise PackingError(
                f"cannot make {min_groups} groups of {len(values)} sequences; "
                "lower n_mbs or n_mbs_divisor, or give every rank more sequences"
            )
        groups = _ffd_once(values, capacity, min_groups)
        if len(groups) % n_groups_divisor == 0:
            return groups
        min_groups = _round_up(len(groups), n_groups_divisor)


def _ffd_once(values: Sequence[int], capacity: int, min_groups: int) -> list[list[int]]:
    groups: list[list[int]] = []
    # Groups by number of members, each a heap of (sum, group): its top is the one that takes the item, if any of them
    # has room. There are at most sqrt(2 n) such numbers at once. Groups too full for the smallest item are left out.
    by_count: dict[int, list[tuple[int, int]]] = {}
    counts: list[int] = []  # keys of by_count, rising
    full = capacity - min(values, default=0)
    for index in _selection_order(values):
        value = values[index]
        count, total, target = 0, 0, len(groups)
        if target >= min_groups:
            room = capacity - value
            count = next((c for c in counts if by_count[c][0][0] <= room), 0)
        if count:
            heap = by_count[count]
            total, target = heapq.heappop(heap)
            if not heap:
                del by_count[count]
                counts.remove(count)
            groups[target].append(index)
        else:
            groups.append([index])
        total += value
        if total <= full:
            if count + 1 not in by_count:
                by_count[count + 1] = []
                bisect.insort(counts, count + 1)
            heapq.heappush(by_count[count + 1], (total, target))
    return groups


def _selection_order(values: Sequence[int]) -> list[int]:
    """Indices by falling value, equal values as a selection sort leaves them.

    The rule for ties decides which of two equal sequences goes where; this one yields the published allocations, on
    every machine. A selection sort takes the first largest item and moves the front item into its place. While it takes
    the items of one value, it moves smaller ones only, so the places it takes them from are known beforehand.
    """
    item_at = list(range(len(values)))
    place_of = list(range(len(values)))
    front = 0
    falling = sorted(item_at, key=values.__getitem__, reverse=True)
    for _, items in itertools.groupby(falling, key=values.__getitem__):
        for place in sorted([place_of[item] for item in items]):
            moved = item_at[front]
            item_at[front], item_at[place] = item_at[place], moved
            place_of[moved] = place
            front += 1
    return item_at


def kk_allocate(values: Sequence[int], capacity: int, min_groups: int, n_groups_divisor: int = 1) -> list[list[int]]:
    """Allocate by the k-way largest differencing method, which balances the sums.

    ``k = max(min_groups, ceil(total / capacity))`` rounded up to the divisor, at most ``len(values)``. When a group
    exceeds the capacity the result is ``ffd_allocate``'s.

    Args, Returns, Raises: as ``ffd_allocate``; groups by falling sum.
    Source: Karmarkar and Karp, The differencing method of set partitioning (1982).
    """
    _check_sizes(values, capacity)
    if len(values) < max(min_groups, 1):
        raise PackingError(f"cannot make {min_groups} groups of {len(values)} sequences; lower n_mbs")
    wanted = max(min_groups, 1, -(-sum(values) // capacity))
    k = min(_round_up(wanted, n_groups_divisor), len(values))
    groups = _largest_differencing(values, k)
    overfull = any(sum(values[i] for i in group) > capacity for group in groups)
    if overfull or k % n_groups_divisor:
        return ffd_allocate(values, capacity, min_groups, n_groups_divisor)
    return groups


def _largest_differencing(values: Sequence[int], k: int) -> list[list[int]]:
    """Merge the two k-way states of largest spread until one is left (largest part meets smallest part)."""
    # A part is (sum, count, indices); parts of a state are kept in falling order. heapq pops the smallest, so
    # the key holds negated numbers: widest spread, then largest first part, then most members, then last index.
    State = list[tuple[int, int, list[int]]]

    def entry(state: State) -> tuple[int, int, int, list[int], State]:
        total, count, indices = state[0]
        return total_spread(state), -total, -count, [-i for i in indices], state

    def total_spread(state: State) -> int:
        return state[-1][0] - state[0][0]

    empty: State = [(0, 0, []) for _ in range(k - 1)]
    heap = [entry([(value, 1, [index]), *empty]) for index, value in enumerate(values)]
    heapq.heapify(heap)
    while len(heap) > 1:
        wide, other = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        merged = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in zip(wide, reversed(other), strict=True)]
        heapq.heappush(heap, entry(sorted(merged, reverse=True)))
    return [indices for _, _, indices in heap[0][-1]] if heap else []


def get_allocate_fn(name: str) -> Callable[..., list[list[int]]]:
    """Return the allocator called ``name``: ``ffd`` or ``kk``; else ``ValueError``."""
    try:
        return {"ffd": ffd_allocate, "kk": kk_allocate}[name]
    except KeyError:
        raise ValueError(f"packing_algorithm={name!r} is unknown; allowed: 'ffd', 'kk'") from None


def balanced_greedy_partition(nums: Sequence[int], K: int) -> list[list[int]]:
    """Divide into ``K`` groups of equal member counts, longest first into the smallest sum.

    Raises:
        ValueError: fewer numbers than groups, or not divisible.
    """
    n = len(nums)
    if K < 1 or n < K or n % K:
        raise ValueError(f"{n} numbers do not divide into K={K} groups of equal count; K must divide their number")
    return balanced_partition(nums, K)


def balanced_partition(nums: Sequence[int], k: int) -> list[list[int]]:
    """As :func:`balanced_greedy_partition`, with any number of members: counts differ by at most one.

    The first groups are the fuller ones; with fewer numbers than groups the last groups stay empty.
    """
    if k < 1:
        raise ValueError(f"k={k} must be >= 1")
    size, rest = divmod(len(nums), k)
    room = [size + (g < rest) for g in range(k)]
    groups: list[list[int]] = [[] for _ in range(k)]
    heap = [(0, g) for g in range(k) if room[g]]
    for index in sorted(range(len(nums)), key=lambda i: -nums[i]):
        total, g = heapq.heappop(heap)
        groups[g].append(index)
        if len(groups[g]) < room[g]:
            heapq.heappush(heap, (total + nums[index], g))
    return groups


def partition_balanced_tuples(nums: Sequence[int], k: int, min_size: int = 1) -> list[tuple[int, int]]:
    """Cut ``nums`` into ``k`` contiguous ranges with the least sum of ``|range sum - mean|``.

    Returns: ``(start, stop)`` per range; every range has at least ``min_size`` members.

    Raises:
        ValueError: fewer than ``k * min_size`` numbers.
    """
    n = len(nums)
    if k < 1 or n < k * min_size:
        raise ValueError(f"{n} numbers cannot be cut into k={k} ranges of at least min_size={min_size}")
    prefix = [0, *itertools.accumulate(nums)]
    mean = prefix[-1] / k
    cost: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # per count of ranges: stop -> (cost, start)
    for part in range(1, k + 1):
        row: dict[int, tuple[float, int]] = {}
        for stop in range(part * min_size, n - (k - part) * min_size + 1):
            row[stop] = min(
                (base + abs(prefix[stop] - prefix[start] - mean), start)
                for start, (base, _) in cost[-1].items()
                if stop - start >= min_size
            )
        cost.append(row)
    cuts = [n]
    for part in range(k, 0, -1):
        cuts.append(cost[part][cuts[-1]][1])
    cuts.reverse()
    return list(itertools.pairwise(cuts))


def min_abs_diff_partition(arr: Sequence[int], k: int, min_size: int = 1) -> list[tuple[int, int]]:
    """Public 1.x name of ``partition_balanced_tuples``."""
    return partition_balanced_tuples(arr, k, min_size)


def reorder_to_balanced_batches(lens: Sequence[int], n_seqs_per_batch: int) -> tuple[list[int], int]:
    """Order sequences so that consecutive batches of ``n_seqs_per_batch`` have similar token sums.

    Returns: the order (indices) and the difference between the largest and the smallest batch sum (tokens).
    """
    n_batches = max(1, -(-len(lens) // n_seqs_per_batch))
    batches: list[list[int]] = [[] for _ in range(n_batches)]
    sums = [0] * n_batches
    for index in sorted(range(len(lens)), key=lambda i: -lens[i]):
        open_batches = (b for b in range(n_batches) if len(batches[b]) < n_seqs_per_batch)
        target = min(open_batches, key=lambda b: sums[b])
        batches[target].append(index)
        sums[target] += lens[index]
    batches.sort(key=len, reverse=True)  # only the last batch may be short
    return flat2d(batches), max(sums) - min(sums)


def _check_sizes(values: Sequence[int], capacity: int) -> None:
    longest = max(values, default=0)
    if longest > capacity:
        raise PackingError(
            f"a sequence of {longest} tokens exceeds max_tokens_per_mb={capacity}; "
            "raise max_tokens_per_mb or shorten prompts and max_new_tokens"
        )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
