"""The other errors: leaves and views, shapes, inference tensors, functions of one's own, checkpoints, double backward."""

from tests.unit.instruments.autograd.case import Case

__all__ = ["CASES"]

_LEAVES_AND_VIEWS = (
    Case(
        name="YOLO initialises the biases of its head",
        kind="leaf_inplace",
        kinds=("view_inplace",),
        link="https://github.com/ultralytics/yolov5/issues/2408",
        text="""\
import math

class Detect(nn.Module):
    def __init__(self, nc, na, ch):
        super().__init__()
        self.nc, self.na, self.no = nc, na, nc + 5
        self.stride = [8, 16]
        self.m = nn.ModuleList(nn.Conv2d(x, self.no * na, 1) for x in ch)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, 4, 3, padding=1)
        self.detect = Detect(3, 2, (4, 4))
        self._initialize_biases()

    def _initialize_biases(self):
        m = self.detect
        for mi, s in zip(m.m, m.stride):
            b = mi.bias.view(m.na, -1)
            b[:, 4] += math.log(8 / (640 / s) ** 2)  #> location
            b[:, 5:] += math.log(0.6 / (m.nc - 0.99))
            mi.bias = torch.nn.Parameter(b.view(-1), requires_grad=True)

model = Model()
""",
        edits=(("mi.bias.view(m.na, -1)", "mi.bias.data.view(m.na, -1)"),),
    ),
    Case(
        name="gradient descent by hand, without no_grad",
        kind="leaf_inplace",
        link="https://discuss.pytorch.org/t/leaf-variable-was-used-in-an-inplace-operation/308",
        tensors=("w",),
        text="""\
w = torch.zeros(3, requires_grad=True)
b = torch.zeros(1, requires_grad=True)
X = torch.randn(20, 3)
y = X @ torch.tensor([1.0, -2.0, 0.5]) + 0.3
for epoch in range(3):
    loss = ((X @ w + b - y) ** 2).mean()
    loss.backward()
    w -= 0.1 * w.grad  #> location
    b -= 0.1 * b.grad
    w.grad.zero_()
    b.grad.zero_()
""",
        edits=(
            (
                "    w -= 0.1 * w.grad  #> location\n    b -= 0.1 * b.grad\n",
                "    with torch.no_grad():\n        w -= 0.1 * w.grad\n        b -= 0.1 * b.grad\n",
            ),
        ),
    ),
    Case(
        name="a module initialises its parameter in __init__",
        kind="leaf_inplace",
        tensors=("weight", "self.weight", "prototypes", "self.prototypes"),
        text="""\
class Prototypes(nn.Module):
    def __init__(self, k, d):
        super().__init__()
        self.prototypes = nn.Parameter(torch.empty(k, d))
        self.prototypes.uniform_(-(d**-0.5), d**-0.5)  #> location

    def forward(self, z):
        return F.normalize(z) @ F.normalize(self.prototypes).t()

head = Prototypes(5, 8)
head(torch.randn(2, 8)).sum().backward()
""",
        edits=(("self.prototypes.uniform_(", "self.prototypes.data.uniform_("),),
    ),
    Case(
        name="a momentum encoder is updated while gradients are recorded",
        kind="leaf_inplace",
        text="""\
import copy

student = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
teacher = copy.deepcopy(student)
opt = torch.optim.SGD(student.parameters(), lr=0.1)
for x in torch.randn(2, 6, 4):
    with torch.no_grad():
        target = teacher(x + 0.1 * torch.randn_like(x))
    loss = 2 - 2 * F.cosine_similarity(student(x), target).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    for ps, pt in zip(student.parameters(), teacher.parameters()):
        pt.mul_(0.99).add_(ps, alpha=0.01)  #> location
""",
        edits=(("        pt.mul_(0.99).add_(ps, alpha=0.01)  #> location\n", "        pt.data.mul_(0.99).add_(ps.data, alpha=0.01)\n"),),
    ),
    Case(
        name="rows of an activation are scaled in a for loop",
        kind="view_inplace",
        link="https://github.com/pytorch/pytorch/issues/36608",
        ops=("unbind",),
        tensors=("row",),
        text="""\
model = nn.Linear(4, 4)
out = model(torch.randn(3, 4))
for row, weight in zip(out, torch.rand(3)):
    row *= weight  #> location
out.sum().backward()
""",
        edits=(("for row, weight in zip(out, torch.rand(3)):\n    row *= weight  #> location\n", "out = out * torch.rand(3)[:, None]\n"),),
    ),
    Case(
        name="a view from a no_grad block is written outside of it",
        kind="view_inplace",
        text="""\
layer = nn.Linear(6, 6)
x = torch.randn(2, 6)
h = layer(x)
with torch.no_grad():
    head = h[:, :3]
head.mul_(2.0)  #> location
loss = h.sum()
loss.backward()
""",
        edits=(("with torch.no_grad():\n    head = h[:, :3]\n", "head = h[:, :3]\n"),),
    ),
)

