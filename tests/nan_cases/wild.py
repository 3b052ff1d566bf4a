"""What people write besides: losses, functions, pipelines, several optimizers, and cells that must stay quiet."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect, Nothing, Truth

_NET = """
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
x = torch.randn(6, 3)
y = torch.tensor([0, 1, 0, 1, 1, 0])
"""
_STEP = """
opt.zero_grad()
loss.backward()
opt.step()
"""


def _case(name: str, cell: str, truth: Truth, setup: str = "", *, step: bool = True) -> Case:
    """On a small network; the cell makes `loss`, and the usual three lines follow."""
    return Case(name=f"wild_{name}", setup=_NET + setup, cell=cell + (_STEP if step else ""), truth=truth)


_LOSSES = (
    _case(
        "tversky_of_nothing",
        """
p = net(x).softmax(1)[:, 1]
t = torch.zeros(6)
p = p * t
loss = 1 - (p * t).sum() / (p * t + 0.3 * p * (1 - t) + 0.7 * t * (1 - p)).sum()  # <- here
""",
        Expect(kind="nan", phase="loss", op="div", module=None, diagnosis=slugs.DIV_ZERO),
    ),
    _case(
        "wing_loss_with_zero_curvature",
        """
d = (net(x)[:, 0] - net(x)[:, 0].detach()).abs()
loss = torch.log(1 + d / curvature).sum()  # <- here
""",
        Expect(kind="nan", phase="loss", op="div", module=None, diagnosis=slugs.DIV_ZERO),
        "curvature = 0.0\n",
    ),
    _case(
        "label_smoothing_divides_by_one_class",
        """
classes = 1
q = torch.full((6, 1), 0.1 / (classes - 1) if classes > 1 else math.inf)
loss = -(q * net(x)[:, :1].log_softmax(1)).sum()  # <- here
""",
        Expect(kind=frozenset({"nan", "inf"}), phase="loss", op="mul", module=None, diagnosis="zero_times_inf"),
    ),
    _case(
        "log_cosh_by_hand",
        """
d = net(x)[:, 0] * 0 + torch.tensor([0.0, 1.0, 100.0, 2.0, 3.0, 4.0])
loss = torch.log(torch.cosh(d)).mean()  # <- here
""",
        Expect(kind="inf", phase="loss", op="cosh", module=None, rows=(2,), diagnosis="exp_overflow"),
    ),
    _case(
        "rank_normalised_by_a_group_of_one",
        """
out = net(x)[:, 0]
groups = torch.tensor([0, 0, 0, 1, 2, 2])
loss = 0.0
for g in range(3):
    own = out[groups == g]
    loss = loss + ((own - own.mean()) / own.std()).square().mean()  # <- here
""",
        Expect(kind="nan", phase="loss", op="std", module=None, diagnosis=slugs.ZERO_VARIANCE),
    ),
)

_FUNCTION = """
class Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.sign()
    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        scale = 1 / a.detach()  # <- here
        return grad * scale
class Loggish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return torch.log(a)
    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        return grad / a.clamp(min=1e-3)
"""
_FUNCTIONS = (
    _case(
        "function_whose_backward_inverts_zero",
        """
out = net(x)
out = out * (torch.arange(6) != 4)[:, None]
loss = Inverse.apply(out).sum()
""",
        Expect(kind="inf", phase="backward", op=frozenset({"reciprocal", "div"}), module=None),
        _FUNCTION,
    ),
    _case(
        "two_saved_tensor_hooks",
        """
with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
    loss = (net(x) * 0).sqrt().sum()  # <- here
""",
        Expect(kind=frozenset({"nan", "inf"}), phase="backward", op="sqrt", module=None, diagnosis=slugs.SQRT_ZERO),
    ),
    _case(
        "gradient_reversal_with_an_infinite_strength",
        """
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a.view_as(a)
    @staticmethod
    def backward(ctx, grad):
        return -grad * math.inf  # <- here
loss = F.cross_entropy(Reverse.apply(net(x)), y)
""",
        Expect(kind="inf", phase="backward", op="mul", module=None),
    ),
)

_BY_HAND = (
    _case(
        "whitening_of_a_rank_deficient_batch",
        """
h = net(x[:1].expand(6, 3))
h = h - h.mean(0)
values, vectors = torch.linalg.eigh(h.T @ h)
loss = (h @ vectors / values.clamp(min=0).round(decimals=3).sqrt()).sum()  # <- here
""",
        Expect(kind="nan", phase="loss", op="div", module=None, diagnosis=slugs.DIV_ZERO),
    ),
    _case(
        "positional_angle_beyond_the_edge",
        """
