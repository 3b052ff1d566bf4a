"""Bad values that were masked in the forward and came back through the derivative."""

from tests.nan_cases import slugs
from tests.nan_cases.case import Case, Expect

CASES = (
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
