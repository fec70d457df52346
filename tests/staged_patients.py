"""Trainings with one fault each, and a healthy one, watched by the real command: what is named, and after how long?

    python tests/staged_patients.py [leak starving dying healthy] [--seconds 30] [--interval 1]

Exit code 1 where a fault is not named within the time, or something is named that is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

EXPECTED = {"leak": "leak", "starving": "starving", "dying": "worker-died", "healthy": None}


def patient(kind: str) -> None:
    """A training that never ends by itself, with two workers as most have."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    torch.set_num_threads(1)

    class Numbers(Dataset):
        def __init__(self, count: int, *, seconds: float = 0.0, kill_after: float | None = None) -> None:
            self.count, self.seconds = count, seconds
            self.kill_at = None if kill_after is None else time.monotonic() + kill_after

        def __len__(self) -> int:
            return self.count

        def __getitem__(self, index: int) -> torch.Tensor:
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
            worker = torch.utils.data.get_worker_info()
            if self.kill_at is not None and worker.id == 0 and time.monotonic() > self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.full((3, 64, 64), float(index))

    def batches(dataset: Numbers) -> Iterator[torch.Tensor]:
        while True:
            yield from DataLoader(dataset, batch_size=8, num_workers=2)

    print("ready", flush=True)
    if kind == "leak":
        kept = []
        for _ in batches(Numbers(100_000)):
            kept.append(b"x" * 1_000_000)
            time.sleep(0.2)
    elif kind == "starving":
        for batch in batches(Numbers(100_000, seconds=0.02)):
            batch.mean()
    elif kind == "dying":
        while True:
            try:
                for _ in batches(Numbers(100_000, kill_after=6.0)):
                    time.sleep(0.02)
            except RuntimeError as error:
                print(f"starting again after: {error}", file=sys.stderr)
    else:
        for batch in batches(Numbers(800, seconds=0.0005)):  # 100 batches: new workers every 5 s
            batch.repeat(50, 1, 1, 1).mean()
            time.sleep(0.05)


def watch(kind: str, seconds: float, interval: float) -> dict[str, float]:
    """What the command names, and after how many seconds of watching."""
    training = subprocess.Popen(
        [sys.executable, __file__, "--be", kind], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    command = [sys.executable, "-m", "packshift", "watch", str(training.pid), "--interval", str(interval), "--json"]
    try:
        training.stdout.readline()
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        named: dict[str, float] = {}
        began = time.monotonic()
        for line in watching.stdout:
            document = json.loads(line)
            for warning in document["warnings"]:
                if warning["name"] not in named:
                    named[warning["name"]] = document["elapsed_s"]
                    print(f"  after {document['elapsed_s']:.1f} s: {warning['text']}", flush=True)
            if time.monotonic() - began > seconds or EXPECTED[kind] in named:
                break
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=30)
        assert watching.returncode == 0, watching.returncode
        return named
    finally:
        training.kill()
        training.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("patients", nargs="*", choices=[*EXPECTED, []], default=[])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--be", choices=EXPECTED, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        patient(options.be)
        return
    wrong = 0
    for kind in options.patients or EXPECTED:
        print(f"{kind}:", flush=True)
        named = watch(kind, options.seconds, options.interval)
        expected = EXPECTED[kind]
        right = set(named) == ({expected} if expected else set())
        wrong += not right
        told = ", ".join(f"{name} after {after:.1f} s" for name, after in named.items()) or "nothing"
        print(f"  named: {told}{'' if right else ' - WRONG'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
