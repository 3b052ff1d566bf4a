"""Data that the step made, over what they were made of."""

from tests.nan_cases.case import Case, Expect

CASES = (
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
)
