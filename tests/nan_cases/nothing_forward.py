"""Nothing is wrong: infinities and NaNs that stay where they were meant to be, inside ops and inference."""

from tests.nan_cases.case import Case, Nothing

CASES = (
    Case(
        name="nothing_integer_only_model",
        setup="""
            class Count(nn.Module):
                def forward(self, ids):
                    return torch.bincount(ids.flatten(), minlength=5)
            model = Count()
            ids = torch.tensor([[1, 2], [3, 3]])
        """,
        cell="""
            total = sum(model(ids) for _ in range(3))
            flags = model(ids) > 0
        """,
        truth=Nothing(steps=0, backwards=0),
    ),
    Case(
        name="nothing_hessian_of_a_linear_branch",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(3, 2, requires_grad=True)
        """,
        cell="""
            out = model(x) + x.square().sum(1, keepdim=True)
            first, = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = (first * first).sum() + torch.autograd.functional.hessian(lambda t: (t * 2).sum(), torch.ones(2)).sum()
            loss.backward()
            opt.step()
        """,
        # ZeroTensors appear on the way: looking into one kills the process.
        truth=Nothing(steps=1),
    ),
    Case(
        name="nothing_vmap_and_func_grad",
        setup="""
            model = nn.Linear(2, 1)
            params = dict(model.named_parameters())
            def one(params, x):
                return torch.func.functional_call(model, params, (x,)).square().sum()
            x = torch.randn(3, 2)
        """,
        cell="""
            per_sample = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(params, x)
            sizes = {name: value.shape for name, value in per_sample.items()}
        """,
        truth=Nothing(steps=0, backwards=0, problems=True),
    ),
    Case(
        name="nothing_quantised_and_meta_modules",
        setup="""
            tiny = nn.Linear(2, 2, device="meta")
            q = torch.quantize_per_tensor(torch.randn(2, 2), 0.1, 0, torch.qint8)
            class Passes(nn.Module):
                def forward(self, x):
                    return x
            model = Passes()
        """,
        cell="""
            out = model(q)
            shape = tiny(torch.empty(3, 2, device="meta")).shape
            eighth = model(torch.randn(3).to(torch.float8_e4m3fn))
            nested = model(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
            empty = model(torch.empty(0, 3))
            nothing = model(None)
        """,
        truth=Nothing(steps=0, backwards=0, problems=True),
    ),
)
