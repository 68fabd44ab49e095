"""Stage 45, scan_lookback."""

from scan_cases import ScanCases

import stages


class TestScanLookback(ScanCases):
    stage = stages.load("45")
