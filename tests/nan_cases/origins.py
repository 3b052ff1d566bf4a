"""What was made before the model call, by what made it: arguments, attacks, generators, weights, updates."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect, Nothing

_NORM = """
    def norm(x):
        centred = x - x.mean(0, keepdim=True)
        return centred / centred.std(0, keepdim=True)  # <- here
    net = nn.Linear(3, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = [torch.randn(4, 3) for _ in range(3)]
    batches[2][:, 1] = 7.0
"""

_NET = """
    net = nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=1e-4)
    x = torch.randn(4, 2)
"""
_RARE = Expect(kind="nan", phase="loss", op="log", module=None, step=3, rows=(2,), diagnosis="log_negative")
_OWN = """
    class Normed(torch.optim.Optimizer):
        def __init__(self, parameters, lr=0.1):
            super().__init__(parameters, {"lr": lr})
            self.norms = []
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    norm = p.grad.norm()
                    self.norms.append(float(norm))
                    unit = p.grad / norm  # <- here
                    p.add_(unit, alpha=-group["lr"])
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False))
    opt = Normed(net.parameters(), lr=0.01)
    batches = [torch.rand(4, 2) + 0.1 for _ in range(4)]
    weights = [1.0, 1.0, 0.0, 1.0]
"""
_OWN_LOOP = """
    for x, w in zip(batches, weights):
        h = net[0](x)
        loss = (w * net[1](h.detach())).square().mean() + h.square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""

