"""The benchmark: cases in processes of their own, cases that die, the verdict."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from bench_values import make_bench
from bench_values import make_row as shown_row
from click.testing import CliRunner
from helpers import formula_picture, make_folder, save

from packshift import (
    ImageFolderDataset,
    bench,
    benchmarking,
    cli,
    convert,
    fitting,
    isolation,
    one_thread,
    open_dataset,
    preprocess,
    trial,
)
from packshift.bench_html import bench_html
from packshift.bench_report import bench_text
from packshift.bench_results import Row
from packshift.bench_sources import Place, Prepared
from packshift.bench_verdict import growth_noise_mb, notes_on, notes_on_growth, verdict_of
from packshift.benchmarking import default_num_workers
from packshift.errors import PackshiftError, SourceError, UsageError
from packshift.isolation import LOADERS, Trial, run_trial
from packshift.one_thread import OneThread, pass_over_pictures, pass_over_store
from packshift.pagecache import drop, resident_share, warm
from packshift.stores._reader import Reader
from packshift.trial import EndlessSampler, measure

QUICK = {"repeats": 1, "seconds": 0.05, "num_workers": [0], "batch_size": 4, "size": 32}


def made_row(format: str, num_workers: int, speed: float | None, **values: object) -> Row:
    facts = {
        "store_mb": 100.0 if format == "jpeg" else 200.0,
        "convert_s": None if format == "jpeg" else 10.0,
        **values,
    }
    return Row(
        format=format,
        loader="dataloader",
        num_workers=num_workers,
        batch_size=64,
        prefetch_factor=None,
        start_method=None,
        cold=False,
        error=None if speed else "died",
        images_per_s=speed,
        **facts,
    )


def prepared(images: int = 1000, source_images: int = 10_000) -> Prepared:
    return Prepared({"jpeg": Place("x", 100.0, None)}, images, source_images, [], True)


class TestVerdict:
    def test_the_cheapest_within_noise_of_the_fastest(self) -> None:
        rows = [
            made_row("jpeg", 2, 500),
            made_row("lmdb", 0, 9500, store_mb=201),
            made_row("hdf5", 0, 9400, store_mb=200),
            made_row("hdf5", 2, 10_000, store_mb=200),
            made_row("lmdb", 4, 8000),
        ]
        verdict = verdict_of(rows, prepared())
        assert verdict is not None
        assert (verdict.row.format, verdict.row.num_workers) == ("hdf5", 0)
        assert "94% of the fastest (hdf5, dataloader, 2 workers, 10,000)" in verdict.reason
        assert "18.8 times the best of the pictures themselves" in verdict.reason
        assert verdict.disk_mb == 2000
        assert verdict.convert_s == 100
        saved_per_epoch = 10_000 / 500 - 10_000 / 9400
        assert verdict.epochs_to_pay_back == pytest.approx(100 / saved_per_epoch)

    def test_pictures_win_where_stores_gain_nothing(self) -> None:
        verdict = verdict_of([made_row("jpeg", 0, 1000), made_row("lmdb", 0, 1050)], prepared())
        assert verdict is not None
        assert verdict.row.format == "jpeg"
        assert verdict.epochs_to_pay_back is None

    def test_there_is_none_where_nothing_was_measured(self) -> None:
        assert verdict_of([made_row("lmdb", 0, None)], prepared()) is None

    def test_notes_say_what_limits(self) -> None:
        rows = [made_row("jpeg", 2, 500, limit_fraction=0.9, checksum="a"), made_row("lmdb", 0, 9000, checksum="b")]
        notes = " ".join(notes_on(rows, cold=False, step=False))
        assert "they reach 90% of decoding alone" in notes
        assert "did not load the same pixels" in notes
        close = " ".join(notes_on([made_row("jpeg", 0, 500), made_row("lmdb", 0, 600)], cold=False, step=False))
        assert "there is little to win" in close
        assert "stay with the pictures" not in close
        equal = " ".join(notes_on([made_row("jpeg", 0, 590), made_row("lmdb", 0, 600)], cold=False, step=False))
        assert "there is little to win: the pictures load about as fast as the stores; stay with the pictures" in equal

    @pytest.mark.parametrize(
        ("format", "milliseconds", "words"),
        [
            (
                "jpeg",
                (0.1, 1.4, 0.4, 0.1),
                "jpeg: decoding is 70% and converting 20% of the time of a picture in one thread",
            ),
            (
                "jpeg",
                (3.0, 0.5, 0.4, 0.1),
                "jpeg: reading is 75% of the time of a picture in one thread: a store is one file",
            ),
            (
                "jpeg",
                (0.1, 0.1, 0.2, 0.6),
                "jpeg: transfer is 60% of the time of a picture in one thread: a store hands",
            ),
            (
                "lmdb",
                (0.3, None, None, 0.1),
                "lmdb: reading is 75% of the time of a picture in one thread: smaller",
            ),
            (
                "lmdb",
                (0.1, None, None, 0.3),
                "lmdb: transfer is 75% of the time of a picture in one thread: larger",
            ),
        ],
    )
    def test_notes_say_where_the_time_goes(
        self, format: str, milliseconds: tuple[float | None, ...], words: str
    ) -> None:
        rows = [made_row(format, 0, 500, **split(*milliseconds)), made_row(format, 2, 900)]
        (note,) = [note for note in notes_on(rows, cold=False, step=False) if note.startswith(f"{format}: ")]
        assert note.startswith(words)

    def test_stores_are_advised_only_where_they_gain(self) -> None:
        pictures = made_row("jpeg", 0, 500, busy=0.95, **split(0.1, 1.4, 0.4, 0.1))
        gain = list(notes_on([pictures, made_row("lmdb", 0, 9000)], cold=False, step=False))
        assert gain[-1].endswith("one thread: a store saves both")
        assert not any("of decoding alone" in note for note in gain)
        none = list(notes_on([pictures, made_row("lmdb", 0, 510)], cold=False, step=False))
        assert none[-1].endswith("of the time of a picture in one thread")
        busy = list(notes_on([pictures], cold=False, step=True))
        assert busy[-2].endswith("of the time of a picture in one thread")
        assert busy[-1].startswith("where the consumer is busy")


def split(
    read: float | None, decode: float | None, convert: float | None, transfer: float | None
) -> dict[str, float | None]:
    return {"read_ms": read, "decode_ms": decode, "convert_ms": convert, "transfer_ms": transfer}


class TestWhereTheTimeGoes:
    """What takes long is seen in its own stage."""

    @pytest.fixture(autouse=True)
    def threads_as_before(self) -> Iterator[None]:
        threads = torch.get_num_threads()
        yield
        torch.set_num_threads(threads)

    def stages(self, found: OneThread) -> dict[str, float]:
        stages = {name: getattr(found, f"{name}_ms") for name in ("read", "decode", "convert", "transfer")}
        return {name: value for name, value in stages.items() if value is not None}

    @pytest.mark.parametrize(
        ("stage", "module", "name"),
        [
            ("read", preprocess, "encode_name"),
            ("decode", preprocess, "memory_of_jpeg"),
            ("convert", fitting, "_place"),
            ("transfer", one_thread, "touch"),
        ],
    )
    def test_of_pictures(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, module: ModuleType, name: str
    ) -> None:
        save(tmp_path / "a" / "1.jpg", formula_picture(20, 30), "JPEG")
        dataset = ImageFolderDataset(tmp_path, size=16)
        monkeypatch.setattr(module, name, slow(getattr(module, name)))
        found = pass_over_pictures(dataset, EndlessSampler(1, 0), 0.01, 1)
        stages = self.stages(found)
        assert max(stages, key=lambda name: stages[name]) == stage
        assert stages[stage] >= 1000 * DELAY
        alone = sum(value for name, value in stages.items() if name != "transfer")
        assert found.limit_images_per_s == pytest.approx(1000 / alone)

    @pytest.mark.parametrize(("stage", "name"), [("read", "_gathered"), ("transfer", "DataLoader")])
    def test_of_stores(self, store: Path, monkeypatch: pytest.MonkeyPatch, stage: str, name: str) -> None:
        make = getattr(one_thread, name)
        monkeypatch.setattr(one_thread, name, lambda *args, **options: slow_batches(make(*args, **options)))
        found = pass_over_store(open_dataset(store), EndlessSampler(4, 0), 0.01, 2)
        stages = self.stages(found)
        assert list(stages) == ["read", "transfer"]
        assert max(stages, key=lambda name: stages[name]) == stage
        assert stages[stage] >= 1000 * DELAY / 2 - stages["read"] * (stage == "transfer")
        assert found.limit_images_per_s == pytest.approx(1000 / found.read_ms)

    def test_a_loader_that_is_faster_than_a_bare_gather_takes_no_time(
        self, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make = one_thread._gathered
        monkeypatch.setattr(one_thread, "_gathered", lambda *args: slow_batches(make(*args)))
        assert pass_over_store(open_dataset(store), EndlessSampler(4, 0), 0.01, 2).transfer_ms == 0

    def test_clocks_change_no_pixels(self, folder: Path) -> None:
        plain, clocked = ImageFolderDataset(folder, size=32), ImageFolderDataset(folder, size=32)
        laps: list[str] = []
        clocked._lap = laps.append
        assert np.array_equal(plain[3][0], clocked[3][0])
        assert laps == ["start", "read", "decode", "convert"]

    def test_a_table_shows_it(self) -> None:
        rows = [
            shown_row("jpeg", 0, **split(0.0512, 1.45, 0.9, 0.1488)),
            shown_row("lmdb", 0, **split(0.03, None, None, 0.01)),
            shown_row("lmdb", 2),
        ]
        text = bench_text(make_bench(*rows))
        (table,) = [part.splitlines() for part in text.split("\n\n") if part.startswith("where the time goes")]
        assert max(map(len, table)) <= 100
        assert table[0] == "where the time goes, ms per picture, one thread"
        assert table[1].split() == ["format", "read", "decode", "convert", "transfer", "in", "all"]
        assert table[2].split() == ["jpeg", "0.051", "(2%)", "1.45", "(57%)", "0.900", "(35%)", "0.149", "(6%)", "2.55"]
        assert table[3].split() == ["lmdb", "0.030", "(75%)", "-", "-", "0.010", "(25%)", "0.040"]
        assert table[4].startswith("read: ")
        assert len({len(line) for line in table[1:4]}) == 1
        assert "where the time goes" not in bench_text(make_bench())

    def test_so_does_the_page(self) -> None:
        page = bench_html(make_bench(shown_row("jpeg", 0, **split(0.0512, 1.45, 0.9, 0.1488))))
        assert "<h2>Where the time goes, ms per picture, one thread</h2>" in page
        assert "<td>1.45 (57%)</td>" in page
        assert "Where the time goes" not in bench_html(make_bench())


class TestGrowth:
    """Memory that a longer run would run out of is seen in a short one, as far as it is more than noise."""

    def grown(self, folder: Path, monkeypatch: pytest.MonkeyPatch, loader: str, leak: int) -> trial.Result:
        kept = []

        def keep(image: torch.Tensor) -> torch.Tensor:
            kept.append(np.ones(leak, np.uint8))
            return image

        dataset = ImageFolderDataset(folder, size=32, transform=keep)
        monkeypatch.setattr(trial, "open_trial_dataset", lambda told: dataset)
        told = Trial(str(folder), loader, batch_size=4, num_workers=int(loader == "threads"), growth=True)
        return measure(replace(told, seconds=0.001, batches=6))

    @pytest.mark.parametrize("loader", LOADERS)
    def test_a_leak(self, folder: Path, monkeypatch: pytest.MonkeyPatch, loader: str) -> None:
        found = self.grown(folder, monkeypatch, loader, leak=2_000_000)
        assert found.growth_mb is not None
        assert found.growth_mb > 30
        assert found.growth_mb_per_1k == pytest.approx(2000, rel=0.5)  # threads leak ahead

    def test_no_leak(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.grown(folder, monkeypatch, "dataloader", leak=0)
        assert found.growth_mb is not None
        assert abs(found.growth_mb) < growth_noise_mb(made_row("lmdb", 0, 1))

    def test_is_not_looked_for_unless_asked(self, folder: Path) -> None:
        assert measure(Trial(str(folder), batch_size=4, size=(32, 32), seconds=0.001)).growth_mb is None

    @pytest.mark.parametrize(("workers", "taken"), [(0, 0), (3, 9)])
    def test_what_workers_make_while_memory_is_looked_at_does_not_count(
        self, monkeypatch: pytest.MonkeyPatch, workers: int, taken: int
    ) -> None:
        clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

        def look() -> int:
            clock.now += 1.0
            return 7

        def batches() -> Iterator[list[torch.Tensor]]:
            for _ in range(100):
                clock.now += 0.125
                yield [torch.zeros(2, 3, 8, 8, dtype=torch.uint8)]

        monkeypatch.setattr(trial, "time", clock)
        monkeypatch.setattr(trial, "_unreclaimable", look)
        told = Trial("", num_workers=workers, growth=True)
        assert trial._look(told, batches(), lambda batch: 0.0, trial._WarmUp(0.0)) == trial._Before(7, 2 * taken)

    def test_a_case_has_its_least_growth(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(benchmarking, "trial_process", FakeProcesses().start)
        found = bench(folder, formats=["jpeg"], **{**QUICK, "repeats": 3})
        (row,) = found.rows
        assert (row.growth_mb, row.growth_mb_per_1k) == (1.0, 2.0)

    def test_a_warning_says_what_an_epoch_would_take(self) -> None:
        figures = {"mb_per_s": 196.6, "batches_per_s": 15.625}  # 12.6 MB a batch
        quiet = made_row("lmdb", 2, 1000, growth_mb=62.0, growth_mb_per_1k=62.0, **figures)
        assert growth_noise_mb(quiet) == pytest.approx(3 * 4 + 2 * 2 * 12.58, rel=0.01)
        pictures = made_row("jpeg", 2, 1000, growth_mb=240.0, growth_mb_per_1k=240.0, **figures)
        failed = made_row("lmdb", 4, None)
        assert not list(notes_on_growth([quiet, pictures, failed], 1_281_167))
        loud = made_row("lmdb", 0, 1000, growth_mb=20.0, growth_mb_per_1k=10.0, **figures)
        (note,) = notes_on_growth([quiet, loud, failed], 1_281_167)
        assert note == (
            "memory grows with lmdb, dataloader, 0 workers: 10.0 MB per 1,000 pictures, which over an epoch of 1,281,167 "
            "pictures would be 12.8 GB; a longer run (--seconds, --epochs) tells whether it goes on"
        )
        louder = made_row("jpeg", 2, 1000, growth_mb=250.0, growth_mb_per_1k=250.0, **figures)
        (note,) = notes_on_growth([loud, louder], 1000)
        assert note.startswith("memory grows with jpeg, dataloader, 2 workers (and 1 other case): 250.0 MB per 1,000")

    def test_it_is_among_the_notes(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        processes = FakeProcesses(growth_mb=500.0)
        monkeypatch.setattr(benchmarking, "trial_process", processes.start)
        found = bench(folder, formats=["jpeg"], **QUICK)
        assert any(note.startswith("memory grows with jpeg") and "of 12 pictures" in note for note in found.notes)
        assert all(trial.growth for _, trial in processes.log)


class TestEpochs:
    def test_a_run_takes_that_many_passes_at_least(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        processes = FakeProcesses()
        monkeypatch.setattr(benchmarking, "trial_process", processes.start)
        found = bench(folder, formats=["jpeg"], epochs=3, **{**QUICK, "batch_size": 5})
        ((_, told),) = processes.log
        assert told.batches == 8  # 36 pictures
        assert found.settings["epochs"] == 3
        assert benchmarking._timeout(told) >= benchmarking._timeout(replace(told, batches=None)) + 36 / 5
        assert measure(replace(told, seconds=0.001, limit=False, growth=False)).images == 40


DELAY = 0.05


def slow(function: Callable[..., Any]) -> Callable[..., Any]:
    def slowed(*args: Any, **options: Any) -> Any:
        time.sleep(DELAY)
        return function(*args, **options)

    return slowed


def slow_batches(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        time.sleep(DELAY)
        yield batch


class TestIsolation:
    """A trial that crashes, hangs or takes too much is an answer, and leaves no process behind."""

    def run(self, monkeypatch: pytest.MonkeyPatch, code: str, **options: float) -> isolation.Ended:
        monkeypatch.setattr(isolation, "_START", code)
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        ended = run_trial(Trial("nowhere"), **{"timeout": 30.0, **options})
        left = {child.pid for child in psutil.Process().children(recursive=True)} - before
        assert not left
        return ended

    def test_a_signal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ended = self.run(monkeypatch, "import os, sys; print('last words', file=sys.stderr); os.kill(os.getpid(), 11)")
        assert ended.error == "killed by SIGSEGV: last words"
        assert ended.result is None

    def test_a_hang_with_a_child(self, monkeypatch: pytest.MonkeyPatch) -> None:
        started = time.monotonic()
        child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
        code = f"import subprocess, sys, time; {child}; time.sleep(60)"
        assert self.run(monkeypatch, code, timeout=1.0).error == "no result after 1 s"
        assert time.monotonic() - started < 20

    def test_names_in_dev_shm(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """As those of queues to spawned workers, which multiprocessing's resource tracker removes."""
        code = (
            "import multiprocessing, time; lock = multiprocessing.get_context('spawn').Lock(); "
            "open('NAME', 'w').write(lock._semlock.name); time.sleep(60)"
        )
        made = tmp_path / "name"
        code = code.replace("NAME", str(made))
        assert self.run(monkeypatch, code, timeout=2.0).error == "no result after 2 s"
        assert not os.path.exists(f"/dev/shm/sem.{made.read_text().lstrip('/')}")

    def test_too_much_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        code = "import time; hog = bytearray(b'x') * 300_000_000; time.sleep(60)"
        ended = self.run(monkeypatch, code, memory_limit=150_000_000)
        assert ended.over_limit
        assert ended.error is not None
        assert ended.error.startswith("needs more than 150 MB: ")
        assert ended.peak_bytes is not None
        assert ended.peak_bytes > 150_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("bench") / "my pictures", ["a", "b"], 6)


