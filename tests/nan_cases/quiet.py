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
        "running_maximum_starts_at_minus_infinity",
        """
            for _ in range(3):
                scores = net(x)
                m, total = torch.full((4,), -torch.inf), torch.zeros(4)
                for block in scores.split(1, dim=1):
                    new = torch.maximum(m, block.amax(1))
                    total = total * torch.exp(m - new) + torch.exp(block - new[:, None]).sum(1)
                    m = new
                loss = (m + total.log() - scores.gather(1, y[:, None])[:, 0]).mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Nothing(steps=3),
    ),
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
        "nan_to_num_after_an_empty_row_of_masked_fill",
        """
            for _ in range(3):
                scores = net(x).masked_fill(empty, float("-inf"))
                loss = torch.nan_to_num(scores.softmax(-1)).square().sum()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        "    empty = torch.zeros(4, 1, dtype=torch.bool); empty[1] = True",
    ),
    _quiet(
        "user_skips_a_batch_that_is_not_finite",
        """
            skipped = 0
            for i in range(4):
                batch = x if i != 2 else x * float("nan")
                loss = F.cross_entropy(net(batch), y)
                if not torch.isfinite(loss):
                    skipped += 1
                    continue
                opt.zero_grad(); loss.backward(); opt.step()
            assert skipped == 1
        """,
        truth=Nothing(steps=3),
    ),
    _quiet(
        "user_filters_bad_rows_first",
        """
            for batch in (x, dirty):
                good = torch.isfinite(batch).all(1)
                loss = F.cross_entropy(net(batch[good]), y[good])
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        "    dirty = x.clone(); dirty[1, 0] = math.nan; dirty[3] = -math.inf",
    ),
    _quiet(
        "nanmean_of_labels_without_a_gradient",
        """
            for _ in range(3):
                filled = torch.where(target.isnan(), target.nanmean(), target)
                loss = F.mse_loss(net(x)[:, 0], filled)
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        "    target = torch.tensor([1.0, math.nan, 0.0, math.nan])",
    ),
    _quiet(
        "logarithm_of_zero_in_a_constant_branch",
        """
            for _ in range(3):
                prior = torch.where(counts > 0, counts.log(), torch.zeros(3))
                loss = F.cross_entropy(net(x) + prior, y)
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        "    counts = torch.tensor([3.0, 0.0, 1.0])",
    ),
    _quiet(
        "impossible_class_in_a_log_prior",
        """
            for _ in range(3):
                loss = -torch.logsumexp(net(x) + log_prior, 1).mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        "    log_prior = torch.tensor([0.5, 0.0, 0.5]).log()",
    ),
    _quiet(
        "metrics_that_are_nan",
        """
            history = []
            for _ in range(3):
                out = net(x)
                loss = F.cross_entropy(out, y)
                opt.zero_grad(); loss.backward(); opt.step()
                with torch.no_grad():
                    precision = (out.argmax(1) == 7).float().sum() / (out.argmax(1) == 7).sum()
                    history.append({"precision": precision.item(), "corr": torch.corrcoef(torch.ones(2, 4)).sum().item()})
            mean = torch.tensor([h["precision"] for h in history]).nanmean()
        """,
        truth=Nothing(steps=3),
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
        "best_loss_tensor_starts_at_infinity",
        """
            best, patience = torch.tensor(float("inf")), 0
            for _ in range(4):
                loss = F.cross_entropy(net(x), y)
                opt.zero_grad(); loss.backward(); opt.step()
                patience = 0 if loss < best else patience + 1
                best = torch.minimum(best, loss.detach())
        """,
        truth=Nothing(steps=4),
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
        "nucleus_filter",
        """
            with torch.no_grad():
                logits = net(x)
                ordered, order = logits.sort(descending=True)
                cut = ordered.softmax(-1).cumsum(-1) > 0.8
                cut[:, 0] = False
                logits = logits.masked_fill(cut.scatter(1, order, cut), -math.inf)
                drawn = torch.multinomial(logits.softmax(-1), 1)
        """,
    ),
    _quiet(
        "results_filled_with_nan_first",
        """
            results = torch.full((4, 3), float("nan"))
            for i in range(4):
                out = net(x[i : i + 1])
                results[i] = out.detach()[0]
                loss = F.cross_entropy(out, y[i : i + 1]) + 0.1 * results[: i + 1].mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Nothing(steps=4),
    ),
    _quiet(
        "uninitialised_buffer_then_written",
        """
            for _ in range(3):
                buffer = torch.empty(4, 3).fill_(float("nan"))
                torch.mul(x, 2.0, out=buffer)
                out = torch.empty_like(buffer)
                out.copy_(buffer)
                loss = F.cross_entropy(net(out), y)
                opt.zero_grad(); loss.backward(); opt.step()
        """,
    ),
    _quiet(
        "segment_maximum_over_empty_segments",
        """
            for _ in range(3):
                h = net(x)
                top = torch.full((5, 3), -torch.inf).scatter_reduce(0, segment[:, None].expand(-1, 3), h, "amax", include_self=False)
                top = torch.where(top.isinf(), torch.zeros(()), top)
                loss = top.square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        "    segment = torch.tensor([0, 0, 3, 3])",
    ),
    _quiet(
        "forward_algorithm_from_one_state",
        """
            for _ in range(3):
                emit = net(x)
                alpha = torch.full((3,), -1e30); alpha[0] = 0.0
                for t in range(4):
                    alpha = torch.logsumexp(alpha[:, None] + transitions, 0) + emit[t]
                loss = -alpha.logsumexp(0)
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        "    transitions = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).tril(-1) > 0, -torch.inf)",
    ),
    _quiet(
        "errors_of_the_known_labels_only",
        """
            for _ in range(3):
                known = ~target.isnan()
                loss = (net(x)[known, 0] - target[known]).square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        "    target = torch.tensor([1.0, math.nan, 0.0, math.nan])",
    ),
    _quiet(
        "double_where_by_the_book",
        """
            for _ in range(3):
                h = net(x)
                ok = h > 0
                loss = torch.where(ok, torch.where(ok, h, torch.ones(())).log(), torch.zeros(())).mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
    ),
    _quiet(
        "gradient_repaired_by_a_hook",
        """
            for _ in range(3):
                h = net(x) * 0
                h.register_hook(torch.nan_to_num)
                loss = h.abs().sum() + (h * h).sum(1).add(1e-12).sqrt().sum()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
    ),
    _quiet(
        "hook_zeroes_the_gradient_of_a_root",
        """
            for _ in range(3):
                h = net(x) * 0
                h.register_hook(lambda g: torch.where(torch.isfinite(g), g, 0.0))
                loss = (h * h).sum(1).sqrt().sum()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Nothing(steps=3),
    ),
    _quiet(
        "distance_of_equal_points_by_cdist",
        """
            for _ in range(3):
                h = net(x)
                loss = torch.cdist(h, h).sum() + F.triplet_margin_loss(h, h, h.flip(0)) + F.cosine_embedding_loss(h, h, torch.ones(4))
                opt.zero_grad(); loss.backward(); opt.step()
        """,
    ),
    _quiet(
        "kl_with_zero_targets",
        """
            for _ in range(3):
                loss = F.kl_div(net(x).log_softmax(1), F.one_hot(y, 3).float(), reduction="batchmean")
                loss = loss + torch.distributions.Categorical(logits=net(x)).entropy().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
    ),
    _quiet(
        "isolated_node_is_never_used",
        """
            for _ in range(3):
                inverse = degree.pow(-0.5)
                w = inverse[src] * inverse[dst]
                loss = torch.zeros(4, 3).index_add(0, dst, w[:, None] * net(x)[src]).square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        "    src, dst = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])\n    degree = torch.tensor([1.0, 1.0, 1.0, 0.0])",
    ),
    _quiet(
        "schedule_with_an_infinite_first_entry_unused",
        """
            for t in (1, 5, 9):
                loss = (net(x) * (1 / (1 - alpha_bar).sqrt())[t]).square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        "    alpha_bar = torch.linspace(1.0, 0.1, 10)",
    ),
    _quiet(
        "weight_divides_to_zero",
        """
            for batch in (x, x):
                ratio = torch.tensor([[1.0], [2.0], [3.0], [0.0]]).reciprocal()
                loss = (ratio.clamp(max=5.0) * net(batch).square() / ratio).mean()
                opt.zero_grad(); loss.backward(); opt.step()
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
        "alibi_and_causal_biases_in_a_buffer",
        """
            for _ in range(3):
                loss = model(seq).square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        """
    class Alibi(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net
            distance = torch.arange(4)[None] - torch.arange(4)[:, None]
            self.register_buffer("bias", (0.5 * distance).masked_fill(distance > 0, float("-inf")), persistent=False)
        def forward(self, x):
            h = self.net(x)
            return F.scaled_dot_product_attention(h, h, h, attn_mask=self.bias)
    model, seq = Alibi(), torch.randn(2, 4, 3)
""",
    ),
    _quiet(
        "transformer_layer_with_a_padded_sequence",
        """
            for _ in range(2):
                loss = layer(seq, src_mask=causal, src_key_padding_mask=pad)[~pad].square().mean()
                opt2.zero_grad(); loss.backward(); opt2.step()
        """,
        """
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    opt2 = torch.optim.SGD(layer.parameters(), lr=0.01)
    seq = torch.randn(2, 3, 4)
    causal = nn.Transformer.generate_square_subsequent_mask(3)
    pad = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]) > 0
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
    _quiet(
        "minimum_distance_ignores_the_diagonal",
        """
            for _ in range(3):
                h = net(x)
                d = (h[:, None] - h[None]).square().sum(-1)
                d = d + torch.diag(torch.full((4,), float("inf")))
                loss = d.min(1).values.mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
    ),
    _quiet(
        "survival_times_of_the_censored_are_infinite",
        """
            for _ in range(3):
                at_risk = times[None] >= times[:, None]
                risk = net(x)[:, 0]
                loss = -(risk - torch.logsumexp(risk[None].expand(4, 4).masked_fill(~at_risk, -torch.inf), 1))[times.isfinite()].mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        "    times = torch.tensor([1.0, 2.0, math.inf, math.inf])",
    ),
    _quiet(
        "hinge_of_an_infinite_margin_by_relu",
        """
            for _ in range(3):
                loss = F.relu(net(x) - bound).mean() + torch.exp(-bound).sum()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        "    bound = torch.tensor([0.1, math.inf, 0.2])",
    ),
)
