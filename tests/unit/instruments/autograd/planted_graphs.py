"""Graphs that are walked twice, and losses that no parameter reaches."""

from tests.unit.instruments.autograd.case import Case

__all__ = ["CASES"]

_TWICE = (
    Case(
        name="the state of an RNN is carried from window to window",
        kind="second_backward",
        link="https://github.com/MorvanZhou/PyTorch-Tutorial/issues/57",
        text="""\
TIME_STEP, INPUT_SIZE, LR = 5, 1, 0.02

class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(input_size=INPUT_SIZE, hidden_size=8, num_layers=1, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, x, h_state):
        r_out, h_state = self.rnn(x, h_state)  #> shared
        outs = [self.out(r_out[:, step, :]) for step in range(r_out.size(1))]
        return torch.stack(outs, dim=1), h_state

rnn = RNN()
optimizer = torch.optim.Adam(rnn.parameters(), lr=LR)
loss_func = nn.MSELoss()
h_state = None
for step in range(4):
    x = torch.randn(1, TIME_STEP, 1)
    y = x.cos()
    prediction, h_state = rnn(x, h_state)  #> shared
    loss = loss_func(prediction, y)
    optimizer.zero_grad()
    loss.backward()  #> location, first
    optimizer.step()
""",
        edits=(("    loss = loss_func(prediction, y)\n", "    h_state = h_state.detach()\n    loss = loss_func(prediction, y)\n"),),
    ),
    Case(
        name="one forward, and a loop of backwards",
        kind="second_backward",
        link="https://github.com/karpathy/nn-zero-to-hero/issues/31",
        text="""\
xs, ys = torch.tensor([0, 5, 13, 13, 1]), torch.tensor([5, 13, 13, 1, 0])
W = torch.randn((27, 27), requires_grad=True)
xenc = F.one_hot(xs, num_classes=27).float()
logits = xenc @ W
counts = logits.exp()
probs = counts / counts.sum(1, keepdims=True)
loss = -probs[torch.arange(5), ys].log().mean()

for k in range(3):
    W.grad = None
    loss.backward()  #> location, first
    W.data += -0.1 * W.grad
""",
        edits=(
            ("loss = -probs[torch.arange(5), ys].log().mean()\n\nfor", "\nfor"),
            (
                "    loss.backward()  #> location, first\n",
                (
                    "    logits = xenc @ W\n    counts = logits.exp()\n    probs = counts / counts.sum(1, keepdims=True)\n"
                    "    loss = -probs[torch.arange(5), ys].log().mean()\n    loss.backward()\n"
                ),
            ),
        ),
    ),
    Case(
        name="an LSTM keeps its state as an attribute of the module",
        kind="second_backward",
        link="https://github.com/sgadgil6/cnslab_fmri/issues/4",
        text="""\
class fMRI_LSTM(nn.Module):
    def __init__(self, hidden_dim, input_dim):
        super().__init__()
        self.hidden_dim = hidden_dim
        self.lstm = nn.LSTM(input_dim, hidden_dim, num_layers=1, batch_first=True)
        self.linear = nn.Linear(hidden_dim, 1)
        self.hidden = self.init_hidden()
        self.dropout = nn.Dropout(p=0.2)

    def init_hidden(self):
        return torch.randn(1, 4, self.hidden_dim), torch.randn(1, 4, self.hidden_dim)

    def forward(self, x):
        lstm_out, self.hidden = self.lstm(x, self.hidden)  #> shared
        return torch.sigmoid(self.linear(self.dropout(lstm_out[:, -1, :])))

model = fMRI_LSTM(6, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

def run_epoch(batches):
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy(model(x).squeeze(1), y)
        loss.backward()  #> location, first
        optimizer.step()

run_epoch([(torch.randn(4, 5, 3), torch.randint(2, (4,)).float()) for _ in range(3)])
""",
        edits=(
            (
                "        lstm_out, self.hidden = self.lstm(x, self.hidden)  #> shared\n",
                "        self.hidden = tuple(h.detach() for h in self.hidden)\n        lstm_out, self.hidden = self.lstm(x, self.hidden)\n",
            ),
        ),
    ),
    Case(
        name="membrane potentials of a spiking network are never reset",
        kind="second_backward",
        link="https://github.com/jeshraghian/snntorch/issues/250",
        text="""\
class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mem):
        ctx.save_for_backward(mem)
        return (mem > 0).float()

    @staticmethod
    def backward(ctx, grad):
        (mem,) = ctx.saved_tensors
        return grad / (1 + 3.14 * mem.abs()) ** 2

class Leaky(nn.Module):
    def __init__(self, beta):
        super().__init__()
        self.beta, self.mem = beta, torch.zeros(1)

    def reset(self):
        self.mem = torch.zeros(1)

    def forward(self, cur):
        self.mem = self.beta * self.mem + cur  #> shared
        spk = Spike.apply(self.mem - 1.0)  #> shared
        self.mem = self.mem - spk.detach()  #> shared
        return spk

net = nn.Sequential(nn.Linear(4, 10), Leaky(0.9), nn.Linear(10, 2), Leaky(0.9))  #> shared
optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)

def forward_pass(data, num_steps=4):
    return torch.stack([net(data) for _ in range(num_steps)]).mean(0)  #> shared

for data, targets in [(torch.randn(3, 4), torch.randint(2, (3,))) for _ in range(2)]:
    net.train()
    loss_val = F.cross_entropy(forward_pass(data), targets)
    optimizer.zero_grad()
    loss_val.backward()  #> location, first
    optimizer.step()
""",
        edits=(("    net.train()\n", "    for layer in (net[1], net[3]):\n        layer.reset()\n"),),
    ),
    Case(
        name="a graph network evolves its own weight",
        kind="second_backward",
        link="https://github.com/benedekrozemberczki/pytorch_geometric_temporal/issues/305",
        text="""\
class EvolveGCN(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.initial_weight = nn.Parameter(torch.randn(dim, dim) / dim)
        self.weight = None
        self.recurrent = nn.GRUCell(dim, dim)
        self.linear = nn.Linear(dim, 1)

    def reinitialize(self):
        self.weight = None

    def forward(self, x, adj):
        weight = self.initial_weight if self.weight is None else self.weight
        self.weight = self.recurrent(weight, weight)  #> shared
        return self.linear(F.relu(adj @ x @ self.weight))  #> shared

model = EvolveGCN(5)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
snapshots = [(torch.randn(7, 5), torch.softmax(torch.randn(7, 7), 1), torch.randn(7)) for _ in range(3)]
for epoch in range(2):
    cost = 0
    for x, adj, y in snapshots:
        y_hat = model(x, adj).squeeze(1)  #> shared
        cost = cost + torch.mean((y_hat - y) ** 2)
    cost = cost / len(snapshots)
    cost.backward()  #> location, first
    optimizer.step()
    optimizer.zero_grad()
""",
        edits=(("    cost = 0\n", "    model.reinitialize()\n    cost = 0\n"),),
    ),
    Case(
        name="two task losses behind one encoder, each with its own backward",
        kind="second_backward",
        text="""\
class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU())
        self.depth, self.seg = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, x):
        z = self.encoder(x)  #> shared
        return self.depth(z), self.seg(z)

def train_step(net, opt, x, depth, seg):
    d, s = net(x)
    loss_d = F.smooth_l1_loss(d, depth)
    loss_s = F.cross_entropy(s, seg)
    opt.zero_grad()
    loss_d.backward()  #> first
    loss_s.backward()  #> location
    opt.step()

net = MultiTask()
opt = torch.optim.AdamW(net.parameters())
train_step(net, opt, torch.randn(6, 8), torch.randn(6, 1), torch.randint(3, (6,)))
""",
        edits=(("    loss_d.backward()  #> first\n    loss_s.backward()  #> location\n", "    (loss_d + loss_s).backward()\n"),),
    ),
    Case(
        name="learnable adjacency is normalised once, outside the loop",
        kind="second_backward",
        text="""\
class GCN(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.logits = nn.Parameter(torch.randn(n, n))
        self.lin1, self.lin2 = nn.Linear(d, 8), nn.Linear(8, 2)

    def adjacency(self):
        a = torch.sigmoid(self.logits)  #> shared
        return a / a.sum(1, keepdim=True)  #> shared

    def forward(self, x, adj):
        return self.lin2(adj @ F.relu(self.lin1(adj @ x)))

model = GCN(5, 3)
features, labels = torch.randn(5, 3), torch.randint(2, (5,))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
adj = model.adjacency()  #> shared
for epoch in range(3):
    optimizer.zero_grad()
    loss = F.nll_loss(F.log_softmax(model(features, adj), dim=1), labels)
    loss.backward()  #> location, first
    optimizer.step()
""",
        edits=(
            ("adj = model.adjacency()  #> shared\n", ""),
            ("    optimizer.zero_grad()\n", "    optimizer.zero_grad()\n    adj = model.adjacency()\n"),
        ),
    ),
    Case(
        name="the fake images are not detached for the discriminator",
        kind="second_backward",
        link="https://github.com/GBLin5566/toward-controlled-generation-of-text-pytorch/issues/8",
        text="""\
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 9), nn.Tanh())
discriminator = nn.Sequential(nn.Linear(9, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
optimizer_G = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
adversarial_loss = nn.BCELoss()
for epoch in range(2):
    for imgs in torch.rand(2, 5, 9):
        valid, fake = torch.ones(5, 1), torch.zeros(5, 1)
        gen_imgs = generator(torch.randn(5, 4))  #> shared
        optimizer_D.zero_grad()
        real_loss = adversarial_loss(discriminator(imgs), valid)
        fake_loss = adversarial_loss(discriminator(gen_imgs), fake)
        d_loss = (real_loss + fake_loss) / 2
        d_loss.backward()  #> first
        optimizer_D.step()
        optimizer_G.zero_grad()
        g_loss = adversarial_loss(discriminator(gen_imgs), valid)
        g_loss.backward()  #> location
        optimizer_G.step()
""",
        edits=(("adversarial_loss(discriminator(gen_imgs), fake)", "adversarial_loss(discriminator(gen_imgs.detach()), fake)"),),
    ),
)

