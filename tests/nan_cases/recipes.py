"""Training recipes as people write them (VAE, policy gradients, contrastive, graphs, diffusion), each with its well-known fault."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect

CASES = (
    Case(
        name="recipe_vae_reparameterisation_overflows_inside",
        setup="""
            class VAE(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.enc, self.dec = nn.Linear(2, 4), nn.Linear(2, 2)
                def reparameterize(self, mu, logvar):
                    std = (0.5 * logvar).exp()  # <- here
                    return mu + torch.ones_like(std) * std
                def forward(self, x):
                    mu, logvar = self.enc(x).chunk(2, dim=-1)
                    return torch.tanh(self.dec(self.reparameterize(mu, logvar)))
            vae = VAE()
            with torch.no_grad():
                vae.enc.weight.zero_(); vae.enc.bias.zero_(); vae.enc.weight[2, 0] = 1.0
                vae.dec.weight.copy_(torch.eye(2)[[0, 0]] - torch.eye(2)[[1, 1]] * 0)
            opt = torch.optim.Adam(vae.parameters(), lr=1e-5)
            x = torch.tensor([[1.0, 1.0], [2.0, 0.0], [190.0, 0.5]])
        """,
        cell="""
            def step(batch):
                opt.zero_grad()
                loss = F.mse_loss(vae(batch), batch.clamp(0, 1))
                loss.backward()
                opt.step()
                return loss.item()
            losses = [step(x) for _ in range(2)]
        """,
        # tanh(inf) is 1 and the loss is finite; the derivative of exp is 0 times its infinite result.
        truth=Expect(kind="nan", phase="backward", op="exp", module="", step=0, rows=(2,), diagnosis="exp_overflow"),
    ),
    Case(
        name="recipe_q_learning_terminal_state_without_moves",
        setup="""
            q, target = nn.Linear(3, 2), nn.Linear(3, 2)
            target.load_state_dict(q.state_dict())
            opt = torch.optim.SGD(q.parameters(), lr=0.01)
            s, s2 = torch.randn(4, 3), torch.randn(4, 3)
            a, r = torch.tensor([[0], [1], [1], [0]]), torch.ones(4)
            done = torch.tensor([0.0, 0.0, 1.0, 0.0])
            legal = torch.ones(4, 2, dtype=torch.bool); legal[2] = False
        """,
        cell="""
            for update in range(3):
                value = q(s).gather(1, a).squeeze(1)
                with torch.no_grad():
                    best = target(s2).masked_fill(~legal, -math.inf).max(1).values
                    wanted = r + 0.99 * best * (1 - done)  # <- here
                loss = F.smooth_l1_loss(value, wanted)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # The mask is meant, -inf * 0 is not.
        truth=Expect(kind="nan", phase="loss", op="mul", module=None, step=0, diagnosis="zero_times_inf", rows=(2,)),
    ),
    Case(
        name="recipe_contrastive_projection_of_a_dead_row",
        setup="""
            class Normalize(nn.Module):
                def forward(self, z):
                    return z / z.pow(2).sum(-1, keepdim=True).sqrt()  # <- here
            class SimCLR(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.backbone = nn.Sequential(nn.Linear(3, 8), nn.ReLU())
                    self.projector = nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU(), Normalize())
                def forward(self, a, b):
                    return self.projector(self.backbone(a)), self.projector(self.backbone(b))
            model = SimCLR()
            with torch.no_grad():
                model.projector[0].weight.abs_(); model.backbone[0].weight.abs_(); model.backbone[0].bias.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=1e-4)
            views = [(torch.rand(4, 3), torch.rand(4, 3)) for _ in range(3)]
            views[1][1][2] = -1.0
        """,
        cell="""
            def info_nce(a, b, tau=0.1):
                logits = a @ b.T / tau
                return F.cross_entropy(logits, torch.arange(len(a)))
            for a, b in views:
                loss = info_nce(*model(a, b))
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="div", module="projector.2", call=2, step=1, rows=(2,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="recipe_info_nce_last_batch_has_one_pair",
        setup="""
            encoder = nn.Linear(4, 3)
            opt = torch.optim.Adam(encoder.parameters(), lr=1e-3)
            data = torch.utils.data.TensorDataset(torch.randn(9, 4))
            loader = torch.utils.data.DataLoader(data, batch_size=4)
        """,
        cell="""
            for (x,) in loader:
                z = F.normalize(encoder(x), dim=1)
                sim = (z @ z.T).fill_diagonal_(float("-inf"))
                loss = F.cross_entropy(sim / 0.1, torch.arange(len(x)).roll(1))  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="_log_softmax", module=None, step=2, rows=(0,), diagnosis=slugs.MASKED_ROW),
    ),
    Case(
        name="recipe_graph_symmetric_norm_of_a_source_without_input",
        setup="""
            class GCN(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 2)
                def norm(self, src, dst, n):
                    deg = torch.zeros(n).scatter_add_(0, dst, torch.ones(len(dst)))
                    inv = deg.pow(-0.5)  # <- here
                    return inv[src] * inv[dst]
                def forward(self, x, edges):
                    src, dst = edges
                    w = self.norm(src, dst, len(x))
                    return torch.zeros_like(x).index_add(0, dst, w[:, None] * self.lin(x)[src])
            net = nn.Sequential(); net.add_module("gcn", GCN())
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x = torch.rand(3, 2)
            edges = torch.tensor([[0, 1, 2, 1], [1, 2, 1, 1]])
        """,
        cell="""
            loss = net.gcn(x, edges).square().mean()
            loss.backward()
            opt.step()
        """,
        # Node 0 has no incoming edge but sends one; the root of this step is the submodule that was called.
        truth=Expect(kind="inf", phase="forward", op="pow", module=frozenset({"", "gcn"}), rows=(0,), diagnosis=slugs.POW_ZERO),
    ),
    Case(
        name="recipe_edge_softmax_without_the_maximum",
        setup="""
            class GAT(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.att = nn.ParameterDict({"a": nn.Parameter(torch.ones(2))})
                def forward(self, x, src, dst):
                    e = (x[src] * x[dst]) @ self.att["a"]
                    w = torch.exp(e)  # <- here
                    total = torch.zeros(len(x)).scatter_add(0, dst, w)
                    return torch.zeros_like(x).index_add(0, dst, (w / total[dst])[:, None] * x[src])
            model = nn.ModuleDict({"layers": nn.ModuleList([GAT(), GAT()])})
            opt = torch.optim.SGD(model.parameters(), lr=1e-5)
            src, dst = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 2, 0, 1])
            feats = [torch.rand(3, 2), torch.rand(3, 2) * torch.tensor([[1.0], [1.0], [1.0]])]
            feats[1][2] = 12.0
            feats[1][1] = 12.0
        """,
        cell="""
            for x in feats:
                h = x
                for place in range(2):
                    h = model["layers"][place](h, src, dst)
                loss = h.mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="exp", step=1, rows=(1, 3), diagnosis="exp_overflow"),
    ),
    Case(
        name="recipe_diffusion_buffer_of_the_first_time_step",
        setup="""
            class Schedule(nn.Module):
                def __init__(self, T=10):
                    super().__init__()
                    alpha_bar = torch.linspace(1.0, 0.1, T)
                    self.register_buffer("inv_sigma", 1 / (1 - alpha_bar).sqrt())
                    self.register_buffer("sqrt_ab", alpha_bar.sqrt())
            class Denoiser(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.schedule = Schedule()
                    self.eps = nn.Linear(2, 2)
                def forward(self, x, t):
                    return (x - self.eps(x)) * self.schedule.inv_sigma[t][:, None]
            model = Denoiser()
            opt = torch.optim.Adam(model.parameters(), lr=1e-4)
            x = torch.randn(3, 2)
            ts = [torch.tensor([3, 4, 5]), torch.tensor([9, 1, 2]), torch.tensor([7, 0, 2])]
        """,
        cell="""
            for t in ts:
                loss = model(x, t).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="parameter", op=None, step=2, rows=(0,), tensor="schedule.inv_sigma"),
    ),
    Case(
        name="recipe_focal_loss_of_a_certain_prediction",
        setup="""
            class Focal(nn.Module):
                def __init__(self, gamma=0.5):
                    super().__init__()
                    self.gamma = gamma
                def forward(self, logits, y):
                    p = torch.sigmoid(logits)
                    pt = torch.where(y > 0, p, 1 - p)
                    return -((1 - pt) ** self.gamma * pt.clamp(min=1e-6).log()).mean()  # <- here
            clf, focal = nn.Linear(1, 1, bias=False), Focal()
            nn.init.ones_(clf.weight)
            opt = torch.optim.SGD(clf.parameters(), lr=1e-4)
            x, y = torch.tensor([[0.5], [40.0], [-1.0]]), torch.tensor([[1.0], [1.0], [0.0]])
        """,
        cell="""
            for _ in range(2):
                loss = focal(clf(x), y)
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind=frozenset({"nan", "inf"}), phase="backward", op="pow", module="", step=0, rows=(1,), diagnosis=slugs.POW_ZERO),
    ),
    Case(
        name="recipe_dice_of_an_empty_mask",
        setup="""
            unet = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 1))
            with torch.no_grad():
                unet[2].weight.zero_(); unet[2].bias.fill_(-200.0)
            opt = torch.optim.SGD(unet.parameters(), lr=0.1)
            images = torch.rand(2, 1, 4, 4)
            masks = torch.zeros(2, 1, 4, 4)
            masks[0, :, 1:3] = 1
        """,
        cell="""
            def dice_loss(logits, target):
                p = logits.sigmoid()
                dims = (1, 2, 3)
                inter = (p * target).sum(dims)
                return 1 - (2 * inter / (p.sum(dims) + target.sum(dims))).mean()  # <- here
            loss = dice_loss(unet(images), masks)
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="div", module=None, rows=(1,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="recipe_mask_made_by_multiplication_with_infinity",
        setup="""
            class Scores(nn.Module):
                def forward(self, q, k, pad):
                    s = q @ k.mT
                    return (s + (1 - pad) * float("-inf")).softmax(-1)  # <- here
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.q, self.k = nn.Linear(3, 3), nn.Linear(3, 3)
                    self.scores = Scores()
                def forward(self, x, pad):
                    return self.scores(self.q(x), self.k(x), pad) @ x
            net = Net()
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            x, pad = torch.randn(2, 3, 3), torch.tensor([[[1.0, 1.0, 0.0]], [[1.0, 0.0, 0.0]]])
        """,
        cell="""
            loss = net(x, pad).square().mean()
            loss.backward()
            opt.step()
        """,
        # 0 * -inf where nothing should be masked.
        truth=Expect(kind="nan", phase="forward", op="mul", module="scores", diagnosis="zero_times_inf", rows=(0, 1)),
    ),
    Case(
        name="recipe_packed_sequence_with_a_bad_step",
        setup="""
            class Tagger(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.gru, self.out = nn.GRU(2, 3, batch_first=True, bidirectional=True), nn.Linear(6, 2)
                def forward(self, x, lengths):
                    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
                    y, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
                    return self.out(y)
            tagger = Tagger()
            opt = torch.optim.Adam(tagger.parameters())
            batches = [torch.randn(3, 4, 2) for _ in range(3)]
            batches[1][0, 3] = math.nan          # past the end of row 0: padding
            batches[2][2, 1, 0] = math.nan       # inside row 2
            lengths = torch.tensor([2, 4, 3])
        """,
        cell="""
            for x in batches:
                loss = tagger(x, lengths).square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="data", op=None, step=2, rows=(2,), tensor="x", diagnosis=slugs.BAD_ROW),
    ),
    Case(
        name="recipe_mixture_density_underflows",
        setup="""
            mdn = nn.Linear(1, 6)
            opt = torch.optim.Adam(mdn.parameters(), lr=1e-3)
            x, y = torch.rand(4, 1), torch.rand(4, 1)
            y[2] = 1e3
        """,
        cell="""
            def nll(out, y):
                pi, mu, log_sigma = out.chunk(3, dim=1)
                normal = torch.distributions.Normal(mu, log_sigma.exp())
                density = (pi.softmax(1) * normal.log_prob(y).exp()).sum(1)
                return -density.log().mean()  # <- here
            for _ in range(2):
                loss = nll(mdn(x), y)
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=0, rows=(2,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="recipe_physics_informed_root_at_the_origin",
        setup="""
            class Ansatz(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.a = nn.Parameter(torch.tensor(0.7))
                def forward(self, x):
                    return self.a * x.sqrt()  # <- here
            u = Ansatz()
            opt = torch.optim.SGD(u.parameters(), lr=0.01)
            xs = torch.tensor([[1.0], [0.5], [0.0]], requires_grad=True)
        """,
        cell="""
            for _ in range(2):
                y = u(xs)
                dy = torch.autograd.grad(y.sum(), xs, create_graph=True)[0]
                loss = (dy - 1).square().mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module="", step=0, rows=(2,), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="recipe_eps_added_outside_the_root",
        setup="""
            class Whiten(nn.Module):
                def forward(self, h):
                    std = h.var(1, keepdim=True).sqrt() + 1e-5  # <- here
                    return (h - h.mean(1, keepdim=True)) / std
            net = nn.Sequential(nn.Linear(2, 4, bias=False), Whiten(), nn.Linear(4, 1))
            opt = torch.optim.SGD(net.parameters(), lr=0.01)
            xs = [torch.randn(3, 2) for _ in range(3)]
            xs[1][2] = 0.0
        """,
        cell="""
            for x in xs:
                net(x).mean().backward()
                opt.step()
                opt.zero_grad()
        """,
        truth=Expect(kind=frozenset({"inf", "nan"}), phase="backward", op="sqrt", module="1", step=1, rows=(2,), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="recipe_own_softplus_overflows",
        setup="""
            class Softplus(nn.Module):
                def forward(self, x):
                    return torch.log(1 + torch.exp(x))  # <- here
            model = nn.Sequential(nn.Linear(1, 1, bias=False), Softplus())
            nn.init.ones_(model[0].weight)
            opt = torch.optim.SGD(model.parameters(), lr=1e-6)
            batches = [torch.rand(2, 1), torch.tensor([[3.0], [100.0]])]
        """,
        cell="""
            it = iter(batches)
            while (x := next(it, None)) is not None:
                loss = model(x).mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="exp", module="1", step=1, rows=(1,), diagnosis="exp_overflow"),
    ),
    Case(
        name="recipe_maml_inner_step_goes_bad",
        setup="""
            net = nn.Linear(2, 1, bias=False)
            meta = torch.optim.Adam(net.parameters(), lr=1e-3)
            tasks = [(torch.rand(3, 2), torch.rand(3, 1)) for _ in range(3)]
            tasks[1][0][0] = 0.0; tasks[1][1][0] = 0.0
        """,
        cell="""
            for x, y in tasks:
                fast = dict(net.named_parameters())
                out = torch.func.functional_call(net, fast, (x,))
                inner = (out - y).abs().sqrt().mean()  # <- here
                grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {k: v - 0.1 * g for (k, v), g in zip(fast.items(), grads)}
                outer = F.mse_loss(torch.func.functional_call(net, fast, (x,)), y)
                meta.zero_grad(); outer.backward(); meta.step()
        """,
        truth=Expect(
            kind=frozenset({"inf", "nan"}),
            phase="backward",
            op="sqrt",
            module=None,
            step=1,
            backward=ANY,
            rows=(0,),
            diagnosis=slugs.SQRT_ZERO,
        ),
    ),
    Case(
        name="recipe_cox_partial_likelihood",
        setup="""
            risk = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Flatten(0))
            with torch.no_grad():
                risk[0].weight.copy_(torch.tensor([[1.0, 0.0]]))
            opt = torch.optim.Adam(risk.parameters(), lr=1e-3)
            x, event = torch.rand(5, 2), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
            x[3, 0] = 92.0
        """,
        cell="""
            def cox(r, e): return -((r - torch.log(torch.cumsum(torch.exp(r), 0))) * e).sum() / e.sum()  # <- here
            cox(risk(x), event).backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="exp", module=None, rows=(3,), diagnosis="exp_overflow"),
    ),
    Case(
        name="recipe_learned_temperature_reaches_zero",
        setup="""
            class Head(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.fc, self.tau = nn.Linear(3, 3), nn.Parameter(torch.tensor(1.0))
                def forward(self, x):
                    return self.fc(x) / self.tau  # <- here
            head = Head()
            opt = torch.optim.SGD(head.parameters(), lr=0.01)
            x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
        """,
        cell="""
            for i in range(4):
                if i == 2:
                    with torch.no_grad():
                        head.tau.clamp_(max=0.0)
                loss = F.cross_entropy(head(x), y)
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="div", module="", step=2, rows=(0, 1, 2, 3), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="recipe_gan_logit_of_a_saturated_critic",
        setup="""
            G = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
            D = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
            with torch.no_grad():
                D[0].weight.copy_(torch.tensor([[1.0, 0.0]])); D[0].bias.zero_()
            og, od = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters(), lr=1e-6)
            reals = [torch.rand(3, 2) for _ in range(3)]
            reals[1][0, 0] = 60.0
        """,
        cell="""
            class Trainer:
                def d_step(self, real):
                    od.zero_grad()
                    fake = G(torch.randn(3, 2)).detach()
                    loss = -(D(fake).log() + (1 - D(real)).log() * 0 + D(real).log() - (1 - D(real)).log()).mean()  # <- here
                    loss.backward(); od.step()
                def g_step(self):
                    og.zero_grad(); (-D(G(torch.randn(3, 2))).log().mean()).backward(); og.step()
            t = Trainer()
            for real in reals:
                t.d_step(real)
                t.g_step()
        """,
        # log(1 - 1), times 0 as well: NaN.
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=2, rows=(0,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="recipe_quantile_of_missing_labels",
        setup="""
            model = nn.Linear(2, 3)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            loader = [{"x": torch.randn(4, 2), "y": torch.randn(4)} for _ in range(3)]
            loader[2]["y"][1] = float("nan")
            taus = torch.tensor([0.1, 0.5, 0.9])
        """,
        cell="""
            for batch in loader:
                error = batch["y"][:, None] - model(batch["x"])
                loss = torch.maximum(taus * error, (taus - 1) * error).mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="data", op=None, step=2, rows=(1,), tensor=frozenset({"y", "batch['y']"}), diagnosis=slugs.BAD_ROW),
    ),
    Case(
        name="recipe_nanmean_over_missing_labels",
        setup="""
            model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            x, target = torch.randn(4, 2), torch.randn(4, 1)
            target[2] = float("nan")
        """,
        cell="""
            loss = torch.nanmean((model(x) - target) ** 2)
            loss.backward()
            opt.step()
        """,
        # The loss is finite, the derivative of the square is 0 * NaN: the labels are to blame.
        truth=Expect(kind="nan", phase="data", op=None, rows=(2,), tensor="target"),
    ),
    Case(
        name="recipe_forward_algorithm_with_unreachable_states",
        setup="""
            emission = nn.Linear(3, 3)
            opt = torch.optim.SGD(emission.parameters(), lr=0.05)
            x = torch.randn(4, 3)
            start = torch.tensor([0.0, -torch.inf, -torch.inf])
            transitions = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).tril(-1) > 0, -torch.inf)
            transitions[:, 2] = -torch.inf
        """,
        cell="""
            emit = emission(x)
            alpha = start
            for t in range(4):
                alpha = torch.logsumexp(alpha[:, None] + transitions, 0) + emit[t]  # <- here
            loss = -alpha.logsumexp(0)
            loss.backward()
            opt.step()
        """,
        # The likelihood is finite; the derivative of a logsumexp over nothing but -inf is not.
        truth=Expect(kind="nan", phase="backward", op="logsumexp", module=None, diagnosis=slugs.MASKED_ROW),
    ),
    Case(
        name="recipe_known_labels_selected_too_late",
        setup="""
            model = nn.Linear(3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.05)
            x, target = torch.randn(4, 3), torch.tensor([1.0, math.nan, 0.0, math.nan])
        """,
        cell="""
            for _ in range(3):
                each = (model(x)[:, 0] - target).square()
                loss = each[~target.isnan()].mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        # The derivative of the square of the rows that were not selected: 0 * NaN.
        truth=Expect(kind="nan", phase="data", op=None, rows=(1, 3), tensor="target", diagnosis=slugs.BAD_ROW),
    ),
)
