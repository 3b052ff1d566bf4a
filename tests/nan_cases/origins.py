"""What was made before the model call, by what made it: arguments, attacks, generators, weights, updates."""

from tests.nan_cases.case import Case, Expect, Nothing

CASES = (
    Case(
        name="origin_attack_of_several_steps_and_a_bad_layer",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 3)
                    self.out = nn.Linear(3, 2)
                def forward(self, x):
                    h = self.lin(x)
                    return self.out(torch.log(x.abs().sum(1, keepdim=True)) + h)  # <- here
            def attack(x, y):
                moved = x.clone()
                for _ in range(3):
                    moved = moved.detach().requires_grad_()
                    (slope,) = torch.autograd.grad(F.cross_entropy(net(moved), y), moved)
                    moved = (moved + 0.1 * slope.sign()).clamp(-1, 1)
                return moved.detach() * (x != 0)
            net = Net()
            opt = torch.optim.SGD(net.parameters(), lr=0.01)
            batches = [(torch.rand(4, 3) + 0.1, torch.tensor([0, 1, 0, 1])) for _ in range(3)]
            seen = []
        """,
        cell="""
            for step, (x, y) in enumerate(batches):
                keep = torch.ones(4, 1)
                keep[1] = float(step != 2)
                loss = F.cross_entropy(net(attack(x, y) * keep), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="log", module="", call=frozenset({1, 4}), step=2, backward=11, rows=(1,)),
    ),
    # --- infinities that a model holds, in cells that only infer -------------------------------------------------------------------
    Case(
        name="origin_infinite_weight_in_an_inference_cell",
        setup="""
            net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
            net[2].weight.data[1, 2] = float("inf")
            net[0].bias.data.fill_(3.0)
            x = torch.rand(4, 3)
        """,
        cell="""
            with torch.no_grad():
                out = net(x)
        """,
        truth=Expect(kind="inf", phase="parameter", op=None, rows=(1,), tensor="2.weight", diagnosis="bad_parameter"),
    ),
    Case(
        name="origin_quiet_masks_that_a_model_holds",
        setup="""
            class Scores(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 4)
                    self.mask = nn.Parameter(torch.tensor([0.0, 0.0, -math.inf, 1.0]), requires_grad=False)
                    self.register_buffer("cost", torch.tensor([0.5, math.inf, 0.25, 0.125]))
                    self.register_buffer("cap", torch.tensor([math.inf, 1.0, 2.0, 3.0]))
                def forward(self, x):
                    h = self.lin(x)
                    return h + self.mask, h + self.cost, torch.minimum(self.cap, h) , self.cap.expand(2, 4)
            net = Scores()
            head = nn.Linear(3, 4)
            with torch.no_grad():
                head.bias[1] = -math.inf
        """,
        cell="""
            with torch.no_grad():
                parts = net(torch.ones(2, 3))
                chosen = head(torch.ones(2, 3)).argmax(1)
        """,
        truth=Nothing(),
    ),
)
