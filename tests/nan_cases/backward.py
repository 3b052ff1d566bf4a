"""The forward was finite, or bad values were masked in it; a derivative was not."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect

CASES = (
    Case(
        name="backward_hypot_at_the_origin",
        setup="""
            class Magnitude(nn.Module):
                def forward(self, x):
                    a, b = x.unbind(-1)
                    return torch.hypot(a, b)  # <- here
            model = nn.Sequential(nn.Linear(2, 2, bias=False), Magnitude())
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 2)
            x[0] = 0.0
        """,
        cell="""
            loss = model(x).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="backward", op="hypot", module="1", rows=(0,)),
    ),
    Case(
        name="backward_entropy_of_a_hard_choice",
        setup="""
            model = nn.Linear(1, 2)
            with torch.no_grad():
                model.weight.copy_(torch.tensor([[100.0], [-100.0]])); model.bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.tensor([[0.01], [2.0], [-0.01]])
        """,
        cell="""
            p = torch.softmax(model(x), -1)
            entropy = torch.special.entr(p).sum(-1)  # <- here
            loss = -entropy.mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="special_entr", module=None, rows=(1,)),
    ),
    Case(
        name="backward_bad_custom_function",
        setup="""
            class Soft(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    ctx.save_for_backward(x)
                    return x.abs()
                @staticmethod
                def backward(ctx, grad):
                    x, = ctx.saved_tensors
                    return grad * x / x.abs()
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 3, bias=False)
                def forward(self, x):
                    return Soft.apply(self.lin(x)).sum(1)
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            batches = [torch.randn(3, 2) for _ in range(3)]
            batches[1][2] = 0.0
        """,
        cell="""
            for x in batches:
                loss = model(x).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # The op that the derivative belongs to has no ATen name; either line, of apply or in the user's backward, is true.
        truth=Expect(kind="nan", phase="backward", module="", line=ANY, step=1, rows=(2,)),
    ),
    Case(
        name="backward_gradient_overflows_along_a_chain",
        setup="""
            class Amplify(nn.Module):
                def forward(self, x):
                    return x * 1e15  # <- here
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 1, bias=False)
                    self.amplify = Amplify()
                def forward(self, x):
                    x = self.lin(x) * 1e-36
                    return self.amplify(self.amplify(self.amplify(x)))
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=1e-30)
            x = torch.randn(3, 2)
        """,
        cell="""
            loss = model(x).sum()
            loss.backward()
            opt.step()
        """,
        # 1e15 to the third power is past float32, on the way back through the first of the three calls.
        truth=Expect(kind="inf", phase="backward", op="mul", module="amplify", call=1, rows=(0, 1, 2)),
    ),
    Case(
        name="backward_eigenvectors_of_a_repeated_value",
        setup="""
            class Align(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.a = nn.Parameter(torch.eye(3))
                def forward(self, x):
                    values, vectors = torch.linalg.eigh(self.a @ self.a.T)  # <- here
                    return x @ vectors
            model = Align()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 3)
        """,
        cell="""
            loss = model(x).pow(3).sum()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="_linalg_eigh", module=""),
    ),
    Case(
        name="backward_under_non_reentrant_checkpoint",
        setup="""
            from torch.utils.checkpoint import checkpoint
            class Root(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 3, bias=False)
                def forward(self, x):
                    return self.lin(x).square().sum(1).sqrt()  # <- here
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.stem, self.block = nn.Linear(3, 3, bias=False), Root()
                def forward(self, x):
                    return checkpoint(self.block, self.stem(x), use_reentrant=False)
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            batches = [torch.randn(4, 3) for _ in range(3)]
            batches[2][1] = 0.0
        """,
        cell="""
            for x in batches:
                loss = model(x).sum()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module="block", call=ANY, step=2, rows=(1,), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="backward_under_reentrant_checkpoint",
        setup="""
            from torch.utils.checkpoint import checkpoint
            class Root(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 3, bias=False)
                def forward(self, x):
                    return self.lin(x).square().sum(1).sqrt()  # <- here
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.stem, self.block = nn.Linear(3, 3, bias=False), Root()
                def forward(self, x):
                    return checkpoint(self.block, self.stem(x), use_reentrant=True)
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            batches = [torch.randn(4, 3) for _ in range(3)]
            batches[1][2] = 0.0
        """,
        cell="""
            for x in batches:
                loss = model(x).sum()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module="block", call=ANY, step=1, rows=(2,), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="backward_gradient_penalty",
        setup="""
            critic = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
            with torch.no_grad():
                critic[0].weight.abs_(); critic[0].bias.zero_(); critic[2].weight.abs_()
            opt = torch.optim.SGD(critic.parameters(), lr=1e-4)
            batches = [torch.rand(3, 2) + 0.1 for _ in range(3)]
            batches[2][1] = -5.0
        """,
        cell="""
            for x in batches:
                x = x.requires_grad_()
                score = critic(x)
                grad, = torch.autograd.grad(score.sum(), x, create_graph=True)
                norm = grad.square().sum(1).sqrt()  # <- here
                loss = score.mean() + 10 * (norm - 1).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, step=2, rows=(1,), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="backward_sparse_embedding",
        setup="""
            emb = nn.Embedding(6, 3, sparse=True)
            emb.weight.data[4] = 0.0
            opt = torch.optim.SGD(emb.parameters(), lr=0.1)
            batches = [torch.tensor([0, 1]), torch.tensor([2, 4]), torch.tensor([3, 5])]
        """,
        cell="""
            for ids in batches:
                length = (emb(ids) ** 2).sum(1).sqrt()  # <- here
                loss = (length - 1).abs().sum()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, step=1, rows=(1,), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="backward_atanh_at_the_edge",
        setup="""
            model = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
            with torch.no_grad():
                model[0].weight.fill_(1.0); model[0].bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.tensor([[0.1], [0.2], [30.0]])
        """,
        cell="""
            squashed = model(x)
            log_det = torch.log1p(-squashed.square())  # <- here
            loss = (log_det.clamp(min=-20.0)).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="backward", op="log1p", module=None, rows=(2,), diagnosis=slugs.WHERE_TRAP),
    ),
    Case(
        name="backward_through_a_complex_angle",
        setup="""
            model = nn.Linear(2, 2, bias=False).to(torch.cfloat)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            z = torch.randn(3, 2, dtype=torch.cfloat)
            z[1] = 0
        """,
        cell="""
            out = model(z)
            size = (out * out.conj()).real.sum(1).sqrt()  # <- here
            loss = size.sum()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, rows=(1,), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="backward_weight_norm_of_a_zero_row",
        setup="""
            lin = nn.Linear(3, 2, bias=False)
            lin.weight.data[1] = 0.0
            model = nn.utils.parametrizations.weight_norm(lin)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 3)
        """,
        cell="""
            loss = model(x).sum()  # <- here
            loss.backward()
            opt.step()
        """,
        # 0 / 0 while the weight is made: a forward birth, inside the parametrization.
        truth=Expect(
            kind="nan", phase="forward", op="_weight_norm_interface", module="parametrizations.weight.0", rows=(1,), diagnosis="zero_norm"
        ),
    ),
    Case(
        name="trap_where_sqrt_of_a_negative",
        setup="""
            class Signed(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 3)
                def forward(self, x):
                    h = self.lin(x)
                    return torch.where(h > 0, h.sqrt(), torch.zeros_like(h))  # <- here
            model = nn.Sequential(nn.Linear(2, 2), Signed())
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            x = torch.randn(4, 2)
        """,
        cell="""
            loss = model(x).sum()
            loss.backward()
            opt.step()
        """,
        # Born in the forward, healed there, and brought back by the derivative from the saved result: either phase is true.
        truth=Expect(kind="nan", phase=frozenset({"forward", "backward"}), op="sqrt", module="1", diagnosis=slugs.WHERE_TRAP),
    ),
    Case(
        name="trap_where_log_of_zero",
        setup="""
            model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity())
            with torch.no_grad():
                model[0].weight.fill_(1.0)
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            batches = [torch.rand(3, 1) + 0.5 for _ in range(4)]
            batches[2][1] = 0.0
        """,
        cell="""
            for x in batches:
                h = model(x)
                logs = torch.where(h > 0, torch.log(h), torch.zeros_like(h))  # <- here
                loss = logs.square().sum()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="backward", op="log", module=None, step=2, rows=(1,), diagnosis=slugs.WHERE_TRAP),
    ),
    Case(
        name="trap_where_division",
        setup="""
            def safe_ratio(a, b):
                ratio = a / b  # <- here
                return torch.where(b == 0, torch.zeros_like(a), ratio)
            model = nn.Linear(2, 2)
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.randn(4, 2)
            count = torch.tensor([[1.0, 2.0], [3.0, 0.0], [1.0, 1.0], [2.0, 4.0]])
        """,
        cell="""
            loss = safe_ratio(model(x), count).square().mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="backward", op="div", module=None, rows=(1,), diagnosis=slugs.WHERE_TRAP),
    ),
    Case(
        name="trap_masked_fill_after_a_reciprocal",
        setup="""
            class Inverse(nn.Module):
                def forward(self, x):
                    inverse = 1.0 / x  # <- here
                    return inverse.masked_fill(x == 0, 0.0)
            model = nn.Sequential(nn.Linear(2, 2), nn.Identity(), Inverse())
            with torch.no_grad():
                model[0].weight.copy_(torch.eye(2)); model[0].bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.5, 0.7]])
        """,
        cell="""
            loss = model(x).sum()
            loss.backward()
            opt.step()
        """,
        truth=Expect(
            kind=frozenset({"nan", "inf"}),
            phase=frozenset({"forward", "backward"}),
            op="reciprocal",
            module="2",
            rows=(1,),
            diagnosis=slugs.WHERE_TRAP,
        ),
    ),
    Case(
        name="trap_x_log_x",
        setup="""
            class Entropy(nn.Module):
                def forward(self, p):
                    return torch.special.xlogy(p, p).sum(-1)  # <- here
            model = nn.Sequential(nn.Linear(1, 2), nn.Softmax(-1), Entropy())
            with torch.no_grad():
                model[0].weight.copy_(torch.tensor([[200.0], [-200.0]])); model[0].bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.tensor([[0.001], [1.0], [0.002]])
        """,
        cell="""
            loss = model(x).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind=frozenset({"nan", "inf"}), phase="backward", op="xlogy", module="2", rows=(1,)),
    ),
    Case(
        name="trap_minimum_with_an_overflowing_branch",
        setup="""
            class Softclip(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(1, 1, bias=False)
                def forward(self, x):
                    h = self.lin(x)
                    grown = torch.exp(h)  # <- here
                    return torch.where(h > 20, h, torch.log1p(grown))
            model = Softclip()
            model.lin.weight.data.fill_(1.0)
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.tensor([[1.0], [200.0], [2.0]])
        """,
        cell="""
            loss = model(x).sum()
            loss.backward()
            opt.step()
        """,
        truth=Expect(
            kind=frozenset({"nan", "inf"}),
            phase=frozenset({"forward", "backward"}),
            op="exp",
            module="",
            rows=(1,),
            diagnosis=slugs.WHERE_TRAP,
        ),
    ),
)
