"""Nothing is wrong: training cells that a cruder tool would stop."""

from tests.nan_cases.case import Case, Nothing

CASES = (
    Case(
        name="nothing_plain_training",
        setup="""
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
            opt = torch.optim.Adam(model.parameters(), lr=1e-2)
            x, y = torch.randn(16, 4), torch.randn(16, 1)
        """,
        cell="""
            for step in range(10):
                loss = F.mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=10, backwards=10),
    ),
    Case(name="nothing_empty_cell", cell="pass", truth=Nothing(steps=0, backwards=0, problems=True)),
    Case(
        name="nothing_only_arithmetic",
        cell="total = torch.ones(3).log().sum().item()\nbad = torch.zeros(2).log()",
        truth=Nothing(steps=0, backwards=0, problems=True),
    ),
    Case(
        name="nothing_causal_mask_of_infinities",
        setup="""
            class Attention(nn.Module):
                def __init__(self, width):
                    super().__init__()
                    self.qkv = nn.Linear(width, 3 * width)
                def forward(self, x):
                    q, k, v = self.qkv(x).chunk(3, -1)
                    scores = q @ k.transpose(1, 2) / math.sqrt(x.shape[-1])
                    mask = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), 1)
                    return torch.softmax(scores + mask, -1) @ v
            model = nn.Sequential(nn.Linear(3, 4), Attention(4), nn.Linear(4, 2))
            opt = torch.optim.AdamW(model.parameters())
            x, y = torch.randn(2, 5, 3), torch.randint(0, 2, (2, 5))
        """,
        cell="""
            for _ in range(4):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=4),
    ),
    Case(
        name="nothing_masked_fill_and_layers_table",
        setup="""
            class Attention(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
                def forward(self, x):
                    scores = self.q(x) @ self.k(x).mT
                    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
                    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ self.v(x)
            model = Attention()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(2, 4, 4)
        """,
        options={"layers": True},
        cell="""
            for _ in range(3):
                loss = model(x).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=3),
    ),
    Case(
        name="nothing_module_that_returns_a_mask",
        setup="""
            class Mask(nn.Module):
                def forward(self, length):
                    return torch.zeros(length, length).masked_fill(torch.ones(length, length).triu(1) > 0, float("-inf"))
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.mask, self.lin = Mask(), nn.Linear(4, 4)
                def forward(self, x):
                    return (self.lin(x) + self.mask(4)).logsumexp(-1)
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 4)
        """,
        cell="""
            for _ in range(3):
                loss = model(x).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=3),
    ),
    Case(
        name="nothing_unused_branch_is_nan",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 2)
                def forward(self, x):
                    h = self.lin(x)
                    self.debug = torch.log(-h.abs() - 1).mean()
                    return h, h / torch.zeros(())
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
        """,
        cell="""
            for _ in range(3):
                logits, _ = model(x)
                loss = F.cross_entropy(logits, y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=3),
    ),
    Case(
        name="nothing_norm_at_zero",
        setup="""
            model = nn.Linear(3, 3, bias=False)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 3)
            x[2] = 0.0
        """,
        cell="""
            for _ in range(3):
                h = model(x)
                loss = h.norm(dim=1).sum() + torch.linalg.norm(h[2]) + F.pairwise_distance(h, h).sum()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=3),
    ),
    Case(
        name="nothing_atan2_of_zeros",
        setup="""
            model = nn.Linear(2, 2, bias=False)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.zeros(3, 2)
        """,
        cell="""
            h = model(x)
            loss = torch.atan2(h[:, 0], h[:, 1]).sum() + torch.complex(h[:, 0], h[:, 1]).abs().sum()
            loss.backward()
            opt.step()
        """,
        truth=Nothing(steps=1),
    ),
    Case(
        name="nothing_std_of_a_constant",
        setup="""
            model = nn.Linear(2, 4)
            with torch.no_grad():
                model.weight.zero_(); model.bias.fill_(0.5)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 2)
        """,
        cell="""
            h = model(x)
            loss = h.std(1).sum() + h.var(0).sum()
            loss.backward()
            opt.step()
        """,
        truth=Nothing(steps=1),
    ),
    Case(
        name="nothing_cosine_similarity_of_zeros",
        setup="""
            model = nn.Linear(3, 3, bias=False)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.zeros(4, 3)
        """,
        cell="""
            h = model(x)
            loss = F.cosine_similarity(h, h.flip(0)).sum() + F.normalize(h, dim=1).sum()
            loss.backward()
            opt.step()
        """,
        truth=Nothing(steps=1),
    ),
    Case(
        name="nothing_powers_of_zero",
        setup="""
            p = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
            opt = torch.optim.SGD([p], lr=0.1)
            base = torch.zeros(3)
        """,
        cell="""
            for _ in range(2):
                loss = (base ** p).sum() + torch.cumprod(p * base, 0).sum() + (p * 0).prod()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_sqrt_healed_by_relu",
        setup="""
            model = nn.Linear(2, 3)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 2)
        """,
        cell="""
            h = torch.relu(model(x))
            safe = torch.where(h > 0, h, torch.ones_like(h))
            loss = torch.where(h > 0, safe.sqrt(), torch.zeros_like(h)).sum()
            loss.backward()
            opt.step()
        """,
        truth=Nothing(steps=1),
    ),
    Case(
        name="nothing_nan_in_the_data_is_masked_first",
        setup="""
            model = nn.Linear(3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x, y = torch.randn(5, 3), torch.randn(5, 1)
            x[1, 1] = float("nan"); y[3] = float("nan")
        """,
        cell="""
            for _ in range(3):
                clean = torch.where(x.isnan(), torch.zeros_like(x), x)
                out = model(clean)
                keep = ~y.isnan()
                loss = F.mse_loss(out[keep], y[keep])
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=3),
    ),
    Case(
        name="nothing_model_imputes_missing_values_itself",
        setup="""
            class Impute(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.default, self.lin = nn.Parameter(torch.zeros(3)), nn.Linear(3, 1)
                def forward(self, x):
                    return self.lin(torch.where(x.isnan(), self.default, x))
            model = Impute()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(5, 3)
            x[0, 0] = x[4, 2] = float("nan")
        """,
        cell="""
            for _ in range(3):
                loss = model(x).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=3),
    ),
    Case(
        name="nothing_nan_to_num_of_data",
        setup="""
            model = nn.Linear(3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(5, 3)
            x[2] = float("nan"); x[3, 0] = float("inf")
        """,
        cell="""
            for _ in range(2):
                loss = model(torch.nan_to_num(x, 0.0, 1.0, -1.0)).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_empty_then_filled",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 2)
                def forward(self, x):
                    out = torch.empty(x.shape[0], 2)
                    out.fill_(float("nan"))
                    for row in range(x.shape[0]):
                        out[row] = self.lin(x[row])
                    return out
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 3)
        """,
        cell="""
            for _ in range(2):
                loss = model(x).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_deterministic_fill_of_empty",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 2)
                def forward(self, x):
                    buffer = torch.empty(2 * x.shape[0], 2)
                    buffer[: x.shape[0]] = self.lin(x)
                    return buffer[: x.shape[0]]
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 3)
        """,
        cell="""
            torch.use_deterministic_algorithms(True)
            try:
                for _ in range(2):
                    loss = model(x).square().mean()
                    opt.zero_grad()
                    loss.backward()
                    opt.step()
            finally:
                torch.use_deterministic_algorithms(False)
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_user_exception",
        setup="""
            model = nn.Linear(3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 3)
        """,
        cell="""
            for i in range(5):
                loss = model(x).square().mean()
                loss.backward()
                opt.step()
                if i == 2:
                    raise LookupError("no more data")
        """,
        truth=Nothing(raises="LookupError", steps=3, backwards=3),
    ),
    Case(
        name="nothing_user_exception_inside_forward",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin, self.seen = nn.Linear(3, 1), 0
                def forward(self, x):
                    self.seen += 1
                    if self.seen == 3:
                        raise ZeroDivisionError("planted")
                    return self.lin(x)
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 3)
        """,
        cell="""
            for i in range(5):
                loss = model(x).square().mean()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(raises="ZeroDivisionError", steps=2, backwards=2),
    ),
    Case(
        name="nothing_zero_gradients",
        setup="""
            model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
            model[0].bias.data.fill_(-100.0)
            opts = [torch.optim.Adam(model.parameters()), torch.optim.RMSprop(model.parameters()), torch.optim.Adagrad(model.parameters())]
            x = torch.randn(4, 3)
        """,
        cell="""
            for opt in opts:
                loss = model(x).sum()
                opt.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
        """,
        truth=Nothing(steps=3, backwards=3),
    ),
    Case(
        name="nothing_huge_but_finite",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            x = torch.full((3, 2), 1e19)
        """,
        cell="""
            for _ in range(2):
                loss = (model(x) * 1e19).sum()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # The gradients are 3e38: their L2 norm is infinite, and they are not.
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_best_loss_starts_at_infinity",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 2)
        """,
        cell="""
            best, running = torch.tensor(float("inf")), torch.full((3,), float("nan"))
            for i in range(3):
                loss = model(x).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
                best = torch.minimum(best, loss.detach())
                running[i] = loss.item()
        """,
        truth=Nothing(steps=3),
    ),
    Case(
        name="nothing_unused_embedding_row_padding",
        setup="""
            model = nn.EmbeddingBag(6, 3, mode="max", padding_idx=0)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            ids = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 1]])
        """,
        cell="""
            for _ in range(2):
                loss = model(ids).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_parameter_that_is_infinite_by_design",
        setup="""
            class Clamp(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 2)
                    self.register_buffer("upper", torch.tensor([float("inf"), 0.5]))
                    self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
                def forward(self, x):
                    return torch.minimum(self.lin(x), self.upper) + torch.softmax(self.mask, -1).sum(0)
            model = Clamp()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 3)
        """,
        cell="""
            for _ in range(2):
                loss = model(x).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # A mask kept as a buffer, as many attention classes do.
        truth=Nothing(steps=2),
    ),
)
