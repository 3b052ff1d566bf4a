"""Tensors that backward needs and that a later line overwrites."""

from tests.unit.instruments.autograd.case import Case

__all__ = ["CASES"]

CASES = (
    Case(
        name="the discriminator steps before the generator's backward",
        kind="inplace",
        link="https://github.com/pytorch/pytorch/issues/39141",
        ops=("addmm", "linear", "t"),
        tensors=("2.weight", "D.2.weight"),
        text="""\
BATCH_SIZE, LR_G, LR_D, N_IDEAS, ART_COMPONENTS = 8, 1e-4, 1e-4, 5, 15
PAINT_POINTS = torch.linspace(-1, 1, ART_COMPONENTS).repeat(BATCH_SIZE, 1)

def artist_works():
    r = 0.02 * torch.randn(1, ART_COMPONENTS)
    return torch.sin(PAINT_POINTS * 3.14) + r

G = nn.Sequential(nn.Linear(N_IDEAS, 32), nn.ReLU(), nn.Linear(32, ART_COMPONENTS))
D = nn.Sequential(nn.Linear(ART_COMPONENTS, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
opt_D = torch.optim.Adam(D.parameters(), lr=LR_D)
opt_G = torch.optim.Adam(G.parameters(), lr=LR_G)

for step in range(3):
    artist_paintings = artist_works()
    G_paintings = G(torch.randn(BATCH_SIZE, N_IDEAS))
    prob_artist0 = D(artist_paintings)
    prob_artist1 = D(G_paintings)  #> saved
    D_loss = -torch.mean(torch.log(prob_artist0) + torch.log(1.0 - prob_artist1))
    G_loss = torch.mean(torch.log(1.0 - prob_artist1))
    opt_D.zero_grad()
    D_loss.backward(retain_graph=True)
    opt_D.step()  #> location
    opt_G.zero_grad()
    G_loss.backward()
    opt_G.step()
""",
        edits=(
            ("    prob_artist1 = D(G_paintings)  #> saved\n", "    prob_artist1 = D(G_paintings.detach())\n"),
            ("    G_loss = torch.mean(torch.log(1.0 - prob_artist1))\n", ""),
            ("    D_loss.backward(retain_graph=True)\n", "    D_loss.backward()\n"),
            ("    opt_G.zero_grad()\n", "    opt_G.zero_grad()\n    G_loss = torch.mean(torch.log(1.0 - D(G_paintings)))\n"),
        ),
    ),
    Case(
        name="a pre-activation ResNet adds the shortcut in place",
        kind="inplace",
        link="https://github.com/pytorch/vision/issues/807",
        ops=("relu", "relu_"),
        tensors=("out",),
        text="""\
class BasicBlock(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.conv1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out = self.relu(out)  #> saved
        out += identity  #> location
        return out

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.layer1 = nn.Sequential(BasicBlock(8), BasicBlock(8))
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.layer1(self.stem(x)).mean((2, 3)))

def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        images, target = torch.randn(4, 3, 8, 8), torch.randint(4, (4,))
        loss = F.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

main()
""",
        edits=(
            (
                "        out = self.relu(out)  #> saved\n        out += identity  #> location\n",
                "        out += identity\n        out = self.relu(out)\n",
            ),
        ),
    ),
    Case(
        name="an RNN by hand writes its hidden states into one tensor",
        kind="inplace",
        link="http://kuloverse.site/blog/fixing-pytorch-rnn-example-a",
        tensors=("h_t",),
        text="""\
rnn = nn.RNN(6, 5, 2)
params = dict(rnn.named_parameters())

def forward(x, hx=None):
    seq_len, batch_size, _ = x.size()
    if hx is None:
        hx = torch.zeros(rnn.num_layers, batch_size, rnn.hidden_size)
    h_t_minus_1 = hx.clone()
    h_t = hx.clone()
    output = []
    for t in range(seq_len):
        for layer in range(rnn.num_layers):
            input_t = x[t] if layer == 0 else h_t[layer - 1]
            gates = input_t @ params[f"weight_ih_l{layer}"].T + h_t_minus_1[layer] @ params[f"weight_hh_l{layer}"].T  #> saved
            h_t[layer] = torch.tanh(gates + params[f"bias_ih_l{layer}"] + params[f"bias_hh_l{layer}"])  #> location
        output.append(h_t[-1].clone())
        h_t_minus_1 = h_t.clone()
    return torch.stack(output), h_t

optimizer = torch.optim.SGD(params.values(), lr=0.01)
for i in range(2):
    out, h = forward(torch.randn(4, 3, 6))
    loss = (out - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(
            ("    h_t = hx.clone()\n", "    h_t = list(hx)\n"),
            ("        h_t_minus_1 = h_t.clone()\n", "        h_t_minus_1 = list(h_t)\n"),
            ("return torch.stack(output), h_t\n", "return torch.stack(output), torch.stack(h_t)\n"),
        ),
    ),
    Case(
        name="a buffer of rows is filled between two matrix products",
        kind="inplace",
        link="https://www.yongfengli.tk/2018/04/13/inplace-operation-in-pytorch.html",
        ops=("mm", "matmul"),
        tensors=("b",),
        text="""\
class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.param = nn.Parameter(torch.randn(10, 10))

    def forward(self, a):
        y = 0
        b = torch.mm(self.param, a)
        for i in range(10):
            b[i] = b[i] + 1  #> location
            y = y + torch.mm(self.param, b)  #> saved
        return y

net = Rows()
net(torch.randn(10, 1)).sum().backward()
""",
        edits=(("            b[i] = b[i] + 1  #> location\n", "            b = b + F.one_hot(torch.tensor(i), 10).float()[:, None]\n"),),
    ),
    Case(
        name="attention weights are zeroed where the mask is, after the softmax",
        kind="inplace",
        ops=("softmax", "_softmax"),
        tensors=("attn",),
        module="blocks.1.attn",
        text="""\
class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, pad):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)  #> saved
        attn[pad[:, None, None, :].expand_as(attn)] = 0.0  #> location
        return self.out((attn @ v).transpose(1, 2).reshape(b, n, d))

