"""The LSTM, one layer in one direction: the state of a step goes through a product before the next step may begin.

    z_t = W x_t + R h_(t-1) + b                  four preactivations a unit, of the gates i, f, g, o: torch's order
    c_t = s(f) c_(t-1) + s(i) t(g)               s, t: sigmoid and tanh ("soft"), or straight lines, cut off ("hard"):
    h_t = s(o) t(c_t)                            s(z) = clamp(z / 8 + 1/2, 0, 1), t(z) = clamp(z, -1, 1)

**What can be done at once is**: W x_t + b of all steps is one large product, made before the first step, and autograd
gives its gradients. What remains is R h_(t-1), T products with few rows, each waiting for the one before; the operators
of the stages are about these. The gradient of R needs no steps either: it is dz^T h of all steps, one large product.

**Kept for the backward**: z [T, B, 4 H] and c [T, B, H]. What the gates were is computed again.

**16 bits**: x, h, z and the weights have 16, sums and the cell state c float32, throughout.

**The kinks** of "hard", where z or c is just at the end of a line: the slope there is that of the line, 1/8 or 1, as
`torch.clamp` has it.

**Zoneout** keeps units of h as they were: h_t = h_(t-1) + m_t (h' - h_(t-1)), h' what is above, m_t drawn, 1 with
probability 1 - p; where nothing is trained m_t is 1 - p. c is not held. **Recurrent dropout** drops weights: R times a
mask / (1 - p), the same for all steps.

Hochreiter and Schmidhuber, 1997; the forget gate: Gers et al., 2000; zoneout: Krueger et al., 2017,
https://arxiv.org/abs/1606.01305; dropped recurrent weights: Merity et al., 2018, https://arxiv.org/abs/1708.02182.
"""

import warnings
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.families import (
    FLOATING,
    Choice,
    Work,
    accumulator,
    check_alike,
    check_fellow,
    check_tensor,
    listing,
    random,
    shape,
    unit_roundoff,
    widened,
)
from stages.toolkit import operator
from stages.toolkit.kernels import Kernels

NAME = "lstm"
CALL = (
    "lstm(x, weight_ih, weight_hh, bias=None, h0=None, c0=None, *, activation='soft', recurrent_dropout=0.0, "
    "zoneout=0.0, training=True, generator=None)"
)
LAUNCHER = "lstm_forward"
ARGUMENTS = ("x", "weight_ih", "weight_hh", "bias", "h0", "c0")
OUTPUTS = ("h", "h_T", "c_T")
SIZES = ("T", "B", "I", "H")
PROBLEMS = (
    (12, 3, 6, 8),
    (6, 33, 31, 33),
    (5, 2, 1, 31),
    (3, 5, 40, 64),
    (1, 3, 9, 1),
    (0, 2, 3, 4),
    (4, 0, 3, 4),
    (4, 2, 0, 3),
    (4, 2, 3, 0),
)
XRAY = (4, 32, 32, 32)
BENCH = {"cpu": ((8, 32, 64, 64),), "cuda": ((512, 16, 512, 512), (1024, 1, 512, 512), (512, 64, 1024, 1024))}
SWEEP = {
    "cpu": tuple((8, 32, 32 << n, 32 << n) for n in range(4)),
    "cuda": tuple((512, 16, 1 << n, 1 << n) for n in range(6, 12)),
}
DTYPES = FLOATING
INCUMBENT, BACKWARD = "torch.nn.LSTM", True  # cuDNN's

MANY = 1 << 16  # preactivations
ACTIVATIONS = ("soft", "hard")  # as the kernels number them
GATES = 4
WORDS = torch.int32  # of what blocks tell each other

# Of stage 61: a block has so many hidden units, and the R of the largest H goes into the blocks' registers.
UNITS = {4: 512, 8: 1024}
MOST_UNITS_OF_DOUBLE = 4
CPU_BLOCKS = 64  # that the CPU device keeps at once


