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
        name="hard_labels_iterator_is_consumed",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2) for _ in range(5)]
            labels = iter([torch.ones(3, 1), torch.ones(3, 1), torch.zeros(3, 1), torch.ones(3, 1), torch.ones(3, 1)])
        """,
        cell="""
            for x in data:
                out = model(x)
                y = next(labels)
                loss = (out / y).square().mean()  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Problem(kind="inf", phase="loss", op="div", step=2),
    ),
    Case(
        name="hard_noise_from_the_system",
        setup="""
            import os
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            x = torch.rand(3, 2)
            def noise():
                return 1 + int.from_bytes(os.urandom(4), "little") / 2 ** 32
        """,
        cell="""
            for i in range(4):
                out = model(x) * noise()
                loss = torch.log(out.abs() * (i != 2)).mean()  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # The loss is -inf in both runs, whatever the noise: the operands are not the same bits, the birth is.
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=2, rows=(0, 1, 2), reproduced=ANY),
        pure=False,
    ),
    Case(
        name="hard_noise_decides_whether_it_is_bad",
        setup="""
            import itertools
            tick = itertools.count()
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            x = torch.rand(3, 2)
            def luck():
                return 0.0 if next(tick) == 2 else 1.0
        """,
        cell="""
            for _ in range(4):
                out = model(x)
                loss = torch.log(out.square().sum() * luck())
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # Bad once only, by a counter that nobody can put back.
        truth=Problem(kind="inf", phase=ANY, step=2),
    ),
    Case(
        name="hard_list_popped_between_model_and_loss",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            queue = [(torch.rand(3, 2), w) for w in (1.0, 1.0, 0.0, 1.0, 1.0)]
        """,
        cell="""
            while queue:
                out = model(queue[0][0])
                weight = queue.pop(0)[1]
                loss = (out / weight).square().mean()  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Problem(kind="inf", phase="loss", op="div", step=2),
    ),
    Case(
        name="hard_names_deleted_before_backward",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2) for _ in range(4)]
        """,
        cell="""
            for i, x in enumerate(data):
                h = x * 2
                out = model(h)
                loss = torch.log(out.abs() * float(i != 1)).mean()  # <- here
                del h, x, out
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # The last statement of the step deletes what an earlier one needs: a replay has to bring it back.
        truth=Problem(kind="inf", phase="loss", op="log", step=1),
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
        name="hard_global_counter_says_exactly_when",
        setup="""
            counter = {"n": 0}
            history = []
            def schedule():
                counter["n"] += 1
                history.append(counter["n"])
                return 0.0 if counter["n"] == 3 else 1.0
            model = nn.Linear(2, 2)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            x = torch.rand(3, 2)
        """,
        cell="""
            for _ in range(5):
                out = model(x)
                loss = (out.square() / schedule()).mean()  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Problem(kind="inf", phase="loss", op="div", step=2),
    ),
    Case(
        name="hard_batch_changed_in_place_by_the_model",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 1)
                def forward(self, x):
                    x -= 1.0
                    return torch.log(self.lin(x.sqrt()).abs())  # <- here
            model = Net()
            opt = torch.optim.SGD(model.parameters(), lr=0.001)
            data = [torch.rand(3, 2) + 1.5 for _ in range(3)]
            data[1][2] = 0.5
        """,
        cell="""
            for x in data:
                loss = model(x).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # The root of -0.5; run again on what is left of the batch, -1.5.
        truth=Expect(kind="nan", phase="forward", op="sqrt", module="", step=1, rows=frozenset({(2,), (0, 1, 2)}), reproduced=ANY),
        pure=False,
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
        name="hard_gradient_hook_divides_by_zero",
        setup="""
            model = nn.Linear(2, 2)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            x = torch.rand(3, 2)
        """,
        cell="""
            for i in range(4):
                out = model(x)
                out.register_hook(lambda grad, i=i: grad / float(i != 2))
                loss = out.square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # Born in the user's hook on a gradient, between two derivatives.
        truth=Expect(kind="inf", phase="backward", op=ANY, line=ANY, step=2, reproduced=ANY),
    ),
    Case(
        name="hard_prints_and_appends_inside_the_step",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2) for _ in range(4)]
            data[1][0] = float("inf")
            seen, lines = [], []
        """,
        cell="""
            for x in data:
                out = model(x)
                seen.append(len(seen))
                lines.append(f"mean {out.mean().item():.3f}")
                loss = out.square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="data", op=None, step=1, rows=(0,), diagnosis=slugs.BAD_ROW),
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
    Case(
        name="hard_one_liner_with_everything",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = iter([torch.rand(3, 2) + 1 for _ in range(3)] + [torch.zeros(3, 2)] + [torch.rand(3, 2)])
            model.bias.data.zero_(); model.bias.requires_grad_(False)
        """,
        cell="""
            for _ in range(5): opt.zero_grad(); model(next(data)).abs().log().mean().backward(); opt.step()  # <- here
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=3, rows=(0, 1, 2), diagnosis=slugs.LOG_ZERO),
    ),
)
