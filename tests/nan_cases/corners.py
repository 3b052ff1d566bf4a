"""Corners: where two causes meet, where a value is healed on one way and not on the other, where the line is far from the model."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect

CASES = (
    Case(
        name="corner_two_faults_the_earlier_counts",
        setup="""
            class Pair(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
                def forward(self, x):
                    left = self.a(x).log()  # <- here
                    right = self.b(x) / self.b(x).sum(1, keepdim=True)
                    return left + right
            net = Pair()
            nn.init.eye_(net.a.weight); nn.init.eye_(net.b.weight)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.tensor([[1.0, 1.0], [0.0, 0.0], [2.0, -1.0]])
        """,
        cell="net(x)[1:].sum().backward()",
        # Row 2 of the logarithm is NaN, row 1 is -inf: NaN is followed first.
        truth=Expect(kind=frozenset({"nan", "inf"}), phase="forward", op=frozenset({"log"}), module="", rows=ANY),
    ),
    Case(
        name="corner_softmax_by_hand_over_a_masked_row",
        setup="""
            class Attn(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.q = nn.Linear(2, 2)
                def forward(self, x, mask):
                    s = (self.q(x) @ x.mT).masked_fill(mask, -torch.inf)
                    e = torch.exp(s - s.amax(-1, keepdim=True))  # <- here
                    return e / e.sum(-1, keepdim=True) @ x
            attn = nn.ModuleList([Attn()])
            opt = torch.optim.SGD(attn.parameters(), lr=0.1)
            x = torch.rand(1, 3, 2)
            mask = torch.tensor([[[False, True, True], [True, True, True], [False, False, True]]])
        """,
        cell="loss = attn[0](x, mask).sum()\nloss.backward()\nopt.step()",
        truth=Expect(kind="nan", phase="forward", op="sub", module=frozenset({"", "0"}), rows=(0,), diagnosis=slugs.MASKED_ROW),
    ),
    Case(
        name="corner_loss_is_only_infinite",
        setup="""
            lin = nn.Linear(2, 1, bias=False)
            nn.init.ones_(lin.weight)
            opt = torch.optim.SGD(lin.parameters(), lr=0.0)
            xs = [torch.ones(2, 2), torch.tensor([[1.0, 1.0], [1e20, 1e20]])]
        """,
        cell="""
            for x in xs:
                loss = (lin(x) ** 2).mean()  # <- here
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="pow", module=None, step=1, rows=(1,)),
    ),
    Case(
        name="corner_sum_of_finite_losses_overflows",
        setup="""
            lin = nn.Linear(1, 1, bias=False)
            nn.init.ones_(lin.weight)
            opt = torch.optim.SGD(lin.parameters(), lr=0.0)
            x = torch.full((4, 1), 1.5e38)
        """,
        cell="""
            out = lin(x)
            loss = out.sum()  # <- here
            loss.backward()
        """,
        truth=Expect(kind="inf", phase="loss", op="sum", module=None, rows=()),
    ),
    Case(
        name="corner_the_batch_is_bad_but_dropped_later_row_matters",
        setup="""
            net = nn.Linear(2, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.rand(4, 2); x[0] = math.nan; x[2, 1] = math.nan
        """,
        cell="""
            out = net(x[1:])
            loss = out.square().mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="data", op=None, rows=frozenset({(2,), (1,)}), tensor=frozenset({"x", "input"})),
    ),
    Case(
        name="corner_label_in_a_dataclass",
        setup="""
            from dataclasses import dataclass
            @dataclass
            class Batch:
                x: torch.Tensor
                y: torch.Tensor
            net = nn.Linear(2, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            batches = [Batch(torch.rand(3, 2), torch.rand(3, 1)) for _ in range(3)]
            batches[1].y[2] = math.inf
        """,
        cell="""
            for b in batches:
                loss = F.l1_loss(net(b.x), b.y)
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="inf", phase="data", op=None, step=1, rows=(2,), diagnosis=slugs.BAD_ROW),
    ),
    Case(
        name="corner_masked_mean_over_nothing_by_indexing",
        setup="""
            net = nn.Linear(2, 2)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            flags = [torch.tensor([True, False, True]), torch.tensor([False, False, False])]
            x = torch.rand(3, 2)
        """,
        cell="""
            for flag in flags:
                h = net(x)
                loss = h[flag].mean() + 0.1 * h.square().mean()  # <- here
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="mean", module=None, step=1, rows=(), diagnosis="empty_mean"),
    ),
    Case(
        name="corner_mse_of_an_empty_selection",
        setup="""
            net = nn.Linear(2, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x, y = torch.rand(3, 2), torch.rand(3, 1)
        """,
        cell="""
            for limit in (0.0, 2.0):
                pos = (y > limit).squeeze(1)
                loss = F.mse_loss(net(x)[pos], y[pos])  # <- here
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="mse_loss", module=None, step=1, rows=(), diagnosis="empty_mean"),
    ),
    Case(
        name="corner_cross_entropy_of_an_empty_batch",
        setup="""
            net = nn.Linear(2, 3)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x, y = torch.rand(3, 2), torch.tensor([0, 1, 2])
        """,
        cell="""
            for n in (3, 0):
                loss = nn.CrossEntropyLoss()(net(x[:n]), y[:n])  # <- here
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="nll_loss_forward", module=None, step=1, rows=(), diagnosis=slugs.ALL_IGNORED),
    ),
    Case(
        name="corner_soft_labels_times_minus_infinity",
        setup="""
            net = nn.Linear(2, 3)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.rand(3, 2)
            y = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [1.0, 0, 0]])
            invalid = torch.tensor([[False, False, True]] * 3)
        """,
        cell="""
            logits = net(x).masked_fill(invalid, -torch.inf)
            loss = F.cross_entropy(logits, y)  # <- here
            loss.backward()
            opt.step()
        """,
        # 0 * -inf in the soft cross entropy.
        truth=Expect(kind="nan", phase="loss", op=frozenset({"mul", "sum"}), module=None, diagnosis="zero_times_inf", rows=(0, 1, 2)),
    ),
    Case(
        name="corner_scheduler_makes_the_rate_nan",
        setup="""
            net = nn.Linear(2, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda e: float("nan") if e == 2 else 1.0)
            x = torch.rand(3, 2)
        """,
        cell="""
            for _ in range(4):
                loss = net(x).square().mean()
                opt.zero_grad(); loss.backward(); opt.step(); sched.step()
        """,
        truth=Expect(kind="nan", phase="optimizer", step=2, backward=3, tensor=frozenset({"weight", "bias"})),
    ),
    Case(
        name="corner_two_models_share_one_line",
        setup="""
            class Block(nn.Module):
                def forward(self, x):
                    return x.log1p()  # <- here
            nets = [nn.Sequential(nn.Linear(2, 2), Block()) for _ in range(3)]
            with torch.no_grad():
                for n in nets:
                    n[0].weight.zero_(); n[0].bias.zero_()
                nets[2][0].bias[1] = -1.0
            opts = [torch.optim.SGD(n.parameters(), lr=0.0) for n in nets]
            x = torch.rand(2, 2)
        """,
        cell="""
            outs = [n(x) for n in nets]
            loss = torch.stack(outs).mean()
            loss.backward()
            [o.step() for o in opts]
        """,
        truth=Expect(kind="inf", phase="forward", op="log1p", module="1", rows=(0, 1), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="corner_gradient_overflows_on_the_way_back_only",
        setup="""
            class Amplify(nn.Module):
                def forward(self, x):
                    return x * 1e20  # <- here
            net = nn.Sequential(nn.Linear(1, 1, bias=False), Amplify())
            nn.init.constant_(net[0].weight, 1e-20)
            opt = torch.optim.SGD(net.parameters(), lr=0.0)
            x = torch.ones(2, 1)
        """,
        cell="loss = (net(x) * 1e19).sum()\nloss.backward()\nopt.step()",
        truth=Expect(kind="inf", phase="backward", op="mul", module="1", rows=(0, 1)),
    ),
    Case(
        # The derivative of `min` is another formula where a dispatch mode is on the stack: other gradients are bad in the replay.
        name="corner_distance_to_the_smallest_in_a_model_that_returns_its_loss",
        setup="""
            class Gap(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 3)
                def forward(self, x, more):
                    h = self.lin(x)
                    return torch.log(h - h.min() + more)  # <- here
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.gap = Gap()
                def forward(self, a, b, more):
                    return self.gap(a, 1).mean() + self.gap(b, more).mean()
            net = Net()
            opt = torch.optim.SGD(net.parameters(), lr=0.01)
        """,
        cell="""
            for t in range(3):
                loss = net(torch.rand(2, 3), torch.rand(2, 3), 0 if t == 1 else 1)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="log", module="gap", call=2, step=1, diagnosis=slugs.LOG_ZERO),
    ),
)
