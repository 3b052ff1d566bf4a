"""More planted faults, of all kinds: idioms that go wrong in practice."""

from tests.unit.instruments.autograd.case import Case

__all__ = ["CASES"]

CASES = (
    Case(
        name="CycleGAN: both discriminators step before the generators",
        kind="inplace",
        link="https://github.com/cy-xu/simple_CycleGAN/issues/3",
        text="""\
import itertools

def net(i, o):
    return nn.Sequential(nn.Conv2d(i, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU(), nn.Conv2d(4, o, 3, padding=1))

class CycleGAN:
    def __init__(self):
        self.G_AB, self.G_BA, self.D_A, self.D_B = net(1, 1), net(1, 1), net(1, 1), net(1, 1)
        self.opt_G = torch.optim.Adam(itertools.chain(self.G_AB.parameters(), self.G_BA.parameters()), lr=2e-4)
        self.opt_D = torch.optim.Adam(itertools.chain(self.D_A.parameters(), self.D_B.parameters()), lr=2e-4)

    def forward(self, a, b):
        self.fake_b, self.fake_a = self.G_AB(a), self.G_BA(b)
        self.rec_a, self.rec_b = self.G_BA(self.fake_b), self.G_AB(self.fake_a)
        self.p_a, self.p_b = self.D_A(self.fake_a), self.D_B(self.fake_b)  #> saved

    def step(self, a, b):
        self.forward(a, b)
        loss_D = (self.D_A(self.fake_a.detach()) ** 2).mean() + ((self.D_A(a) - 1) ** 2).mean()
        loss_D = loss_D + (self.D_B(self.fake_b.detach()) ** 2).mean() + ((self.D_B(b) - 1) ** 2).mean()
        self.opt_D.zero_grad()
        loss_D.backward()
        self.opt_D.step()  #> location
        loss_G = ((self.p_a - 1) ** 2).mean() + ((self.p_b - 1) ** 2).mean()
        loss_G = loss_G + 10 * (F.l1_loss(self.rec_a, a) + F.l1_loss(self.rec_b, b))
        self.opt_G.zero_grad()
        loss_G.backward()
        self.opt_G.step()

gan = CycleGAN()
for a, b in zip(torch.rand(2, 1, 1, 8, 8), torch.rand(2, 1, 1, 8, 8)):
    gan.step(a, b)
""",
        edits=(
            (
                "        loss_G = ((self.p_a - 1)",
                "        self.p_a, self.p_b = self.D_A(self.fake_a), self.D_B(self.fake_b)\n        loss_G = ((self.p_a - 1)",
            ),
        ),
    ),
    Case(
        name="a decoder's state is detached, and the result is dropped",
        kind="second_backward",
        also=("dropped_result",),
        link="https://github.com/OpenNMT/OpenNMT-py/issues/403",
        text="""\
class DecoderState:
    def __init__(self, hidden, feed):
        self.hidden, self.feed = hidden, feed

    def detach(self):
        for h in self.hidden:
            h.detach()
        self.feed.detach()

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.cell, self.out = nn.Embedding(9, 4), nn.LSTMCell(8, 4), nn.Linear(4, 9)

    def forward(self, ids, state):
        logits = []
        for t in range(ids.shape[1]):
            hidden = self.cell(torch.cat([self.emb(ids[:, t]), state.feed], 1), tuple(state.hidden))  #> shared
            state = DecoderState(hidden, torch.tanh(hidden[0]))  #> shared
            logits.append(self.out(state.feed))
        return torch.stack(logits, 1), state

decoder = Decoder()
optim = torch.optim.SGD(decoder.parameters(), lr=1.0)
target = torch.randint(9, (2, 12))
state = DecoderState((torch.zeros(2, 4), torch.zeros(2, 4)), torch.zeros(2, 4))
for j in range(0, 9, 3):
    scores, state = decoder(target[:, j : j + 3], state)  #> shared
    loss = F.cross_entropy(scores.flatten(0, 1), target[:, j + 1 : j + 4].flatten())
    optim.zero_grad()
    loss.backward()  #> location, first
    optim.step()
    state.detach()
""",
        edits=(
            (
                "        for h in self.hidden:\n            h.detach()\n        self.feed.detach()\n",
                "        self.hidden = tuple(h.detach() for h in self.hidden)\n        self.feed = self.feed.detach()\n",
            ),
        ),
    ),
    Case(
        name="a cache of keys and values survives the step of a language model",
        kind="second_backward",
        text="""\
class CachedAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.memory = []

    def forward(self, x):
        self.memory.append((self.k(x), self.v(x)))  #> shared
        k = torch.cat([k for k, _ in self.memory[-2:]], 1)
        v = torch.cat([v for _, v in self.memory[-2:]], 1)
        return (self.q(x) @ k.transpose(1, 2)).softmax(-1) @ v

class TransformerXL(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.attn, self.out = nn.Embedding(10, 6), CachedAttention(6), nn.Linear(6, 10)

    def forward(self, ids):
        return self.out(self.attn(self.emb(ids)))  #> shared

model = TransformerXL()
opt = torch.optim.Adam(model.parameters())
for segment in torch.randint(10, (3, 2, 5)):
    loss = F.cross_entropy(model(segment)[:, :-1].flatten(0, 1), (segment[:, 1:] + 1).flatten() % 10)
    opt.zero_grad()
    loss.backward()  #> location, first
    opt.step()
""",
        edits=(
            (
                "        return (self.q(x)",
                "        self.memory[-1] = tuple(t.detach() for t in self.memory[-1])\n        return (self.q(x)",
            ),
        ),
    ),
    Case(
        name="a view of a leaf is written by slices",
        kind="leaf_inplace",
        kinds=("view_inplace",),
        link="https://discuss.pytorch.org/t/inplace-operation-changes-is-leaf-attribute/120297",
        tensors=("c", "c[:]"),
        text="""\
c = torch.randn(10, 3, requires_grad=True)
opt = torch.optim.Adam([c], lr=0.1)
for i in range(2):
    c[:] += 1  #> location
    loss = c.square().sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("    c[:] += 1  #> location\n    loss = c.square().sum()", "    loss = (c + 1).square().sum()"),),
    ),
    Case(
        name="attention sees the tokens that it is to predict",
        kind="known_answer",
        text="""\
class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-2, -1)
        weights = F.softmax(scores, dim=-1)  #> location
        return weights @ self.v(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.attn, self.out = nn.Embedding(10, 6), Attention(6), nn.Linear(6, 10)

    def forward(self, ids):
        return self.out(self.attn(self.emb(ids)))

model = Model()
opt = torch.optim.Adam(model.parameters())
for ids in torch.randint(10, (3, 2, 6)):
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(
            (
                "        weights = F.softmax(scores, dim=-1)  #> location\n",
                (
                    "        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float('-inf'))\n"
                    "        weights = F.softmax(scores, dim=-1)\n"
                ),
            ),
        ),
    ),
    Case(
        name="a recurrent model is to predict the very token that it reads",
        kind="known_answer",
        link="https://discuss.pytorch.org/t/nn-transformer-explaination/53175/20",
        text="""\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(10, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])

model = Model()
opt = torch.optim.Adam(model.parameters())
for ids in torch.randint(10, (3, 2, 6)):
    scores = model(ids)
    loss = F.cross_entropy(scores.reshape(-1, 10), ids.reshape(-1))  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(
            (
                "F.cross_entropy(scores.reshape(-1, 10), ids.reshape(-1))  #> location",
                "F.cross_entropy(scores[:, :-1].reshape(-1, 10), ids[:, 1:].reshape(-1))",
            ),
        ),
    ),
    Case(
        name="a zip of two loaders is made before the epochs",
        kind="used_up",
        door="magic",
        text="""\
model = nn.Linear(3, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
pairs = zip(torch.randn(4, 5, 3), torch.randint(2, (4, 5)))
for epoch in range(3):
    for x, y in pairs:  #> location
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
""",
        edits=(
            (
                "pairs = zip(torch.randn(4, 5, 3), torch.randint(2, (4, 5)))\nfor epoch in range(3):\n    for x, y in pairs:  #> location",
                "for epoch in range(3):\n    pairs = zip(torch.randn(4, 5, 3), torch.randint(2, (4, 5)))\n    for x, y in pairs:",
            ),
        ),
    ),
    Case(
        name="a mask of padding is True where there are tokens",
        kind="turned_mask",
        door="magic",
        text="""\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(9, 8), nn.Linear(8, 2)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids):
        x = self.emb(ids)
        mask = ids != 0  #> location
        return self.out(self.attn(x, x, x, key_padding_mask=mask)[0].mean(1))

model = Model()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    ids = torch.cat([torch.randint(1, 9, (4, 5)), torch.zeros(4, 3, dtype=torch.long)], 1)
    opt.zero_grad()
    F.cross_entropy(model(ids), torch.randint(2, (4,))).backward()
    opt.step()
""",
        edits=(("mask = ids != 0  #> location", "mask = ids == 0"),),
    ),
    Case(
        name="a scaler is fitted to the new data as well",
        kind="refitted",
        door="magic",
        text="""\
class Scaler:
    def fit_transform(self, x):
        self.mean, self.std = x.mean(0), x.std(0)
        return self.transform(x)

    def transform(self, x):
        return (x - self.mean) / self.std

scaler = Scaler()
x_train = scaler.fit_transform(torch.randn(8, 3))
x_test = scaler.fit_transform(torch.randn(6, 3) + 2)  #> location
model = nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    opt.zero_grad()
    F.mse_loss(model(x_train), x_train.sum(1, keepdim=True)).backward()
    opt.step()
""",
        edits=(("scaler.fit_transform(torch.randn(6, 3) + 2)  #> location", "scaler.transform(torch.randn(6, 3) + 2)"),),
    ),
    Case(
        name="an agent counts its steps where it waits for them",
        kind="never_stepped",
        link="https://github.com/jsboige/CoursIA/issues/3341",
        door="magic",
        text="""\
class Agent:
    def __init__(self):
        self.net, self.memory, self.total_steps = nn.Linear(3, 2), [], 0
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def act(self, state):
        with torch.no_grad():
            return int(self.net(state).argmax())

    def update(self):
        self.total_steps += 1
        states, actions = map(torch.stack, zip(*self.memory[-8:]))
        loss = F.mse_loss(self.net(states).gather(1, actions[:, None])[:, 0], states.sum(1))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

agent = Agent()
for state in torch.randn(30, 3):
    agent.memory.append((state, torch.tensor(agent.act(state))))
    if agent.total_steps > 10:  #> location
        agent.update()
""",
        edits=(
            ("        self.total_steps += 1\n", ""),
            ("    if agent.total_steps > 10:  #> location\n", "    agent.total_steps += 1\n    if agent.total_steps > 10:\n"),
        ),
    ),
    Case(
        name="optimizer.step without parentheses",
        kind="never_stepped",
        text="""\
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  #> location
for x in torch.randn(4, 6, 4):
    loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()  #> location
    optimizer.step  #> location
""",
        edits=(("    optimizer.step  #> location\n", "    optimizer.step()\n"),),
    ),
    Case(
        name="only a scale outside the optimizer learns: the network's output is detached",
        kind="no_gradient",
        also=("not_in_optimizer", "stepped_without_backward"),
        ops=("detach",),
        text="""\
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
scale = nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x in torch.randn(3, 6, 4):
    out = net(x).detach()  #> location
    loss = F.mse_loss(out * scale, x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    Case(
        name="x.data is scaled to simulate augmentation, after the forward",
        kind="stale_value",
        text="""\
class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(2, 4, 3), nn.Conv1d(4, 1, 3)

    def forward(self, x):
        h = torch.tanh(self.c1(x))
        y = self.c2(h)
        h.data.mul_(torch.rand_like(h) > 0.5)  #> location
        return y

model = Conv()
opt = torch.optim.Adam(model.parameters())
for x in torch.randn(3, 4, 2, 9):
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(
            (
                "        y = self.c2(h)\n        h.data.mul_(torch.rand_like(h) > 0.5)  #> location\n",
                "        y = self.c2(h * (torch.rand_like(h) > 0.5))\n",
            ),
        ),
    ),
    Case(
        name="predictions are blended in place with a moving average of themselves",
        kind="inplace",
        ops=("binary_cross_entropy",),
        tensors=("prob",),
        text="""\
class SelfEnsemble:
    def __init__(self, n):
        self.Z = torch.zeros(n)

    def loss(self, prob, index, y):
        target = 0.6 * self.Z[index] + 0.4 * prob.detach()
        self.Z[index] = target
        bce = F.binary_cross_entropy(prob, y)  #> saved
        prob.lerp_(target, 0.5)  #> location
        return bce + (prob - target).square().mean()

net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 1))
ensemble = SelfEnsemble(12)
opt = torch.optim.Adam(net.parameters())
for index in torch.arange(12).split(4):
    prob = torch.sigmoid(net(torch.randn(4, 5))).squeeze(1)
    loss = ensemble.loss(prob, index, torch.randint(2, (4,)).float())
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("        prob.lerp_(target, 0.5)  #> location\n", "        prob = prob.lerp(target, 0.5)\n"),),
    ),
    Case(
        name="a gradient penalty without create_graph is a constant",
        kind="no_gradient",
        tensors=("penalty",),
        text="""\
critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(critic.parameters())
for real, fake in torch.randn(3, 2, 6, 4):
    mixed = torch.lerp(real, fake, 0.3).requires_grad_()
    slope = torch.autograd.grad(critic(mixed).sum(), mixed)[0]  #> location
    penalty = (slope.norm(2, dim=1) - 1).square().mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    opt.zero_grad()
    loss.backward()  #> first
    opt.step()
""",
        edits=(("mixed)[0]  #> location", "mixed, create_graph=True)[0]"),),
    ),
    Case(
        name="a column of values under one distribution for each sample",
        kind="broadcast",
        ops=("log_prob",),
        tensors=("y",),
        text="""\
from torch import distributions
net = nn.Linear(4, 9)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in zip(torch.randn(3, 8, 4), torch.randn(3, 8, 1)):
    means, deviations, weights = net(x).chunk(3, dim=1)
    mixture = distributions.Categorical(logits=weights)
    made = distributions.MixtureSameFamily(mixture, distributions.Normal(means, deviations.exp()))
    loss = -made.log_prob(y).mean()  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("log_prob(y)", "log_prob(y.squeeze(-1))"),),
    ),
    Case(
        name="log-probabilities times a column of returns, all added up",
        kind="broadcast",
        ops=("mul",),
        text="""\
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for states, returns in zip(torch.randn(3, 8, 4), torch.randn(3, 8)):
    drawn = torch.distributions.Categorical(logits=net(states))
    weights = torch.FloatTensor(returns.tolist()).unsqueeze(1)
    loss = -torch.sum(drawn.log_prob(drawn.sample()) * weights)  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("* weights)", "* weights.squeeze(-1))"),),
    ),
    Case(
        name="the pairs of a batch are ranked by one sum",
        kind="early_reduction",
        ops=("sum",),
        text="""\
users, items = nn.Embedding(9, 4), nn.Embedding(9, 4)
opt = torch.optim.SGD([*users.parameters(), *items.parameters()], lr=0.1)
for user, good, bad in torch.randint(9, (3, 3, 16)):
    score = (users(user) * (items(good) - items(bad))).sum()  #> location
    loss = -F.logsigmoid(score)  #> saved
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=((".sum()  #> location", ".sum(dim=-1)"), ("-F.logsigmoid(score)", "-F.logsigmoid(score).mean()")),
    ),
    Case(
        name="a loss that is computed before the loop",
        kind="stale_value",
        tensors=("loss",),
        text="""\
x = torch.zeros(1, requires_grad=True)
opt = torch.optim.SGD([x], lr=0.1)
loss = (x - 2) ** 2  #> saved
for _ in range(5):
    opt.zero_grad()
    loss.backward(retain_graph=True)  #> location
    opt.step()
""",
        edits=(("    opt.zero_grad()\n", "    loss = (x - 2) ** 2\n    opt.zero_grad()\n"),),
    ),
    Case(
        name="several outputs for the one target of a sample",
        kind="broadcast",
        text="""\
net = nn.Linear(4, 5)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
xs, ys = torch.randn(8, 4), torch.randn(8)
for i in range(8):
    loss = F.mse_loss(net(xs[i:i + 1]), ys[i:i + 1])  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("nn.Linear(4, 5)", "nn.Linear(4, 1)"), ("ys[i:i + 1]", "ys[i:i + 1, None]")),
    ),
    Case(
        name="a discriminator that learns from a generator's output after its update",
        kind="second_backward",
        tensors=("made",),
        text="""\
generator, critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt_g, opt_c = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
for real in torch.randn(3, 6, 4):
    made = generator(torch.randn(6, 2))  #> shared
    loss_g = -critic(made).mean()
    opt_g.zero_grad()
    loss_g.backward()  #> first
    opt_g.step()
    loss_c = critic(made).mean() - critic(real).mean()  #> location
    opt_c.zero_grad()
    loss_c.backward()
    opt_c.step()
""",
        edits=(("critic(made).mean() - ", "critic(made.detach()).mean() - "),),
    ),
    Case(
        name="two losses of one graph, of which the first optimizer steps between",
        kind="inplace",
        text="""\
generator, critic = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt_g, opt_c = torch.optim.SGD(generator.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
for real in torch.randn(3, 6, 4):
    fake = critic(generator(torch.randn(6, 2)))
    loss_c, loss_g = fake.mean() - critic(real).mean(), -fake.mean()
    opt_c.zero_grad()
    loss_c.backward(retain_graph=True)
    opt_c.step()  #> location
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
""",
        edits=(
            ("    opt_c.step()  #> location\n", ""),
            ("    loss_g.backward()\n", "    loss_g.backward(inputs=list(generator.parameters()))\n    opt_c.step()\n"),
        ),
    ),
    Case(
        name="fewer frames than letters",
        kind="loss_input",
        ops=("ctc_loss",),
        text="""\
net = nn.Linear(4, 6)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
ctc = nn.CTCLoss(zero_infinity=True)
for x, y in zip(torch.randn(3, 5, 2, 4), torch.randint(1, 6, (3, 2, 7))):
    loss = ctc(net(x).log_softmax(2), y, torch.tensor([5, 5]), torch.tensor([7, 7]))  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
)
