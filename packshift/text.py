"""Words and numbers for people. Imports nothing, so that an error can always be told."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """1,234,567 as "1.2 MB": powers of 1,000, as disks and `ls --si` count."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} bytes" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def human_rate(bytes_per_second: float) -> str:
    """A change over time, with its sign, per minute: 20,000 as "+1.2 MB/min"."""
    per_minute = bytes_per_second * 60
    return f"{'-' if per_minute < 0 else '+'}{human_bytes(abs(per_minute))}/min"


def human_time(seconds: float) -> str:
    """75.2 as "1 min 15 s": two units at most."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    days, hours, minutes = whole // 86_400, whole // 3600 % 24, whole // 60 % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (whole % 60, "s")]
    first = next((index for index, (value, _) in enumerate(parts) if value), len(parts) - 1)
    return " ".join(f"{value} {unit}" for value, unit in parts[first : first + 2] if value)


def counted(count: int, noun: str) -> str:
    """1 and "class" as "1 class", 2 as "2 classes"."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def printable(name: str) -> str:
    """A file name fit for any terminal: line breaks, control characters and bytes that are not UTF-8 escaped."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in name)
