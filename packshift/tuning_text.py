"""What `packshift tune` prints."""

from __future__ import annotations

from packshift.forecast_results import MB, Choice, Tuning, TuningTrial
from packshift.text import human_bytes, human_time, printable
from packshift.tuning_search import describe

_HEADS = ("configuration", "peak MB", "busy", "iterations/s", "images/s", "")


def tuning_text(found: Tuning) -> str:
    """The table, the choice with its reason, notes, and the code to paste."""
    lines = [
        f"limit {human_bytes(found.memory_limit)} ({found.limit_source}), of which {found.headroom:.0%} are kept free",
        "",
        *_table(found),
        "",
    ]
    if found.choice is not None:
        lines += [f"choice: {_name(found.choice)}", f"  {printable(found.choice.reason)}"]
    lines += [f"note: {printable(note)}" for note in found.notes]
    lines.append(f"{len(found.trials)} trials in {human_time(found.seconds)}")
    if found.choice is not None:
        lines += ["", found.choice.code.rstrip("\n")]
    return "\n".join(lines)


def _name(choice: Choice) -> str:
    steps = f", accumulation over {choice.accumulation_steps}" if choice.accumulation_steps > 1 else ""
    return describe(choice.configuration) + steps


def _table(found: Tuning) -> list[str]:
    """Right-aligned columns, the choice marked; a failed trial has its reason at the end of its line."""
    rows = [_HEADS, *(_cells(trial, found) for trial in found.trials)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS) - 1)]
    return [_line(row, widths) for row in rows]


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False))]
    return "  ".join([*cells, row[-1]]).rstrip()


def _cells(trial: TuningTrial, found: Tuning) -> tuple[str, ...]:
    chosen = found.choice is not None and trial.configuration == found.choice.configuration
    too_much = (trial.peak_bytes or 0) > found.memory_limit * (1 - found.headroom)
    remark = "<- choice" if chosen else "over the limit less headroom" if too_much else ""
    return (
        describe(trial.configuration),
        "-" if trial.peak_bytes is None else f"{trial.peak_bytes / MB:,.0f}",
        "-" if trial.busy is None else f"{trial.busy:.0%}",
        "-" if trial.iterations_per_s is None else f"{trial.iterations_per_s:,.1f}",
        "-" if trial.images_per_s is None else f"{trial.images_per_s:,.0f}",
        remark if trial.error is None else printable(trial.error),
    )
