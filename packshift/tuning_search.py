"""Which configurations are worth a trial, and in which order: a walk that halves and doubles, not a grid.

It rests on three facts. Memory grows with batch size, workers and prefetch. Speed grows with workers until CPUs, the disk
or the consumer are at their limit, and then no more. A smaller batch is worth a look only where memory kept the larger
one from getting the workers that it needed. Nothing here measures: trials come from `measure`, so that the walk can be
tested on machines that are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from packshift.forecast_results import Configuration, TuningTrial

NOISE = 0.05
"""Speeds that differ by less than this share count as the same."""

MOST_TRIALS = 64
"""More than any walk has needed; a machine that answers at random must not keep it busy for ever."""

_ROUNDS = 3

DATALOADER = "dataloader"
THREADS = "threads"


@dataclass(frozen=True)
class Space:
    """What may be chosen: `batch_sizes` from the target down, `counts` of workers for each of the loaders, rising, from 1.

    `budget` is the memory in bytes that a choice may take at its peak. `prefetch_factor` None leaves that to the walk.
    With `working` the consumer does something with its batches, so it can be kept busy.
    """

    batch_sizes: tuple[int, ...]
    counts: Mapping[str, tuple[int, ...]]
    budget: int
    prefetch_factor: int | None = None
    start_method: str | None = None
    pin_memory: bool = False
    working: bool = False

    @property
    def loaders(self) -> tuple[str, ...]:
        return tuple(self.counts)

    def configuration(self, loader: str, count: int, batch_size: int) -> Configuration:
        return Configuration(
            batch_size=batch_size,
            num_workers=count,
            prefetch_factor=self.prefetch_factor or 2,
            loader=loader,
            start_method=self.start_method if loader == DATALOADER and count else None,
            pin_memory=self.pin_memory,
        )

    def fits(self, trial: TuningTrial | None) -> bool:
        """Whether a trial was measured and its peak leaves the headroom free."""
        return trial is not None and speed_of(trial) > 0 and (trial.peak_bytes or 0) <= self.budget


def describe(configuration: Configuration) -> str:
    """A configuration in a few words: "batch 64, 2 workers, prefetch 2"."""
    if configuration.loader == DATALOADER and not configuration.num_workers:
        return f"batch {configuration.batch_size}, no workers"
    noun = "thread" if configuration.loader == THREADS else "worker"
    ending = "" if configuration.num_workers == 1 else "s"
    return (
        f"batch {configuration.batch_size}, {configuration.num_workers} {noun}{ending}, "
        f"prefetch {configuration.prefetch_factor}"
    )


def halvings(target: int) -> tuple[int, ...]:
    """64 as 64, 32, 16, 8, 4, 2, 1."""
    return (target, *halvings(target // 2)) if target > 1 else (1,)


def doublings(most: int, *stops: int) -> tuple[int, ...]:
    """1, 2, 4 and so on up to `most`, with `most` itself and those of `stops` that are below it."""
    powers = {1 << power for power in range(most.bit_length())}
    return tuple(sorted({count for count in (*powers, *stops, most) if 1 <= count <= most}))


def speed_of(trial: TuningTrial) -> float:
    """Images/s, which compares batches of different sizes; 0 where there is no measurement."""
    return trial.images_per_s or 0.0 if trial.error is None else 0.0


def choose(trials: Sequence[TuningTrial], space: Space) -> TuningTrial | None:
    """The cheapest that is as fast as the fastest, of those that fit; None: none fits.

    Cheapest: fewest processes, then fewest batches to an optimizer's step, then least memory.
    """
    fitting = [trial for trial in trials if space.fits(trial)]
    if not fitting:
        return None
    enough = max(map(speed_of, fitting)) * (1 - NOISE)
    return min((trial for trial in fitting if speed_of(trial) >= enough), key=_cost)


def _cost(trial: TuningTrial) -> tuple[int, int, int, int]:
    configuration = trial.configuration
    processes = configuration.num_workers if configuration.loader == DATALOADER else 0
    return processes, -configuration.batch_size, trial.peak_bytes or 0, configuration.num_workers


class Search:
    """One walk through a space. `measure` runs a trial, `admits` says whether bounds leave room for a configuration."""

    def __init__(
        self,
        space: Space,
        measure: Callable[[Configuration], TuningTrial],
        admits: Callable[[Configuration], bool],
    ) -> None:
        self._space = space
        self._measure = measure
        self._admits = admits
        self._known: dict[Configuration, TuningTrial] = {}

    def run(self) -> None:
        """Make the trials. Those that are left unmade for want of room are as good as trials that do not fit."""
        start = self._largest_batch()
        if start is None:
            return
        cheapest = self._space.configuration(*self._first(), start)
        if not self._fed(self._known.get(cheapest)):
            self._walk(start)
        self._confirm()

    def _walk(self, start: int) -> None:
        open_loaders = dict.fromkeys(self._space.loaders, 1)  # the least count that is still worth a trial
        for batch_size in (size for size in self._space.batch_sizes if size <= start):
            for loader, least in list(open_loaders.items()):
                blocked, speed = self._grow(loader, batch_size, least)
                if blocked is None or not self._is_promising(loader, blocked, speed):
                    del open_loaders[loader]
                else:
                    open_loaders[loader] = blocked
        self._fewest()
        self._adjust_prefetch()

    def _first(self) -> tuple[str, int]:
        """The cheapest way to load: (loader, count)."""
        return (DATALOADER, 0) if DATALOADER in self._space.loaders else (THREADS, 1)

    def _is_promising(self, loader: str, blocked: int, speed: float) -> bool:
        """Whether all the workers at a smaller batch size could be the fastest, given the speed of those that fitted:
        at best, each of them adds as much."""
        best = self._best()
        fitted = blocked - 1
        return best is None or not speed or speed * self._space.counts[loader][-1] / fitted > speed_of(best)

    def _try(self, configuration: Configuration) -> TuningTrial | None:
        if configuration not in self._known:
            if len(self._known) >= MOST_TRIALS or self._is_beyond_a_failure(configuration):
                return None
            if not self._admits(configuration):
                return None
            self._known[configuration] = self._measure(configuration)
        return self._known[configuration]

    def _is_beyond_a_failure(self, configuration: Configuration) -> bool:
        """Whether something that takes less in every respect was already too much."""
        return any(
            (trial.over_limit or (trial.peak_bytes or 0) > self._space.budget)
            and tried.loader == configuration.loader
            and tried.batch_size <= configuration.batch_size
            and tried.num_workers <= configuration.num_workers
            and (tried.prefetch_factor <= configuration.prefetch_factor or not tried.num_workers)
            for tried, trial in self._known.items()
        )

    def _largest_batch(self) -> int | None:
        """By bisection, the largest batch size that fits with the cheapest way to load."""
        sizes = self._space.batch_sizes
        loader, count = self._first()

        def fits(position: int) -> bool:
            return self._space.fits(self._try_lean(loader, count, sizes[position]))

        if fits(0):
            return sizes[0]
        too_large, small = 0, len(sizes)
        while small - too_large > 1:
            middle = (small + too_large) // 2
            if fits(middle):
                small = middle
            else:
                too_large = middle
        return sizes[small] if small < len(sizes) else None

    def _try_lean(self, loader: str, count: int, batch_size: int) -> TuningTrial | None:
        """A trial with prefetch 2, and where that does not fit, with 1."""
        configuration = self._space.configuration(loader, count, batch_size)
        trial = self._try(configuration)
        if self._space.fits(trial) or not count or self._space.prefetch_factor is not None:
            return trial
        return self._try(replace(configuration, prefetch_factor=1))

    def _grow(self, loader: str, batch_size: int, least: int) -> tuple[int | None, float]:
        """More workers, doubling from `least`, as long as that pays.

        Returns (the count that did not fit although more speed was in sight or None, the best images/s).
        """
        counts = [count for count in self._space.counts[loader] if count >= least]
        tried: dict[int, TuningTrial | None] = {}
        blocked = None
        last = 0
        for count in counts:
            tried[count] = trial = self._try_lean(loader, count, batch_size)
            if not self._space.fits(trial):
                blocked = self._first_misfit(loader, batch_size, last if last else least - 1, count, tried)
                break
            gained = not last or _speed(trial) > _speed(tried[last]) * (1 + NOISE)
            last = count
            if self._fed(trial) or not gained:
                break
        return blocked, max((_speed(trial) for trial in tried.values() if self._space.fits(trial)), default=0.0)

    def _first_misfit(
        self, loader: str, batch_size: int, fitting: int, misfit: int, tried: dict[int, TuningTrial | None]
    ) -> int:
        while misfit - fitting > 1:
            middle = (fitting + misfit) // 2
            tried[middle] = trial = self._try_lean(loader, middle, batch_size)
            if self._space.fits(trial):
                fitting = middle
            else:
                misfit = middle
        return misfit

    def _fewest(self) -> None:
        """By bisection, the fewest workers that are as fast as those of the best so far."""
        best = self._best()
        if best is None:
            return
        chosen = best.configuration
        fitting = {
            trial.configuration.num_workers: speed_of(trial)
            for trial in self._known.values()
            if self._space.fits(trial)
            and (trial.configuration.loader, trial.configuration.batch_size) == (chosen.loader, chosen.batch_size)
        }
        enough = max(fitting.values()) * (1 - NOISE)
        many = min(count for count, speed in fitting.items() if speed >= enough)
        few = max((count for count in fitting if count < many), default=many - 1)
        while many - few > 1:
            middle = (many + few) // 2
            trial = self._try_lean(chosen.loader, middle, chosen.batch_size)
            if self._space.fits(trial) and _speed(trial) >= enough:
                many = middle
            else:
                few = middle

    def _fed(self, trial: TuningTrial | None) -> bool:
        """Whether the consumer is so busy that no loader could make it faster."""
        return self._space.working and trial is not None and (trial.busy or 0.0) >= 1 - NOISE

    def _confirm(self) -> None:
        """Measure the choice and the fastest once more, and what takes their place, if something does.

        What else runs on the machine makes a trial slow, never fast, and most of all the fastest of many is measured
        fast by luck. `measure` merges what it finds: the higher speed, the higher peak, and any error.
        """
        confirmed: set[Configuration] = set()
        for _ in range(_ROUNDS):
            best = self._best()
            if best is None:
                return
            fitting = [trial for trial in self._known.values() if self._space.fits(trial)]
            doubtful = {best.configuration, max(fitting, key=speed_of).configuration} - confirmed
            for configuration in sorted(doubtful, key=lambda one: (one.num_workers, one.batch_size)):
                self._known[configuration] = self._measure(configuration)
            confirmed |= doubtful

    def _adjust_prefetch(self) -> None:
        """Shorter queues where they save memory worth having; longer ones where a consumer waits although it has work."""
        best = self._best()
        if best is None or self._space.prefetch_factor is not None:
            return
        chosen = best.configuration
        if chosen.loader == DATALOADER and not chosen.num_workers:
            return
        if self._space.working and not self._fed(best):
            longer = self._try(replace(chosen, prefetch_factor=4))
            if self._space.fits(longer) and _speed(longer) > speed_of(best) * (1 + NOISE):
                self._try(replace(chosen, prefetch_factor=3))
                return
        if chosen.prefetch_factor > 1 and (best.peak_bytes or 0) > self._space.budget / 4:
            self._try(replace(chosen, prefetch_factor=1))

    def _best(self) -> TuningTrial | None:
        return choose(list(self._known.values()), self._space)


def _speed(trial: TuningTrial | None) -> float:
    return 0.0 if trial is None else speed_of(trial)
