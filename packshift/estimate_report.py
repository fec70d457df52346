"""A forecast of memory as text for people and as JSON for programs, beside the rule of thumb and the machine's limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from packshift.forecast_results import MB, Configuration, Forecast
from packshift.memory import Limits
from packshift.text import human_bytes

_SAFE_SHARE = 0.9
"""Above this share of what is available, a forecast counts as too close: an allocator's slack, another program."""

_FILES_PER_WORKER = 20
_FILES_PER_BATCH = 2


def estimate_json(forecast: Forecast, now: Limits, ranks: int) -> dict[str, Any]:
    return {
        **forecast.to_json(),
        "ranks": ranks,
        "all_ranks_mb": forecast.total * ranks / MB,
        "limits": _limits_json(now),
        "warnings": list(warnings(forecast, now, ranks)),
    }


def _limits_json(now: Limits) -> dict[str, Any]:
    in_mb = {
        f"{name}_mb": None if value is None else value / MB
        for name, value in asdict(now).items()
        if name != "open_files"
    }
    return {**in_mb, "open_files": now.open_files}


def estimate_text(forecast: Forecast, now: Limits, ranks: int, *, item_bytes: int, shape: Sequence[int] | None) -> str:
    configuration = forecast.configuration
    width = max(len(name) for name in forecast.terms)
    lines = [_title(configuration), ""]
    for name, value in forecast.terms.items():
        kind = "measured" if name in forecast.measured else "computed" if _is_computed(name) else "assumed"
        lines.append(f"  {name:<{width}}  {human_bytes(value):>10}  {kind}")
    lines.append(f"  {'total':<{width}}  {human_bytes(forecast.total):>10}")
    if ranks > 1:
        lines.append(f"  {f'{ranks} ranks':<{width}}  {human_bytes(forecast.total * ranks):>10}")
    if forecast.reclaimable:
        lines.append(
            f"  and up to {human_bytes(forecast.reclaimable)} of page cache (the store), which the kernel takes back when it "
            "is needed: it cannot get the job killed"
        )
    lines += ["", *_rule_of_thumb(configuration, item_bytes, shape), "", *_limit_lines(now)]
    found = list(warnings(forecast, now, ranks))
    lines += ["", *(f"warning: {warning}" for warning in found)] if found else []
    return "\n".join(lines)


def _title(configuration: Configuration) -> str:
    unit = "threads" if configuration.loader == "threads" else "workers"
    method = f", {configuration.start_method}" if configuration.start_method else ""
    pinned = ", pinned" if configuration.pin_memory else ""
    return (
        f"batch size {configuration.batch_size}, {configuration.num_workers} {unit}, prefetch factor "
        f"{configuration.prefetch_factor}, {configuration.loader}{method}{pinned}"
    )


def _is_computed(name: str) -> bool:
    return name in ("batches in shared memory", "batches ahead and in hand", "pinned copies", "page tables")


def _rule_of_thumb(configuration: Configuration, item_bytes: int, shape: Sequence[int] | None) -> Iterator[str]:
    """What is said in tutorials: pixels times batch size, for every worker."""
    batch = item_bytes * configuration.batch_size
    workers = max(1, configuration.num_workers)
    what = "x".join(map(str, shape)) if shape else "as loaded"
    yield "the rule of thumb, for comparison (it leaves out what waits in queues, and the processes themselves):"
    yield f"  a sample ({what}): {human_bytes(item_bytes)}; a worker's batch: {human_bytes(batch)}; " + (
        f"{workers} workers: {human_bytes(batch * workers)}"
    )


def _limit_lines(now: Limits) -> Iterator[str]:
    yield (
        f"this machine: {human_bytes(now.available)} available of {human_bytes(now.memory)}"
        + (
            f" (a control group's limit; the machine has {human_bytes(now.machine_memory)})"
            if now.memory < now.machine_memory
            else ""
        )
    )
    if now.shm_size is not None and now.shm_free is not None:
        yield f"  /dev/shm: {human_bytes(now.shm_free)} free of {human_bytes(now.shm_size)}"
    if now.address_space is not None:
        yield f"  address space per process (ulimit -v): {human_bytes(now.address_space)}"
    if now.open_files is not None:
        yield f"  open files per process (ulimit -n): {now.open_files:,}"


def warnings(forecast: Forecast, now: Limits, ranks: int) -> Iterator[str]:
    """What of the machine the configuration would not fit into, in words."""
    total = forecast.total * ranks
    if total > now.available:
        yield f"{human_bytes(total)} are more than the {human_bytes(now.available)} available: this will be killed"
    elif total > now.available * _SAFE_SHARE:
        yield f"{human_bytes(total)} are close to the {human_bytes(now.available)} available"
    shared = forecast.terms.get("batches in shared memory", 0) * ranks
    if now.shm_free is not None and shared > now.shm_free:
        yield (
            f"{human_bytes(shared)} of batches in shared memory do not fit into /dev/shm ({human_bytes(now.shm_free)} free); "
            "packshift's stores do not use it, other datasets do: a larger --shm-size for the container, or fewer workers"
        )
    configuration = forecast.configuration
    files = configuration.num_workers * (_FILES_PER_WORKER + _FILES_PER_BATCH * configuration.prefetch_factor)
    if configuration.loader == "dataloader" and now.open_files is not None and files > now.open_files:
        yield f"about {files:,} open files are more than the limit of {now.open_files:,} (ulimit -n)"
    largest = max(forecast.terms.get("main process", 0), forecast.batch_bytes)
    if now.address_space is not None and largest * 4 > now.address_space:
        yield (
            f"the address space of a process is limited to {human_bytes(now.address_space)} (ulimit -v), and torch maps "
            "several times the memory that it uses"
        )
