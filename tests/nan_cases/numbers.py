"""Ranges, precisions, in-place writes, schedules and optimizers that leave the range."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect, Nothing

CASES = (
    Case(
        name="number_cast_to_half_in_the_model",
        setup="""
            class Half(nn.Module):
                def forward(self, x):
                    return x.half()  # <- here
            model = nn.Sequential(nn.Linear(1, 1, bias=False), Half())
            nn.init.ones_(model[0].weight)
            opt = torch.optim.SGD(model.parameters(), lr=1e-9)
            xs = [torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [65536.0]])]
        """,
        cell="""
            for x in xs:
                loss = model(x).float().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="_to_copy", module="1", step=1, rows=(1,), diagnosis=slugs.FP16_OVERFLOW),
    ),
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
        name="number_momentum_on_a_quartic",
        setup="""
            w = nn.Parameter(torch.tensor([3.0, -2.0]))
            opt = torch.optim.SGD([w], lr=0.5, momentum=0.9)
        """,
        cell="""
            for t in range(20):
                loss = (w ** 4).sum()  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="pow", module=None, step=3, diagnosis=slugs.LR_TOO_HIGH),
    ),
    Case(
        name="number_range_test_raises_the_rate",
        setup="""
            net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
            opt = torch.optim.SGD(net.parameters(), lr=1e-3)
            sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=30.0)
            x, y = torch.rand(8, 2), torch.rand(8, 1)
        """,
        cell="""
            for t in range(30):
                loss = F.mse_loss(net(x), y)
                opt.zero_grad(); loss.backward(); opt.step(); sched.step()
        """,
        truth=Expect(kind="inf", phase=frozenset({"loss", "forward", "backward"}), diagnosis=slugs.LR_TOO_HIGH, step=ANY, line=ANY),
    ),
    Case(
        name="number_adagrad_without_eps",
        setup="""
            net = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
            opt = torch.optim.Adagrad(net.parameters(), lr=0.1, eps=0.0)
            x = torch.rand(3, 2)
        """,
        cell="""
            loss = (net[0](x) + 0 * net[1](x)).square().mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="optimizer", step=0, backward=1, tensor=frozenset({"1.weight", "weight"}), rows=(0, 1)),
    ),
    Case(
        name="number_own_lars_with_a_frozen_branch",
        setup="""
            class LARS(torch.optim.Optimizer):
                def __init__(self, params, lr):
                    super().__init__(params, {"lr": lr})
                @torch.no_grad()
                def step(self):
                    for group in self.param_groups:
                        for p in group["params"]:
                            p.add_(p.grad * (p.norm() / p.grad.norm()), alpha=-group["lr"])
            net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
            nn.init.ones_(net[0].weight); nn.init.ones_(net[2].weight)
            opt = LARS(net.parameters(), lr=0.01)
            xs = [torch.rand(3, 2), -torch.rand(3, 2)]
        """,
        cell="""
            for x in xs:
                loss = net(x).mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="optimizer", step=1, backward=2, tensor="0.weight", rows=(0, 1)),
    ),
    Case(
        name="number_gradient_clipped_by_its_own_zero_norm",
        setup="""
            net = nn.Linear(2, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x, y = torch.rand(3, 2), torch.rand(3, 1)
        """,
        cell="""
            for scale in (1.0, 1.0, 0.0):
                loss = scale * F.mse_loss(net(x), y)
                opt.zero_grad()
                loss.backward()
                total = torch.sqrt(sum(p.grad.square().sum() for p in net.parameters()))
                for p in net.parameters():
                    p.grad.mul_(1.0 / total)
                opt.step()
        """,
        # 0 * (1 / 0)
        truth=Expect(kind=frozenset({"nan", "inf"}), phase="optimizer", step=2, backward=3, tensor=frozenset({"weight", "bias"})),
    ),
    Case(
        name="number_in_place_division_of_a_column",
        setup="""
            class Scale(nn.Module):
                def forward(self, x):
                    out = x.clone()
                    out[:, 0] /= x[:, 1].detach()  # <- here
                    return out
            net = nn.Sequential(nn.Linear(2, 2, bias=False), Scale())
            nn.init.eye_(net[0].weight)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.tensor([[1.0, 2.0], [3.0, 0.0], [1.0, 1.0]])
        """,
        cell="loss = net(x).mean()\nloss.backward()\nopt.step()",
        truth=Expect(kind="inf", phase="forward", op=frozenset({"div_", "div"}), module="1", rows=(1,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="number_infinity_minus_infinity_from_the_data",
        setup="""
            class Shift(nn.Module):
                def forward(self, x):
                    return (x - x.amax(1, keepdim=True)).exp()
            net = nn.Sequential(Shift(), nn.Linear(3, 2))
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            class Rows(torch.utils.data.Dataset):
                def __len__(self): return 8
                def __getitem__(self, i):
                    row = torch.rand(3)
                    if i == 5: row[1] = float("inf")
                    return row, i % 2
            loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
        """,
        cell="""
            for batch_idx, (inputs, labels) in enumerate(loader):
                opt.zero_grad(set_to_none=True)
                F.cross_entropy(net(inputs), labels).backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="data", op=None, step=1, rows=(1,), tensor="inputs", diagnosis=slugs.BAD_ROW),
    ),
    Case(
        name="number_accuracy_over_no_samples_in_the_loss",
        setup="""
            net = nn.Linear(2, 2)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x, y = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
            keeps = [torch.tensor([True, True, False, False]), torch.tensor([False] * 4)]
        """,
        cell="""
            for keep in keeps:
                logits = net(x)
                total = F.cross_entropy(logits, y, reduction="none")[keep].sum()
                loss = total / keep.sum()  # <- here
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="div", module=None, step=1, rows=(), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="number_integer_counts_zero_over_zero",
        setup="""
            net = nn.Linear(2, 2)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x, y = torch.rand(4, 2), torch.tensor([0, 0, 0, 0])
        """,
        cell="""
            logits = net(x)
            counts = torch.bincount(y, minlength=2)
            weights = counts.sum() / counts  # <- here
            loss = (F.cross_entropy(logits, y, reduction="none") * weights[y]).mean() + 0 * weights.sum()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="div", module=None, rows=(1,), diagnosis=slugs.DIV_ZERO),
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
    Case(
        name="number_sparse_adjacency_with_a_bad_value",
        setup="""
            conv = nn.Linear(2, 2)
            opt = torch.optim.SGD(conv.parameters(), lr=0.1)
            adj = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([0.5, float("nan"), 0.5]), (3, 3)).coalesce()
            x = torch.rand(3, 2)
        """,
        cell="""
            out = torch.sparse.mm(adj, conv(x))
            loss = out.square().mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="data", op=None, tensor="adj"),
    ),
    Case(
        name="number_positive_weight_is_infinite",
        setup="""
            net = nn.Linear(2, 2)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            y = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
            pos_weight = (1 - y).sum(0) / y.sum(0)
        """,
        cell="""
            loss = F.binary_cross_entropy_with_logits(net(torch.rand(2, 2)), y, pos_weight=pos_weight)
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="data", op=None, tensor="pos_weight", rows=(0,), diagnosis=slugs.BAD_ROW),
    ),
    Case(
        name="number_standardised_in_the_loop",
        setup="""
            net = nn.Linear(3, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            raw = [torch.rand(4, 3) for _ in range(3)]
            raw[1][:, 2] = 7.0
        """,
        cell="""
            for x in raw:
                x = (x - x.mean(0)) / x.std(0)  # <- here
                loss = net(x).square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        # Made in the step, before the model is called.
        truth=Expect(kind="nan", phase=frozenset({"data", "loss"}), op=ANY, step=1, rows=(0, 1, 2, 3), line=ANY),
    ),
    Case(
        name="number_exponential_of_a_grown_parameter",
        setup="""
            class Scale(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.log_scale = nn.Parameter(torch.zeros(2))
                def forward(self, x):
                    return x * self.log_scale.exp()  # <- here
            net = nn.Sequential(nn.Identity(), Scale())
            opt = torch.optim.SGD(net.parameters(), lr=20.0)
            x = torch.ones(2, 2)
        """,
        cell="""
            for t in range(20):
                loss = -net(x).log().sum()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        # -d/ds of -2 s per column is a constant: +40 an update; exp(120) overflows at the third.
        truth=Expect(kind="inf", phase="forward", op="exp", module="1", step=3, rows=(0, 1), diagnosis=slugs.EXPLODING_PARAMETER),
    ),
    Case(
        name="number_gradient_of_a_huge_root",
        setup="""
            net = nn.Linear(1, 1, bias=False)
            nn.init.ones_(net.weight)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.tensor([[1.0], [1e-30]])
        """,
        cell="""
            h = net(x)
            loss = (h ** 0.01).mean() + h.pow(-1).clamp(max=1e3).mean()  # <- here
            loss.backward()
            opt.step()
        """,
        # x ** -2 overflows in the derivative of a value that the clamp threw away: 0 * inf.
        truth=Expect(
            kind=frozenset({"nan", "inf"}),
            phase="backward",
            op=frozenset({"pow", "reciprocal"}),
            module=None,
            rows=(1,),
            diagnosis=slugs.WHERE_TRAP,
        ),
    ),
)
