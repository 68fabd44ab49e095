"""Stage 33, vlstm_tuned."""

from vlstm_cases import VlstmGradientCases

import stages


class TestVlstmTuned(VlstmGradientCases):
    stage = stages.load("33")
