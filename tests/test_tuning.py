"""tune: the walk on machines that are made up, the choice, the code to paste, and a few real trials."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from helpers import formula_picture, save
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset
from users_things import Deadly, Noise, Step, names_only

from packshift import cli, open_dataset, tune, tuning, tuning_search
from packshift.arguments import parse_bytes
from packshift.carried import Carried, pack
from packshift.errors import PackshiftError, UsageError
from packshift.forecast_results import MB, Configuration, TuningTrial
from packshift.isolation import Ended, Trial, run_trial
from packshift.memory import Limits
from packshift.trial import measure
from packshift.tuning_code import code_of
from packshift.tuning_search import MOST_TRIALS, NOISE, Search, Space, choose, doublings, halvings, speed_of

GB = 1000 * MB


@dataclass(frozen=True)
class Machine:
    """A machine that is made up: memory in MB, times in seconds per item (`per_batch_s`: per batch)."""

    base_mb: float = 200
    item_mb: float = 3
    worker_mb: float = 60
    cost_s: float = 0.01
    sending_s: float = 0.001
    per_batch_s: float = 0.001
    step_s: float = 0.0
    cpus: int = 8

    def peak(self, configuration: Configuration) -> int:
        count, workers = configuration.num_workers, configuration.loader == "dataloader"
        batches = count * configuration.prefetch_factor + 2 + (count if workers else 0)
        mb = (
            self.base_mb
            + batches * configuration.batch_size * self.item_mb
            + (count * self.worker_mb if workers else 0)
        )
        return int(mb * MB)

    def speed(self, configuration: Configuration) -> float:
        each = self.cost_s + self.per_batch_s / configuration.batch_size
        if configuration.loader == "dataloader" and not configuration.num_workers:
            return 1 / (each + self.step_s)
        sending = self.sending_s if configuration.loader == "dataloader" else 0.0
        loaded = min(configuration.num_workers, self.cpus) / (each + sending)
        return min(loaded, 1 / self.step_s) if self.step_s else loaded

    def trial(self, configuration: Configuration, limit: int) -> TuningTrial:
        peak, speed = self.peak(configuration), self.speed(configuration)
        over = peak > limit
        return TuningTrial(
            configuration=configuration,
            error="needs more" if over else None,
            over_limit=over,
            forecast_bytes=None,
            peak_bytes=peak,
            busy=None if over or not self.step_s else speed * self.step_s,
            iterations_per_s=None if over else speed / configuration.batch_size,
            images_per_s=None if over else speed,
        )

    def walk(
        self, space: Space, limit: int, admits: Callable[[Configuration], bool] = lambda configuration: True
    ) -> list[TuningTrial]:
        trials: list[TuningTrial] = []

        def measure(configuration: Configuration) -> TuningTrial:
            trials.append(self.trial(configuration, limit))
            return trials[-1]

        Search(space, measure, admits).run()
        return trials

    def grid(self, space: Space, limit: int) -> list[TuningTrial]:
        """Every configuration of a space with prefetch 1, 2 and 4."""
        none = [space.configuration("dataloader", 0, size) for size in space.batch_sizes]
        some = [
            replace(space.configuration(loader, count, size), prefetch_factor=ahead)
            for loader in space.loaders
            for size in space.batch_sizes
            for count in range(1, max(space.counts[loader], default=0) + 1)
            for ahead in (1, 2, 4)
        ]
        return [self.trial(configuration, limit) for configuration in none + some]


def made_space(budget: int, target: int = 64, most: int = 8, cpus: int = 8, **options: Any) -> Space:
    counts = dict.fromkeys(options.pop("loaders", ("dataloader",)), doublings(most, cpus))
    return Space(halvings(target), counts, budget, **options)


MACHINES = st.builds(
    Machine,
    base_mb=st.floats(100, 500),
    item_mb=st.floats(0.01, 30),
    worker_mb=st.floats(5, 300),
    cost_s=st.floats(1e-5, 0.1),
    sending_s=st.floats(0, 1e-3),
    per_batch_s=st.floats(0, 1e-3),
    step_s=st.just(0.0) | st.floats(1e-5, 0.1),
    cpus=st.integers(1, 16),
)


@settings(max_examples=300, deadline=None)
@given(
    machine=MACHINES,
    limit=st.integers(300, 8000),
    target=st.integers(1, 256),
    most=st.integers(0, 16),
    loaders=st.sampled_from([("dataloader",), ("dataloader", "threads")]),
    wrong=st.floats(0.85, 1.15),
)
@example(  # whose walk takes 48 trials or more
    machine=Machine(100, 1.5, 45, cost_s=0.0625, sending_s=0, per_batch_s=0, step_s=0, cpus=2),
    limit=1018,
    target=136,
    most=16,
    loaders=("dataloader", "threads"),
    wrong=0.875,
)
def test_the_walk_on_any_machine(
    machine: Machine, limit: int, target: int, most: int, loaders: tuple[str, ...], wrong: float
) -> None:
    """Never over the limit; as fast as the fastest tried and nearly as the best of the grid, in a fraction of it; also
    with a forecast that is 15 % wrong."""
    limit_bytes = limit * MB
    budget = int(limit_bytes * 0.9)
    space = made_space(budget, target, most, machine.cpus, loaders=loaders, working=machine.step_s > 0)

    def admits(configuration: Configuration) -> bool:
        return machine.peak(configuration) * wrong / 1.15 <= budget

    trials = machine.walk(space, limit_bytes, admits)
    grid = machine.grid(space, limit_bytes)
    chosen = choose(trials, space)
    best = max((speed_of(trial) for trial in grid if space.fits(trial)), default=0.0)
    different = {trial.configuration for trial in trials}
    assert len(trials) - len(different) <= 6
    assert len(different) < MOST_TRIALS
    if len(grid) > 60:
        assert len(trials) <= len(grid) / 3
    if chosen is None:
        assert best == 0
        return
    assert machine.peak(chosen.configuration) <= budget
    assert speed_of(chosen) >= (1 - NOISE) * max(speed_of(trial) for trial in trials if space.fits(trial))
    assert speed_of(chosen) >= 0.9 * best


class TestWalk:
    def chosen(self, machine: Machine, limit: int, **options: Any) -> Configuration:
        space = made_space(int(limit * 0.9), working=machine.step_s > 0, **options)
        found = choose(machine.walk(space, limit), space)
        assert found is not None
        return found.configuration

    def test_no_more_workers_than_are_needed(self) -> None:
        machine = Machine(cost_s=0.01, step_s=0.0028, sending_s=0)
        assert self.chosen(machine, 30 * GB).num_workers == 4
        assert self.chosen(replace(machine, step_s=0.5), 30 * GB).num_workers == 0
        assert self.chosen(replace(machine, step_s=0.0), 30 * GB).num_workers == 8

    def test_a_smaller_batch_where_memory_keeps_the_target_from_its_workers(self) -> None:
        machine = Machine(item_mb=10)
        found = self.chosen(machine, 6 * GB)
        assert found.num_workers == 8
        assert 8 <= found.batch_size < 64

    def test_the_largest_batch_that_fits_with_no_worker_at_all(self) -> None:
        assert self.chosen(Machine(item_mb=10), 450 * MB, most=0) == Configuration(8)

    def test_threads_take_no_processes(self) -> None:
        found = self.chosen(Machine(step_s=0.004), 30 * GB, loaders=("dataloader", "threads"))
        assert (found.loader, found.num_workers) == ("threads", 3)

    def test_longer_queues_only_where_a_consumer_waits(self) -> None:
        slow = Machine(cost_s=0.1, step_s=0.001)
        space = made_space(30 * GB, working=True)
        assert 4 in {trial.configuration.prefetch_factor for trial in slow.walk(space, 30 * GB)}
        space = made_space(30 * GB)
        assert 4 not in {trial.configuration.prefetch_factor for trial in Machine().walk(space, 30 * GB)}

    def test_a_given_prefetch_factor_stays(self) -> None:
        space = made_space(2 * GB, prefetch_factor=3)
        assert {trial.configuration.prefetch_factor for trial in Machine().walk(space, 2 * GB)} == {3}

    def test_a_machine_that_always_fails(self) -> None:
        space = made_space(GB)
        trials = Machine(base_mb=5000).walk(space, GB)
        assert choose(trials, space) is None
        assert len(trials) <= 4

    def test_what_takes_more_than_a_failure_is_not_tried(self) -> None:
        trials = Machine(item_mb=30).walk(made_space(3 * GB), 3 * GB)
        over = [trial.configuration for trial in trials if trial.over_limit]
        for position, trial in enumerate(trials):
            for before in [
                one for one in over if trials.index(next(t for t in trials if t.configuration == one)) < position
            ]:
                assert not (
                    trial.configuration.batch_size >= before.batch_size
                    and trial.configuration.num_workers >= before.num_workers
                    and trial.configuration.prefetch_factor >= before.prefetch_factor
                )


def test_halvings_and_doublings() -> None:
    assert halvings(48) == (48, 24, 12, 6, 3, 1)
    assert doublings(12, 6) == (1, 2, 4, 6, 8, 12)
    assert doublings(0) == ()


def test_the_cheapest_within_noise() -> None:
    def row(workers: int, speed: float, peak: int = 500, batch: int = 64, error: str | None = None) -> TuningTrial:
        return TuningTrial(Configuration(batch, workers), error, False, None, peak, None, speed / batch, speed)

    space = made_space(1000)
    assert choose([row(0, 90), row(1, 96), row(2, 100)], space) == row(1, 96)
    assert choose([row(2, 100), row(2, 99, 300)], space) == row(2, 99, 300)
    assert choose([row(2, 100, 300, 32), row(2, 99)], space) == row(2, 99)
    assert choose([row(0, 50), row(2, 100, 1001)], space) == row(0, 50)
    assert choose([row(0, 50), row(2, 100, error="killed by SIGBUS")], space) == row(0, 50)
    assert choose([row(0, 50, 2000)], space) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8GB", 8 * GB),
        ("512MB", 512 * MB),
        ("2GiB", 2 << 30),
        ("1.5 gib", 3 << 29),
        ("70", 70),
        (70, 70),
        ("3TB", 3000 * GB),
    ],
)
def test_bytes(text: int | str, number: int) -> None:
    assert parse_bytes("limit", text) == number


@pytest.mark.parametrize("text", ["8G", "GB", "-1", "0", 0, True, 1.5, "8 GB free", "", "1e9", "IB"])
def test_bytes_that_are_none(text: Any) -> None:
    with pytest.raises(UsageError, match=r"expected bytes, or a number with a unit: 512MB, 8GB, 7.5GiB"):
        parse_bytes("memory_limit", text)


class Recorder(torch.nn.Module):
    """A small model in float64 that says how it was used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class Optimizer:
    """Keeps the gradients of each step and changes nothing, so that all steps can be compared with one model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.steps: list[list[torch.Tensor]] = []

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def step(self) -> None:
        self.steps.append([parameter.grad.clone() for parameter in self.model.parameters()])  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [1, 4, 5, 11, 12, 13, 17, 24, 29])
@pytest.mark.parametrize("configuration", [Configuration(4), Configuration(4, 2, 2, "threads")])
def test_the_pasted_loop_gives_the_gradients_of_one_big_batch(count: int, configuration: Configuration) -> None:
    """Three batches of 4 to a step, also where the last batch is short and the last step has fewer batches."""
    torch.manual_seed(1)
    seen: list[torch.Tensor] = []

    def criterion(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(labels)
        return torch.nn.functional.cross_entropy(outputs, labels % 3)

    images = torch.randn(count, 5, dtype=torch.float64)
    dataset = TensorDataset(images, torch.arange(count))
    model = Recorder()
    optimizer = Optimizer(model)
    names = {"dataset": dataset, "model": model, "criterion": criterion, "optimizer": optimizer}
    exec(code_of(configuration, 3, None), names)
    order = torch.cat(seen)
    assert sorted(order.tolist()) == list(range(count))
    groups = order.split(12)
    assert len(optimizer.steps) == len(groups)
    for gradients, group in zip(optimizer.steps, groups, strict=True):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images[group]), group % 3).backward()
        torch.testing.assert_close(gradients, [parameter.grad for parameter in model.parameters()])


def fake_run(machine: Machine, calls: list[Trial] | None = None) -> Callable[..., Ended]:
    def run(trial: Trial, *, timeout: float, memory_limit: int, sample_every: float) -> Ended:
        if calls is not None:
            calls.append(trial)
        configuration = Configuration(
            trial.batch_size, trial.num_workers, trial.prefetch_factor or 2, trial.loader, trial.start_method
        )
        row = replace(machine, step_s=trial.step_ms / trial.batch_size / 1000).trial(configuration, memory_limit)
        if row.error is not None:
            return Ended(None, row.error, row.peak_bytes, over_limit=True)
        assert row.images_per_s is not None
        result = {
            "images_per_s": row.images_per_s,
            "batches_per_s": row.iterations_per_s,
            "mb_per_s": row.images_per_s * machine.item_mb,
            "busy": row.busy or 0.0,
            "total_mb": 1.0,
        }
        return Ended(result, None, row.peak_bytes)

    return run


def made_limits(**values: Any) -> Limits:
    return Limits(
        **{
            **dict.fromkeys(("machine_memory", "memory", "available", "swap_free", "shm_size", "shm_free"), 64 * GB),
            "address_space": None,
            "open_files": 1024,
            **values,
        }
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Trials run on a machine that is made up; the list of them."""
    calls: list[Trial] = []
    monkeypatch.setattr(tuning, "run_trial", fake_run(Machine(), calls))
    monkeypatch.setattr(tuning, "limits", made_limits)
    return calls


