"""The forecast of memory: how many batches exist, what a probe makes of two runs, the command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch.utils.data import Dataset, TensorDataset
from users_things import Noise, images_only

from packshift import cli, forecast, open_dataset, probing
from packshift.errors import StoreError, UsageError
from packshift.forecast_results import Configuration
from packshift.forecasting import ASSUMED_MAIN, Data, data_of, probe, shared_batches
from packshift.isolation import Ended, Trial
from packshift.memory import Memory
from packshift.probing import Line, Probe, ProbeError, _Point, _split, measure_constants

ITEM = Data(1_000_000, batched=False)
STORE = Data(1_000_000, batched=True, mapped_bytes=4096 * 1000)


def run(*words: object) -> Result:
    return CliRunner().invoke(cli.main, [str(word) for word in words])


@pytest.mark.parametrize(
    ("workers", "prefetch", "batches"), [(0, 2, 0), (1, 1, 3), (1, 4, 6), (2, 2, 6), (4, 2, 12), (4, 4, 20), (8, 1, 16)]
)
def test_batches_in_shared_memory(workers: int, prefetch: int, batches: int) -> None:
    """As counted in running loaders whose queues were full."""
    assert shared_batches(Configuration(64, workers, prefetch)) == batches
    terms = forecast(ITEM, batch_size=10, num_workers=workers, prefetch_factor=prefetch).terms
    assert terms.get("batches in shared memory", 0) == batches * 10_000_000


@pytest.mark.parametrize(("workers", "batches"), [(0, 0), (1, 4), (2, 6), (4, 10)])
def test_torchs_own_shared_memory_is_one_a_batch(workers: int, batches: int) -> None:
    assert shared_batches(Configuration(64, workers, 2), slots=False) == batches


def test_terms_without_workers() -> None:
    found = forecast(STORE, batch_size=10)
    assert found.terms["main process"] == ASSUMED_MAIN
    assert found.terms["batches being built and in hand"] == 2 * 10_000_000
    assert forecast(ITEM, batch_size=10).terms["batches being built and in hand"] == 3 * 10_000_000
    assert found.total == sum(found.terms.values())
    assert found.reclaimable == 4096 * 1000
    assert found.measured == ()
    assert found.batch_bytes == 10_000_000


def test_terms_with_threads() -> None:
    found = forecast(STORE, batch_size=10, loader="threads", num_workers=2, prefetch_factor=3)
    assert found.terms["batches ahead and in hand"] == 8 * 10_000_000
    assert found.terms["batches being built"] == 0


def test_a_fresh_worker_takes_more_than_a_forked_one() -> None:
    forked, fresh = (
        forecast(STORE, batch_size=10, num_workers=2, start_method=method).terms["worker processes"]
        for method in ("fork", "spawn")
    )
    assert fresh > 4 * forked


def test_pinned_copies_are_a_term() -> None:
    found = forecast(ITEM, batch_size=10, num_workers=2, pin_memory=True)
    assert found.terms["pinned copies"] == (2 * 2 + 2) * 10_000_000


def test_page_tables_grow_with_the_store_and_the_workers() -> None:
    small = forecast(Data(1000, True, 0), batch_size=1, num_workers=4).terms["page tables"]
    large = forecast(Data(1000, True, 100 << 30), batch_size=1, num_workers=4).terms["page tables"]
    assert large - small == 4 * (100 << 30) // 4096 * 8


def test_a_probe_gives_the_constants() -> None:
    probe = Probe(
        batch_bytes_per_item=2_000_000.0,
        loader="dataloader",
        start_method="fork",
        main=Line(100e6, 0.5),
        worker=Line(30e6, 1.5),
        page_tables=1e6,
    )
    found = forecast(ITEM, batch_size=10, num_workers=4, start_method="fork", probe=probe)
    assert found.terms["main process"] == 100_000_000
    assert found.terms["batches in the main process"] == 10_000_000
    assert found.terms["worker processes"] == 120_000_000
    assert found.terms["batches being built"] == 4 * 30_000_000
    assert found.terms["batches in shared memory"] == 12 * 20_000_000
    assert "worker processes" in found.measured
    with pytest.raises(UsageError, match="it measured another kind of configuration"):
        forecast(ITEM, batch_size=10, num_workers=0, probe=probe)


def test_private_memory_is_told_from_what_a_fork_shares() -> None:
    """Main process: 50 own; two workers: 10 and 14 own; 90 shared by all three."""
    main = Memory(anonymous=50 + 30, anonymous_rss=50 + 90)
    workers = {1: Memory(anonymous=10 + 30, anonymous_rss=10 + 90), 2: Memory(anonymous=14 + 30, anonymous_rss=14 + 90)}
    assert _split({0: main, **workers}, [1, 2]) == (140.0, 12.0)
    assert _split({0: Memory(anonymous=80, anonymous_rss=80)}, []) == (80.0, 0.0)


def test_a_line_through_two_points_never_falls() -> None:
    assert Line.through((10, 120), (20, 140)).at(30) == 160
    assert Line.through((10, 140), (20, 120)).at(30) == 140


class Items(Dataset[object]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> object:
        return {"image": torch.zeros(3, 10, 10), "mask": np.zeros((5, 5), np.int64), "label": 1}


class TestData:
    def test_any_dataset(self) -> None:
        assert data_of(Items()) == Data(3 * 100 * 4 + 25 * 8 + 8, batched=False, slots=False)
        assert data_of(TensorDataset(torch.zeros(4, 7, dtype=torch.int16))) == Data(14, batched=False, slots=False)

    def test_a_store(self, store: Path) -> None:
        assert data_of(store) == Data(32 * 32 * 3 + 8, batched=True, mapped_bytes=store.stat().st_size)
        assert data_of(open_dataset(store)) == data_of(store)
        assert not data_of(open_dataset(store, transform=torch.Tensor.float)).batched

    def test_a_folder(self, pictures: Path) -> None:
        assert data_of(pictures) == Data(256 * 256 * 3 + 8, batched=False)


@pytest.mark.parametrize("format_name", ["lmdb"])
def test_a_real_probe(store: Path) -> None:
    """Four processes start for it; what they measure does not depend on the format."""
    measured = probe(store, num_workers=1, start_method="fork")
    assert measured.batch_bytes_per_item == pytest.approx(32 * 32 * 3)
    assert 50e6 < measured.main.base < 1e9
    assert measured.worker is not None
    assert 1e6 < measured.worker.base < 300e6
    found = forecast(store, batch_size=4, num_workers=2, start_method="fork", probe=measured)
    assert found.terms["main process"] == round(measured.main.base)


def test_a_probe_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a trial on such a store really ends is in test_bench.py."""
    error = "ended with exit code 1: packshift.errors.StoreError: none.lmdb: cannot open the store"
    monkeypatch.setattr(probing, "run_trial", lambda *_, **__: Ended(None, error, None))
    with pytest.raises(ProbeError, match=r"none\.lmdb cannot be measured with batches of 8: .*cannot open the store"):
        measure_constants(Trial(str(tmp_path / "none.lmdb")), 3000)
    with pytest.raises(StoreError, match=r"none\.lmdb: cannot open the store"):
        probe(tmp_path / "none.lmdb")


