"""Nothing is wrong: infinities and NaNs that stay where they were meant to be, inside ops and inference."""

from tests.nan_cases.case import Case, Nothing

CASES = (
    Case(
        name="nothing_max_pool_pads_with_infinity",
        setup="""
            model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, padding=1), nn.Flatten(), nn.LazyLinear(2))
            x, y = torch.randn(3, 1, 6, 6), torch.tensor([0, 1, 0])
            model(x)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        cell="""
            for _ in range(2):
                padded = F.pad(x, (1, 1, 1, 1), value=float("-inf"))
                pooled = F.max_pool2d(padded, 3, stride=1)
                loss = F.cross_entropy(model(pooled), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_attention_kernel_with_an_empty_row",
        setup="""
            class Attend(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
                def forward(self, x, mask):
                    q, k, v = (layer(x)[:, None] for layer in (self.q, self.k, self.v))
                    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
            model = Attend()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(2, 3, 4)
            mask = torch.ones(2, 3, 3, dtype=torch.bool)
            mask[1, 2] = False
        """,
        cell="""
            for _ in range(2):
                loss = model(x, mask).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_logsumexp_of_infinities",
        setup="""
            model = nn.Linear(3, 4)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 3)
            absent = torch.zeros(3, 4, dtype=torch.bool)
            absent[1] = True
        """,
        cell="""
            for _ in range(2):
                scores = model(x).masked_fill(absent, float("-inf"))
                total = torch.logsumexp(scores, -1)
                loss = total[~absent.all(1)].mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_top_k_filter_when_sampling",
        setup="""
            model = nn.Linear(4, 10)
            x = torch.randn(2, 4)
        """,
        cell="""
            tokens = []
            with torch.no_grad():
                for _ in range(3):
                    logits = model(x)
                    floor = logits.topk(3, -1).values[:, -1:]
                    logits = logits.masked_fill(logits < floor, float("-inf"))
                    tokens.append(torch.multinomial(torch.softmax(logits, -1), 1))
        """,
        truth=Nothing(steps=0, backwards=0),
    ),
    Case(
        name="nothing_sorted_with_infinite_padding",
        setup="""
            class Nearest(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 3, bias=False)
                def forward(self, x, lengths):
                    distance = self.lin(x).square().sum(-1)
                    padded = torch.full((x.shape[0], 6), float("inf"))
                    padded[:, : x.shape[1]] = distance
                    nearest = padded.sort(-1).values[:, :2]
                    return nearest
            model = Nearest()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 4, 2)
        """,
        cell="""
            for _ in range(2):
                loss = model(x, None).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_diagonal_pushed_away",
        setup="""
            encoder = nn.Linear(3, 3)
            opt = torch.optim.SGD(encoder.parameters(), lr=0.1)
            x = torch.randn(6, 3)
        """,
        cell="""
            for _ in range(2):
                z = F.normalize(encoder(x), dim=1)
                similarity = z @ z.T / 0.5
                similarity.fill_diagonal_(float("-inf"))
                loss = F.cross_entropy(similarity, torch.arange(6).roll(3))
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_integer_only_model",
        setup="""
            class Count(nn.Module):
                def forward(self, ids):
                    return torch.bincount(ids.flatten(), minlength=5)
            model = Count()
            ids = torch.tensor([[1, 2], [3, 3]])
        """,
        cell="""
            total = sum(model(ids) for _ in range(3))
            flags = model(ids) > 0
        """,
        truth=Nothing(steps=0, backwards=0),
    ),
    Case(
        name="nothing_inference_returns_a_healed_value",
        setup="""
            class Safe(nn.Module):
                def forward(self, x):
                    return torch.nan_to_num(x / x.sum(-1, keepdim=True), 0.0)
            model = Safe().eval()
            x = torch.zeros(2, 3)
        """,
        cell="""
            with torch.no_grad():
                share = model(x)
        """,
        truth=Nothing(steps=0),
    ),
    Case(
        name="nothing_training_heals_without_a_gradient",
        setup="""
            class Relative(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(6, 1)
                def forward(self, x):
                    with torch.no_grad():
                        share = torch.nan_to_num(x / x.sum(-1, keepdim=True), 0.0, 0.0, 0.0)
                    return self.lin(torch.cat([x, share], -1))
            model = Relative()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.zeros(4, 3)
            x[0] = 1.0
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
        name="nothing_padding_with_fast_attention",
        setup="""
            model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(2, 3, 4)
            padding = torch.tensor([[False, False, True], [True, True, True]])
        """,
        cell="""
            for _ in range(2):
                loss = model(x, src_key_padding_mask=padding).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_finfo_min_mask_with_an_empty_row",
        setup="""
            model = nn.Linear(4, 4)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 4)
            hidden = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]], dtype=torch.bool)
        """,
        cell="""
            for _ in range(2):
                scores = model(x).masked_fill(hidden, torch.finfo(torch.float32).min)
                loss = torch.softmax(scores, -1).square().sum()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_two_mask_planes_leave_something",
        setup="""
            model = nn.Linear(4, 4)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(4, 4)
            low = torch.finfo(torch.float32).min
            causal = torch.full((4, 4), low).triu(1)
            padding = torch.tensor([0.0, 0.0, 0.0, low])
        """,
        cell="""
            for _ in range(2):
                scores = model(x) + causal + padding
                loss = torch.softmax(scores, -1).square().sum()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # The planes add up to -inf in places, and no row is left without a finite score.
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_bce_at_the_edges",
        setup="""
            model = nn.Sequential(nn.Linear(1, 1), nn.Sigmoid())
            with torch.no_grad():
                model[0].weight.fill_(1.0); model[0].bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x, y = torch.tensor([[200.0], [-200.0]]), torch.tensor([[0.0], [1.0]])
        """,
        cell="""
            for _ in range(2):
                loss = F.binary_cross_entropy(model(x), y) + F.softplus(x).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="nothing_double_backward",
        setup="""
            critic = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
            opt = torch.optim.Adam(critic.parameters())
            real = torch.randn(4, 2)
        """,
        cell="""
            for _ in range(2):
                x = real.clone().requires_grad_()
                grad, = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
                loss = (grad.norm(dim=1) - 1).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2, backwards=2),
    ),
    Case(
        name="nothing_hessian_of_a_linear_branch",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 2, requires_grad=True)
        """,
        cell="""
            out = model(x) + x.square().sum(1, keepdim=True)
            first, = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = (first * first).sum() + torch.autograd.functional.hessian(lambda t: (t * 2).sum(), torch.ones(2)).sum()
            loss.backward()
            opt.step()
        """,
        # ZeroTensors appear on the way: looking into one kills the process.
        truth=Nothing(steps=1),
    ),
    Case(
        name="nothing_vmap_and_func_grad",
        setup="""
            model = nn.Linear(2, 1)
            params = dict(model.named_parameters())
            def one(params, x):
                return torch.func.functional_call(model, params, (x,)).square().sum()
            x = torch.randn(3, 2)
        """,
        cell="""
            per_sample = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(params, x)
            sizes = {name: value.shape for name, value in per_sample.items()}
        """,
        truth=Nothing(steps=0, backwards=0, problems=True),
    ),
    Case(
        name="nothing_log_likelihood_of_an_impossible_event",
        setup="""
            model = nn.Linear(2, 3)
            x = torch.randn(2, 2)
        """,
        cell="""
            with torch.no_grad():
                probability = torch.zeros(3)
                score = torch.log(probability)
                keep = torch.isfinite(score)
                out = model(x)[:, keep]
        """,
        truth=Nothing(steps=0, backwards=0),
    ),
    Case(
        name="nothing_beam_search_starts_at_minus_infinity",
        setup="""
            model = nn.Linear(3, 4)
            x = torch.randn(1, 3)
        """,
        cell="""
            with torch.no_grad():
                beams = torch.full((3,), float("-inf"))
                beams[0] = 0.0
                for _ in range(2):
                    scores = beams[:, None] + model(x).log_softmax(-1)
                    beams = scores.flatten().topk(3).values
        """,
        truth=Nothing(steps=0, backwards=0),
    ),
    Case(
        name="nothing_quantised_and_meta_modules",
        setup="""
            tiny = nn.Linear(2, 2, device="meta")
            q = torch.quantize_per_tensor(torch.randn(2, 2), 0.1, 0, torch.qint8)
            class Passes(nn.Module):
                def forward(self, x):
                    return x
            model = Passes()
        """,
        cell="""
            out = model(q)
            shape = tiny(torch.empty(3, 2, device="meta")).shape
            eighth = model(torch.randn(3).to(torch.float8_e4m3fn))
            nested = model(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
            empty = model(torch.empty(0, 3))
            nothing = model(None)
        """,
        truth=Nothing(steps=0, backwards=0, problems=True),
    ),
)