_SCALARS = (
    Case(
        name="BPR subtracts one regulariser for each sample",
        kind="non_scalar",
        link="https://github.com/sh0416/bpr/issues/13",
        text="""\
class BPR(nn.Module):
    def __init__(self, user_size, item_size, dim, weight_decay):
        super().__init__()
        self.W = nn.Parameter(torch.randn(user_size, dim))
        self.H = nn.Parameter(torch.randn(item_size, dim))
        self.B = nn.Parameter(torch.rand(item_size))
        self.weight_decay = weight_decay

    def forward(self, u, i, j):
        u, i_, j_ = self.W[u, :], self.H[i, :], self.H[j, :]
        x_uij = (u * i_).sum(1) + self.B[i] - (u * j_).sum(1) - self.B[j]
        log_prob = F.logsigmoid(x_uij).sum()
        regularization = self.weight_decay * (u.norm(dim=1) ** 2 + i_.norm(dim=1) ** 2 + j_.norm(dim=1) ** 2)
        return -log_prob + regularization  #> location

model = BPR(6, 9, 4, 0.01)
optimizer = torch.optim.Adam(model.parameters())
for idx in range(2):
    loss = model(torch.randint(6, (5,)), torch.randint(9, (5,)), torch.randint(9, (5,)))  #> location
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("j_.norm(dim=1) ** 2)\n", "j_.norm(dim=1) ** 2).sum()\n"),),
    ),
    Case(
        name="the gradient of a scalar has one element",
        kind="non_scalar",
        text="""\
critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(critic.parameters())
one = torch.FloatTensor([1])
for real in torch.randn(2, 16, 4):
    optimizer.zero_grad()
    loss = critic(real).mean()
    loss.backward(one * -1)  #> location
    optimizer.step()
""",
        edits=(("loss.backward(one * -1)", "loss.backward((one * -1).reshape(loss.shape))"),),
    ),
    Case(
        name="class weights need reduction='none', and no mean follows",
        kind="non_scalar",
        text="""\
criterion = nn.CrossEntropyLoss(reduction="none")
model = nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 3))
opt = torch.optim.AdamW(model.parameters(), amsgrad=True)
for x, y, w in [(torch.randn(4, 5), torch.randint(3, (4,)), torch.rand(4))]:
    loss = criterion(model(x), y)
    loss = loss * w  #> location
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("loss = loss * w", "loss = (loss * w).mean()"),),
    ),
)

