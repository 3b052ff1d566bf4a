"""A GradScaler's overflows are its way of working; what is bad at scale 1 too is not."""

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
        name="scaler_nan_in_the_loss",
        setup=_MODEL
        + """
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
""",
        cell="""
            for i in range(5):
                opt.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    out = model(x)
                gap = (out.float() - y).square().mean(1)
                loss = torch.log(gap - 1e9 * (i == 3)).mean()  # <- here
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
        """,
        truth=Expect(kind="nan", phase="loss", op="log", module=None, step=3, rows=(0, 1, 2, 3, 4, 5, 6, 7)),
    ),
    Case(
        name="scaler_bad_derivative",
        setup="""
            model = nn.Linear(2, 3, bias=False)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            data = [torch.randn(3, 2) for _ in range(5)]
            data[2][1] = 0.0
        """,
        cell="""
            for x in data:
                opt.zero_grad()
                loss = model(x).square().sum(1).sqrt().mean()  # <- here
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, step=2, rows=(1,), diagnosis=slugs.SQRT_ZERO),
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
        name="scaler_collapses",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 100)
            x = torch.full((4, 2), 1e36)
        """,
        cell="""
            for _ in range(120):
                opt.zero_grad()
                loss = (model(x) * 1e-36).mean() * 1e37
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
        """,
        # Gradients near 1e37 are finite at scale 1 and at few scales above it: close to a hundred steps in a row are skipped.
        truth=Expect(kind="inf", phase=ANY, line=ANY, step=0, backward=ANY, diagnosis=slugs.SCALE_COLLAPSE, reproduced=ANY),
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
