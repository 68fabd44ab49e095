"""Stage 44, scan_warp."""

from scan_cases import ScanCases

import stages


class TestScanWarp(ScanCases):
    stage = stages.load("44")