class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, 2)
        self.norm2, self.mlp = nn.LayerNorm(dim), nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, pad):
        x = x + self.attn(self.norm1(x), pad)
        return x + self.mlp(self.norm2(x))

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 11)

    def forward(self, ids, pad):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, pad)
        return self.head(x)

model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for ids in torch.randint(11, (2, 3, 5)):
    pad = torch.zeros(3, 5, dtype=torch.bool)
    pad[:, -2:] = True
    loss = F.cross_entropy(model(ids, pad).transpose(1, 2), ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(
            (
                "        attn[pad[:, None, None, :].expand_as(attn)] = 0.0  #> location\n",
                "        attn = attn.masked_fill(pad[:, None, None, :], 0.0)\n",
            ),
        ),
    ),
    Case(
        name="an embedding with max_norm renormalises weights that are already in the graph",
        kind="inplace",
        link="https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html",
        ops=("mm", "matmul"),
        tensors=("embedding.weight", "weight"),
        text="""\
n, d, m = 6, 5, 7
embedding = nn.Embedding(n, d, max_norm=1.0)
W = torch.randn((m, d), requires_grad=True)
idx = torch.tensor([1, 2])
a = embedding.weight @ W.t()  #> saved
b = embedding(idx) @ W.t()  #> location
out = a.unsqueeze(0) + b.unsqueeze(1)
loss = out.sigmoid().prod()
loss.backward()
""",
        edits=(("a = embedding.weight @", "a = embedding.weight.clone() @"),),
    ),
    Case(
        name="EMA weights are swapped in between forward and backward",
        kind="inplace",
        text="""\
class EMA:
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = {k: v.detach().clone() for k, v in model.named_parameters()}
        self.backup = {}

    @torch.no_grad()
    def update(self, model):
        for k, v in model.named_parameters():
            self.shadow[k].mul_(self.decay).add_(v, alpha=1 - self.decay)

    @torch.no_grad()
    def apply(self, model):
        for k, v in model.named_parameters():
            self.backup[k] = v.clone()
            v.copy_(self.shadow[k])  #> location

    @torch.no_grad()
    def restore(self, model):
        for k, v in model.named_parameters():
            v.copy_(self.backup[k])  #> location

model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
ema = EMA(model)
opt = torch.optim.RMSprop(model.parameters(), lr=1e-2)
x_val, y_val = torch.randn(8, 4), torch.randn(8, 1)
for step in range(6):
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    loss = F.mse_loss(model(x), y)  #> saved
    if step == 4:
        ema.apply(model)
        with torch.no_grad():
            val = F.mse_loss(model(x_val), y_val).item()
        ema.restore(model)
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema.update(model)
""",
        edits=(
            ("    loss = F.mse_loss(model(x), y)  #> saved\n", ""),
            ("    opt.zero_grad()\n", "    loss = F.mse_loss(model(x), y)\n    opt.zero_grad()\n"),
        ),
    ),
    Case(
        name="dropout in place after a tanh, deep inside a Sequential",
        kind="inplace",
        ops=("tanh",),
        module="net.3",
        text="""\
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(6),
            nn.Linear(6, 32),
            nn.Tanh(),
            nn.Dropout(0.5, inplace=True),  #> location
            nn.Linear(32, 2),
        )

    def forward(self, obs):
        return torch.distributions.Categorical(logits=self.net(obs))  #> saved, location

policy = Policy()
opt = torch.optim.Adam(policy.parameters(), lr=3e-4)
for update in range(3):
    obs, act, adv = torch.randn(16, 6), torch.randint(2, (16,)), torch.randn(16)
    dist = policy(obs)
    loss = -(dist.log_prob(act) * adv).mean() - 0.01 * dist.entropy().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    opt.step()
""",
        edits=((", inplace=True", ""),),
    ),
    Case(
        name="a recurrent policy resets its state where an episode ended",
        kind="inplace",
        ops=("addmm", "linear"),
        tensors=("h",),
        text="""\
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(4, 8)
        self.cell = nn.RNNCell(8, 8)
        self.pi, self.v = nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, obs, done):
        h = torch.zeros(obs.shape[1], 8)
        logits, values = [], []
        for t in range(len(obs)):
            h = self.cell(torch.relu(self.enc(obs[t])), h)
            logits.append(self.pi(h))  #> saved
            values.append(self.v(h))  #> saved
            h *= 1 - done[t][:, None]  #> location
        return torch.stack(logits), torch.stack(values)

agent = Agent()
opt = torch.optim.Adam(agent.parameters(), lr=1e-3)
for update in range(2):
    obs, done, ret = torch.randn(5, 3, 4), (torch.rand(5, 3) < 0.3).float(), torch.randn(5, 3, 1)
    logits, values = agent(obs, done)
    loss = F.mse_loss(values, ret) - 0.01 * torch.distributions.Categorical(logits=logits).entropy().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("            h *= 1 - done[t][:, None]  #> location\n", "            h = h * (1 - done[t][:, None])\n"),),
    ),
    Case(
        name="only from the third epoch on are small weights pruned in place",
        kind="inplace",
        ops=("softmax", "_softmax"),
        tensors=("gate", "gates"),
        text="""\
class Mixture(nn.Module):
    def __init__(self, experts=4):
        super().__init__()
        self.router = nn.Linear(6, experts)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(experts))
        self.epoch = 0

    def forward(self, x):
        gate = F.softmax(self.router(x), dim=-1)  #> saved
        if self.epoch >= 3:
            gate[gate < 0.2] = 0  #> location
        return sum(gate[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))

model = Mixture()
opt = torch.optim.NAdam(model.parameters())
for epoch in range(5):
    model.epoch = epoch
    for _ in range(3):
        x = torch.randn(8, 6)
        loss = (model(x) - x.flip(1)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
""",
        edits=(("            gate[gate < 0.2] = 0  #> location\n", "            gate = gate * (gate >= 0.2)\n"),),
    ),
)
