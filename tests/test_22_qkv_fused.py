"""Stage 22, qkv_fused."""

from qkv_cases import QkvCases

import stages


class TestQkvFused(QkvCases):
    stage = stages.load("22")
