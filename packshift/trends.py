"""Rates of change that a single odd value does not bend, and whether a growth is steady."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import fmean, median

_MOST_POINTS = 60  # 1,770 pairs, a millisecond

Points = Sequence[tuple[float, float]]


def slope(points: Points) -> float:
    """Change per unit of time: the median slope of all pairs of points (Theil 1950, Sen 1968).

    Up to 29 % of the points may be anything without deciding it. More than 60 points are first averaged to 60.
    """
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(_thinned(points), 2) if x2 > x1]
    return median(slopes) if slopes else 0.0


def steady_growth(points: Points, least_step: float = 0.5) -> float:
    """Growth from the median of the first quarter of the points to that of the last, if it is steady; else 0.

    Steady: each quarter is above the one before by at least half (`least_step`) of the mean step. One jump, a saw's
    teeth, and a growth that levels off, as all do that fill queues and caches, are not.
    """
    if len(points) < 8:
        return 0.0
    quarters = [points[len(points) * part // 4 : len(points) * (part + 1) // 4] for part in range(4)]
    levels = [median(y for _, y in quarter) for quarter in quarters]
    growth = levels[-1] - levels[0]
    steps = [later - earlier for earlier, later in pairwise(levels)]
    return growth if growth > 0 and min(steps) >= least_step * growth / 3 else 0.0


def _thinned(points: Points) -> Points:
    if len(points) <= _MOST_POINTS:
        return points
    cuts = [len(points) * part // _MOST_POINTS for part in range(_MOST_POINTS + 1)]
    bins = [points[first:last] for first, last in pairwise(cuts)]
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in bins]