def test_all_formats_with_the_same_pixels(folder: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    found = bench(folder, step_ms=5, progress=lambda *step: seen.append(step), **QUICK)
    assert [row.format for row in found.rows] == ["jpeg", "hdf5", "lmdb"]
    assert [row.error for row in found.rows] == [None] * 3
    assert len({row.checksum for row in found.rows}) == 1
    for row in found.rows:
        assert row.images_per_s is not None
        assert row.images_per_s > 0
        assert row.limit_images_per_s is not None
        assert row.main_rss_mb is not None
        assert row.main_uss_mb is not None
        assert row.total_mb is not None
        assert row.main_rss_mb >= row.main_uss_mb > 10
        assert row.worker_uss_mb is None
        stages = ["read", "decode", "convert", "transfer"] if row.format == "jpeg" else ["read", "transfer"]
        assert list(row.stages) == stages
        assert (row.convert_s is None) == (row.format == "jpeg")
        assert row.busy is not None
        assert (0 if row.format == "jpeg" else 0.5) < row.busy <= 1
    assert found.images == found.source_images == 12
    assert found.verdict is not None
    assert [step[0] for step in seen] == list(range(4))
    assert seen[-1][:2] == (3, 3)
    assert not any("same pixels" in note for note in found.notes)
    assert json.loads(json.dumps(found.to_json()))["rows"][0]["format"] == "jpeg"


def test_workers_have_memory_of_their_own(folder: Path) -> None:
    found = bench(folder, formats=["lmdb"], **{**QUICK, "num_workers": [2]}, start_method="spawn")
    (row,) = found.rows
    assert row.error is None
    assert row.start_method == "spawn"
    assert row.worker_rss_mb is not None
    assert row.worker_pss_mb is not None
    assert row.worker_uss_mb is not None
    assert row.total_mb is not None
    assert row.worker_rss_mb > row.worker_pss_mb > row.worker_uss_mb > 10
    assert row.total_mb > 2 * row.worker_uss_mb
    assert list(row.stages) == ["read", "transfer"]


@dataclass
class FakeProcesses:
    """Trial processes that measure nothing; `alive` are those that have not ended, `log` which of how many ran what."""

    dies: str = "none"
    growth_mb: float | None = None
    alive: list[object] = field(default_factory=list)
    log: list[tuple[int, Trial]] = field(default_factory=list)

    @contextmanager
    def start(self) -> Iterator[FakeProcesses]:
        token = object()
        self.alive.append(token)
        yield self
        self.alive = [other for other in self.alive if other is not token]

    def wait_until_ready(self, timeout: float) -> None:
        pass

    def run(self, trial: Trial, *, timeout: float) -> isolation.Ended:
        self.log.append((len(self.alive), trial))
        self.alive.pop()
        if trial.path.endswith(self.dies):
            return isolation.Ended(None, "killed by SIGKILL: DataLoader worker is killed by signal: Bus error", None)
        number = float(len(self.log))
        figures = {**dict.fromkeys(benchmarking._MEASURED, number), "growth_mb": self.growth_mb or number}
        return isolation.Ended(
            {**figures, "limit_images_per_s": 1.0 if trial.limit else None, "checksum": "0"}, None, 0
        )


def test_a_format_whose_library_is_missing_is_a_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarking, "trial_process", FakeProcesses().start)
    monkeypatch.setitem(sys.modules, "h5py", None)
    found = bench(folder, **QUICK)
    errors = {row.format: row.error for row in found.rows}
    assert (errors["jpeg"], errors["lmdb"]) == (None, None)
    assert str(errors["hdf5"]).startswith("its library is missing: ")
    text = bench_text(found)
    assert "failed: its library is missing" in " ".join(text.split())
    assert "hdf5            0.0 MB" not in text


