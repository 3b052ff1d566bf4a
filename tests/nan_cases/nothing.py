"""Nothing is wrong: training cells that a cruder tool would stop, and infinities and NaNs that stay where they were meant to be."""

from tests.nan_cases.case import Case, Nothing

CASES = (
    Case(name="nothing_empty_cell", cell="pass", truth=Nothing(steps=0, backwards=0, problems=True)),
    Case(
        name="nothing_masked_fill_and_layers_table",
        setup="""
            class Attention(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
                def forward(self, x):
                    scores = self.q(x) @ self.k(x).mT
                    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
                    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ self.v(x)
            model = Attention()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(2, 4, 4)
        """,
        options={"layers": True},
        cell="""
            for _ in range(3):
                loss = model(x).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=3),
    ),
    Case(
        name="nothing_module_that_returns_a_mask",
        setup="""
            class Mask(nn.Module):
                def forward(self, length):
                    return torch.zeros(length, length).masked_fill(torch.ones(length, length).triu(1) > 0, float("-inf"))
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.mask, self.lin = Mask(), nn.Linear(4, 4)
                def forward(self, x):
                    return (self.lin(x) + self.mask(4)).logsumexp(-1)
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 4)
        """,
        cell="""
            for _ in range(3):
                loss = model(x).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=3),
    ),
    Case(
        name="nothing_std_of_a_constant",
        setup="""
            model = nn.Linear(2, 4)
            with torch.no_grad():
                model.weight.zero_(); model.bias.fill_(0.5)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 2)
        """,
        cell="""
            h = model(x)
            loss = h.std(1).sum() + h.var(0).sum()
            loss.backward()
            opt.step()
        """,
        truth=Nothing(steps=1),
    ),
    Case(
        name="nothing_user_exception",
        setup="""
            model = nn.Linear(3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 3)
        """,
        cell="""
            for i in range(5):
                loss = model(x).square().mean()
                loss.backward()
                opt.step()
                if i == 2:
                    raise LookupError("no more data")
        """,
        truth=Nothing(raises="LookupError", steps=3, backwards=3),
    ),
    Case(
        name="nothing_user_exception_inside_forward",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin, self.seen = nn.Linear(3, 1), 0
                def forward(self, x):
                    self.seen += 1
                    if self.seen == 3:
                        raise ZeroDivisionError("planted")
                    return self.lin(x)
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 3)
        """,
        cell="""
            for i in range(5):
                loss = model(x).square().mean()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(raises="ZeroDivisionError", steps=2, backwards=2),
    ),
    Case(
        name="nothing_zero_gradients",
        setup="""
            model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
            model[0].bias.data.fill_(-100.0)
            opts = [torch.optim.Adam(model.parameters()), torch.optim.RMSprop(model.parameters()), torch.optim.Adagrad(model.parameters())]
            x = torch.randn(4, 3)
        """,
        cell="""
            for opt in opts:
                loss = model(x).sum()
                opt.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
        """,
        truth=Nothing(steps=3, backwards=3),
    ),
    Case(
        name="nothing_integer_only_model",
        setup="""
            class Count(nn.Module):
                def forward(self, ids):
                    return torch.bincount(ids.flatten(), minlength=5)
            model = Count()
            ids = torch.tensor([[1, 2], [3, 3]])
        """,
        cell="""
            total = sum(model(ids) for _ in range(3))
            flags = model(ids) > 0
        """,
        truth=Nothing(steps=0, backwards=0),
    ),
    Case(
        name="nothing_hessian_of_a_linear_branch",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 2, requires_grad=True)
        """,
        cell="""
            out = model(x) + x.square().sum(1, keepdim=True)
            first, = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = (first * first).sum() + torch.autograd.functional.hessian(lambda t: (t * 2).sum(), torch.ones(2)).sum()
            loss.backward()
            opt.step()
        """,
        # ZeroTensors appear on the way: looking into one kills the process.
        truth=Nothing(steps=1),
    ),
    Case(
        name="nothing_vmap_and_func_grad",
        setup="""
            model = nn.Linear(2, 1)
            params = dict(model.named_parameters())
            def one(params, x):
                return torch.func.functional_call(model, params, (x,)).square().sum()
            x = torch.randn(3, 2)
        """,
        cell="""
            per_sample = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(params, x)
            sizes = {name: value.shape for name, value in per_sample.items()}
        """,
        truth=Nothing(steps=0, backwards=0, problems=True),
    ),
    Case(
        name="nothing_quantised_and_meta_modules",
        setup="""
            tiny = nn.Linear(2, 2, device="meta")
            q = torch.quantize_per_tensor(torch.randn(2, 2), 0.1, 0, torch.qint8)
            class Passes(nn.Module):
                def forward(self, x):
                    return x
            model = Passes()
        """,
        cell="""
            out = model(q)
            shape = tiny(torch.empty(3, 2, device="meta")).shape
            eighth = model(torch.randn(3).to(torch.float8_e4m3fn))
            nested = model(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
            empty = model(torch.empty(0, 3))
            nothing = model(None)
        """,
        truth=Nothing(steps=0, backwards=0, problems=True),
    ),
)
