"""Where it is: nested paths, shared and copied modules, parametrizations, hooks, compiled and checkpointed parts, odd loops."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect

_LOG = """
    class Log(nn.Module):
        def forward(self, x):
            return torch.log(x)  # <- here
"""
_ROOT = """
    class Root(nn.Module):
        def forward(self, x):
            return torch.sqrt(x)  # <- here
"""

CASES = (
    Case(
        name="structure_four_levels_of_containers",
        setup=_LOG
        + """
    class Stage(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Softplus()), nn.Sequential(nn.Identity(), last)])
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleDict({"down": nn.ModuleList([Stage(nn.Tanh()), Stage(Log())])})
        def forward(self, x):
            for stage in self.stages["down"]:
                x = stage(x)
            return x
    net = Net()
    with torch.no_grad():
        net.stages["down"][1].blocks[0][0].weight.zero_(); net.stages["down"][1].blocks[0][0].bias.fill_(-500.0)
    opt = torch.optim.Adam(net.parameters())
    x = torch.rand(3, 2)
""",
        cell="""
            for epoch in range(2):
                opt.zero_grad()
                net(x).sum().backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="log", module="stages.down.1.blocks.1.1", rows=(0, 1, 2), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="structure_shared_activation_third_call_backward",
        setup=_ROOT
        + """
    class Twin(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = Root()
            self.towers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        def forward(self, xs):
            return sum(self.act(tower(x).abs()).sum() for tower, x in zip(self.towers, xs))
    twin = Twin()
    opt = torch.optim.SGD(twin.parameters(), lr=0.01)
    xs = [torch.rand(2, 2) + 0.1 for _ in range(3)]
    xs[2][1] = 0.0
""",
        cell="""
            loss = twin(xs)
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module="act", call=3, rows=(1,), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="structure_momentum_teacher_copied_deep",
        setup="""
    import copy
    student = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    teacher = copy.deepcopy(student).requires_grad_(False)
    with torch.no_grad():
        teacher[2].bias[1] = float("nan")
    opt = torch.optim.SGD(student.parameters(), lr=0.1)
    x = torch.rand(3, 2)
""",
        cell="""
            for _ in range(3):
                with torch.no_grad():
                    goal = teacher(x).softmax(-1)
                loss = -(goal * student(x).log_softmax(-1)).sum(-1).mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="parameter", op=None, tensor="2.bias", rows=(1,)),
    ),
    Case(
        name="structure_spectral_norm_of_zero_weights",
        setup="""
            fc = nn.Linear(2, 2)
            nn.init.zeros_(fc.weight)
            class Critic(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.fc = torch.nn.utils.parametrizations.spectral_norm(fc)
                def forward(self, x):
                    return self.fc(x)  # <- here
            critic = Critic()
            opt = torch.optim.SGD(critic.parameters(), lr=0.1)
            x = torch.rand(3, 2)
        """,
        cell="""
            loss = critic(x).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="div", module="fc.parametrizations.weight.0", rows=(0, 1), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="structure_own_parametrization_takes_a_root",
        setup="""
            class Positive(nn.Module):
                def forward(self, W):
                    return W.sqrt()  # <- here
            layer = nn.Linear(2, 2, bias=False)
            with torch.no_grad():
                layer.weight.copy_(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
            nn.utils.parametrize.register_parametrization(layer, "weight", Positive(), unsafe=True)
            net = nn.Sequential(nn.Flatten(), layer)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.rand(3, 2)
        """,
        cell="""
            loss = net(x).sum()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module="1.parametrizations.weight.0", rows=(1,), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="structure_pre_hook_scales_the_input_away",
        setup="""
            net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
            opt = torch.optim.SGD(net.parameters(), lr=0.01)
            def standardize(module, args):
                (h,) = args
                return ((h - h.mean(0)) / h.std(0, correction=0),)  # <- here
            handle = net[2].register_forward_pre_hook(standardize)
            batches = [torch.randn(4, 2) for _ in range(3)]
            batches[2] = torch.ones(1, 2)
        """,
        cell="""
            for x in batches:
                loss = net(x).square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        # A hook before a module runs outside of it in its parent.
        truth=Expect(kind="nan", phase="forward", op="div", module=frozenset({"", "2"}), step=2, rows=(0,), diagnosis=slugs.ZERO_VARIANCE),
    ),
    Case(
        name="structure_activation_hook_divides_the_gradient",
        setup="""
            net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
            head = nn.Linear(2, 1, bias=False)
            nn.init.zeros_(head.weight)
            opt = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
            x = torch.rand(3, 2)
        """,
        cell="""
            h = net(x)
            h.register_hook(lambda g: g / g.norm())  # <- here
            loss = head(h).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="backward", op="div", module=ANY, rows=(0, 1, 2)),
    ),
    Case(
        name="structure_full_backward_hook_multiplies_by_infinity",
        setup="""
            net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 1)})
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.rand(3, 2)
            def amplify(module, grad_in, grad_out):
                return tuple(g * 1e38 * 1e3 for g in grad_in)  # <- here
            net["b"].register_full_backward_hook(amplify)
        """,
        cell="""
            loss = (1e3 * net["b"](net["a"](x))).sum()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="mul", module=ANY, rows=(0, 1, 2)),
    ),
    Case(
        name="structure_checkpoint_sequential",
        setup=_ROOT
        + """
    from torch.utils.checkpoint import checkpoint_sequential
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Identity(), nn.Identity(), Root())
    nn.init.eye_(layers[0].weight)
    opt = torch.optim.SGD(layers.parameters(), lr=0.01)
    x = torch.tensor([[1.0, 1.0], [0.5, 0.0]], requires_grad=True)
