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
        name="trap_nan_to_num_hides_the_forward",
        setup="""
            class Share(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 3, bias=False)
                def forward(self, x):
                    h = self.lin(x)
                    share = h / h.sum(-1, keepdim=True)  # <- here
                    return torch.nan_to_num(share, nan=0.0)
            model = Share()
            with torch.no_grad():
                model.lin.weight.abs_()
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            batches = [torch.rand(3, 3) + 1 for _ in range(4)]
            batches[1][2] = 0.0
        """,
        cell="""
            for x in batches:
                loss = model(x).square().sum()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="backward", op="div", module="", step=1, rows=(2,), diagnosis=slugs.WHERE_TRAP),
    ),
    Case(
        name="trap_clamp_of_a_logarithm",
        setup="""
            model = nn.Sequential(nn.Linear(1, 2), nn.Softmax(-1))
            with torch.no_grad():
                model[0].weight.copy_(torch.tensor([[200.0], [-200.0]])); model[0].bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.tensor([[0.001], [1.0], [0.002]])
        """,
        cell="""
            p = model(x)
            log_p = p.log().clamp(min=-100)  # <- here
            loss = -log_p[:, 1].mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="backward", op="log", module=None, rows=(1,), diagnosis=slugs.WHERE_TRAP),
    ),
    Case(
        name="trap_multiplied_by_a_zero_mask",
        setup="""
            model = nn.Linear(2, 2, bias=False)
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.rand(3, 2) + 0.1
            x[0] = 0.0
            mask = torch.tensor([0.0, 1.0, 1.0])
        """,
        cell="""
            length = model(x).square().sum(1).sqrt()  # <- here
            loss = (length * mask).sum()
            loss.backward()
            opt.step()
        """,
        # 0 / 0: the mask made the incoming gradient zero, so that the root gives NaN at once.
        truth=Expect(
            kind="nan", phase="backward", op="sqrt", module=None, rows=(0,), diagnosis=frozenset({slugs.WHERE_TRAP, slugs.SQRT_ZERO})
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
        name="trap_index_put_overwrites_the_bad_row",
        setup="""
            model = nn.Linear(2, 3, bias=False)
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.rand(4, 2) + 0.1
            x[2] = 0.0
        """,
        cell="""
            h = model(x)
            unit = h / h.abs().sum(1, keepdim=True)  # <- here
            unit = unit.clone()
            unit[2] = 0.0
            loss = unit.square().sum()
            loss.backward()
            opt.step()
        """,
        truth=Expect(
            kind="nan", phase="backward", op="div", module=None, rows=(2,), diagnosis=frozenset({slugs.WHERE_TRAP, slugs.DIV_ZERO})
        ),
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
    Case(
        name="trap_loss_kept_only_where_finite",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            with torch.no_grad():
                model.weight.zero_(); model.bias.fill_(-1.0)
            x = torch.randn(4, 2)
        """,
        cell="""
            z = model(x).squeeze(1) + torch.tensor([2.0, 3.0, 0.5, 4.0])
            root = torch.sqrt(z)  # <- here
            keep = torch.isfinite(root)
            loss = torch.where(keep, root, 0.0).sum()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase=frozenset({"loss", "backward"}), op="sqrt", module=None, rows=(2,), diagnosis=slugs.WHERE_TRAP),
    ),
)
