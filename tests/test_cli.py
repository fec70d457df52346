"""The command line: results on stdout, log on stderr, one line per error, the exit codes of the contract."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from helpers import FORKED_DECODERS, encoded, formula_picture, make_folder, save

from packshift import cli, conversion, convert, planning
from packshift.options import Options
from packshift.stores import format_names
from packshift.stores._reader import Reader
from packshift.text import human_bytes, printable

pytestmark = FORKED_DECODERS


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def error_line(result: Result, code: int) -> str:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("packshift: ")
    return lines[0]


class TestConvert:
    def test_summary_on_stdout_plan_on_stderr(
        self, pictures: Path, tmp_path: Path, suffix: str, format_name: str
    ) -> None:
        target = tmp_path / f"out{suffix}"
        result = run("convert", pictures, target, "--size", "240x320", "--jobs", 2)
        assert result.exit_code == 0
        *plan, forecast = result.stderr.splitlines()
        assert plan == [
            f"{pictures}: 12 pictures, 3 classes",
            f"{target}: {format_name}, upright, RGB, scaled to cover 240 x 320 (height x width), middle cut out, "
            "2 jobs",
        ]
        assert re.fullmatch(r"forecast: 2\.8 MB on disk \([\d.,]+ .B are free\)", forecast)
        lines = result.stdout.splitlines()
        assert lines[0] == f"12 of 12 pictures written to {target}"
        assert lines[1].startswith(f"{human_bytes(target.stat().st_size)} on disk, ")
        assert lines[2].endswith("images/s")
        assert lines[3] == "smaller than the target size, enlarged: 12"
        assert Reader(target).info.shape == (240, 320, 3)

    def test_skipped_pictures_are_named_and_give_exit_code_3(self, pictures: Path, tmp_path: Path) -> None:
        (pictures / "bee" / "bad\n\x1b[31m.jpg").write_bytes(b"<html>")
        result = run("convert", pictures, tmp_path / "out.lmdb", "--size", 16, "--fit", "pad")
        assert result.exit_code == 3
        assert r"skipped bee/bad\n\x1b[31m.jpg: not a picture that Pillow can read" in result.stderr
        assert "12 of 13 pictures written" in result.stdout
        assert ", 1 skipped" in result.stdout

    def test_fast_decode_and_background_reach_the_store(self, pictures: Path, tmp_path: Path) -> None:
        target = tmp_path / "out.h5"
        result = run("convert", pictures, target, "--size", 8, "--fast-decode", "--background", "Orange")
        assert result.exit_code == 0
        assert "large JPEGs decoded smaller, transparent ones over #ffa500, " in result.stderr
        preprocessing = Reader(target).info.preprocessing
        assert (preprocessing["fast_decode"], preprocessing["background"]) == (True, [255, 165, 0])
        shown = run("info", target).stdout
        assert "fast_decode True" in shown
        assert "background [255, 165, 0]" in shown

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--background", "no colour"), "background 'no colour': expected a colour such as white or #ff8000"),
            (("--class-order", "random"), "Invalid value for '--class-order'"),
            (("--class-order", "natural", "--classes-from", "list.txt"), "a list has its own order; give one of them"),
            (("--max-pixels", "0"), "Invalid value for '--max-pixels'"),
            (("--size", "none", "--fast-decode"), "fast_decode (--fast-decode) needs a size"),
        ],
    )
    def test_settings_that_cannot_be(self, pictures: Path, tmp_path: Path, options: tuple, words: str) -> None:
        assert words in error_line(run("convert", pictures, tmp_path / "out.lmdb", *options), 2)

    def test_stop(self, pictures: Path, tmp_path: Path) -> None:
        (pictures / "bee" / "bad.jpg").touch()
        result = run("convert", pictures, tmp_path / "out.lmdb", "--on-error", "stop", "-q")
        assert (
            error_line(result, 1)
            == "packshift: bee/bad.jpg: empty file (0 bytes). Nothing was published (--on-error stop). 8 of 13 pictures are "
            "kept, and the same command carries on"
        )
        assert not (tmp_path / "out.lmdb").exists()

    def test_dry_run_writes_nothing(self, pictures: Path, tmp_path: Path, suffix: str) -> None:
        (pictures / "bee" / "bad.jpg").touch()
        target = tmp_path / f"out{suffix}"
        result = run("convert", pictures, target, "--dry-run")
        assert result.exit_code == 0
        first, second = result.stdout.splitlines()
        assert re.fullmatch(r"forecast: [\d.]+ MB on disk \([\d.,]+ .B are free\), about .* s", first)
        assert second == "1 of 13 pictures tried cannot be read"
        assert list(tmp_path.iterdir()) == [pictures]
        outlook = json.loads(run("convert", pictures, target, "--dry-run", "--json").stdout)
        assert (outlook["pictures"], outlook["sampled"], outlook["unreadable"]) == (13, 13, 1)
        assert outlook["seconds"] > 0

    def test_dry_run_and_info_know_max_pixels(self, pictures: Path, tmp_path: Path) -> None:
        save(pictures / "ant" / "large.png", formula_picture(100, 100), "PNG")
        words = ("convert", pictures, tmp_path / "out.h5", "--size", 8, "--max-pixels", 9999)
        result = run(*words, "--dry-run", "--json")
        assert "middle cut out, those of more than 9,999 pixels skipped, " in result.stderr
        assert json.loads(result.stdout)["unreadable"] == 1
        assert run(*words).exit_code == 3
        assert "max_pixels 9999" in run("info", tmp_path / "out.h5").stdout
        assert json.loads(run("info", tmp_path / "out.h5", "--json").stdout)["preprocessing"]["max_pixels"] == 9999

    @pytest.mark.parametrize("size", ["256", "100x50", "32", "none"])
    def test_the_forecast_size_is_within_5_percent(
        self, pictures: Path, tmp_path: Path, suffix: str, size: str
    ) -> None:
        for number in range(100):
            save(pictures / "ant" / f"large {number}.jpg", formula_picture(100, 100 + number))
        target = tmp_path / f"out{suffix}"
        outlook = json.loads(run("convert", pictures, target, "--dry-run", "--json", "--size", size).stdout)
        run("convert", pictures, target, "--size", size)
        assert outlook["store_bytes"] == pytest.approx(target.stat().st_size, rel=0.05)

    def test_a_disk_that_cannot_hold_the_store(
        self, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(planning, "_free_bytes", lambda target: 2_000_000)
        line = error_line(run("convert", pictures, tmp_path / "out.lmdb", "-q"), 1)
        assert "the store will take about 2.5 MB, and only 2.0 MB are free in" in line
        assert line.endswith("make room, write elsewhere, choose a smaller size, or start nevertheless with --force")
        assert run("convert", pictures, tmp_path / "out.lmdb", "-q", "--force").exit_code == 0

    def test_too_many_errors(self, pictures: Path, tmp_path: Path) -> None:
        for name in ("bad 1.jpg", "bad 2.jpg"):
            (pictures / "bee" / name).touch()
        line = error_line(run("convert", pictures, tmp_path / "out.lmdb", "-q", "--max-errors", "1"), 1)
        assert line.startswith(
            "packshift: 2 pictures cannot be read, more than the 1 that --max-errors allows; the last"
        )
        assert run("convert", pictures, tmp_path / "out.lmdb", "-q", "--max-errors", "20%").exit_code == 3
        assert "expected a number of files such as 10" in error_line(
            run("convert", pictures, tmp_path / "2.lmdb", "--max-errors", "few"), 2
        )

    def test_what_was_skipped_is_named_without_a_store_too(self, pictures: Path, tmp_path: Path) -> None:
        for path in pictures.rglob("*.jpg"):
            path.write_bytes(b"nonsense")
        names = sorted(str(path.relative_to(pictures)) for path in pictures.rglob("*.jpg"))
        for limit in ((), ("--max-errors", str(len(names) - 1))):
            ended = run("convert", pictures, tmp_path / "out.lmdb", *limit)
            assert ended.exit_code == 1
            named = [line.split(":")[0] for line in ended.stderr.splitlines() if line.startswith("skipped ")]
            assert named == [f"skipped {name}" for name in names]

    def test_json(self, pictures: Path, tmp_path: Path) -> None:
        (pictures / "bee" / "bad\udcff.jpg").touch()
        result = run("convert", pictures, tmp_path / "out.h5", "--json", "--size", 16, "--jobs", 1)
        report = json.loads(result.stdout)
        assert report["jobs"] == 1
        assert report["preprocessing"] == json.loads(run("info", tmp_path / "out.h5", "--json").stdout)["preprocessing"]
        assert report["preprocessing"]["size"] == [16, 16]
        assert (report["found"], report["written"], report["format"]) == (13, 12, "hdf5")
        assert report["skipped"] == [{"path": "bee/bad\udcff.jpg", "reason": "empty file (0 bytes)"}]
        assert report["classes"] == ["ant", "bee", "cow"]
        assert report["store_bytes"] == (tmp_path / "out.h5").stat().st_size
        assert report["seconds"] > 0

    def test_quiet_says_nothing_but_warnings_and_errors(self, pictures: Path, tmp_path: Path) -> None:
        result = run("convert", pictures, tmp_path / "out.lmdb", "-q", "--size", 16)
        assert (result.exit_code, result.output) == (0, "")
        (pictures / "stray.jpg").touch()
        result = run("convert", pictures, tmp_path / "out.lmdb", "-q", "--size", 16, "--overwrite")
        assert result.output == "packshift: left out, pictures beside the class folders: 1 (stray.jpg)\n"

    @pytest.mark.parametrize("output", ["| true", "> /dev/full"])
    def test_the_exit_code_is_that_of_the_store_whatever_becomes_of_the_summary(
        self, output: str, pictures: Path, tmp_path: Path
    ) -> None:
        """A reader that hangs up, a full disk under the log: the store is there all the same, and 0 says so."""
        target = tmp_path / "out.lmdb"
        command = (
            f'("{sys.executable}" -m packshift convert "{pictures}" "{target}" --size 16; echo "code $?" >&2) {output}'
        )
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
        assert "code 0" in done.stderr
        assert "Traceback" not in done.stderr
        assert len(Reader(target)) == 12

    def test_without_a_terminal_for_errors(self, pictures: Path, tmp_path: Path) -> None:
        command = f'"{sys.executable}" -m packshift convert "{pictures}" "{tmp_path}/out.lmdb" --size 16 2>&-'
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0
        assert "12 of 12 pictures" in done.stdout

    def test_an_interrupt_after_publishing_says_that_the_store_is_there(
        self, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_plan = conversion.run_plan

        def interrupted(*arguments: object, **options: object) -> None:
            run_plan(*arguments, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(conversion, "run_plan", interrupted)
        result = run("convert", pictures, tmp_path / "out.lmdb", "-q", "--size", 16)
        assert result.exit_code == 0
        assert result.stderr == f"packshift: interrupted, but {tmp_path}/out.lmdb is whole and was published\n"

    def test_names_do_not_depend_on_the_locale(self, pictures: Path, tmp_path: Path) -> None:
        make_folder(pictures, ["café"], 1)
        stores = []
        for number, locale in enumerate(({}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})):
            target = tmp_path / f"{number}.lmdb"
            command = [sys.executable, "-m", "packshift", "convert", str(pictures), str(target), "-q", "--size", "16"]
            subprocess.run(command, check=True, env={**os.environ, **locale}, timeout=120)
            stores.append(target.read_bytes())
        assert stores[0] == stores[1]
        assert "café" in Reader(tmp_path / "1.lmdb").info.classes

    def test_flat_folder_is_said_to_be_unlabelled(self, pictures: Path, tmp_path: Path) -> None:
        result = run("convert", pictures / "ant", tmp_path / "out.lmdb", "--size", 16)
        assert "4 pictures, no class folders: every label will be -1" in result.stderr

    def test_what_was_left_out_is_said(self, pictures: Path, tmp_path: Path) -> None:
        (pictures / "empty class").mkdir()
        (pictures / "stray.jpg").touch()
        (pictures / "ant" / "notes.txt").touch()
        result = run("convert", pictures, tmp_path / "out.lmdb", "--size", 16)
        assert "note: left out, pictures beside the class folders: 1 (stray.jpg)" in result.stderr
        assert "note: left out, files with other suffixes: 1 (ant/notes.txt)" in result.stderr
        assert "note: class folders without a picture, which keep their label: 1 (empty class)" in result.stderr

    def test_numeric_class_names_out_of_order_are_said(self, tmp_path: Path) -> None:
        make_folder(tmp_path / "src", ["1", "2", "10"], 1)
        result = run("convert", tmp_path / "src", tmp_path / "out.lmdb", "--size", 16)
        assert (
            "note: class folders are sorted as text, as torchvision does, not as numbers: "
            "label 1 is folder '10', not '2' (--class-order natural changes that)\n" in result.stderr
        )

    @pytest.mark.parametrize("names", [["1", "2", "3"], ["1", "2", "10"], ["a1", "a2", "a10"]])
    def test_the_order_of_numbers_is_told_only_where_it_surprises(self, tmp_path: Path, names: list[str]) -> None:
        make_folder(tmp_path / "src", names, 1)
        (tmp_path / "list.txt").write_text("\n".join(reversed(names)))
        options = [("--class-order", "natural"), ("--classes-from", tmp_path / "list.txt")]
        told = [
            run("convert", tmp_path / "src", tmp_path / "a.lmdb", "--dry-run", *option) for option in ((), *options)
        ]
        assert ["sorted as text" in result.stderr for result in told] == [names[-1] == "10", False, False]
        assert "3 pictures, 3 classes in natural order\n" in told[1].stderr
        assert f"3 pictures, 3 classes as in {tmp_path}/list.txt\n" in told[2].stderr

    def test_classes_from_another_store(self, pictures: Path, store: Path, tmp_path: Path, suffix: str) -> None:
        (pictures / "bee").rename(tmp_path / "bee")
        target = tmp_path / f"val{suffix}"
        result = run("convert", pictures, target, "--size", 16, "--classes-from", store)
        assert result.exit_code == 0
        assert "note: classes without a picture, which keep their label: 1 (bee)\n" in result.stderr
        shown = run("info", target).stdout
        assert "classes        3, in the order of a list that was given\n" in shown
        assert "      1  bee  0\n      2  cow  4\n" in shown
        assert json.loads(run("info", target, "--json").stdout)["source"]["class_order"] == "given"
        make_folder(pictures, ["yak"], 1)
        line = error_line(run("convert", pictures, tmp_path / "2.lmdb", "-q", "--classes-from", store), 1)
        assert line.startswith(f"packshift: {pictures}: 'yak': no class of {store}, which has 'ant', 'bee', 'cow'; ")
        assert not list(tmp_path.glob("*2.lmdb*"))

    @pytest.mark.parametrize("names", [["train", "val"], ["Test", "training", "validation"], ["valid"]])
    def test_parts_of_a_data_set_are_not_taken_for_classes_in_silence(self, tmp_path: Path, names: list[str]) -> None:
        root = tmp_path / "my pictures"
        for name in names:
            make_folder(root / name, ["a", "b"], 1)
        (note,) = re.findall("note: (.*)", run("convert", root, tmp_path / "out.h5", "--dry-run").stderr)
        names = sorted(names, key=lambda name: (not name.startswith("train"), name))
        first, *others = names
        commands = [f"packshift convert '{root}/{first}' {tmp_path}/{first}.h5"]
        commands += [
            f"packshift convert '{root}/{name}' {tmp_path}/{name}.h5 --classes-from {tmp_path}/{first}.h5"
            for name in others
        ]
        assert (
            note
            == f"{', '.join(names)}: names of a data set's parts, not of classes; to convert each: {'; '.join(commands)}"
        )
        (tmp_path / "list.txt").write_text("\n".join(names))
        given = run("convert", root, tmp_path / "out.h5", "--dry-run", "--classes-from", tmp_path / "list.txt")
        assert "to convert each" not in given.stderr
        for command in commands:
            assert run(*shlex.split(command)[1:], "-q").exit_code == 0
        assert Reader(tmp_path / f"{names[-1]}.h5").info.classes == ("a", "b")

    @pytest.mark.parametrize("folders", [["train", "val"], ["train/a", "other/b"]])
    def test_classes_that_are_only_called_like_parts_are_classes(self, tmp_path: Path, folders: list[str]) -> None:
        make_folder(tmp_path / "src", folders, 1)
        assert "to convert each" not in run("convert", tmp_path / "src", tmp_path / "out.h5", "--dry-run").stderr

    def test_every_option_is_one_of_the_function_and_of_the_command_with_the_same_default(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(Options)}
        arguments = inspect.signature(convert).parameters.values()
        of_function = {each.name: each.default for each in arguments if each.kind is each.KEYWORD_ONLY}
        assert {**defaults, "progress": None, "log": None} == of_function
        parsed = cli.main.commands["convert"].make_context("convert", ["SRC", "OUT"]).params
        others = ("source", "target", "as_json", "quiet", "dry_run")
        of_command = {name.removesuffix("_"): value for name, value in parsed.items() if name not in others}
        assert {**defaults, "size": "256"} == of_command

    def test_choices_are_the_formats_there_are(self) -> None:
        option = next(option for option in cli.main.commands["convert"].params if option.name == "format_")
        assert isinstance(option.type, click.Choice)
        assert tuple(option.type.choices) == format_names()


class TestBadInput:
    """One line that names the thing, what was expected and what to do; nothing lost."""

    def test_missing_source(self, tmp_path: Path) -> None:
        line = error_line(run("convert", tmp_path / "no such", tmp_path / "out.lmdb"), 1)
        assert line == f"packshift: source folder {tmp_path}/no such does not exist: expected a folder of pictures"

    def test_empty_source(self, tmp_path: Path) -> None:
        (tmp_path / "src").mkdir()
        assert "the folder is empty" in error_line(run("convert", tmp_path / "src", tmp_path / "out.lmdb"), 1)

    def test_source_without_a_picture(self, tmp_path: Path) -> None:
        (tmp_path / "src" / "a").mkdir(parents=True)
        (tmp_path / "src" / "a" / "notes.txt").touch()
        line = error_line(run("convert", tmp_path / "src", tmp_path / "out.lmdb"), 1)
        assert "found files with other suffixes: 1 ('a/notes.txt'), folders: 1" in line

    def test_existing_target(self, pictures: Path, store: Path) -> None:
        before = store.read_bytes()
        assert "exists: choose another name, or replace it with --overwrite" in error_line(
            run("convert", pictures, store), 1
        )
        assert store.read_bytes() == before

    def test_unknown_suffix(self, pictures: Path, tmp_path: Path) -> None:
        line = error_line(run("convert", pictures, tmp_path / "out.zip"), 2)
        assert "expected .h5 or .hdf5 (hdf5), .lmdb (lmdb), or name it with --format" in line

    @pytest.mark.parametrize(
        "arguments",
        [
            "convert",
            "convert only-one",
            "convert a b c",
            "fly",
            "convert a b.lmdb --jobs 0",
            "convert a b.lmdb --fit squeeze",
            "convert a b.lmdb --nope",
            "info",
            "info --nope",
        ],
    )
    def test_wrong_usage(self, arguments: str) -> None:
        assert "--help)" in error_line(run(*arguments.split()), 2)

    def test_wrong_size(self, pictures: Path, tmp_path: Path) -> None:
        line = error_line(run("convert", pictures, tmp_path / "out.lmdb", "--size", "big"), 2)
        assert line.startswith("packshift: size 'big': expected a number such as 224, HEIGHTxWIDTH such as 240x320 ")

    @pytest.mark.parametrize("name", ["missing", "folder", "empty.lmdb", "text.h5"])
    def test_info_on_what_is_no_store(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "empty.lmdb").touch()
        (tmp_path / "text.h5").write_text("text")
        assert str(tmp_path / name) in error_line(run("info", tmp_path / name), 1)

    def test_a_fault_of_ours_is_one_line_too(
        self, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise ZeroDivisionError("surprise")

        monkeypatch.setattr(conversion, "run_plan", fail)
        line = error_line(run("convert", pictures, tmp_path / "out.lmdb", "-q"), 1)
        assert line == "packshift: unexpected ZeroDivisionError: surprise (PACKSHIFT_DEBUG=1 shows where)"
        monkeypatch.setenv("PACKSHIFT_DEBUG", "1")
        assert isinstance(run("convert", pictures, tmp_path / "out.lmdb", "-q").exception, ZeroDivisionError)


class TestInfo:
    def test_text(self, store: Path, format_name: str) -> None:
        result = run("info", store)
        assert result.exit_code == 0
        for words in (
            f"{store}: {format_name}, format version 1",
            "12, 32 x 32 (height x width), uint8 RGB",
            human_bytes(store.stat().st_size),
            "fit crop",
            "packshift 0",
            "    1  bee  4",
            "skipped        0 files",
        ):
            assert words in result.stdout, words

    def test_json(self, store: Path, format_name: str) -> None:
        facts = json.loads(run("info", store, "--json").stdout)
        assert (facts["format"], facts["version"], facts["count"], facts["image"]["shape"]) == (
            format_name,
            1,
            12,
            [32, 32, 3],
        )
        assert facts["classes"] == [{"name": name, "count": 4} for name in ("ant", "bee", "cow")]
        assert facts["preprocessing"]["size"] == [32, 32]
        assert facts["preprocessing"]["fit"] == "crop"
        assert facts["store_bytes"] == store.stat().st_size
        assert {"packshift", "pillow"} <= set(facts["tools"])

    def test_many_skipped_files_are_listed_on_request(self, pictures: Path, tmp_path: Path) -> None:
        for number in range(30):
            (pictures / "ant" / f"bad{number:02}.jpg").touch()
        run("convert", pictures, tmp_path / "out.lmdb", "--size", 8)
        short, whole = run("info", tmp_path / "out.lmdb").stdout, run("info", tmp_path / "out.lmdb", "--skipped").stdout
        assert "... and 10 more (--skipped lists all)" in short
        assert "bad29.jpg: empty file" not in short
        assert "ant/bad29.jpg: empty file" in whole


def test_as_a_real_process_with_an_ascii_terminal(pictures: Path, tmp_path: Path) -> None:
    """Names of any bytes never stop the run because the terminal cannot show them."""
    (pictures / "ünï").mkdir()
    for name in (b"\xff\xfe.jpg", "日本.jpg".encode(), b"new\nline.jpg"):
        Path(os.fsdecode(os.fsencode(pictures / "ünï") + b"/" + name)).write_bytes(
            encoded(formula_picture(9, 9)) if b"\n" not in name else b""
        )
    command = [sys.executable, "-m", "packshift", "convert", str(pictures), str(tmp_path / "ö ut.h5"), "--size", "16"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=120)
    assert done.returncode == 3, done
    assert b"Traceback" not in done.stderr
    assert b"skipped \\xfcn\\xef/new\\nline.jpg: empty file" in done.stderr
    assert b"14 of 15 pictures written" in done.stdout
    names = [os.fsencode(name) for name in Reader(tmp_path / "ö ut.h5").paths[-2:]]
    assert names == ["ünï/日本.jpg".encode(), "ünï/".encode() + b"\xff\xfe.jpg"]


def test_without_arguments_the_help_is_shown() -> None:
    result = run()
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")
    assert "packshift convert photos/ photos.lmdb" in result.stdout


def test_every_command_and_option_has_help_and_an_example() -> None:
    for name, command in cli.main.commands.items():
        assert command.help, name
        assert f"packshift {name} " in command.help, f"{name}: no example"
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, f"{name} {option.name}"


def test_every_option_is_in_the_readme() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    for name, command in cli.main.commands.items():
        for option in command.params:
            if isinstance(option, click.Option) and option.name != "help":
                assert any(flag in readme for flag in option.opts), f"{name} {option.opts}"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1234, "1.2 KB"), (5_600_000, "5.6 MB"), (2e15, "2,000.0 TB")],
)
def test_human_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_printable() -> None:
    assert printable("é 日 a\n\x1b\udcff") == "é 日 a\\n\\x1b\\udcff"


def test_a_closed_stdout(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "src", ["a"], 2)
    words = [sys.executable, "-m", "packshift", "convert", str(source), str(tmp_path / "out.lmdb"), "--size", "32"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *words], stderr=subprocess.PIPE, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "unexpected" not in done.stderr