_INFERENCE = (
    Case(
        name="features of a frozen backbone under inference_mode",
        kind="inference_tensor",
        link="https://github.com/unslothai/unsloth/issues/2434",
        text="""\
backbone = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
head = nn.Linear(6, 2)
optimizer = torch.optim.Adam(head.parameters())
for images, labels in [(torch.randn(3, 3, 6, 6), torch.randint(2, (3,)))]:
    with torch.inference_mode():  #> location
        feats = backbone(images)
    logits = head(feats)  #> location
    loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        tensors=("feats",),
        edits=(("torch.inference_mode()", "torch.no_grad()"),),
    ),
    Case(
        name="predict() caches positions that training uses afterwards",
        kind="inference_tensor",
        link="https://github.com/roboflow/rf-detr/issues/461",
        text="""\
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.pos = {}

    def positions(self, n):
        if n not in self.pos:
            self.pos[n] = torch.sin(torch.arange(n)[:, None] * torch.arange(1, 5))
        return self.pos[n]

    def forward(self, x):
        return self.proj(x) + self.positions(x.shape[1]) * self.scale  #> location

class Detector:
    def __init__(self):
        self.model = Encoder()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)

    @torch.inference_mode()  #> location
    def predict(self, x):
        return self.model(x)

    def train(self, x):
        loss = self.model(x).pow(2).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()

detector = Detector()
detector.predict(torch.randn(1, 5, 4))
detector.train(torch.randn(2, 5, 4))
""",
        edits=(("@torch.inference_mode()", "@torch.no_grad()"),),
    ),
    Case(
        name="a replay buffer is normalised in place outside inference_mode",
        kind="inference_tensor",
        tensors=("adv", "advantages"),
        text="""\
value = nn.Linear(3, 1)
policy = nn.Linear(3, 2)
opt = torch.optim.Adam([*value.parameters(), *policy.parameters()])
obs, act, ret = torch.randn(8, 3), torch.randint(2, (8,)), torch.randn(8)
with torch.inference_mode():  #> location
    advantages = ret - value(obs).squeeze(1)
advantages -= advantages.mean()  #> location
logp = torch.distributions.Categorical(logits=policy(obs)).log_prob(act)
loss = -(logp * advantages).mean() + F.mse_loss(value(obs).squeeze(1), ret)
opt.zero_grad()
loss.backward()
opt.step()
""",
        edits=(("torch.inference_mode()", "torch.no_grad()"),),
    ),
)

_INPUTS = (
    Case(
        name="MAML adapts a model one of whose layers is not used",
        kind="unused_input",
        link="https://github.com/ShiYunyi/Meta-Weight-Net_Code-Optimization/issues/5",
        parameters=("aux.weight", "aux.bias"),
        text="""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 8), nn.Linear(8, 1)
        self.aux = nn.Linear(8, 4)

    def forward(self, x, with_aux=False):
        h = self.fc1(x).relu()
        return (self.fc2(h), self.aux(h)) if with_aux else self.fc2(h)

net = Net()
meta_opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for task in range(2):
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    pseudo_loss = F.mse_loss(net(x), y)
    pseudo_grads = torch.autograd.grad(pseudo_loss, net.parameters(), create_graph=True)  #> location
    fast = {n: p - 0.01 * g for (n, p), g in zip(net.named_parameters(), pseudo_grads)}
    outer = F.mse_loss(torch.func.functional_call(net, fast, (x,)), y)
    meta_opt.zero_grad()
    outer.backward()
    meta_opt.step()
""",
    ),
    Case(
        name="the noise of a smoothness penalty does not reach the loss",
        kind="unused_input",
        link="https://github.com/archinetai/smart-pytorch/issues/5",
        tensors=("noise",),
        text="""\
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 6), nn.Linear(6, 2)

    def forward(self, ids, embeds=None):
        embeds = self.embed(ids)
        return self.out(embeds.mean(1))

model = Classifier()
ids = torch.randint(10, (3, 4))
state = model(ids)
noise = torch.randn(3, 4, 6, requires_grad=True)
state_perturbed = model(ids, model.embed(ids) + noise)
kl = F.kl_div(state_perturbed.log_softmax(-1), state.detach().softmax(-1), reduction="batchmean")
(noise_gradient,) = torch.autograd.grad(kl, noise)  #> location
""",
        edits=(("        embeds = self.embed(ids)\n", "        embeds = self.embed(ids) if embeds is None else embeds\n"),),
    ),
    Case(
        name="integer weights ask for gradients",
        kind="integer_grad",
        text="""\
x = torch.tensor([1, 2, 3], requires_grad=True)  #> location
y = (x**2).sum()
y.backward()
""",
        edits=(("[1, 2, 3]", "[1.0, 2.0, 3.0]"),),
    ),
    Case(
        name="saliency of token ids",
        kind="integer_grad",
        tensors=("input_ids",),
        text="""\
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.fc = nn.Embedding(12, 4), nn.Linear(4, 2)

    def forward(self, ids=None, embeds=None):
        e = self.emb(ids) if embeds is None else embeds
        return self.fc(e.mean(1))

