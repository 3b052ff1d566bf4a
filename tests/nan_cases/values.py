"""Values: decoys that were healed, odd dtypes, odd ops, and where a bad tensor was kept."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect, Nothing, Problem

_LOOP = """
    for x in data:
        loss = model(x).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""

CASES = (
    Case(
        name="value_legit_infinity_and_an_overflow",
        setup="""
            class Router(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.gate = nn.Linear(2, 4)
                def forward(self, x):
                    logits = self.gate(x)
                    kth = logits.topk(2, -1).values[:, -1:]
                    return logits.masked_fill(logits < kth, float("-inf")).softmax(-1)
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.router, self.scale = Router(), nn.Parameter(torch.tensor(30.0))
                def forward(self, x):
                    weight = self.router(x)
                    return (weight * torch.exp(self.scale * x.sum(1, keepdim=True))).sum(1)  # <- here
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            data = [torch.rand(3, 2) for _ in range(4)]
            data[2][0] = 2.0
        """,
        cell=_LOOP,
        truth=Expect(kind="inf", phase="forward", op="exp", module="", step=2, rows=(0,)),
    ),
    Case(
        name="value_float8_overflows",
        setup="""
            class Quantise(nn.Module):
                def forward(self, x):
                    small = x.to(torch.float8_e5m2)  # <- here
                    return x + (small.float() - x).detach()
            model = nn.Sequential(nn.Linear(2, 2, bias=False), Quantise(), nn.Linear(2, 1))
            with torch.no_grad():
                model[0].weight.copy_(torch.eye(2))
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            data = [torch.rand(3, 2) for _ in range(3)]
            data[1][2] = 1e6
        """,
        cell=_LOOP,
        truth=Expect(kind="inf", phase="forward", op="_to_copy", module="1", step=1, rows=(2,)),
    ),
    Case(
        name="value_double_precision",
        setup="""
            class Gamma(nn.Module):
                def forward(self, x):
                    return torch.lgamma(x)  # <- here
            model = nn.Sequential(nn.Linear(2, 2, bias=False), Gamma()).double()
            with torch.no_grad():
                model[0].weight.copy_(torch.eye(2))
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            data = [torch.rand(3, 2).double() + 0.5 for _ in range(4)]
            data[3][0, 1] = 0.0
        """,
        cell=_LOOP,
        truth=Expect(kind="inf", phase="forward", op="lgamma", module="1", step=3, rows=(0,)),
    ),
    Case(
        name="value_complex_parameter",
        setup="""
            class Spectral(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.weight = nn.Parameter(torch.randn(3, dtype=torch.cfloat))
                def forward(self, x):
                    return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=4)
            model = Spectral()
            model.weight.data[1] = complex(float("nan"), 0.0)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.randn(2, 4)]
        """,
        cell=_LOOP,
        truth=Expect(kind="nan", phase="parameter", op=None, step=0, rows=(1,), tensor="weight"),
    ),
    Case(
        name="value_plain_tensor_kept_on_the_module",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 2)
                    self.scale = torch.tensor([1.0, 1.0 / 1e-45 * 10])
                def forward(self, x):
                    return self.lin(x) * self.scale
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2)]
        """,
        cell=_LOOP,
        # Neither parameter nor buffer: a constant that someone made, bad before the cell.
        truth=Expect(kind="inf", phase=frozenset({"data", "parameter"}), op=None, step=0, rows=(1,)),
    ),
    Case(
        name="value_more_than_twenty_rows",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(50, 2), torch.rand(50, 2)]
            data[1][10:45] = float("nan")
        """,
        cell=_LOOP,
        truth=Expect(kind="nan", phase="data", op=None, step=1, rows=tuple(range(10, 30)), diagnosis=slugs.BAD_ROW),
    ),
    Case(
        name="value_in_place_root_of_a_slice",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 3, bias=False)
                def forward(self, x):
                    h = self.lin(x).abs()
                    h[:, 1].sqrt_()  # <- here
                    return h
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2) for _ in range(3)]
            data[1][2] = 0.0
        """,
        cell=_LOOP,
        # Its derivative runs inside CopySlices, that belongs to no forward op by number.
        truth=Expect(kind="inf", phase="backward", op=frozenset({"sqrt_", "sqrt"}), module="", step=1, rows=ANY, diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="value_second_derivative_only",
        setup="""
            model = nn.Linear(1, 1, bias=False)
            model.weight.data.fill_(1.0)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 1) + 0.5 for _ in range(3)]
            data[2][1] = 0.0
        """,
        cell="""
            for x in data:
                x = x.requires_grad_()
                energy = model(x) ** 1.5
                force, = torch.autograd.grad(energy.sum(), x, create_graph=True)
                loss = force.square().mean() + force.mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # 1.5 * sqrt(0) is 0, and its own slope is infinite: the pow of line 3, or the pow that line 4 made of it.
        truth=Expect(kind="inf", phase="backward", op="pow", module=None, line=ANY, step=2, rows=(1,)),
    ),
    Case(
        name="value_optimizer_state_was_bad",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.Adam(model.parameters(), lr=0.01)
            model(torch.rand(2, 2)).sum().backward()
            opt.step()
            opt.state[model.weight]["exp_avg"][0, 1] = float("nan")
            data = [torch.rand(3, 2) for _ in range(2)]
        """,
        cell="""
            for x in data:
                loss = model(x).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()  # <- here
        """,
        truth=Expect(kind="nan", phase="optimizer", step=0, backward=1, tensor="weight", rows=(0,)),
    ),
    Case(
        name="value_own_optimizer",
        setup="""
            class Sign(torch.optim.Optimizer):
                def __init__(self, params, lr):
                    super().__init__(params, {"lr": lr})
                @torch.no_grad()
                def step(self, closure=None):
                    for group in self.param_groups:
                        for p in group["params"]:
                            p -= group["lr"] * p.grad / p.grad.abs()
            model = nn.Linear(2, 1)
            opt = Sign(model.parameters(), 0.1)
            data = [torch.rand(3, 2) for _ in range(4)]
            data[2][:, 1] = 0.0
        """,
        cell="""
            for x in data:
                loss = model(x).sum()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="optimizer", line=ANY, step=2, backward=3, tensor="weight", rows=(0,)),
    ),
    Case(
        name="value_gradient_normalised_in_a_parameter_hook",
        setup="""
            model = nn.Linear(2, 1, bias=False)
            model.weight.register_hook(lambda g: g / g.norm())  # <- here
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2) for _ in range(4)]
            data[2].zero_()
        """,
        cell=_LOOP,
        truth=Expect(kind="nan", phase="backward", op=ANY, line=ANY, step=2, reproduced=ANY),
    ),
    Case(
        name="value_group_norm_without_eps",
        setup="""
            model = nn.Sequential(nn.Conv1d(1, 4, 1), nn.GroupNorm(2, 4, eps=0.0), nn.Flatten(), nn.Linear(12, 1))
            with torch.no_grad():
                model[0].bias.fill_(0.5)
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            data = [torch.rand(3, 1, 3) for _ in range(2)]
            data[1][2] = 0.0
        """,
        cell="""
            for x in data:
                out = model(x)  # <- here
                loss = out.mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="native_group_norm", module="1", step=1, rows=(2,), diagnosis=slugs.EPS_ZERO),
    ),
    Case(
        name="value_determinant_of_a_singular_matrix",
        setup="""
            class Flow(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.w = nn.Parameter(torch.eye(2))
                def forward(self, x):
                    sign, log_det = torch.linalg.slogdet(self.w)  # <- here
                    return x @ self.w + log_det
            model = Flow()
            with torch.no_grad():
                model.w.copy_(torch.tensor([[1.0, 1.0], [1.0, 1.0]]))
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2)]
        """,
        cell=_LOOP,
        truth=Expect(kind="inf", phase="forward", op="_linalg_slogdet", module="", rows=()),
    ),
    Case(
        name="value_function_transforms",
        setup="""
            model = nn.Linear(2, 1)
            params = {name: p.detach() for name, p in model.named_parameters()}
            def loss_of(params, x):
                out = torch.func.functional_call(model, params, (x,))
                return (out - out.detach()).abs().sqrt().sum()
            x = torch.rand(3, 2)
        """,
        cell="""
            grads = torch.func.grad(loss_of)(params, x)
            with torch.no_grad():
                after = {name: p - 0.1 * grads[name] for name, p in params.items()}
            out = torch.func.functional_call(model, after, (x,))
        """,
        # Gradients that no backward() made; the forward with what came of them is bad.
        truth=Problem(kind=frozenset({"nan", "inf"}), phase=ANY, may_miss=True),
    ),
    Case(
        name="value_traced_model",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 2)
                def forward(self, x):
                    return torch.log(self.lin(x).abs() * x.sum())
            import warnings
            warnings.simplefilter("ignore")
            model = torch.jit.trace(Net(), torch.rand(3, 2))
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2), torch.zeros(3, 2)]
        """,
        cell=_LOOP,
        # The line inside is TorchScript's; the call is the user's.
        truth=Expect(kind="inf", phase="forward", op="log", module="", line=ANY, step=1, rows=(0, 1, 2)),
    ),
    Case(
        name="nothing_generate_with_a_language_model",
        needs="transformers",
        setup="""
            from transformers import GPT2Config, GPT2LMHeadModel
            config = GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
            model = GPT2LMHeadModel(config).eval()
            ids = torch.randint(1, 20, (2, 4))
        """,
        cell="""
            tokens = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=True, top_k=4, top_p=0.9, pad_token_id=0
            )
        """,
        truth=Nothing(steps=0, backwards=0),
    ),
)
