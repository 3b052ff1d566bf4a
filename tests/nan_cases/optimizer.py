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
        name="optimizer_rmsprop_without_eps",
        setup="""
            model = nn.Embedding(4, 2)
            opt = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=0.0)
            ids = torch.tensor([0, 1, 3])
        """,
        cell="""
            for _ in range(2):
                loss = model(ids).square().sum()
                opt.zero_grad()
                loss.backward()
                opt.step()  # <- here
        """,
        truth=Expect(kind="nan", phase="optimizer", step=0, backward=1, tensor="weight", rows=(2,)),
    ),
    Case(
        name="optimizer_infinite_learning_rate",
        setup="""
            model = nn.Linear(2, 1, bias=False)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            schedule = [0.1, 0.1, float("inf"), 0.1]
            x = torch.rand(3, 2)
        """,
        cell="""
            for lr in schedule:
                for group in opt.param_groups:
                    group["lr"] = lr
                loss = model(x).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()  # <- here
        """,
        truth=Expect(kind="inf", phase="optimizer", step=2, backward=3, tensor="weight", rows=(0,)),
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
        name="optimizer_learning_rate_too_high_in_a_network",
        setup="""
            model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
            opt = torch.optim.SGD(model.parameters(), lr=10.0, momentum=0.9)
            x, y = torch.randn(16, 2) * 3, torch.randn(16, 1)
        """,
        cell="""
            for step in range(100):
                loss = F.mse_loss(model(x), y)  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # From step 3 on the second linear overflows, to -inf only: the relu heals it. The loss is the first that stays bad.
        truth=Expect(kind="inf", phase="loss", op="mse_loss", module=None, step=8, rows=(), diagnosis=slugs.LR_TOO_HIGH),
    ),
    Case(
        name="optimizer_one_parameter_explodes",
        setup="""
            class Scaled(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 1)
                    self.log_scale = nn.Parameter(torch.tensor(0.0))
                def forward(self, x):
                    return self.lin(x) * torch.exp(self.log_scale)  # <- here
            model = Scaled()
            opt = torch.optim.SGD([{"params": model.lin.parameters(), "lr": 0.0}, {"params": [model.log_scale], "lr": 10.0}])
            x = torch.rand(8, 2)
            with torch.no_grad():
                model.lin.weight.fill_(0.1); model.lin.bias.zero_()
        """,
        cell="""
            for step in range(30):
                loss = -model(x).mean().log1p()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # The reward is without bound in the scale: about 10 more a step, until exp(88.7) is past float32.
        truth=Expect(
            kind="inf",
            phase="forward",
            op="exp",
            module="",
            step=12,
            rows=(),
            diagnosis=frozenset({slugs.EXPLODING_PARAMETER, slugs.LR_TOO_HIGH}),
        ),
    ),
    Case(
        name="optimizer_manual_update_divides",
        setup="""
            w = torch.ones(3, requires_grad=True)
            x = torch.tensor([1.0, 0.0, 2.0])
        """,
        cell="""
            for _ in range(3):
                loss = (w * x).square().sum()
                loss.backward()
                with torch.no_grad():
                    w -= 0.1 * w.grad / w.grad.abs()  # <- here
                w.grad = None
        """,
        # Between two backwards of a loop without an optimizer: the next step starts with a bad parameter.
        truth=Expect(kind="nan", phase=frozenset({"parameter", "optimizer"}), line=ANY, step=0, backward=1, tensor="w", rows=(1,)),
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
