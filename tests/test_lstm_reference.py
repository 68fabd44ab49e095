"""The float64 reference of the LSTM against other implementations' values, and the module `stages.LSTM`."""

import doctest

import pytest
import torch
from lstm_cases import FOLDER, HASTE, TORCH_ORDER, in_torch_order, layers, load_golden
from torch import nn

import stages
from stages import modules
from stages.families import FLOATING
from stages.families import lstm as family
from stages.toolkit.verify import outputs, relative_error

# ---- the reference


@pytest.mark.parametrize("path", TORCH_ORDER, ids=lambda path: path.stem)
def test_values_and_gradients_of_other_implementations(path):
    golden = load_golden(path)
    results, grads = layers(golden, family.reference, "hard" if "hard" in path.stem else "soft")
    assert {*results, *grads} == {name for name in golden if name in results or name.startswith("d")} - {
        name for name in golden if "zerokink" in name
    }
    for name, x in (results | grads).items():
        assert relative_error(x.detach(), golden[name]) <= 1e-14, name


@pytest.mark.parametrize("path", HASTE, ids=lambda path: path.stem)
def test_values_with_zoneout(path, monkeypatch):
    golden = load_golden(path)
    monkeypatch.setattr(family, "drawn", lambda *_: golden["zoneout_mask"])
    x, h0, c0 = (golden[name] for name in ("x", "h0", "c0"))
    weights = [in_torch_order(golden[name].t()) for name in ("kernel", "recurrent_kernel", "bias")]
    options = {"zoneout": golden["zoneout_prob"].item(), "training": bool(golden["training"])}
    h, (h_last, c_last) = family.reference(x, *weights, h0, c0, **options)
    assert relative_error(h, golden["h"][1:]) <= 1e-14
    assert torch.equal(h[-1], h_last) and relative_error(c_last, golden["c"][-1]) <= 1e-14


def test_at_the_kinks_of_the_golden_file_the_slopes_do_not_matter():
    golden = load_golden(FOLDER / "lstm_caiman_hard_atkink_t12_b3_i6_h8.npz")
    assert (golden["c_all"].abs() == 1).sum() == 20
    assert torch.equal(golden["dx"], golden["dx_zerokink"])


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_the_reference_is_of_the_values_as_they_are_given(dtype):
    arguments = family.make(dict(T=3, B=2, I=4, H=5), dtype)
    assert all(x.dtype is torch.float64 for x in outputs(family.reference(*arguments)))
    wide = [x.double() for x in arguments]
    same = zip(outputs(family.reference(*arguments)), outputs(family.reference(*wide)), strict=True)
    assert all(torch.equal(x, y) for x, y in same)


def test_what_the_incumbent_does_not_know_is_told():
    arguments = family.make(dict(T=3, B=2, I=4, H=5), torch.float32)
    with pytest.raises(NotImplementedError, match="torch.nn.LSTM has no activation"):
        family.incumbent(*arguments, activation="hard")


def test_work_counts_two_products_a_step():
    work = family.work(dict(T=10, B=2, I=3, H=4), 4)
    assert work.operations == 10 * 2 * (2 * 4 * 4 * (3 + 4) + 30 * 4)
    assert work.bytes == 4 * (16 * 3 + 16 * 4 + 16 + 10 * 2 * (3 + 4) + 4 * 2 * 4)


# ---- the module


def pair(*arguments, **options) -> tuple[nn.LSTM, nn.Module]:
    """torch's module and ours, of the same seed."""
    made = []
    for kind in (nn.LSTM, stages.LSTM):
        torch.manual_seed(3)
        made.append(kind(*arguments, **options))
    return tuple(made)


@pytest.mark.parametrize("bias", [True, False])
def test_the_same_seed_gives_the_same_parameters(bias):
    theirs, own = pair(4, 6, bias=bias)
    assert theirs.state_dict().keys() == own.state_dict().keys()
    assert all(torch.equal(x, own.state_dict()[name]) for name, x in theirs.state_dict().items())