_CUT = (
    Case(
        name="the validation loss goes backward",
        kind="cut",
        link="https://github.com/nianticlabs/monodepth2/issues/24",
        text="""\
class Trainer:
    def __init__(self):
        self.models = {"encoder": nn.Conv2d(3, 4, 3, padding=1), "depth": nn.Conv2d(4, 1, 3, padding=1)}
        params = [p for m in self.models.values() for p in m.parameters()]
        self.opt = torch.optim.Adam(params, 1e-4)

    def process_batch(self, inputs):
        disp = torch.sigmoid(self.models["depth"](F.relu(self.models["encoder"](inputs))))
        return {"loss": (disp - inputs.mean(1, keepdim=True)).abs().mean()}

    def train(self, batches):
        for inputs in batches:
            losses = self.process_batch(inputs)
            self.opt.zero_grad()
            losses["loss"].backward()
            self.opt.step()
        self.val(batches[0])

    def val(self, inputs):
        with torch.no_grad():  #> location
            losses = self.process_batch(inputs)
        losses["loss"].backward()
        self.opt.step()

Trainer().train([torch.rand(2, 3, 6, 6) for _ in range(2)])
""",
        edits=(('        losses["loss"].backward()\n        self.opt.step()\n\nTrainer', "\nTrainer"),),
    ),
    Case(
        name="reentrant checkpoints behind frozen embeddings",
        kind="cut",
        link="https://github.com/huggingface/transformers/issues/23170",
        text="""\
from torch.utils.checkpoint import checkpoint

class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.lora_a, self.lora_b = nn.Linear(dim, 2, bias=False), nn.Linear(2, dim, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + F.gelu(self.ff(h) + self.lora_b(self.lora_a(h)))

class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(Layer(8) for _ in range(2))

    def forward(self, ids):
        h = self.embed_tokens(ids)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=True)  #> location
        return h @ self.embed_tokens.weight.t()

model = LM()
for name, p in model.named_parameters():
    p.requires_grad = "lora_" in name
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for ids in torch.randint(13, (2, 3, 6)):
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("use_reentrant=True", "use_reentrant=False"),),
    ),
    Case(
        name="a Dice score computed in NumPy is wrapped again",
        kind="cut",
        text="""\
import numpy as np

class DiceLoss(nn.Module):
    def forward(self, pred, target):
        p = torch.sigmoid(pred).detach().cpu().numpy()  #> location
        t = target.cpu().numpy()
        inter = np.sum(p * t, axis=(1, 2))
        union = np.sum(p, axis=(1, 2)) + np.sum(t, axis=(1, 2))
        dice = torch.from_numpy(1 - (2 * inter + 1) / (union + 1))  #> location
        return dice.mean()

unet = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
opt = torch.optim.Adam(unet.parameters())
dice = DiceLoss()
for epoch in range(2):
    image, mask = torch.randn(2, 1, 8, 8), torch.randint(2, (2, 8, 8)).float()
    loss = dice(unet(image).squeeze(1), mask)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(
            ("torch.sigmoid(pred).detach().cpu().numpy()", "torch.sigmoid(pred)"),
            ("target.cpu().numpy()", "target"),
            ("np.sum(p * t, axis=(1, 2))", "(p * t).sum((1, 2))"),
            ("np.sum(p, axis=(1, 2)) + np.sum(t, axis=(1, 2))", "p.sum((1, 2)) + t.sum((1, 2))"),
            ("torch.from_numpy(1 - (2 * inter + 1) / (union + 1))", "1 - (2 * inter + 1) / (union + 1)"),
        ),
    ),
    Case(
        name="a list of losses becomes a new tensor",
        kind="cut",
        text="""\
class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))

    def forward(self, x):
        outs = []
        for level in self.levels:
            x = F.avg_pool2d(F.relu(level(x)), 2)
            outs.append(x)
        return outs

model = Pyramid()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x in torch.rand(2, 1, 2, 16, 16):
    losses = [(o - F.adaptive_avg_pool2d(x, o.shape[-2:])).abs().mean() for o in model(x)]
    loss = torch.tensor(losses).sum()  #> location
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("torch.tensor(losses).sum()", "torch.stack(losses).sum()"),),
    ),
    Case(
        name="fine-tuning freezes the new head too",
        kind="cut",
        link="https://github.com/mazurowski-lab/finetune-SAM/issues/26",
        text="""\
def build(num_classes):
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(backbone, nn.Linear(8, num_classes))
    for param in model.parameters():
        param.requires_grad = False  #> location
    return model

model = build(3)
optimizer = torch.optim.SGD(model[1].parameters(), lr=0.001, momentum=0.9)
for inputs, labels in [(torch.randn(4, 3, 8, 8), torch.randint(3, (4,))) for _ in range(2)]:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
""",
        edits=(("in model.parameters():\n        param", "in backbone.parameters():\n        param"),),
    ),
    Case(
        name="an evaluation function leaves gradients switched off",
        kind="cut",
        text="""\
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
train_set = [(torch.randn(4, 5), torch.randint(2, (4,))) for _ in range(2)]

def evaluate():
    model.eval()
    torch.set_grad_enabled(False)  #> location
    accuracy = sum((model(x).argmax(1) == y).float().mean().item() for x, y in train_set) / len(train_set)
    model.train()
    return accuracy

try:
    for epoch in range(3):
        for x, y in train_set:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        evaluate()
finally:
    torch.set_grad_enabled(True)
""",
        edits=(("    model.train()\n    return", "    model.train()\n    torch.set_grad_enabled(True)\n    return"),),
    ),
    Case(
        name="a decorated encoder is part of the trained path",
        kind="cut",
        text="""\
class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Flatten(), nn.Linear(12, 6))
        self.text = nn.EmbeddingBag(20, 6)

    @torch.no_grad()  #> location
    def encode(self, images, texts):
        return F.normalize(self.visual(images)), F.normalize(self.text(texts))

    def forward(self, images, texts):
        i, t = self.encode(images, texts)
        return i @ t.t() / 0.07

model = CLIP()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for step in range(2):
    logits = model(torch.randn(4, 3, 2, 2), torch.randint(20, (4, 5)))
    target = torch.arange(4)
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("    @torch.no_grad()  #> location\n", ""),),
    ),
    Case(
        name="the output is taken through .data",
        kind="cut",
        tensors=(),
        text="""\
class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(10, 3)
        self.decoder = nn.Linear(3, 10)

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))

ae = Autoencoder()
optim = torch.optim.Adadelta(ae.parameters())
for batch in torch.randn(2, 5, 10):
    reconstruction = ae(batch).data  #> location
    loss = F.mse_loss(reconstruction, batch)
    optim.zero_grad()
    loss.backward()
    optim.step()
""",
        edits=(("ae(batch).data", "ae(batch)"),),
    ),
    Case(
        name="a hard gate on the way to the loss",
        kind="cut",
        ops=("gt", "_to_copy", "to"),
        text="""\
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x):
        keep = torch.sigmoid(self.score(x)) > 0.5  #> location
        return x * keep.float()

gate = Gate()
opt = torch.optim.SGD(gate.parameters(), lr=0.1)
x = torch.randn(8, 6)
for _ in range(3):
    selected = gate(x)
    loss = (selected.sum(1) - x.sum(1)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(
            ("keep = torch.sigmoid(self.score(x)) > 0.5", "soft = torch.sigmoid(self.score(x))"),
            ("return x * keep.float()", "return x * ((soft > 0.5).float() + soft - soft.detach())"),
        ),
    ),
    Case(
        name="REINFORCE with the action in place of its log-probability",
        kind="cut",
        text="""\
policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
log_std = nn.Parameter(torch.zeros(2))
optimizer = torch.optim.Adam([*policy.parameters(), log_std], lr=1e-2)

def rollout():
    state, actions, rewards = torch.randn(4), [], []
    for t in range(5):
        dist = torch.distributions.Normal(policy(state), log_std.exp())
        action = dist.sample()  #> location
        actions.append(action)
        rewards.append(-action.pow(2).sum().item())
        state = state + 0.1 * torch.cat([action, action])
    return torch.stack(actions), torch.tensor(rewards)

for episode in range(2):
    actions, rewards = rollout()
    loss = -(actions.sum(1) * rewards).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("        actions.append(action)\n", "        actions.append(dist.log_prob(action))\n"),),
    ),
    Case(
        name="features under inference_mode, and nothing else to train",
        kind="cut",
        text="""\
class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.scale = nn.Linear(8, 1)

    def forward(self, x):
        with torch.inference_mode():  #> location
            score = self.scale(self.body(x))
        return score

probe = Probe()
opt = torch.optim.SGD(probe.parameters(), lr=0.1)
for epoch in range(2):
    loss = probe(torch.randn(3, 6)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(
            (
                "        with torch.inference_mode():  #> location\n            score = self.scale(self.body(x))\n",
                "        with torch.no_grad():\n            x = self.body[1](x)\n        score = self.scale(self.body(x))\n",
            ),
        ),
    ),
    Case(
        name="matrices of sines and cosines that torch.tensor() copies",
        link="https://stackoverflow.com/questions/59387182/construct-a-rotation-matrix-in-pytorch",
        kind="no_gradient",
        text="""\
angle = torch.randn(1, requires_grad=True)
cos, sin = torch.cos, torch.sin
turn = torch.tensor([[cos(angle), -sin(angle)], [sin(angle), cos(angle)]], requires_grad=True)  #> location
torch.mm(turn, torch.ones(2, 2)).sum().backward()
""",
        tensors=("angle",),
        edits=(
            (
                "torch.tensor([[cos(angle), -sin(angle)], [sin(angle), cos(angle)]], requires_grad=True)",
                "torch.cat([cos(angle), -sin(angle), sin(angle), cos(angle)]).reshape(2, 2)",
            ),
        ),
    ),
    Case(
        name="a threshold that is only compared with",
        link="https://discuss.pytorch.org/t/training-with-threshold-in-pytorch/145962",
        kind="no_gradient",
        text="""\
class Threshold(nn.Module):
    def __init__(self):
        super().__init__()
        self.x, self.gain = nn.Parameter(torch.tensor(0.2)), nn.Parameter(torch.tensor(1.0))

    def forward(self, data):
        return self.gain * data * (data > self.x).float()  #> location

net = Threshold()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
data = torch.rand(64)
for step in range(3):
    opt.zero_grad()
    F.mse_loss(net(data), 2 * data * (data > 0.6)).backward()
    opt.step()
""",
        tensors=("x",),
        edits=(("(data > self.x).float()", "torch.sigmoid(10 * (data - self.x))"),),
    ),
)


CASES = _TWICE + _CUT
