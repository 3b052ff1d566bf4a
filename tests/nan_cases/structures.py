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
)