@pytest.mark.parametrize("bias", [True, False])
def test_state_dictionaries_load_both_ways(bias):
    for one, other in ((nn.LSTM, stages.LSTM), (stages.LSTM, nn.LSTM)):
        source, target = one(4, 6, bias=bias), other(4, 6, bias=bias)
        target.load_state_dict(source.state_dict())
        x = torch.randn(5, 3, 4)
        for a, b in zip(outputs(source(x)), outputs(target(x)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize(("batch_first", "size"), [(False, (5, 3, 4)), (True, (3, 5, 4)), (False, (5, 4))], ids=str)
def test_calls_are_torchs(batch_first, size, states, dtype):
    theirs, own = pair(4, 6, batch_first=batch_first, dtype=dtype)
    x = torch.randn(size, dtype=dtype, requires_grad=True)
    hx = None
    if states:
        hx = tuple(torch.randn((1, 3, 6) if len(size) == 3 else (1, 6), dtype=dtype, requires_grad=True) for _ in "hc")
    given = [x, *(hx or ())]
    found = []
    for module in (theirs, own):
        results = outputs(module(x, hx))
        weights = [*given, *module.parameters()]
        found.append([*results, *torch.autograd.grad([y.sin().sum() for y in results], weights)])
    allowed = 0.05 if dtype is torch.bfloat16 else 1e-5
    for a, b in zip(*found, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a, b, rtol=allowed, atol=allowed)


def test_options_are_handed_on_and_draw_in_training_alone():
    layer = stages.LSTM(4, 6, activation="hard", recurrent_dropout=0.5, zoneout=0.5)
    x, weights = torch.randn(5, 3, 4), [layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0 + layer.bias_hh_l0]
    options = {"activation": "hard", "recurrent_dropout": 0.5, "zoneout": 0.5}
    for training in (True, False):
        torch.manual_seed(1)
        found, _ = layer.train(training)(x)
        torch.manual_seed(1)
        expected, _ = stages.lstm(x, *weights, training=training, **options)
        assert torch.equal(found, expected)
        assert torch.equal(layer(x)[0], found) is not training
    assert repr(layer) == "LSTM(4, 6, activation='hard', recurrent_dropout=0.5, zoneout=0.5)"
    assert repr(stages.LSTM(4, 6, bias=False, batch_first=True)) == "LSTM(4, 6, bias=False, batch_first=True)"


def test_it_compiles_and_learns():
    torch.manual_seed(0)
    layer = stages.LSTM(3, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 2, 3)
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    optimizer = torch.optim.Adam(layer.parameters(), 0.05)
    losses = []
    for _ in range(30):
        loss = (layer(x)[0][..., :3] - x.roll(1, 0).tanh() / 2).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_layers": 2}, NotImplementedError, "num_layers is 2; allowed: 1"),
        ({"dropout": 0.5}, NotImplementedError, "dropout is 0.5; allowed: 0"),
        ({"bidirectional": True}, NotImplementedError, "bidirectional is True; allowed: False"),
        ({"proj_size": 3}, NotImplementedError, "proj_size is 3; allowed: 0"),
        ({"input_size": 0}, ValueError, "input_size is 0; allowed: 1 or more"),
        ({"hidden_size": -1}, ValueError, "hidden_size is -1; allowed: 1 or more"),
        ({"hidden_size": 2.0}, TypeError, "hidden_size must be an int, got float"),
    ],
)
def test_what_cannot_be_made_is_told(options, error, words):
    with pytest.raises(error, match=f"stages.LSTM: {words}"):
        stages.LSTM(**({"input_size": 4, "hidden_size": 6} | options))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (([1.0],), TypeError, "input must be a torch.Tensor, got list"),
        ((nn.utils.rnn.pack_sequence([torch.ones(3, 4)]),), TypeError, "input is a PackedSequence; allowed: a Tensor"),
        ((torch.ones(4),), ValueError, r"input is \(4,\); allowed: 2 dimensions or 3"),
        ((torch.ones(5, 3, 3),), ValueError, r"input is \(5, 3, 3\); allowed: 4 features"),
        ((torch.ones(5, 3, 4), (torch.ones(3, 6),) * 2), ValueError, r"h of hx is \(3, 6\); allowed: \(1, 3, 6\)"),
        (
            (torch.ones(5, 4), (torch.ones(1, 6), torch.ones(1, 1, 6))),
            ValueError,
            r"c of hx is \(1, 1, 6\); allowed: \(1, 6\)",
        ),
    ],
)
def test_what_cannot_be_called_is_told(given, error, words):
    with pytest.raises(error, match=f"stages.LSTM: {words}"):
        stages.LSTM(4, 6)(*given)


def test_the_example_runs():
    (example,) = (x for x in doctest.DocTestFinder().find(modules.LSTM, "LSTM") if x.examples)
    assert doctest.DocTestRunner().run(example).failed == 0
    assert stages.LSTM is modules.LSTM and "LSTM" in stages.__all__ and "LSTM" in dir(stages)