model = Bag()
input_ids = torch.randint(12, (2, 5))
input_ids.requires_grad_(True)  #> location
model(input_ids).sum().backward()
print(input_ids.grad)
""",
        edits=(
            ("input_ids.requires_grad_(True)  #> location\n", "embeds = model.emb(input_ids).detach().requires_grad_(True)\n"),
            ("model(input_ids).sum()", "model(embeds=embeds).sum()"),
            ("print(input_ids.grad)", "print(embeds.grad)"),
        ),
    ),
    Case(
        name="a learnable table of bucket borders is integer",
        kind="integer_grad",
        text="""\
class Buckets(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.borders = nn.Parameter(torch.arange(n))  #> location

    def forward(self, x):
        return torch.sigmoid(x[:, None] - self.borders).sum(1)

Buckets(4)(torch.rand(3) * 4).sum().backward()
""",
        edits=(("torch.arange(n)", "torch.arange(float(n))"),),
    ),
)

_FUNCTIONS = (
    Case(
        name="the backward of a linear layer forgets the transpose",
        kind="custom_function",
        text="""\
class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias):
        ctx.save_for_backward(input, weight)
        return input.mm(weight.t()) + bias

    @staticmethod
    def backward(ctx, grad_output):
        input, weight = ctx.saved_tensors
        return grad_output.mm(weight), input.t().mm(grad_output), grad_output.sum(0)  #> location

class MyLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(o, i)), nn.Parameter(torch.zeros(o))

    def forward(self, x):
        return LinearFunction.apply(x, self.weight, self.bias)

net = nn.Sequential(MyLinear(4, 8), nn.ReLU(), MyLinear(8, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
loss = F.cross_entropy(net(torch.randn(5, 4)), torch.randint(3, (5,)))
opt.zero_grad()
loss.backward()
opt.step()
""",
        edits=(("input.t().mm(grad_output), grad_output.sum(0)", "grad_output.t().mm(input), grad_output.sum(0)"),),
    ),
    Case(
        name="a straight-through function with a threshold returns one gradient",
        kind="custom_function",
        text="""\
class Binarize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, threshold):
        ctx.save_for_backward(x)
        return (x > threshold).to(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1, 1)  #> location

class BinaryNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.b(Binarize.apply(self.a(x), 0.0))

model = BinaryNet()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    loss = model(torch.randn(4, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        edits=(("return grad.clamp(-1, 1)", "return grad.clamp(-1, 1), None"),),
    ),
    Case(
        name="a rasteriser returns the gradient of two scales for three",
        kind="custom_function",
        link="https://github.com/hbb1/2d-gaussian-splatting/issues/43",
        text="""\
class Rasterize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, means, scales, opacity):
        ctx.save_for_backward(means, scales, opacity)
        return (means.sum(1) * scales.prod(1) * opacity).sum()

    @staticmethod
    def backward(ctx, grad):
        means, scales, opacity = ctx.saved_tensors
        base = grad * opacity
        grad_means = (base * scales.prod(1))[:, None].expand_as(means)
        grad_scales = torch.stack([base * means.sum(1) * scales[:, 1], base * means.sum(1) * scales[:, 0]], 1)
        grad_opacity = grad * means.sum(1) * scales.prod(1)
        return grad_means, grad_scales, grad_opacity  #> location

class Gaussians(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.means = nn.Parameter(torch.randn(n, 3))
        self.scales = nn.Parameter(torch.rand(n, 3))
        self.opacity = nn.Parameter(torch.rand(n))

    def forward(self):
        return Rasterize.apply(self.means, self.scales, self.opacity)

model = Gaussians(7)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for it in range(2):
    loss = (model() - 1.0) ** 2
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("torch.rand(n, 3)", "torch.rand(n, 2)"),),
    ),
)

_CHECKPOINTS = (
    Case(
        name="stochastic depth draws from Python's random inside a checkpoint",
        kind="checkpoint_mismatch",
        text="""\
import random
from torch.utils.checkpoint import checkpoint
random.seed(3)

class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x):
        if random.random() < 0.5:  #> location
            return torch.tanh(x)  #> location
        return x + F.gelu(self.fc(self.norm(x)))  #> location

blocks = nn.ModuleList(Block(6) for _ in range(6))
opt = torch.optim.AdamW(blocks.parameters())
for x in torch.randn(3, 4, 6):
    h = x
    for block in blocks:
        h = checkpoint(block, h, use_reentrant=False)  #> location
    loss = h.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("if random.random() < 0.5", "if torch.rand(()) < 0.5"),),
    ),
    Case(
        name="a counter turns a layer on while it is recomputed",
        kind="checkpoint_mismatch",
        link="https://github.com/Lightning-AI/pytorch-lightning/issues/19267",
        text="""\
from torch.utils.checkpoint import checkpoint

class Warmup(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.gate = nn.Linear(5, 5), nn.Linear(5, 5)
        self.calls = 0

    def forward(self, x):
        self.calls += 1  #> location
        h = self.fc(x).relu()
        if self.calls <= 3:  #> location
            h = h * self.gate(x).sigmoid()  #> location
        return h

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.out = Warmup(), nn.Linear(5, 1)

    def forward(self, x):
        return self.out(checkpoint(self.block, x, use_reentrant=False))  #> location

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    loss = net(torch.randn(3, 5)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        edits=(("        self.calls += 1  #> location\n", ""),),
    ),
    Case(
        name="the padded length of a batch is cached between forward and recomputation",
        kind="checkpoint_mismatch",
        link="https://github.com/pytorch/pytorch/issues/155171",
        text="""\
from torch.utils.checkpoint import checkpoint

class Cache:
    def __init__(self):
        self.keys = []

    def update(self, k):
        self.keys.append(k)  #> location
        return torch.cat(self.keys, dim=1)  #> location

class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, cache):
        k = cache.update(self.k(x))  #> location
        w = (self.q(x) @ k.transpose(1, 2)).softmax(-1)  #> location
        return w @ k

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention(4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            cache = Cache()
            x = x + checkpoint(layer, x, cache, use_reentrant=False)  #> location
        return x

model = Decoder()
opt = torch.optim.AdamW(model.parameters())
loss = model(torch.randn(2, 3, 4)).square().mean()
loss.backward()
opt.step()
""",
        edits=(
            (
                "        self.keys.append(k)  #> location\n        return torch.cat(self.keys, dim=1)  #> location\n",
                "        return torch.cat([*self.keys, k], dim=1)\n",
            ),
        ),
    ),
)

_DOUBLE = (
    Case(
        name="forces of a learned potential are trained through cdist",
        kind="no_double_backward",
        ops=("_cdist_backward", "_cdist_forward", "cdist"),
        text="""\
class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, positions):
        distances = torch.cdist(positions, positions + 0.5)  #> location
        return self.mlp(distances.flatten()[:, None]).sum()

