"""Ranges, precisions, in-place writes, schedules and optimizers that leave the range."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect, Nothing

CASES = (
    Case(
        name="number_half_mean_of_squares",
        setup="""
            class RMS(nn.Module):
                def __init__(self, n):
                    super().__init__()
                    self.g = nn.Parameter(torch.ones(n))
                def forward(self, x):
                    v = x.pow(2).mean(-1, keepdim=True)  # <- here
                    return self.g * x * torch.rsqrt(v + 1e-5)
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.norms = nn.ModuleList([RMS(2), RMS(2)])
                def forward(self, x):
                    return self.norms[1](self.norms[0](x) * 400)
            net = Net().half()
            opt = torch.optim.SGD(net.parameters(), lr=0.01)
            x = torch.rand(2, 2).half() + 1
        """,
        cell="loss = net(x).float().sum()\nloss.backward()\nopt.step()",
        # rsqrt(inf) = 0: the loss is finite; the saved x ** 2 is not what the derivative needs, 0 * inf is.
        truth=Nothing(),
    ),
    Case(
        name="number_autocast_bfloat16_large_exponent",
        setup="""
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            xs = [torch.tensor([[1.0]]), torch.tensor([[3.4e38]])]
        """,
        cell="""
            for x in xs:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    out = model(x)  # <- here
                loss = out.float().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        # The cast of the input to bfloat16 rounds 3.4e38 up to inf.
        truth=Expect(
            kind="inf", phase="forward", op=frozenset({"_to_copy", "to"}), module="", step=1, rows=(0,), diagnosis=slugs.BF16_OVERFLOW
        ),
    ),
    Case(
        name="number_half_softmax_scores",
        setup="""
            class Attn(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.q, self.k = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
                def forward(self, x):
                    scores = torch.matmul(self.q(x), self.k(x).transpose(-1, -2))  # <- here
                    return scores.softmax(-1) @ x
            net = nn.ModuleDict({"attn": Attn()}).half()
            for p in net.parameters():
                nn.init.eye_(p)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.rand(1, 3, 4).half(); x[0, 1] = 150.0
        """,
        cell="loss = net['attn'](x).float().mean()\nloss.backward()\nopt.step()",
        truth=Expect(
            kind="inf", phase="forward", op=frozenset({"bmm", "mm"}), module=ANY, call=ANY, rows=(0,), diagnosis=slugs.FP16_OVERFLOW
        ),
    ),
    Case(
        name="number_rms_norm_without_eps",
        setup="""
            net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.RMSNorm(2, eps=0.0))
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            xs = [torch.rand(3, 2), torch.tensor([[0.0, 0.0], [1.0, 2.0]])]
        """,
        cell="""
            for x in xs:
                loss = net(x).mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(
            kind=frozenset({"nan", "inf"}),
            phase="forward",
            op=frozenset({"_fused_rms_norm", "rms_norm", "rsqrt"}),
            module="1",
            step=1,
            rows=(0,),
            line=ANY,
            diagnosis=slugs.EPS_ZERO,
        ),
    ),
    Case(
        name="number_instance_norm_without_eps",
        setup="""
            net = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.InstanceNorm2d(2, eps=0.0))
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.rand(2, 1, 3, 3); x[1] = 0.0
        """,
        cell="loss = net(x).square().mean()\nloss.backward()\nopt.step()",
        # The kernel knows a variance of 0 with eps=0 and gives zeros.
        truth=Nothing(),
    ),
)