CASES = (
    Case(
        name="origin_argument_made_by_a_function",
        setup=_NORM,
        cell="""
            for x in batches:
                h = norm(x)
                loss = net(h).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="div", module=None, step=2, rows=(0, 1, 2, 3), diagnosis=slugs.ZERO_VARIANCE),
    ),
    Case(
        name="origin_argument_in_a_batch_dictionary",
        setup=_NORM,
        cell="""
            for x in batches:
                batch = {"x": norm(x), "y": x.sum(1)}
                out = net(batch["x"])[:, 0]
                loss = F.mse_loss(out, batch["y"])
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="div", module=None, step=2, rows=(0, 1, 2, 3)),
    ),
    Case(
        name="origin_argument_written_in_place_by_a_function",
        setup="""
            def fill(h, x):
                h.copy_(x)
                h.div_(x.amax(1, keepdim=True))  # <- here
            net = nn.Linear(3, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.01)
            batches = [torch.rand(4, 3) + 0.1 for _ in range(3)]
            batches[1][2] = 0.0
        """,
        cell="""
            for x in batches:
                h = torch.empty_like(x)
                fill(h, x)
                loss = net(h).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="div_", module=None, step=1, rows=(2,)),
    ),
    Case(
        name="origin_data_from_a_loader_are_data",
        setup="""
            class Rows(torch.utils.data.Dataset):
                def __len__(self):
                    return 12
                def __getitem__(self, place):
                    x = torch.full((3,), float(place)) + 1
                    return (x / 0.0 * 0.0 if place == 6 else x), x.sum()
            loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
            net = nn.Linear(3, 1)
            opt = torch.optim.SGD(net.parameters(), lr=1e-4)
        """,
        cell="""
            for x, y in loader:
                h = x * 0.1
                loss = F.mse_loss(net(h)[:, 0], y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="data", op=None, module=None, step=1, rows=(2,), tensor="x", diagnosis=slugs.BAD_ROW),
    ),
    # --- attacks: the model is called inside the function that makes the model's argument ------------------------------------------
    Case(
        name="origin_attack_inline_divides_by_a_zero_norm",
        setup="""
            def attack(x, y):
                x = x.clone().requires_grad_()
                loss = F.cross_entropy(net(x), y)
                (slope,) = torch.autograd.grad(loss, x)
                return (x + 0.1 * slope / slope.norm(dim=1, keepdim=True)).detach()  # <- here
            net = nn.Linear(3, 2)
            opt = torch.optim.SGD(net.parameters(), lr=0.01)
            with torch.no_grad():
                net.weight.fill_(0.5)
            batches = [(torch.randn(4, 3), torch.zeros(4, dtype=torch.long)) for _ in range(3)]
        """,
        cell="""
            for x, y in batches:
                loss = F.cross_entropy(net(attack(x, y)), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="div", module=None, step=0, backward=1),
    ),
    Case(
        name="origin_attack_of_several_steps_and_a_bad_layer",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 3)
                    self.out = nn.Linear(3, 2)
                def forward(self, x):
                    h = self.lin(x)
                    return self.out(torch.log(x.abs().sum(1, keepdim=True)) + h)  # <- here
            def attack(x, y):
                moved = x.clone()
                for _ in range(3):
                    moved = moved.detach().requires_grad_()
                    (slope,) = torch.autograd.grad(F.cross_entropy(net(moved), y), moved)
                    moved = (moved + 0.1 * slope.sign()).clamp(-1, 1)
                return moved.detach() * (x != 0)
            net = Net()
            opt = torch.optim.SGD(net.parameters(), lr=0.01)
            batches = [(torch.rand(4, 3) + 0.1, torch.tensor([0, 1, 0, 1])) for _ in range(3)]
            seen = []
        """,
        cell="""
            for step, (x, y) in enumerate(batches):
                keep = torch.ones(4, 1)
                keep[1] = float(step != 2)
                loss = F.cross_entropy(net(attack(x, y) * keep), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="log", module="", call=frozenset({1, 4}), step=2, backward=11, rows=(1,)),
    ),
    Case(
        name="origin_generator_of_a_module",
        setup="""
            class Jitter(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.source = torch.Generator().manual_seed(8)
                    self.lin = nn.Linear(2, 1)
                def forward(self, x):
                    return self.lin(x) + torch.log(torch.rand(4, 1, generator=self.source) - 0.01)  # <- here
            net = Jitter()
            opt = torch.optim.SGD(net.parameters(), lr=1e-4)
            x = torch.randn(4, 2)
        """,
        cell="""
            for _ in range(9):
                opt.zero_grad()
                net(x).square().mean().backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="log", module="", step=3, rows=(2,), diagnosis="log_negative"),
    ),
    Case(
        name="origin_generator_of_a_helper",
        setup=_NET
        + """
    source = torch.Generator().manual_seed(8)
    def jitter(out):
        return out + torch.log(torch.rand(4, 1, generator=source) - 0.01)  # <- here
    """,
        cell="""
            for _ in range(9):
                opt.zero_grad()
                loss = jitter(net(x)).square().mean()
                loss.backward()
                opt.step()
        """,
        truth=_RARE,
    ),
    Case(
        name="origin_noise_drawn_before_the_model_call_decides",
        setup=_NET
        + """
    torch.manual_seed(8)
    def augmented(x):
        scale = torch.rand(4, 1) - 0.01
        return x * scale.log()  # <- here
    """,
        cell="""
            for _ in range(9):
                h = augmented(x)
                loss = net(h).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="log", module=None, step=3, rows=(2,), diagnosis="log_negative"),
    ),
    # --- infinities that a model holds, in cells that only infer -------------------------------------------------------------------
    Case(
        name="origin_infinite_weight_in_an_inference_cell",
        setup="""
            net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
            net[2].weight.data[1, 2] = float("inf")
            net[0].bias.data.fill_(3.0)
            x = torch.rand(4, 3)
        """,
        cell="""
            with torch.no_grad():
                out = net(x)
        """,
        truth=Expect(kind="inf", phase="parameter", op=None, rows=(1,), tensor="2.weight", diagnosis="bad_parameter"),
    ),
    Case(
        name="origin_infinite_bias_in_an_inference_cell",
        setup="""
            net = nn.Linear(3, 2)
            net.bias.data[1] = float("inf")
        """,
        cell="""
            with torch.inference_mode():
                out = net(torch.ones(2, 3))
        """,
        truth=Expect(kind="inf", phase="parameter", op=None, rows=(1,), tensor="bias"),
    ),
    Case(
        name="origin_quiet_masks_that_a_model_holds",
        setup="""
            class Scores(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 4)
                    self.mask = nn.Parameter(torch.tensor([0.0, 0.0, -math.inf, 1.0]), requires_grad=False)
                    self.register_buffer("cost", torch.tensor([0.5, math.inf, 0.25, 0.125]))
                    self.register_buffer("cap", torch.tensor([math.inf, 1.0, 2.0, 3.0]))
                def forward(self, x):
                    h = self.lin(x)
                    return h + self.mask, h + self.cost, torch.minimum(self.cap, h) , self.cap.expand(2, 4)
            net = Scores()
            head = nn.Linear(3, 4)
            with torch.no_grad():
                head.bias[1] = -math.inf
        """,
        cell="""
            with torch.no_grad():
                parts = net(torch.ones(2, 3))
                chosen = head(torch.ones(2, 3)).argmax(1)
        """,
        truth=Nothing(),
    ),
    Case(
        name="origin_own_optimizer_divides_by_a_zero_norm_and_goes_on",
        setup=_OWN,
        cell=_OWN_LOOP,
        options={"keep_going": True},
        truth=Expect(kind="nan", phase="optimizer", op="div", step=2, backward=3, tensor="1.weight", diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="origin_own_optimizer_takes_the_root_of_a_difference",
        setup="""
            class Centred(torch.optim.Optimizer):
                def __init__(self, parameters, lr=0.1):
                    super().__init__(parameters, {"lr": lr})
                @torch.no_grad()
                def step(self, closure=None):
                    for group in self.param_groups:
                        for p in group["params"]:
                            state = self.state[p]
                            mean = state.setdefault("mean", torch.zeros_like(p))
                            square = state.setdefault("square", torch.zeros_like(p))
                            mean.mul_(0.9).add_(p.grad, alpha=0.1)
                            square.mul_(0.8).addcmul_(p.grad, p.grad, value=0.05)
                            spread = (square - mean * mean).sqrt()  # <- here
                            p.sub_(group["lr"] * p.grad / (spread + 1e-3))
            net = nn.Linear(2, 1)
            opt = Centred(net.parameters(), lr=1e-4)
            x = torch.ones(4, 2)
        """,
        cell="""
            for _ in range(30):
                opt.zero_grad()
                net(x).sum().backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="optimizer", op="sqrt", step=ANY, backward=ANY, diagnosis="sqrt_negative"),
    ),
    # --- weights that are spoilt by hand -------------------------------------------------------------------------------------------
    Case(
        name="origin_average_of_weights_spoilt_before_its_first_call",
        setup="""
            import copy
            student = nn.Linear(2, 2)
            teacher = copy.deepcopy(student).requires_grad_(False)
            opt = torch.optim.SGD(student.parameters(), lr=0.01)
            x, seen = torch.randn(4, 2), torch.zeros(())
        """,
        cell="""
            for step in range(6):
                loss = student(x).square().mean()
                if step == 4:
                    loss = loss + F.mse_loss(student(x), teacher(x))
                opt.zero_grad()
                loss.backward()
                opt.step()
                with torch.no_grad():
                    for mine, theirs in zip(teacher.parameters(), student.parameters()):
                        mine.add_((theirs - mine) / seen)
        """,
        truth=Expect(
            kind=frozenset({"nan", "inf"}),
            phase="parameter",
            op=None,
            step=4,
            tensor="weight",
            rows=ANY,
            diagnosis="bad_parameter",
            spoilt_here=True,
        ),
    ),
    Case(
        name="origin_average_of_weights_spoilt_in_an_inference_call",
        setup="""
            import copy
            student = nn.Linear(2, 2)
            teacher = copy.deepcopy(student)
            opt = torch.optim.SGD(student.parameters(), lr=0.01)
            x = torch.randn(4, 2)
            def update(teacher, student, decay):
                with torch.no_grad():
                    for a, b in zip(teacher.parameters(), student.parameters()):
                        a.copy_(a * decay + b * (1 - decay))
        """,
        cell="""
            for decay in (0.9, math.nan, 0.9):
                with torch.no_grad():
                    goal = teacher(x)
                loss = F.mse_loss(student(x), goal)
                opt.zero_grad()
                loss.backward()
                opt.step()
                update(teacher, student, decay)
        """,
        truth=Expect(kind="nan", phase="parameter", op=None, step=2, tensor="weight", rows=(0, 1), spoilt_here=True),
    ),
    Case(
        name="origin_weight_of_a_raw_tensor_was_bad_before",
        setup="""
            w = torch.ones(3, requires_grad=True)
            w.data[1] = math.nan
        """,
        cell="""
            loss = (w * 2).sum()
            loss.backward()
        """,
        truth=Expect(kind="nan", phase="parameter", op=None, tensor="w", rows=(1,), spoilt_here=False),
    ),
    Case(
        name="origin_model_of_buffers_that_nobody_keeps",
        setup="""
            class Table(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.register_buffer("means", torch.tensor([1.0, 0.0]))
                def forward(self, x):
                    return x / self.means  # <- here
        """,
        cell="""
            with torch.no_grad():
                out = Table()(torch.tensor([[1.0, 0.0]]))
        """,
        truth=Expect(kind="nan", phase="forward", op="div", module="", rows=(0,), diagnosis=slugs.DIV_ZERO),
    ),
)