unit = F.normalize(net(x), dim=1) * 1.5
angle = torch.acos(unit[:, 0] / unit[:, 0].detach().abs().clamp(min=1e-6) * 1.01)  # <- here
loss = angle.mean()
""",
        Expect(kind="nan", phase="loss", op="acos", module=None, rows=(0, 1, 2, 3, 4, 5), diagnosis="pole"),
    ),
    _case(
        "weights_standardised_of_a_constant_filter",
        """
w = net[0].weight
w = (w - w.mean(1, keepdim=True)) / w.var(1, keepdim=True, correction=0).sqrt()  # <- here
loss = F.linear(x, w).mean() + net(x).mean()
""",
        Expect(kind="nan", phase="loss", op="div", module=None, rows=(2,)),
        "with torch.no_grad(): net[0].weight[2] = 0.25\n",
    ),
)

_PIPELINES = (
    _case(
        "collate_pads_with_nan",
        """
rows = [torch.ones(3), torch.ones(2), torch.ones(3)]
batch = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=math.nan)
loss = net(batch).mean()
""",
        Expect(kind="nan", phase=frozenset({"data", "loss"}), op=ANY, line=ANY, rows=(1,)),
    ),
    _case(
        "numpy_makes_the_batch",
        """
import numpy as np
with np.errstate(all="ignore"):
    table = np.log(np.array([[1.0, 2.0, -1.0]] * 6, dtype=np.float32))
batch = torch.from_numpy(table)
loss = net(batch).mean()
""",
        Expect(kind="nan", phase="data", op=None, line=ANY, tensor="batch", rows=(0, 1, 2, 3, 4, 5)),
    ),
)

_LOOPS = (
    _case(
        "reptile_inner_loop",
        """
import copy
for rate in (0.01, 0.01):
    fast = copy.deepcopy(net)
    inner = torch.optim.SGD(fast.parameters(), lr=rate)
    for inner_step in range(2):
        loss = (fast(x) / (1 - inner_step)).square().mean()  # <- here
        inner.zero_grad()
        loss.backward()
        inner.step()
""",
        Expect(kind="inf", phase="loss", op="div", module=None, step=1, diagnosis=slugs.DIV_ZERO),
        step=False,
    ),
    _case(
        "functional_inner_step_makes_bad_weights",
        """
weights = dict(net.named_parameters())
inner = F.cross_entropy(torch.func.functional_call(net, weights, (x,)), y)
slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
rate = torch.tensor(-1.0)
weights = {name: one - rate.log() * slope for (name, one), slope in zip(weights.items(), slopes)}  # <- here
loss = F.cross_entropy(torch.func.functional_call(net, weights, (x,)), y)
""",
        Expect(kind="nan", phase="loss", op="log", module=None, line=True),
    ),
    _case(
        "autocast_half_sum_of_squares",
        """
with torch.autocast("cpu", dtype=torch.float16):
    big = F.linear(x * 300, torch.ones(400, 3))
    loss = (big @ big.T).float().mean() * net(x).mean()  # <- here
""",
        Expect(kind="inf", phase="loss", op="mm", module=None, diagnosis=slugs.FP16_OVERFLOW),
    ),
)

_QUIET = (
    _case(
        "quiet_the_users_own_exception_after_a_nan",
        """
with torch.no_grad():
    bad = torch.log(torch.tensor(-1.0))
loss = net(x).mean()
loss.backward()
raise KeyError("mine")
""",
        Nothing(raises="KeyError"),
        step=False,
    ),
    _case(
        "quiet_inference_that_filters_logits",
        """
class Filter(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        logits = self.inner(x)
        return logits.masked_fill(logits < logits.amax(1, keepdim=True), -math.inf)
with torch.inference_mode():
    picked = Filter(net)(x).softmax(1)
""",
        Nothing(),
        step=False,
    ),
    _case(
        "quiet_gradient_of_an_attack",
        """
moved = x.clone().requires_grad_()
(slope,) = torch.autograd.grad(F.cross_entropy(net(moved), y), moved)
adversarial = x + 0.1 * slope.sign()
loss = F.cross_entropy(net(adversarial), y)
""",
        Nothing(steps=1, backwards=2),
    ),
    _case(
        "quiet_average_of_weights",
        """
import copy
teacher = copy.deepcopy(net)
for _ in range(3):
    loss = F.mse_loss(net(x), teacher(x).detach()) + net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for a, b in zip(teacher.parameters(), net.parameters()):
            a.lerp_(b, 0.1)
""",
        Nothing(steps=3),
        step=False,
    ),
    _case(
        "quiet_own_generator",
        """
source = torch.Generator().manual_seed(1)
for _ in range(3):
    loss = F.cross_entropy(net(x + 0.01 * torch.randn(6, 3, generator=source)), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
drawn = torch.rand(1, generator=source).item()
""",
        Nothing(steps=3),
        step=False,
    ),
)

CASES = (*_LOSSES, *_FUNCTIONS, *_BY_HAND, *_PIPELINES, *_LOOPS, *_QUIET)
