"""Checks of the content of a dataset of any format: what would harm training, where it is, and what to do about it.

    report = check_dataset("bridge/1.0.0")
    for finding in report.findings:
        print(finding.severity, finding.place, finding.what, finding.cure)

Every check sees one episode at a time, so the memory does not grow with the length of a dataset. docs/formats.md
describes each of them.
"""

from hilt.checks.dataset_findings import CheckReport, DatasetFinding
from hilt.checks.run_checks import CHECKS, check_dataset

__all__ = ["CHECKS", "CheckReport", "DatasetFinding", "check_dataset"]