model = Potential()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for positions, energy, forces in [(torch.randn(4, 3), torch.randn(()), torch.randn(4, 3)) for _ in range(2)]:
    positions.requires_grad_()
    predicted = model(positions)
    predicted_forces = -torch.autograd.grad(predicted, positions, create_graph=True)[0]  #> location
    loss = (predicted - energy) ** 2 + F.mse_loss(predicted_forces, forces)
    optimizer.zero_grad()
    loss.backward()  #> location
    optimizer.step()
""",
        edits=(("torch.cdist(positions, positions + 0.5)", "(positions[:, None] - positions - 0.5).norm(dim=-1)"),),
    ),
    Case(
        name="a function of one's own is differentiable once",
        kind="no_double_backward",
        text="""\
from torch.autograd.function import once_differentiable

class FastTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable  #> location
    def backward(ctx, grad):  #> location
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)

class PINN(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(1, 8), nn.Linear(8, 1)

    def forward(self, t):
        return self.b(FastTanh.apply(self.a(t)))  #> location

u = PINN()
opt = torch.optim.Adam(u.parameters(), lr=1e-3)
t = torch.linspace(0, 1, 9)[:, None].requires_grad_()
for _ in range(2):
    y = u(t)
    (dy,) = torch.autograd.grad(y.sum(), t, create_graph=True)  #> location
    residual = (dy + y).square().mean()
    opt.zero_grad()
    residual.backward()  #> location
    opt.step()
""",
        edits=(("    @once_differentiable  #> location\n", ""),),
    ),
    Case(
        name="a gradient penalty through fused attention",
        kind="no_double_backward",
        text="""\
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 1)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v)  #> location
        return self.out(h.transpose(1, 2).flatten(2)).mean((1, 2))

