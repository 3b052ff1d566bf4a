"""Healthy models in which samples meet, or in which dimension 0 holds something else."""

from tests.unit.instruments.autograd.healthy import Program

__all__ = ["BATCHES"]

BATCHES = (
    Program(
        "a recurrent net over (steps, batch, features)",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.fc(out[-1])

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(5, 7, 4), torch.randint(3, (7,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "a language model over (steps, batch)",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(11, 6)
        self.rnn = nn.LSTM(6, 6)
        self.fc = nn.Linear(6, 11)

    def forward(self, x):
        h, _ = self.rnn(self.e(x))
        return self.fc(h)

net = Net()
opt = torch.optim.Adam(net.parameters())
for x, y in [(torch.randint(11, (5, 4)), torch.randint(11, (5, 4))) for _ in range(3)]:
    logits = net(x)
    loss = F.cross_entropy(logits.reshape(-1, 11), y.reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "a transformer over (steps, batch)",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)
        self.e = nn.Embedding(11, 8)
        self.fc = nn.Linear(8, 11)

    def forward(self, x):
        return self.fc(self.enc(self.e(x)))

net = Net()
opt = torch.optim.Adam(net.parameters())
for x, y in [(torch.randint(11, (6, 4)), torch.randint(11, (6, 4))) for _ in range(3)]:
    logits = net(x)
    loss = F.cross_entropy(logits.reshape(-1, 11), y.reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "a transformer whose input is permuted",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)
        self.inp = nn.Linear(4, 8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.enc(self.inp(x).permute(1, 0, 2)).mean(0))

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(7, 5, 4), torch.randint(3, (7,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "a graph convolution over all nodes",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.A = torch.eye(7) + torch.rand(7, 7).round()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.A @ torch.relu(self.a(self.A @ x)))

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(7, 4), torch.randint(3, (7,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "attention over one sequence",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.MultiheadAttention(4, 2)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.enc(x, x, x, need_weights=False)[0])

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(7, 4), torch.randint(3, (7,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "the last states of four directions, transposed",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(24, 3)

    def forward(self, x):
        _, h = self.rnn(x)
        return self.fc(h.transpose(0, 1).reshape(x.size(0), -1))

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 5, 4), torch.randint(3, (8,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "features standardised over the batch by hand",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x):
        h = self.a(x)
        h = (h - h.mean(0)) / h.std(0)
        return self.b(h)

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(7, 4), torch.randint(3, (7,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "a contrastive loss over the batch",
        """\
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(6, 4)
    a, b = F.normalize(net(x + 0.1 * torch.randn_like(x))), F.normalize(net(x + 0.1 * torch.randn_like(x)))
    loss = F.cross_entropy(a @ b.t() / 0.1, torch.arange(6))
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    Program(
        "attention pooling over one bag",
        """\
class MIL(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.w, self.c = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 2)
    def forward(self, bag):
        h = torch.relu(self.f(bag))
        a = F.softmax(self.w(h), dim=0)
        return self.c((a * h).sum(0, keepdim=True))
net = MIL()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    loss = F.cross_entropy(net(torch.randn(9, 4)), torch.randint(2, (1,)))
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    Program(
        "BERT with a mask",
        """\
from transformers import BertConfig, BertForSequenceClassification
sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16)
net = BertForSequenceClassification(BertConfig(vocab_size=31, **sizes))
net.train()
opt = torch.optim.AdamW(net.parameters())
for _ in range(3):
    loss = net(input_ids=torch.randint(31, (3, 9)), attention_mask=torch.ones(3, 9, dtype=torch.long), labels=torch.randint(2, (3,))).loss
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    Program(
        "T5 with labels",
        """\
from transformers import T5Config, T5ForConditionalGeneration
net = T5ForConditionalGeneration(T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0))
net.train()
opt = torch.optim.AdamW(net.parameters())
for _ in range(3):
    loss = net(input_ids=torch.randint(31, (3, 9)), labels=torch.randint(31, (3, 7))).loss
    opt.zero_grad(); loss.backward(); opt.step()
""",
    ),
    Program(
        "the embeddings of GPT-2 are resized, which keeps the parameter",
        """\
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(vocab_size=12, n_positions=8, n_embd=8, n_layer=1, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.resize_token_embeddings(14, mean_resizing=False)
model.train()
for input_ids in torch.randint(14, (3, 2, 6)):
    loss = model(input_ids=input_ids, labels=input_ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    Program(
        "a code for each sample of the only batch",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(6, 1, 4))
        self.rnn, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.rnn(x + self.codes)[0][:, -1])

net = Net()
opt = torch.optim.Adam(net.parameters())
for x, y in [(torch.randn(6, 5, 4), torch.randint(3, (6,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "an autoencoder of pictures from 0 to 1, and a ReLU before noisy targets",
        """\
coder = nn.Sequential(nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 9), nn.Sigmoid())
counter = nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 1), nn.ReLU())
nn.init.constant_(counter[2].bias, 3.0)
opt = torch.optim.SGD([*coder.parameters(), *counter.parameters()], lr=0.1)
for x in [torch.rand(16, 9) for _ in range(3)]:
    loss = F.mse_loss(coder(x), x) + F.smooth_l1_loss(counter(x), x.sum(1, keepdim=True) - 0.01)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "targets that a mask leaves out, or that lie outside by a little",
        """\
m, r, a = nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 1), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
nn.init.constant_(r[0].bias, 3.0)
opt = torch.optim.SGD([*m.parameters(), *r.parameters(), *a.parameters()], lr=0.1)
for x in torch.randn(3, 64, 4):
    y = torch.rand(64, 1)
    y[::4] = -1
    loss = (F.mse_loss(torch.sigmoid(m(x)), y, reduction="none") * (y >= 0)).mean()
    loss = loss + F.mse_loss(r(x), (3 * x[:, :1]).clamp(min=0) + 0.3 * torch.randn(64, 1))
    loss = loss + F.mse_loss(a(x), x.clamp(-1.2, 1.2))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "log-probabilities of less than one, and values that are gathered by nll_loss",
        """\
net, gate, q = nn.Linear(4, 3), nn.Linear(4, 1), nn.Linear(4, 3)
opt = torch.optim.SGD([*net.parameters(), *gate.parameters(), *q.parameters()], lr=0.1)
for x, y in [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]:
    log_shares = (net(x).softmax(1) * torch.sigmoid(gate(x)) + 1e-3).log()
    values = -F.nll_loss(q(x), y, reduction="none")
    loss = F.nll_loss(log_shares, y) + (values - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "a curriculum whose first loader is too small",
        """\
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for count in (3, 40):
    data = torch.utils.data.TensorDataset(torch.randn(count, 4), torch.randint(2, (count,)))
    for x, y in torch.utils.data.DataLoader(data, 8, drop_last=True):
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
""",
    ),
    Program(
        "a training without a validation set",
        """\
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.randint(2, (12,)))
train, validation = torch.utils.data.random_split(data, [12, 0])
for epoch in range(2):
    for x, y in torch.utils.data.DataLoader(train, 4):
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    for x, y in torch.utils.data.DataLoader(validation, 4):
        net(x)
""",
    ),
    Program(
        "sorted samples are evaluated, and one class after the other is learnt from a loader of its own",
        """\
labels = torch.arange(3).repeat_interleave(48)
data = torch.utils.data.TensorDataset(torch.randn(144, 4) + labels[:, None], labels)
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for kind in range(3):
    task = torch.utils.data.Subset(data, range(48 * kind, 48 * kind + 48))
    for x, y in torch.utils.data.DataLoader(task, batch_size=16):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
for x, y in torch.utils.data.DataLoader(data, batch_size=16, shuffle=True):
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()
with torch.no_grad():
    for x, y in torch.utils.data.DataLoader(data, batch_size=16):
        accuracy = (net(x).argmax(1) == y).float().mean()
""",
    ),
    Program(
        "sorted samples are evaluated after each of several epochs, and a target is broadcast on purpose",
        """\
labels = torch.arange(3).repeat_interleave(48)
data = torch.utils.data.TensorDataset(torch.randn(144, 4) + labels[:, None], labels)
shuffled, in_order = (torch.utils.data.DataLoader(data, batch_size=16, shuffle=shuffle) for shuffle in (True, False))
net, mean = nn.Linear(4, 3), torch.zeros(1, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in shuffled:
        opt.zero_grad()
        out = net(x)
        (F.cross_entropy(out, y) + 0.01 * F.mse_loss(out, torch.broadcast_to(mean, out.shape))).backward()
        opt.step()
    with torch.no_grad():
        for x, y in in_order:
            accuracy = (net(x).argmax(1) == y).float().mean()
""",
    ),
    Program(
        "loops over loaders of which a part is not read: an autoencoder, a count of steps, labels alone",
        """\
data = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randint(3, (96,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
net, table = nn.Linear(4, 4), nn.Embedding(3, 4)
opt = torch.optim.SGD([*net.parameters(), *table.parameters()], lr=0.1)
for x, y in loader:
    opt.zero_grad()
    F.mse_loss(net(x), x).backward()
    opt.step()
for _, y in loader:
    opt.zero_grad()
    (net(table(y)) - 1).square().mean().backward()
    opt.step()
for batch in loader:
    opt.zero_grad()
    F.mse_loss(net(batch[0]), batch[0]).backward()
    opt.step()
""",
    ),
    Program(
        "one layer that is meant to be used several times, and a data set that is counted as a whole",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.Linear(4, 4)
        self.parts = nn.ModuleList([shared for _ in range(3)])
        self.steps = nn.Sequential(*[nn.ReLU()] * 2)
        self.head = nn.Linear(4, 3)
    def forward(self, x):
        for part in self.parts:
            x = self.steps(part(x))
        return self.head(x)
net = Net()
data = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randint(3, (96,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
total = 0.0
for x, y in loader:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    total += loss.item() * len(x)
total /= len(loader.dataset)
""",
    ),
    Program(
        "sums of losses that are only printed: of several backward passes, and with a metric that has a graph",
        """\
body, kind, place = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)
opt = torch.optim.SGD([*body.parameters(), *kind.parameters(), *place.parameters()], lr=0.1)
for x, y, z in [(torch.randn(8, 4), torch.randint(3, (8,)), torch.randn(8, 2)) for _ in range(4)]:
    h = body(x).relu()
    first, second = F.cross_entropy(kind(h), y), F.mse_loss(place(h), z)
    opt.zero_grad()
    first.backward(retain_graph=True)
    second.backward()
    opt.step()
    total = first + second
    shown = total.item()
""",
    ),
    Program(
        "loops over loaders that are counted, zipped, named and read by a closure, or that only give the pace",
        """\
data = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randn(96, 4), torch.randint(3, (96,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
shown = list
def step(x, y):
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
for number, (ids, x, y) in shown(enumerate(loader)):
    step(x, y)
for number, batch in zip(range(6), loader):
    step(batch[0], batch[2])
for ids, x, y in loader:
    step(x, y)
for tick in loader:
    x, y = torch.randn(16, 4), torch.randint(3, (16,))
    step(x, y)
def closure():
    opt.zero_grad()
    loss = F.cross_entropy(net(inputs), labels)
    loss.backward()
    return loss
for inputs, _, labels in loader:
    opt.step(closure)
""",
    ),
    Program(
        "objectives that are only logged, terms that join later, and a share of the data that is printed",
        """\
data = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
loader = torch.utils.data.DataLoader(data, batch_size=16, sampler=torch.utils.data.SubsetRandomSampler(range(64)))
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
history = []
for number, (x, y) in enumerate(loader):
    loss = F.mse_loss(net(x), y)
    history.append((loss + 0.1 * net.weight.abs().sum()).item())
    total = loss + 0.1 * net.weight.square().sum()
    if number < 100:
        total = loss * 1.0
    opt.zero_grad()
    total.backward()
    opt.step()
share = len(loader.sampler) / len(loader.dataset)
""",
    ),
    Program(
        "logits compared with 0, probabilities with 0.5, the largest scores with a threshold, parameters that are frozen",
        """\
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
net[0].requires_grad = False
net[0].requires_grad_(False)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]:
    out = net(x)
    opt.zero_grad()
    F.cross_entropy(out, y).backward()
    opt.step()
    scores, best = out.softmax(1).max(1)
    right = (best == y).sum(), (scores > 0.5).sum(), (out > 0).sum(), (out.sigmoid() > 0.5).sum(), (out.softmax(1) > 0).sum()
    active = (out.relu() > 0).sum()
""",
    ),
    Program(
        "numbers that weigh tensors: of tasks, of a scale, of an average that was meant",
        """\
net, scale = nn.Linear(5, 3), nn.Parameter(torch.ones(()))
opt = torch.optim.SGD([*net.parameters(), scale], lr=0.1)
tasks = torch.tensor([0.3, 0.7])
for x, y, mask in [(torch.randn(6, 5), torch.randn(6, 3), torch.rand(6)) for _ in range(3)]:
    out = net(x) * scale
    losses = torch.stack([F.mse_loss(out, y), out.abs().mean()])
    per_sample = ((out - y) ** 2).sum(1)
    loss = (losses * tasks).sum() + (per_sample * mask).mean() + 0.1 * out.var() * torch.ones(1)[0]
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "a cross-validation: what one model is trained on, another one is validated on",
        """\
from torch.utils.data import DataLoader, Subset, TensorDataset
data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
for fold in range(3):
    train = DataLoader(Subset(data, [i for i in range(48) if i % 3 != fold]), batch_size=8, shuffle=True)
    val = DataLoader(Subset(data, [i for i in range(48) if i % 3 == fold]), batch_size=16)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in train:
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        for x, y in val:
            loss = F.mse_loss(net(x), y)
""",
    ),
    Program(
        "equal samples: of few values, of noisy labels, and two views of each",
        """\
from torch.utils.data import DataLoader, TensorDataset
states = torch.eye(4)[torch.randint(4, (64,))]
noisy = torch.randn(64, 4)
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
labels = torch.randint(2, (64,))
for test_inputs in (states, torch.cat([noisy[:56], noisy[:8]]), noisy.repeat(2, 1)[::2]):
    for x, y in DataLoader(TensorDataset(test_inputs, labels), batch_size=16):
        loss = F.cross_entropy(net(torch.cat([x, x])), torch.cat([y, y]))
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        for x, y in DataLoader(TensorDataset(states, labels), batch_size=16):
            net(x)
""",
    ),
    Program(
        "views whose sizes are equal by chance, or computed where they are given",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.out, self.last = nn.Linear(16, 16), nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, x):
        B, T, C = x.shape
        heads, hd, window = 4, 4, 4
        q = self.q(x.transpose(0, 1).contiguous())
        q = q.view(T, B * heads, hd).transpose(0, 1)
        scores = q @ q.transpose(1, 2)
        padded = F.pad(scores, (1, 0)).view(B, heads, T + 1, T)[:, :, 1:].reshape(B * heads, T, T)
        h = (padded.softmax(-1) @ q).transpose(0, 1).reshape(T, B, C).transpose(0, 1)
        h = self.out(h).reshape(-1, window, 12).relu()
        return self.last(h.reshape(B, T // 2, 2, 12).mean((1, 2)))

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(4, 8, 16), torch.randint(3, (4,))) for _ in range(3)]:
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "results that are shown or timed, a row of the step that is decoded, the product of two sums",
        """\
table, cell, last = nn.Parameter(torch.randn(9, 4)), nn.Linear(4, 4), nn.Linear(4, 2)
opt = torch.optim.SGD([table, *cell.parameters(), *last.parameters()], lr=0.1)
rewards = torch.rand(6)
for x in [torch.randn(6, 4) for _ in range(3)]:
    outs = []
    for _ in range(3):
        outs.append(torch.tanh(cell(x) + table[len(outs)]))
    chosen = torch.distributions.Categorical(logits=last(outs[-1]))
    actions = chosen.sample()
    loss = -(chosen.log_prob(actions).sum() * rewards).sum() + sum(outs).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
for _ in range(3):
    torch.mm(x, cell.weight)
torch.tanh(outs[-1])
""",
    ),
    Program(
        "accuracy of both sets by one function, then a training on all samples",
        """\
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
train, val = (TensorDataset(torch.randn(24, 4), torch.randint(2, (24,))) for _ in range(2))
train_loader, val_loader = DataLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=8)
net = nn.Linear(4, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def accuracy(eval_loader):
    net.eval()
    with torch.no_grad():
        right = [(net(x).argmax(1) == y).float().mean() for x, y in eval_loader]
    net.train()
    return sum(right)
def fit(loader):
    for x, y in loader:
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
fit(train_loader)
accuracy(train_loader), accuracy(val_loader)
fit(DataLoader(ConcatDataset([train, val]), batch_size=8))
""",
    ),
    Program(
        "a sum of terms inside the model, weights divided by their norm, and the value of a single column",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.gate = nn.Linear(4, 3), nn.Linear(4, 2)
        self.penalty = torch.zeros(())

    def forward(self, x):
        gate = self.gate(x).softmax(-1)
        self.penalty = (gate.mean(0) - 0.5).square().sum() + gate.square().mean()
        weight = self.fc.weight / self.fc.weight.norm()
        out = F.linear(x, weight, self.fc.bias)
        best = out[:, :1].max(dim=1)[0]
        return out - out.mean(dim=1, keepdim=True) + best.unsqueeze(1)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]:
    loss = F.cross_entropy(net(x), y) + 0.01 * net.penalty
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "log-probabilities that are weighed, summed as an entropy, or negative",
        """\
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y, weight in [(torch.randn(8, 4), torch.randint(3, (8,)), torch.randn(8)) for _ in range(4)]:
    likely = F.log_softmax(net(x), 1)
    right = likely.gather(1, y[:, None])[:, 0]
    loss = -(right * weight).mean() - 0.01 * (likely.exp() * likely).sum(1).mean() - likely[torch.arange(8), y].mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    Program(
        "standardized data in both, and time that goes on in the evaluation",
        """\
net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    for t in torch.rand(64, 1).split(16):
        loss = F.mse_loss(net(t), t.sin())
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        further = net(torch.linspace(0, 10, 50).unsqueeze(1))
    net.train()
""",
    ),
    Program(
        "a look at the shapes of a new model, and an evaluation in evaluation mode",
        """\
from torch.utils.data import DataLoader
net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
with torch.no_grad():
    print(net(torch.randn(3, 4)).shape)
    net.eval()
    for x in DataLoader(torch.randn(32, 4), batch_size=8):
        out = net(x)
""",
    ),
)
