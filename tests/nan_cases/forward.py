"""Births inside a module's forward."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect

_LOOP = """
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
"""

CASES = (
    Case(
        name="forward_log_after_a_global_counter",
        setup="""
            counter = 0
            class Second(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(8, 8)
                def forward(self, x):
                    global counter
                    counter += 1
                    x = self.lin(x)
                    if counter > 50:
                        x = torch.log(x - x.detach().min())  # <- here
                    return x
            model = nn.Sequential(nn.Linear(4, 8), Second(), nn.Linear(8, 1))
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            x, y = torch.randn(6, 4), torch.randn(6, 1)
        """,
        cell="""
            for step in range(60):
                loss = F.mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="log", module="1", step=50, diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="forward_log_of_a_negative_after_own_counter",
        setup="""
            batches = [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(8)]
        """,
        cell="""
            class Block(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(4, 4)
                    self.seen = 0

                def forward(self, x):
                    self.seen += 1
                    h = self.lin(x)
                    if self.seen == 6:
                        h = torch.log(h)  # <- here
                    return h

            model = nn.Sequential(Block(), nn.ReLU(), nn.Linear(4, 1))
            opt = torch.optim.Adam(model.parameters(), lr=1e-3)
            for x, y in batches:
                loss = F.mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="log", module="0", step=5),
    ),
    Case(
        name="forward_zero_over_zero",
        setup="""
            class Normalise(nn.Module):
                def forward(self, x):
                    total = x.sum(1, keepdim=True)
                    return x / total  # <- here
            model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Normalise(), nn.Linear(4, 1))
            with torch.no_grad():
                model[0].bias.fill_(-0.1)
            opt = torch.optim.SGD(model.parameters(), lr=0.001)
            batches = [(torch.rand(4, 3) + 5, torch.randn(4, 1)) for _ in range(4)]
            model[0].weight.data.abs_()
            batches[2][0][3] = 0.0
        """,
        cell=_LOOP,
        truth=Expect(kind="nan", phase="forward", op="div", module="2", step=2, rows=(3,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="forward_shared_activation_second_call",
        setup="""
            class Act(nn.Module):
                def forward(self, x):
                    return x.sqrt()  # <- here
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.one, self.two, self.act = nn.Linear(3, 4), nn.Linear(4, 4), Act()
                def forward(self, x):
                    x = self.act(self.one(x).abs() + 1)
                    x = self.two(x)
                    x = self.act(x)
                    return x.mean(1)
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 3)
            with torch.no_grad():
                model.two.weight.abs_(); model.two.bias.abs_(); model.two.weight[2].neg_(); model.two.bias[2] = -1
        """,
        cell="""
            loss = model(x).pow(2).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="sqrt", module="act", call=2, rows=(0, 1, 2, 3)),
    ),
    Case(
        name="forward_linear_overflows",
        setup="""
            model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 1))
            with torch.no_grad():
                model[0].weight.fill_(1e20); model[1].weight.fill_(1e20)
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.ones(4, 2)
        """,
        cell="""
            out = model(x)  # <- here
            loss = out.mean()
            loss.backward()
        """,
        truth=Expect(kind="inf", phase="forward", op="mm", module="1", rows=(0, 1, 2, 3)),
    ),
    Case(
        name="forward_linear_with_bias_is_addmm",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.stem = nn.Linear(2, 2)
                    self.head = nn.Linear(2, 2)
                def forward(self, x):
                    x = self.stem(x)
                    x = self.head(x * 1e30)  # <- here
                    return F.softmax(x, -1)
            model = Net()
            with torch.no_grad():
                model.head.weight.fill_(1e10)
                model.stem.weight.fill_(1.0); model.stem.bias.fill_(0.0)
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.tensor([[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]])
        """,
        cell="""
            loss = model(x)[:, 0].sum()
            loss.backward()
        """,
        truth=Expect(kind="inf", phase="forward", op="addmm", module="head", rows=(0, 2)),
    ),
    Case(
        name="forward_std_of_one_element",
        setup="""
            class Standardise(nn.Module):
                def forward(self, x):
                    return (x - x.mean(0)) / (x.std(0) + 1e-6)  # <- here
            model = nn.Sequential(nn.Linear(3, 3), Standardise(), nn.Linear(3, 1))
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            data = torch.randn(9, 3)
        """,
        cell="""
            for x in data.split(4):
                loss = model(x).pow(2).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="std", module="1", step=2, rows=(0, 1, 2), diagnosis=slugs.ZERO_VARIANCE),
    ),
    Case(
        name="forward_mean_of_an_empty_selection",
        setup="""
            class Pool(nn.Module):
                def forward(self, x, keep):
                    pooled = [row[flag].mean() for row, flag in zip(x, keep)]  # <- here
                    return torch.stack(pooled)
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin, self.pool = nn.Linear(4, 4), Pool()
                def forward(self, x, keep):
                    return self.pool(self.lin(x), keep)
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 4)
            keep = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]], dtype=torch.bool)
        """,
        cell="""
            loss = model(x, keep).sum()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="mean", module="pool", rows=()),
    ),
    Case(
        name="forward_layer_norm_without_eps",
        setup="""
            model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, eps=0.0), nn.Linear(4, 1))
            with torch.no_grad():
                model[0].bias.fill_(1.0)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 3)
            x[2] = 0.0
        """,
        cell="""
            loss = model(x).mean()  # <- here
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="native_layer_norm", module="1", rows=(2,), diagnosis=slugs.EPS_ZERO),
    ),
    Case(
        name="forward_batch_norm_eval_with_negative_variance",
        setup="""
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
            model[1].running_var[2] = -1.0
            x = torch.randn(5, 3)
        """,
        cell="""
            with torch.no_grad():
                out = model(x)  # <- here
        """,
        truth=Expect(kind="nan", phase="forward", op="native_batch_norm", module="1", rows=(0, 1, 2, 3, 4), reproduced=ANY),
    ),
    Case(
        name="forward_batch_norm_eval_variance_zero_eps_zero",
        setup="""
            class Frozen(nn.BatchNorm2d):
                def forward(self, x):  # nn.BatchNorm2d itself refuses eps=0 in some versions of torch
                    known = self.weight, self.bias, self.running_mean, self.running_var
                    return torch.batch_norm(x, *known, False, 0.1, 0.0, True)  # <- here
            model = nn.Sequential(nn.Conv2d(1, 2, 3), Frozen(2), nn.Flatten(), nn.Linear(8, 1)).eval()
            model[1].running_var[1] = 0.0
            opt = torch.optim.SGD(model[3].parameters(), lr=0.1)
            x = torch.rand(2, 1, 4, 4)
        """,
        cell="""
            for _ in range(2):
                out = model(x)
                loss = out.mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="native_batch_norm", module="1", rows=(0, 1), diagnosis=slugs.EPS_ZERO),
    ),
    Case(
        name="forward_acos_past_one",
        setup="""
            class Angle(nn.Module):
                def forward(self, a, b):
                    cosine = (a * b).sum(-1) * 1.0001
                    return torch.acos(cosine)  # <- here
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.proj, self.angle = nn.Linear(3, 3), Angle()
                def forward(self, x):
                    unit = F.normalize(self.proj(x), dim=-1)
                    return self.angle(unit, unit.roll(1, 0))
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 3)
            x[1] = x[0]
        """,
        cell="""
            loss = model(x).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="acos", module="angle", rows=(1,)),
    ),
    Case(
        name="forward_fractional_power_of_a_negative",
        setup="""
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
            gamma = 2.2
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            class Gamma(nn.Module):
                def __init__(self, inner):
                    super().__init__()
                    self.inner = inner
                def forward(self, x):
                    return self.inner(x ** (1 / gamma))  # <- here
            model = Gamma(model)
            batches = [(torch.rand(4, 3), torch.rand(4, 1)) for _ in range(3)]
            batches[2][0][0, 1] = -0.25
        """,
        cell=_LOOP,
        truth=Expect(kind="nan", phase="forward", op="pow", module="", step=2, rows=(0,)),
    ),
    Case(
        name="forward_in_place_log",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 3)
                def forward(self, x):
                    h = torch.relu(self.lin(x)) * 1.0
                    h.log_()  # <- here
                    return h.sum(1)
            model = Net()
            with torch.no_grad():
                model.lin.bias.copy_(torch.tensor([1.0, -9.0, 1.0]))
                model.lin.weight.mul_(0.1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.rand(2, 3)
        """,
        cell="""
            loss = model(x).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="log_", module="", rows=(0, 1), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="forward_complex_division",
        setup="""
            class Filter(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.gain = nn.Parameter(torch.ones(5, dtype=torch.cfloat))
                def forward(self, x):
                    spectrum = torch.fft.rfft(x)
                    unit = spectrum / spectrum.abs()  # <- here
                    return torch.fft.irfft(unit * self.gain, n=8)
            model = Filter()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 8)
            x[1] = 0.0
        """,
        cell="""
            loss = model(x).pow(2).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="div", module="", rows=(1,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="forward_no_grad_scoring_cell",
        setup="""
            class Score(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 2)
                def forward(self, x):
                    probs = F.softmax(self.lin(x) * 200, -1)
                    return -(probs * probs.log()).sum(-1)  # <- here
            model = Score()
            x = torch.randn(6, 3)
            x[4] = torch.tensor([40.0, -40.0, 40.0])
            x[:4] *= 1e-3; x[5] *= 1e-3
        """,
        cell="""
            with torch.no_grad():
                for _ in range(3):
                    entropy = model(x)
        """,
        truth=Expect(
            kind="inf", phase="forward", op="log", module="", step=0, backward=0, rows=(4,), reproduced=ANY, diagnosis=slugs.LOG_ZERO
        ),
    ),
)
