"""Corners: where two causes meet, where a value is healed on one way and not on the other, where the line is far from the model."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect, Nothing

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
        name="corner_additive_mask_row_healed_forward_not_backward",
        setup="""
            lin = nn.Linear(3, 3)
            opt = torch.optim.SGD(lin.parameters(), lr=0.1)
            x = torch.rand(2, 3)
            bias = torch.tensor([[0.0, 0.0, -math.inf], [-math.inf] * 3])
        """,
        cell="""
            p = F.softmax(lin(x) + bias, -1)  # <- here
            p = torch.nan_to_num(p)
            loss = (p * torch.arange(3.0)).sum()
            loss.backward()
            opt.step()
        """,
        truth=Expect(
            kind="nan",
            phase=frozenset({"backward", "loss"}),
            op="_softmax",
            module=None,
            rows=(1,),
            diagnosis=frozenset({slugs.MASKED_ROW, slugs.WHERE_TRAP}),
        ),
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
        name="corner_bad_row_by_a_mean_and_back_by_broadcasting",
        setup="""
            class Center(nn.Module):
                def forward(self, x):
                    return x - x.mean(0, keepdim=True)
            net = nn.Sequential(Center(), nn.Linear(2, 2), Center(), nn.Linear(2, 1))
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            xs = [torch.rand(5, 2) for _ in range(3)]
            xs[2][4, 1] = math.nan
        """,
        cell="""
            for i, xb in enumerate(xs):
                pred = net(xb)
                loss = pred.square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="data", op=None, step=2, rows=(4,), tensor="xb", diagnosis=slugs.BAD_ROW),
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
        name="corner_exponent_of_a_learned_scale_in_the_loss",
        setup="""
            clip = nn.ModuleDict({"img": nn.Linear(2, 2), "txt": nn.Linear(2, 2)})
            clip.logit_scale = nn.Parameter(torch.tensor(90.0))
            opt = torch.optim.SGD(clip.parameters(), lr=0.1)
            x = torch.rand(3, 2)
        """,
        cell="""
            a, b = F.normalize(clip["img"](x)), F.normalize(clip["txt"](x))
            logits = clip.logit_scale.exp() * a @ b.T  # <- here
            loss = F.cross_entropy(logits, torch.arange(3))
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="exp", module=None, rows=(), diagnosis="exp_overflow"),
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
        name="corner_entropy_by_hand_of_a_masked_policy",
        setup="""
            pi = nn.Sequential(nn.Linear(2, 3))
            opt = torch.optim.SGD(pi.parameters(), lr=0.1)
            x = torch.rand(2, 2)
            illegal = torch.tensor([[False, False, True], [False, False, False]])
        """,
        cell="""
            logp = pi(x).masked_fill(illegal, float("-inf")).log_softmax(-1)
            entropy = -(logp.exp() * logp).sum(-1)  # <- here
            loss = -entropy.mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="mul", module=None, diagnosis="zero_times_inf", rows=(0,)),
    ),
    Case(
        name="corner_gradient_of_a_norm_by_hand_in_a_penalty",
        setup="""
            D = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
            with torch.no_grad():
                D[0].bias.fill_(-10.0)
            opt = torch.optim.SGD(D.parameters(), lr=0.1)
            x = torch.rand(3, 2, requires_grad=True)
        """,
        cell="""
            for _ in range(2):
                g, = torch.autograd.grad(D(x).sum(), x, create_graph=True)
                penalty = ((g.pow(2).sum(1).sqrt() - 1) ** 2).mean()  # <- here
                opt.zero_grad(); penalty.backward(); opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, step=0, backward=ANY, rows=(0, 1, 2), diagnosis=slugs.SQRT_ZERO),
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
        name="corner_module_reused_across_micro_batches",
        setup="""
            class Ratio(nn.Module):
                def forward(self, a, b):
                    return a / b  # <- here
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.f, self.ratio = nn.Linear(2, 2, bias=False), Ratio()
                def forward(self, x):
                    return self.ratio(self.f(x), x)
            net = Net()
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            micro = [torch.rand(2, 2) + 0.1 for _ in range(8)]
            micro[6][1, 0] = 0.0
        """,
        cell="""
            for i, x in enumerate(micro):
                loss = net(x).mean() / 4
                loss.backward()
                if (i + 1) % 4 == 0:
                    opt.step(); opt.zero_grad()
        """,
        truth=Expect(
            kind="inf", phase="forward", op="div", module="ratio", call=ANY, step=1, backward=6, rows=(1,), diagnosis=slugs.DIV_ZERO
        ),
    ),
    Case(
        name="corner_buffer_statistics_divide",
        setup="""
            class Norm(nn.Module):
                def __init__(self):
                    super().__init__()
                    for name, size in (("mean", 2), ("m2", 2), ("n", 1)):
                        self.register_buffer(name, torch.zeros(size))
                def forward(self, x):
                    if self.training:
                        self.n += len(x)
                        self.mean += (x.detach() - self.mean).sum(0) / self.n
                        self.m2 += x.detach().var(0, correction=0)
                    return (x - self.mean) / self.m2.sqrt()  # <- here
            net = nn.Sequential(Norm(), nn.Linear(2, 1))
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            xs = [torch.tensor([[1.0, 5.0], [2.0, 5.0]]), torch.rand(2, 2)]
        """,
        cell="""
            for x in xs:
                loss = net(x).square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind=frozenset({"nan", "inf"}), phase="forward", op="div", module="0", step=0, rows=(0, 1)),
    ),
    Case(
        name="corner_float64_island_cast_back",
        setup="""
            net = nn.Linear(2, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.0)
            xs = [torch.rand(2, 2), torch.tensor([[1.0, 0.0], [30.0, 30.0]])]
            with torch.no_grad():
                net.weight.fill_(10.0); net.bias.zero_()
        """,
        cell="""
            for x in xs:
                big = net(x).double().exp()
                loss = big.float().mean()  # <- here
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        # exp(600) fits float64, not float32.
        truth=Expect(kind="inf", phase="loss", op="_to_copy", module=None, step=1, rows=(1,)),
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
    Case(
        name="corner_quiet_nan_parameter_of_an_unused_branch",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.used, self.spare = nn.Linear(2, 1), nn.Linear(2, 1)
                    nn.init.constant_(self.spare.weight, float("nan"))
                def forward(self, x):
                    return self.used(x)
            net = Net()
            opt = torch.optim.SGD(net.used.parameters(), lr=0.1)
            x = torch.rand(3, 2)
        """,
        cell="""
            for _ in range(3):
                loss = net(x).square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Nothing(steps=3),
    ),
    Case(
        name="corner_quiet_detached_diagnostics",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 2)
                    self.register_buffer("snr", torch.zeros(2))
                def forward(self, x):
                    h = self.lin(x)
                    with torch.no_grad():
                        self.snr = h.mean(0) / (h.std(0) * 0)
                    return h
            net = Net()
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.rand(3, 2)
        """,
        cell="""
            for _ in range(3):
                loss = net(x).square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Nothing(steps=3),
    ),
    Case(
        name="corner_quiet_running_extremes_in_buffers",
        setup="""
            class Observer(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.register_buffer("low", torch.tensor(float("inf"))); self.register_buffer("high", torch.tensor(float("-inf")))
                def forward(self, x):
                    if x.shape[0] > 2:
                        self.low = torch.minimum(self.low, x.detach().min()); self.high = torch.maximum(self.high, x.detach().max())
                    return x
            net = nn.Sequential(nn.Linear(2, 2), Observer(), nn.Linear(2, 1))
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
        """,
        cell="""
            for n in (2, 2, 3, 4):
                loss = net(torch.rand(n, 2)).square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
            net.eval()
            with torch.no_grad():
                net(torch.rand(2, 2))
        """,
        truth=Nothing(steps=4),
    ),
    Case(
        name="corner_quiet_gradient_is_replaced_by_the_user",
        setup="""
            net = nn.Linear(2, 2, bias=False)
            nn.init.zeros_(net.weight)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            net.weight.register_hook(lambda g: g.nan_to_num(0.0, 0.0, 0.0))
            x = torch.rand(3, 2)
        """,
        cell="""
            loss = net(x).square().sum(1).sqrt().mean()
            loss.backward()
            opt.step()
        """,
        truth=Nothing(steps=1),
    ),
)
