"""Loggers: the line format, files, colours, and that nobody else's logging is touched."""

from __future__ import annotations

import logging as std
import re

import pytest

from areal.utils import logging

LINE = re.compile(r"\(AReaL\) \d{8}-\d\d:\d\d:\d\d\.\d{3} (?P<name>.+?) (?P<level>[A-Z]+): (?P<message>.*)")


@pytest.fixture(autouse=True)
def _files_closed():
    yield
    logging.close_file_logging()


def test_line_format_on_stderr(capsys):
    logging.getLogger("FSDPEngine").info("loss %.2f", 0.5)

    match = LINE.fullmatch(capsys.readouterr().err.strip())

    assert match
    assert match.groupdict() == {"name": "FSDPEngine", "level": "INFO", "message": "loss 0.50"}


def test_debug_below_default_level_is_not_shown(capsys):
    logging.getLogger("Quiet").debug("hidden")
    logging.getLogger("Loud", level=logging.DEBUG).debug("shown")
    err = capsys.readouterr().err
    assert "hidden" not in err
    assert "shown" in err


def test_file_logging_writes_main_and_merged_for_existing_and_future_loggers(tmp_path):
    before = logging.getLogger("Before")
    logging.setup_file_logging(tmp_path)
    before.info("one")
    logging.getLogger("After").warning("two\nlines")

    main = (tmp_path / "main.log").read_text().splitlines()
    merged = (tmp_path / "merged.log").read_text().splitlines()

    assert LINE.fullmatch(main[0])["message"] == "one"
    assert main[1:] == [main[1], "lines"]
    assert all(line.startswith("[main]    ") for line in merged)
    assert [line[10:] for line in merged] == main


def test_file_logging_twice_writes_once(tmp_path):
    logging.setup_file_logging(tmp_path)
    logging.setup_file_logging(tmp_path)
    logging.getLogger("Once").info("x")
    assert len((tmp_path / "main.log").read_text().splitlines()) == 1


def test_file_logging_to_another_directory_moves_there(tmp_path):
    logging.setup_file_logging(tmp_path / "a")
    logging.setup_file_logging(tmp_path / "b")
    logging.getLogger("Moved").info("x")
    assert (tmp_path / "a" / "main.log").read_text() == ""
    assert "x" in (tmp_path / "b" / "main.log").read_text()


def test_exception_has_its_traceback_in_the_file(tmp_path):
    logging.setup_file_logging(tmp_path)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("Trace").exception("failed")
    assert "ValueError: boom" in (tmp_path / "main.log").read_text()


def test_root_logger_is_left_alone_but_sees_records(caplog):
    root = std.getLogger()
    before = (root.level, list(root.handlers))

    logging.getLogger("Relay").warning("seen by handlers of the application")

    assert (root.level, list(root.handlers)) == before
    assert caplog.text.count("seen by handlers") == 1


def test_console_line_is_not_doubled_by_a_root_console_handler(capsys):
    import sys

    handler = std.StreamHandler(sys.stderr)
    std.getLogger().addHandler(handler)
    try:
        logging.getLogger("Single").info("only once")
    finally:
        std.getLogger().removeHandler(handler)
    assert capsys.readouterr().err.count("only once") == 1


@pytest.mark.parametrize(
    ("name", "level", "colour"),
    [
        ("FSDPEngine", logging.INFO, "\033[34m"),
        ("[FSDPEngine Rank 3]", logging.INFO, "\033[34m"),
        ("FSDPEngine", logging.WARNING, "\033[33m"),
        ("Nobody", logging.ERROR, "\033[31m"),
    ],
)
def test_forced_colour_depends_on_name_and_level(name, level, colour, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    logging.getLogger(name).log(level, "x")
    assert capsys.readouterr().err.startswith(colour)


def test_no_color_wins_over_force_color(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    logging.getLogger("FSDPEngine").info("x")
    assert "\033" not in capsys.readouterr().err


def test_http_library_loggers_are_quiet():
    logging.getLogger("Any")
    assert std.getLogger("httpx").getEffectiveLevel() >= std.WARNING