critic = Critic()
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.5, 0.9))
for i in range(2):
    real, fake = torch.randn(4, 5, 8), torch.randn(4, 5, 8)
    mix = torch.lerp(real, fake, torch.rand(4, 1, 1)).requires_grad_()
    (g,) = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)  #> location
    loss = critic(fake).mean() - critic(real).mean() + 10 * (g.flatten(1).norm(dim=1) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()  #> location
    optimizer.step()
""",
        edits=(
            (
                "F.scaled_dot_product_attention(q, k, v)",
                "((q @ k.transpose(-2, -1)) / 2).softmax(-1) @ v",
            ),
        ),
    ),
)

_OTHER = (
    Case(
        name="a hook returns the mean of the gradient",
        kind="other",
        text="""\
model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)

def smooth(grad):
    return grad.mean(0)  #> location

model[0].weight.register_hook(smooth)
for x in torch.randn(2, 5, 4):
    loss = model(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()  #> location
    opt.step()
""",
        edits=(("return grad.mean(0)", "return grad.mean(0).expand_as(grad)"),),
    ),
    Case(
        name="a vocabulary grows through .data while its gradient hangs on",
        kind="other",
        text="""\
emb = nn.Embedding(5, 3)
head = nn.Linear(3, 2)
opt = torch.optim.SGD([*emb.parameters(), *head.parameters()], lr=0.1)

def step(ids):
    loss = head(emb(ids)).pow(2).mean()
    loss.backward()  #> location
    opt.step()

step(torch.tensor([0, 1, 4]))
emb.weight.data = torch.cat([emb.weight.data, torch.randn(2, 3)])  #> location
step(torch.tensor([5, 6]))
""",
    ),
    Case(
        name="the gradient of an activation is read, and it is None",
        kind="other",
        text="""\
net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
x = torch.randn(1, 1, 4, 4)
features = net[0](x)
score = net[3](net[2](net[1](features)))[0, 1]
score.backward()
cam = (features.grad.mean((2, 3), keepdim=True) * features).sum(1)  #> location
""",
        edits=(("features = net[0](x)\n", "features = net[0](x)\nfeatures.retain_grad()\n"),),
    ),
    Case(
        name="a list of losses with their graphs is read by NumPy",
        kind="other",
        text="""\
import numpy as np
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
history = []
for x in torch.randn(3, 4, 3):
    loss = net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    history.append(loss)
print(np.log10(history))  #> location
""",
        edits=(("np.log10(history)", "np.log10([x.item() for x in history])"),),
    ),
    Case(
        name="numpy() of an output",
        kind="other",
        text="""\
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
out = net(torch.randn(4, 3))
values = out.squeeze(1).numpy()  #> location
""",
        edits=(("out.squeeze(1).numpy()", "out.squeeze(1).detach().numpy()"),),
    ),
    Case(
        name="an overlap of thresholded outputs by logical operations",
        link="https://discuss.pytorch.org/t/custom-loss-function-iou-is-not-differentiable-can-you-create-a-differentiable-iou-loss",
        kind="cut",
        text="""\
def overlap(outputs, targets):
    inside = torch.where(outputs < 0.5, 0, 1)  #> location
    both = torch.logical_and(inside, targets).sum(-1)
    any_of_them = torch.logical_or(inside, targets).sum(-1)
    return 1 - (both / any_of_them).mean()

net = nn.Linear(8, 8)
loss = overlap(net(torch.rand(4, 8)), torch.randint(0, 2, (4, 8)).float())
loss.backward()
""",
        edits=(
            ("torch.where(outputs < 0.5, 0, 1)", "torch.sigmoid(10 * (outputs - 0.5))"),
            ("torch.logical_and(inside, targets)", "(inside * targets)"),
            ("torch.logical_or(inside, targets)", "(inside + targets - inside * targets)"),
        ),
    ),
)


CASES = _LEAVES_AND_VIEWS + _SCALARS + _INFERENCE + _INPUTS + _FUNCTIONS + _CHECKPOINTS + _DOUBLE + _OTHER