""",
        cell="""
            loss = checkpoint_sequential(layers, 2, x, use_reentrant=False).sum()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind=frozenset({"inf", "nan"}), phase="backward", op="sqrt", module=frozenset({"3", ""}), rows=(1,), reproduced=ANY),
    ),
    Case(
        name="structure_compiled_loss_function",
        setup="""
            model = nn.Linear(2, 2, bias=False)
            nn.init.eye_(model.weight)
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            @torch.compile(backend="eager")
            def criterion(p, q):
                ratio = p / q
                return (p * ratio.log()).sum()  # <- here
            p = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
            q = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
        """,
        cell="""
            for t in (q + 0.1, p):
                loss = criterion(model(t), q)
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        # log(0) = -inf, times 0.
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=1, rows=(1,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="structure_model_inside_a_plain_object",
        setup=_LOG
        + """
    class Experiment:
        def __init__(self):
            self.nets = {"policy": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), Log())}
            self.opt = torch.optim.SGD(self.nets["policy"].parameters(), lr=0.0)
            with torch.no_grad():
                self.nets["policy"][0].weight.zero_(); self.nets["policy"][0].bias.copy_(torch.tensor([1.0, -1.0]))
        def __call__(self, x):
            self.opt.zero_grad()
            value = self.nets["policy"](x).mean()
            value.backward()
            self.opt.step()
            return float(value)
    experiment = Experiment()
