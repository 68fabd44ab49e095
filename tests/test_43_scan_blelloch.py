"""Stage 43, scan_blelloch."""

from scan_cases import ScanCases

import stages


class TestScanBlelloch(ScanCases):
    stage = stages.load("43")
    joins = True
