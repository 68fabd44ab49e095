"""Stage 40, scan_sequential."""

from scan_cases import ScanCases

import stages


class TestScanSequential(ScanCases):
    stage = stages.load("40")