def cut(hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int] | None:
    """Hidden units of a block of stage 61, and its blocks: a multiple of 4, all at once. None: there is no such cut."""
    at_once = CPU_BLOCKS
    if device.type == "cuda":
        at_once = torch.cuda.get_device_properties(device).multi_processor_count
    for units, most in UNITS.items():
        blocks = GATES * -(-hidden // (GATES * units))
        if hidden <= most and blocks <= at_once and (units <= MOST_UNITS_OF_DOUBLE or dtype is not torch.float64):
            return units, blocks
    return None


def launch_forward(kernels: Kernels, products: Tensor, *others: object) -> None:
    """The launcher `lstm_forward` of a stage's module."""
    kernels.launch("lstm_forward", products.device, products, *others)


def launch_backward(kernels: Kernels, dh: Tensor, *others: object) -> None:
    """The launcher `lstm_backward` of a stage's module."""
    kernels.launch("lstm_backward", dh.device, dh, *others)


def define(
    name: str,
    kernels: Kernels,
    *,
    launch_forward: Callable[..., None] = launch_forward,
    launch_backward: Callable[..., None] = launch_backward,
    check_size: Callable[[Tensor], None] = lambda weight_hh: None,
) -> Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Register the operators of a stage and return its public function.

    The operator takes the products W x + b, [T, B, 4 H], and gives h, [T, B, H], the last c, [B, H], and for its
    backward z, [T, B, 4 H], and c of all steps, [T, B, H] (of no steps where nobody asks for gradients). The backward
    gives dz, dh0 and dc0. z and dz have x's dtype; c, mask, dh0 and dc0 that of the sums. `mask` is zoneout's,
    [T, B, H] or [0, 0, 0]. No launcher is called with T = 0; B or H may be 0.

    Args:
        name: Of the operator.
        kernels: The modules of the stage.
        launch_forward: How the forward is launched, `launch_forward(kernels, products, weight_hh, h0, c0, mask, h,
            c_last, z, cells, activation)`.
        launch_backward: How the backward is launched, `launch_backward(kernels, dh, dc_last, weight_hh, c0, mask, z,
            cells, dz, dh0, dc0, activation)`.
        check_size: Raises a ValueError if a weight_hh is too large for the stage.
    """

    def run(products, weight_hh, h0, c0, mask, activation=0, save=True) -> tuple[Tensor, ...]:
        results = fake(products, weight_hh, h0, c0, mask, activation, save)
        if products.shape[0]:
            launch_forward(kernels, products, weight_hh, h0, c0, mask, *results, activation)
        else:
            results[1].copy_(c0)
        return results

    def fake(products, weight_hh, h0, c0, mask, activation=0, save=True) -> tuple[Tensor, ...]:
        seq, batch, gates = products.shape
        kept = seq if save else 0
        h, c_last = operator.empty((seq, *h0.shape), like=products), operator.empty(h0.shape, like=c0)
        return h, c_last, operator.empty((kept, batch, gates), like=h), operator.empty((kept, *h0.shape), like=c0)

    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        _, weight_hh, h0, c0, mask, ctx.activation, _ = inputs
        h, _, z, cells = output
        ctx.save_for_backward(weight_hh, h0, c0, mask, h, z, cells)
        ctx.mark_non_differentiable(z, cells)
        ctx.set_materialize_grads(False)

    def differentiate(ctx, dh: Tensor | None, dc_last: Tensor | None, _z, _cells) -> tuple[Tensor | None, ...]:
        if dh is None and dc_last is None:
            return (None,) * 7
        weight_hh, h0, c0, mask, h, z, cells = ctx.saved_tensors
        dh = operator.nothing(h.shape, like=h) if dh is None else dh
        dc_last = operator.nothing(c0.shape, like=c0) if dc_last is None else dc_last
        dz, dh0, dc0 = compute_backward(dh, dc_last, weight_hh, c0, mask, z, cells, ctx.activation)
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = torch.zeros_like(weight_hh)
            if len(h):
                dweight = torch.addmm(dz[0].mT @ h0, dz[1:].flatten(0, 1).mT, h[:-1].flatten(0, 1))
        return dz, dweight, dh0.to(h0.dtype), dc0, None, None, None

    def run_backward(dh, dc_last, weight_hh, c0, mask, z, cells, activation) -> tuple[Tensor, ...]:
        dz, dh0, dc0 = fake_backward(dh, dc_last, weight_hh, c0, mask, z, cells, activation)
        if z.shape[0]:
            launch_backward(kernels, dh, dc_last, weight_hh, c0, mask, z, cells, dz, dh0, dc0, activation)
        else:
            dh0.zero_(), dc0.copy_(dc_last)
        return dz, dh0, dc0

    def fake_backward(dh, dc_last, weight_hh, c0, mask, z, cells, activation) -> tuple[Tensor, ...]:
        return operator.empty(z.shape, like=z), *(operator.empty(c0.shape, like=c0) for _ in range(2))

    def twice(ctx, *grads: Tensor):
        raise NotImplementedError(f"stages::{name} has no second derivatives: its backward is not differentiable")

    compute_backward = operator.register(
        f"{name}_backward",
        "(Tensor dh, Tensor dc_last, Tensor weight_hh, Tensor c0, Tensor mask, Tensor z, Tensor cells, int activation)"
        " -> (Tensor, Tensor, Tensor)",
        run_backward,
        fake=fake_backward,
        backward=twice,
    )
    compute = operator.register(
        name,
        "(Tensor products, Tensor weight_hh, Tensor h0, Tensor c0, Tensor mask, int activation=0, bool save=True)"
        " -> (Tensor h, Tensor c_last, Tensor z, Tensor cells)",
        run,
        fake=fake,
        setup_context=setup_context,
        backward=differentiate,
    )

    def lstm(
        x: Tensor,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: Tensor | None = None,
        h0: Tensor | None = None,
        c0: Tensor | None = None,
        *,
        activation: str = "soft",
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
        training: bool = True,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One LSTM layer: z = W x + R h + b, c = s(f) c + s(i) t(g), h = s(o) t(c), over T steps.

        W, R and b are weight_ih, weight_hh and bias, z the preactivations of i, f, g and o. Sums and c are float32, for
        float64 float64. Results are the same bit for bit on every run.

        Args:
            x: [T, B, I], T from 0 on: float64, float32, float16 or bfloat16, on a CPU or a CUDA device. Any strides,
                0 included, here and in all that follow.
            weight_ih: [4 H, I], of the same dtype and device, as all that follow; the gates in torch's order, i, f, g,
                o, as all of torch.nn.LSTM's weights.
            weight_hh: [4 H, H].
            bias: [4 H]; of torch.nn.LSTM's two the sum. None: zeros.
            h0: [B, H]: h before the first step. None: zeros.
            c0: [B, H]: c before the first step; for 16-bit x also float32, as c_T is. None: zeros.
            activation: "soft": s and t are sigmoid and tanh. "hard": clamp(z / 8 + 1/2, 0, 1) and clamp(z, -1, 1).
            recurrent_dropout: Probability with which a weight of weight_hh is dropped, in training, for all steps; the
                others are divided by 1 - recurrent_dropout.
            zoneout: Probability with which a unit of h stays what it was a step before; where nothing is trained h is
                the mean, zoneout * old + (1 - zoneout) * new.
            training: Whether recurrent_dropout and zoneout draw.
            generator: What they draw from, on the device of x. None: torch's own.

        Returns:
            h, [T, B, H], contiguous, of x's dtype, and (h_T, c_T), both [B, H]: h's last step, a view of it (h0 if T is
            0), and the last c, in float32 or float64. They go in as h0 and c0 of the steps that follow. Differentiable
            once, for all six tensors, through all three results.

        Raises:
            TypeError: A tensor is none, is not dense, or has another dtype than those above, or an option is of the
                wrong type.
            ValueError: A tensor has another number of dimensions, the sizes do not fit each other, the devices differ,
                the activation is unknown, a probability is none (recurrent_dropout has to be below 1), or the stage
                has no place for such an H.
            KernelFault: The CPU device caught the kernel doing what it may not.

        Example:
            >>> import stages, torch
            >>> bias = torch.tensor([9.0, 9.0, 0.25, 9.0])  # all gates are open, and 1/4 comes in at each step
            >>> x, weight = torch.zeros(3, 1, 1), torch.zeros(4, 1)
            >>> h, (h_T, c_T) = stages.load("lstm_cell").lstm(x, weight, weight, bias, activation="hard")
            >>> h.flatten(), c_T
            (tensor([0.2500, 0.5000, 0.7500]), tensor([[0.7500]]))
        """
        options = dict(recurrent_dropout=recurrent_dropout, zoneout=zoneout, training=training, generator=generator)
        check(x, weight_ih, weight_hh, bias, h0, c0, activation=activation, **options)
        check_size(weight_hh)
        seq, batch, _ = x.shape
        hidden, sums = weight_hh.shape[1], accumulator(x.dtype)
        products = F.linear(x, weight_ih, bias)
        weight_hh = dropped(weight_hh, recurrent_dropout, training, generator)
        mask = mask_of_zoneout((seq, batch, hidden), x, zoneout, training, generator)
        h0 = operator.zeros((batch, hidden), like=x, dtype=x.dtype) if h0 is None else h0
        c0 = operator.zeros((batch, hidden), like=x, dtype=sums) if c0 is None else c0
        c0 = c0 if c0.dtype is sums else c0.to(sums)
        save = torch.is_grad_enabled() and any(t.requires_grad for t in (products, weight_hh, h0, c0))
        h, c_last, _, _ = compute(products, weight_hh, h0, c0, mask, ACTIVATIONS.index(activation), save)
        return h, (h[-1] if seq else h0, c_last)

    return lstm


def dropped(weight: Tensor, probability: float, training: bool, generator: torch.Generator | None) -> Tensor:
    """The weight with some of its elements dropped, the others divided by what is left; itself where none can be."""
    if not (training and probability):
        return weight
    kept = drawn(weight.shape, weight, 1 - probability, generator)
    return weight * (kept / (1 - probability)).to(weight.dtype)


def mask_of_zoneout(
    size: tuple[int, int, int], like: Tensor, probability: float, training: bool, generator: torch.Generator | None
) -> Tensor:
    """How much of a step's h is new, [T, B, H] in the dtype of the sums; [0, 0, 0] without zoneout."""
    sums = accumulator(like.dtype)
    if not probability:
        return operator.empty((0, 0, 0), like=like, dtype=sums)
    if training:
        return drawn(size, like, 1 - probability, generator).to(sums)
    return operator.empty((), like=like, dtype=sums).fill_(1 - probability).expand(size)


def drawn(size: tuple[int, ...], like: Tensor, probability: float, generator: torch.Generator | None) -> Tensor:
    """1 with the probability, else 0, in float32: the same of one generator whatever the dtype of `like` is."""
    return operator.empty(size, like=like, dtype=torch.float32).bernoulli_(probability, generator=generator)


def check(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    *,
    activation: str = "soft",
    recurrent_dropout: float = 0.0,
    zoneout: float = 0.0,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the LSTM of these makes sense."""
    check_tensor(CALL, "x", x, 3)
    check_fellow(CALL, "weight_ih", weight_ih, "x", x, 2)
    check_fellow(CALL, "weight_hh", weight_hh, "x", x, 2)
    if bias is not None:
        check_fellow(CALL, "bias", bias, "x", x, 1)
    if h0 is not None:
        check_fellow(CALL, "h0", h0, "x", x, 2)
    if c0 is not None:
        sums = accumulator(x.dtype)
        check_tensor(CALL, "c0", c0, 2, (sums,) if sums is x.dtype else (sums, x.dtype))
        if c0.device != x.device:
            check_alike(CALL, "c0", c0.to(x.dtype), "x", x)
    if not isinstance(activation, str):
        raise TypeError(f"{CALL}: activation must be a str, got {type(activation).__name__}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{CALL}: activation is {activation!r}; allowed: {listing([repr(a) for a in ACTIVATIONS])}")
    check_probability("recurrent_dropout", recurrent_dropout, "from 0 to below 1", recurrent_dropout == 1)
    check_probability("zoneout", zoneout, "from 0 to 1")
    if not isinstance(training, bool):
        raise TypeError(f"{CALL}: training must be True or False, got {type(training).__name__}")
    if not (generator is None or isinstance(generator, torch.Generator)):
        raise TypeError(f"{CALL}: generator must be a torch.Generator or None, got {type(generator).__name__}")
    batch, inputs = x.shape[1:]
    rows, hidden = weight_hh.shape
    if rows != 4 * hidden:
        raise ValueError(
            f"{CALL}: weight_hh is {shape(weight_hh)}; allowed: (4 H, H), here {(4 * hidden, hidden)} or another H"
        )
    if weight_ih.shape != (rows, inputs):
        raise ValueError(
            f"{CALL}: weight_ih is {shape(weight_ih)}, x is {shape(x)} and weight_hh is {shape(weight_hh)}; allowed: "
            f"(4 H, I), here {(rows, inputs)}"
        )
    if bias is not None and bias.shape != (rows,):
        raise ValueError(
            f"{CALL}: bias is {shape(bias)} and weight_hh is {shape(weight_hh)}; allowed: (4 H,), here {(rows,)}"
        )
    for name, value in (("h0", h0), ("c0", c0)):
        if value is not None and value.shape != (batch, hidden):
            raise ValueError(
                f"{CALL}: {name} is {shape(value)}, x is {shape(x)} and weight_hh is {shape(weight_hh)}; allowed: "
                f"(B, H), here {(batch, hidden)}"
            )


def check_probability(name: str, value: object, allowed: str, excluded: bool = False) -> None:
    """Raise TypeError or ValueError unless the option is a probability, and not one that is excluded."""
    if not isinstance(value, (float, int)) or isinstance(value, bool):
        raise TypeError(f"{CALL}: {name} must be a real number (float or int), got {type(value).__name__}")
    if not 0 <= value <= 1 or excluded:
        raise ValueError(f"{CALL}: {name} is {value}; allowed: {allowed}")


FASTEST = ("61_lstm_persistent", "60_lstm_cell")


def choose(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    *,
    activation: str = "soft",
    recurrent_dropout: float = 0.0,
    zoneout: float = 0.0,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> Choice:
    """By H: stage 61 keeps weight_hh in registers, as far as they go."""
    options = dict(recurrent_dropout=recurrent_dropout, zoneout=zoneout, training=training, generator=generator)
    check(x, weight_ih, weight_hh, bias, h0, c0, activation=activation, **options)
    if cut(weight_hh.shape[1], x.dtype, x.device):
        return Choice("61_lstm_persistent", "one launch for all steps, weight_hh stays in registers")
    return Choice("60_lstm_cell", "weight_hh does not fit into the registers of this device, for stage 61")


def make(
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    seed: int = 0,
    *,
    activation: str = "soft",
    **options: object,
) -> tuple[Tensor, ...]:
    """Normal x, preactivations and states of about 1; c0 of 16-bit x is float32, as c_T is.

    "hard" gets an eighth of it in 16 bits, or where z are so many that one of them is at a kink to within float32's
    rounding: where that puts it past the kink the slope is wholly another.
    """
    seq, batch, inputs, hidden = (sizes[name] for name in SIZES)
    at_kinks = dtype.itemsize == 2 or seq * batch * 4 * hidden > MANY
    large = 0.125 if activation == "hard" and at_kinks else 1.0
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return scale * random(size, torch.float64, generator)

    x = normal(seq, batch, inputs)
    weight_ih = normal(4 * hidden, inputs, scale=large * max(inputs, 1) ** -0.5)
    weight_hh = normal(4 * hidden, hidden, scale=large * max(hidden, 1) ** -0.5)
    bias, h0, c0 = (normal(*size, scale=large / 2) for size in ((4 * hidden,), (batch, hidden), (batch, hidden)))
    return *(t.to(dtype) for t in (x, weight_ih, weight_hh, bias, h0)), c0.to(accumulator(dtype))


def reference(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    *,
    activation: str = "soft",
    recurrent_dropout: float = 0.0,
    zoneout: float = 0.0,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """h and the last h and c, step by step, in float64 of the values as they are given; it draws as the stages do."""
    x, weight_ih, weight_hh, bias, h0, c0 = (
        None if t is None else widened(t) for t in (x, weight_ih, weight_hh, bias, h0, c0)
    )
    (seq, batch, _), hidden = x.shape, weight_hh.shape[1]
    weight_hh = dropped(weight_hh, recurrent_dropout, training, generator)
    mask = mask_of_zoneout((seq, batch, hidden), x, zoneout, training, generator)
    h = torch.zeros(batch, hidden).to(x) if h0 is None else h0
    c = torch.zeros(batch, hidden).to(x) if c0 is None else c0
    products, steps = F.linear(x, weight_ih, bias), []
    for t in range(seq):
        new, c = cell(products[t] + h @ weight_hh.mT, c, activation)
        h = h + mask[t] * (new - h) if zoneout else new
        steps.append(h)
    # Without steps there is nothing in h, but it has gradients, which are 0.
    return torch.stack(steps) if steps else products[..., :hidden] * weight_hh.sum(), (h, c)


def cell(z: Tensor, c: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """h and c of a step from its preactivations z, [B, 4 H], and c before it."""
    i, f, g, o = z.chunk(4, 1)
    if activation == "soft":
        sigmoid, tanh = torch.sigmoid, torch.tanh
    else:
        sigmoid, tanh = (lambda z: (z / 8 + 0.5).clamp(0, 1)), (lambda z: z.clamp(-1, 1))
    c = sigmoid(f) * c + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c


def tolerance(sizes: Mapping[str, int], dtype: torch.dtype, **options: object) -> dict[str, float]:
    """How far each result may be from the truth, r = |x - ref| / |ref|: in 16 bits x W, z and h are rounded."""
    wide = accumulator(dtype)
    allowed = 1e-5 * unit_roundoff(wide) / unit_roundoff(torch.float32) if wide is dtype else 5 * unit_roundoff(dtype)
    return dict.fromkeys((*OUTPUTS, *ARGUMENTS), allowed)


def incumbent(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """What torch.nn.LSTM calls, which knows no options and has c in x's dtype."""
    if options:
        raise NotImplementedError(f"torch.nn.LSTM has no {', '.join(options)}")
    zero = torch.zeros(1, x.shape[1], weight_hh.shape[1]).to(x)
    h0, c0 = (zero if t is None else t[None].to(x.dtype) for t in (h0, c0))
    weights = [weight_ih, weight_hh, *(() if bias is None else (bias, torch.zeros_like(bias)))]
    with warnings.catch_warnings():  # the weights do not lie one after the other: cuDNN's copy is some microseconds
        warnings.simplefilter("ignore")
        h, h_last, c_last = torch._VF.lstm(x, (h0, c0), weights, bias is not None, 1, 0.0, True, False, False)
    return h, (h_last[0], c_last[0])


def work(sizes: Mapping[str, int], itemsize: int, **options: object) -> Work:
    """Two products a step, some 30 operations a unit; x, the weights, h and the states moved once."""
    seq, batch, inputs, hidden = (sizes[name] for name in SIZES)
    weights = 4 * hidden * (inputs + hidden + 1)
    return Work(
        seq * batch * hidden * (8 * (inputs + hidden) + 30),
        itemsize * (weights + seq * batch * (inputs + hidden) + 4 * batch * hidden),
    )
