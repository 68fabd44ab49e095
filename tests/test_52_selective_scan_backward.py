"""Stage 52, selective_scan_backward."""

from selective_scan_cases import SelectiveScanCases

import stages


class TestSelectiveScanBackward(SelectiveScanCases):
    stage = stages.load("52")
    odd = (2, 5, 7, 37)
    small = (2, 3, 2, 5)