def test_a_case_that_dies_is_a_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarking, "trial_process", FakeProcesses("lmdb").start)
    found = bench(folder, formats=["jpeg", "lmdb"], **QUICK)
    assert [row.error for row in found.rows] == [
        None,
        "killed by SIGKILL: DataLoader worker is killed by signal: Bus error",
    ]
    assert found.verdict is not None
    assert found.verdict.row.format == "jpeg"


@pytest.mark.parametrize("cases", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_memory_is_read_where_no_other_trial_is_alive(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cases: int, repeats: int
) -> None:
    processes = FakeProcesses()
    monkeypatch.setattr(benchmarking, "trial_process", processes.start)
    monkeypatch.setattr(benchmarking, "usable_cpus", lambda: 2)
    options = {**QUICK, "repeats": repeats, "num_workers": range(cases)}
    found = bench(folder, formats=["jpeg"], **options)
    alone = {
        workers: [
            float(number)
            for number, (alive, trial) in enumerate(processes.log, 1)
            if alive == 1 and trial.num_workers == workers
        ]
        for workers in range(cases)
    }
    assert len(processes.log) == cases * repeats
    assert max(alive for alive, _ in processes.log) == min(repeats, 2)
    for row in found.rows:
        assert row.main_uss_mb == statistics.median(alone[row.num_workers])
        assert len(row.images_per_s_runs) == repeats
    assert [trial.num_workers for _, trial in processes.log if trial.limit] == [0] * repeats


def test_two_processes_import_before_one_measures(folder: Path) -> None:
    """The one that ends with an exception leaves the other alone."""
    with isolation.trial_process() as first, isolation.trial_process() as second:
        first.wait_until_ready(60)
        second.wait_until_ready(60)
        ended = first.run(Trial("no such store.lmdb"), timeout=60)
        assert ended.error is not None
        assert "ended with exit code 1: packshift.errors.StoreError: no such store.lmdb: cannot open" in ended.error
        ended = second.run(Trial(str(folder), batch_size=4, size=(32, 32), seconds=0.01), timeout=60)
        assert ended.error is None
        assert ended.result is not None


def test_ctrl_c_returns_what_is_finished(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarking, "trial_process", FakeProcesses().start)

    def stop(done: int, total: int, what: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    found = bench(folder, formats=["jpeg"], progress=stop, **QUICK)
    assert [row.format for row in found.rows] == ["jpeg"]
    assert found.notes[0].startswith("interrupted")


def test_stores_that_are_there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = FakeProcesses()
    monkeypatch.setattr(benchmarking, "trial_process", processes.start)
    convert(folder, tmp_path / "mine.lmdb", size=32)
    found = bench(tmp_path / "mine.lmdb", step_ms=5, **QUICK)
    (row,) = found.rows
    assert (row.format, row.convert_s) == ("lmdb", None)
    assert [(trial.path, trial.step_ms) for _, trial in processes.log] == [(str(tmp_path / "mine.lmdb"), 5)]


def test_a_sample_is_spread_over_the_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []

    class Looking(FakeProcesses):
        def run(self, trial: Trial, *, timeout: float) -> isolation.Ended:
            paths.extend(Reader(trial.path).paths)
            return super().run(trial, timeout=timeout)

    monkeypatch.setattr(benchmarking, "trial_process", Looking().start)
    found = bench(folder, formats=["lmdb"], images=5, **QUICK)
    assert (found.images, found.source_images) == (5, 12)
    assert "measured on 5 of 12 pictures, evenly spread" in found.notes
    assert paths == ["a/0000.jpg", "a/0002.jpg", "a/0004.jpg", "b/0001.jpg", "b/0003.jpg"]


def test_cold(folder: Path) -> None:
    found = bench(folder, formats=["lmdb"], cold=True, **QUICK)
    (row,) = found.rows
    assert row.error is None
    assert row.cold
    assert row.resident_before is not None
    assert row.stages == {}
    assert any(note.startswith("cold:") for note in found.notes)


def test_pages_are_dropped_and_that_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert resident_share([path]) == 1.0
    drop(path)
    kept = resident_share([path])
    on_disk = os.stat(path).st_dev not in {os.stat(mount).st_dev for mount in ("/dev/shm",) if os.path.exists(mount)}
    assert kept == 0.0 or not on_disk
    assert not warm([path], 1 << 19, 10.0)
    assert warm([path], 1 << 20, 10.0)
    assert resident_share([path]) == 1.0
    assert resident_share([]) == 0.0


@pytest.mark.parametrize(("cpus", "counts"), [(1, (0, 1)), (2, (0, 1, 2)), (6, (0, 1, 2, 4)), (8, (0, 1, 2, 4, 8))])
def test_default_workers(cpus: int, counts: Sequence[int]) -> None:
    assert default_num_workers(cpus) == counts


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"formats": ["zip"]}, "unknown format 'zip': expected some of jpeg, hdf5, lmdb"),
            ({"formats": []}, "no formats"),
            ({"loader": "fast"}, "unknown loader 'fast': expected one of dataloader, threads, both"),
            ({"num_workers": [-1]}, "num_workers .*expected numbers from 0"),
            ({"start_method": "clone"}, "unknown start method 'clone'"),
            ({"batch_size": 0}, "batch_size 0"),
            ({"seconds": 0}, "seconds 0: expected a number above 0"),
            ({"size": None}, "size none: pictures of different sizes make no batches"),
            ({"epochs": 0}, "epochs 0"),
            ({"epochs": 2, "cold": True}, "epochs and cold exclude each other"),
            ({"step_ms": 1, "step_matmul": 1}, "exclude each other"),
        ],
    )
    def test_arguments(self, folder: Path, options: dict[str, object], words: str) -> None:
        with pytest.raises(UsageError, match=words):
            bench(folder, **options)

    def test_sources(self, folder: Path, tmp_path: Path, store: Path) -> None:
        with pytest.raises(UsageError, match="expected one folder of pictures, or stores, or both; got 2 folders"):
            bench(folder, folder)
        with pytest.raises(PackshiftError, match="cannot open the store"):
            bench(tmp_path / "nowhere.lmdb")
        with pytest.raises(UsageError, match="there is another store of format"):
            bench(store, store)
        with pytest.raises(UsageError, match="none of the formats jpeg is there"):
            bench(store, formats=["jpeg"])
        (tmp_path / "empty").mkdir()
        with pytest.raises(SourceError, match="no pictures in"):
            bench(tmp_path / "empty")
        save(tmp_path / "own" / "a" / "1.png", formula_picture(20, 30), "PNG")
        convert(tmp_path / "own", tmp_path / "own.lmdb", size=None)
        with pytest.raises(UsageError, match="its pictures are of different sizes"):
            bench(tmp_path / "own.lmdb")


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes; test_documents.py runs the README's command as it is."""
    monkeypatch.setattr(benchmarking, "trial_process", FakeProcesses().start)
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv")}
    words = ["bench", folder, "--formats", "jpeg,lmdb", "--num-workers", "0", "--repeats", "1", "--seconds", "0.05"]
    words += ["--epochs", "2", "--size", "32", "--batch-size", "4", "--json", files["json"], "--csv", files["csv"]]
    result = CliRunner().invoke(cli.main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert "jpeg" in result.stdout
    assert "lmdb" in result.stdout
    found = json.loads(files["json"].read_text())
    needed = [
        "format",
        "loader",
        "num_workers",
        "batch_size",
        "start_method",
        "images_per_s",
        "images_per_s_spread",
        "first_batch_s",
        "worker_rss_mb",
        "worker_pss_mb",
        "worker_uss_mb",
        "main_rss_mb",
        "main_pss_mb",
        "main_uss_mb",
        "shm_mb",
        "total_mb",
        "cpu_s_per_1k",
        "store_mb",
        "convert_s",
        "limit_fraction",
        "read_ms",
        "decode_ms",
        "convert_ms",
        "transfer_ms",
        "growth_mb_per_1k",
    ]
    assert all(set(needed) <= set(row) for row in found["rows"])
    assert all(row["growth_mb"] is not None for row in found["rows"])
    assert found["settings"]["epochs"] == 2
    assert {"cpu", "cpus_allowed", "memory_mb", "memory_limit_mb", "shm_mb", "kernel", "torch"} <= set(found["machine"])
    assert len(files["csv"].read_text().splitlines()) == 3