""",
        cell="print([experiment(torch.rand(2, 2)) for _ in range(3)])",
        truth=Expect(kind="inf", phase="forward", op="log", module="2", step=0, rows=(0, 1), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="structure_weights_tied_by_hand",
        setup="""
            class Tied(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.emb, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
                    self.out.weight = self.emb.weight
                def forward(self, ids):
                    return self.out(self.emb(ids).mean(1))
            lm = Tied()
            with torch.no_grad():
                lm.emb.weight[4, 0] = float("inf")
            opt = torch.optim.SGD(lm.parameters(), lr=0.1)
            ids, y = torch.tensor([[0, 1], [2, 3]]), torch.tensor([1, 2])
        """,
        cell="""
            loss = F.cross_entropy(lm(ids), y)
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="parameter", op=None, tensor=frozenset({"emb.weight", "out.weight"}), rows=(4,)),
    ),
    Case(
        name="structure_two_optimizers_second_model_bad",
        setup=_LOG
        + """
    enc, dec = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), Log())
    with torch.no_grad():
        dec[0].weight.zero_(); dec[0].bias.fill_(0.5)
    oe, od = torch.optim.SGD(enc.parameters(), lr=0.1), torch.optim.SGD(dec.parameters(), lr=0.6)
    x = torch.rand(3, 2)
""",
        cell="""
            for i in range(5):
                z = enc(x)
                loss = dec(z).sum()
                for o in (oe, od): o.zero_grad()
                loss.backward()
                for o in (oe, od): o.step()
        """,
        # One update takes 0.6 * 3 / 0.5 off the bias: the next output is relu(negative) = 0.
        truth=Expect(kind="inf", phase="forward", op="log", module="2", step=2, backward=1, rows=(0, 1, 2), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="structure_generator_expression_of_losses",
        setup="""
            heads = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(3))
            for head in heads:
                nn.init.ones_(head.weight)
            opt = torch.optim.SGD(heads.parameters(), lr=1e-3)
            x = torch.tensor([[1.0, 2.0], [1.0, -1.0]])
            targets = [0.0, 0.0, 0.0]
        """,
        cell="""
            loss = sum(
                (head(x).squeeze(1) - target).abs().log().mean()  # <- here
                for head, target in zip(heads, targets)
            )
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, rows=(1,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="structure_decorated_and_wrapped_step",
        setup="""
            import functools, contextlib
            def timed(f):
                @functools.wraps(f)
                def inner(*a, **k):
                    return f(*a, **k)
                return inner
            model = nn.Linear(2, 2, bias=False)
            nn.init.eye_(model.weight)
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            xs = [torch.rand(2, 2) + 1 for _ in range(4)]
            xs[3][0] = torch.tensor([2.0, -2.0])
        """,
        cell="""
            @timed
            def train_step(x, *, scale=1.0):
                with contextlib.ExitStack() as stack:
                    stack.enter_context(torch.enable_grad())
                    share = model(x)
                    try:
                        share = share / share.sum(1, keepdim=True)  # <- here
                        loss = scale * share.square().mean()
                        loss.backward()
                    finally:
                        opt.step(); opt.zero_grad()
            any(train_step(x) for x in xs)
        """,
        truth=Expect(kind="inf", phase="loss", op="div", module=None, step=3, rows=(0,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="structure_match_statement_free_dispatch",
        setup="""
            model = nn.Linear(2, 1)
            with torch.no_grad():
                model.weight.fill_(1.0); model.bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            LOSSES = {
                "mse": lambda p, t: (p - t).pow(2).mean(),
                "rel": lambda p, t: ((p - t) / t).abs().mean(),  # <- here
            }
            plan = [("mse", torch.ones(3, 1)), ("rel", torch.tensor([[1.0], [2.0], [0.0]]))]
        """,
        cell="""
            for kind, t in plan:
                p = model(torch.ones(3, 2))
                LOSSES[kind](p, t).backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="div", module=None, step=1, rows=(2,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="structure_module_that_calls_its_child_directly",
        setup="""
            class Child(nn.Module):
                def project(self, x):
                    return x.reciprocal()  # <- here
            class Parent(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin, self.child = nn.Linear(2, 2, bias=False), Child()
                def forward(self, x):
                    return self.child.project(self.lin(x))
            model = nn.Sequential(Parent())
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.rand(3, 2); x[1] = 0.0
        """,
        cell="model(x).tanh().sum().backward()\nopt.step()",
        # A method that is not a call: it belongs to the module that is being called. tanh hides the forward infinity, not its derivative.
        truth=Expect(kind=frozenset({"inf", "nan"}), phase=frozenset({"backward", "forward"}), op="reciprocal", module="0", rows=(1,)),
    ),
    Case(
        name="structure_sequence_of_overwritten_names",
        setup="""
            net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
            opt = torch.optim.SGD(net.parameters(), lr=0.05)
            x = torch.rand(4, 3)
        """,
        cell="""
            for i in range(3):
                x_ = net(x)
                x_ = x_ - x_.mean(1, keepdim=True)
                x_ = x_ * (0 if i == 1 else 1)
                x_ = x_ / x_.std(1, keepdim=True); loss = x_.pow(2).mean()  # <- here
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="div", module=None, step=1, rows=(0, 1, 2, 3), diagnosis=slugs.ZERO_VARIANCE),
    ),
    Case(
        name="structure_custom_function_backward_in_a_module",
        setup="""
            class SafeNorm(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    n = x.norm(dim=-1, keepdim=True)
                    ctx.save_for_backward(x, n)
                    return n
                @staticmethod
                def backward(ctx, g):
                    x, n = ctx.saved_tensors
                    return g * x / n  # <- here
            class Norm(nn.Module):
                def forward(self, x):
                    return SafeNorm.apply(x)
            net = nn.Sequential(nn.Linear(2, 2, bias=False), Norm())
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            xs = [torch.rand(2, 2), torch.tensor([[1.0, 1.0], [0.0, 0.0]])]
        """,
        cell="""
            for x in xs:
                opt.zero_grad(); net(x).sum().backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="backward", op="div", module="1", step=1, rows=(1,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="structure_straight_through_estimator",
        setup="""
            class Quantizer(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.codebook = nn.Parameter(torch.rand(4, 2))
                def forward(self, z):
                    d = torch.cdist(z, self.codebook)
                    idx = d.argmin(1)
                    q = self.codebook[idx]
                    use = torch.bincount(idx, minlength=4).float() / len(idx)
                    perplexity = -(use * use.log()).sum()  # <- here
                    return z + (q - z).detach(), F.mse_loss(q, z.detach()) + 0.0 * perplexity
            class VQ(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.encoder, self.vq = nn.Linear(2, 2), Quantizer()
                def forward(self, x):
                    return self.vq(self.encoder(x))
            model = VQ()
            opt = torch.optim.Adam(model.parameters())
            x = torch.rand(2, 2)
        """,
        cell="""
            recon, commit = model(x)
            loss = F.mse_loss(recon, x) + commit
            loss.backward()
            opt.step()
        """,
        # Two rows cannot use four codes: 0 * log 0, and 0.0 * NaN stays NaN.
        truth=Expect(kind="inf", phase="forward", op="log", module="vq", rows=ANY, diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="structure_two_lines_one_statement_second_operand",
        setup="""
            model = nn.Linear(2, 2, bias=False)
            nn.init.eye_(model.weight)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        """,
        cell="""
            h = model(x)
            loss = (
                h.exp().mean()
                + h.square().mean()
                - h.log().mean()  # <- here
                + h.sin().mean()
            )
            loss.backward()
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, rows=(1,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="structure_lstm_cell_by_hand_gate_divides",
        setup="""
            class Cell(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.gates = nn.Linear(4, 8)
                def forward(self, x, h, c):
                    i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
                    i, f = i.relu(), f.relu()
                    i = i / (i + f)  # <- here
                    c = (1 - i) * c + i * g.tanh()
                    return o.sigmoid() * c.tanh(), c
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.cells = nn.ModuleList([Cell(), Cell()])
                def forward(self, xs):
                    h = [torch.zeros(2, 2)] * 2
                    c = [torch.zeros(2, 2)] * 2
                    for x in xs:
                        for k, cell in enumerate(self.cells):
                            h[k], c[k] = cell(x, h[k], c[k])
                            x = h[k]
                    return x
            net = Net()
            with torch.no_grad():
                for cell in net.cells:
                    cell.gates.weight.zero_(); cell.gates.bias.fill_(1.0)
                net.cells[0].gates.weight[0:4, 0] = -1.0
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            xs = [torch.zeros(2, 2) for _ in range(4)]
            xs[2][1, 0] = 3.0
        """,
        cell="loss = net(xs).sum()\nloss.backward()\nopt.step()",
        truth=Expect(kind="nan", phase="forward", op="div", module="cells.0", call=3, rows=(1,), diagnosis=slugs.DIV_ZERO),
    ),
)