def test_a_probe_of_a_users_dataset() -> None:
    measured = probe(Noise(20, values=5000), num_workers=1, start_method="fork", collate_fn=images_only)
    assert measured.worker is not None
    assert measured.batch_bytes_per_item == pytest.approx(5000 * 4)
    with pytest.raises(UsageError, match=r"dataset: .*cannot be pickled"):
        probe(Unpicklable())


class Unpicklable(Noise):
    def __init__(self) -> None:
        super().__init__()
        self.opener = lambda path: path


def test_a_line_of_batches_without_bytes_is_flat() -> None:
    assert Line.through((0, 140), (0, 160)).at(30) == 160


@pytest.mark.parametrize(("item_bytes", "sizes"), [(196_608, [8, 48]), (10_000_000, [1, 10]), (10**9, [1, 2])])
def test_a_probe_takes_smaller_batches_of_large_items(
    monkeypatch: pytest.MonkeyPatch, item_bytes: int, sizes: list[int]
) -> None:
    seen = []

    def point(trial: Trial, num_workers: int, batch_size: int) -> _Point:
        seen.append(batch_size)
        return _Point(batch_size * item_bytes, batch_size, 1e6, 0, 0)

    monkeypatch.setattr(probing, "_point", point)
    assert measure_constants(Trial("x"), item_bytes).batch_bytes_per_item == item_bytes
    assert seen == sizes


class TestCommand:
    def test_text(self, store: Path) -> None:
        result = run("estimate", store, "--batch-size", 4, "--num-workers", 2)
        assert result.exit_code == 0, result.output
        for words in ("batches in shared memory", "total", "page cache", "rule of thumb", "available", "/dev/shm"):
            assert words in result.stdout

    def test_json(self) -> None:
        words = "--sample-shape 3x1024x1024 --dtype float32 --batch-size 32 --num-workers 4 --start-method fork --json"
        document = json.loads(run("estimate", *words.split()).stdout)
        assert document["terms"]["batches in shared memory"] == pytest.approx(12 * 32 * 12.582912)
        assert document["total_mb"] == pytest.approx(sum(document["terms"].values()))
        assert document["limits"]["memory_mb"] > 0
        assert document["all_ranks_mb"] == document["total_mb"]

    def test_what_cannot_fit_is_a_warning(self) -> None:
        words = shlex.split("--sample-shape 3x10000x10000 --dtype float64 --batch-size 1000 --num-workers 8 --ranks 4")
        result = run("estimate", *words)
        assert "this will be killed" in result.stdout
        assert "4 ranks" in result.stdout

    @pytest.mark.parametrize(
        ("words", "code", "message"),
        [
            ("", 2, "give a store, a folder of pictures, or --sample-shape"),
            ("nowhere", 2, "nowhere does not exist: expected a store or a folder of pictures"),
            ("--sample-shape 3xbig", 2, "expected sides such as 3x224x224"),
            ("--sample-shape 3x0x5", 2, "expected sides of at least 1"),
            ("--sample-shape 3x5x5 --probe", 2, "--probe needs data to load"),
            ("--sample-shape 3x5x5 --num-workers -1", 2, "--num-workers"),
        ],
    )
    def test_bad_input(self, words: str, code: int, message: str) -> None:
        result = run("estimate", *words.split())
        assert result.exit_code == code
        assert len(result.stderr.splitlines()) == 1
        assert message in result.stderr

    def test_not_a_store(self, tmp_path: Path) -> None:
        (tmp_path / "x.lmdb").write_bytes(b"nothing of the kind")
        with pytest.raises(StoreError, match="is not a packshift store"):
            data_of(tmp_path / "x.lmdb")
        assert run("estimate", tmp_path / "x.lmdb").exit_code == 1
