"""Numbers that do not fit half precision; a GradScaler's overflows are its way of working, what is bad at scale 1 too is not."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect, Nothing

_MODEL = """
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    x, y = torch.randn(8, 4), torch.randn(8, 1) * 100
"""

_LOOP = """
    for _ in range(6):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
"""


CASES = (
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
    Case(
        name="nothing_scaler_overflows_in_half_gradients",
        setup=_MODEL
        + """
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 20, backoff_factor=0.125)
""",
        cell="""
            for _ in range(6):
                opt.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    out = model(x)
                    loss = F.mse_loss(out.float(), y)
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
        """,
        truth=Nothing(overflow_steps=3, steps=3, backwards=6),
    ),
    Case(
        name="nothing_scaler_with_a_fused_optimizer",
        setup=_MODEL
        + """
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 127, backoff_factor=2.0 ** -50)
""",
        cell=_LOOP,
        truth=Nothing(overflow_steps=1, backwards=6),
    ),
    Case(
        name="nothing_scaler_with_accumulation",
        setup=_MODEL
        + """
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 127, backoff_factor=2.0 ** -50)
""",
        cell="""
            for i in range(8):
                loss = F.mse_loss(model(x), y) / 2
                scaler.scale(loss).backward()
                if i % 2 == 1:
                    scaler.step(opt)
                    scaler.update()
                    opt.zero_grad()
        """,
        truth=Nothing(overflow_steps=1, steps=3, backwards=8),
    ),
    Case(
        name="nothing_scaled_loss_is_infinite_and_gradients_are_not",
        setup="""
            model = nn.Linear(4, 1)
            x, y = torch.randn(8, 4), torch.randn(8, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 124)
        """,
        cell="""
            for _ in range(4):
                loss = F.mse_loss(model(x), y) / 8 + 100
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
        """,
        # The scaled loss is inf. Its derivative is the scale, and every step is taken.
        truth=Nothing(overflow_steps=0, steps=4, backwards=4),
    ),
    Case(
        name="scaler_half_activation_overflows",
        setup="""
            model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 1))
            with torch.no_grad():
                model[0].weight.fill_(300.0)
            opt = torch.optim.SGD(model.parameters(), lr=1e-6)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
            data = [torch.rand(3, 4) * 0.01, torch.rand(3, 4) * 0.01, torch.full((3, 4), 90.0)]
        """,
        cell="""
            for x in data:
                opt.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    out = model(x)  # <- here
                loss = out.float().square().mean()
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
        """,
        truth=Expect(kind="inf", phase="forward", op="mm", module="0", step=2, rows=(0, 1, 2), diagnosis=slugs.FP16_OVERFLOW),
    ),
    Case(
        name="scaler_forgotten_by_the_step",
        setup=_MODEL
        + """
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 127)
""",
        cell="""
            opt.zero_grad()
            loss = F.mse_loss(model(x), y) + 4
            scaled = scaler.scale(loss)
            scaled.backward()
            opt.step()
        """,
        # Nobody unscales: the overflow is no skipped step, and the update would poison the parameters.
        truth=Expect(kind="inf", phase=ANY, line=ANY, step=0, backward=ANY, reproduced=ANY),
    ),
)
