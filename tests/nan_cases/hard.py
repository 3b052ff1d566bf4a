"""Where a replay cannot be faithful: something true must still be said, and what could not be done."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect, Problem

CASES = (
    Case(
        name="hard_source_not_at_hand",
        setup="""
            model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2) for _ in range(4)]
            import textwrap
            body = textwrap.dedent('''
                for i, x in enumerate(data):
                    out = model(x)
                    loss = torch.log(out - out.detach() + 1 - 2.0 * (i == 2)).mean()
                    opt.zero_grad()
                    loss.backward()
                    opt.step()
            ''')
        """,
        cell="exec(body)",
        truth=Problem(kind="nan", phase="loss", op="log", step=2),
    ),
    Case(
        name="hard_model_class_without_source",
        setup="""
            import textwrap
            exec(textwrap.dedent('''
                class Hidden(nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.lin = nn.Linear(2, 2)
                    def forward(self, x):
                        return torch.log(self.lin(x).abs() * 0)
            '''))
            model = nn.Sequential(Hidden(), nn.Linear(2, 1))
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            x = torch.rand(3, 2)
        """,
        cell="""
            loss = model(x).mean()
            loss.backward()
            opt.step()
        """,
        # The loop's own source is there: the replay works; only the text of the line is missing.
        truth=Expect(kind="inf", phase="forward", op="log", module="0", line=ANY, rows=(0, 1, 2), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="hard_names_rebound_inside_the_step",
        setup="""
            model = nn.Linear(2, 2)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2) for _ in range(4)]
            scale = 1.0
        """,
        cell="""
            for x in data:
                x = model(x)
                scale = scale * 0.5 if scale > 0.25 else 0.0
                x = x.exp() / scale  # <- here
                loss = x.mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # `scale` is read and written in the step: 0.5, 0.25, 0. A replay that starts from its last value still divides by 0.
        truth=Expect(kind="inf", phase="loss", op="div", module=None, step=2, rows=(0, 1, 2), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="hard_generator_of_losses",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2) for _ in range(4)]
            def losses():
                for i, x in enumerate(data):
                    out = model(x)
                    yield torch.log(out.abs() * float(i != 2)).mean()  # <- here
        """,
        cell="""
            for loss in losses():
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # The model's frame is not below the one that calls backward: it is suspended.
        truth=Problem(kind="inf", phase="loss", op="log", step=2),
    ),
    Case(
        name="hard_training_in_a_thread",
        setup="""
            import threading
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2) for _ in range(4)]
            data[2][1] = float("nan")
            failed = []
        """,
        cell="""
            def work():
                try:
                    for x in data:
                        loss = model(x).mean()
                        opt.zero_grad()
                        loss.backward()
                        opt.step()
                except Exception as error:
                    failed.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        """,
        options={"keep_going": True},
        # Nothing is promised about threads but the truth, or a line that says why not.
        truth=Problem(kind="nan", phase="data", step=2, may_miss=True),
        pure=False,
    ),
    Case(
        name="hard_comprehension_calls_the_model",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            parts = [[torch.rand(2, 2) for _ in range(3)] for _ in range(3)]
            parts[1][2][1] = 0.0
            model.bias.data.zero_(); model.bias.requires_grad_(False)
        """,
        cell="""
            for part in parts:
                losses = [model(x).abs().sqrt().mean() for x in part]  # <- here
                loss = sum(losses)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, step=1, rows=(1,), diagnosis=slugs.SQRT_ZERO),
    ),
)
