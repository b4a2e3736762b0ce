"""The report of the checks: places in words, an order by severity, and a limit to what is kept."""

from __future__ import annotations

import json

from hilt.checks.dataset_findings import MAX_FINDINGS, CheckReport, DatasetFinding


def test_findings_name_their_place():
    of = {"severity": "info", "text": "language.none"}
    assert DatasetFinding(**of).place == "dataset"
    assert DatasetFinding(**of, label="episode 3", first=4, last=4).place == "episode 3, step 4"
    assert (
        DatasetFinding(**of, label="trajectory 3", first=4, last=9, column="a/b").place
        == "trajectory 3, steps 4-9, a/b"
    )


def test_report_lists_errors_first_and_counts_what_it_leaves_out():
    report = CheckReport("data", "rlds", ["idle", "files"])
    for number in range(MAX_FINDINGS + 5):
        report.add(DatasetFinding("info", "idle.all", {"count": 9}, number, weight=number % 7))
    assert report.ok
    report.add(DatasetFinding("error", "files.dataset", {"error": "torn"}))
    assert not report.ok and list(report.grouped()) == ["files", "idle"]
    assert [finding.weight for finding in report.grouped()["idle"][:3]] == [6, 6, 6], "the worst first"
    known = json.loads(json.dumps(report.to_json()))
    assert known["findings"][0]["check"] == "files" and len(known["findings"]) == MAX_FINDINGS + 1
    assert known["severities"] == {"error": 1, "warning": 0, "info": MAX_FINDINGS + 5}
    assert known["by_check"] == {"idle": MAX_FINDINGS + 5, "files": 1} and known["ok"] is False