class TestBounds:
    """What cannot fit is not tried, and a note says why."""

    def test_dev_shm(self, machine: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tuning, "limits", lambda: made_limits(shm_free=1500 * MB))
        found = tune(Noise(), memory_limit="32GB", max_workers=8)
        assert all(trial.num_workers * (trial.prefetch_factor or 2) * trial.batch_size * 3 <= 1500 for trial in machine)
        assert any("of /dev/shm, of which 1.5 GB are free (docker run --shm-size)" in note for note in found.notes)
        assert found.choice is not None
        assert found.choice.configuration.num_workers == 8

    def test_open_files(self, machine: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tuning, "limits", lambda: made_limits(open_files=200))
        found = tune(Noise(), memory_limit="32GB", max_workers=8)
        assert max(trial.num_workers for trial in machine) == 4
        assert any("open files, 200 are allowed (ulimit -n)" in note for note in found.notes)

    def test_a_forecast_keeps_trials_from_being_run(self, machine: list[Trial], store: Path) -> None:
        plain = tune(store, memory_limit="1GB", max_workers=8)
        unpruned, made = len(machine), Machine()
        machine.clear()
        pruned = tune(store, memory_limit="1GB", max_workers=8, foretell=lambda one: int(made.peak(one) * 1.15))
        assert plain.choice == pruned.choice
        assert len(machine) < unpruned
        assert all(trial.forecast_bytes for trial in pruned.trials)
        assert any(note.startswith("not tried: ") for note in pruned.notes)

    def test_no_more_than_is_available(
        self, machine: list[Trial], monkeypatch: pytest.MonkeyPatch, store: Path
    ) -> None:
        monkeypatch.setattr(tuning, "limits", lambda: made_limits(available=2 * GB))
        monkeypatch.setattr(tuning, "memory_groups", list)
        found = tune(store, memory_limit="8GB")
        assert found.memory_limit == 2 * GB
        assert found.limit_source == "what the machine has available, less than the 8.0 GB asked for"
        assert tune(store).limit_source == "what the machine has available"
        assert tune(store, memory_limit="1GB").limit_source == "memory_limit"

    def test_no_more_than_there_are_items(self, machine: list[Trial], store: Path) -> None:
        found = tune(store, memory_limit="8GB", target_batch_size=100)
        assert max(trial.batch_size for trial in machine) == 12
        assert "the dataset has 12 items only: batches of 100 cannot be tried" in found.notes

    def test_a_smaller_batch_takes_a_smaller_part_of_the_step(self, machine: list[Trial]) -> None:
        tune(Noise(), memory_limit="700MB", target_batch_size=64, step_ms=640)
        assert {trial.batch_size: trial.step_ms for trial in machine} == {
            trial.batch_size: trial.batch_size * 10 for trial in machine
        }
        assert len({trial.batch_size for trial in machine}) > 1


