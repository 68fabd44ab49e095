"""The float64 reference of the LSTM, and the module: other implementations' values and gradients, state dicts."""

import pytest
import torch
from lstm_cases import HASTE, LAYERS, check_haste, check_layers

import stages
from stages.families import lstm


@pytest.mark.parametrize("path", LAYERS, ids=lambda path: path.stem)
def test_values_and_gradients_of_other_implementations(path):
    check_layers(lstm.reference, path, 1e-13)


@pytest.mark.parametrize("path", HASTE, ids=lambda path: path.stem)
def test_zoneout_of_another_implementation(path):
    def step(x, weight_ih, weight_hh, bias, h, c, mask):
        return lstm.formula(x, weight_ih, weight_hh, bias, h, c, mask, hard=False)[1]

    check_haste(step, path, 1e-13)


def test_dropout_keeps_the_mean():
    weight = torch.ones(200, 200)
    kept = lstm.dropped(weight, 0.25, torch.Generator().manual_seed(0))
    assert kept.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert abs(kept.mean().item() - 1) < 0.02


# ---- the module


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_state_dicts_load_both_ways(bias, batch_first):
    for loads in (0, 1):
        both = [stages.LSTM(5, 7, bias=bias, batch_first=batch_first), torch.nn.LSTM(5, 7, 1, bias, batch_first)]
        assert list(both[0].state_dict()) == list(both[1].state_dict())
        both[loads].load_state_dict(both[1 - loads].state_dict())
        x = torch.randn(3, 4, 5)
        batch = x.shape[0 if batch_first else 1]
        states = (torch.randn(1, batch, 7), torch.randn(1, batch, 7))
        for hx in (None, states):
            (y, (h, c)), (y_true, (h_true, c_true)) = (module(x, hx) for module in both)
            for one, true in ((y, y_true), (h, h_true), (c, c_true)):
                assert one.shape == true.shape and torch.allclose(one, true, atol=1e-6)
        grads = [torch.autograd.grad(module(x)[0].square().sum(), list(module.parameters())) for module in both]
        assert all(torch.allclose(one, true, atol=1e-5) for one, true in zip(*grads, strict=True))


def test_without_a_batch():
    module, theirs = stages.LSTM(3, 4), torch.nn.LSTM(3, 4)
    theirs.load_state_dict(module.state_dict())
    x, states = torch.randn(6, 3), (torch.randn(1, 4), torch.randn(1, 4))
    for hx in (None, states):
        (y, (h, c)), (y_true, (h_true, c_true)) = module(x, hx), theirs(x, hx)
        for one, true in ((y, y_true), (h, h_true), (c, c_true)):
            assert one.shape == true.shape and torch.allclose(one, true, atol=1e-6)


def test_states_have_the_dtype_of_the_input():
    module = stages.LSTM(3, 4, dtype=torch.bfloat16)
    y, states = module(torch.randn(2, 2, 3, dtype=torch.bfloat16))
    assert [x.dtype for x in (y, *states)] == [torch.bfloat16] * 3
    y_again, _ = module(torch.randn(2, 2, 3, dtype=torch.bfloat16), states)
    assert y_again.dtype is torch.bfloat16


def test_zoneout_and_dropout_are_for_training():
    module = stages.LSTM(3, 20, zoneout=0.5, recurrent_dropout=0.5)
    x = torch.randn(4, 2, 3)
    draws = [module(x, generator=torch.Generator().manual_seed(seed))[0] for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])


@pytest.mark.parametrize("option", [{"num_layers": 2}, {"dropout": 0.1}, {"bidirectional": True}, {"proj_size": 2}])
def test_what_it_has_not_it_says(option):
    with pytest.raises(NotImplementedError, match=f"LSTM: {next(iter(option))} is .*; allowed: "):
        stages.LSTM(3, 4, **option)
