"""Stage 41, scan_pipelined."""

from scan_cases import ScanCases

import stages


class TestScanPipelined(ScanCases):
    stage = stages.load("41")