def test_accumulation_where_the_target_does_not_fit(machine: list[Trial]) -> None:
    found = tune(Noise(1000), memory_limit="700MB", target_batch_size=100, max_workers=0)
    assert found.choice is not None
    assert found.choice.configuration.batch_size == 50
    assert found.choice.accumulation_steps == 2
    assert "2 batches make one step of the optimizer" in found.choice.reason
    assert "step_samples = min(100, left)" in found.choice.code
    told = json.loads(json.dumps(found.to_json()))
    wanted = {"num_workers", "batch_size", "prefetch_factor", "accumulation_steps", "peak_mb", "images_per_s"}
    assert wanted <= set(told["choice"])
    assert wanted - {"accumulation_steps"} <= set(told["trials"][0])


def test_what_was_measured_twice_is_one_row(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    """Its higher speed and its higher peak; what fails the second time is not chosen."""
    speeds = {0: [120.0, 100.0], 1: [200.0, None]}
    made: list[int] = []

    def run(trial: Trial, **_: object) -> Ended:
        made.append(trial.num_workers)
        speed = speeds[trial.num_workers].pop(0)
        result = {"images_per_s": speed, "batches_per_s": 1.0, "mb_per_s": 1.0, "busy": 0.0, "total_mb": 1.0}
        peak = 300 * MB + len(made)
        return Ended(None, "killed by SIGBUS", peak) if speed is None else Ended(result, None, peak)

    monkeypatch.setattr(tuning, "run_trial", run)
    found = tune(store, memory_limit="1GB", max_workers=1, loaders=["dataloader"], prefetch_factor=2)
    assert made == [0, 1, 1, 0]
    assert [(trial.error, trial.images_per_s) for trial in found.trials] == [(None, 120.0), ("killed by SIGBUS", None)]
    assert found.choice is not None
    assert (found.choice.configuration.num_workers, found.choice.peak_bytes) == (0, 300 * MB + 4)


def test_nothing_fits(machine: list[Trial], store: Path) -> None:
    result = CliRunner().invoke(cli.main, ["tune", str(store), "--memory-limit", "100MB"])
    assert result.exit_code == 1
    assert "nothing fits into 90.0 MB" in result.stderr
    assert "the smallest configuration, batch 1, no workers, took more than 206.0 MB" in result.stderr
    assert "needs more" in result.stdout


def test_ctrl_c_returns_what_is_finished(machine: list[Trial], store: Path) -> None:
    def stop(done: int, what: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    found = tune(store, memory_limit="8GB", progress=stop)
    assert len(found.trials) == 1
    assert found.choice is not None
    assert found.notes[0].startswith("interrupted")


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"memory_limit": "8G"}, "memory_limit '8G': expected bytes"),
            ({"target_batch_size": 0}, "target_batch_size 0: expected a whole number"),
            ({"step_ms": -1}, "step_ms -1: expected a number from 0"),
            ({"headroom": 1}, "headroom 1: expected a share"),
            ({"max_workers": -1}, "max_workers -1: expected a whole number from 0"),
            ({"loaders": ["fast"]}, "unknown loader 'fast': expected some of dataloader, threads"),
            ({"loaders": []}, "no loaders: expected some of"),
            ({"loaders": ["threads"], "collate_fn": names_only}, "packshift.Loader takes no collate_fn"),
            ({"start_method": "clone"}, "unknown start method 'clone'"),
            ({"prefetch_factor": 0}, "prefetch_factor 0"),
            ({"seconds": 0}, "seconds 0: expected a number above 0"),
            ({"step": print, "step_ms": 1}, "step and step_ms exclude each other"),
        ],
    )
    def test_arguments(self, store: Path, options: dict[str, Any], words: str) -> None:
        with pytest.raises(UsageError, match=words):
            tune(store, **options)

    def test_datasets(self, tmp_path: Path) -> None:
        with pytest.raises(PackshiftError, match="cannot open the store"):
            tune(tmp_path / "nowhere.lmdb")
        with pytest.raises(UsageError, match="list_iterator: expected a store, a folder, or a dataset with __len__"):
            tune(iter([1]))
        with pytest.raises(UsageError, match="there is nothing in it to be loaded"):
            tune([])
        save(tmp_path / "own" / "1.png", formula_picture(20, 30), "PNG")
        with pytest.raises(UsageError, match="size none: pictures of different sizes"):
            tune(tmp_path / "own", size=None)

    def test_what_cannot_be_pickled(self) -> None:
        class Local(Dataset[Any]):
            def __len__(self) -> int:
                return 1

            def __getitem__(self, index: int) -> int:
                return index

        advice = "fresh processes: move it into a module"
        with pytest.raises(UsageError, match=rf"dataset: cannot be pickled .*Local.*{advice}"):
            tune(Local())
        with pytest.raises(UsageError, match=rf"step: cannot be pickled .*lambda.*{advice}"):
            tune(Noise(), lambda batch: None)

    def test_what_only_a_script_defines(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        script = tmp_path / "train.py"
        script.write_text(
            "from users_things import Noise\nfrom packshift import tune\n"
            "def step(batch): pass\n"
            "try: tune(Noise(), step)\nexcept ValueError as error: print(error)\n"
        )
        runpy.run_path(str(script), run_name="__main__")
        assert capsys.readouterr().out == (
            "step: step is defined in the script that runs; trials run in fresh processes: move it into a module (a .py "
            "file) of its own and import it from there\n"
        )


def measured_here(trial: Trial, **_: object) -> Ended:
    """A real measurement without a process of its own, which would take seconds to start."""
    return Ended(asdict(measure(replace(trial, seconds=0.2))), None, None)


class TestRealTrials:
    """Few and short; tests/kept_promise.py has the long ones."""

    def test_a_store(self, stores_made_once: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """test_documents.py runs the README's command in processes of its own, test_bench.py one with spawned workers."""
        monkeypatch.setattr(tuning, "run_trial", measured_here)
        words = ["tune", str(stores_made_once[".lmdb"]), "--max-workers", "1", "--target-batch-size", "4"]
        words += ["--json", "--start-method", "fork", "--step-ms", "1"]
        result = CliRunner().invoke(cli.main, words)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert {trial["num_workers"] for trial in found["trials"]} >= {0, 1}
        assert [trial["error"] for trial in found["trials"]] == [None] * len(found["trials"])
        assert 0.3 < found["choice"]["busy"] <= 1
        assert found["choice"]["peak_mb"] > 50
        names: dict[str, Any] = {}
        exec(found["choice"]["code"], names)
        assert sum(len(labels) for _, labels in names["loader"]) == 12

    def test_an_open_dataset_of_packshift(self, stores_made_once: dict[str, Path], tmp_path: Path) -> None:
        """Its batches are channels last; their bytes are known after the first trial."""
        carried = tmp_path / "carried"
        pack(Carried(open_dataset(stores_made_once[".lmdb"])), str(carried))
        result = measure(Trial("", batch_size=4, carried=str(carried), seconds=0.1))
        assert result.mb_per_s * 1e6 / result.images_per_s == pytest.approx(3 * 32 * 32 + 8)

    def test_a_users_dataset_and_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the step takes of memory counts, dicts and NaN are as good as any batch."""
        monkeypatch.setattr(tuning_search, "_ROUNDS", 0)  # measured once is enough
        options = {"memory_limit": "2GB", "target_batch_size": 8, "max_workers": 0, "seconds": 0.3}
        heavy = tune(Noise(cost_s=0.005), Step(0.01, mb=300), **options)
        light = tune(Noise(cost_s=0.005), Step(0.01), **options)
        assert [trial.error for trial in (*heavy.trials, *light.trials)] == [None] * len(heavy.trials + light.trials)
        assert heavy.choice is not None
        assert heavy.trials[0].peak_bytes is not None
        assert light.trials[0].peak_bytes is not None
        assert heavy.trials[0].peak_bytes - light.trials[0].peak_bytes == pytest.approx(300 * MB, rel=0.2)
        busy = heavy.trials[0].busy
        assert busy is not None
        assert 0.1 < busy < 0.5  # 10 ms of work after 8 x 5 ms of loading

    def test_a_collate_fn_of_the_user(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tuning, "run_trial", measured_here)
        found = tune(Noise(), collate_fn=names_only, max_workers=0, target_batch_size=4, seconds=0.1)
        assert found.choice is not None
        assert "collate_fn=collate_fn" in found.choice.code

    def test_a_trial_that_is_killed_is_a_row(self) -> None:
        found = tune(Deadly(), max_workers=0, target_batch_size=1, seconds=0.1)
        assert found.choice is None
        assert [trial.error for trial in found.trials] == ["killed by SIGKILL"]
        assert "nothing could be measured: batch 1, no workers: killed by SIGKILL" in found.notes

    def test_full_queues_are_in_the_peak(self, tmp_path: Path) -> None:
        """The consumer takes batches as fast as they come, so the queues fill only when it stands still. What lies in
        them is mapped by no process."""
        carried = tmp_path / "carried"
        pack(Carried(Noise(values=500_000, cost_s=0.02)), str(carried))
        common = Trial("", batch_size=8, num_workers=1, seconds=0.2, carried=str(carried), fill=True)
        ended = [
            run_trial(replace(common, prefetch_factor=ahead), timeout=100, memory_limit=4 * GB) for ahead in (1, 8)
        ]
        assert [one.error for one in ended] == [None, None]
        one, eight = (each.peak_bytes or 0 for each in ended)
        # A batch that is being made and its samples may be in one of the sampled peaks and not in the other.
        assert eight - one > (7 - 2) * 0.9 * 8 * 2 * MB
        assert ended[0].result is not None
        assert ended[1].result is not None
        for each in ended:  # what lies there while the consumer stands still is in the peak, all of it
            assert (each.peak_bytes or 0) / MB > 0.97 * each.result["total_mb"] > each.result["shm_mb"]
        assert ended[1].result["shm_mb"] - ended[0].result["shm_mb"] == pytest.approx(7 * 8 * 2, rel=0.05)
