"""Numbers that do not fit half precision."""

from tests.nan_cases import slugs
from tests.nan_cases.case import Case, Expect

CASES = (
    Case(
        name="precision_half_model_overflows",
        setup="""
            class Scale(nn.Module):
                def forward(self, x):
                    return x * 400  # <- here
            model = nn.Sequential(nn.Linear(2, 2, bias=False), Scale(), nn.Linear(2, 1)).half()
            with torch.no_grad():
                model[0].weight.copy_(torch.eye(2) * 10)
            opt = torch.optim.SGD(model.parameters(), lr=1e-4)
            batches = [torch.rand(3, 2).half() for _ in range(3)]
            batches[2][1] = 20.0
        """,
        cell="""
            for x in batches:
                out = model(x)
                loss = out.float().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="mul", module="1", step=2, rows=(1,), diagnosis=slugs.FP16_OVERFLOW),
    ),
    Case(
        name="precision_float32_minimum_in_bfloat16",
        setup="""
            class Attention(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.q = nn.Linear(4, 4)
                def forward(self, x, keep):
                    low = torch.zeros(2, 3).masked_fill(~keep, torch.finfo(torch.float32).min)
                    low = low.to(torch.bfloat16)  # <- here
                    return torch.softmax(self.q(x) @ x.mT + low[:, None], -1) @ x
            model = Attention().bfloat16()
            opt = torch.optim.SGD(model.parameters(), lr=1e-4)
            x = torch.randn(2, 3, 4).bfloat16()
            keep = torch.tensor([[False, False, False], [True, True, True]])
        """,
        cell="""
            loss = model(x, keep).float().mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="_to_copy", module="", rows=(0,), diagnosis=slugs.BF16_OVERFLOW),
    ),
    Case(
        name="precision_bfloat16_square_overflows",
        setup="""
            model = nn.Linear(1, 1, bias=False).bfloat16()
            model.weight.data.fill_(1.0)
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            batches = [torch.ones(2, 1).bfloat16(), torch.tensor([[1.0], [3e19]]).bfloat16()]
        """,
        cell="""
            for x in batches:
                out = model(x)
                square = out * out  # <- here
                loss = square.mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="mul", module=None, step=1, rows=(1,), diagnosis=slugs.BF16_OVERFLOW),
    ),
    Case(
        name="precision_half_sum_overflows_in_the_loss",
        setup="""
            model = nn.Linear(2, 64, bias=False).half()
            model.weight.data.fill_(16.0)
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            x = torch.full((8, 2), 5.0).half()
        """,
        cell="""
            out = model(x)
            energy = out.square()
            loss = energy.sum()  # <- here
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="sum", module=None, rows=(), diagnosis=slugs.FP16_OVERFLOW),
    ),
    Case(
        name="precision_half_gradient_overflows_without_a_scaler",
        setup="""
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).half()
            with torch.no_grad():
                model[1].weight.fill_(30.0)
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            x = torch.randn(3, 2).half()
        """,
        cell="""
            out = model(x)  # <- here
            loss = out.float().mean() * 2.0 ** 15
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        """,
        # The gradient of the hidden layer: 2 ** 15 / 3 * 30 does not fit. Its op is that of the second linear.
        truth=Expect(kind="inf", phase="backward", op="addmm", module="1", rows=(0, 1, 2), diagnosis=slugs.FP16_OVERFLOW),
    ),
    Case(
        name="precision_variance_underflows_in_half",
        setup="""
            class Norm(nn.Module):
                def forward(self, x):
                    centred = x - x.mean(-1, keepdim=True)
                    variance = centred.square().mean(-1, keepdim=True)
                    return centred * torch.rsqrt(variance + 1e-8)  # <- here
            model = nn.Sequential(nn.Linear(2, 4), Norm(), nn.Linear(4, 1)).half()
            with torch.no_grad():
                model[0].bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            x = torch.tensor([[1.0, 2.0], [1e-6, 1e-6], [3.0, 1.0]]).half()
        """,
        cell="""
            loss = model(x).float().sum()
            loss.backward()
            opt.step()
        """,
        # 1e-8 is 0 in half precision, and so are the squares of 1e-6.
        truth=Expect(
            kind="inf",
            phase="forward",
            op="rsqrt",
            module="1",
            rows=(1,),
        ),
    ),
)
