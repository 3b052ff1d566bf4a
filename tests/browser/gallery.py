"""A cell for what each magic says, with code as people write it: a VAE, a convolutional network, a tagger."""

from __future__ import annotations

__all__ = ["CELLS", "SETUP"]

SETUP = """
import torch, time, math
from torch import nn
import torch.nn.functional as F
%load_ext torchdebug_magics
torch.manual_seed(0)
class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1); self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1); self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(32, 10)
    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(x, 2)
        x = F.relu(self.conv2(x))
        return self.head(self.pool(x).flatten(1))
class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(20, 16); self.mu = nn.Linear(16, 4); self.logvar = nn.Linear(16, 4); self.dec = nn.Linear(4, 20)
    def forward(self, x):
        h = torch.tanh(self.enc(x)); mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.dec(z)), mu, logvar
class Tagger(nn.Module):
    def __init__(self, vocab=1000, dim=64, tags=12):
        super().__init__()
        self.embed, self.out = nn.Embedding(vocab, dim), nn.Linear(128, tags)
        self.lstm = nn.LSTM(dim, 64, batch_first=True, bidirectional=True)
    def forward(self, ids):
        h, _ = self.lstm(self.embed(ids))
        return self.out(h)
"""

CELLS = {
    "nanhunt found": """
%%nanhunt
torch.manual_seed(0)
vae = Vae(); opt = torch.optim.Adam(vae.parameters(), lr=1e-2)
data = torch.rand(40, 16, 20); data[12] = 0
for step in range(40):
    x = data[step]
    recon, mu, logvar = vae(x)
    p = x / x.sum(1, keepdim=True)
    entropy = -(p * torch.log(p)).sum(1) + torch.log(x.sum(1))
    loss = F.mse_loss(recon, x) + 0.01 * entropy.mean() - 0.5 * (1 + logvar - mu ** 2 - logvar.exp()).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "nanhunt diverged": """
%%nanhunt
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)); opt = torch.optim.SGD(net.parameters(), lr=3.0)
for step in range(200):
    x = torch.randn(64, 8); loss = (net(x) - x.sum(1, keepdim=True)).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "nanhunt clean": """
%%nanhunt --layers
cnn = Cnn(); opt = torch.optim.AdamW(cnn.parameters())
for step in range(5):
    loss = F.cross_entropy(cnn(torch.randn(8, 3, 32, 32)), torch.randint(0, 10, (8,)))
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "memtrace list": """
%%memtrace
tagger = Tagger(); opt = torch.optim.Adam(tagger.parameters()); outs = []
for step in range(30):
    ids = torch.randint(0, 1000, (32, 50)); out = tagger(ids)
    loss = F.cross_entropy(out.flatten(0, 1), torch.randint(0, 12, (32 * 50,)))
    outs.append(out)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "memtrace graph": """
%%memtrace
outs = None; tagger = Tagger(); opt = torch.optim.Adam(tagger.parameters()); total = 0
for step in range(40):
    ids = torch.randint(0, 1000, (32, 50))
    loss = F.cross_entropy(tagger(ids).flatten(0, 1), torch.randint(0, 12, (32 * 50,)))
    total += loss
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "memtrace clean": """
%%memtrace
outs = None; total = 0; cnn = Cnn(); opt = torch.optim.AdamW(cnn.parameters())
for step in range(10):
    loss = F.cross_entropy(cnn(torch.randn(8, 3, 32, 32)), torch.randint(0, 10, (8,)))
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "memgauge growth": """
%%memgauge
kept = []
for i in range(20):
    kept.append(torch.rand(1000, 1300)); time.sleep(0.1)
""",
    "memmark": """
kept = None
%memmark after training
""",
    "memclean": """
%memclean
""",
    "deterministic differs": """
%%deterministic --verify
import random
g = torch.Generator(); model = nn.Linear(8, 2); opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    x = torch.randn(16, 8)
    if time.time() % 1 > 2: x = x * 2
    noise = torch.tensor(hash(time.perf_counter_ns()) % 1000 / 1000.0)
    loss = (model(x) + noise).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "deterministic same": """
%%deterministic --verify
model = nn.Linear(8, 2); opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    loss = model(torch.randn(16, 8)).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "shapes failing cell": """
%%shapes
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3); self.fc = nn.Linear(16 * 15 * 15, 10)
    def forward(self, x):
        return self.fc(F.max_pool2d(F.relu(self.conv(x)), 2).flatten())
net = Net()
for step in range(3):
    net(torch.randn(8, 3, 32, 32))
""",
    "shapes failing": """
%shapes net torch.randn(8, 3, 28, 28)
""",
    "shapes table": """
from transformers import GPT2Config, GPT2LMHeadModel
gpt = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=1000))
%shapes gpt (2,64):int64
""",
    "hangwatch slow": """
%%hangwatch --after 2
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, i):
        time.sleep(1.2); return torch.zeros(3)
for batch in torch.utils.data.DataLoader(Slow(), batch_size=3): pass
""",
    "autograd error": """
%%autograd
net = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()); x = torch.randn(3, 4)
h = net(x)
h.add_(1)
h.sum().backward()
""",
    "autograd silent": """
%%autograd
a, b = nn.Linear(4, 4), nn.Linear(4, 1); opt = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
for step in range(3):
    h = a(torch.randn(8, 4)).detach()
    loss = b(h).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "overfit stalled": """
x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
clf = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3), nn.Softmax(1), nn.ReLU())
opt = torch.optim.SGD(clf.parameters(), lr=0.1)
%overfit clf (x, y) F.cross_entropy opt
""",
    "overfit learned": """
clf = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)); opt = torch.optim.SGD(clf.parameters(), lr=0.1)
%overfit clf (x, y) F.cross_entropy opt
""",
    "gradwatch vanishing": """
%%gradwatch
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(30)]); self.head = nn.Linear(32, 2)
    def forward(self, x):
        for layer in self.layers: x = torch.sigmoid(layer(x))
        return self.head(x)
deep = Deep(); opt = torch.optim.SGD(deep.parameters(), lr=0.1)
for step in range(30):
    loss = F.cross_entropy(deep(torch.randn(16, 32)), torch.randint(0, 2, (16,)))
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "gradwatch fine": """
%%gradwatch
clf = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)); opt = torch.optim.Adam(clf.parameters())
for step in range(30):
    loss = F.cross_entropy(clf(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
""",
    "shrink": """
big = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=768, n_head=12))
%shrink big
""",
    "stepzero": """
clf = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)); opt = torch.optim.Adam(clf.parameters())
%stepzero clf opt
loss = F.cross_entropy(clf(x), y); loss.backward(); opt.step()
%stepzero --restore
""",
}
"""By name: the magic, and what it finds."""
