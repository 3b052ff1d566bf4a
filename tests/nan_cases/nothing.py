"""Nothing is wrong: training cells that a cruder tool would stop."""

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
)
