"""What people write besides: losses, functions, pipelines, several optimizers, and cells that must stay quiet."""

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

CASES = (*_FUNCTIONS, *_PIPELINES, *_QUIET)
