"""Born in the update, or between backward and the update; and updates that went too far."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect

CASES = (
    Case(
        name="optimizer_adam_without_eps",
        setup="""
            model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
            with torch.no_grad():
                model[0].bias.copy_(torch.tensor([5.0, -50.0, 5.0]))
            opt = torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.0)
            x, y = torch.randn(4, 2), torch.randn(4, 1)
        """,
        cell="""
            for _ in range(3):
                loss = F.mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()  # <- here
        """,
        truth=Expect(kind="nan", phase="optimizer", module=ANY, step=0, backward=1, tensor="0.weight", rows=(1,), diagnosis=slugs.ADAM_EPS),
    ),
    Case(
        name="optimizer_gradients_divided_by_no_tokens",
        setup="""
            model = nn.Linear(3, 2)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 3)
            counts = [4, 3, 0, 2]
        """,
        cell="""
            for count in counts:
                loss = model(x).square().sum()
                opt.zero_grad()
                loss.backward()
                for p in model.parameters():
                    p.grad.div_(count)  # <- here
                opt.step()
        """,
        truth=Expect(kind="inf", phase="optimizer", step=2, backward=3, tensor=frozenset({"weight", "bias"})),
    ),
    Case(
        name="optimizer_clip_of_an_infinite_gradient",
        setup="""
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 2)
            scales = [1.0, 1.0, 1e-45]
        """,
        cell="""
            for scale in scales:
                loss = model(x).square().sum()
                opt.zero_grad()
                loss.backward()
                model[1].weight.grad /= scale  # <- here
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
        """,
        # By the time of the step the infinity is NaN (inf * 0), and the line that made it is the division.
        truth=Expect(kind="inf", phase="optimizer", step=2, backward=3, tensor="1.weight", diagnosis=slugs.CLIP_INF),
    ),
    Case(
        name="optimizer_learning_rate_far_too_high",
        setup="""
            model = nn.Linear(3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=50.0)
            x, y = torch.randn(16, 3), torch.randn(16, 1)
        """,
        cell="""
            for step in range(200):
                out = model(x)
                loss = ((out - y) ** 2).mean()  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="pow", module=None, step=9, diagnosis=slugs.LR_TOO_HIGH),
    ),
    Case(
        name="optimizer_user_writes_after_the_step",
        setup="""
            model = nn.Linear(2, 2)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 2)
        """,
        cell="""
            for step in range(4):
                loss = model(x).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
                if step == 1:
                    with torch.no_grad():
                        model.weight.copy_(model.weight / model.weight.new_zeros(()))
        """,
        # The user's own statement after the step; seen when the next step starts.
        truth=Expect(kind="inf", phase=frozenset({"parameter", "optimizer"}), line=ANY, step=2, backward=2, tensor="weight", rows=(0, 1)),
    ),
)
