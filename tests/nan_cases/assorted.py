"""One or two of each kind: masks, names and structure, what is written over, hooks, schedules, whole recipes."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect, Nothing

CASES = (
    Case(
        name="attention_row_masked_by_a_boolean",
        setup="""
            class Attention(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
                def forward(self, x, keep):
                    scores = self.q(x) @ self.k(x).mT
                    scores = scores.masked_fill(~keep[:, None, :], float("-inf"))
                    weight = F.softmax(scores, dim=-1)  # <- here
                    return weight @ self.v(x)
            class Block(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.attn = Attention()
                def forward(self, x, keep):
                    return x + self.attn(x, keep)
            model = Block()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            batches = [(torch.randn(3, 4, 4), torch.ones(3, 4, dtype=torch.bool)) for _ in range(3)]
            batches[1][1][2] = False
        """,
        cell="""
            for x, mask in batches:
                loss = model(x, mask).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="_softmax", module="attn", step=1, rows=(2,), diagnosis=slugs.MASKED_ROW),
    ),
    Case(
        name="names_third_call_of_a_shared_block",
        setup="""
            class Block(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 2, bias=False)
                def forward(self, x):
                    return self.lin(x).mul(1e13).square()  # <- here
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.block = Block()
                def forward(self, x):
                    for _ in range(3):
                        x = self.block(x) * 1e-26
                    return x
            model = Net()
            with torch.no_grad():
                model.block.lin.weight.copy_(torch.eye(2))
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            x = torch.tensor([[1.0, 1.0], [2.0, 200.0]])
        """,
        cell="""
            loss = model(x).mean()
            loss.backward()
            opt.step()
        """,
        # 200, 4e4, 1.6e9; the square of 1.6e9 * 1e13 is past float32. The 1.0 of the first row stays 1.0.
        truth=Expect(kind="inf", phase="forward", op="pow", module="block", call=3, rows=(1,)),
    ),
    Case(
        name="structure_module_that_calls_its_child_directly",
        setup="""
            class Child(nn.Module):
                def project(self, x):
                    return x.reciprocal()  # <- here
            class Parent(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin, self.child = nn.Linear(2, 2, bias=False), Child()
                def forward(self, x):
                    return self.child.project(self.lin(x))
            model = nn.Sequential(Parent())
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.rand(3, 2); x[1] = 0.0
        """,
        cell="model(x).tanh().sum().backward()\nopt.step()",
        # A method that is not a call: it belongs to the module that is being called. tanh hides the forward infinity, not its derivative.
        truth=Expect(kind=frozenset({"inf", "nan"}), phase=frozenset({"backward", "forward"}), op="reciprocal", module="0", rows=(1,)),
    ),
    Case(
        name="corner_scheduler_makes_the_rate_nan",
        setup="""
            net = nn.Linear(2, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda e: float("nan") if e == 2 else 1.0)
            x = torch.rand(3, 2)
        """,
        cell="""
            for _ in range(4):
                loss = net(x).square().mean()
                opt.zero_grad(); loss.backward(); opt.step(); sched.step()
        """,
        truth=Expect(kind="nan", phase="optimizer", step=2, backward=3, tensor=frozenset({"weight", "bias"})),
    ),
    Case(
        name="rebound_before_a_with",
        setup="""
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
X = torch.rand(12, 3) + 0.1
Y = torch.randint(2, (12,))
X[6] = 0
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=4)
""",
        cell="""
for x, y in loader:
    x = x / x.amax(1, keepdim=True)  # <- here
    with torch.autocast("cpu", enabled=False):
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
""",
        truth=Expect(kind="nan", phase="loss", op="div", module=None, step=1, rows=(2,), diagnosis="div_zero"),
    ),
    Case(
        name="value_gradient_normalised_in_a_parameter_hook",
        setup="""
            model = nn.Linear(2, 1, bias=False)
            model.weight.register_hook(lambda g: g / g.norm())  # <- here
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2) for _ in range(4)]
            data[2].zero_()
        """,
        cell="""
            for x in data:
                loss = model(x).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="backward", op=ANY, line=ANY, step=2, reproduced=ANY),
    ),
    Case(
        name="nothing_generate_with_a_language_model",
        needs="transformers",
        setup="""
            from transformers import GPT2Config, GPT2LMHeadModel
            config = GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
            model = GPT2LMHeadModel(config).eval()
            ids = torch.randint(1, 20, (2, 4))
        """,
        cell="""
            tokens = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=True, top_k=4, top_p=0.9, pad_token_id=0
            )
        """,
        truth=Nothing(steps=0, backwards=0),
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
)
