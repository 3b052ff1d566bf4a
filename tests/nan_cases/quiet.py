"""Nothing is wrong: infinities and NaNs that experts write on purpose, guard, or never use."""

from tests.nan_cases.case import Case, Nothing

_NET = """
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
"""


def _quiet(name: str, cell: str, setup: str = "", truth: Nothing | None = None) -> Case:
    return Case(name=f"quiet_{name}", setup=_NET + setup, cell=cell, truth=truth or Nothing())


CASES = (
    _quiet(
        "rows_masked_away_after_the_softmax",
        """
            for _ in range(3):
                scores = net(x).masked_fill(~keep, float("-inf"))
                weights = scores.softmax(-1).masked_fill(~keep, 0.0)
                loss = (weights * net(x)).square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        "    keep = torch.ones(4, 3, dtype=torch.bool); keep[2] = False",
    ),
    _quiet(
        "perplexity_overflows_in_the_log",
        """
            for _ in range(3):
                loss = 300 * F.cross_entropy(net(x), y)
                opt.zero_grad(); loss.backward(); opt.step()
                print(f"{loss.item():.0f} ppl {torch.exp(loss.detach() + 300):.3g}")
                net.zero_grad(); nn.init.xavier_uniform_(net[0].weight); nn.init.xavier_uniform_(net[2].weight)
        """,
    ),
    _quiet(
        "evaluation_with_masked_logits",
        """
            net.eval()
            with torch.no_grad():
                for _ in range(3):
                    logits = model(x)
            ranks = logits.argsort(-1)
        """,
        """
    class Masked(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net
        def forward(self, x):
            logits = self.net(x)
            logits[:, 1] = -torch.inf
            return logits
    model = Masked(net)
""",
    ),
    _quiet(
        "log_softmax_of_masked_logits_when_scoring",
        """
            with torch.inference_mode():
                scores = model(x)
                best = scores.topk(2).indices
        """,
        """
    class Scorer(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net
        def forward(self, x):
            return F.log_softmax(self.net(x).masked_fill(torch.tensor([False, True, False]), -torch.inf), -1)
    model = Scorer(net)
""",
    ),
    _quiet(
        "beam_scores_with_one_live_beam",
        """
            beams = torch.full((2, 3), float("-inf")); beams[:, 0] = 0.0
            with torch.no_grad():
                for step in range(3):
                    logp = net(torch.randn(6, 3)).log_softmax(-1).view(2, 3, 3)
                    flat = (beams[..., None] + logp).view(2, -1)
                    beams, index = flat.topk(3, dim=1)
        """,
    ),
    _quiet(
        "frozen_parameter_that_is_a_mask",
        """
            for _ in range(3):
                loss = F.cross_entropy(model(x), y)
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net
            self.mask = nn.Parameter(torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -math.inf], [-math.inf, 0.0, 0.0]]), requires_grad=False)
        def forward(self, x):
            scores = self.net(x)[:3] + self.mask
            return torch.cat([scores.softmax(-1) @ self.net(x)[:3], self.net(x)[3:]])
    model = Model()
""",
    ),
    _quiet(
        "empty_bag_and_empty_batch",
        """
            for ids, offsets in [(torch.tensor([1, 2]), torch.tensor([0, 2, 2])), (torch.tensor([3]), torch.tensor([0, 0, 0]))]:
                loss = bag(ids, offsets).square().mean() + net(x[:0]).sum()
                opt2.zero_grad(); loss.backward(); opt2.step()
        """,
        "    bag = nn.EmbeddingBag(5, 3, mode='mean')\n    opt2 = torch.optim.SGD(bag.parameters(), lr=0.1)",
    ),
    _quiet(
        "batch_of_one_is_refused_by_batch_norm",
        """
            for n in (4, 1):
                loss = model(x[:n]).mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        "    model = nn.Sequential(net, nn.BatchNorm1d(3))",
        Nothing(raises="ValueError", steps=1),
    ),
    _quiet(
        "cholesky_refuses_a_matrix",
        """
            h = net(x)
            L = torch.linalg.cholesky(h.T @ h - 100 * torch.eye(3))
            L.sum().backward()
        """,
        truth=Nothing(raises="_LinAlgError", problems=True),
    ),
    _quiet(
        "infinite_norm_and_infinite_clamp_bounds",
        """
            for _ in range(3):
                loss = F.mse_loss(net(x).clamp(-math.inf, math.inf), x)
                opt.zero_grad(); loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), max_norm=float("inf"), norm_type=math.inf)
                opt.step()
        """,
        truth=Nothing(steps=3),
    ),
)
