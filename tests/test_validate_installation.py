"""The installation report: this environment is fine, and a missing or wrong part is noticed."""

from __future__ import annotations

import io
import json

import pytest

from areal.tools import validate_installation as doctor
from areal.tools.validate_installation import Part


@pytest.fixture(scope="module")
def report() -> doctor.Report:
    return doctor.collect_report()


def test_report_of_this_environment_is_ok_and_complete(report):
    assert report.ok
    names = {finding.name for finding in report.findings}
    assert {"python", "torch", "transformers", "ray", "wandb", "git"} <= names
    assert report.devices["CPU cores"]
    assert "gloo" in report.devices["collectives"]
    json.dumps(report.to_json())


def test_every_missing_optional_part_says_what_it_disables(report):
    assert all(finding.note for finding in report.findings if finding.status == "missing")


@pytest.mark.parametrize(
    ("part", "status"),
    [
        (Part("no_such_module_of_ours", "no-such", "everything"), "missing"),
        (Part("json", "torch", "everything", wanted="1."), "wrong version"),
        (Part("json", "torch", "everything", wanted="2."), "ok"),
    ],
)
def test_core_part_status(part, status):
    finding = doctor._core_finding(part)
    assert finding.status == status
    assert finding.fatal == (status != "ok")


def test_core_part_that_cannot_be_imported_is_broken(tmp_path, monkeypatch):
    (tmp_path / "broken_part.py").write_text("raise OSError('libx.so: not found')")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = doctor._core_finding(Part("broken_part", "broken-part", "everything"))
    assert finding.status == "broken"
    assert "libx.so" in finding.note


def test_main_missing_core_part_exits_1_and_names_it(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CORE", (Part("no_such_module_of_ours", "no-such", "everything"),))
    assert doctor.main([]) == 1
    assert "no-such" in capsys.readouterr().out


def test_main_json_is_the_report(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CORE", (Part("json", "torch", "everything"),))
    assert doctor.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_print_report_missing_part_shows_the_extra(report):
    from rich.console import Console

    out = io.StringIO()
    doctor.print_report(report, Console(file=out, width=200))
    assert "Core parts" in out.getvalue()
    missing = [f for f in report.findings if f.status == "missing" and "areal[" in f.note]
    assert all(f.note in out.getvalue() for f in missing)
