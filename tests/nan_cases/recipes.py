"""Training recipes as people write them (VAE, policy gradients, contrastive, graphs, diffusion), each with its well-known fault."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect

CASES = (
    Case(
        name="recipe_vae_log_variance_explodes",
        setup="""
            class VAE(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.encoder = nn.ModuleDict({"mu": nn.Linear(3, 2), "logvar": nn.Linear(3, 2)})
                    self.decoder = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
                def reparameterize(self, mu, logvar):
                    return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar).clamp(max=5)
                def forward(self, x):
                    mu, logvar = self.encoder["mu"](x), self.encoder["logvar"](x)
                    return self.decoder(self.reparameterize(mu, logvar)), mu, logvar
            def elbo(recon, x, mu, logvar):
                rec = F.mse_loss(recon, x, reduction="sum")
                kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())  # <- here
                return rec + kld
            vae = VAE()
            with torch.no_grad():
                vae.encoder["logvar"].weight.copy_(torch.tensor([[1.0, 0, 0], [0, 1.0, 0]])); vae.encoder["logvar"].bias.zero_()
            opt = torch.optim.Adam(vae.parameters(), lr=1e-4)
            loader = [torch.rand(4, 3) for _ in range(4)]
            loader[2][3, 1] = 140.0
        """,
        cell="""
            for x in loader:
                recon, mu, logvar = vae(x)
                loss = elbo(recon, x, mu, logvar)
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="exp", module=None, step=2, rows=(3,), diagnosis="exp_overflow"),
    ),
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
        name="recipe_reinforce_log_of_a_gathered_zero",
        setup="""
            class Policy(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.net = nn.Sequential(nn.Linear(2, 2, bias=False))
                def forward(self, s):
                    return self.net(s).softmax(-1)
            policy = Policy()
            nn.init.eye_(policy.net[0].weight)
            opt = torch.optim.SGD(policy.parameters(), lr=1e-4)
            episodes = [(torch.rand(3, 2), torch.tensor([0, 1, 0]), torch.tensor([1.0, 0.5, 0.1])) for _ in range(4)]
            episodes[3][0][1] = torch.tensor([300.0, 0.0])
        """,
        cell="""
            def surrogate(states, actions, returns):
                chosen = policy(states).gather(1, actions.unsqueeze(1)).squeeze(1)
                return -(chosen.log() * returns).sum()  # <- here
            for episode in episodes:
                opt.zero_grad()
                surrogate(*episode).backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=3, rows=(1,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="recipe_returns_of_a_one_step_episode",
        setup="""
            policy = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
            opt = torch.optim.Adam(policy.parameters(), lr=1e-3)
            lengths = [4, 3, 1, 5]
        """,
        cell="""
            for length in lengths:
                log_probs, rewards = [], []
                for t in range(length):
                    dist = torch.distributions.Categorical(logits=policy(torch.randn(1, 2)))
                    action = dist.sample()
                    log_probs.append(dist.log_prob(action))
                    rewards.append(float(t % 2))
                G, returns = 0.0, []
                for r in reversed(rewards):
                    G = r + 0.9 * G
                    returns.insert(0, G)
                returns = torch.tensor(returns)
                returns = (returns - returns.mean()) / (returns.std() + 1e-8)  # <- here
                loss = torch.cat([-lp * R for lp, R in zip(log_probs, returns)]).sum()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="std", module=None, step=2, rows=(), diagnosis=slugs.ZERO_VARIANCE),
    ),
    Case(
        name="recipe_ppo_ratio_overflows",
        setup="""
            actor = nn.Linear(3, 4)
            opt = torch.optim.Adam(actor.parameters(), lr=1e-4)
            obs, act = torch.randn(5, 3), torch.randint(0, 4, (5,))
            adv = torch.tensor([1.0, -1.0, 0.5, 0.0, -0.3])
            old = torch.full((5,), -1.4)
            stale = old.clone(); stale[1] = -130.0
        """,
        cell="""
            for epoch, reference in enumerate([old, old, stale]):
                logp = torch.distributions.Categorical(logits=actor(obs)).log_prob(act)
                ratio = torch.exp(logp - reference)  # <- here
                surr = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
                loss = -surr.mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="exp", module=None, step=2, rows=(1,), diagnosis="exp_overflow"),
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
        name="recipe_supervised_contrastive_class_of_one",
        setup="""
            class SupCon(nn.Module):
                def forward(self, z, labels):
                    eye = torch.eye(len(z), dtype=torch.bool)
                    positives = (labels[:, None] == labels[None]) & ~eye
                    logits = (z @ z.T).masked_fill(eye, -1e9)
                    log_prob = logits.log_softmax(1)
                    return -((log_prob * positives).sum(1) / positives.sum(1)).mean()  # <- here
            encoder, criterion = nn.Linear(3, 3), SupCon()
            opt = torch.optim.SGD(encoder.parameters(), lr=0.01)
            xs = torch.randn(3, 4, 3)
            ys = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 1]])
        """,
        cell="""
            for x, y in zip(xs, ys):
                loss = criterion(F.normalize(encoder(x)), y)
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="div", module="", step=2, rows=(3,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="recipe_triplet_with_an_identical_positive",
        setup="""
            embed = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
            opt = torch.optim.SGD(embed.parameters(), lr=0.01)
            triplets = [tuple(torch.randn(3, 3) for _ in "apn") for _ in range(3)]
            triplets[2][1][0] = triplets[2][0][0]
        """,
        cell="""
            dist = lambda u, v: (u - v).pow(2).sum(1).sqrt()  # <- here
            for a, p, n in triplets:
                ea, ep, en = map(embed, (a, p, n))
                loss = (5 + dist(ea, ep) - dist(ea, en)).clamp(min=0).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, step=2, rows=(0,), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="recipe_graph_mean_over_no_neighbours",
        setup="""
            class MeanConv(nn.Module):
                def __init__(self, i, o):
                    super().__init__()
                    self.lin = nn.Linear(i, o)
                def forward(self, x, edges):
                    src, dst = edges
                    total = torch.zeros(x.shape[0], x.shape[1]).index_add_(0, dst, x[src])
                    degree = torch.zeros(x.shape[0]).index_add_(0, dst, torch.ones(len(dst)))
                    return self.lin(total / degree[:, None])  # <- here
            class GNN(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.convs = nn.ModuleList([MeanConv(2, 4), MeanConv(4, 4)])
                    self.head = nn.Linear(4, 2)
                def forward(self, x, graphs):
                    for conv, edges in zip(self.convs, graphs):
                        x = conv(x, edges).relu()
                    return self.head(x)
            gnn = GNN()
            opt = torch.optim.Adam(gnn.parameters())
            ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
            torn = torch.tensor([[0, 1, 2], [1, 2, 3]])
            x, y = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
        """,
        cell="""
            for graphs in ([ring, ring], [ring, torn]):
                loss = F.cross_entropy(gnn(x, graphs), y)
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="div", module="convs.1", step=1, rows=(0,), diagnosis=slugs.DIV_ZERO),
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
        name="recipe_planar_flow_log_determinant",
        setup="""
            class Planar(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.u, self.w = nn.Parameter(torch.tensor([-1.0, 0.0])), nn.Parameter(torch.tensor([1.0, 0.0]))
                    self.b = nn.Parameter(torch.zeros(1))
                def forward(self, z):
                    t = torch.tanh(z @ self.w + self.b)
                    psi = (1 - t ** 2)[:, None] * self.w
                    det = 1 + psi @ self.u
                    return z + self.u * t[:, None], det.abs().log()  # <- here
            class Flow(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.steps = nn.ModuleList([Planar()])
                def forward(self, z):
                    total = 0
                    for step in self.steps:
                        z, logdet = step(z)
                        total = total + logdet
                    return z, total
            flow = Flow()
            opt = torch.optim.Adam(flow.parameters(), lr=1e-3)
            z0 = torch.tensor([[0.5, 0.1], [0.0, 1.0], [1.0, -1.0]])
        """,
        cell="""
            zk, logdet = flow(z0)
            loss = (0.5 * zk.square().sum(1) - logdet).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="log", module="steps.0", rows=(1,), diagnosis=slugs.LOG_ZERO),
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
        name="recipe_diffusion_weight_made_in_the_step",
        setup="""
            net = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 2))
            opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
            betas = torch.linspace(0.0, 0.02, 8)
            alpha_bar = torch.cumprod(1 - betas, 0)
            batches = [(torch.randn(3, 2), torch.tensor(t)) for t in ([3, 5, 7], [1, 2, 3], [4, 6, 0])]
        """,
        cell="""
            def p_losses(x0, t):
                ab = alpha_bar[t][:, None]
                noise = torch.randn_like(x0)
                xt = ab.sqrt() * x0 + (1 - ab).sqrt() * noise
                pred = net(torch.cat([xt, t[:, None] / 8], 1))
                snr = ab / (1 - ab)  # <- here
                return (snr * (pred - noise) ** 2).mean()
            for x0, t in batches:
                opt.zero_grad()
                loss = p_losses(x0, t)
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="div", module=None, step=2, rows=(2,), diagnosis=slugs.DIV_ZERO),
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
        name="recipe_padded_query_rows_in_a_block",
        setup="""
            class Attn(nn.Module):
                def __init__(self, d, heads):
                    super().__init__()
                    self.heads, self.qkv, self.out = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)
                def forward(self, x, keep):
                    b, t, d = x.shape
                    q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
                    att = q @ k.mT / math.sqrt(d)
                    att = att.masked_fill(~keep[:, None, None, :], -torch.inf)
                    att = F.softmax(att, dim=-1)  # <- here
                    return self.out((att @ v).transpose(1, 2).reshape(b, t, d))
            class Block(nn.Module):
                def __init__(self, d):
                    super().__init__()
                    self.norm, self.attn = nn.LayerNorm(d), Attn(d, 2)
                def forward(self, x, keep):
                    return x + self.attn(self.norm(x), keep)
            class Encoder(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.blocks = nn.ModuleList(Block(4) for _ in range(2))
                def forward(self, x, lengths):
                    keep = torch.arange(x.shape[1])[None] < lengths[:, None]
                    for block in self.blocks:
                        x = block(x, keep)
                    return x.mean(1)
            enc, head = Encoder(), nn.Linear(4, 2)
            opt = torch.optim.AdamW([*enc.parameters(), *head.parameters()])
            x = torch.randn(3, 5, 4)
            lens = [torch.tensor([5, 2, 1]), torch.tensor([3, 0, 4])]
        """,
        cell="""
            for lengths in lens:
                loss = head(enc(x, lengths)).logsumexp(-1).mean()
                opt.zero_grad(); loss.backward(); opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="_softmax", module="blocks.0.attn", step=1, rows=(1,), diagnosis=slugs.MASKED_ROW),
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
        name="recipe_recurrent_cell_diverges",
        setup="""
            class Cell(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.hh = nn.Linear(2, 2, bias=False)
                def forward(self, h):
                    return self.hh(h).relu()  # <- here
            class Unrolled(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.rnn = nn.ModuleDict({"cell": Cell()})
                def forward(self, h, T):
                    for _ in range(T):
                        h = self.rnn["cell"](h)
                    return h
            model = Unrolled()
            with torch.no_grad():
                model.rnn["cell"].hh.weight.copy_(1e10 * torch.eye(2))
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            h0 = torch.ones(1, 2)
        """,
        cell="""
            loss = model(h0, 6).mean()
            loss.backward()
            opt.step()
        """,
        # 1e10 ** 4 does not fit: the fourth call.
        truth=Expect(kind="inf", phase="forward", op="mm", module="rnn.cell.hh", call=4, rows=(0,)),
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
        name="recipe_sinkhorn_kernel_underflows",
        setup="""
            embed = nn.Linear(2, 2)
            nn.init.eye_(embed.weight); nn.init.zeros_(embed.bias)
            opt = torch.optim.SGD(embed.parameters(), lr=1e-3)
            a, b = torch.rand(3, 2), torch.rand(3, 2)
            b[1] += 40.0
            @torch.no_grad()
            def _noop(): pass
            def sinkhorn(C, eps=0.1, n=3):
                K = torch.exp(-C / eps)
                u = torch.ones(len(C)) / len(C)
                for _ in range(n):
                    v = (1 / 3) / (K.t() @ u)  # <- here
                    u = (1 / 3) / (K @ v)
                return (u[:, None] * K * v[None] * C).sum()
        """,
        cell="""
            C = torch.cdist(embed(a), b) ** 2
            loss = sinkhorn(C)
            loss.backward()
            opt.step()
        """,
        # `number / tensor` is a reciprocal, multiplied.
        truth=Expect(kind="inf", phase="loss", op="reciprocal", module=None, rows=(1,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="recipe_nerf_disparity_of_an_empty_ray",
        setup="""
            class Field(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.density = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1), nn.ReLU())
                def forward(self, p):
                    return self.density(p)[..., 0]
            def render(sigma, z):
                alpha = 1 - torch.exp(-sigma * 0.1)
                T = torch.cumprod(torch.cat([torch.ones(len(z), 1), 1 - alpha + 1e-10], -1), -1)[:, :-1]
                w = alpha * T
                depth, acc = (w * z).sum(-1), w.sum(-1)
                return 1.0 / torch.max(1e-10 * torch.ones_like(depth), depth / acc)  # <- here
            field = Field()
            with torch.no_grad():
                field.density[0].weight.zero_(); field.density[0].weight[:, 0] = 1.0; field.density[0].bias.zero_()
                field.density[2].weight.fill_(1.0); field.density[2].bias.zero_()
            opt = torch.optim.Adam(field.parameters(), lr=1e-3)
            rays = torch.rand(3, 5, 3); rays[1, :, 0] = -1.0
            z = torch.linspace(2, 6, 5).expand(3, 5)
        """,
        cell="""
            loss = render(field(rays), z).square().mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="div", module=None, rows=(1,), diagnosis=slugs.DIV_ZERO),
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
        name="recipe_separation_score_of_a_perfect_estimate",
        setup="""
            sep = nn.Linear(4, 4, bias=False)
            nn.init.eye_(sep.weight)
            opt = torch.optim.SGD(sep.parameters(), lr=0.1)
            mix = torch.randn(3, 4); clean = mix.clone(); clean[0] += 0.1; clean[2] += 0.1
        """,
        cell="""
            estimate = sep(mix)
            noise = estimate - clean
            loss = -10 * torch.log10(clean.square().sum(1) / noise.square().sum(1)).mean()  # <- here
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="div", module=None, rows=(1,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="recipe_style_transfer_flat_channel",
        setup="""
            class AdaIN(nn.Module):
                def forward(self, c, s):
                    mean = lambda t: t.mean((2, 3), keepdim=True)
                    std = lambda t: t.std((2, 3), keepdim=True)
                    return (c - mean(c)) / std(c) * std(s) + mean(s)  # <- here
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.features = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU())
                    self.adain = AdaIN()
                def forward(self, c, s):
                    return self.adain(self.features(c), self.features(s))
            net = Net()
            opt = torch.optim.Adam(net.parameters(), lr=1e-3)
            with torch.no_grad():
                net.features[0].weight.fill_(1.0); net.features[0].bias.zero_()
            c, s = torch.rand(2, 1, 4, 4), torch.rand(2, 1, 4, 4)
            c[1] = 0.0
        """,
        cell="""
            loss = net(c, s).square().mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="div", module="adain", rows=(1,), diagnosis=slugs.ZERO_VARIANCE),
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
        name="recipe_total_variation_of_a_flat_image",
        setup="""
            gen = nn.ConvTranspose2d(1, 1, 2, stride=2)
            nn.init.ones_(gen.weight)
            opt = torch.optim.SGD(gen.parameters(), lr=0.01)
            z = torch.rand(2, 1, 3, 3); z[1] = 0.5
        """,
        cell="""
            def tv(img):
                dx = img[..., 1:, :-1] - img[..., :-1, :-1]
                dy = img[..., :-1, 1:] - img[..., :-1, :-1]
                return torch.sqrt(dx ** 2 + dy ** 2).mean()  # <- here
            loss = F.mse_loss(gen(z), torch.zeros(2, 1, 6, 6)) + 0.1 * tv(gen(z))
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, rows=(0, 1), diagnosis=slugs.SQRT_ZERO),
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
        name="recipe_masked_pooling_of_a_padded_row",
        setup="""
            class Pool(nn.Module):
                def forward(self, h, mask):
                    weights = mask.unsqueeze(-1).float()
                    return (h * weights).sum(1).div(weights.sum(1))  # <- here
            class Classifier(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.embedding = nn.Embedding(10, 4, padding_idx=0)
                    self.pooler = Pool()
                    self.classifier = nn.Linear(4, 2)
                def forward(self, input_ids, labels=None):
                    logits = self.classifier(self.pooler(self.embedding(input_ids), input_ids.ne(0)))
                    return {"loss": F.cross_entropy(logits, labels), "logits": logits}
            model = Classifier()
            opt = torch.optim.AdamW(model.parameters())
            batch = {"input_ids": torch.tensor([[1, 2, 0], [0, 0, 0], [3, 0, 0]]), "labels": torch.tensor([0, 1, 1])}
        """,
        cell="""
            model.train()
            outputs = model(**batch)
            outputs["loss"].backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="div", module="pooler", rows=(1,), diagnosis=slugs.DIV_ZERO),
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
        name="recipe_where_over_missing_labels",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.Adam(model.parameters(), lr=0.01)
            data = [(torch.randn(4, 2), torch.rand(4, 1)) for _ in range(3)]
            data[1][1][3] = float("nan")
        """,
        cell="""
            for x, y in data:
                known = ~torch.isnan(y)
                loss = torch.where(known, (model(x) - y).square(), 0.0).sum() / known.sum()
                opt.zero_grad(set_to_none=True)
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="data", op=None, step=1, rows=(3,), tensor="y"),
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
