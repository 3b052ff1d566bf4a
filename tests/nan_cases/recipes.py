"""Training recipes as people write them (VAE, policy gradients, contrastive, graphs, diffusion), each with its well-known fault."""

from tests.nan_cases import slugs
from tests.nan_cases.case import Case, Expect

CASES = (
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
