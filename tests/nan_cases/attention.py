"""Softmax over nothing, and masks that say more than was meant."""

from tests.nan_cases import slugs
from tests.nan_cases.case import Case, Expect

_LOOP = """
    for x, mask in batches:
        loss = model(x, mask).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""

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
        cell=_LOOP,
        truth=Expect(kind="nan", phase="forward", op="_softmax", module="attn", step=1, rows=(2,), diagnosis=slugs.MASKED_ROW),
    ),
    Case(
        name="attention_multi_head_with_weights",
        setup="""
            class Block(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
                def forward(self, x, padding):
                    out, weight = self.attn(x, x, x, key_padding_mask=padding, need_weights=True)  # <- here
                    return out
            model = Block()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            batches = [(torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool)) for _ in range(3)]
            batches[1][1][1] = True
        """,
        cell=_LOOP,
        # Heads are folded into the batch: rows 2 and 3 of four are the second sequence.
        truth=Expect(
            kind="nan", phase="forward", op="_softmax", module="attn", step=1, rows=frozenset({(1,), (2, 3)}), diagnosis=slugs.MASKED_ROW
        ),
    ),
    Case(
        name="attention_two_full_mask_planes",
        setup="""
            class Bias(nn.Module):
                def forward(self, window, padding):
                    low = torch.finfo(torch.float32).min
                    a = (~window).float() * low
                    b = (~padding).float()[:, None, :] * low
                    return a + b  # <- here
            class Attention(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.q, self.k, self.bias = nn.Linear(4, 4), nn.Linear(4, 4), Bias()
                def forward(self, x, window, padding):
                    scores = self.q(x) @ self.k(x).mT + self.bias(window, padding)
                    return torch.softmax(scores, -1) @ x
            model = Attention()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(2, 3, 4)
            window = torch.eye(3, dtype=torch.bool)
            window[1] = False
            padding = torch.tensor([[True, True, True], [False, False, False]])
        """,
        cell="""
            loss = model(x, window, padding).square().mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="add", module="bias", rows=(1,), diagnosis=slugs.MASK_SUM),
    ),
    Case(
        name="attention_legit_mask_and_a_bad_derivative",
        setup="""
            class Attention(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.q = nn.Linear(4, 4)
                def forward(self, x):
                    bias = torch.full((3, 3), float("-inf")).triu(1)
                    return (self.q(x) @ x.mT + bias).softmax(-1)
            model = Attention()
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.randn(2, 3, 4)
        """,
        cell="""
            weight = model(x)
            plain = (weight * weight.log()).sum(-1)  # <- here
            entropy = -torch.nan_to_num(plain)
            loss = entropy.mean()
            loss.backward()
            opt.step()
        """,
        # Weights behind the mask are exactly 0.
        truth=Expect(
            kind=frozenset({"nan", "inf"}),
            phase=frozenset({"forward", "loss", "backward"}),
            op=frozenset({"log", "mul"}),
            module=None,
            rows=(0, 1),
        ),
    ),
    Case(
        name="attention_unused_nan_branch_and_a_real_bug",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin, self.gate = nn.Linear(3, 3), nn.Linear(3, 1)
                def forward(self, x):
                    h = self.lin(x)
                    unused = torch.log(-h.abs() - 1)
                    self.probe = unused
                    gate = self.gate(x).squeeze(-1) * 1e3
                    return h.sum(-1) * torch.exp(gate)  # <- here
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.zeros(4, 3)
            with torch.no_grad():
                model.gate.weight.fill_(1.0); model.gate.bias.zero_()
            x[3] = 1.0
        """,
        cell="""
            loss = model(x).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="exp", module="", rows=(3,)),
    ),
    Case(
        name="attention_log_softmax_over_an_empty_choice",
        setup="""
            policy = nn.Linear(3, 4)
            opt = torch.optim.SGD(policy.parameters(), lr=0.1)
            states = [torch.randn(2, 3) for _ in range(3)]
            legal = [torch.ones(2, 4, dtype=torch.bool) for _ in range(3)]
            legal[2][0] = False
        """,
        cell="""
            for state, moves in zip(states, legal):
                logits = torch.where(moves, policy(state), torch.tensor(float("-inf")))
                log_p = F.log_softmax(logits, -1)  # <- here
                loss = -log_p[:, 0].sum()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="_log_softmax", module=None, step=2, rows=(0,), diagnosis=slugs.MASKED_ROW),
    ),
    Case(
        name="attention_score_overflows_before_the_mask",
        setup="""
            class Attention(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.q, self.k = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
                def forward(self, x):
                    hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
                    scores = self.q(x) @ self.k(x).mT  # <- here
                    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ x
            model = Attention()
            with torch.no_grad():
                model.q.weight.fill_(1e10); model.k.weight.fill_(1e10)
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            x = torch.ones(2, 3, 2)
            x[1] *= 1e10
        """,
        cell="""
            loss = model(x).mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="bmm", module="", rows=(1,)),
    ),
)
